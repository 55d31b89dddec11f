"""Tests that history records all events in order, and survives crashes."""

import os
import random
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.contract.naive_history import read, read_folder
from truenext.broker.recovery import recover
from truenext.engine.background.bulk import BulkRequest, Move, Purge
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import BrokerConsumer, ConnectionState, PullRequest
from truenext.engine.state.pages import PageResult
from truenext.engine.state.queue import Entry
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.event_log import EventLog, NoEventLog
from truenext.errors import HistoryError
from truenext.history import export
from truenext.history.check import find_damage, last_batch_chunk
from truenext.history.export import delete_old_files, export_closed_files
from truenext.history.exporter import HistoryExporter
from truenext.history.files import chunk_at, chunks_of_file, history_files
from truenext.history.writer import HistoryWriter
from truenext.model.commands import (
    Abort,
    Ack,
    AckMode,
    Begin,
    Close,
    Commit,
    Nack,
    Release,
    Send,
    Subscribe,
    Unsubscribe,
)
from truenext.model.destination import Destination, DestinationKind, parse_address
from truenext.model.events import (
    FILE,
    FROM_BATCH,
    GAP_EVENTS,
    HISTORY_VERSION,
    MAGIC,
    OLDEST_HISTORY_VERSION,
    SUBSCRIPTION_MODES,
    chunk_position,
    next_event,
)
from truenext.model.message import SentMessage
from truenext.model.policy import Policies, Policy, WhileWaiting
from truenext.store.log import Log
from truenext.store.memory import MemoryStore
from truenext.store.store import Recovered

ORDERS = Destination(DestinationKind.QUEUE, "orders")
HANDLER = Destination(DestinationKind.QUEUE, "handler")
PRIVATE = Destination(DestinationKind.TEMPORARY, "/temp-queue/x/answers", session="x")


class RecordedEngine:
    """An engine, and the history that it has given away."""

    def __init__(self, *, run: int = 1, first_event: int = 1, attempts_max: int = 2, identity: str = "") -> None:
        self.log = EventLog(run=run, first_event=first_event)
        self.engine = Engine(CommitState(self.log), policies=Policies(Policy(attempts_max=attempts_max)))
        self.engine.state.commit_state.tick(1_000_000, 0)
        self.engine.lifespan.start(identity=identity)
        self.chunks: list[bytes] = []
        self.commit()

    def commit(self) -> None:
        self.engine.turn.run()
        while (batch := self.engine.take_batch()) is not None:
            self.chunks.append(batch.history)
            self.engine.store_results.on_committed(batch)
            self.engine.turn.run()

    def session(self, name: str = "x") -> ConnectionState:
        return self.engine.commands.connect(name)

    def send(self, session: ConnectionState, priority: int = 4, *, persistent: bool = True, **more: Any) -> None:
        group = more.get("group", "")
        header = b"content-length:4\n" + (f"JMSXGroupID:{group}\n".encode() if group else b"") + more.get("header", b"")
        message = SentMessage(
            priority, persistent, more.get("expires_ms", 0), header, more.get("body", b"body"), group=group
        )
        self.engine.commands.send(session, Send(more.get("destination", ORDERS), message, more.get("transaction")))

    def subscribe(self, session: ConnectionState, mode: AckMode = AckMode.INDIVIDUAL, **more: Any) -> None:
        self.engine.commands.subscribe(
            session, Subscribe("s", more.get("destination", ORDERS), mode, more.get("window", 10))
        )

    def events(self) -> list[dict[str, Any]]:
        self.commit()
        return list(read(b"".join(self.chunks)))

    def story(self) -> list[tuple[Any, ...]]:
        """Return kind, sequence and further fields of all events except commits."""
        names = ("sequence", "deliveries", "attempts", "reason", "target_sequence")
        return [
            (event["kind"], *(event[name] for name in names if name in event))
            for event in self.events()
            if event["kind"] not in ("committed", "subscribed", "run-started")
        ]


# What is told


def test_persistent_message_is_recorded_from_acceptance_to_acknowledgement() -> None:
    recorded = RecordedEngine()
    session = recorded.session()
    recorded.send(session, 7, body=b"12345")
    recorded.subscribe(session, window=3)
    recorded.commit()
    recorded.engine.commands.acknowledge(session, Ack("s", 1, None))
    events = recorded.events()
    for event in events:
        assert (event.pop("run"), event.pop("at")) == (1, 1_000_000)
    assert events == [
        {"event": 1, "kind": "run-started", "reason": "clean"},
        {"event": 2, "kind": "committed", "batch": 1},
        {
            "event": 3,
            "kind": "accepted",
            "queue": "orders",
            "sequence": 1,
            "size": 5,
            "priority": 7,
            "persistent": True,
            "batch": 3,
        },
        {
            "event": 4,
            "kind": "subscribed",
            "queue": "orders",
            "window": 3,
            "consumer": 1,
            "mode": "client-individual",
        },
        {"event": 5, "kind": "committed", "batch": 3},
        {"event": 6, "kind": "dispatched", "queue": "orders", "sequence": 1, "consumer": 1, "deliveries": 1},
        {"event": 7, "kind": "acknowledged", "queue": "orders", "sequence": 1},
        {"event": 8, "kind": "committed", "batch": 5},
    ]


def test_accepted_event_names_the_group_of_grouped_messages_only() -> None:
    recorded = RecordedEngine()
    session = recorded.session()
    for group in ("", "g", "g", "", "h", "g"):
        recorded.send(session, group=group)
    accepted = [event for event in recorded.events() if event["kind"] == "accepted"]
    assert [event["sequence"] for event in accepted] == [1, 2, 3, 4, 5, 6]
    first, g, again, fourth, h, last = (event.get("group") for event in accepted)
    assert first is fourth is None
    assert g == again == last != h and g and h


def test_a_transient_is_visible_at_once() -> None:
    recorded = RecordedEngine()
    recorded.send(recorded.session(), persistent=False)
    (accepted,) = (event for event in recorded.events() if event["kind"] == "accepted")
    assert (accepted["batch"], accepted["persistent"]) == (0, False)


def test_failures_and_the_dead_letter_are_recorded() -> None:
    recorded = RecordedEngine(attempts_max=2)
    session = recorded.session()
    recorded.send(session)
    recorded.subscribe(session)
    for _ in range(2):
        recorded.commit()
        recorded.engine.commands.nack(session, Nack("s", 1, None))
    assert recorded.story() == [
        ("accepted", 1),
        ("dispatched", 1, 1),
        ("returned", 1, 1, "nacked"),
        ("dispatched", 1, 2),
        ("dead-lettered", 1, 2),
        ("accepted", 2),
    ]
    assert {event["queue"] for event in recorded.events() if event.get("sequence") == 2} == {"DLQ.orders"}
    assert [event["target_queue"] for event in recorded.events() if event["kind"] == "dead-lettered"] == ["DLQ.orders"]


