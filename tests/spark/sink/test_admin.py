"""Tests of operations on sinks, and on queries from queue to queue: each row keeps its one effect."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.spark.sink.small_write import (
    QUEUES,
    bodies_in,
    commit,
    connecting,
    draft,
    drafts_waiting,
    last_decision,
    write_batch,
)
from tests.spark.source.small_query import SmallQuery, send
from truenext.errors import TruenextError
from truenext.model.spark_queues import Decision, Draft, SinkQueues, SinkStatus
from truenext.spark.admin import abandon, find, find_sink, find_source, forget
from truenext.spark.datasource import QueueStreamReader
from truenext.spark.sink.admin import close_sink, list_sinks, publish_decision
from truenext.spark.sink.decision import decide
from truenext.spark.sink.driver import OutdatedBatch
from truenext.spark.source import driver
from truenext.testing import BlockingBroker

SPARK_QUERY = QUEUES.id


@pytest.fixture
def query(here: BlockingBroker, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallQuery]:
    """A query without Spark that reads the queue `orders`, and that writes by `small_write`."""
    monkeypatch.setattr(driver, "READY_SECONDS", 0.05)
    made = SmallQuery(here, maxRowsPerTrigger="2")
    yield made
    made.stop()


def listed(here: BlockingBroker) -> list[SinkStatus]:
    with connecting(here)() as broker:
        return list_sinks(broker)


def read_batch(query: SmallQuery, reader: QueueStreamReader, batch: int) -> list[str]:
    """Read a batch of the source, as a task of the query's batch does."""
    planned = query.plan(reader)
    for each in planned:
        each.plan = each.plan.with_query(SPARK_QUERY, str(batch))
    return query.finish(reader, planned)


def decide_only(here: BlockingBroker, batch: int, drafts: tuple[Draft, ...]) -> None:
    with connecting(here)() as broker:
        assert decide(broker, QUEUES, Decision(batch, drafts), last_decision(here))


def abandoned(here: BlockingBroker, query_id: str) -> tuple[int, int]:
    with connecting(here)() as broker:
        counts = list(abandon(broker, find(broker, query_id)))
    return sum(returned for returned, _ in counts), sum(dropped for _, dropped in counts)


def test_a_sink_is_listed_with_what_it_has_not_published(here: BlockingBroker) -> None:
    assert listed(here) == []
    write_batch(here, 3, "a")
    (status,) = listed(here)
    assert (status.queues, status.rows, status.bytes, status.since_ms) == (QUEUES, 0, 0, 0)
    draft(here, 4, "lost")
    decide_only(here, 4, draft(here, 4, "b", "c", "d"))
    (status,) = listed(here)
    assert status.decision is not None
    assert (status.decision.batch, status.rows) == (4, 3)
    assert status.bytes > 0
    assert status.since_ms > 0


def test_publish_finishes_the_last_decision(here: BlockingBroker) -> None:
    decide_only(here, 0, draft(here, 0, "a", "b", "c"))
    with connecting(here)() as broker:
        assert publish_decision(broker, find_sink(broker, "query-1").queues) == 0
        assert publish_decision(broker, find_sink(broker, "query-1").queues) == 0
    assert bodies_in(here) == ["a", "b", "c"]


def test_publish_of_what_was_not_decided_is_refused(here: BlockingBroker) -> None:
    draft(here, 0, "a")
    with connecting(here)() as broker, pytest.raises(TruenextError, match=r"^query-1 has no decision"):
        publish_decision(broker, QUEUES)


def test_forget_removes_what_is_kept_of_a_query_but_no_row_that_was_decided(here: BlockingBroker) -> None:
    decide_only(here, 0, draft(here, 0, "a"))
    draft(here, 1, "b")
    with connecting(here)() as broker:
        with pytest.raises(TruenextError, match=r"^1 rows of query-1 are decided and not published"):
            forget(broker, find(broker, "query-1"))
        publish_decision(broker, QUEUES)
        forget(broker, find(broker, "query-1"))
        with pytest.raises(TruenextError, match=r"^query 'query-1': there is none"):
            find(broker, "query-1")
    assert bodies_in(here) == ["a"]
    assert drafts_waiting(here) == 0


def test_forgotten_sink_can_be_closed_and_decides_no_batch(here: BlockingBroker) -> None:
    """Fixed: the number of its first decision was used already, and the close was retried for ever."""
    write_batch(here, 0, "a")
    with connecting(here)() as broker:
        forget(broker, find(broker, "query-1"))
        with pytest.raises(OutdatedBatch, match=r"^batch 1 of query-1 cannot be decided: the id was forgotten"):
            write_batch(here, 1, "b")
        assert close_sink(broker, QUEUES) == -1
        with pytest.raises(OutdatedBatch, match=r"^this query was abandoned"):
            write_batch(here, 1, "b")
        assert close_sink(broker, QUEUES) == -1
    assert bodies_in(here) == ["a"]


