"""Tests that a query, and a sink, go on with what an earlier version has left in the broker and in a checkpoint."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.broker_process import BrokerProcess
from tests.kept.unpacked import each_archive, unpack
from tests.spark.sink import small_write
from tests.spark.source.small_query import SmallQuery
from truenext import blocking
from truenext.model.spark_queues import Decision


@pytest.fixture
def kept_broker(archive: Path, tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(unpack(archive, tmp_path)).running() as broker:
        yield broker


@each_archive
def test_query_goes_on_with_a_kept_checkpoint(kept_broker: BrokerProcess, tmp_path: Path) -> None:
    """C30.8: its last batch has the same rows again, and the next one the rows behind."""
    query = SmallQuery(kept_broker, queue="for.spark")  # type: ignore[arg-type]
    query.offsets = json.loads((tmp_path / "query.json").read_text())
    reader = query.reader()
    assert query.finish(reader, query.replan(reader)) == ["row 5", "row 6"]
    assert query.run_to_end(reader) == ["row 7"]
    query.stop()


@each_archive
def test_sink_goes_on_behind_a_kept_decision(kept_broker: BrokerProcess) -> None:
    """C30.8: a batch that was published is not published again, and the next one is."""
    last = small_write.last_decision(kept_broker)  # type: ignore[arg-type]
    assert isinstance(last, Decision)
    assert last.batch == 0
    for batch in (0, 1):
        small_write.write_batch(kept_broker, batch, f"again {batch}")  # type: ignore[arg-type]
    with blocking.connect(kept_broker.url) as connection:
        assert [each.text for each in connection.browse("/queue/out")] == ["published 0", "published 1", "again 1"]
