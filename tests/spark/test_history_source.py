"""Tests of `format("truenext")` with `kind=history`: each event is in one batch, once, from a folder and from a running
broker, whatever is killed; and what was deleted is named."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StructType

from tests.contract.naive_history import read_folder, read_parquet
from tests.drawing import each_one_of
from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.spark.queues import run_to_end, send, url
from truenext.errors import ConfigurationError, HistoryError, Refused, TruenextError
from truenext.history.export import export_closed_files
from truenext.history.files import history_files
from truenext.history.schema import COLUMNS
from truenext.model.events import GAP_EVENTS
from truenext.spark.datasource import TruenextDataSource
from truenext.spark.history import places
from truenext.spark.history.options import parse_options
from truenext.spark.history.readers import START, HistoryReader, HistoryStreamReader

ALL = ReadAllAvailable()


def recorded(broker: BrokerProcess) -> list[int]:
    """Return the numbers of all events."""
    folder = broker.data / "history"
    return sorted({each["event"] for each in read_folder(folder) + read_parquet(folder / "events")})


def fill(broker: BrokerProcess, count: int) -> None:
    """Send messages, and wait until the history's files have them."""
    folder = broker.data / "history"

    def accepted() -> int:
        events = read_folder(folder) + read_parquet(folder / "events")
        return len({each["event"] for each in events if each["kind"] == "accepted"})

    before, deadline = accepted(), time.monotonic() + PATIENCE_SECONDS
    send(broker, range(count))
    while accepted() < before + count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def stream(place: dict[str, str], **more: str) -> HistoryStreamReader:
    return HistoryStreamReader(parse_options({"kind": "history", **place, **more}))


def rows(reader: HistoryStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[dict[str, Any]]:
    batches = [batch for share in reader.partitions(start, end) for batch in reader.read(share)]
    return pa.Table.from_batches(batches).to_pylist() if batches else []


def numbers(reader: HistoryStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    return [each["event"] for each in rows(reader, start, end)]


@pytest.fixture(params=each_one_of(["url", "path"], ["broker", "folder"]))
def place(request: pytest.FixtureRequest, broker: BrokerProcess) -> Callable[[], dict[str, str]]:
    """Function that returns the options of the broker's history."""
    return lambda: {"url": url(broker)} if request.param == "url" else {"path": str(broker.data)}


def test_each_event_is_in_one_batch_through_a_kill_and_an_export(
    broker: BrokerProcess, place: Callable[[], dict[str, str]]
) -> None:
    found: list[int] = []
    last: list[int] = []
    before: dict[str, Any] = START
    offset: dict[str, Any] = START
    for number in range(3):
        fill(broker, 30)
        reader = stream(place())
        if number:
            # The batch of the run that was killed, once more.
            assert numbers(reader, before, offset) == last
        while (end := reader.latestOffset(offset, ReadMaxRows(40))) != offset:
            before, last = offset, numbers(reader, offset, end)
            found += last
            offset = end
        reader.stop()
        broker.kill()
        broker.start()
    assert found == [each for each in recorded(broker) if each < offset["event"]]
    assert found[-1] > 2 * GAP_EVENTS
    list(export_closed_files(broker.data / "history"))
    reader = stream(place())
    assert numbers(reader, START, offset) == found
    reader.stop()


def test_batch_reads_all_that_the_history_has(broker: BrokerProcess, place: Callable[[], dict[str, str]]) -> None:
    fill(broker, 30)
    reader = HistoryReader(parse_options({"kind": "history", **place()}))
    batches = [batch for share in reader.partitions() for batch in reader.read(share)]
    found = pa.Table.from_batches(batches)
    events = found["event"].to_pylist()
    assert events == [each for each in recorded(broker) if each <= events[-1]]
    assert found["kind"].to_pylist().count("accepted") == 30


def test_deleted_events_are_named_and_missing_if_wanted(
    broker: BrokerProcess, place: Callable[[], dict[str, str]]
) -> None:
    fill(broker, 30)
    reader = stream(place())
    first = reader.latestOffset(START, ReadMaxRows(5))
    reader.stop()
    broker.restart(is_clean=True)
    fill(broker, 5)
    folder = broker.data / "history"
    for path in (*history_files(folder)[:-1], *folder.glob("events/*/*.parquet")):
        path.unlink()
    reader = stream(place())
    second = reader.latestOffset(first, ALL)
    begins = recorded(broker)[0]
    with pytest.raises(HistoryError, match=f"events 6 to {begins - 1:,} were deleted"):
        reader.partitions(first, second)
    # Not even if the batch was planned before: it would have other rows than the first time.
    with pytest.raises(HistoryError, match=f"events 1 to {begins - 1:,} were deleted"):
        reader.partitions(START, second)
    reader.stop()
    reader = stream(place(), failOnDataLoss="false")
    assert numbers(reader, first, second) == [each for each in recorded(broker) if each < second["event"]]
    reader.stop()


def test_events_that_are_deleted_while_a_batch_is_read_are_named(
    broker: BrokerProcess, place: Callable[[], dict[str, str]]
) -> None:
    fill(broker, 30)
    broker.restart(is_clean=True)
    fill(broker, 5)
    reader = stream(place())
    shares = reader.partitions(START, reader.latestOffset(START, ALL))
    folder = broker.data / "history"
    for path in (*history_files(folder)[:-1], *folder.glob("events/*/*.parquet")):
        path.unlink()
    with pytest.raises(HistoryError, match=r"events 1 to .* were deleted"):
        list(reader.read(shares[0]))
    reader.stop()


def test_history_of_another_broker_is_refused_by_its_name(broker: BrokerProcess) -> None:
    reader = stream({"url": url(broker)})
    offset = reader.latestOffset(START, ALL)
    with pytest.raises(ConfigurationError, match="deadbeef, and this is that of"):
        reader.latestOffset(offset | {"store": "deadbeef"}, ALL)
    with pytest.raises(ConfigurationError, match="an older copy"):
        reader.latestOffset(offset | {"event": offset["event"] + 50}, ALL)
    with pytest.raises(ConfigurationError, match="offsets of version 2"):
        reader.latestOffset(offset | {"v": 2}, ALL)
    reader.stop()


def test_file_that_has_lost_its_end_is_waited_for(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(broker, 30)
    reader = stream({"path": str(broker.data)})
    offset = reader.latestOffset(START, ALL)
    broker.kill()
    (path,) = history_files(broker.data / "history")
    path.write_bytes(path.read_bytes()[:-100])
    reader = stream({"path": str(broker.data)})
    assert reader.latestOffset(offset, ALL) == offset
    monkeypatch.setattr(places, "WRITE_SECONDS", 0.2)
    with pytest.raises(HistoryError, match="have happened, but are not in the history's files"):
        numbers(reader, START, offset)
    broker.start()


def test_query_available_now_ends_with_what_was_there(broker: BrokerProcess) -> None:
    send(broker, range(10))
    reader = stream({"url": url(broker)})
    reader.prepareForTriggerAvailableNow()
    end = reader.latestOffset(START, ReadMaxRows(4))
    send(broker, range(10))
    total = len(numbers(reader, START, end))
    while (later := reader.latestOffset(end, ReadMaxRows(4))) != end:
        total, end = total + len(numbers(reader, end, later)), later
    assert reader._next is not None and total == reader._next - 1
    assert (reader.reportLatestOffset() or {})["event"] > end["event"]
    reader.stop()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "one of two options: path, a broker's data folder, or url"),
        ({"path": "/a", "url": "stomp://127.0.0.1"}, "one of two options"),
        ({"path": "s3a://bucket/a"}, "is an address"),
        ({"path": __file__}, "is a file: name a broker's data folder"),
        ({"path": "/a", "queue": "orders"}, "option queue is unknown"),
        ({"path": "/a", "failOnDataLoss": "perhaps"}, "must be true or false"),
    ],
)
def test_invalid_options_are_named(options: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        parse_options({"kind": "history", **options})


def test_other_kinds_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="option kind is 'messages', and must be history"):
        TruenextDataSource({"kind": "messages", "url": "stomp://127.0.0.1"}).schema()