def test_forget_of_a_sink_is_refused_while_its_source_has_rows(here: BlockingBroker, query: SmallQuery) -> None:
    """Fixed: the source could not be abandoned any more."""
    send(here, *"abc")
    write_batch(here, 0, *read_batch(query, query.reader(), 0))
    with (
        connecting(here)() as broker,
        pytest.raises(TruenextError, match=rf"run `truenext spark abandon {query.end.id}` first$"),
    ):
        forget(broker, find(broker, SPARK_QUERY))
    assert abandoned(here, query.end.id) == (0, 2)


@pytest.mark.parametrize("given", ["q", "query", "other-1"])
def test_query_is_found_by_six_characters_or_its_whole_id(here: BlockingBroker, given: str) -> None:
    write_batch(here, 0, "a")
    with connecting(here)() as broker:
        assert find_sink(broker, "query-").queues == find_sink(broker, "query-1").queues == QUEUES
        with pytest.raises(TruenextError, match="there is none; give a whole ID"):
            find_sink(broker, given)


def test_whole_id_that_begins_another_one_is_found(here: BlockingBroker) -> None:
    """Fixed: several matched, though the error asked for a whole ID."""
    for name in ("report", "report-2"):
        decisions = SinkQueues("main", name)
        with connecting(here)() as broker:
            assert decide(broker, decisions, Decision(0), None)
    with connecting(here)() as broker:
        assert find_sink(broker, "report").queues.id == "report"
        assert find_sink(broker, "report-").queues.id == "report-2"


def test_forget_removes_the_mark_of_a_source_without_rows(here: BlockingBroker, query: SmallQuery) -> None:
    send(here, *"ab")
    reader = query.reader()
    query.run_batch(reader)
    with connecting(here)() as broker:
        with pytest.raises(TruenextError, match=r"has 2 rows in bundles: run `truenext spark abandon` first$"):
            forget(broker, find(broker, query.end.id))
        query.run_to_end(reader)
        forget(broker, find_source(broker, query.end.id))
    assert here.queue(query.end.mark_queue).waiting == 0


def test_a_query_without_its_checkpoint_gives_each_message_its_effect_once(
    here: BlockingBroker, query: SmallQuery
) -> None:
    send(here, *"abcd")
    reader = query.reader()
    first = read_batch(query, reader, 0)
    write_batch(here, 0, *first)
    second = read_batch(query, reader, 1)
    # Killed behind the decision, and the checkpoint is lost.
    decide_only(here, 1, draft(here, 1, *second))
    assert abandoned(here, query.end.id) == (0, 2)
    assert sorted(bodies_in(here)) == [*"abcd"]
    assert bodies_in(here, "orders") == []


def test_a_batch_that_was_not_decided_returns_and_its_drafts_go(here: BlockingBroker, query: SmallQuery) -> None:
    send(here, *"abcd")
    reader = query.reader()
    write_batch(here, 0, *read_batch(query, reader, 0))
    late = draft(here, 1, *read_batch(query, reader, 1))
    assert abandoned(here, query.end.id) == (2, 0)
    assert sorted(bodies_in(here)) == ["a", "b"]
    assert sorted(bodies_in(here, "orders")) == ["c", "d"]
    assert drafts_waiting(here) == 0
    # The driver was asleep, and now decides.
    with pytest.raises(OutdatedBatch, match="this query was abandoned, after batch 0"):
        commit(here, 1, late)
    assert sorted(bodies_in(here)) == ["a", "b"]


def test_a_batch_before_any_decision_returns_and_is_decided_no_more(here: BlockingBroker, query: SmallQuery) -> None:
    send(here, "a")
    late = draft(here, 0, *read_batch(query, query.reader(), 0))
    assert abandoned(here, query.end.id) == (1, 0)
    with pytest.raises(OutdatedBatch, match="this query was abandoned, before its first batch"):
        commit(here, 0, late)
    assert (bodies_in(here), bodies_in(here, "orders")) == ([], ["a"])


def test_a_query_that_has_not_drafted_yet_decides_no_more(here: BlockingBroker, query: SmallQuery) -> None:
    send(here, "a")
    rows = read_batch(query, query.reader(), 0)
    assert abandoned(here, query.end.id) == (1, 0)
    with pytest.raises(OutdatedBatch, match="this query was abandoned"):
        write_batch(here, 0, *rows)
    assert (bodies_in(here), bodies_in(here, "orders")) == ([], ["a"])


def test_two_sources_of_one_query_are_abandoned_one_after_the_other(
    here: BlockingBroker, query: SmallQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(here, *"ab")
    send(here, *"xy", queue="others")
    other = SmallQuery(here, queue="others", maxRowsPerTrigger="2")
    first, second = query.reader(), other.reader()
    write_batch(here, 0, *read_batch(query, first, 0), *read_batch(other, second, 0))
    assert abandoned(here, query.end.id) == (0, 2)
    assert abandoned(here, other.end.id) == (0, 2)
    assert sorted(bodies_in(here)) == [*"abxy"]
    other.stop()


def test_a_sink_alone_can_be_abandoned(here: BlockingBroker) -> None:
    decide_only(here, 0, draft(here, 0, "a"))
    late = draft(here, 1, "b")
    assert abandoned(here, "query-1") == (0, 0)
    with pytest.raises(OutdatedBatch):
        commit(here, 1, late)
    assert bodies_in(here) == ["a"]
