"""Tests of the engine's own history: it is judged right, and faults of the order planted in the engine are found.

Without Spark: the naive judge and the audit of each queue read the events that the engine wrote.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import pytest

from tests.contract.naive_history import read
from tests.contract.test_history import RecordedEngine, busy
from tests.property import planted_faults
from tests.property.disk import found_of
from tests.spark.histories import Event
from tests.spark.judge import Judge
from tests.spark.plain import counted, outcomes_of
from truenext.engine.background.bulk import Move
from truenext.engine.dispatch.heads import Head
from truenext.engine.dispatch.selective import QueueDispatch
from truenext.engine.state.consumer import BrokerConsumer
from truenext.engine.state.pages import PageResult
from truenext.engine.state.queue import Entry
from truenext.history.table import SCHEMA
from truenext.model.commands import Ack, AckMode, Begin, Commit, Nack, Subscribe, Unsubscribe
from truenext.model.destination import parse_address
from truenext.model.events import CLOSED, FAILURES
from truenext.model.order import RANKS
from truenext.store.memory import MemoryStore

GROUPS = ("g", "g", "h", "")
ORDERS = ("/queue/orders",)
OF_MANY = {
    "addresses": ("/queue/orders", "/queue/>", "/queue/orders.*"),
    "sent_to": ("/queue/orders", "/queue/orders.eu", "/queue/orders.us"),
}
"""Consumers of one queue and of many, which are created meanwhile."""


def findings(seed: int, groups: Sequence[str] = ("",), **queues: Sequence[str]) -> Counter[str]:
    recorded = busy(random.Random(seed), 120, groups, queues.get("addresses", ORDERS), queues.get("sent_to", ORDERS))
    return judged(events_of(recorded))


def events_of(recorded: RecordedEngine) -> list[Event]:
    """Return the events of the history that the engine has written."""
    nothing = dict.fromkeys(SCHEMA.names)
    return [
        nothing | event | {"at": datetime.fromtimestamp(event["at"] / 1e6, UTC)}
        for event in read(b"".join(recorded.chunks))
    ]


def judged(events: list[Event]) -> Counter[str]:
    """Return the findings of the audit by kind, which must be those of the judge."""
    findings = [each for each in outcomes_of(events, 10.0) if each["row"] == "finding"]
    assert counted(findings) == Judge(events, stuck_seconds=10.0).judge().found
    found: Counter[str] = Counter()
    for (kind, _), count in counted(findings).items():
        found[kind] += count
    return found


def test_history_of_the_engine_is_judged_right() -> None:
    first = random.randrange(1 << 30)
    print("first seed", first)
    for seed in range(first, first + 40):
        assert not findings(seed), seed


def test_returns_that_count_an_attempt_are_recorded_as_failures_and_no_others() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        attempts: Counter[tuple[int, int]] = Counter()
        recorded = busy(random.Random(seed), 120, ("",), ORDERS, ORDERS)
        for event in read(b"".join(recorded.chunks)):
            if event["kind"] == "returned":
                of = event["run"], event["sequence"]
                assert (event["attempts"] > attempts[of]) is event["reason"].startswith(FAILURES), (seed, event)
                attempts[of] = event["attempts"]
                seen[event["reason"].partition(" ")[0]] += 1
    # Consumers of JMS clients: test_client_history.py.
    assert {*FAILURES, "released"} - {CLOSED} <= set(seen)


def test_skipping_a_message_of_a_busy_group_is_no_finding() -> None:
    for seed in range(40):
        assert not findings(seed, GROUPS), seed


def test_wildcard_consumers_cause_no_finding_in_their_queues() -> None:
    for seed in range(60):
        assert not findings(seed, **OF_MANY), seed


def test_message_moved_while_nothing_is_stored_and_dispatched_at_once_is_no_finding() -> None:
    """A moved message waits for a batch, also if that has nothing to store: the history says when it is visible."""
    recorded = RecordedEngine()
    session = recorded.session()
    recorded.send(session, persistent=False)
    recorded.subscribe(session, destination=parse_address("/queue/elsewhere", "x"))
    recorded.commit()
    pieces = recorded.engine.tasks.bulk_pieces
    move = Move("orders", limit=1, to="elsewhere")
    page_request = pieces.next_read(move)
    assert page_request is not None
    pieces.execute(move, page_request, PageResult([], 0, is_end=True))
    recorded.commit()
    events = events_of(recorded)
    assert [event["queue"] for event in events if event["kind"] == "dispatched"] == ["elsewhere"]
    assert not judged(events)


def wildcard_consumers_get_the_lowest_priority_first(patch: pytest.MonkeyPatch) -> None:
    def lowest_first(way: QueueDispatch, consumer: BrokerConsumer) -> Head:
        heads = [way.lane_head_for(consumer, rank) for rank in reversed(RANKS)]
        return next((head for head in heads if isinstance(head, Entry)), None)

    patch.setattr(QueueDispatch, "head_for", lowest_first)


def test_wrong_order_is_found_beside_wildcard_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    wildcard_consumers_get_the_lowest_priority_first(monkeypatch)
    assert any(findings(seed, **OF_MANY)["inversion"] for seed in range(20))


def test_message_that_overtakes_others_of_its_group_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted_faults.a_group_is_overtaken_by_later_messages_of_it(monkeypatch)
    assert any(findings(seed, GROUPS)["order"] for seed in range(20))


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (planted_faults.persistent_messages_are_served_before_transient_ones, "inversion"),
        (planted_faults.persistent_and_transient_messages_are_served_in_turns, "inversion"),
        (planted_faults.priorities_are_ignored, "inversion"),
        (planted_faults.a_requeued_message_goes_to_the_end, "order"),
        (planted_faults.a_commit_in_flight_is_overtaken_by_its_equals, "order"),
    ],
)
def test_a_fault_planted_in_the_engine_is_seen_in_its_history(
    fault: Callable[[pytest.MonkeyPatch], None], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert any(findings(seed)[kind] for seed in range(20))


def commit_all(recorded: RecordedEngine, store: MemoryStore) -> None:
    """Run turns, read pages and commit batches, until nothing is left to do."""
    engine = recorded.engine
    for _ in range(100):
        for one in engine.turn.run().reads:
            page = store.read_page(one.lane.key, one.after_sequence, one.limit, one.size_max)
            found = [found_of(each) for each in page.messages]
            engine.store_results.on_page_read(one, PageResult(found, page.as_of, page.is_end))
        batch = engine.take_batch()
        if batch is not None:
            recorded.chunks.append(batch.history)
            store.apply(batch)
            engine.store_results.on_committed(batch)


@pytest.mark.parametrize("is_new_subscription", [True, False])
@pytest.mark.parametrize("is_visible", [True, False])
def test_an_ended_subscription_leaves_a_history_that_is_judged_right(
    is_visible: bool, is_new_subscription: bool
) -> None:
    """The subscription ends with messages that wait, that its last consumer held, and that an open transaction has;
    in memory and not."""
    recorded, store = RecordedEngine(), MemoryStore()
    store.recover()
    engine, session = recorded.engine, recorded.session()

    news = parse_address("/topic/news", "x")
    durable = Subscribe("s", news, AckMode.INDIVIDUAL, 6, durable_key="me,s")
    engine.commands.subscribe(session, durable)
    for number in range(12):
        recorded.send(session, number % 3, persistent=number % 2 == 0, destination=news)
    if is_visible:
        commit_all(recorded, store)
        held = list(session.consumers["s"].held)
        engine.commands.acknowledge(session, Ack("s", held[0]))
        engine.commands.nack(session, Nack("s", held[1]))
        engine.commands.begin(session, Begin("t"))
        engine.commands.acknowledge(session, Ack("s", held[2], "t"))
        engine.commands.nack(session, Nack("s", held[3], "t"))
        engine.state.memory.limit = 1000
        engine.evict()
        engine.state.memory.limit = 1 << 40
    engine.commands.unsubscribe(session, Unsubscribe("s", "me,s"))
    if is_new_subscription:
        engine.commands.subscribe(session, durable)
        # One of the lowest priority, which nothing of before is to come before.
        recorded.send(session, 0, persistent=False, destination=news)
        engine.turn.run()
    if is_visible:
        engine.commands.commit(session, Commit("t"))
    commit_all(recorded, store)
    if is_new_subscription:
        (new,) = session.consumers["s"].held
        engine.commands.acknowledge(session, Ack("s", new))
        engine.commands.unsubscribe(session, Unsubscribe("s", "me,s"))
        commit_all(recorded, store)
    nothing = dict.fromkeys(SCHEMA.names)
    events = [
        nothing | event | {"at": datetime.fromtimestamp(event["at"] / 1e6, UTC)}
        for event in read(b"".join(recorded.chunks))
    ]
    assert not Judge(events, stuck_seconds=10.0).judge().found
    kinds = Counter(event["kind"] for event in events)
    assert kinds["accepted"] == 12 + is_new_subscription == kinds["acknowledged"] + kinds["expired"]
    assert kinds["ended"] == 1 + is_new_subscription
    assert not store.recover().queues and not store.recover().counts