@pytest.mark.parametrize("address", ["/queue/reports", "/topic/reports"])
def test_handled_message_and_the_report_of_its_dead_letter_are_recorded(address: str) -> None:
    # C11.7, C11.8
    recorded = RecordedEngine(attempts_max=1)
    session = recorded.session()
    header = f"truenext-report-to:{address}\ntruenext-report-id:i\ntruenext-on-failure:/queue/handler\n".encode()
    recorded.send(session, header=header)
    recorded.subscribe(session)
    recorded.commit()
    recorded.engine.commands.nack(session, Nack("s", 1, cause="first"))
    recorded.engine.commands.subscribe(session, Subscribe("h", HANDLER, AckMode.INDIVIDUAL, 10))
    recorded.commit()
    recorded.engine.commands.nack(session, Nack("h", 2, cause="second"))
    is_queue = address.startswith("/queue/")
    assert recorded.story() == [
        ("accepted", 1),
        ("dispatched", 1, 1),
        ("handled", 1, 2),
        ("accepted", 2),
        ("dispatched", 2, 1),
        ("dead-lettered", 2, 3),
        ("accepted", 3),
        *([("reported", 2, 4), ("accepted", 4)] if is_queue else [("reported", 2)]),
    ]
    named = ("handled", "dead-lettered", "reported")
    told = {event["kind"]: event for event in recorded.events() if event["kind"] in named}
    assert [(told[kind]["queue"], told[kind].get("cause"), told[kind].get("target_queue")) for kind in named] == [
        ("orders", "first", "handler"),
        ("handler", "second", "DLQ.handler"),
        ("handler", None, "reports" if is_queue else None),
    ]


def test_pause_move_and_purge_are_recorded() -> None:
    recorded = RecordedEngine()
    session = recorded.session()
    recorded.send(session, persistent=False)
    recorded.send(session, persistent=False)
    recorded.engine.commands.administering.pause("orders")
    move: BulkRequest = Move("orders", limit=1, to="elsewhere")
    for request in (move, Purge("orders")):
        read = recorded.engine.tasks.bulk_pieces.next_read(request)
        assert read is not None
        recorded.engine.tasks.bulk_pieces.execute(request, read, PageResult([], 0, is_end=True))
    recorded.engine.commands.administering.resume("orders")
    assert recorded.story() == [
        *(("accepted", 1), ("accepted", 2), ("paused",)),
        *(("moved", 1, 3), ("accepted", 3), ("removed", 2), ("resumed",)),
    ]
    assert [event["target_queue"] for event in recorded.events() if event["kind"] == "moved"] == ["elsewhere"]


def test_messages_held_at_unsubscribe_are_recorded_as_released() -> None:
    recorded = RecordedEngine()
    session = recorded.session()
    recorded.send(session)
    recorded.send(session)
    recorded.subscribe(session)
    recorded.commit()
    recorded.engine.commands.unsubscribe(session, Unsubscribe("s"))
    assert recorded.story()[-3:] == [("returned", 1, 0, "released"), ("returned", 2, 0, "released"), ("unsubscribed",)]


def returns(recorded: RecordedEngine) -> list[tuple[Any, ...]]:
    """Sequence, attempts and reason."""
    return [event[1:] for event in recorded.story() if event[0] == "returned"]


def holding(count: int, attempts_max: int = 9, **policy: Any) -> tuple[RecordedEngine, ConnectionState]:
    """Return an engine with a consumer that holds `count` messages, and a transaction."""
    recorded = RecordedEngine()
    recorded.engine.commands.administering.change_policies(Policies(Policy(attempts_max=attempts_max, **policy)))
    session = recorded.session()
    for _ in range(count):
        recorded.send(session)
    recorded.subscribe(session)
    recorded.commit()
    recorded.engine.commands.begin(session, Begin("t"))
    return recorded, session


def test_end_of_a_consumer_that_counts_an_attempt_is_recorded_as_closed() -> None:
    recorded, session = holding(3)
    recorded.engine.commands.close(session, Close(["s"], 2))
    assert returns(recorded) == [(1, 1, "closed"), (2, 1, "closed"), (3, 0, "released")]


def test_nack_is_recorded_as_nacked_also_at_the_commit_of_its_transaction() -> None:
    recorded, session = holding(3)
    recorded.engine.commands.nack(session, Nack("s", 2))
    recorded.engine.commands.nack(session, Nack("s", 3, "t"))
    assert returns(recorded) == [(2, 1, "nacked")]
    recorded.engine.commands.commit(session, Commit("t"))
    assert returns(recorded)[1:] == [(3, 1, "nacked")]


def test_a_return_has_the_cause_of_its_refusal_and_a_dead_letter_the_last_one() -> None:
    recorded, session = holding(3, attempts_max=2)
    recorded.engine.commands.nack(session, Nack("s", 1, cause="one"))
    recorded.engine.commands.nack(session, Nack("s", 2, cause="one"))
    recorded.engine.commands.nack(session, Nack("s", 3))
    recorded.engine.turn.run()
    recorded.engine.commands.nack(session, Nack("s", 1, "t", cause="forgotten"))
    recorded.engine.commands.abort(session, Abort("t"))
    recorded.engine.commands.nack(session, Nack("s", 2, cause="two"))
    recorded.engine.commands.nack(session, Nack("s", 3))
    recorded.commit()
    found = [
        (event["kind"], event["sequence"], event.get("cause"))
        for event in recorded.events()
        if event["kind"] in ("returned", "dead-lettered")
    ]
    assert found[:3] == [("returned", 1, "one"), ("returned", 2, "one"), ("returned", 3, None)]
    assert found[3:] == [("dead-lettered", 1, "one"), ("dead-lettered", 2, "two"), ("dead-lettered", 3, None)]


def test_a_cause_is_written_once_in_a_chunk_and_again_in_the_next() -> None:
    recorded, session = holding(4)
    cause = "because " * 500
    for sequence in (1, 2, 3):
        recorded.engine.commands.nack(session, Nack("s", sequence, cause=cause))
    recorded.commit()
    recorded.engine.commands.nack(session, Nack("s", 4, cause=cause))
    recorded.commit()
    assert [chunk.count(cause.encode()) for chunk in recorded.chunks if cause.encode() in chunk] == [1, 1]
    assert [event["cause"] for event in recorded.events() if event["kind"] == "returned"] == [cause] * 4


