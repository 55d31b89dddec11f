"""Tests of the number of messages with which a batch begins, and of the progress that the driver reports."""

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from tests.spark.source.small_query import SmallQuery, send
from truenext.clock import monotonic
from truenext.spark.source import driver
from truenext.testing import BlockingBroker

NewQuery = Callable[..., SmallQuery]


class Clock:
    """Clock of the driver, which a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = monotonic
        self._ahead_s = 0.0
        monkeypatch.setattr(driver, "monotonic", lambda: self._now() + self._ahead_s)

    def advance(self, seconds: float) -> None:
        self._ahead_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_batch_begins_with_the_least_number_of_messages_or_after_the_longest_delay(
    here: BlockingBroker, new_query: NewQuery, clock: Clock
) -> None:
    query = new_query(minRowsPerTrigger="3", maxTriggerDelay="10m")
    reader = query.reader()
    send(here, "a")
    # As with Kafka, nothing delays the first batch of a run.
    assert query.run_batch(reader) == ["a"]
    send(here, *"bc")
    assert query.run_batch(reader) == []
    send(here, "d")
    assert query.run_batch(reader) == ["b", "c", "d"]
    send(here, "e")
    clock.advance(599.0)
    assert query.run_batch(reader) == []
    clock.advance(2.0)
    assert query.run_batch(reader) == ["e"]


def test_delay_begins_again_when_it_is_over_and_no_message_waits(
    here: BlockingBroker, new_query: NewQuery, clock: Clock
) -> None:
    query = new_query(minRowsPerTrigger="2", maxTriggerDelay="10m")
    reader = query.reader()
    assert query.run_batch(reader) == []
    clock.advance(601.0)
    assert query.run_batch(reader) == []
    send(here, "a")
    assert query.run_batch(reader) == []
    clock.advance(601.0)
    assert query.run_batch(reader) == ["a"]


def test_batch_that_waits_for_more_messages_has_cleared_the_one_before(
    here: BlockingBroker, new_query: NewQuery
) -> None:
    query = new_query(minRowsPerTrigger="2")
    reader = query.reader()
    send(here, "a")
    query.run_batch(reader)
    assert here.queue(query.end.bundle_queue(0)).waiting == 1
    assert query.run_batch(reader) == []
    assert here.queue(query.end.bundle_queue(0)).waiting == 0


def test_messages_that_are_too_few_are_not_delivered_to_the_driver(here: BlockingBroker, new_query: NewQuery) -> None:
    query = new_query(minRowsPerTrigger="2")
    reader = query.reader()
    query.run_batch(reader)
    send(here, "a")
    for _ in range(3):
        query.run_batch(reader)
    send(here, "b")
    query.run_batch(reader)
    # One to the driver, one to the task.
    assert [row["deliveries"] for row in query.rows[-1]] == [2, 1]


def test_available_now_and_once_read_fewer_messages(here: BlockingBroker, new_query: NewQuery) -> None:
    query = new_query(minRowsPerTrigger="2", maxRowsPerTrigger="2")
    send(here, *"abc")
    now = query.reader()
    now.prepareForTriggerAvailableNow()
    assert query.run_to_end(now) == ["a", "b", "c"]
    reader = query.reader()
    query.run_batch(reader)
    send(here, "d")
    start = query.start
    assert reader.latestOffset(start, reader.getDefaultReadLimit()) == start
    assert reader.latestOffset(start, ReadAllAvailable())["batch"] == start["batch"] + 1


def test_progress_has_the_number_of_waiting_messages_and_how_long_the_next_has_waited(
    here: BlockingBroker, new_query: NewQuery
) -> None:
    query = new_query()
    reader = query.reader()
    assert reader.reportLatestOffset() == {"waiting": 0}
    send(here, *"ab")
    here.advance(seconds=0.0)
    query.plan(reader)
    report: dict[str, Any] | None = query.reader().reportLatestOffset()
    assert report == {"waiting": 2}
    report = reader.reportLatestOffset()
    assert report is not None
    # The number is at most ten seconds old.
    assert report["waiting"] == 0
    assert 0 <= report["waitedMs"] < 60_000
    query.finish(reader, query.replan(reader))
    assert query.run_batch(reader) == []
    assert reader.reportLatestOffset() == {"waiting": 0}
