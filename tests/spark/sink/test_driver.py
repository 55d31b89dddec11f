"""Tests of the sink's driver and tasks: each batch is published once, as its last decision says."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from tests.spark.sink.small_write import (
    QUEUES,
    bodies_in,
    bundles_of,
    commit,
    connecting,
    draft,
    drafts_waiting,
    last_decision,
    write_batch,
)
from truenext.errors import ConnectionLost, TruenextError
from truenext.model.spark_queues import CLOSED_BATCH, Decision, SinkQueues
from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.broker.patience import Patience
from truenext.spark.sink import driver, publish
from truenext.spark.sink.admin import close_sink
from truenext.spark.sink.decision import decide
from truenext.spark.sink.draft import write_drafts
from truenext.spark.sink.driver import OutdatedBatch, commit_batch
from truenext.spark.sink.publish import HeldByAnother
from truenext.spark.sink.rows import SinkBundle
from truenext.testing import BlockingBroker
from truenext.wire.stomp.frame import Frame

MOMENTS: tuple[Literal["before", "after"], ...] = ("before", "after")
"""Moments of a COMMIT at which its connection is lost."""


def test_drafts_are_not_published_before_the_batch_is_committed(here: BlockingBroker) -> None:
    drafts = draft(here, 0, *"abc")
    assert [(each.partition, each.bundles, each.rows) for each in drafts] == [(0, 2, 3)]
    assert bodies_in(here) == []
    commit(here, 0, drafts)
    assert bodies_in(here) == ["a", "b", "c"]
    assert drafts_waiting(here) == 0


def test_partitions_are_published_in_their_order(here: BlockingBroker) -> None:
    drafts = [draft(here, 0, f"{partition}a", f"{partition}b", partition=partition) for partition in (2, 0, 1)]
    commit(here, 0, tuple(itertools.chain(*drafts)))
    assert bodies_in(here) == ["0a", "0b", "1a", "1b", "2a", "2b"]


def test_decisions_queue_holds_only_the_last_decision(here: BlockingBroker) -> None:
    for batch in range(3):
        write_batch(here, batch, str(batch))
        assert here.queue(QUEUES.decisions).waiting == 1
    last = last_decision(here)
    assert last is not None
    assert last.batch == 2


def test_a_repeated_batch_publishes_nothing_more_whatever_its_rows_are(here: BlockingBroker) -> None:
    write_batch(here, 0, "a", "b")
    write_batch(here, 0, "c", "d", "e")
    commit(here, 0, ())
    assert bodies_in(here) == ["a", "b"]
    assert drafts_waiting(here) == 0


def test_a_repeated_batch_publishes_what_is_left_of_its_decision(here: BlockingBroker) -> None:
    drafts = draft(here, 0, *"abcdef")
    with connecting(here)() as broker:
        assert decide(broker, QUEUES, Decision(0, drafts), None)
    write_batch(here, 0, "x")
    assert bodies_in(here) == [*"abcdef"]


def test_a_decision_that_was_not_published_is_published_before_the_next_one(here: BlockingBroker) -> None:
    drafts = draft(here, 0, "a")
    with connecting(here)() as broker:
        assert decide(broker, QUEUES, Decision(0, drafts), None)
    write_batch(here, 1, "b")
    assert bodies_in(here) == ["a", "b"]


def test_a_batch_without_rows_decides_nothing_and_finishes_the_last_decision(here: BlockingBroker) -> None:
    commit(here, 0, ())
    assert last_decision(here) is None
    drafts = draft(here, 1, "a")
    with connecting(here)() as broker:
        assert decide(broker, QUEUES, Decision(1, drafts), None)
    commit(here, 2, ())
    assert bodies_in(here) == ["a"]
    last = last_decision(here)
    assert last is not None
    assert last.batch == 1


def test_a_batch_behind_a_later_one_is_refused_and_publishes_nothing(here: BlockingBroker) -> None:
    write_batch(here, 5, "a")
    with pytest.raises(OutdatedBatch, match=r"^batch 4 is older than batch 5, which is published: the checkpoint is"):
        write_batch(here, 4, "b")
    assert bodies_in(here) == ["a"]


def test_a_batch_of_an_abandoned_query_is_refused(here: BlockingBroker) -> None:
    write_batch(here, 3, "a")
    late = draft(here, 4, "b")
    with connecting(here)() as broker:
        assert [close_sink(broker, QUEUES), close_sink(broker, QUEUES)] == [3, 3]
    with pytest.raises(OutdatedBatch, match=r"^this query was abandoned, after batch 3: start it with"):
        commit(here, 4, late)
    assert bodies_in(here) == ["a"]
    assert drafts_waiting(here) == 0


def test_drafts_of_failed_attempts_are_dropped_and_those_of_a_later_batch_are_not(here: BlockingBroker) -> None:
    draft(here, 0, *"xyz", partition=1)
    later = draft(here, 1, "b", partition=1)
    write_batch(here, 0, "a")
    assert drafts_waiting(here) == 1
    commit(here, 1, later)
    assert bodies_in(here) == ["a", "b"]


def test_a_commit_in_doubt_is_decided_once(here: BlockingBroker) -> None:
    for batch, when in enumerate(MOMENTS):
        drafts = draft(here, batch, when)
        here.lose_commit(when)
        commit(here, batch, drafts, patience_s=60)
    assert bodies_in(here) == ["before", "after"]


def test_the_commit_of_a_bundle_in_doubt_publishes_its_rows_once(here: BlockingBroker) -> None:
    for batch, when in enumerate(MOMENTS):
        drafts = draft(here, batch, *(f"{when} {number}" for number in range(6)))
        with connecting(here)() as broker:
            assert decide(broker, QUEUES, Decision(batch, drafts), last_decision(here))
        here.lose_commit(when)
        commit(here, batch, drafts, patience_s=60)
    assert sorted(bodies_in(here)) == sorted(f"{when} {number}" for when in ("before", "after") for number in range(6))


def test_a_bundle_whose_receipt_is_lost_is_published_once(here: BlockingBroker) -> None:
    """Fixed by design: bundles after the last confirmed one of a connection are sent again under another name."""
    broken: list[BrokerConnection] = []

    def connect() -> BrokerConnection:
        connection = connecting(here)()
        if not broken:
            broken.append(connection)
        return connection

    def disturbed() -> Iterator[SinkBundle]:
        for number, bundle in enumerate(bundles_of(*"abcdefgh", rows=1)):
            if number == 4:
                # The broker has them, and their receipts are not read.
                broken[0].flush()
                here.queue("nothing")
                here.drop(broken[0]._link.session_id)
            yield bundle

    drafts = write_drafts(disturbed(), QUEUES, 0, 0, connect, Patience(60)).drafts
    assert len(drafts) == 2
    assert sum(each.rows for each in drafts) == 8
    assert drafts_waiting(here) > 8
    commit(here, 0, drafts)
    assert bodies_in(here) == [*"abcdefgh"]
    assert drafts_waiting(here) == 0


def test_a_task_waits_for_room_and_then_goes_on(here: BlockingBroker) -> None:
    here.fill_disk()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            here.free_disk()

    patience = Patience(600, sleep=sleep)
    drafts = write_drafts(bundles_of(*"abc"), QUEUES, 0, 0, connecting(here), patience).drafts
    assert len(slept) == 3
    commit(here, 0, drafts)
    assert bodies_in(here) == ["a", "b", "c"]


def test_a_task_whose_patience_ends_fails_with_the_reason(here: BlockingBroker) -> None:
    here.fill_disk()
    with pytest.raises(TruenextError, match=r"the query has tried for 0 s \(option patience\)"):
        draft(here, 0, "a")


def test_a_task_without_rows_does_not_connect() -> None:
    def connect() -> BrokerConnection:
        raise ConnectionLost("no broker")

    written = write_drafts(iter(()), QUEUES, 0, 0, connect, Patience(0))
    assert (written.id, written.drafts) == ("query-1", ())


def test_a_bundle_that_another_run_holds_is_waited_for(here: BlockingBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = draft(here, 0, *"abcdef")
    holder = connecting(here)()
    holder.subscribe_to_pull("hold", f"/queue/{QUEUES.drafts(0)}", "client-individual")
    holder.pull("hold", 1)
    assert holder.answer("hold").headers["spark_bundle"] == "0"
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            holder.__exit__(None)

    monkeypatch.setattr("truenext.spark.sink.publish.time.sleep", sleep)
    commit(here, 0, drafts)
    assert len(slept) == 3
    assert sorted(bodies_in(here)) == [*"abcdef"]


def test_a_bundle_that_another_run_does_not_give_back_is_an_error_and_is_published_later(
    here: BlockingBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "HELD_SECONDS", 0.3)
    drafts = draft(here, 0, *"ab")
    holder = connecting(here)()
    holder.subscribe_to_pull("hold", f"/queue/{QUEUES.drafts(0)}", "client-individual")
    holder.pull("hold", 1)
    holder.answer("hold")
    with pytest.raises(HeldByAnother, match=r"^1 messages of Spark\.sink\.main\.query-1\.0 were not available"):
        commit(here, 0, drafts)
    holder.__exit__(None)
    commit(here, 0, drafts)
    assert bodies_in(here) == ["a", "b"]


def test_a_decision_that_another_run_holds_is_waited_for(here: BlockingBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    write_batch(here, 7, "a")
    holder = connecting(here)()
    holder.subscribe_to_pull("hold", f"/queue/{QUEUES.decisions}", "client")
    holder.pull("hold", 1)
    holder.answer("hold")
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            holder.__exit__(None)

    monkeypatch.setattr("truenext.spark.sink.publish.time.sleep", sleep)
    # A batch without rows would be done if there were no decision.
    with pytest.raises(OutdatedBatch):
        commit(here, 3, ())
    assert slept
    assert bodies_in(here) == ["a"]


def test_a_driver_that_was_overtaken_before_its_decision_publishes_nothing(here: BlockingBroker) -> None:
    drafts = draft(here, 0, "old")

    def connect() -> BrokerConnection:
        # Between the tasks of the old driver and its commit another one does the batch, and the next.
        if last_decision(here) is None:
            write_batch(here, 0, "new")
        return connecting(here)()

    commit_batch(QUEUES, 0, drafts, connect, Patience(0))
    assert bodies_in(here) == ["new"]
    write_batch(here, 1, "next")
    with pytest.raises(OutdatedBatch):
        commit(here, 0, drafts)
    assert bodies_in(here) == ["new", "next"]


def test_a_driver_that_is_overtaken_again_and_again_decides_in_the_end(
    here: BlockingBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed: everything since the first look counted as waiting for one decision, also the publication of others."""
    monkeypatch.setattr(publish, "HELD_SECONDS", publish._LOOK_SECONDS)
    write_batch(here, 0, "0")
    drafts = draft(here, 9, "9")
    overtaking = iter([1, 2, 3])

    def decide_late(*arguments: Any, **options: Any) -> bool:
        if (batch := next(overtaking, None)) is not None:
            with monkeypatch.context() as patch:
                patch.setattr(driver, "decide", decide)
                write_batch(here, batch, str(batch))
            time.sleep(1.5 * publish.HELD_SECONDS)
        return decide(*arguments, **options)

    monkeypatch.setattr(driver, "decide", decide_late)
    commit(here, 9, drafts)
    assert bodies_in(here) == ["0", "1", "2", "3", "9"]