def test_abort_is_recorded_as_aborted_for_acknowledged_and_nacked_messages() -> None:
    recorded, session = holding(3)
    recorded.engine.commands.acknowledge(session, Ack("s", 1, "t"))
    recorded.engine.commands.nack(session, Nack("s", 2, "t"))
    recorded.engine.commands.abort(session, Abort("t"))
    assert returns(recorded) == [(1, 1, "aborted"), (2, 1, "aborted")]


def test_lost_connection_is_recorded_as_lost_for_counted_attempts_and_as_released_for_the_rest() -> None:
    recorded, session = holding(5)
    recorded.engine.commands.acknowledge(session, Ack("s", 4, "t"))
    recorded.engine.commands.nack(session, Nack("s", 5, "t"))
    recorded.engine.commands.disconnect(session, is_exempt=False)
    lost = [(4, 1, "lost"), (5, 1, "lost"), (1, 1, "lost")]
    assert returns(recorded) == [*lost, (2, 0, "released"), (3, 0, "released")]


@pytest.mark.parametrize("is_aborted", [True, False])
def test_messages_only_acknowledged_in_a_transaction_that_counts_nacks_are_recorded_as_released(
    is_aborted: bool,
) -> None:
    recorded, session = holding(2)
    recorded.engine.commands.begin(session, Begin("u", counts_all=False))
    recorded.engine.commands.acknowledge(session, Ack("s", 1, "u"))
    recorded.engine.commands.nack(session, Nack("s", 2, "u"))
    if is_aborted:
        recorded.engine.commands.abort(session, Abort("u"))
    else:
        recorded.engine.commands.disconnect(session, is_exempt=False)
    assert returns(recorded) == [(1, 0, "released"), (2, 1, "aborted" if is_aborted else "lost")]


def test_disconnect_is_recorded_as_released() -> None:
    recorded, session = holding(3)
    recorded.engine.commands.acknowledge(session, Ack("s", 3, "t"))
    recorded.engine.commands.disconnect(session, is_exempt=True)
    assert sorted(returns(recorded)) == [(number, 0, "released") for number in (1, 2, 3)]


@pytest.mark.parametrize("while_waiting", WhileWaiting)
def test_delayed_retries_are_recorded_with_their_reason_and_again_when_due(while_waiting: WhileWaiting) -> None:
    recorded, session = holding(2, while_waiting=while_waiting, first_delay_ms=1000)
    wait = {WhileWaiting.SKIP: "delayed", WhileWaiting.BLOCK: "blocking"}[while_waiting]
    recorded.engine.commands.nack(session, Nack("s", 1))
    recorded.engine.commands.acknowledge(session, Ack("s", 2, "t"))
    recorded.engine.commands.abort(session, Abort("t"))
    recorded.engine.state.commit_state.tick(3_000_000, 2_000_000)
    recorded.commit()
    assert returns(recorded) == [
        (1, 1, f"nacked and {wait}"),
        (2, 1, f"aborted and {wait}"),
        (1, 1, "due"),
        (2, 1, "due"),
    ]


def test_acknowledgement_in_a_transaction_is_recorded_at_commit_and_never_after_an_abort() -> None:
    recorded = RecordedEngine(attempts_max=9)
    session = recorded.session()
    recorded.send(session)
    recorded.subscribe(session)
    for end in (Abort("t"), Commit("t")):
        recorded.commit()
        recorded.engine.commands.begin(session, Begin("t"))
        recorded.engine.commands.acknowledge(session, Ack("s", 1, "t"))
        recorded.send(session, transaction="t")
        assert recorded.story()[-1][0] == "dispatched"
        if isinstance(end, Abort):
            recorded.engine.commands.abort(session, end)
        else:
            recorded.engine.commands.commit(session, end)
    assert recorded.story() == [
        ("accepted", 1),
        ("dispatched", 1, 1),
        ("returned", 1, 1, "aborted"),
        ("dispatched", 1, 2),
        ("accepted", 2),
        ("acknowledged", 1),
        ("dispatched", 2, 1),
    ]


def test_messages_sent_to_an_auto_consumer_are_recorded_as_acknowledged() -> None:
    recorded = RecordedEngine()
    session = recorded.session()
    for persistent in (True, False):
        recorded.send(session, persistent=persistent)
    recorded.subscribe(session, AckMode.AUTO)
    recorded.commit()
    recorded.engine.commands.on_all_sent(session)
    assert recorded.story()[-2:] == [("acknowledged", 1), ("acknowledged", 2)]


def test_expired_message_is_recorded() -> None:
    recorded = RecordedEngine()
    session = recorded.session()
    recorded.send(session, expires_ms=2)
    recorded.subscribe(session)
    recorded.engine.state.commit_state.tick(3_000_000, 0)
    recorded.commit()
    assert recorded.story() == [("accepted", 1), ("expired", 1)]


def test_end_of_a_durable_subscription_is_recorded_between_its_events_and_those_of_the_next() -> None:
    recorded = RecordedEngine()
    session = recorded.session()
    news = parse_address("/topic/news", "x")
    durable = Subscribe("s", news, AckMode.INDIVIDUAL, 1, durable_key="me,s")
    recorded.engine.commands.subscribe(session, durable)
    for persistent in (True, True, False):
        recorded.send(session, persistent=persistent, destination=news)
    recorded.commit()
    recorded.send(session, destination=news)
    recorded.engine.commands.administering.pause("subscription,me,s,news")
    recorded.engine.commands.unsubscribe(session, Unsubscribe("s", "me,s"))
    recorded.engine.commands.subscribe(session, durable)
    recorded.send(session, destination=news)
    events = [event for event in recorded.events() if "queue" in event]
    assert {event["queue"] for event in events} == {"subscription,me,s,news"}
    assert [(event["kind"], event.get("sequence")) for event in events] == [
        ("subscribed", None),
        ("accepted", 1),
        ("accepted", 2),
        ("accepted", 3),
        ("dispatched", 1),
        ("accepted", 4),
        ("paused", None),
        ("returned", 1),
        ("unsubscribed", None),
        ("resumed", None),
        ("ended", None),
        # Of which the store knows nothing; the others expire when their pages are read.
        ("expired", 3),
        ("subscribed", None),
        ("accepted", 5),
        ("dispatched", 5),
    ]


