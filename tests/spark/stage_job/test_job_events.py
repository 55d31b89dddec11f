"""Tests of the events of a stage that is a Spark job."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from pyspark.sql import Row

from truenext.flows.events import decode_lines
from truenext.history.stage_files import stage_files
from truenext.spark.stage_job import events
from truenext.spark.stage_job.events import write_events

ROW = {
    "stage": "price.quote",
    "sequence": 7,
    "message_id": "m",
    "flow_id": "f",
    "trace": "web 1",
    "sender": "shop order.place",
    "parent": "p",
    "attempt": 1,
    "deliveries": 1,
    "accepted_ms": 1_000,
    "is_unreadable": False,
    "is_rejected": False,
}
REJECTED = ROW | {"message_id": "n", "flow_id": "g", "is_rejected": True}

ROWS = [Row(**ROW), Row(**REJECTED)]


def test_batch_is_recorded_once_however_often_it_runs(tmp_path: Path) -> None:
    for began_us in (2_000_000, 9_000_000):
        write_events(tmp_path, "spark query q batch 3", ROWS, began_us, began_us + 500)
    write_events(tmp_path, "spark query q batch 4", ROWS[:1], 9_000_000, 9_000_001)
    first, second = sorted(tmp_path.iterdir())
    assert first.name.startswith(f"{2_000:012x}") and second.name.startswith(f"{9_000:012x}")


def test_recorded_requests_are_executions_from_the_beginning_of_the_batch_to_its_end(tmp_path: Path) -> None:
    write_events(tmp_path, "spark query q batch 3", ROWS, 2_000_000, 2_000_500)
    (file,) = tmp_path.iterdir()
    events = [event for event in decode_lines(file.read_bytes()) if event is not None]
    assert [event.kind for event in events] == ["opened", "started", "completed", "started", "rejected", "closed"]
    assert [event.number for event in events] == [0, 1, 2, 3, 4, 5]
    assert [(each.at, each.total_us) for each in events[1:3]] == [(2_000_000, None), (2_000_500, 500)]


def test_batch_that_is_repeated_has_one_file_also_beside_one_with_the_same_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed: of two batches with the same 32 bits of a hash, as of a million some have, the second had no events."""
    monkeypatch.setattr(events, "blake2b", lambda *_, **__: SimpleNamespace(hexdigest=lambda: "0badcafe"))
    for batch in (1, 2, 1, 2):
        write_events(tmp_path, f"spark query 7 batch {batch}", [], 1_000_000 * batch, 1_500_000 * batch)
    (tmp_path / "0000000000000badcafe-000001.jsonl").write_bytes(b"torn")
    write_events(tmp_path, "spark query 7 batch 2", [], 9_000_000, 9_500_000)
    first = [path.read_bytes().splitlines()[0] for path in stage_files(tmp_path)[1:]]
    assert [msgspec.json.decode(each)["instance"][-1] for each in first] == ["1", "2"]
