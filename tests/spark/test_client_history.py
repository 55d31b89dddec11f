"""Tests of the audit on histories of an engine with busy clients, also with faults planted in the engine."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.contract.test_history import RecordedEngine
from tests.property import planted_faults
from tests.spark.busy_clients import BusyClients
from tests.spark.test_engine_history import events_of, judged
from truenext.engine.commands.connecting import Connecting
from truenext.engine.commands.releasing import Releasing
from truenext.engine.commands.subscribing import Subscribing
from truenext.engine.lifecycle.pull_requests import PullRequests
from truenext.engine.lifecycle.settlement import Settlement
from truenext.engine.state.clients import ClientRegistry, QueueReceivers
from truenext.engine.state.consumer import BrokerConsumer, ConnectionState, QueueConsumer
from truenext.engine.state.queue import STARTED, Entry, Queue, RequeueReason
from truenext.model.commands import AckMode, Subscribe
from truenext.model.destination import parse_address
from truenext.model.events import FAILURES

Patch = pytest.MonkeyPatch


def test_history_of_busy_clients_is_judged_right_and_contains_every_kind_of_event() -> None:
    first = random.randrange(1 << 30)
    print("first seed", first)
    seen: Counter[str] = Counter()
    for seed in range(first, first + 60):
        events = events_of(BusyClients(seed, 150).recorded)
        assert not judged(events), seed
        for event in events:
            seen[event["kind"]] += 1
            seen[str(event["reason"]).partition(" ")[0]] += 1
            seen[f"{event['kind']} of 0"] += 0 in (event["window"], event["count"])
            seen.update((event["mode"] or "").split())
    ways = ("pulling", "express", "exclusive")
    for what in ("window", "window of 0", "requested", "requested of 0", "started", *FAILURES, "released", *ways):
        assert seen[what], what


@pytest.mark.parametrize("others", ["/queue/orders", "/queue/>"])
@pytest.mark.parametrize("exclusive", ["/queue/orders", "/queue/>"])
def test_consumers_are_not_idle_while_an_exclusive_consumer_has_a_full_window(exclusive: str, others: str) -> None:
    recorded = RecordedEngine()
    sessions = []
    for name, address in (("first", others), ("exclusive", exclusive), ("last", others)):
        sessions.append(recorded.session(name))
        subscribe = Subscribe("s", parse_address(address, ""), AckMode.INDIVIDUAL, 1, is_exclusive=name == "exclusive")
        recorded.engine.commands.subscribe(sessions[-1], subscribe)
    for _ in range(4):
        recorded.send(sessions[0])
    assert not after(recorded, 30)
    recorded.engine.commands.disconnect(sessions[1], is_exempt=True)
    assert not after(recorded, 60)
    assert [event["consumer"] for event in events_of(recorded) if event["kind"] == "dispatched"] == [2, 1, 3]


def after(recorded: RecordedEngine, seconds: int) -> Counter[str]:
    """Return the findings after a time without events."""
    recorded.commit()
    recorded.engine.state.commit_state.tick(seconds * 1_000_000, seconds * 1000)
    recorded.engine.commands.administering.pause("elsewhere")
    recorded.commit()
    return judged(events_of(recorded))


def suspended_consumers_keep_their_window(patch: Patch) -> None:
    patch.setattr(BrokerConsumer, "suspend", lambda consumer: setattr(consumer, "awake_window", consumer.window))


def windows_are_one_too_large(patch: Patch) -> None:
    def has_credit(consumer: BrokerConsumer) -> bool:
        return len(consumer.held) < consumer.window + (consumer.pull_request is None and not consumer.is_suspended)

    patch.setattr(BrokerConsumer, "has_credit", has_credit)


def pull_requests_get_one_message_too_many(patch: Patch) -> None:
    def has_credit(consumer: BrokerConsumer) -> bool:
        more = consumer.pull_request is not None and not consumer.is_suspended
        return len(consumer.held) < consumer.window + more

    patch.setattr(BrokerConsumer, "has_credit", has_credit)


def dispatches_are_not_deducted_from_pull_requests(patch: Patch) -> None:
    patch.setattr(PullRequests, "deduct_dispatched", lambda pull_requests, deliveries: None)


def withdrawn_pull_requests_stay_open(patch: Patch) -> None:
    end_without_notice = PullRequests.end_without_notice

    def forgets_for_others(pull_requests: PullRequests, consumer: BrokerConsumer) -> None:
        remaining = consumer.pull_request.remaining if consumer.pull_request is not None else 0
        end_without_notice(pull_requests, consumer)
        if consumer.pull_request is not None:
            consumer.pull_request.remaining = remaining

    patch.setattr(PullRequests, "end_without_notice", forgets_for_others)


def pull_requests_get_no_messages(patch: Patch) -> None:
    adjust = BrokerConsumer.adjust_window
    patch.setattr(
        BrokerConsumer,
        "adjust_window",
        lambda consumer, now_ms: consumer.pull_request is None and adjust(consumer, now_ms),
    )


def exclusive_consumers_share_their_queue(patch: Patch) -> None:
    patch.setattr(QueueReceivers, "choose_exclusive", lambda receivers: None)


def the_first_exclusive_consumer_has_the_queue_whatever_its_priority(patch: Patch) -> None:
    def choose(receivers: QueueReceivers) -> None:
        exclusive = [consumer for consumer in receivers.all() if consumer.is_exclusive]
        receivers.exclusive = min(exclusive, key=lambda consumer: consumer.number, default=None)

    patch.setattr(QueueReceivers, "choose_exclusive", choose)


def the_first_message_counts_an_attempt_though_not_started(patch: Patch) -> None:
    end_consumer = Subscribing.end_consumer

    def does_not_ask(subscribing: Subscribing, consumer: BrokerConsumer, *, is_exempt: bool) -> None:
        consumer.session.is_truenext_client = False
        end_consumer(subscribing, consumer, is_exempt=is_exempt)

    patch.setattr(Subscribing, "end_consumer", does_not_ask)


def started_outlives_its_dispatch(patch: Patch) -> None:
    requeue = Settlement.requeue

    def remembers(outcomes: Settlement, entry: Entry, reason: RequeueReason, **options: Any) -> None:
        was_started = entry.is_started
        requeue(outcomes, entry, reason, **options)
        if was_started:
            entry.start_state = STARTED

    patch.setattr(Settlement, "requeue", remembers)


def a_release_counts_as_an_attempt(patch: Patch) -> None:
    requeue = Settlement.requeue

    def counts(outcomes: Settlement, entry: Entry, reason: RequeueReason, **options: Any) -> None:
        entry.attempts += reason is RequeueReason.RELEASED
        requeue(outcomes, entry, reason, **options)

    patch.setattr(Settlement, "requeue", counts)


def kept_messages_return_to_their_queue(patch: Patch) -> None:
    release_held = Releasing._release_held

    def returns_it_too(releasing: Releasing, consumer: BrokerConsumer, kept: set[tuple[str, int, int]]) -> None:
        release_held(releasing, consumer, kept)
        for entry in consumer.held.values():
            entry.lane.requeue(entry)
            releasing._commit_state.touched_queues[entry.lane.queue] = None
        consumer.held.clear()

    patch.setattr(Releasing, "_release_held", returns_it_too)


def ended_consumers_still_get_messages(patch: Patch) -> None:
    leave = ClientRegistry.remove_consumer

    def stays(clients: ClientRegistry, consumer: BrokerConsumer, queue: Queue) -> None:
        if not isinstance(consumer, QueueConsumer) or consumer.pull_request is not None:
            leave(clients, consumer, queue)

    patch.setattr(ClientRegistry, "remove_consumer", stays)


def after_disconnect(act: Callable[[Connecting, BrokerConsumer, Entry], None]) -> Callable[[Patch], None]:
    """Make a fault: the last frame of a connection that was taken over is executed after its end."""

    def plant(patch: Patch) -> None:
        disconnect = Connecting.disconnect

        def then_acts(connecting: Connecting, session: ConnectionState, **end: bool) -> None:
            held = [(consumer, entry) for consumer in session.consumers.values() for entry in consumer.held.values()]
            disconnect(connecting, session, **end)
            for consumer, entry in held[:1]:
                if entry.message is not None:
                    act(connecting, consumer, entry)

        patch.setattr(Connecting, "disconnect", then_acts)

    return plant


the_last_ack_of_a_taken_over_connection_is_executed = after_disconnect(
    lambda connecting, _, entry: connecting._subscribing._events.acknowledged(entry)
)
the_last_started_of_a_taken_over_connection_is_executed = after_disconnect(
    lambda connecting, consumer, entry: connecting._subscribing._events.started(entry, consumer)
)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (suspended_consumers_keep_their_window, "uncredited"),
        (windows_are_one_too_large, "uncredited"),
        (pull_requests_get_one_message_too_many, "uncredited"),
        (dispatches_are_not_deducted_from_pull_requests, "uncredited"),
        (withdrawn_pull_requests_stay_open, "uncredited"),
        (pull_requests_get_no_messages, "stuck"),
        (exclusive_consumers_share_their_queue, "uncredited"),
        (the_first_exclusive_consumer_has_the_queue_whatever_its_priority, "uncredited"),
        (planted_faults.the_exclusive_consumer_that_came_last_owns_the_queue, "uncredited"),
        (planted_faults.an_exclusive_consumer_that_has_gone_still_owns_the_queue, "stuck"),
        (the_first_message_counts_an_attempt_though_not_started, "miscount"),
        (started_outlives_its_dispatch, "miscount"),
        (a_release_counts_as_an_attempt, "miscount"),
        (kept_messages_return_to_their_queue, "duplicate"),
        (ended_consumers_still_get_messages, "stale"),
        (the_last_ack_of_a_taken_over_connection_is_executed, "stale"),
        (the_last_started_of_a_taken_over_connection_is_executed, "stale"),
    ],
)
def test_a_fault_planted_in_the_engine_is_seen_in_its_history(
    fault: Callable[[Patch], None], kind: str, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    assert any(judged(events_of(BusyClients(seed, 200).recorded))[kind] for seed in range(60))


def test_dispatch_to_another_than_the_exclusive_consumer_is_found(monkeypatch: Patch) -> None:
    """There is no other finding: the consumer has credit, and the message is the true next one."""
    exclusive_consumers_share_their_queue(monkeypatch)
    recorded = RecordedEngine()
    for number in (1, 2):
        subscribe = Subscribe("s", parse_address("/queue/orders", ""), AckMode.INDIVIDUAL, 1, is_exclusive=number == 1)
        recorded.engine.commands.subscribe(recorded.session(str(number)), subscribe)
    for _ in range(2):
        recorded.send(recorded.session("sender"))
    assert after(recorded, 1) == {"uncredited": 1}