def test_start_counts_messages_of_ended_subscriptions_with_those_of_the_next_of_their_name() -> None:
    event_log = EventLog(run=2, first_event=10)
    engine = Engine(CommitState(event_log))
    engine.state.commit_state.tick(1_000_000, 0)
    names = ["subscription,me,s,news", *["ended,subscription,me,s,news"] * 2, "ended,subscription,me,t,news"]
    # What was on disk of a subscription that ended with its connection is nobody's business.
    names.append("ended,/x,77")
    for number, name in enumerate(names, 1):
        engine.lifespan.restore_lane(engine.lifespan.restore_queue(number, name), 4, 10**number)
    engine.lifespan.start()
    events = list(read(event_log.close_chunk()))
    assert [(event["kind"], event.get("queue"), event.get("count")) for event in events] == [
        ("run-started", None, None),
        ("recovered", "subscription,me,s,news", 1110),
        ("recovered", "subscription,me,t,news", 10000),
    ]


def test_start_names_the_epoch_of_a_broker_with_a_log() -> None:
    event_log = EventLog()
    Engine(CommitState(event_log)).lifespan.start(after_clean_stop=False, epoch=7)
    (event,) = read(event_log.close_chunk())
    assert (event["reason"], event["epoch"]) == ("unclean", 7)


def test_end_of_a_subscription_that_ends_with_its_connection_is_not_recorded() -> None:
    recorded = RecordedEngine()
    session = recorded.session()
    news = parse_address("/topic/news", "x")
    for subscription in ("s", "t"):
        recorded.engine.commands.subscribe(session, Subscribe(subscription, news, AckMode.INDIVIDUAL, 1))
    recorded.send(session, destination=news)
    recorded.commit()
    recorded.engine.commands.unsubscribe(session, Unsubscribe("s"))
    recorded.engine.commands.disconnect(session, is_exempt=True)
    assert {event["kind"] for event in recorded.events()} == {"run-started", "committed"}


def consumer_of(recorded: RecordedEngine, mode: AckMode = AckMode.INDIVIDUAL, **more: Any) -> BrokerConsumer:
    """A consumer of the queue, of a truenext client."""
    session = recorded.session()
    session.is_truenext_client = True
    recorded.subscribe(session, mode, **more)
    return session.consumers["s"]


def test_started_events_name_their_consumer_for_single_and_for_several_messages() -> None:
    recorded = RecordedEngine()
    consumer = consumer_of(recorded)
    for _ in range(4):
        recorded.send(consumer.session, persistent=False)
    recorded.commit()
    first, *others = consumer.held.values()
    recorded.log.started(first, consumer)
    recorded.engine.commands.acknowledge(consumer.session, Ack("s", first.sequence))
    for entry in others:
        recorded.log.started(entry, consumer)
    last = [event for event in recorded.events() if event["kind"] in ("started", "acknowledged")]
    assert [(event["kind"], event["queue"], event["sequence"], event.get("consumer")) for event in last] == [
        # What was begun a moment later is told together with it.
        *(("started", "orders", number, consumer.number) for number in (1, 2, 3, 4)),
        ("acknowledged", "orders", 1, None),
    ]


def test_started_events_of_many_consumers_and_queues_name_their_own_consumer() -> None:
    recorded = RecordedEngine()
    held: list[tuple[Entry, BrokerConsumer]] = []
    for number, address in enumerate(("/queue/a", "/queue/a", "/queue/b"), 1):
        session = recorded.session(str(number))
        recorded.subscribe(session, destination=parse_address(address, ""), window=1)
        recorded.send(session, persistent=False, destination=parse_address(address, ""))
        recorded.commit()
        (consumer,) = session.consumers.values()
        held += [(entry, consumer) for entry in consumer.held.values()]
    for _ in range(2):
        for entry, consumer in held:
            recorded.log.started(entry, consumer)
    started = [event for event in recorded.events() if event["kind"] == "started"]
    once = [("a", 1, 1), ("a", 2, 2), ("b", 3, 3)]
    assert [(event["queue"], event["sequence"], event["consumer"]) for event in started] == 2 * once


def test_window_changes_and_pull_requests_are_recorded() -> None:
    recorded = RecordedEngine()
    consumer = consumer_of(recorded)
    queue = consumer.queue
    assert queue is not None
    for window in (0, 20):
        recorded.log.window_changed(consumer, queue, window)
    recorded.log.pull_requested(consumer, queue, 7)
    recorded.log.pull_requested(consumer, queue, 0)
    about = [event for event in recorded.events() if event["kind"] in ("window", "requested")]
    names = ("kind", "queue", "consumer", "window", "count")
    assert [tuple(event.get(name) for name in names) for event in about] == [
        ("window", "orders", consumer.number, 0, None),
        ("window", "orders", consumer.number, 20, None),
        ("requested", "orders", consumer.number, None, 7),
        ("requested", "orders", consumer.number, None, 0),
    ]


@pytest.mark.parametrize("mode", AckMode)
@pytest.mark.parametrize("has_selector", [True, False])
@pytest.mark.parametrize("has_express", [True, False])
@pytest.mark.parametrize("is_truenext_client", [True, False])
@pytest.mark.parametrize("pulls", [True, False])
@pytest.mark.parametrize("is_exclusive", [True, False])
def test_subscribed_event_has_all_options_that_decide_which_messages_it_may_get(
    *, mode: AckMode, has_selector: bool, has_express: bool, is_truenext_client: bool, pulls: bool, is_exclusive: bool
) -> None:
    recorded = RecordedEngine()
    consumer = consumer_of(recorded, mode)
    assert consumer.queue is not None
    consumer.session.is_truenext_client = is_truenext_client
    consumer.has_express, consumer.pull_request = has_express, PullRequest() if pulls else None
    consumer.is_exclusive, consumer.priority = is_exclusive, -127
    recorded.log.subscribed(consumer, consumer.queue, has_selector=has_selector)
    found = recorded.events()[-1]
    words = {" with selector": has_selector, " with express": has_express, " with started": is_truenext_client}
    words |= {" pulling": pulls, " exclusive": is_exclusive}
    assert found["mode"] == mode.value + "".join(word for word, is_so in words.items() if is_so)
    assert found.get("priority") == (-127 if is_exclusive else None)
    assert found.get("window") == (None if pulls or mode is AckMode.AUTO else 10)


def test_suspended_wildcard_consumer_is_recorded_with_window_0_when_a_queue_is_created() -> None:
    recorded = RecordedEngine()
    session = recorded.session()
    session.is_truenext_client = True
    recorded.subscribe(session, destination=parse_address("/queue/>", ""))
    recorded.engine.commands.release(session, Release(["s"], [], suspends=True))
    recorded.send(session)
    subscribed = [event for event in recorded.events() if event["kind"] == "subscribed"]
    assert [(event["queue"], event["window"]) for event in subscribed] == [("orders", 0)]