def test_broker_without_history_and_folder_without_one_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, ["--no-history"]).running() as broker:
        with pytest.raises(Refused, match="this broker has no history, as it was started with --no-history"):
            stream({"url": url(broker)}, patience="0").latestOffset(START, ALL)
        with pytest.raises(ConfigurationError, match="no history in"):
            stream({"path": str(broker.data)}).latestOffset(START, ALL)


def test_unreachable_broker_is_named(broker: BrokerProcess) -> None:
    address = url(broker)
    broker.stop()
    with pytest.raises(TruenextError, match="no broker"):
        stream({"url": address}, patience="0").latestOffset(START, ALL)
    broker.start()


def test_columns_are_those_of_the_history(broker: BrokerProcess) -> None:
    source = TruenextDataSource({"kind": "history", "url": url(broker)})
    assert source.schema().names == [each.name for each in COLUMNS]
    assert isinstance(source.streamReader(source.schema()), HistoryStreamReader)
    assert isinstance(source.reader(source.schema()), HistoryReader)
    with pytest.raises(ConfigurationError, match="the columns are fixed"):
        source.streamReader(StructType([]))


@pytest.mark.skipif(not os.environ.get("TRUENEXT_KILLS"), reason="takes ten seconds: make spark")
def test_spark_reads_on_from_its_checkpoint(spark: SparkSession, broker: BrokerProcess, tmp_path: Path) -> None:
    spark.dataSource.register(TruenextDataSource)
    for _ in range(2):
        send(broker, range(20))
        history = spark.readStream.format("truenext").options(kind="history", url=url(broker), maxRowsPerTrigger=25)
        written = history.load().writeStream.format("parquet").trigger(availableNow=True)
        run_to_end(written.option("checkpointLocation", str(tmp_path / "c")).start(str(tmp_path / "events")))
        # Parquet files that the query has written are a history for whoever reads them.
        found = sorted(row.event for row in spark.read.parquet(str(tmp_path / "events")).select("event").collect())
        assert found == list(range(1, len(found) + 1))
        assert len(found) > 20
        broker.restart(is_clean=True)