def test_a_decision_that_cannot_be_replaced_is_an_error_and_is_replaced_later(
    here: BlockingBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "HELD_SECONDS", 0.3)
    write_batch(here, 0, "a")
    drafts = draft(here, 1, "b")
    with connecting(here)() as broker:
        broker.ask("pause", {"queue": QUEUES.decisions})
        with pytest.raises(HeldByAnother, match=r"^the decision of query-1 cannot be replaced: end another run"):
            commit(here, 1, drafts)
        broker.ask("resume", {"queue": QUEUES.decisions})
    commit(here, 1, drafts)
    assert bodies_in(here) == ["a", "b"]


def test_query_of_the_same_id_in_another_space_is_another_query(here: BlockingBroker) -> None:
    """Fixed: numbers were derived from the id alone, so that a second space could decide nothing."""
    write_batch(here, 1, "a")
    other = SinkQueues("other", QUEUES.id)
    drafts = write_drafts(bundles_of("b"), other, 1, 0, connecting(here), Patience(0)).drafts
    commit_batch(other, 1, drafts, connecting(here), Patience(0))
    assert bodies_in(here) == ["a", "b"]


def test_two_first_decisions_of_different_batches_exclude_each_other(here: BlockingBroker) -> None:
    """Fixed: the decisions had the numbers of their batches, so that both were made, and the earlier one was not
    finished."""
    first, second = draft(here, 0, "a"), draft(here, 1, "b")
    with connecting(here)() as broker, connecting(here)() as other:
        assert not decide_meanwhile(broker, other, Decision(1, second), Decision(0, first))
    assert here.queue(QUEUES.decisions).waiting == 1
    commit(here, 1, second)
    assert bodies_in(here) == ["a", "b"]