def test_modes_of_before_keep_their_codes() -> None:
    before = ["auto", "client", "client-individual"]
    assert [*SUBSCRIPTION_MODES[:6]] == before + [f"{way} with selector" for way in before]
    assert len(set(SUBSCRIPTION_MODES)) == len(SUBSCRIPTION_MODES) == 96


def test_events_of_a_client_are_not_recorded_without_history() -> None:
    recorded, log = RecordedEngine(), NoEventLog()
    record_all(recorded, log)
    assert log.is_empty() and log.close_chunk() == b""


def record_all(recorded: RecordedEngine, log: EventLog) -> None:
    """Record all events of a client that reports started messages, suspends and pulls."""
    consumer = consumer_of(recorded)
    for _ in range(3):
        recorded.send(consumer.session, persistent=False)
    recorded.commit()
    assert consumer.queue is not None
    log.window_changed(consumer, consumer.queue, 0)
    for entry in consumer.held.values():
        log.started(entry, consumer)
    log.pull_requested(consumer, consumer.queue, 3)
    log.started(entry, consumer)


def test_temporary_queues_are_not_recorded() -> None:
    recorded = RecordedEngine()
    session = recorded.session()
    recorded.subscribe(session, destination=PRIVATE)
    recorded.send(session, persistent=False, destination=PRIVATE)
    recorded.commit()
    (consumer,) = session.consumers.values()
    (held,) = consumer.held.values()
    assert consumer.queue is not None
    recorded.log.started(held, consumer)
    recorded.log.window_changed(consumer, consumer.queue, 0)
    recorded.log.pull_requested(consumer, consumer.queue, 1)
    recorded.engine.commands.acknowledge(session, Ack("s", 1, None))
    assert {event["kind"] for event in recorded.events()} == {"run-started", "committed"}


def test_history_alone_makes_no_further_batches() -> None:
    recorded = RecordedEngine()
    recorded.send(recorded.session(), persistent=False)
    recorded.commit()
    recorded.commit()
    assert not recorded.engine.state.commit_state.has_batch


def test_a_chunk_says_whether_it_came_with_a_batch_of_the_store() -> None:
    """The store's journal must have a chunk of a batch."""
    recorded = RecordedEngine()
    session = recorded.session()
    for persistent in (True, False):
        recorded.send(session, persistent=persistent)
        recorded.engine.turn.run()
        batch = recorded.engine.take_batch()
        assert batch is not None
        assert batch.is_empty() is not persistent
        assert is_of_batch(batch.history) is persistent
        recorded.engine.store_results.on_committed(batch)
        recorded.commit()


def is_of_batch(one: bytes) -> bool:
    chunk = chunk_at(memoryview(one), 0)
    assert chunk is not None
    return bool(chunk.flags & FROM_BATCH)


def test_events_are_numbered_consecutively() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    recorded = busy(rng)
    assert [event["event"] for event in recorded.events()] == list(range(1, len(recorded.events()) + 1))


def busy(
    rng: random.Random,
    steps: int = 300,
    groups: Sequence[str] = ("",),
    addresses: Sequence[str] = ("/queue/orders",),
    sent_to: Sequence[str] = ("/queue/orders",),
    **first: Any,
) -> RecordedEngine:
    """Record events of each kind. `groups` are those of the messages, `sent_to` their queues; `addresses` are
    subscribed to."""
    recorded = RecordedEngine(attempts_max=3, **first)

    def joined(number: int) -> ConnectionState:
        session = recorded.session(str(number))
        destination = parse_address(addresses[number % len(addresses)], "")
        recorded.subscribe(session, rng.choice(list(AckMode)), window=rng.randrange(1, 6), destination=destination)
        return session

    sessions = [joined(number) for number in range(3)]
    for step in range(steps):
        number = rng.randrange(len(sessions))
        session = sessions[number]
        held = [entry for consumer in session.consumers.values() for entry in consumer.held]
        match rng.randrange(10):
            case 0 | 1:
                group = rng.choice(groups)
                destination = parse_address(sent_to[step % len(sent_to)], "")
                recorded.send(
                    session, rng.randrange(10), persistent=rng.random() < 0.5, group=group, destination=destination
                )
            case 2:
                recorded.commit()
            case 3 if held and session.consumers["s"].mode is not AckMode.AUTO:
                recorded.engine.commands.acknowledge(session, Ack("s", rng.choice(held), None))
            case 4 if held and session.consumers["s"].mode is not AckMode.AUTO:
                cause = rng.choice(["", "", "one", "\u00fc\n", "x" * 400])
                recorded.engine.commands.nack(session, Nack("s", rng.choice(held), None, cause=cause))
            case 5:
                recorded.engine.commands.on_all_sent(session)
            case 6:
                recorded.engine.turn.run()
            case 7 if rng.random() < 0.3:
                recorded.engine.commands.administering.pause("orders")
            case 7:
                recorded.engine.commands.administering.resume("orders")
            case 8 if held and session.consumers["s"].mode is not AckMode.AUTO:
                recorded.engine.commands.begin(session, Begin("t"))
                recorded.engine.commands.acknowledge(session, Ack("s", rng.choice(held), "t"))
                recorded.engine.commands.abort(session, Abort("t"))
            case 9 if rng.random() < 0.3:
                recorded.engine.commands.disconnect(session, is_exempt=rng.random() < 0.5)
                sessions[number] = joined(number)
        recorded.engine.state.commit_state.tick(1_000_000 + rng.randrange(10**6), 0)
    recorded.commit()
    return recorded


# Files


def write(folder: Path, recorded: RecordedEngine) -> HistoryWriter:
    history = HistoryWriter(folder)
    for chunk in recorded.chunks:
        history.append(chunk)
    return history


def test_appended_events_are_read_back(tmp_path: Path) -> None:
    recorded = busy(random.Random(1))
    write(tmp_path, recorded).close()
    assert read_folder(tmp_path) == recorded.events()


def test_appended_events_can_be_read_after_a_flush_a_sync_or_many_more_events(tmp_path: Path) -> None:
    recorded = busy(random.Random(1))
    history = HistoryWriter(tmp_path)
    history.append(recorded.chunks[0])
    history.append(recorded.chunks[1])
    assert read_folder(tmp_path) == []
    history.flush()
    first_two = read_folder(tmp_path)
    assert first_two == recorded.events()[: len(first_two)] != []
    history.append(recorded.chunks[2])
    assert read_folder(tmp_path) == first_two
    history.sync()
    assert len(read_folder(tmp_path)) > len(first_two)
    for chunk in recorded.chunks[3:]:
        history.append(chunk)
    event_log = EventLog(run=1, first_event=len(recorded.events()) + 1)
    for batch in range(10_000):
        event_log.on_committed(batch)
    history.append(event_log.close_chunk())
    assert len(read_folder(tmp_path)) == len(recorded.events()) + 10_000
    history.close()


def test_a_run_begins_a_file_and_goes_on_counting(tmp_path: Path) -> None:
    first = busy(random.Random(1))
    write(tmp_path, first).close()
    history = HistoryWriter(tmp_path)
    run, event = history.start_run(after_clean_stop=True)
    assert (run, event) == (2, len(first.events()) + 1)
    second = busy(random.Random(2), run=run, first_event=event)
    for chunk in second.chunks:
        history.append(chunk)
    history.close()
    assert len(history_files(tmp_path)) == 2
    assert read_folder(tmp_path) == first.events() + second.events()


def test_a_crash_leaves_numbers_out(tmp_path: Path) -> None:
    first = busy(random.Random(1))
    write(tmp_path, first).close()
    assert HistoryWriter(tmp_path).start_run(after_clean_stop=False) == (2, len(first.events()) + 1 + GAP_EVENTS)


@pytest.mark.parametrize(
    ("lowest", "after_clean_stop", "expected"),
    [
        ((1, 1), True, (2, 11)),
        ((2, 11), True, (2, 11)),
        ((2, 11), False, (2, 11 + GAP_EVENTS)),
        ((5, 3), True, (5, 11)),
        ((1, 30), True, (2, 30)),
        ((5, 30), True, (5, 30)),
        ((5, 30), False, (5, 30 + GAP_EVENTS)),
    ],
)
def test_a_run_uses_no_number_below_the_lowest_nor_one_of_the_files(
    lowest: tuple[int, int], after_clean_stop: bool, expected: tuple[int, int], tmp_path: Path
) -> None:
    history = HistoryWriter(tmp_path)
    append_events(history, run=1, first_event=1, count=10)
    history.close()
    assert HistoryWriter(tmp_path).start_run(after_clean_stop=after_clean_stop, lowest=lowest) == expected


@pytest.mark.parametrize("after_clean_stop", [True, False])
def test_a_run_of_a_new_folder_uses_no_number_of_a_restored_chunk(after_clean_stop: bool, tmp_path: Path) -> None:
    """The rows of a log may have used more than its compacted rows, and the other way round. Neither has the events of
    batches without changes, which the lost folder has had."""
    (tmp_path / "lost").mkdir()
    lost = HistoryWriter(tmp_path / "lost")
    chunk = append_events(lost, run=6, first_event=31, count=10)
    lost.close()
    gap = GAP_EVENTS
    for lowest, expected in [((7, 31), (7, 41 + gap)), ((9, 90), (9, 90 + gap)), ((1, 1), (7, 41 + gap))]:
        folder = tmp_path / str(lowest)
        history = HistoryWriter(folder)
        history.restore([chunk])
        assert history.start_run(after_clean_stop=after_clean_stop, lowest=lowest) == expected
        history.close()
        assert len(read_folder(folder)) == 10


def chunks_of_run(*, run: int, first_event: int, sizes: list[int]) -> list[bytes]:
    """Return chunks of a run, each with so many events. The first one starts a file."""
    event_log, chunks = EventLog(run=run, first_event=first_event), []
    for size in sizes:
        for batch in range(1, size + 1):
            event_log.on_committed(batch)
        chunks.append(event_log.close_chunk())
    return chunks


def test_position_of_several_chunks_is_that_of_the_last_one() -> None:
    chunks = chunks_of_run(run=3, first_event=1, sizes=[10, 4])
    assert [next_event(history) for history in (chunks[0], b"".join(chunks))] == [11, 15]
    assert [chunk_position(history) for history in (chunks[0], b"".join(chunks))] == [(3, 1), (3, 11)]


def test_chunks_of_rows_that_continue_the_files_are_appended_once(tmp_path: Path) -> None:
    folder = tmp_path / "history"
    chunks = chunks_of_run(run=1, first_event=1, sizes=[10, 10, 5])
    history = HistoryWriter(folder)
    history.append(chunks[0])
    history.close()
    history = HistoryWriter(folder)
    # A row has the chunks of earlier batches without a row, too.
    history.follow(chunks[0] + chunks[1])
    history.follow(chunks[1] + chunks[2])
    (takeover,) = chunks_of_run(run=2, first_event=26 + GAP_EVENTS, sizes=[4])
    history.follow(takeover)
    assert history.start_run(after_clean_stop=True) == (3, 30 + GAP_EVENTS)
    history.close()
    events = [*range(1, 26), *range(26 + GAP_EVENTS, 30 + GAP_EVENTS)]
    assert [event["event"] for event in read_folder(folder)] == events
    assert not list(tmp_path.glob("aside-*"))


def test_run_after_a_clean_stop_leaves_no_numbers_out_if_rows_followed_what_was_restored(tmp_path: Path) -> None:
    restored, followed = chunks_of_run(run=1, first_event=1, sizes=[10, 5])
    history = HistoryWriter(tmp_path)
    history.restore([restored])
    history.follow(followed)
    assert history.start_run(after_clean_stop=True) == (2, 16)


def test_chunks_behind_missing_events_wait_for_the_next_file_and_begin_a_new_history(tmp_path: Path) -> None:
    folder = tmp_path / "history"
    first, _, *behind = chunks_of_run(run=1, first_event=1, sizes=[10, 4, 10, 10])
    history = HistoryWriter(folder)
    history.follow(first)
    for chunk in behind:
        history.follow(chunk)
    (later,) = chunks_of_run(run=2, first_event=35, sizes=[3])
    history.follow(later)
    assert history.start_run(after_clean_stop=True) == (3, 38)
    history.close()
    assert [event["event"] for event in read_folder(folder)] == [35, 36, 37]
    (aside,) = tmp_path.glob("aside-history-*")
    assert len(read_folder(aside)) == 10


def test_takeover_behind_missing_events_begins_a_new_history(tmp_path: Path) -> None:
    folder = tmp_path / "history"
    first, _, behind = chunks_of_run(run=1, first_event=1, sizes=[10, 4, 10])
    history = HistoryWriter(folder)
    history.follow(first)
    history.follow(behind)
    assert history.start_run(after_clean_stop=False) == (2, 25 + GAP_EVENTS)
    history.close()
    assert not read_folder(folder)
    (aside,) = tmp_path.glob("aside-history-*")
    assert len(read_folder(aside)) == 10