def test_a_first_decision_and_the_closing_of_the_sink_exclude_each_other(here: BlockingBroker) -> None:
    """Fixed: `abandon` reported that nothing was published, and then the batch was published."""
    drafts = draft(here, 0, "a")
    with connecting(here)() as broker, connecting(here)() as other:
        assert not decide_meanwhile(broker, other, Decision(CLOSED_BATCH), Decision(0, drafts))
        assert close_sink(broker, QUEUES) == 0
    assert bodies_in(here) == ["a"]


def decide_meanwhile(broker: BrokerConnection, other: BrokerConnection, late: Decision, early: Decision) -> bool:
    """Let `other` make its decision when `broker` has read that there is none, and is about to make a late one."""
    call = broker.call

    def call_late(command: str, headers: dict[str, str]) -> Frame:
        if command == "COMMIT":
            assert decide(other, QUEUES, early, None)
        return call(command, headers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broker, "call", call_late)
        return decide(broker, QUEUES, late, None)


def test_a_bundle_that_returns_while_it_is_counted_is_published(
    here: BlockingBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed: the bundle was counted neither as waiting nor as held, and then dropped."""
    drafts = draft(here, 0, *"ab")
    # Of a failed attempt, so that there is more than one piece to be counted.
    draft(here, 0, "x")
    holder = connecting(here)()
    holder.subscribe_to_pull("hold", f"/queue/{QUEUES.drafts(0)}", "client-individual")
    holder.pull("hold", 1)
    holder.answer("hold")
    ask = BrokerConnection.ask

    def ask_slowly(broker: BrokerConnection, verb: str, question: dict[str, Any] | None = None) -> Any:
        answer = ask(broker, verb, question)
        if verb == "purge" and question is not None and "after" not in question:
            holder.__exit__(None)
        return answer

    monkeypatch.setattr(BrokerConnection, "ask", ask_slowly)
    commit(here, 0, drafts)
    assert bodies_in(here) == ["a", "b"]
    assert drafts_waiting(here) == 0


def test_lost_commits_count_no_attempt(here: BlockingBroker) -> None:
    drafts = draft(here, 0, "a")
    with connecting(here)() as broker:
        assert decide(broker, QUEUES, Decision(0, drafts), None)
    for _ in range(10):
        here.lose_commit("before")
        with pytest.raises(TruenextError):
            commit(here, 0, drafts)
    commit(here, 0, drafts)
    assert bodies_in(here) == ["a"]
    assert here.queue(f"DLQ.{QUEUES.drafts(0)}").waiting == 0