def test_history_of_a_new_folder_begins_with_the_first_file_that_begins(tmp_path: Path) -> None:
    folder = tmp_path / "history"
    history = HistoryWriter(folder)
    _, *middle = chunks_of_run(run=3, first_event=100, sizes=[10, 10, 10])
    for chunk in (*middle, *chunks_of_run(run=3, first_event=130, sizes=[2, 3])):
        history.follow(chunk)
    history.close()
    assert [event["event"] for event in read_folder(folder)] == [*range(130, 135)]
    assert not list(tmp_path.glob("aside-*"))


def test_a_run_leaves_numbers_out_after_a_crash_and_none_after_a_clean_stop(tmp_path: Path) -> None:
    assert HistoryWriter(tmp_path).start_run(after_clean_stop=False, lowest=(4, 50)) == (4, 50 + GAP_EVENTS)
    assert HistoryWriter(tmp_path).start_run(after_clean_stop=True, lowest=(4, 50)) == (4, 50)
    assert HistoryWriter(tmp_path).start_run(after_clean_stop=False) == (1, 1)


@pytest.mark.parametrize("after_clean_stop", [True, False])
def test_recovery_starts_history_after_the_numbers_of_the_log(after_clean_stop: bool, tmp_path: Path) -> None:
    """Another broker may use numbers until the store has taken the log over."""
    log = mock.Mock(spec=Log, next_history=(3, 30))
    store = MemoryStore()

    def take_over() -> Recovered:
        log.next_history = (4, 50)
        return Recovered(identity="0123abcd", clean_stop=after_clean_stop)

    with mock.patch.object(store, "recover", take_over):
        engine, _ = recover(store, Policies(), history=HistoryWriter(tmp_path), log=log)
    engine.lifespan.start()
    batch = engine.take_batch()
    assert batch is not None
    assert chunk_position(batch.history) == (4, 50 if after_clean_stop else 50 + GAP_EVENTS)


def append_events(history: HistoryWriter, *, run: int, first_event: int, count: int) -> bytes:
    event_log = EventLog(run=run, first_event=first_event)
    for batch in range(1, count + 1):
        event_log.on_committed(batch)
    chunk = event_log.close_chunk()
    history.append(chunk)
    return chunk


def test_a_long_history_has_many_files_and_each_names_its_queues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truenext.engine.writing.event_log.HISTORY_FILE_BYTES", 2000)
    recorded = busy(random.Random(1))
    write(tmp_path, recorded).close()
    assert len(history_files(tmp_path)) > 3
    assert read_folder(tmp_path) == recorded.events()


def test_a_torn_chunk_is_cut_wherever_it_tears_and_the_store_brings_it_back(tmp_path: Path) -> None:
    recorded = busy(random.Random(1), steps=40)
    write(tmp_path, recorded).close()
    (path,) = history_files(tmp_path)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        history = HistoryWriter(tmp_path)
        kept = read_folder(tmp_path)
        assert kept == recorded.events()[: len(kept)]
        history.restore(recorded.chunks)
        history.close()
        assert read_folder(tmp_path) == recorded.events()


def test_restore_skips_chunks_that_the_files_have(tmp_path: Path) -> None:
    recorded = busy(random.Random(1), steps=40)
    history = write(tmp_path, recorded)
    history.restore(recorded.chunks)
    history.close()
    assert read_folder(tmp_path) == recorded.events()


def test_restore_without_files_begins_a_history_with_the_next_file_and_uses_no_number_again(tmp_path: Path) -> None:
    """As after a restore of a backup without history: the journal has events of queues whose names are in no file."""
    event_log = EventLog(run=3, first_event=7)
    chunks = []
    for _ in range(3):
        event_log.on_committed(1)
        chunks.append(event_log.close_chunk(of_batch=True))
    history = HistoryWriter(tmp_path)
    history.restore(chunks[1:])
    assert history.start_run(after_clean_stop=False) == (4, 10 + GAP_EVENTS)
    assert history_files(tmp_path) == []
    later = EventLog(run=4, first_event=10 + GAP_EVENTS)
    later.on_committed(1)
    history.append(later.close_chunk(of_batch=True))
    history.close()
    assert [event["event"] for event in read_folder(tmp_path)] == [10 + GAP_EVENTS]


def test_the_last_chunk_of_a_batch_is_known_and_where_there_is_none_nothing_is(tmp_path: Path) -> None:
    event_log = EventLog(run=3, first_event=7)
    history = HistoryWriter(tmp_path)
    chunks = []
    for of_batch in (True, True, False):
        event_log.on_committed(1)
        chunks.append(event_log.close_chunk(of_batch=of_batch))
        history.append(chunks[-1])
    history.close()
    assert chunk_position(chunks[1]) == (3, 8)
    assert last_batch_of(tmp_path) == (3, 8)
    # A newer file whose first chunk a crash tore; then one that has a chunk, and none of a batch.
    torn = tmp_path / "000000000000000a.history"
    torn.write_bytes(FILE.pack(MAGIC, HISTORY_VERSION, 4) + b"torn")
    assert last_batch_of(tmp_path) == (3, 8)
    later = EventLog(run=4, first_event=10)
    later.on_committed(1)
    torn.write_bytes(FILE.pack(MAGIC, HISTORY_VERSION, 4) + later.close_chunk())
    assert last_batch_of(tmp_path) is None
    for path in history_files(tmp_path):
        path.unlink()
    assert last_batch_of(tmp_path) is None


def last_batch_of(folder: Path) -> tuple[int, int] | None:
    """Return the last chunk of a batch, as `truenext store` and a start find it."""
    found = last_batch_chunk(folder)
    history = HistoryWriter(folder)
    history.close()
    assert history.last_batch_chunk == found
    return found


def test_a_history_that_cannot_be_read_tells_a_check_of_no_batch(tmp_path: Path) -> None:
    (tmp_path / "0000000000000001.history").write_bytes(b"something else")
    assert last_batch_chunk(tmp_path) is None
    assert last_batch_chunk(tmp_path / "missing") is None


def test_a_file_that_is_no_history_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "0000000000000001.history").write_bytes(b"something else")
    with pytest.raises(HistoryError, match=r"0001\.history is not a history file"):
        HistoryWriter(tmp_path)


def of_version(path: Path, version: int) -> None:
    """Make it one that a truenext of before, or of later, has written."""
    with path.open("r+b") as file:
        file.seek(4)
        file.write(version.to_bytes(2, "little"))


@pytest.mark.parametrize("version", [4, 7, OLDEST_HISTORY_VERSION - 1, HISTORY_VERSION + 1])
def test_a_history_of_another_version_is_refused_by_name(tmp_path: Path, version: int) -> None:
    write(tmp_path, busy(random.Random(1), steps=4)).close()
    (path,) = history_files(tmp_path)
    of_version(path, version)
    reads = f"{OLDEST_HISTORY_VERSION} to {HISTORY_VERSION}"
    why = rf"{path} has history version {version}; this truenext reads {reads}: use the truenext that wrote"
    with pytest.raises(HistoryError, match=why):
        HistoryWriter(tmp_path)
    assert [(name, reason.startswith(why)) for name, reason in find_damage(tmp_path)] == [(path.name, True)]
    assert last_batch_chunk(tmp_path) is None
    assert path.exists()


@pytest.mark.parametrize("version", range(OLDEST_HISTORY_VERSION, HISTORY_VERSION))
def test_history_of_a_version_before_is_read_and_goes_on_in_a_new_file(tmp_path: Path, version: int) -> None:
    """Earlier versions have fewer kinds and reasons of events, and are otherwise the same."""
    write(tmp_path, busy(random.Random(1), steps=4)).close()
    (path,) = history_files(tmp_path)
    of_version(path, version)
    before = path.read_bytes()
    history = HistoryWriter(tmp_path)
    run, event = history.start_run(after_clean_stop=True)
    for chunk in busy(random.Random(2), run=run, first_event=event, steps=4).chunks:
        history.append(chunk)
    history.close()
    assert path.read_bytes() == before
    assert len(history_files(tmp_path)) == 2
    assert list(find_damage(tmp_path)) == []


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(HistoryError, match=r"cannot write the history in .*No space left on device"):
        write(tmp_path, busy(random.Random(1), steps=3))


@pytest.mark.parametrize("accepted", [0, 10], ids=["nothing", "a part"])
def test_a_history_that_finds_the_disk_full_goes_on_with_the_space_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accepted: int
) -> None:
    """`accepted` is what the full disk takes of each write before it refuses the next one."""
    recorded = busy(random.Random(1), steps=40)
    refused: list[OSError] = []
    capacity = accepted
    system_open, system_write = os.open, os.write

    def write_some(file: int, content: bytes) -> int:
        nonlocal capacity
        if len(refused) >= 2:
            return system_write(file, content)
        if not capacity:
            raise OSError(28, os.strerror(28))
        part = content[:capacity]
        capacity = 0
        return system_write(file, part)

    def open_some(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT and not refused:
            raise OSError(28, os.strerror(28))
        return system_open(path, flags, *mode)

    monkeypatch.setattr(os, "write", write_some)
    monkeypatch.setattr(os, "open", open_some)
    history = HistoryWriter(tmp_path, on_write_error=refused.append)
    for chunk in recorded.chunks:
        history.append(chunk)
    history.close()
    assert [error.errno for error in refused] == [28, 28]
    assert read_folder(tmp_path) == recorded.events()


def test_a_history_that_is_given_no_space_ends_with_the_full_disk_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = 0

    def full(*_: object) -> int:
        nonlocal writes
        writes += 1
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "write", full)
    history = HistoryWriter(tmp_path, on_write_error=lambda _: None)
    with pytest.raises(HistoryError, match=r"cannot write the history in .*No space left on device"):
        for chunk in busy(random.Random(1), steps=3).chunks:
            history.append(chunk)
    assert writes == 2


# How long it is kept


@pytest.fixture
def no_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None)


@pytest.mark.usefixtures("no_pyarrow")
def test_history_without_pyarrow_stays_as_it_is_within_its_limits_and_no_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truenext.engine.writing.event_log.HISTORY_FILE_BYTES", 2000)
    monkeypatch.setattr(subprocess, "Popen", None)
    write(tmp_path, busy(random.Random(1))).close()
    files = history_files(tmp_path)
    for bytes_max, kept in ((1 << 30, files), (0, files[-1:])):
        exporter = HistoryExporter(tmp_path, bytes_max=bytes_max)
        exporter.start()
        exporter.close()
        assert history_files(tmp_path) == kept


def test_files_of_history_whose_last_event_is_too_old_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truenext.engine.writing.event_log.HISTORY_FILE_BYTES", 2000)
    write(tmp_path, busy(random.Random(1))).close()
    files = history_files(tmp_path)
    for path, days in zip(files, (12, 10), strict=False):
        written = time.time() - days * 86400
        os.utime(path, (written, written))
    assert delete_old_files(tmp_path, days_max=11) == files[:1]
    assert history_files(tmp_path) == files[1:]


@pytest.mark.usefixtures("no_pyarrow")
def test_history_without_pyarrow_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    exporter = HistoryExporter(tmp_path)
    exporter.start()
    exporter.close()
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "numpy and pyarrow are not installed" in record.message
    assert vars(record)["install"] == "pip install 'truenext[spark]'"


def test_the_file_that_grows_is_never_exported_nor_forgotten(tmp_path: Path) -> None:
    write(tmp_path, busy(random.Random(1))).close()
    assert list(export_closed_files(tmp_path)) == []
    assert delete_old_files(tmp_path, bytes_max=0, days_max=0) == []
    (path,) = history_files(tmp_path)
    assert sum(1 for _ in chunks_of_file(path)) > 3


def test_damaged_chunk_loses_its_own_events_and_none_after_it(tmp_path: Path) -> None:
    """A restart of the broker does not cut it either: it cuts only the rest that a crash left."""
    history = HistoryWriter(tmp_path)
    _, first_event = history.start_run(after_clean_stop=True)
    event_log = EventLog(run=1, first_event=first_event)
    for batch in range(1, 11):
        event_log.on_committed(batch)
        history.append(event_log.close_chunk())
    history.close()
    (path,) = history_files(tmp_path)
    chunks = [*chunks_of_file(path)]
    content = bytearray(path.read_bytes())
    content[chunks[4].end - 1] ^= 1
    path.write_bytes(content)
    capacity = [1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert [chunk.first_event for chunk in chunks_of_file(path)] == capacity
    history = HistoryWriter(tmp_path)
    assert history.start_run(after_clean_stop=True) == (2, 11)
    history.append(event_log.close_chunk())
    history.close()
    assert path.read_bytes() == content
    assert [chunk.first_event for chunk in chunks_of_file(path)] == capacity
