"""Planted faults of the engine that the state machines must notice.

Each function makes the engine wrong in one way, by replacing methods of it; its name says what is wrong.
The methods are listed in targets.py. Faults of choice replace the whole dispatch by a plain one (`Choice`) with
one decision changed, so that they do not depend on how the engine's own is written.
"""

import ast
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from sys import maxsize
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import pytest
from msgspec import structs

from tests.property import targets
from tests.property.broker_machine import (
    BrokerMachine,
    BulkMachine,
    BusyTopicsMachine,
    ExpiringMachine,
    FailingMachine,
    GroupsMachine,
    JmsMachine,
    NoRoomMachine,
    PagingMachine,
    ProducersMachine,
    ReleasingGroupsMachine,
    ReleasingMachine,
    ReportingMachine,
    ScheduledMachine,
    SelectingMachine,
    SpillingMachine,
    TopicsMachine,
    WildcardMachine,
    WindowsMachine,
)
from tests.property.disk import Disk, Stored
from truenext.engine.background.browsing import BrowseEntryRead, BrowseRead, BrowseTask
from truenext.engine.background.bulk import (
    BulkRead,
    BulkRequest,
    BulkResult,
    Move,
    PlannedRemoval,
    Purge,
    ScheduledRequest,
)
from truenext.engine.background.bulk_work import BulkPieceExecutor
from truenext.engine.background.expiry import ExpiryBlockRead, ExpiryTask
from truenext.engine.background.retries import RetryTask
from truenext.engine.background.scheduled import DueSendsRead, Scheduler
from truenext.engine.commands.acknowledging import Acknowledging
from truenext.engine.commands.administering import Administering
from truenext.engine.commands.connecting import Connecting
from truenext.engine.commands.pulling import Pulling
from truenext.engine.commands.releasing import Releasing
from truenext.engine.commands.sending import Sending
from truenext.engine.commands.subscribing import Subscribing
from truenext.engine.commands.transactions import Transactions
from truenext.engine.dispatch.heads import COMMITTING, Head, Wait
from truenext.engine.dispatch.plain import Deliveries, Dispatcher, RankedConsumer
from truenext.engine.dispatch.selective import ConsumerClass, GroupedQueueDispatch, QueueDispatch
from truenext.engine.dispatch.wildcard import WildcardDispatch
from truenext.engine.engine import Engine
from truenext.engine.idle import _QueueInspection
from truenext.engine.lifecycle.arrivals import SENT_ALONE, Arrivals
from truenext.engine.lifecycle.pull_requests import EndedPullRequest, PullRequests
from truenext.engine.lifecycle.redelivery import FailedMessage
from truenext.engine.lifecycle.settlement import Settlement
from truenext.engine.lifespan import EngineLifespan
from truenext.engine.memory import horizon
from truenext.engine.memory.delays import DelayedEntries
from truenext.engine.memory.entries_by_lane import EntriesByLane
from truenext.engine.memory.eviction import Eviction
from truenext.engine.memory.reading import LaneRead, PageReader
from truenext.engine.memory.resident_set import ResidentSet
from truenext.engine.memory.spilled_subscriptions import SpilledSubscriptions
from truenext.engine.memory.timers import TimerRead, Timers, TimersResult
from truenext.engine.queues.queues import Queues
from truenext.engine.queues.topics import RouteAhead, TopicRouter
from truenext.engine.remainder import RemainderCount
from truenext.engine.selecting.groups import GroupOwnership, GroupScanCursor
from truenext.engine.selecting.scan import QueueScan, ScanCursor
from truenext.engine.selecting.selecting import QueueSelection
from truenext.engine.state.balance import DiskBalance
from truenext.engine.state.causes import KnownCauses
from truenext.engine.state.clients import ClientRegistry, QueueReceivers
from truenext.engine.state.consumer import BrokerConsumer, Browser, ConnectionState
from truenext.engine.state.counts import Counts
from truenext.engine.state.memory import size_of
from truenext.engine.state.pages import PageMessage, PageResult, StoreRead
from truenext.engine.state.producer import CommitOutcome, Producer
from truenext.engine.state.queue import (
    NEVER_STARTED,
    NO_ENTRIES,
    STARTED,
    UNBOUNDED,
    UNSTARTED,
    Entry,
    Lane,
    Queue,
    RequeueReason,
    StartState,
)
from truenext.engine.state.transaction import BrokerTransaction, OpenTransactions
from truenext.engine.state.wildcard import Wildcard
from truenext.engine.turn import Effects, NoWaitPullEnder, StoreResults, Turn, TurnDispatch
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.entries import NO_CONTENTS, ContentNumbers
from truenext.engine.writing.numbers import QueueNumberAllocator
from truenext.engine.writing.producers import JmsProducerRegistry, ProducerInfo, ProducerRegistry
from truenext.model.answers import Answer
from truenext.model.batch import NO_CAUSES, Batch, Causes, ProducerState
from truenext.model.commands import (
    Abort,
    Ack,
    AckMode,
    Commit,
    Credit,
    Nack,
    Release,
    Send,
    Started,
    Subscribe,
    Unsubscribe,
)
from truenext.model.destination import Destination, DestinationKind
from truenext.model.disk_level import DiskLevel
from truenext.model.header_lines import decode_header_lines, encode_header_lines
from truenext.model.limits import SEQUENCE_BLOCK
from truenext.model.message import SentMessage, with_ttl
from truenext.model.pattern import matches
from truenext.model.policy import Policies, Policy, WhileWaiting
from truenext.model.record import SCHEDULED_TIMERS, message_key, sequence_of, split_scheduled_timer
from truenext.model.schedule import Schedule

Patch = pytest.MonkeyPatch
QueueOf = Callable[[Destination], Queue | None]
Fault = Callable[[Patch], None]

_SHOWS_IN: dict[Fault, type[BrokerMachine]] = {}
_FIRST: dict[Fault, int] = {}
_RARE: set[Fault] = set()


def shows_in(machine: type[BrokerMachine], *, first: int = 0) -> Callable[[Fault], Fault]:
    """In this machine it shows soonest; without, in BrokerMachine. `first` is the round that is tried first, because
    the fault has shown in it: that saves the time of the others, as long as it shows there."""

    def noted(fault: Fault) -> Fault:
        _SHOWS_IN[fault] = machine
        _FIRST[fault] = first
        return fault

    return noted


def shows_rarely_in(machine: type[BrokerMachine], *, first: int = 0) -> Callable[[Fault], Fault]:
    """Mark a fault that takes half a minute or more to show; `make faults` has the time."""

    def noted(fault: Fault) -> Fault:
        _RARE.add(fault)
        return shows_in(machine, first=first)(fault)

    return noted


def is_rare(fault: Fault) -> bool:
    return fault in _RARE


def machine_of(fault: Fault) -> type[BrokerMachine]:
    return _SHOWS_IN.get(fault, BrokerMachine)


def first_round_of(fault: Fault) -> int:
    return _FIRST.get(fault, 0)


def _engine_at_work(patch: Patch) -> Callable[[], Engine]:
    """The one that was made last; of functions that are told of none."""
    made: list[Engine] = []
    init = targets.MAKE_ENGINE.original

    def remembering(engine: Engine, *arguments: Any, **named: Any) -> None:
        made[:] = [engine]
        init(engine, *arguments, **named)

    targets.MAKE_ENGINE.replace(patch, remembering)
    return lambda: made[0]


def _arrived_of(lane: Lane) -> deque[Entry]:
    return lane.allocate_arrived() if lane.arrived is NO_ENTRIES else lane.arrived


def _message_of(entry: Entry) -> SentMessage:
    """Return the message of an entry that is in memory."""
    assert entry.message is not None
    return entry.message


class Waiting(NamedTuple):
    rank: int
    entry: Entry
    is_visible: bool


class Choice:
    """A plain dispatch without a fault; each fault overrides one decision."""

    def candidates(self, waiting: list[Waiting], dispatches: int) -> list[Entry]:
        """Return the messages that may be dispatched now, in order. `waiting` is in the order of K."""
        held_back: set[int] = set()
        allowed = []
        for rank, entry, is_visible in waiting:
            if not is_visible:
                held_back.add(rank)
            elif rank not in held_back:
                allowed.append(entry)
        return allowed

    def is_expired(self, entry: Entry, now_ms: int) -> bool:
        return 0 < _message_of(entry).expires_ms <= now_ms

    def has_credit(self, consumer: BrokerConsumer) -> bool:
        session = consumer.session
        has_capacity = session.unsent_bytes < consumer.memory.unsent_bytes_max and not session.holds_too_much
        return len(consumer.held) < consumer.window and has_capacity

    def who_takes(self, receivers: QueueReceivers) -> Sequence[BrokerConsumer]:
        return receivers.consumers if receivers.exclusive is None else [receivers.exclusive]

    def preference(self, consumer: BrokerConsumer) -> tuple[int, ...]:
        return (consumer.service_rank, len(consumer.held), consumer.last_dispatch_number)

    def install(self, patch: Patch) -> None:
        with_selectors = targets.DISPATCH.original

        def dispatch(dispatcher: Dispatcher, queue: Queue, deliveries: Deliveries) -> Lane | None:
            if queue.observer is not None:
                return with_selectors(dispatcher, queue, deliveries)
            commit_state = targets.commit_state_of(dispatcher)
            committed, now_ms = commit_state.last_committed, commit_state.now_ms
            memory, clients, events = (
                targets.memory(dispatcher),
                targets.clients_of(dispatcher),
                targets.events_of(dispatcher),
            )
            consumers = self.who_takes(clients.receivers_of(queue))
            for consumer in consumers:
                consumer.adjust_window(now_ms)
            while receivers := [consumer for consumer in consumers if self.has_credit(consumer)]:
                waiting, unread = _in_memory(dispatcher, queue, committed)
                candidates = self.candidates(waiting, clients.dispatch_count)
                if not candidates:
                    return unread
                entry = candidates[0]
                _take_out(queue, entry)
                if self.is_expired(entry, now_ms):
                    targets.expire(dispatcher, entry)
                    continue
                consumer = min(receivers, key=self.preference)
                entry.deliveries += 1
                entry.dispatched_us = commit_state.now_us
                if consumer.auto_window is not None and not consumer.held:
                    consumer.auto_window.start_sample(entry.sequence, now_ms)
                consumer.held[entry.sequence] = entry
                events.dispatched(queue, [entry], [consumer.number])
                message = _message_of(entry)
                size = len(message.body) + len(message.header) + consumer.frame_bytes
                consumer.session.unsent_bytes += size
                memory.unsent_bytes += size
                if memory.unsent_bytes > memory.unsent_threshold:
                    memory.unsent_bytes_max = 1
                clients.dispatch_count += 1
                consumer.last_dispatch_number = clients.dispatch_count
                deliveries.setdefault(consumer, []).append(entry)
            entries: list[Entry] = []
            consumer_numbers: list[int] = []
            lane = targets.EXPRESS.of(dispatcher)(queue, consumers, deliveries, entries, consumer_numbers)
            if entries:
                events.dispatched(queue, entries, consumer_numbers)
            return lane

        targets.DISPATCH.replace(patch, dispatch)


def _in_memory(dispatcher: Dispatcher, queue: Queue, committed: int) -> tuple[list[Waiting], Lane | None]:
    """Return the waiting messages in the order of K, up to the first one that must be read, and the lane of that."""
    waiting: list[Waiting] = []
    for lane in queue.lanes:
        rank = lane.rank
        if lane.unread and not lane.needs_page:
            targets.LOAD_RECENT.of(dispatcher)(lane)
        is_held_back = False
        # What came back above the horizon, out of its turn, waits for what is unread below it.
        known = sorted((entry for entry in lane if entry.sequence <= lane.horizon), key=lambda entry: entry.sequence)
        for entry in known:
            if entry.due_us:
                if entry.sequence in lane.delayed:
                    continue
                return waiting, lane
            is_visible = entry.batch <= committed
            is_held_back |= not is_visible
            if entry.message is not None:
                waiting.append(Waiting(rank, entry, is_visible))
            elif not is_held_back:
                return waiting, lane
        if lane.needs_page and not is_held_back:
            return waiting, lane
    return waiting, None


def _take_out(queue: Queue, entry: Entry) -> None:
    _remove_from_lane(queue, entry)
    if entry.lane.selected is not None:
        entry.lane.trim_gaps()


def _remove_from_lane(queue: Queue, entry: Entry) -> None:
    for lane in queue.lanes:
        arrived_gaps = set() if lane.selected is None else lane.selected.arrived_gaps
        for at, other in enumerate(lane.arrived):
            if other is entry and entry.sequence not in arrived_gaps:
                del lane.arrived[at]
                return
        for at, (_, other) in enumerate(lane.requeued):
            if other is entry:
                del lane.requeued[at]
                lane.requeued.sort(key=lambda pair: pair[0])
                return


def plain_dispatch_without_a_fault(patch: Patch) -> None:
    """Dispatch without a fault, to show that the plain dispatch itself is not the cause of a failure."""
    Choice().install(patch)


# Order ----------------------------------------------------------------------------------------------------------------


def persistent_messages_are_served_before_transient_ones(patch: Patch) -> None:
    class Fault(Choice):
        def candidates(self, waiting: list[Waiting], dispatches: int) -> list[Entry]:
            return sorted(super().candidates(waiting, dispatches), key=lambda entry: not _message_of(entry).persistent)

    Fault().install(patch)


def persistent_and_transient_messages_are_served_in_turns(patch: Patch) -> None:
    class Fault(Choice):
        def candidates(self, waiting: list[Waiting], dispatches: int) -> list[Entry]:
            allowed = super().candidates(waiting, dispatches)
            return sorted(allowed, key=lambda entry: _message_of(entry).persistent == bool(dispatches % 2))

    Fault().install(patch)


def priorities_are_ignored(patch: Patch) -> None:
    class Fault(Choice):
        def candidates(self, waiting: list[Waiting], dispatches: int) -> list[Entry]:
            return sorted(super().candidates(waiting, dispatches), key=lambda entry: entry.sequence)

    Fault().install(patch)


def a_requeued_message_goes_to_the_end(patch: Patch) -> None:
    class Fault(Choice):
        def candidates(self, waiting: list[Waiting], dispatches: int) -> list[Entry]:
            ranks = {id(entry): rank for rank, entry, _ in waiting}
            allowed = super().candidates(waiting, dispatches)
            return sorted(allowed, key=lambda entry: (ranks[id(entry)], entry.deliveries > 0))

    Fault().install(patch)


def a_requeued_message_loses_its_sequence(patch: Patch) -> None:
    return_to_lane = targets.RETURN_TO_LANE.original

    def faulty(lane: Lane, entry: Entry) -> None:
        entry.sequence += 1000
        return_to_lane(lane, entry)

    targets.RETURN_TO_LANE.replace(patch, faulty)


def a_commit_in_flight_is_overtaken_by_its_equals(patch: Patch) -> None:
    class Fault(Choice):
        def candidates(self, waiting: list[Waiting], dispatches: int) -> list[Entry]:
            return [entry for _, entry, is_visible in waiting if is_visible]

    Fault().install(patch)


@shows_in(BrokerMachine)
def a_commit_in_flight_holds_back_lower_priorities(patch: Patch) -> None:
    class Fault(Choice):
        def candidates(self, waiting: list[Waiting], dispatches: int) -> list[Entry]:
            allowed = []
            for _, entry, is_visible in waiting:
                if not is_visible:
                    break
                allowed.append(entry)
            return allowed

    Fault().install(patch)


def a_commit_in_flight_holds_back_all_priorities(patch: Patch) -> None:
    class Fault(Choice):
        def candidates(self, waiting: list[Waiting], dispatches: int) -> list[Entry]:
            if not all(is_visible for _, _, is_visible in waiting):
                return []
            return super().candidates(waiting, dispatches)

    Fault().install(patch)


@shows_in(BrokerMachine)
def an_expired_message_is_dispatched(patch: Patch) -> None:
    class Fault(Choice):
        def is_expired(self, entry: Entry, now_ms: int) -> bool:
            return False

    Fault().install(patch)


# Consumers ------------------------------------------------------------------------------------------------------------


def the_consumer_that_was_served_last_is_preferred(patch: Patch) -> None:
    class Fault(Choice):
        def preference(self, consumer: BrokerConsumer) -> tuple[int, ...]:
            return (consumer.service_rank, len(consumer.held), -consumer.last_dispatch_number)

    Fault().install(patch)


def the_first_subscription_is_preferred(patch: Patch) -> None:
    class Fault(Choice):
        def preference(self, consumer: BrokerConsumer) -> tuple[int, ...]:
            return (consumer.service_rank, len(consumer.held))

    Fault().install(patch)


@shows_in(BrokerMachine)
def the_longest_waiting_is_preferred_even_if_it_holds_more(patch: Patch) -> None:
    class Fault(Choice):
        def preference(self, consumer: BrokerConsumer) -> tuple[int, ...]:
            return (consumer.service_rank, consumer.last_dispatch_number)

    Fault().install(patch)


@shows_in(BrokerMachine)
def a_new_subscription_is_served_before_all_that_wait(patch: Patch) -> None:
    subscribe = targets.SUBSCRIBE.original

    def faulty(subscribing: Subscribing, session: ConnectionState, command: Subscribe) -> None:
        subscribe(subscribing, session, command)
        session.consumers[command.subscription].last_dispatch_number = 0

    targets.SUBSCRIBE.replace(patch, faulty)


@shows_in(WindowsMachine)
def consumer_priority_is_ignored(patch: Patch) -> None:
    class Fault(Choice):
        def preference(self, consumer: BrokerConsumer) -> tuple[int, ...]:
            return (len(consumer.held), consumer.last_dispatch_number)

    Fault().install(patch)


@shows_in(WindowsMachine)
def consumer_priority_matters_only_among_those_that_hold_as_much(patch: Patch) -> None:
    class Fault(Choice):
        def preference(self, consumer: BrokerConsumer) -> tuple[int, ...]:
            return (len(consumer.held), consumer.service_rank, consumer.last_dispatch_number)

    Fault().install(patch)


@shows_in(WindowsMachine, first=3)
def a_window_that_was_stretched_is_preferred_like_any_other(patch: Patch) -> None:
    class Fault(Choice):
        def preference(self, consumer: BrokerConsumer) -> tuple[int, ...]:
            return (-consumer.priority, len(consumer.held), consumer.last_dispatch_number)

    Fault().install(patch)


@shows_in(WindowsMachine)
def an_exclusive_consumer_shares_its_queue(patch: Patch) -> None:
    class Fault(Choice):
        def who_takes(self, receivers: QueueReceivers) -> Sequence[BrokerConsumer]:
            return receivers.consumers

    Fault().install(patch)


@shows_in(WindowsMachine)
def the_exclusive_consumer_that_came_last_owns_the_queue(patch: Patch) -> None:
    def faulty(receivers: QueueReceivers) -> None:
        receivers.exclusive = max(
            (each for each in receivers.consumers if each.is_exclusive), key=_number, default=None
        )

    targets.CHOOSE_OWNER.replace(patch, faulty)


@shows_in(WindowsMachine)
def an_exclusive_consumer_that_has_gone_still_owns_the_queue(patch: Patch) -> None:
    choose_exclusive = targets.CHOOSE_OWNER.original

    def faulty(receivers: QueueReceivers) -> None:
        owner = receivers.exclusive
        choose_exclusive(receivers)
        if owner is not None and receivers.exclusive is None:
            receivers.exclusive = owner
            owner.window = 0

    targets.CHOOSE_OWNER.replace(patch, faulty)


def _number(consumer: BrokerConsumer) -> int:
    return consumer.number


@shows_in(WindowsMachine)
def express_dispatch_never_happens(patch: Patch) -> None:
    targets.HAS_EXPRESS_CREDIT.replace(patch, lambda consumer, rank: False)


@shows_in(WindowsMachine)
def express_dispatch_has_no_limit(patch: Patch) -> None:
    targets.EXPRESS_MAX.replace(patch, maxsize)


@shows_in(WindowsMachine, first=3)
def express_dispatch_goes_to_the_stalled_consumer(patch: Patch) -> None:
    express = targets.EXPRESS.original

    def faulty(dispatcher: Dispatcher, queue: Queue, consumers: list[BrokerConsumer], *rest: Any) -> Lane | None:
        answered = [consumer.last_ack_number for consumer in consumers]
        for consumer in consumers:
            consumer.last_ack_number = -consumer.last_ack_number
        try:
            return express(dispatcher, queue, consumers, *rest)
        finally:
            for consumer, answered_at in zip(consumers, answered, strict=True):
                consumer.last_ack_number = answered_at

    targets.EXPRESS.replace(patch, faulty)


def _change_express(patch: Patch, change: Callable[[BrokerConsumer, int], bool]) -> None:
    has_express_credit = targets.HAS_EXPRESS_CREDIT.original
    targets.HAS_EXPRESS_CREDIT.replace(
        patch,
        lambda consumer, rank: has_express_credit(consumer, rank) or (consumer.has_express and change(consumer, rank)),
    )


@shows_in(WindowsMachine)
def express_dispatch_happens_at_a_window_of_one(patch: Patch) -> None:
    _change_express(
        patch,
        lambda consumer, rank: (
            consumer.window == 1 == len(consumer.held)
            and all(entry.lane.rank > rank for entry in consumer.held.values())
            and consumer.session.unsent_bytes < consumer.memory.unsent_bytes_max
        ),
    )


@shows_in(WindowsMachine)
def express_dispatch_brings_messages_that_are_not_more_urgent(patch: Patch) -> None:
    _change_express(
        patch,
        lambda consumer, rank: (
            1 < consumer.window <= len(consumer.held) < consumer.window + 10
            and sum(entry.lane.rank >= rank for entry in consumer.held.values()) >= consumer.window
            and consumer.session.unsent_bytes < consumer.memory.unsent_bytes_max
        ),
    )


@shows_in(WindowsMachine, first=1)
def express_dispatch_ignores_the_unsent_bytes_of_the_connection(patch: Patch) -> None:
    _change_express(
        patch,
        lambda consumer, rank: (
            1 < consumer.window <= len(consumer.held) < consumer.window + 10
            and sum(entry.lane.rank > rank for entry in consumer.held.values()) >= consumer.window
        ),
    )


def an_acknowledgement_in_a_transaction_gives_no_credit_back(patch: Patch) -> None:
    class Fault(Choice):
        def has_credit(self, consumer: BrokerConsumer) -> bool:
            open_ones = consumer.session.transactions.values()
            pending = [
                entry for each in open_ones for entry in each.acknowledged() if entry.lane.queue is consumer.queue
            ]
            return super().has_credit(consumer) and len(consumer.held) + len(pending) < consumer.window

    Fault().install(patch)


def the_unsent_bytes_of_a_connection_have_no_limit(patch: Patch) -> None:
    class Fault(Choice):
        def has_credit(self, consumer: BrokerConsumer) -> bool:
            return len(consumer.held) < consumer.window

    Fault().install(patch)


def a_dead_letter_gives_its_credit_back_unnoticed(patch: Patch) -> None:
    nack_message = targets.NACK.original

    def faulty(acknowledging: Acknowledging, session: ConnectionState, nack: Nack) -> None:
        queue = session.consumer_of(nack.subscription, nack.sequence).queue
        assert queue is not None
        was_touched = queue in targets.touched(acknowledging)
        waiting = queue.waiting_count()
        nack_message(acknowledging, session, nack)
        if nack.transaction is None and queue.waiting_count() == waiting and not was_touched:
            targets.touched(acknowledging).pop(queue, None)

    targets.NACK.replace(patch, faulty)


# Returns and attempts -------------------------------------------------------------------------------------------------


def an_acknowledged_message_returns_when_its_connection_is_lost(patch: Patch) -> None:
    acknowledge, disconnect = targets.ACKNOWLEDGE.original, targets.DISCONNECT.original
    acknowledged: WeakKeyDictionary[Queues, list[tuple[ConnectionState, Entry, SentMessage | None]]] = (
        WeakKeyDictionary()
    )

    def faulty_acknowledge(acknowledging: Acknowledging, session: ConnectionState, ack: Ack) -> None:
        held = session.consumer_of(ack.subscription, ack.sequence).held
        before = [(session, entry, entry.message) for entry in held.values()]
        acknowledge(acknowledging, session, ack)
        if ack.transaction is None:
            gone = [each for each in before if each[1].sequence not in held]
            acknowledged.setdefault(targets.all_queues(acknowledging), []).extend(gone)

    def faulty_disconnect(connecting: Connecting, session: ConnectionState, *, is_exempt: bool, **end: bool) -> None:
        disconnect(connecting, session, is_exempt=is_exempt, **end)
        for theirs, entry, message in acknowledged.get(targets.all_queues(connecting), []):
            if theirs is session and not is_exempt:
                entry.message = message
                if message is not None:
                    targets.COUNT_LOADED.of(connecting)(entry, message)
                targets.REQUEUE.of(connecting)(entry, RequeueReason.RELEASED)

    targets.ACKNOWLEDGE.replace(patch, faulty_acknowledge)
    targets.DISCONNECT.replace(patch, faulty_disconnect)


@shows_in(BrokerMachine, first=1)
def an_abort_returns_messages_acknowledged_outside_it(patch: Patch) -> None:
    acknowledge, abort = targets.ACKNOWLEDGE.original, targets.ABORT.original

    def faulty_acknowledge(acknowledging: Acknowledging, session: ConnectionState, ack: Ack) -> None:
        held = session.consumer_of(ack.subscription, ack.sequence).held
        before = list(held.values())
        acknowledge(acknowledging, session, ack)
        if ack.transaction is None:
            outside.setdefault(targets.all_queues(acknowledging), []).extend(
                entry for entry in before if entry.sequence not in held
            )

    def faulty_abort(transactions: Transactions, session: ConnectionState, command: Abort) -> None:
        abort(transactions, session, command)
        for entry in outside.pop(targets.all_queues(transactions), []):
            targets.REQUEUE.of(transactions)(entry, RequeueReason.RELEASED)

    outside: WeakKeyDictionary[Queues, list[Entry]] = WeakKeyDictionary()
    targets.ACKNOWLEDGE.replace(patch, faulty_acknowledge)
    targets.ABORT.replace(patch, faulty_abort)


@shows_in(BrokerMachine, first=1)
def a_turn_sees_half_of_the_messages_that_an_unsubscribe_requeues(patch: Patch) -> None:
    unsubscribe, take_turn = targets.UNSUBSCRIBE.original, targets.TURN.original
    late: WeakKeyDictionary[Queues, list[Entry]] = WeakKeyDictionary()

    def faulty_unsubscribe(subscribing: Subscribing, session: ConnectionState, command: Unsubscribe) -> None:
        consumer = session.consumers.get(command.subscription)
        held = {} if consumer is None else consumer.held
        late.setdefault(targets.all_queues(subscribing), []).extend(held.pop(sequence) for sequence in list(held)[1:])
        unsubscribe(subscribing, session, command)

    def faulty_turn(turn: Turn) -> Effects:
        effects = take_turn(turn)
        for entry in late.pop(targets.all_queues(turn), []):
            targets.REQUEUE.of(turn)(entry, RequeueReason.RELEASED)
        return effects

    targets.UNSUBSCRIBE.replace(patch, faulty_unsubscribe)
    targets.TURN.replace(patch, faulty_turn)


def an_attempt_is_written_only_when_an_answer_waits_for_it(patch: Patch) -> None:
    requeue = targets.REQUEUE.original

    def faulty(outcomes: Settlement, entry: Entry, reason: RequeueReason, **options: Any) -> None:
        commit_state = targets.commit_state_of(outcomes)
        was_awaited = commit_state.is_batch_awaited
        requeue(outcomes, entry, reason, **options)
        commit_state.is_batch_awaited = was_awaited

    targets.REQUEUE.replace(patch, faulty)


@shows_in(ReleasingMachine, first=9)
def the_receipt_of_an_abort_does_not_wait_for_its_attempts(patch: Patch) -> None:
    abort = targets.ABORT_TRANSACTION.original

    def faulty(transactions: Transactions, session: ConnectionState, name: str, *, counts_all: bool) -> None:
        batch = session.last_batch
        abort(transactions, session, name, counts_all=counts_all)
        session.last_batch = batch

    targets.ABORT_TRANSACTION.replace(patch, faulty)


def a_lost_connection_counts_an_attempt_of_each_prefetched_message(patch: Patch) -> None:
    end_consumer = targets.END_CONSUMER.original

    def faulty(subscribing: Subscribing, consumer: BrokerConsumer, *, is_exempt: bool) -> None:
        rest = [] if is_exempt else list(consumer.held.values())[1:]
        for entry in rest:
            del consumer.held[entry.sequence]
        end_consumer(subscribing, consumer, is_exempt=is_exempt)
        for entry in rest:
            targets.REQUEUE.of(subscribing)(entry, RequeueReason.LOST)

    targets.END_CONSUMER.replace(patch, faulty)


@shows_in(BrokerMachine, first=2)
def a_lost_connection_counts_messages_that_an_auto_consumer_never_got(patch: Patch) -> None:
    disconnect = targets.DISCONNECT.original

    def faulty(connecting: Connecting, session: ConnectionState, **end: bool) -> None:
        for consumer in session.consumers.values():
            if consumer.mode is AckMode.AUTO:
                consumer.mode = AckMode.INDIVIDUAL
        disconnect(connecting, session, **end)

    targets.DISCONNECT.replace(patch, faulty)


def a_nack_covers_only_the_message_it_names(patch: Patch) -> None:
    targets.COVERED_BY.replace(patch, lambda consumer, sequence: [sequence])


def _abort_without_an_attempt(transactions: Transactions, session: ConnectionState, name: str) -> None:
    transaction = session.transactions.end(name)
    targets.memory(transactions).transaction_bytes -= transaction.total_bytes
    for entry in (*transaction.acknowledged(), *transaction.nacked()):
        targets.REQUEUE.of(transactions)(entry, RequeueReason.RELEASED)
    if transaction.held:
        session.last_batch = targets.commit_state_of(transactions).latest_batch


@shows_in(BrokerMachine)
def an_abort_counts_no_attempt(patch: Patch) -> None:
    targets.ABORT.replace(
        patch,
        lambda transactions, session, abort: _abort_without_an_attempt(transactions, session, abort.transaction),
    )


def a_clean_end_counts_an_attempt(patch: Patch) -> None:
    disconnect = targets.DISCONNECT.original
    targets.DISCONNECT.replace(
        patch, lambda connecting, session, **end: disconnect(connecting, session, **end | {"is_exempt": False})
    )


# Transactions and repeats ---------------------------------------------------------------------------------------------


def a_transaction_is_half_visible_before_it_is_durable(patch: Patch) -> None:
    commit, accept = targets.COMMIT.original, targets.ACCEPT.original
    is_first = False

    def faulty_commit(transactions: Transactions, session: ConnectionState, command: Commit) -> None:
        nonlocal is_first
        is_first = True
        try:
            commit(transactions, session, command)
        finally:
            is_first = False

    def faulty_accept(
        arrivals: Arrivals,
        queue: Queue,
        message: SentMessage,
        batch: int = SENT_ALONE,
        contents: ContentNumbers = NO_CONTENTS,
    ) -> bool:
        nonlocal is_first
        seen_at, is_first = 0 if is_first else batch, False
        return accept(arrivals, queue, message, seen_at, contents)

    targets.COMMIT.replace(patch, faulty_commit)
    targets.ACCEPT.replace(patch, faulty_accept)


def a_transaction_has_the_sequences_of_its_sends(patch: Patch) -> None:
    send = targets.SEND.original

    def faulty(sending: Sending, session: ConnectionState, command: Send) -> None:
        if command.transaction is not None:
            targets.skip_sequence(sending)
        send(sending, session, command)
        if command.transaction is not None:
            session.transaction(command.transaction).sends.sort(key=lambda each: each.message.priority)

    targets.SEND.replace(patch, faulty)


def a_repeat_is_accepted_again(patch: Patch) -> None:
    targets.IS_REPEAT.replace(patch, lambda sending, session, said: False)


def _change_repeated_commit(patch: Patch, end: Callable[[Transactions, ConnectionState, str], None]) -> None:
    """A repeated COMMIT ends its open transaction otherwise."""
    commit = targets.COMMIT.original

    def faulty(transactions: Transactions, session: ConnectionState, command: Commit) -> None:
        is_open = command.transaction in session.transactions
        if is_open and command.producer is not None and targets.IS_REPEAT.of(transactions)(session, command):
            end(transactions, session, command.transaction)
            return
        commit(transactions, session, command)

    targets.COMMIT.replace(patch, faulty)


@shows_rarely_in(BrokerMachine, first=11)
def a_repeated_commit_counts_no_attempt_of_the_messages_it_requeues(patch: Patch) -> None:
    _change_repeated_commit(patch, _abort_without_an_attempt)


@shows_in(BrokerMachine, first=16)
def messages_acknowledged_in_a_repeated_commit_stay_acknowledged(patch: Patch) -> None:
    def faulty(transactions: Transactions, session: ConnectionState, name: str) -> None:
        transaction = session.transactions[name]
        for entry in transaction.acknowledged():
            targets.ACKNOWLEDGED.of(transactions)(entry)
            del transaction.held[entry.sequence]
        targets.ABORT_TRANSACTION.of(transactions)(session, name, counts_all=True)

    _change_repeated_commit(patch, faulty)


def a_repeated_send_is_not_said_to_be_one(patch: Patch) -> None:
    send = targets.SEND.original

    def faulty(sending: Sending, session: ConnectionState, command: Send) -> None:
        send(sending, session, command)
        command.is_repeat = False

    targets.SEND.replace(patch, faulty)


@shows_in(BrokerMachine, first=1)
def a_repeated_commit_is_not_said_to_be_one(patch: Patch) -> None:
    commit = targets.COMMIT.original

    def faulty(transactions: Transactions, session: ConnectionState, command: Commit) -> None:
        commit(transactions, session, command)
        command.is_repeat = False

    targets.COMMIT.replace(patch, faulty)


@shows_in(BrokerMachine, first=1)
def the_receipt_of_a_repeat_does_not_wait_for_the_first(patch: Patch) -> None:
    is_repeat = targets.IS_REPEAT.original

    def faulty(sending: Sending, session: ConnectionState, said: Send | Commit) -> bool:
        batch = session.last_batch
        answer = is_repeat(sending, session, said)
        session.last_batch = batch
        return answer

    targets.IS_REPEAT.replace(patch, faulty)


@shows_in(ProducersMachine)
def a_producer_of_a_commit_is_forgotten_early(patch: Patch) -> None:
    record = targets.RECORD_PRODUCER.original

    def faulty(producers: ProducerRegistry, said: Send | Commit, *, is_stored: bool) -> None:
        assert said.producer is not None
        is_new = said.producer not in targets.producers(producers)
        record(producers, said, is_stored=is_stored)
        if is_new:
            targets.sent_once(producers)[said.producer] = None

    targets.RECORD_PRODUCER.replace(patch, faulty)


@shows_in(ProducersMachine)
def a_producer_of_two_sends_is_forgotten_early(patch: Patch) -> None:
    record = targets.RECORD_PRODUCER.original

    def faulty(producers: ProducerRegistry, said: Send | Commit, *, is_stored: bool) -> None:
        assert said.producer is not None
        was_once = said.producer in targets.sent_once(producers)
        record(producers, said, is_stored=is_stored)
        if was_once and isinstance(said, Send):
            targets.sent_once(producers)[said.producer] = None

    targets.RECORD_PRODUCER.replace(patch, faulty)


@shows_in(ProducersMachine)
def a_producer_that_repeated_its_send_is_forgotten_early(patch: Patch) -> None:
    repeated = targets.FIND_REPEATED.original

    def faulty(producers: ProducerRegistry, said: Send | Commit) -> Producer | None:
        assert said.producer is not None
        was_once = said.producer in targets.sent_once(producers)
        known = repeated(producers, said)
        if was_once:
            targets.sent_once(producers)[said.producer] = None
        return known

    targets.FIND_REPEATED.replace(patch, faulty)


@shows_in(ProducersMachine)
def a_crash_forgets_that_a_producer_repeated_its_send(patch: Patch) -> None:
    repeated = targets.FIND_REPEATED.original

    def faulty(producers: ProducerRegistry, said: Send | Commit) -> Producer | None:
        assert said.producer is not None
        batch = targets.commit_state_of(producers).batch
        written = batch.producers.get(said.producer)
        known = repeated(producers, said)
        batch.producers.pop(said.producer, None)
        if written is not None:
            batch.producers[said.producer] = written
        return known

    targets.FIND_REPEATED.replace(patch, faulty)


@shows_in(ProducersMachine)
def a_producer_is_forgotten_within_the_hour(patch: Patch) -> None:
    targets.PRODUCER_RETENTION_MS_MIN.replace(patch, 45 * 60 * 1000)


@shows_in(ProducersMachine)
def a_producer_is_not_forgotten_for_a_new_one_after_an_hour(patch: Patch) -> None:
    targets.PRODUCER_RETENTION_MS_MIN.replace(patch, 3600 * 1000 + 1)


@shows_in(ProducersMachine)
def the_producer_used_last_is_forgotten_early(patch: Patch) -> None:
    def faulty(producers: ProducerRegistry) -> str | None:
        now_ms = targets.commit_state_of(producers).now_ms
        old = [
            name
            for name in targets.sent_once(producers)
            if targets.producers(producers)[name].used_ms + 3600 * 1000 <= now_ms
        ]
        return old[-1] if old else None

    targets.DISPENSABLE_PRODUCER.replace(patch, faulty)


@shows_in(ProducersMachine)
def sends_and_commits_count_together(patch: Patch) -> None:
    use = targets.USE_NUMBER.original

    def faulty(producer: Producer, number: int, *, is_commit: bool, declares_gapless: bool) -> None:
        use(producer, number, is_commit=is_commit, declares_gapless=declares_gapless)
        producer.highest_send = producer.highest_commit = max(producer.highest_send, producer.highest_commit)

    targets.USE_NUMBER.replace(patch, faulty)


@shows_in(ProducersMachine)
def a_number_that_is_too_far_on_is_accepted(patch: Patch) -> None:
    targets.CHECK_GAP.replace(patch, lambda name, number, highest: None)


@shows_in(ProducersMachine)
def a_gapless_producer_may_leave_numbers_out_unless_it_repeats_that_it_is_gapless(patch: Patch) -> None:
    has_used = targets.HAS_USED.original

    def faulty(producer: Producer, name: str, number: int, *, is_commit: bool, declares_gapless: bool) -> bool:
        declared = producer.is_gapless
        if not declares_gapless:
            producer.is_gapless = False
        try:
            return has_used(producer, name, number, is_commit=is_commit, declares_gapless=declares_gapless)
        finally:
            producer.is_gapless = declared

    targets.HAS_USED.replace(patch, faulty)


@shows_in(ProducersMachine)
def a_commit_that_was_resolved_is_taken_for_a_repeat(patch: Patch) -> None:
    has_used = targets.HAS_USED.original

    def faulty(producer: Producer, name: str, number: int, *, is_commit: bool, declares_gapless: bool) -> bool:
        if is_commit and number in producer.resolved:
            return True
        return has_used(producer, name, number, is_commit=is_commit, declares_gapless=declares_gapless)

    targets.HAS_USED.replace(patch, faulty)


@shows_in(ProducersMachine)
def a_repeat_of_a_number_that_may_have_been_left_out_is_said_to_have_happened(patch: Patch) -> None:
    targets.IS_USE_UNKNOWN.replace(patch, lambda producer, number, *, is_commit: False)


@shows_in(ProducersMachine)
def a_resolved_commit_leaves_a_gap(patch: Patch) -> None:
    resolve = targets.RESOLVE.original

    def faulty(producer: Producer, number: int) -> bool:
        declared = producer.is_gapless
        producer.is_gapless = False
        try:
            return resolve(producer, number)
        finally:
            producer.is_gapless = declared

    targets.RESOLVE.replace(patch, faulty)


@shows_in(ProducersMachine, first=20)
def commits_below_forgotten_resolved_ones_count_as_committed(patch: Patch) -> None:
    resolve = targets.RESOLVE.original

    def faulty(producer: Producer, number: int) -> bool:
        unknown = producer.highest_unknown_commit
        is_resolved = resolve(producer, number)
        producer.highest_unknown_commit = unknown
        return is_resolved

    targets.RESOLVE.replace(patch, faulty)


@shows_in(ProducersMachine)
def a_crash_forgets_resolved_commits(patch: Patch) -> None:
    state = targets.STATE_OF_PRODUCER.original

    def faulty(producers: ProducerRegistry, name: str, producer: Producer) -> ProducerState:
        return structs.replace(state(producers, name, producer), resolved=())

    targets.STATE_OF_PRODUCER.replace(patch, faulty)


@shows_in(ProducersMachine)
def a_crash_forgets_that_a_producer_is_gapless(patch: Patch) -> None:
    state = targets.STATE_OF_PRODUCER.original

    def faulty(producers: ProducerRegistry, name: str, producer: Producer) -> ProducerState:
        return structs.replace(state(producers, name, producer), is_gapless=None)

    targets.STATE_OF_PRODUCER.replace(patch, faulty)


@shows_in(ProducersMachine)
def an_answer_about_a_producer_does_not_wait_until_it_is_durable(patch: Patch) -> None:
    ask = targets.QUERY_PRODUCER.original

    def faulty(producers: ProducerRegistry, name: str, commit: int | None, *, resolves: bool) -> ProducerInfo:
        return ask(producers, name, commit, resolves=resolves)._replace(batch=0)

    targets.QUERY_PRODUCER.replace(patch, faulty)


@shows_in(ProducersMachine)
def numbers_of_transients_that_were_answered_are_forgotten_in_a_crash(patch: Patch) -> None:
    ask = targets.QUERY_PRODUCER.original

    def faulty(producers: ProducerRegistry, name: str, commit: int | None, *, resolves: bool) -> ProducerInfo:
        batch = targets.commit_state_of(producers).batch
        before = dict(batch.producers)
        known = ask(producers, name, commit, resolves=resolves)
        if known.outcome is not CommitOutcome.ROLLED_BACK:
            batch.producers = before
        return known

    targets.QUERY_PRODUCER.replace(patch, faulty)


@shows_in(ProducersMachine)
def a_request_to_forget_a_producer_is_answered_before_it_is_durable(patch: Patch) -> None:
    forget = targets.FORGET_PRODUCERS.original

    def faulty(producers: ProducerRegistry, session: ConnectionState, names: Iterable[str]) -> None:
        before = session.last_batch
        forget(producers, session, names)
        session.last_batch = before

    targets.FORGET_PRODUCERS.replace(patch, faulty)


@shows_in(ProducersMachine)
def the_store_still_knows_a_producer_that_is_forgotten_early(patch: Patch) -> None:
    forget = targets.FORGET_PRODUCER.original

    def faulty(producers: ProducerRegistry, name: str) -> None:
        forget(producers, name)
        targets.commit_state_of(producers).batch.forgotten_producers.remove(name)

    targets.FORGET_PRODUCER.replace(patch, faulty)


# JMS clients ----------------------------------------------------------------------------------------------------------


@shows_in(JmsMachine)
def a_kept_message_is_dispatched_again_after_its_commit(patch: Patch) -> None:
    def faulty(acknowledging: Acknowledging, kept: Iterable[tuple[BrokerConsumer, int]]) -> list[Entry]:
        for entry in take_kept(acknowledging, kept):
            targets.REQUEUE.of(acknowledging)(entry, RequeueReason.RELEASED)
        return []

    take_kept = targets.TAKE_KEPT.original
    targets.TAKE_KEPT.replace(patch, faulty)


@shows_in(JmsMachine)
def a_kept_message_is_dispatched_again_after_a_rollback(patch: Patch) -> None:
    def faulty(transactions: Transactions, session: ConnectionState, abort: Abort) -> None:
        roll_back(transactions, session, abort)
        for consumer in session.consumers.values() if session.is_jms_client else ():
            for entry in list(consumer.held.values()):
                del consumer.held[entry.sequence]
                targets.REQUEUE.of(transactions)(entry, RequeueReason.RELEASED)

    roll_back = targets.ABORT.original
    targets.ABORT.replace(patch, faulty)


@shows_in(JmsMachine, first=1)
def a_commit_acknowledges_kept_messages_but_the_first_alone(patch: Patch) -> None:
    def faulty(acknowledging: Acknowledging, kept: Iterable[tuple[BrokerConsumer, int]]) -> list[Entry]:
        return take_kept(acknowledging, list(kept)[:1])

    take_kept = targets.TAKE_KEPT.original
    targets.TAKE_KEPT.replace(patch, faulty)


def _count_delivered(patch: Patch, count: Callable[[BrokerConsumer, int], list[int]]) -> None:
    """Of JMS clients, whose acknowledgements are not cumulative."""

    def faulty(consumer: BrokerConsumer, sequence: int) -> list[int]:
        return (count if consumer.session.is_jms_client else sequences_up_to)(consumer, sequence)

    sequences_up_to = targets.SEQUENCES_UP_TO.original
    targets.SEQUENCES_UP_TO.replace(patch, faulty)


@shows_in(JmsMachine)
def an_attempt_counts_beyond_the_message_delivered_last(patch: Patch) -> None:
    _count_delivered(patch, lambda consumer, sequence: list(consumer.held))


@shows_in(JmsMachine)
def an_attempt_counts_for_the_message_delivered_last_alone(patch: Patch) -> None:
    _count_delivered(patch, lambda consumer, sequence: [sequence])


@shows_in(JmsMachine)
def an_attempt_counts_by_sequence_instead_of_order_of_dispatch(patch: Patch) -> None:
    _count_delivered(patch, lambda consumer, sequence: [each for each in consumer.held if each <= sequence])


@shows_in(JmsMachine)
def an_end_of_a_consumer_counts_no_attempt(patch: Patch) -> None:
    targets.REQUEUE_DELIVERED.replace(patch, lambda subscribing, session, consumers, last_delivered: None)


@shows_in(JmsMachine)
def an_end_of_a_consumer_counts_for_each_of_those_that_end(patch: Patch) -> None:
    def faulty(
        subscribing: Subscribing,
        session: ConnectionState,
        consumers: Iterable[BrokerConsumer],
        last_delivered: int | None,
    ) -> None:
        consumers = list(consumers)
        if any(last_delivered in consumer.held for consumer in consumers):
            for consumer in consumers:
                requeue_delivered(subscribing, session, [consumer], next(reversed(consumer.held), None))

    requeue_delivered = targets.REQUEUE_DELIVERED.original
    targets.REQUEUE_DELIVERED.replace(patch, faulty)


@shows_in(JmsMachine)
def an_attempt_by_the_end_of_a_consumer_is_one_by_a_lost_connection(patch: Patch) -> None:
    def faulty(settlement: Settlement, entry: Entry, reason: RequeueReason, **named: Any) -> None:
        requeue(settlement, entry, RequeueReason.LOST if reason is RequeueReason.CLOSED else reason, **named)

    requeue = targets.REQUEUE.original
    targets.REQUEUE.replace(patch, faulty)


@shows_in(JmsMachine)
def a_message_held_by_a_lost_connection_looks_new(patch: Patch) -> None:
    def faulty(settlement: Settlement, entry: Entry, reason: RequeueReason, **named: Any) -> None:
        if reason is RequeueReason.RELEASED and not entry.attempts:
            entry.was_lost = False
        requeue(settlement, entry, reason, **named)

    requeue = targets.REQUEUE.original
    targets.REQUEUE.replace(patch, faulty)


@shows_in(JmsMachine)
def the_end_of_a_connection_by_command_looks_like_a_loss(patch: Patch) -> None:
    def faulty(subscribing: Subscribing, consumer: BrokerConsumer, *, is_exempt: bool) -> None:
        for entry in consumer.held.values():
            entry.was_lost |= not entry.attempts and consumer.mode is not AckMode.AUTO
        end_consumer(subscribing, consumer, is_exempt=is_exempt)

    end_consumer = targets.END_CONSUMER.original
    targets.END_CONSUMER.replace(patch, faulty)


@shows_in(JmsMachine, first=14)
def a_producer_of_a_stomp_client_is_forgotten_for_one_of_a_jms_client(patch: Patch) -> None:
    def faulty(registry: JmsProducerRegistry) -> None:
        others = engine().state.producers
        if found := next(iter(targets.producers(others)), None):
            targets.FORGET_PRODUCER.of(others)(found)
        else:
            forget_early(registry)

    engine = _engine_at_work(patch)
    forget_early = targets.FORGET_JMS_PRODUCER_EARLY.original
    targets.FORGET_JMS_PRODUCER_EARLY.replace(patch, faulty)


@shows_in(JmsMachine, first=2)
def the_jms_producer_that_was_used_last_is_forgotten(patch: Patch) -> None:
    targets.LONGEST_UNUSED_JMS_PRODUCER.replace(
        patch, lambda registry: next(reversed(list(targets.producers(registry))), None)
    )


@shows_in(JmsMachine)
def producers_of_jms_clients_are_forgotten_by_the_name_of_others(patch: Patch) -> None:
    targets.PRODUCERS_OF.replace(patch, lambda state, session: state.producers)


@shows_in(JmsMachine)
def a_pull_request_with_a_time_is_never_withdrawn(patch: Patch) -> None:
    targets.END_OVERDUE_PULL_REQUESTS.replace(patch, targets.forget_ends_of_pull_requests)


@shows_in(JmsMachine)
def a_pull_request_with_a_time_is_withdrawn_early(patch: Patch) -> None:
    def faulty(pull_requests: PullRequests, consumer: BrokerConsumer, wait_ms: int = 0) -> None:
        add(pull_requests, consumer, -(-wait_ms // 2))

    add = targets.ADD_PULL_REQUEST.original
    targets.ADD_PULL_REQUEST.replace(patch, faulty)


# Durability -----------------------------------------------------------------------------------------------------------


def a_receipt_leaves_before_the_batch_is_durable(patch: Patch) -> None:
    def faulty(commit_state: CommitState, session: ConnectionState, answer: Answer) -> None:
        targets.ready_answers(commit_state).append((session, answer))

    targets.ANSWER.replace(patch, faulty)


@shows_in(BrokerMachine)
def a_receipt_leaves_when_the_batch_is_handed_over(patch: Patch) -> None:
    answer = targets.ANSWER.original

    def faulty(commit_state: CommitState, session: ConnectionState, said: Answer) -> None:
        if session.last_batch < targets.gathering(commit_state).number:
            targets.ready_answers(commit_state).append((session, said))
        else:
            answer(commit_state, session, said)

    targets.ANSWER.replace(patch, faulty)


def a_receipt_does_not_wait_for_an_acknowledgement(patch: Patch) -> None:
    acknowledge = targets.ACKNOWLEDGE.original

    def faulty(acknowledging: Acknowledging, session: ConnectionState, ack: Ack) -> None:
        batch = session.last_batch
        acknowledge(acknowledging, session, ack)
        session.last_batch = batch

    targets.ACKNOWLEDGE.replace(patch, faulty)


def a_receipt_waits_for_a_batch_too_many(patch: Patch) -> None:
    answer = targets.ANSWER.original

    def faulty(commit_state: CommitState, session: ConnectionState, said: Answer) -> None:
        session.last_batch = max(session.last_batch, targets.gathering(commit_state).number)
        answer(commit_state, session, said)

    targets.ANSWER.replace(patch, faulty)


def attempts_are_not_written(patch: Patch) -> None:
    last_batches, start = targets.LAST_BATCHES.original, targets.START.original
    mark = targets.WRITE_MARK.original
    is_stopped = False

    def faulty_mark(batch: Batch, entry: Entry, due_ms: int) -> None:
        if is_stopped:
            mark(batch, entry, due_ms)

    def faultless_last_batches(run: EngineLifespan) -> Iterator[Batch]:
        nonlocal is_stopped
        is_stopped = True
        return last_batches(run)

    def starting(run: EngineLifespan, *, after_clean_stop: bool = True, epoch: int = 0, identity: str = "") -> None:
        nonlocal is_stopped
        is_stopped = False
        start(run, after_clean_stop=after_clean_stop, epoch=epoch, identity=identity)

    targets.WRITE_MARK.replace(patch, faulty_mark)
    targets.LAST_BATCHES.replace(patch, faultless_last_batches)
    targets.START.replace(patch, starting)


def a_dead_letter_is_not_removed_from_its_queue_in_the_store(patch: Patch) -> None:
    requeue, remove = targets.REQUEUE.original, targets.WRITE_REMOVAL.original
    is_requeuing = False

    def faulty_requeue(outcomes: Settlement, entry: Entry, reason: RequeueReason, **options: Any) -> None:
        nonlocal is_requeuing
        is_requeuing = True
        try:
            requeue(outcomes, entry, reason, **options)
        finally:
            is_requeuing = False

    def faulty_remove(batch: Batch, entry: Entry) -> None:
        if not is_requeuing:
            remove(batch, entry)

    targets.REQUEUE.replace(patch, faulty_requeue)
    targets.WRITE_REMOVAL.replace(patch, faulty_remove)


def a_clean_stop_forgets_the_transients(patch: Patch) -> None:
    write_down = targets.STORE_ENTRY.original

    def faulty(run: EngineLifespan, entry: Entry) -> None:
        if entry.store_batch:
            write_down(run, entry)

    targets.STORE_ENTRY.replace(patch, faulty)


def messages_recovered_after_a_crash_are_not_flagged_as_redelivered(patch: Patch) -> None:
    entry_of = targets.LOAD_ENTRY.original

    def faulty(reading: PageReader, lane: Lane, found: PageMessage, message: SentMessage) -> Entry:
        targets.forget_what_may_be_redelivered(reading)
        return entry_of(reading, lane, found, message)

    targets.LOAD_ENTRY.replace(patch, faulty)


def sequences_are_used_again_after_a_crash(patch: Patch) -> None:
    init = targets.MAKE_ENGINE.original

    def faulty(engine: Engine, known: CommitState, **arguments: Any) -> None:
        first = max(1, known.sequence_limit - SEQUENCE_BLOCK)
        commit_state = CommitState(known.events, sequence_limit=first, redelivered_below=known.redelivered_below)
        init(engine, commit_state, **arguments)

    targets.MAKE_ENGINE.replace(patch, faulty)


def the_mark_of_a_clean_stop_is_left_standing(patch: Patch) -> None:
    start = targets.START.original

    def faulty(run: EngineLifespan, *, after_clean_stop: bool = True, epoch: int = 0, identity: str = "") -> None:
        start(run, after_clean_stop=after_clean_stop, epoch=epoch, identity=identity)
        targets.gathering(run).clean_stop = None

    targets.START.replace(patch, faulty)


def the_removal_of_a_write_that_was_cancelled_is_written(patch: Patch) -> None:
    remove = targets.WRITE_REMOVAL.original

    def faulty(batch: Batch, entry: Entry) -> None:
        is_cancelled = entry.store_batch == batch.number
        remove(batch, entry)
        if is_cancelled:
            key = message_key(entry.lane.key, entry.sequence)
            (batch.removes if entry.persistent else batch.transient_removes).append(key)

    targets.WRITE_REMOVAL.replace(patch, faulty)


# Pages ----------------------------------------------------------------------------------------------------------------


@shows_in(PagingMachine)
def a_page_does_not_show_the_batch_that_it_names(patch: Patch) -> None:
    write, read_page = targets.WRITE_TO_DISK.original, targets.READ_FROM_DISK.original
    before: WeakKeyDictionary[Disk, dict[bytes, Stored]] = WeakKeyDictionary()

    def faulty_write(disk: Disk) -> None:
        before[disk] = disk.contents()
        write(disk)

    def faulty_read(disk: Disk) -> tuple[StoreRead, PageResult]:
        read, page = read_page(disk)
        behind = message_key(read.lane.key, read.after_sequence)
        keys = sorted(key for key in before[disk] if key.startswith(read.lane.key) and key > behind)
        page.is_end = len(keys) <= read.limit
        page.messages = [
            PageMessage(sequence_of(key), each.message, each.mark, each.content)
            for key in keys[: read.limit]
            for each in [before[disk][key]]
        ]
        return read, page

    targets.WRITE_TO_DISK.replace(patch, faulty_write)
    targets.READ_FROM_DISK.replace(patch, faulty_read)


@shows_in(PagingMachine, first=2)
def a_page_is_taken_in_before_its_batch_is_known_to_be_durable(patch: Patch) -> None:
    def faulty(results: StoreResults, read: StoreRead, page: PageResult) -> None:
        read.on_page(page)
        read.finish()
        for entry in targets.take_failed(results):
            targets.DEAD_LETTER.of(results)(entry)
        targets.touched(results)[read.lane.queue] = None

    targets.PAGE_READ.replace(patch, faulty)


@shows_in(PagingMachine)
def a_page_brings_back_messages_held_or_acknowledged_meanwhile(patch: Patch) -> None:
    page_read = targets.APPLY_PAGE.original

    def faulty(reading: PageReader, read: LaneRead, page: PageResult) -> None:
        lane = read.lane
        if lane.pending_read is read:
            last = max(lane.unloaded, default=0)
            again = [each for each in page.messages if last < each.sequence <= lane.horizon]
            if again:
                lane.unread += len(again)
                lane.horizon = again[0].sequence - 1
        page_read(reading, read, page)

    targets.APPLY_PAGE.replace(patch, faulty)


@shows_in(PagingMachine, first=9)
def a_page_moves_the_horizon_past_a_commit_in_flight(patch: Patch) -> None:
    _lose_what_a_page_does_not_show(patch, at_the_end=False)


@shows_in(PagingMachine)
def the_last_page_loses_messages_committed_meanwhile(patch: Patch) -> None:
    _lose_what_a_page_does_not_show(patch, at_the_end=True)


def _lose_what_a_page_does_not_show(patch: Patch, *, at_the_end: bool) -> None:
    move_horizon = targets.MOVE_HORIZON.original

    def faulty(
        resident_set: ResidentSet, lane: Lane, fresh: list[Entry], left_out: int, up_to: int, as_of: int
    ) -> None:
        recent = [entry for entry in lane.unread_in_memory if entry.sequence <= up_to]
        move_horizon(resident_set, lane, fresh, left_out, up_to, as_of)
        if (up_to == UNBOUNDED) is at_the_end:
            for entry in recent:
                if entry.message is not None:
                    _take_out(lane.queue, entry)
                    resident_set.unload(entry)

    targets.MOVE_HORIZON.replace(patch, faulty)


@shows_in(PagingMachine)
def a_lane_that_must_be_read_is_overtaken_by_lower_ones(patch: Patch) -> None:
    _change_give_out(patch, lambda lane, receivers, goes_on: goes_on or bool(receivers))


@shows_in(PagingMachine, first=1)
def a_commit_in_flight_holds_back_lower_priorities_above_a_horizon(patch: Patch) -> None:
    _change_give_out(patch, lambda lane, receivers, goes_on: goes_on and not lane.unread)


def _change_give_out(patch: Patch, change: Callable[[Lane, list[RankedConsumer], bool], bool]) -> None:
    give_out = targets.DISPATCH_LANE.original

    def faulty(dispatcher: Dispatcher, lane: Lane, receivers: list[RankedConsumer], *rest: Any) -> bool:
        return change(lane, receivers, give_out(dispatcher, lane, receivers, *rest))

    targets.DISPATCH_LANE.replace(patch, faulty)


@shows_in(PagingMachine)
def a_page_that_is_being_read_holds_back_higher_priorities(patch: Patch) -> None:
    dispatch = targets.DISPATCH.original

    def faulty(dispatcher: Dispatcher, queue: Queue, *rest: Any) -> Lane | None:
        if any(lane.pending_read is not None for lane in queue.lanes):
            return None
        return dispatch(dispatcher, queue, *rest)

    targets.DISPATCH.replace(patch, faulty)


# Memory ---------------------------------------------------------------------------------------------------------------


@shows_in(PagingMachine)
def messages_leave_memory_at_the_wrong_end(patch: Patch) -> None:
    def faulty(lane: Lane) -> Entry:
        entry = lane.arrived.popleft()
        lane.horizon = min(lane.horizon, entry.sequence - 1)
        lane.unread += 1
        lane.pending_read = None
        return entry

    targets.LOWER_HORIZON.replace(patch, faulty)


@shows_in(PagingMachine)
def messages_leave_memory_before_they_are_durable(patch: Patch) -> None:
    lower_horizon = targets.LOWER_HORIZON_OF_ONE.original

    def faulty(eviction: Eviction, lane: Lane) -> None:
        # What is told of it asks its message.
        targets.events_of(eviction).end_block()
        with targets.pretending(eviction, last_committed=maxsize):
            lower_horizon(eviction, lane)

    targets.LOWER_HORIZON_OF_ONE.replace(patch, faulty)


@shows_in(PagingMachine)
def recent_messages_leave_memory_while_a_page_is_read(patch: Patch) -> None:
    let_go = targets.POP_DURABLE.original

    def faulty(lane: Lane, committed: int) -> list[Entry]:
        reading, lane.pending_read = lane.pending_read, None
        gone = let_go(lane, committed)
        lane.pending_read = reading
        return gone

    targets.POP_DURABLE.replace(patch, faulty)


@shows_in(PagingMachine)
def a_transient_leaves_memory_without_being_written(patch: Patch) -> None:
    def faulty(batch: Batch, copies: list[Entry]) -> None:
        for entry in copies:
            entry.store_batch = batch.number - 1

    targets.WRITE_EVICTED.replace(patch, faulty)


@shows_in(PagingMachine)
def a_held_transient_leaves_memory_without_being_written(patch: Patch) -> None:
    disembody = targets.UNLOAD_BODIES.original

    def faulty(eviction: Eviction, entries: list[Entry], needed: int, *, are_held: bool = False) -> int:
        used = targets.memory(eviction).message_bytes
        # What is told of these asks their messages.
        targets.events_of(eviction).end_block()
        for entry in [entry for entry in entries if entry.store_batch is None]:
            entries.remove(entry)
            targets.UNLOAD.of(eviction)(entry)
        left = used - targets.memory(eviction).message_bytes
        return left + disembody(eviction, entries, needed - left, are_held=are_held)

    targets.UNLOAD_BODIES.replace(patch, faulty)


@shows_in(PagingMachine)
def a_message_requeued_without_its_body_is_lost(patch: Patch) -> None:
    return_to_lane = targets.RETURN_TO_LANE.original

    def faulty(lane: Lane, entry: Entry) -> None:
        if entry.message is not None:
            return_to_lane(lane, entry)

    targets.RETURN_TO_LANE.replace(patch, faulty)


@shows_in(PagingMachine)
def a_message_that_fails_without_its_body_is_never_dead_lettered(patch: Patch) -> None:
    targets.AWAIT_DEAD_LETTER.replace(patch, lambda paging, entry: None)


@shows_in(PagingMachine)
def a_body_that_is_read_again_is_not_counted(patch: Patch) -> None:
    embody, came = targets.RESTORE_BODY.original, targets.COUNT_LOADED.original

    def faulty(reading: PageReader, entry: Entry, found: PageMessage) -> bool:
        targets.COUNT_LOADED.replace(patch, lambda reading, entry, message: None)
        was_doomed = embody(reading, entry, found)
        targets.COUNT_LOADED.replace(patch, came)
        return was_doomed

    targets.RESTORE_BODY.replace(patch, faulty)


@shows_in(FailingMachine)
def a_delayed_message_loses_its_place(patch: Patch) -> None:
    def faulty(outcomes: Settlement, entry: Entry) -> None:
        lane = entry.lane
        if lane.delayed.pop(entry.sequence, None) is not None:
            _arrived_of(lane).append(entry)
        targets.touched(outcomes)[lane.queue] = None

    targets.END_DELAY.replace(patch, faulty)


@shows_in(FailingMachine)
def a_blocking_message_is_overtaken(patch: Patch) -> None:
    delay = targets.DELAY.original

    def faulty(delays: DelayedEntries, entry: Entry, delay_ms: int) -> bool:
        delay(delays, entry, delay_ms)
        return True

    targets.DELAY.replace(patch, faulty)


@shows_in(FailingMachine)
def a_blocking_message_holds_back_messages_before_it(patch: Patch) -> None:
    dispatch = targets.DISPATCH.original

    def faulty(dispatcher: Dispatcher, queue: Queue, deliveries: Deliveries) -> Lane | None:
        if any(entry.due_us and entry.sequence not in lane.delayed for lane in queue.lanes for entry in lane):
            return None
        return dispatch(dispatcher, queue, deliveries)

    targets.DISPATCH.replace(patch, faulty)


@shows_in(FailingMachine)
def a_delay_is_lost_by_a_restart(patch: Patch) -> None:
    targets.RESTORE_DELAY.replace(patch, lambda delays, entry, due_ms: False)


@shows_in(FailingMachine)
def a_delay_is_not_written(patch: Patch) -> None:
    targets.DUE_MS.replace(patch, lambda delays, entry: 0)


@shows_in(FailingMachine)
def a_delay_is_measured_by_the_wall_clock(patch: Patch) -> None:
    tick = targets.TICK.original
    targets.TICK.replace(patch, lambda commit_state, now_us, steady_us: tick(commit_state, now_us, now_us))


@shows_in(FailingMachine)
def a_due_message_does_not_start_a_dispatch(patch: Patch) -> None:
    end_delay = targets.END_DELAY.original

    def faulty(outcomes: Settlement, entry: Entry) -> None:
        touched = dict(targets.touched(outcomes))
        end_delay(outcomes, entry)
        targets.touched(outcomes).clear()
        targets.touched(outcomes).update(touched)

    targets.END_DELAY.replace(patch, faulty)


@shows_in(FailingMachine)
def a_message_has_one_attempt_too_many(patch: Patch) -> None:
    is_undeliverable = targets.IS_UNDELIVERABLE.original

    def faulty(queue: Queue, attempts: int, due: int) -> bool:
        return is_undeliverable(queue, attempts, due) and attempts != queue.policy.attempts_max

    targets.IS_UNDELIVERABLE.replace(patch, faulty)


@shows_in(FailingMachine)
def messages_requeued_by_a_lost_connection_are_delayed(patch: Patch) -> None:
    requeue = targets.REQUEUE.original

    def faulty(outcomes: Settlement, entry: Entry, reason: RequeueReason, **options: Any) -> None:
        requeue(outcomes, entry, reason, **options | {"delay_ms": options.get("delay_ms") or 5})

    targets.REQUEUE.replace(patch, faulty)


@shows_in(FailingMachine)
def a_nack_inside_a_transaction_forgets_its_headers(patch: Patch) -> None:
    def faulty(acknowledging: Acknowledging, session: ConnectionState, nack: Nack) -> None:
        nack_message(
            acknowledging,
            session,
            Nack(nack.subscription, nack.sequence, nack.transaction) if nack.transaction else nack,
        )

    nack_message = targets.NACK.original
    targets.NACK.replace(patch, faulty)


@shows_in(FailingMachine)
def an_abort_keeps_the_headers_of_a_nack(patch: Patch) -> None:
    fail = targets.FAIL.original
    nacks: dict[int, Nack] = {}
    nack_message = targets.NACK.original

    def noting(acknowledging: Acknowledging, session: ConnectionState, nack: Nack) -> None:
        nacks[nack.sequence] = nack
        nack_message(acknowledging, session, nack)

    targets.NACK.replace(patch, noting)
    targets.FAIL.replace(
        patch,
        lambda outcomes, entry, reason, nack=None, **options: fail(
            outcomes, entry, reason, nacks.get(entry.sequence), **options
        ),
    )


@shows_in(FailingMachine)
def a_page_brings_back_messages_removed_out_of_turn(patch: Patch) -> None:
    targets.REMOVE_FROM_LANE.replace(patch, _taken_out_without_a_trace)


def _taken_out_without_a_trace(resident: ResidentSet, lane: Lane, entries: list[Entry]) -> None:
    horizon.remove_entries(lane, entries, targets.commit_state_of(resident).batch.number)
    lane.removed.clear()


@shows_in(FailingMachine)
def a_re_drive_moves_a_message_twice(patch: Patch) -> None:
    """The page was read before the last move was durable, and the moved messages are not remembered."""
    targets.CAN_EXECUTE_BULK.replace(patch, property(lambda bulk: True))
    targets.REMOVE_FROM_LANE.replace(patch, _taken_out_without_a_trace)


@shows_in(FailingMachine)
def a_re_drive_takes_messages_that_a_consumer_holds(patch: Patch) -> None:
    at_work = _engine_at_work(patch)

    def faulty(
        asked: BulkRequest, read: BulkRead, page: PageResult, committed: int, now_ms: int, has_ended: Any
    ) -> object:
        consumers = targets.receivers_of(at_work(), read.lane.queue).consumers
        held = {entry.sequence: entry for consumer in consumers for entry in consumer.held.values()}
        taken = {each.sequence: held[each.sequence] for each in page.messages if each.sequence in held}
        if taken:
            read.lane.delayed = {**read.lane.delayed, **taken}
        return targets.PLAN_BULK_PIECE.original(asked, read, page, committed, now_ms, has_ended)

    targets.PLAN_BULK_PIECE.replace(patch, faulty)


@shows_in(FailingMachine)
def a_re_drive_leaves_the_dead_letter_in_the_store(patch: Patch) -> None:
    do_bulk = targets.EXECUTE_BULK.original

    def faulty(bulk: BulkPieceExecutor, asked: BulkRequest, read: BulkRead, page: PageResult) -> BulkResult:
        with pytest.MonkeyPatch.context() as inner:
            targets.FORGET.replace(inner, lambda outcomes, entry: targets.UNLOAD.of(outcomes)(entry))
            return do_bulk(bulk, asked, read, page)

    targets.EXECUTE_BULK.replace(patch, faulty)


@shows_in(BulkMachine)
def a_purge_removes_messages_that_a_consumer_holds(patch: Patch) -> None:
    at_work = _engine_at_work(patch)

    def faulty(
        asked: BulkRequest, read: BulkRead, page: PageResult, *rest: Any
    ) -> tuple[list[PlannedRemoval], BulkResult]:
        here, answer = targets.PLAN_BULK_PIECE.original(asked, read, page, *rest)
        taken = {each.entry.sequence for each in here}
        consumers = targets.receivers_of(at_work(), read.lane.queue).consumers
        for consumer in consumers if isinstance(asked, Purge) else ():
            for entry in consumer.held.values():
                if entry.lane is read.lane and entry.sequence not in taken:
                    here.append(PlannedRemoval(entry, None))
        return here, answer

    targets.PLAN_BULK_PIECE.replace(patch, faulty)


@shows_in(BulkMachine)
def a_move_duplicates_its_messages(patch: Patch) -> None:
    def faulty(
        asked: BulkRequest, read: BulkRead, page: PageResult, *rest: Any
    ) -> tuple[list[PlannedRemoval], BulkResult]:
        here, answer = targets.PLAN_BULK_PIECE.original(asked, read, page, *rest)
        return here + here[-1:] if isinstance(asked, Move) else here, answer

    targets.PLAN_BULK_PIECE.replace(patch, faulty)
    targets.WRITE_REMOVAL.replace(patch, _removed_once)


def _removed_once(batch: Batch, entry: Entry) -> None:
    key = message_key(entry.lane.key, entry.sequence)
    is_unwritten = entry.store_batch == batch.number
    puts = batch.puts if entry.persistent else batch.transient_puts
    removes = batch.removes if entry.persistent else batch.transient_removes
    if key in puts if is_unwritten else key not in removes:
        targets.WRITE_REMOVAL.original(batch, entry)


@shows_in(BulkMachine)
def a_move_forgets_messages_that_are_only_in_memory(patch: Patch) -> None:
    targets.IN_MEMORY_OF_BULK.replace(patch, lambda lane, after, last: {})


@shows_in(BulkMachine)
def a_piece_misses_messages_evicted_while_its_page_is_read(patch: Patch) -> None:
    targets.IS_LANE_PINNED.replace(patch, property(lambda lane: False, lambda lane, value: None))


@shows_in(BulkMachine)
def a_piece_takes_messages_that_are_not_visible_yet(patch: Patch) -> None:
    def faulty(asked: BulkRequest, read: BulkRead, page: PageResult, committed: int, *rest: Any) -> object:
        return targets.PLAN_BULK_PIECE.original(asked, read, page, maxsize, *rest)

    targets.PLAN_BULK_PIECE.replace(patch, faulty)


@shows_rarely_in(BulkMachine, first=10)
def a_move_takes_messages_without_attempts_left(patch: Patch) -> None:
    targets.IS_UNDELIVERABLE_IN_BULK.replace(patch, lambda queue, attempts, due_ms: False)


@shows_in(BulkMachine)
def a_selector_of_a_purge_is_not_looked_at(patch: Patch) -> None:
    def faulty(asked: BulkRequest, read: BulkRead, page: PageResult, *rest: Any) -> object:
        return targets.PLAN_BULK_PIECE.original(structs.replace(asked, selector=None), read, page, *rest)

    targets.PLAN_BULK_PIECE.replace(patch, faulty)


@shows_in(BulkMachine)
def a_moved_message_is_visible_at_once(patch: Patch) -> None:
    do_bulk, accept = targets.EXECUTE_BULK.original, targets.ACCEPT.original

    def faulty(bulk: BulkPieceExecutor, asked: BulkRequest, read: BulkRead, page: PageResult) -> BulkResult:
        with pytest.MonkeyPatch.context() as inner:
            targets.ACCEPT.replace(inner, lambda arrivals, queue, message, batch: accept(arrivals, queue, message, 0))
            return do_bulk(bulk, asked, read, page)

    targets.EXECUTE_BULK.replace(patch, faulty)


# Scheduled sends ------------------------------------------------------------------------------------------------------


@shows_in(ScheduledMachine)
def a_due_send_stays_in_the_store(patch: Patch) -> None:
    """A crash sends it once more."""
    targets.REMOVE_SCHEDULED.replace(patch, lambda batch, entry: None)


@shows_in(ScheduledMachine)
def due_sends_lose_their_order_among_equals(patch: Patch) -> None:
    due_timer, split = targets.DUE_TIMER.original, targets.SPLIT_DUE_TIMER.original
    targets.DUE_TIMER.replace(patch, lambda due_ms, number, lane: due_timer(due_ms, number ^ 1, lane))

    def faulty(timer: bytes) -> tuple[int, int, bytes]:
        due_ms, number, lane = split(timer)
        return due_ms, number ^ 1, lane

    targets.SPLIT_DUE_TIMER.replace(patch, faulty)


@shows_in(ScheduledMachine)
def a_due_send_is_visible_before_its_batch_is_durable(patch: Patch) -> None:
    accept = targets.ACCEPT.original

    def faulty(arrivals: Arrivals, name: str, to: str, message: SentMessage, ahead: RouteAhead | None) -> int:
        accept(arrivals, targets.queues(arrivals)[name], message, 0)
        return 1

    targets.ACCEPT_DUE.replace(patch, faulty)


@shows_in(ScheduledMachine)
def a_scheduled_send_not_durable_yet_is_overtaken_by_a_later_one(patch: Patch) -> None:
    """A send that is overtaken is never sent."""
    targets.UNWRITTEN_SCHEDULED.replace(patch, property(lambda scheduler: {}, lambda scheduler, value: None))


@shows_in(ExpiringMachine, first=8)
def the_time_to_live_of_a_send_in_a_transaction_begins_before_the_commit(patch: Patch) -> None:
    send_in = targets.SEND.original

    def faulty(sending: Sending, session: ConnectionState, send: Send) -> None:
        if send.transaction is not None and send.ttl_ms:
            send.message = with_ttl(send.message, send.ttl_ms, targets.commit_state_of(sending).now_ms)
            send.ttl_ms = 0
        send_in(sending, session, send)

    targets.SEND.replace(patch, faulty)


@shows_in(ScheduledMachine)
def the_time_to_live_of_a_scheduled_send_begins_when_it_is_scheduled(patch: Patch) -> None:
    accept = targets.ACCEPT_SCHEDULED.original

    def faulty(scheduler: Scheduler, name: str, message: SentMessage, wanted: Schedule) -> None:
        if wanted.ttl_ms:
            message = with_ttl(message, wanted.ttl_ms, targets.commit_state_of(scheduler).now_ms)
        accept(scheduler, name, message, structs.replace(wanted, ttl_ms=0))

    targets.ACCEPT_SCHEDULED.replace(patch, faulty)


@shows_in(ScheduledMachine)
def a_scheduled_send_says_when_it_was_sent_instead_of_when_it_was_due(patch: Patch) -> None:
    due_message = targets.DUE_MESSAGE.original

    def faulty(scheduler: Scheduler, message: SentMessage, timing: Schedule) -> SentMessage:
        return due_message(
            scheduler, message, structs.replace(timing, due_ms=targets.commit_state_of(scheduler).now_ms)
        )

    targets.DUE_MESSAGE.replace(patch, faulty)


@shows_in(ExpiringMachine)
def a_time_to_live_is_counted_in_seconds(patch: Patch) -> None:
    with_expiry = targets.WITH_TTL.original

    def faulty(sending: Sending, send: Send) -> Send:
        return with_expiry(sending, structs.replace(send, ttl_ms=1000 * send.ttl_ms))

    targets.WITH_TTL.replace(patch, faulty)


@shows_in(ScheduledMachine)
def a_scheduled_send_is_due_by_the_clock_that_does_not_jump(patch: Patch) -> None:
    is_due = targets.IS_SCHEDULED_DUE.original
    latest: WeakKeyDictionary[Scheduler, int] = WeakKeyDictionary()

    def faulty(scheduler: Scheduler) -> bool:
        latest[scheduler] = max(targets.commit_state_of(scheduler).now_ms, latest.get(scheduler, 0))
        with targets.pretending(scheduler, now_ms=latest[scheduler]):
            return is_due(scheduler)

    page_read = targets.SEND_WHAT_IS_DUE.original

    def reading(scheduler: Scheduler, read: DueSendsRead, page: PageResult) -> None:
        now_ms = max(targets.commit_state_of(scheduler).now_ms, latest.get(scheduler, 0))
        with targets.pretending(scheduler, now_ms=now_ms):
            page_read(scheduler, read, page)

    targets.IS_SCHEDULED_DUE.replace(patch, faulty)
    targets.SEND_WHAT_IS_DUE.replace(patch, reading)


@shows_in(ScheduledMachine)
def a_transient_scheduled_send_is_not_written_down(patch: Patch) -> None:
    put = targets.WRITE_SCHEDULED.original

    def faulty(batch: Batch, entry: Entry) -> None:
        if entry.persistent:
            put(batch, entry)

    targets.WRITE_SCHEDULED.replace(patch, faulty)


@shows_in(ScheduledMachine)
def timers_of_scheduled_sends_are_forgotten_with_a_crash(patch: Patch) -> None:
    targets.TIMERS_PAGE_READ.replace(patch, _only_expiry(targets.TIMERS_PAGE_READ.original))


def _only_expiry(page_read: Callable[[Timers, TimerRead, TimersResult], None]) -> Callable[..., None]:
    def faulty(timers: Timers, read: TimerRead, page: TimersResult) -> None:
        left = [timer for timer in page.timers if timer < SCHEDULED_TIMERS]
        page_read(timers, read, TimersResult(left, page.as_of, True))

    return faulty


@shows_in(ScheduledMachine)
def a_cancelled_send_becomes_a_message_if_its_page_was_read(patch: Patch) -> None:
    """The timer stays as well: without it a page of the send hardly matters."""
    remove_timer = targets.REMOVE_TIMER.original
    look_at = targets.LIST_OR_CANCEL_SCHEDULED.original
    is_cancelling = False

    def remove_unless_cancelled(timers: Timers, timer: bytes) -> None:
        if not is_cancelling:
            remove_timer(timers, timer)

    def faulty(scheduler: Scheduler, asked: ScheduledRequest, read: BulkRead, *rest: Any) -> Any:
        nonlocal is_cancelling
        gone, is_cancelling = dict(read.lane.removed), True
        answer = look_at(scheduler, asked, read, *rest)
        read.lane.removed, is_cancelling = gone, False
        return answer

    targets.REMOVE_TIMER.replace(patch, remove_unless_cancelled)

    targets.LIST_OR_CANCEL_SCHEDULED.replace(patch, faulty)


@shows_in(ScheduledMachine)
def a_piece_cancels_a_send_that_has_become_a_message(patch: Patch) -> None:
    look_at = targets.LIST_OR_CANCEL_SCHEDULED.original

    def faulty(scheduler: Scheduler, asked: ScheduledRequest, read: BulkRead, *rest: Any) -> Any:
        gone, read.lane.removed = read.lane.removed, {}
        answer = look_at(scheduler, asked, read, *rest)
        read.lane.removed |= gone
        return answer

    targets.LIST_OR_CANCEL_SCHEDULED.replace(patch, faulty)


@shows_in(ScheduledMachine)
def a_cancelled_send_comes_back_after_a_crash(patch: Patch) -> None:
    look_at = targets.LIST_OR_CANCEL_SCHEDULED.original

    def faulty(scheduler: Scheduler, asked: ScheduledRequest, read: BulkRead, page: PageResult) -> Any:
        with targets.pretending(scheduler, batch=Batch(targets.commit_state_of(scheduler).batch.number)):
            return look_at(scheduler, asked, read, page)

    targets.LIST_OR_CANCEL_SCHEDULED.replace(patch, faulty)


@shows_in(ScheduledMachine)
def a_piece_continues_behind_messages_that_it_did_not_read(patch: Patch) -> None:
    targets.NEXT_OF_BULK.replace(patch, lambda read, at, *, is_end: None)


# Pausing --------------------------------------------------------------------------------------------------------------


@shows_in(BulkMachine)
def a_paused_queue_dispatches(patch: Patch) -> None:
    """Dispatch happens in turns that visit the queue for another reason than a send."""
    commit = targets.COMMITTED.original

    def faulty(results: StoreResults, batch: Batch) -> None:
        commit(results, batch)
        for queue in targets.queues(results).values():
            queue.is_paused = False

    targets.COMMITTED.replace(patch, faulty)


@shows_in(BulkMachine)
def a_pause_is_forgotten_with_a_crash(patch: Patch) -> None:
    targets.RESTORE_PAUSE.replace(patch, lambda run, queue: None)


@shows_in(BulkMachine)
def a_queue_that_is_resumed_is_not_looked_at(patch: Patch) -> None:
    resume = targets.RESUME.original

    def faulty(administering: Administering, name: str) -> None:
        resume(administering, name)
        targets.touched(administering).clear()

    targets.RESUME.replace(patch, faulty)


@shows_in(PagingMachine)
def waiting_messages_never_leave_memory(patch: Patch) -> None:
    targets.LOWER_HORIZONS.replace(patch, lambda paging, lanes, needed: 0)


@shows_in(PagingMachine)
def bodies_of_held_messages_do_not_leave_memory(patch: Patch) -> None:
    targets.UNLOAD_BODIES.replace(patch, lambda paging, entries, needed, are_held=False: 0)


# Browsing -------------------------------------------------------------------------------------------------------------


def a_page_of_a_browser_is_taken_into_the_lane(patch: Patch) -> None:
    page_read = targets.PAGE_READ_FOR_BROWSER.original

    def faulty(browsing: BrowseTask, read: BrowseRead, page: PageResult) -> None:
        lane = read.lane
        if page.messages and read.after_sequence <= lane.horizon != UNBOUNDED:
            taken = sum(found.sequence > lane.horizon for found in page.messages)
            horizon.apply_page(lane, [], taken, max(lane.horizon, page.messages[-1].sequence), page.as_of)
        page_read(browsing, read, page)

    targets.PAGE_READ_FOR_BROWSER.replace(patch, faulty)


def a_browser_sees_one_page_of_a_lane(patch: Patch) -> None:
    show_page = targets.SHOW_PAGE.original

    def faulty(browsing: BrowseTask, read: BrowseRead, *rest: Any) -> None:
        show_page(browsing, read, *rest)
        read.browser.next_lane()

    targets.SHOW_PAGE.replace(patch, faulty)


def a_browser_sees_only_messages_in_memory(patch: Patch) -> None:
    show_slice = targets.SHOW_SLICE.original

    def faulty(browsing: BrowseTask, browser: Browser, *rest: Any) -> BrowseRead | None:
        while (read := show_slice(browsing, browser, *rest)) is not None:
            if read.lane.rank == browser.rank:
                browser.next_lane()
        return None

    targets.SHOW_SLICE.replace(patch, faulty)


def the_last_message_of_a_browsers_page_is_shown_again(patch: Patch) -> None:
    show_page = targets.SHOW_PAGE.original

    def faulty(browsing: BrowseTask, read: BrowseRead, page: PageResult, *rest: Any) -> None:
        show_page(browsing, read, page, *rest)
        read.browser.after_sequence = page.messages[-1].sequence - 1 if page.messages else read.browser.after_sequence

    targets.SHOW_PAGE.replace(patch, faulty)


def a_browser_is_shown_a_lane_in_the_order_in_which_it_lies_in_memory(patch: Patch) -> None:
    def faulty(lane: Lane, after_sequence: int) -> list[Entry]:
        return [entry for entry in lane if entry.sequence > after_sequence]

    targets.IN_MEMORY_OF_BROWSER.replace(patch, faulty)


def a_browser_misses_messages_being_written(patch: Patch) -> None:
    init = targets.READ_FOR_BROWSER.original

    def faulty(read: BrowseRead, *arguments: Any) -> None:
        init(read, *arguments)
        read.unread_in_memory = {}

    targets.READ_FOR_BROWSER.replace(patch, faulty)


@shows_in(BrokerMachine, first=1)
def a_browser_misses_messages_evicted_while_its_page_was_read(patch: Patch) -> None:
    show_page = targets.SHOW_PAGE.original

    def faulty(browsing: BrowseTask, read: BrowseRead, page: PageResult, *rest: Any) -> None:
        read.unread_in_memory = {
            sequence: entry for sequence, entry in read.unread_in_memory.items() if entry.message is not None
        }
        show_page(browsing, read, page, *rest)

    targets.SHOW_PAGE.replace(patch, faulty)


def a_browser_misses_requeued_messages_that_have_left_memory(patch: Patch) -> None:
    show_page = targets.SHOW_PAGE.original

    def faulty(browsing: BrowseTask, read: BrowseRead, page: PageResult, *rest: Any) -> None:
        if isinstance(read, BrowseEntryRead):
            page.messages = []
            page.is_end = True
        show_page(browsing, read, page, *rest)

    targets.SHOW_PAGE.replace(patch, faulty)


def a_browser_is_shown_invisible_messages(patch: Patch) -> None:
    _change_show(patch, last_committed=maxsize)


@shows_in(BrokerMachine)
def a_browser_is_shown_expired_messages(patch: Patch) -> None:
    _change_show(patch, now_ms=0)


def _change_show(patch: Patch, **moment: int) -> None:
    show = targets.SHOW.original

    def faulty(browsing: BrowseTask, browser: Browser, entry: Entry, shown: list[Entry]) -> None:
        with targets.pretending(browsing, **moment):
            show(browsing, browser, entry, shown)

    targets.SHOW.replace(patch, faulty)


def browsing_counts_as_a_delivery(patch: Patch) -> None:
    show = targets.SHOW.original

    def faulty(browsing: BrowseTask, browser: Browser, entry: Entry, shown: list[Entry]) -> None:
        entry.deliveries += 1
        show(browsing, browser, entry, shown)

    targets.SHOW.replace(patch, faulty)


def a_browser_is_shown_messages_that_consumers_hold(patch: Patch) -> None:
    at_work = _engine_at_work(patch)
    in_memory = targets.IN_MEMORY_OF_BROWSER.original

    def faulty(lane: Lane, after_sequence: int) -> list[Entry]:
        consumers = targets.receivers_of(at_work(), lane.queue).consumers
        held = [entry for consumer in consumers for entry in consumer.held.values()]
        here = [entry for entry in held if entry.lane is lane and entry.sequence > after_sequence]
        return sorted([*here, *in_memory(lane, after_sequence)], key=lambda entry: entry.sequence)

    targets.IN_MEMORY_OF_BROWSER.replace(patch, faulty)


@shows_in(BrokerMachine)
def a_browse_never_ends(patch: Patch) -> None:
    targets.IS_BROWSER_OPEN.replace(patch, lambda browser: True)


def the_selector_of_a_browser_is_asked_for_priorities_alone(patch: Patch) -> None:
    targets.MATCHES_SELECTOR.replace(patch, lambda selector, message: True)


def queues_that_are_there_keep_their_policy(patch: Patch) -> None:
    def faulty(administering: Administering, policies: Policies) -> None:
        targets.set_policies(administering, policies)

    targets.CHANGE_POLICIES.replace(patch, faulty)


@shows_in(FailingMachine)
def waiting_messages_are_not_given_up_when_the_policy_changes(patch: Patch) -> None:
    targets.DEAD_LETTER_EXHAUSTED.replace(patch, lambda outcomes, lane: None)


@shows_rarely_in(FailingMachine, first=9)
def a_message_given_up_without_its_body_keeps_an_old_mark(patch: Patch) -> None:
    give_up = targets.DEAD_LETTER_EXHAUSTED.original

    def faulty(outcomes: Settlement, lane: Lane) -> None:
        known = dict(targets.gathering(outcomes).marks)
        give_up(outcomes, lane)
        targets.gathering(outcomes).marks = known

    targets.DEAD_LETTER_EXHAUSTED.replace(patch, faulty)


@shows_in(FailingMachine)
def the_last_of_many_given_up_together_is_never_dead_lettered(patch: Patch) -> None:
    pop = targets.POP_GIVEN_UP.original

    def faulty(given_up: EntriesByLane, count: int) -> list[Entry]:
        found = pop(given_up, count)
        return found if given_up else found[:-1]

    targets.POP_GIVEN_UP.replace(patch, faulty)


@shows_in(FailingMachine)
def a_message_given_up_beside_many_is_lost_at_a_clean_stop(patch: Patch) -> None:
    awaiting = targets.AWAITING_DEAD_LETTER.original
    targets.AWAITING_DEAD_LETTER.replace(
        patch, lambda resident: [entry for entry in awaiting(resident) if entry.message is None]
    )


@shows_in(FailingMachine)
def a_message_given_up_beside_many_is_not_marked(patch: Patch) -> None:
    give_up = targets.GIVE_UP.original

    def faulty(outcomes: Settlement, entry: Entry, *, is_marked: bool = False) -> None:
        give_up(outcomes, entry, is_marked=is_marked or entry.message is not None)

    targets.GIVE_UP.replace(patch, faulty)


@shows_in(FailingMachine)
def a_message_requeued_without_a_failure_is_not_given_up(patch: Patch) -> None:
    requeue = targets.REQUEUE.original

    def faulty(outcomes: Settlement, entry: Entry, reason: RequeueReason, **options: Any) -> None:
        queue = entry.lane.queue
        policy = queue.policy
        if reason is RequeueReason.RELEASED:
            queue.policy = replace(policy, attempts_max=maxsize)
        requeue(outcomes, entry, reason, **options)
        queue.policy = policy

    targets.REQUEUE.replace(patch, faulty)


@shows_in(PagingMachine, first=16)
def a_smaller_limit_of_a_queue_is_kept_only_by_new_messages(patch: Patch) -> None:
    targets.MEMORY_LIMIT_CHANGED.replace(patch, lambda paging, queue: None)


# Expiry ---------------------------------------------------------------------------------------------------------------


@shows_in(ExpiringMachine)
def messages_expire_only_when_they_would_be_dispatched(patch: Patch) -> None:
    targets.EXPIRE_STEP.replace(patch, lambda *_: [])


@shows_in(ExpiringMachine)
def a_look_takes_its_page_into_the_lane(patch: Patch) -> None:
    page_read = targets.EXPIRE_IN_PAGE.original

    def faulty(expiry: ExpiryTask, read: ExpiryBlockRead, page: PageResult, *rest: Any) -> None:
        page_read(expiry, read, page, *rest)
        lane = read.lane
        for found in page.messages:
            if lane.horizon < found.sequence not in lane.removed and found.message is not None:
                _arrived_of(lane).append(targets.LOAD_ENTRY.of(expiry)(lane, found, found.message))

    targets.EXPIRE_IN_PAGE.replace(patch, faulty)


@shows_in(ExpiringMachine)
def messages_above_the_horizon_do_not_expire(patch: Patch) -> None:
    entry_of = targets.UNLOADED_ENTRIES.original

    def faulty(expiry: ExpiryTask, lane: Lane, found: PageMessage) -> list[Entry]:
        return entry_of(expiry, lane, found) if found.sequence <= lane.horizon else []

    targets.UNLOADED_ENTRIES.replace(patch, faulty)


@shows_rarely_in(FailingMachine, first=5)
def a_removal_out_of_turn_is_forgotten_at_its_commit_although_a_page_is_being_read(patch: Patch) -> None:
    def faulty(lane: Lane, committed: int) -> None:
        lane.removed = {sequence: batch for sequence, batch in lane.removed.items() if batch > committed}

    targets.FORGET_REMOVED.replace(patch, faulty)


@shows_rarely_in(ExpiringMachine, first=7)
def delayed_messages_do_not_expire_before_their_retry(patch: Patch) -> None:
    step, page_read = targets.EXPIRE_STEP.original, targets.EXPIRE_IN_PAGE.original

    def without_delayed(queues: dict[str, Queue], call: Callable[[], Any]) -> Any:
        lanes = [lane for queue in queues.values() for lane in queue.lanes]
        delayed = [lane.delayed for lane in lanes]
        for lane in lanes:
            lane.delayed = {}
        answer = call()
        for lane, before in zip(lanes, delayed, strict=True):
            lane.delayed = before
        return answer

    take_turn = targets.TURN.original

    def faulty(turn: Turn) -> Effects:
        targets.EXPIRE_STEP.replace(patch, lambda *a: without_delayed(targets.queues(turn), lambda: step(*a)))
        targets.EXPIRE_IN_PAGE.replace(patch, lambda *a: without_delayed(targets.queues(turn), lambda: page_read(*a)))
        return take_turn(turn)

    targets.TURN.replace(patch, faulty)


@shows_in(ExpiringMachine)
def a_message_not_visible_when_its_expiry_was_due_never_expires(patch: Patch) -> None:
    committed = targets.EXPIRE_WHAT_IS_COMMITTED.original

    def faulty(expiry: ExpiryTask) -> None:
        targets.waiting_for_commit(expiry).clear()
        committed(expiry)

    targets.EXPIRE_WHAT_IS_COMMITTED.replace(patch, faulty)


@shows_in(ExpiringMachine, first=5)
def a_message_held_when_its_expiry_was_due_never_expires(patch: Patch) -> None:
    targets.IS_HELD.replace(patch, lambda *_: False)


@shows_in(ExpiringMachine)
def a_page_of_timers_loses_timers_that_are_being_written(patch: Patch) -> None:
    page_read = targets.TIMERS_PAGE_READ.original

    def faulty(timers: Timers, read: TimerRead, page: TimersResult) -> None:
        targets.timers_being_written(timers).clear()
        page_read(timers, read, page)

    targets.TIMERS_PAGE_READ.replace(patch, faulty)


@shows_in(ExpiringMachine)
def timers_are_only_in_memory(patch: Patch) -> None:
    set_ = targets.SET_TIMER.original

    def faulty(timers: Timers, timer: bytes) -> None:
        set_(timers, timer)
        targets.commit_state_of(timers).batch.timers.clear()

    targets.SET_TIMER.replace(patch, faulty)


# Topics


@shows_in(TopicsMachine)
def a_queue_that_a_destination_names_twice_gets_two_copies(patch: Patch) -> None:
    def faulty(queues: Queues, send: Send, queue_of: QueueOf | None = None) -> list[Queue]:
        parts = send.destination.parts or (send.destination,)
        return [
            queue
            for part in parts
            for queue in (
                targets.QUEUES_OF_TOPIC.of(queues)(part.name, send.message)
                if part.kind is DestinationKind.TOPIC
                else filter(None, [(queue_of or targets.GET_OR_CREATE_QUEUE.of(queues))(part)])
            )
        ]

    targets.QUEUES_FOR.replace(patch, faulty)


@shows_in(TopicsMachine)
def a_subscription_to_a_topic_used_before_gets_nothing(patch: Patch) -> None:
    add = targets.ADD_TO_TOPICS.original

    def faulty(topics: TopicRouter, queue: Queue) -> None:
        add(topics, queue)
        for route in targets.known_routes(topics).values():
            route.as_of = topics.last_number

    targets.ADD_TO_TOPICS.replace(patch, faulty)


@shows_in(TopicsMachine)
def a_word_of_a_pattern_is_the_rest_of_a_name(patch: Patch) -> None:
    targets.MATCHES_TOPIC.replace(
        patch, lambda pattern, words: targets.MATCHES_TOPIC.original([*pattern[:-1], ">"], words)
    )


@shows_in(TopicsMachine)
def a_copy_that_was_read_from_the_store_is_not_known_to_be_shared(patch: Patch) -> None:
    targets.NEW_ENTRY_OF_PAGE.replace(patch, _of_no_content)


@shows_in(BusyTopicsMachine, first=3)
def a_copy_that_bulk_work_takes_from_the_store_is_not_known_to_be_shared(patch: Patch) -> None:
    targets.NEW_ENTRY_OF_BULK.replace(patch, _of_no_content)


def _of_no_content(content_number: int, **fields: Any) -> Entry:
    return Entry(**fields)


@shows_in(TopicsMachine, first=1)
def an_ended_subscription_does_not_dereference_its_contents(patch: Patch) -> None:
    targets.DEREFERENCE_CONTENT_OF_ENDED.replace(patch, lambda batch, content, persistent: None)


@shows_in(TopicsMachine)
def a_content_is_counted_for_copies_that_are_not_stored(patch: Patch) -> None:
    def faulty(arrivals: Arrivals, message: SentMessage, queues: list[Queue]) -> ContentNumbers:
        if not message.persistent or len(queues) < 2:
            return NO_CONTENTS
        targets.SHARE_CONTENT.original(
            targets.gathering(arrivals), targets.next_sequence(arrivals), message, len(queues), persistent=True
        )
        return ContentNumbers(targets.next_sequence(arrivals), 0)

    targets.SHARE.replace(patch, faulty)


@shows_in(SpillingMachine)
def copies_that_leave_together_are_counted_as_one(patch: Patch) -> None:
    def faulty(batch: Batch, number: int, message: SentMessage, copies: int, *, persistent: bool) -> None:
        targets.SHARE_CONTENT.original(batch, number, message, copies if persistent else 1, persistent=persistent)

    targets.SHARE_CONTENT.replace(patch, faulty)


@shows_in(SpillingMachine)
def the_spilled_queue_of_a_subscription_is_taken_for_an_ordinary_queue_at_start(patch: Patch) -> None:
    targets.ENDED_PREFIX_OF_SPILLED.replace(patch, "")


@shows_in(SpillingMachine)
def the_number_of_a_subscription_is_free_before_its_messages_are_removed(patch: Patch) -> None:
    def faulty(one: SpilledSubscriptions, queue: Queue) -> bool:
        if queue in targets.spilling_queues(one):
            del targets.spilling_queues(one)[queue]
            targets.free_numbers(targets.numbers_of(one)).append(queue.stored_number)
        return False

    targets.END_SPILLING.replace(patch, faulty)


@shows_in(SpillingMachine)
def spilled_messages_do_not_count_towards_the_limit_of_their_subscription(patch: Patch) -> None:
    targets.UNLOAD_TO_DISK.replace(patch, lambda paging, entry, is_known: paging.unload(entry))
    targets.COUNT_LOADED_FROM_DISK.replace(patch, targets.COUNT_LOADED.original)


@shows_in(SpillingMachine)
def a_spilled_message_that_is_read_again_still_counts_as_on_disk(patch: Patch) -> None:
    targets.COUNT_LOADED_FROM_DISK.replace(patch, targets.COUNT_LOADED.original)


# Where there is no room on the disk -----------------------------------------------------------------------------------


@shows_in(NoRoomMachine)
def on_a_full_disk_acknowledgements_in_a_transaction_do_not_count(patch: Patch) -> None:
    targets.COUNT_ACKNOWLEDGED.replace(patch, lambda balance, entries: None)


@shows_in(NoRoomMachine)
def on_a_full_disk_acknowledged_transients_count(patch: Patch) -> None:
    def faulty(balance: DiskBalance, entries: Iterable[Entry]) -> None:
        for entry in entries:
            persistent, entry.persistent = entry.persistent, True
            store_batch, entry.store_batch = entry.store_batch, 0
            count(balance, [entry])
            entry.persistent, entry.store_batch = persistent, store_batch

    count = targets.COUNT_ACKNOWLEDGED.original
    targets.COUNT_ACKNOWLEDGED.replace(patch, faulty)


@shows_in(NoRoomMachine)
def on_a_full_disk_earlier_sends_in_a_transaction_do_not_count(patch: Patch) -> None:
    targets.COUNT_SENT.replace(patch, lambda balance, send: None)


@shows_in(NoRoomMachine)
def a_transaction_may_send_though_a_write_has_found_no_space(patch: Patch) -> None:
    def faulty(
        sending: Sending, session: ConnectionState, send: Send, transaction: BrokerTransaction | None = None
    ) -> None:
        state = targets.commit_state_of(sending)
        if state.disk_level is DiskLevel.FULL:
            state.disk_level = DiskLevel.NONE
        check(sending, session, send, transaction)

    check = targets.CHECK_DISK.original
    targets.CHECK_DISK.replace(patch, faulty)


@shows_in(NoRoomMachine)
def a_content_that_other_copies_use_counts_as_free(patch: Patch) -> None:
    def faulty(balance: DiskBalance, references: dict[int, int]) -> None:
        count(balance, {number: len(balance.shared_copies[number]) for number in references})

    count = targets.COUNT_CONTENTS.original
    targets.COUNT_CONTENTS.replace(patch, faulty)


@shows_in(NoRoomMachine)
def a_content_never_counts_as_free(patch: Patch) -> None:
    targets.COUNT_CONTENTS.replace(patch, lambda balance, references: None)


@shows_in(NoRoomMachine)
def a_transaction_may_send_a_byte_more_to_spark_without_room(patch: Patch) -> None:
    targets.SPARK_SURPLUS.replace(patch, targets.SPARK_SURPLUS.original + 1)


@shows_in(NoRoomMachine)
def a_transaction_may_send_as_much_more_elsewhere_as_to_spark(patch: Patch) -> None:
    targets.IS_OF_SPARK.replace(patch, lambda destination: True)


@shows_in(NoRoomMachine)
def a_message_nacked_after_its_acknowledgement_counts_as_free(patch: Patch) -> None:
    def faulty(transaction: BrokerTransaction, nack: Nack) -> None:
        transaction.nacks[nack.sequence] = nack

    targets.NACK_ACKNOWLEDGED.replace(patch, faulty)


@shows_in(NoRoomMachine)
def a_message_evicted_while_it_was_held_frees_nothing(patch: Patch) -> None:
    def faulty(entry: Entry) -> int:
        return 0 if entry.message is None else targets.STORED_BYTES.original(entry)

    targets.STORED_BYTES.replace(patch, faulty)


@shows_in(TopicsMachine)
def a_copy_that_is_stored_is_visible_when_it_is_accepted(patch: Patch) -> None:
    accept, spread = targets.ACCEPT.original, targets.SPREAD.original

    def faulty(arrivals: Arrivals, queues: list[Queue], message: SentMessage) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            targets.ACCEPT.replace(
                inner,
                lambda self, queue, message, batch, contents=NO_CONTENTS: accept(self, queue, message, 0, contents),
            )
            return spread(arrivals, queues, message)

    targets.SPREAD.replace(patch, faulty)


@shows_in(TopicsMachine)
def the_receipt_of_a_copied_message_does_not_wait_for_its_batch(patch: Patch) -> None:
    spread = targets.SPREAD.original

    def faulty(arrivals: Arrivals, queues: list[Queue], message: SentMessage) -> bool:
        spread(arrivals, queues, message)
        return False

    targets.SPREAD.replace(patch, faulty)


@shows_in(TopicsMachine)
def a_topic_is_asked_for_its_subscriptions_before_the_commit(patch: Patch) -> None:
    send, queues_for = targets.SEND.original, targets.QUEUES_FOR.original
    asked: dict[int, list[Queue]] = {}

    def faulty_send(sending: Sending, session: ConnectionState, one: Send) -> None:
        send(sending, session, one)
        if one.transaction is not None:
            asked[id(one)] = queues_for(targets.all_queues(sending), one, targets.GET_OR_CREATE_QUEUE.of(sending))

    def faulty_queues_for(queues: Queues, one: Send, queue_of: QueueOf) -> list[Queue]:
        return asked.pop(id(one), None) or queues_for(queues, one, queue_of)

    targets.SEND.replace(patch, faulty_send)
    targets.QUEUES_FOR.replace(patch, faulty_queues_for)


@shows_in(TopicsMachine)
def a_virtual_topic_is_not_one_after_a_restart(patch: Patch) -> None:
    restore_queue = targets.RESTORE_QUEUE.original

    def faulty(run: EngineLifespan, number: int, name: str) -> Queue:
        with pytest.MonkeyPatch.context() as inner:
            targets.VIRTUAL_TOPIC.replace(inner, lambda queue: "")
            return restore_queue(run, number, name)

    targets.RESTORE_QUEUE.replace(patch, faulty)


@shows_in(TopicsMachine)
def a_durable_subscription_is_forgotten_unless_something_is_in_it(patch: Patch) -> None:
    targets.INTRODUCE.replace(patch, lambda batch, queue: None)


@shows_in(TopicsMachine)
def the_queue_of_a_virtual_topic_is_forgotten_unless_something_is_in_it(patch: Patch) -> None:
    targets.MUST_KEEP.replace(patch, lambda queue: bool(queue.destination.topic))


@shows_in(TopicsMachine)
def a_command_that_creates_a_virtual_topic_queue_is_answered_before_it_is_durable(patch: Patch) -> None:
    await_introduction = targets.AWAIT_INTRODUCTION.original

    def faulty(queues: Queues, session: ConnectionState, destination: Destination) -> None:
        if destination.topic:
            await_introduction(queues, session, destination)

    targets.AWAIT_INTRODUCTION.replace(patch, faulty)


@shows_in(TopicsMachine)
def a_send_that_creates_a_virtual_topic_queue_is_answered_before_it_is_durable(patch: Patch) -> None:
    targets.SEND.replace(patch, _without_awaiting_introductions(targets.SEND.original))


@shows_in(TopicsMachine)
def a_commit_that_creates_a_virtual_topic_queue_is_answered_before_it_is_durable(patch: Patch) -> None:
    targets.COMMIT.replace(patch, _without_awaiting_introductions(targets.COMMIT.original))


def _without_awaiting_introductions(command: Callable[..., None]) -> Callable[..., None]:
    def faulty(part: object, session: ConnectionState, one: object) -> None:
        with pytest.MonkeyPatch.context() as inner:
            targets.AWAIT_INTRODUCTION.replace(inner, lambda queues, session, destination: None)
            command(part, session, one)

    return faulty


@shows_in(TopicsMachine, first=2)
def a_subscribe_to_a_queue_another_client_created_is_answered_before_it_is_durable(patch: Patch) -> None:
    subscribe = targets.SUBSCRIBE.original

    def faulty(subscribing: Subscribing, session: ConnectionState, one: Subscribe) -> None:
        introduced = dict(targets.introduced(subscribing))
        before = session.last_batch
        subscribe(subscribing, session, one)
        if targets.introduced(subscribing) == introduced:
            session.last_batch = before

    targets.SUBSCRIBE.replace(patch, faulty)


@shows_rarely_in(TopicsMachine, first=23)
def a_repeat_of_the_command_that_created_a_queue_is_answered_before_it_is_durable(patch: Patch) -> None:
    is_repeat = targets.IS_REPEAT.original

    def faulty(sending: Sending, session: ConnectionState, said: Send | Commit) -> bool:
        introduced = dict(targets.introduced(sending))
        targets.introduced(sending).clear()
        try:
            return is_repeat(sending, session, said)
        finally:
            targets.introduced(sending).update(introduced)

    targets.IS_REPEAT.replace(patch, faulty)


@shows_in(TopicsMachine)
def messages_of_an_ended_subscription_come_back_after_a_restart(patch: Patch) -> None:
    end = targets.END_SUBSCRIPTION.original

    def faulty(queues: Queues, queue: Queue) -> None:
        end(queues, queue)
        del targets.gathering(queues).queues[queue.number]

    targets.END_SUBSCRIPTION.replace(patch, faulty)


@shows_in(TopicsMachine, first=2)
def a_transaction_keeps_messages_of_an_ended_subscription(patch: Patch) -> None:
    targets.DROP_QUEUE_OF_HOLDER.replace(patch, lambda transaction, queue: [])


@shows_in(TopicsMachine)
def messages_of_an_ended_subscription_being_written_count_as_pending_free_for_ever(patch: Patch) -> None:
    forget = targets.FORGET_LANE.original

    def faulty(resident_set: ResidentSet, lane: Lane) -> None:
        targets.memory(resident_set).pending_free_bytes += sum(
            size_of(_message_of(entry)) for entry in lane.unread_in_memory if entry.message is not None
        )
        forget(resident_set, lane)

    targets.FORGET_LANE.replace(patch, faulty)


@shows_in(TopicsMachine, first=23)
def an_ended_subscription_is_read_before_its_last_messages_are_durable(patch: Patch) -> None:
    add = targets.ADD_ENDED_QUEUE.original
    targets.ADD_ENDED_QUEUE.replace(patch, lambda endings, queue, batch: add(endings, queue, 0))


@shows_in(TopicsMachine, first=38)
def a_page_of_an_ended_subscription_is_expired_once_more(patch: Patch) -> None:
    lane_of = targets.LANE_OF.original

    def faulty(queues: Queues, key: bytes) -> Lane | None:
        lanes = [lane for queue in targets.queues_that_ended(queues) for lane in queue.lanes if lane.key == key]
        return lanes[0] if lanes else lane_of(queues, key)

    targets.LANE_OF.replace(patch, faulty)


@shows_in(WildcardMachine)
def a_queue_goes_while_a_message_of_it_is_held(patch: Patch) -> None:
    """The queue has no waiting message and no consumer of its own."""
    targets.IS_QUEUE_NEEDED.replace(patch, property(lambda queue: any(lane.is_needed for lane in queue.lanes)))


@shows_in(WildcardMachine)
def a_queue_goes_while_a_message_sent_to_it_is_being_written(patch: Patch) -> None:
    may_go = targets.IS_QUEUE_REMOVABLE.original

    def faulty(queues: Queues, queue: Queue) -> bool:
        entries = [entry for lane in queue.lanes for entry in lane]
        consumers = targets.receivers_of(queues, queue).consumers
        if entries and not consumers and all(entry.batch > targets.committed(queues) for entry in entries):
            return True
        return may_go(queues, queue)

    targets.IS_QUEUE_REMOVABLE.replace(patch, faulty)


@shows_in(WildcardMachine)
def a_queue_with_a_consumer_of_its_own_goes(patch: Patch) -> None:
    may_go = targets.IS_QUEUE_REMOVABLE.original

    def faulty(queues: Queues, queue: Queue) -> bool:
        receivers = targets.clients_of(queues).receivers_by_queue.pop(queue, None)
        may_it = may_go(queues, queue)
        if receivers is not None:
            targets.clients_of(queues).receivers_by_queue[queue] = receivers
        return may_it

    targets.IS_QUEUE_REMOVABLE.replace(patch, faulty)


@shows_in(WildcardMachine)
def a_queue_that_is_paused_goes(patch: Patch) -> None:
    remembers = targets.MUST_KEEP.original
    _change_what_stays(patch, targets.MUST_KEEP, lambda queue: not queue.is_paused and remembers(queue))


@shows_in(WildcardMachine)
def the_queue_of_a_virtual_topic_goes(patch: Patch) -> None:
    _change_what_stays(patch, targets.MUST_KEEP, lambda queue: queue.is_paused or bool(queue.destination.topic))


def _change_what_stays(patch: Patch, asked: targets.Target[..., Any], answer: Callable[..., object]) -> None:
    """Replace the target only while the engine decides whether a queue may be removed."""
    may_go = targets.IS_QUEUE_REMOVABLE.original

    def faulty(queues: Queues, queue: Queue) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            asked.replace(inner, answer)
            return may_go(queues, queue)

    targets.IS_QUEUE_REMOVABLE.replace(patch, faulty)


@shows_in(WildcardMachine)
def a_queue_goes_and_a_wildcard_keeps_it(patch: Patch) -> None:
    targets.QUEUE_REMOVED.replace(patch, lambda wildcards, queue: None)


@shows_in(WildcardMachine)
def the_name_of_a_queue_that_has_gone_stays_in_the_store(patch: Patch) -> None:
    free_number = targets.FREE_NUMBER.original

    def faulty(numbers: QueueNumberAllocator, queue: Queue) -> None:
        free_number(numbers, queue)
        targets.commit_state_of(numbers).batch.queues.pop(queue.number, None)

    targets.FREE_NUMBER.replace(patch, faulty)


@shows_in(WildcardMachine, first=1)
def a_number_is_given_again_before_all_of_its_queue_is_durably_gone(patch: Patch) -> None:
    free_number = targets.FREE_NUMBER.original

    def faulty(numbers: QueueNumberAllocator, queue: Queue) -> None:
        free_number(numbers, queue)
        targets.free_numbers(numbers).extend(number for _, number in targets.pending_free_numbers(numbers))
        targets.pending_free_numbers(numbers).clear()

    targets.FREE_NUMBER.replace(patch, faulty)


@shows_in(WildcardMachine)
def the_memory_of_a_queue_is_not_freed_when_it_goes(patch: Patch) -> None:
    targets.DISPOSE_QUEUE.replace(patch, lambda queue: None)


def an_unused_queue_stays(patch: Patch) -> None:
    targets.IS_QUEUE_REMOVABLE.replace(patch, lambda unused, queue: False)


@shows_in(ScheduledMachine)
def a_queue_for_which_something_is_scheduled_goes(patch: Patch) -> None:
    _change_what_stays(patch, targets.COUNT_SCHEDULED, lambda queues, name: 0)


@shows_in(TopicsMachine)
def messages_that_a_subscription_does_not_select_are_copied_to_it(patch: Patch) -> None:
    def faulty(topics: TopicRouter, topic: str, message: SentMessage) -> list[Queue]:
        queues_of(topics, topic, message)
        return [each.queue for each in targets.known_routes(topics)[topic].subscriptions]

    queues_of = targets.QUEUES_OF_TOPIC.original
    targets.QUEUES_OF_TOPIC.replace(patch, faulty)


@shows_in(TopicsMachine)
def a_new_selector_does_not_change_the_durable_subscription(patch: Patch) -> None:
    durable_subscription = targets.DURABLE_SUBSCRIPTION.original

    def faulty(engine: Subscribing, key: str, destination: Destination, selector: str) -> Queue:
        known = targets.durable_subscriptions(engine).get(key)
        if known is not None and known.destination.topic == destination.name:
            selector = known.destination.selector
        return durable_subscription(engine, key, destination, selector)

    targets.DURABLE_SUBSCRIPTION.replace(patch, faulty)


@shows_in(TopicsMachine)
def a_respelled_selector_starts_a_durable_subscription_anew(patch: Patch) -> None:
    targets.ARE_SAME.replace(patch, lambda one, other: one == other)


@shows_in(TopicsMachine)
def a_durable_subscription_wants_everything_after_a_restart(patch: Patch) -> None:
    targets.STORED_QUEUE.replace(patch, lambda name: structs.replace(targets.STORED_QUEUE.original(name), selector=""))


@shows_in(BusyTopicsMachine)
def a_piece_takes_messages_of_an_ended_subscription(patch: Patch) -> None:
    do_bulk = targets.EXECUTE_BULK.original

    def faulty(bulk: BulkPieceExecutor, asked: BulkRequest, read: BulkRead, page: PageResult) -> BulkResult:
        queue = read.lane.queue
        with pytest.MonkeyPatch.context() as inner:
            inner.setitem(targets.queues(bulk), queue.name, queue)
            return do_bulk(bulk, asked, read, page)

    targets.EXECUTE_BULK.replace(patch, faulty)


@shows_in(BusyTopicsMachine)
def a_scheduled_send_goes_to_the_subscriptions_of_the_time_it_was_accepted(patch: Patch) -> None:
    schedule = targets.SCHEDULE.original

    def faulty(sending: Sending, destination: Destination, message: SentMessage, wanted: Schedule) -> None:
        if not destination.is_multi_queue:
            schedule(sending, destination, message, wanted)
            return
        for queue in targets.QUEUES_OF_PARTS.of(sending)(destination, message, targets.GET_OR_CREATE_QUEUE.of(sending)):
            if not queue.is_temporary:
                targets.ACCEPT_SCHEDULED.of(sending)(queue.name, message, wanted)

    targets.SCHEDULE.replace(patch, faulty)


# Selectors of consumers


@shows_in(SelectingMachine)
def only_one_candidate_selector_is_compared_with_a_message(patch: Patch) -> None:
    that_may_want = targets.CANDIDATE_SCANS.original
    targets.CANDIDATE_SCANS.replace(patch, lambda keyed, message, **how: that_may_want(keyed, message, **how)[:1])


@shows_in(SelectingMachine)
def a_selector_sees_one_page(patch: Patch) -> None:
    test_page = targets.TEST_PAGE.original

    def faulty(
        selecting: QueueSelection, lane: Lane, after_sequence: int, last: int, found: list[PageMessage], *rest: Any
    ) -> None:
        test_page(selecting, lane, after_sequence, UNBOUNDED, found, *rest)

    targets.TEST_PAGE.replace(patch, faulty)


@shows_in(SelectingMachine, first=2)
def messages_being_written_leave_memory_while_a_page_is_compared(patch: Patch) -> None:
    let_go = targets.POP_DURABLE.original

    def faulty(lane: Lane, committed: int) -> list[Entry]:
        if lane.selected is None:
            return let_go(lane, committed)
        scanning, lane.selected.scan_read_count = lane.selected.scan_read_count, 0
        gone = let_go(lane, committed)
        lane.selected.scan_read_count = scanning
        return gone

    targets.POP_DURABLE.replace(patch, faulty)


@shows_in(SelectingMachine)
def messages_being_written_are_not_compared(patch: Patch) -> None:
    test_above = targets.TEST_ABOVE.original

    def faulty(selecting: QueueSelection, lane: Lane, *rest: Any) -> None:
        recent, lane.unread_in_memory = lane.unread_in_memory, deque()
        test_above(selecting, lane, *rest)
        lane.unread_in_memory = recent

    targets.TEST_ABOVE.replace(patch, faulty)


@shows_in(SelectingMachine)
def a_page_brings_selected_messages_again(patch: Patch) -> None:
    page_read = targets.APPLY_PAGE.original

    def faulty(reading: PageReader, read: LaneRead, page: PageResult) -> None:
        selected, read.lane.selected = read.lane.selected, None
        page_read(reading, read, page)
        read.lane.selected = selected

    targets.APPLY_PAGE.replace(patch, faulty)


@shows_in(SelectingMachine)
def a_page_brings_selected_messages_that_are_settled(patch: Patch) -> None:
    def faulty(resident_set: ResidentSet, entry: Entry) -> None:
        assert entry.lane.selected is not None
        entry.lane.selected.entries.pop(entry.sequence, None)

    targets.FORGET_SELECTED.replace(patch, faulty)


@shows_in(SelectingMachine)
def the_last_match_is_dispatched_first(patch: Patch) -> None:
    first = targets.FIRST_OF_CURSOR.original

    def faulty(cursor: ScanCursor) -> Entry | None:
        right = first(cursor)
        others = [one for one in cursor.found.values() if not one.is_out_of_lane and one.message is not None]
        return right and max([right, *others], key=lambda entry: entry.sequence)

    targets.FIRST_OF_CURSOR.replace(patch, faulty)


@shows_in(SelectingMachine)
def a_less_urgent_match_is_dispatched_though_more_urgent_messages_must_be_compared(patch: Patch) -> None:
    _find_first_head(patch, lambda head: isinstance(head, Entry))


@shows_in(SelectingMachine)
def a_match_being_committed_holds_back_lower_priorities(patch: Patch) -> None:
    _find_first_head(patch, lambda head: head is not None)


def _find_first_head(patch: Patch, is_it: Callable[[Head], bool]) -> None:
    """Let the first of these heads be next, whatever the lanes before it wait for."""
    targets.FIRST_HEAD.replace(patch, lambda heads: next(filter(is_it, heads), None))


@shows_in(SelectingMachine, first=1)
def messages_about_to_leave_memory_are_not_loaded_where_there_are_selectors(patch: Patch) -> None:
    """Found by the machine when it was made once (seed 1200215556 of that time): they were ready, and lay for ever."""

    def faulty(queue_dispatch: QueueDispatch, lane: Lane) -> Head:
        if lane.head() is None and lane.unread and not lane.needs_page:
            return None
        return lane_head(queue_dispatch, lane)

    lane_head = targets.LANE_HEAD_OF_SELECTIVE.original
    targets.LANE_HEAD_OF_SELECTIVE.replace(patch, faulty)


@shows_in(BrokerMachine)
def the_question_what_is_next_takes_the_message_from_its_lane(patch: Patch) -> None:
    def faulty(inspection: _QueueInspection, lane: Lane) -> Head:
        head = lane_head(inspection, lane)
        if isinstance(head, Entry):
            lane.pop()
        return head

    lane_head = targets.LANE_HEAD_ASKED_FOR.original
    targets.LANE_HEAD_ASKED_FOR.replace(patch, faulty)


@shows_in(BrokerMachine)
def the_answer_is_that_a_ready_message_is_being_committed(patch: Patch) -> None:
    def faulty(inspection: _QueueInspection, lane: Lane) -> Head:
        head = lane_head(inspection, lane)
        return Wait(COMMITTING, head.sequence) if isinstance(head, Entry) else head

    lane_head = targets.LANE_HEAD_ASKED_FOR.original
    targets.LANE_HEAD_ASKED_FOR.replace(patch, faulty)


@shows_in(BrokerMachine)
def the_answer_is_a_message_that_is_being_committed(patch: Patch) -> None:
    def faulty(inspection: _QueueInspection, lane: Lane) -> Head:
        return lane.head() or lane_head(inspection, lane)

    lane_head = targets.LANE_HEAD_ASKED_FOR.original
    targets.LANE_HEAD_ASKED_FOR.replace(patch, faulty)


@shows_in(SelectingMachine)
def a_match_is_dispatched_before_all_earlier_messages_are_compared(patch: Patch) -> None:
    head_of_queue = targets.HEAD_OF_QUEUE.original

    def faulty(queue_dispatch: QueueDispatch, scan: QueueScan | None) -> Head:
        targets.KNOWN_TO.replace(patch, UNBOUNDED)
        head = head_of_queue(queue_dispatch, scan)
        targets.KNOWN_TO.replace(patch, targets.KNOWN_TO.original)
        return head

    targets.HEAD_OF_QUEUE.replace(patch, faulty)


@shows_in(SelectingMachine)
def a_commit_in_flight_that_a_consumer_could_not_take_holds_it_back(patch: Patch) -> None:
    head_of_queue = targets.HEAD_OF_QUEUE.original

    def faulty(queue_dispatch: QueueDispatch, scan: QueueScan | None) -> Head:
        head = head_of_queue(queue_dispatch, scan)
        if isinstance(head, Entry) and any(
            one.batch > targets.commit_state_of(queue_dispatch).last_committed and one.sequence < head.sequence
            for one in head.lane
        ):
            return None
        return head

    targets.HEAD_OF_QUEUE.replace(patch, faulty)


@shows_in(SelectingMachine)
def a_commit_in_flight_is_overtaken_by_its_equals_where_there_are_selectors(patch: Patch) -> None:
    first = targets.FIRST_OF_CURSOR.original

    def faulty(cursor: ScanCursor) -> Entry | None:
        entry = first(cursor)
        while entry is not None and entry.batch:
            later = [one for one in cursor.found.values() if one.sequence > entry.sequence and not one.is_out_of_lane]
            entry = min(later, key=lambda one: one.sequence, default=None)
        return entry

    targets.FIRST_OF_CURSOR.replace(patch, faulty)


@shows_in(SelectingMachine)
def requeued_messages_are_not_compared(patch: Patch) -> None:
    targets.COMPARE_REQUEUED.replace(patch, lambda selecting, entry: None)


@shows_in(SelectingMachine)
def later_matches_overtake_a_requeued_message_that_is_not_compared_yet(patch: Patch) -> None:
    targets.KNOWN_TO.replace(patch, property(lambda cursor: cursor.tested_to))


@shows_in(SelectingMachine)
def requeued_messages_are_forgotten_if_they_are_not_compared_at_once(patch: Patch) -> None:
    targets.TEST_DEFERRED.replace(patch, lambda selecting, budget: None)
    targets.KNOWN_TO.replace(patch, property(lambda cursor: cursor.tested_to))
    targets.HAS_DEFERRED.replace(patch, property(lambda selecting: False))


@shows_in(SelectingMachine)
def messages_that_arrive_are_forgotten_if_they_are_not_compared_at_once(patch: Patch) -> None:
    stop_before = targets.STOP_BEFORE.original

    def faulty(cursor: ScanCursor, sequence: int, *, if_full: bool = True) -> bool:
        return if_full and stop_before(cursor, sequence)

    targets.STOP_BEFORE.replace(patch, faulty)


@shows_in(SelectingMachine)
def messages_requeued_without_their_bodies_count_as_matches(patch: Patch) -> None:
    targets.IS_MATCH.replace(patch, lambda cursor, entry: True)


@shows_in(SelectingMachine)
def arriving_messages_are_not_compared(patch: Patch) -> None:
    targets.COMPARE_WHAT_ARRIVED.replace(patch, lambda selecting, entry: None)


@shows_in(SelectingMachine)
def a_lane_that_is_made_later_is_missed_by_selectors(patch: Patch) -> None:
    targets.LANE_CREATED.replace(patch, lambda selecting, lane: lane.allocate_selected())


@shows_in(SelectingMachine)
def messages_selected_out_of_turn_are_forgotten_with_the_last_selector(patch: Patch) -> None:
    targets.IS_SELECTED_EMPTY.replace(patch, property(lambda selected: True))


@shows_in(SelectingMachine)
def a_match_is_forgotten_when_it_leaves_memory(patch: Patch) -> None:
    targets.HAS_FOUND.replace(patch, lambda selecting, entry: False)


@shows_in(SelectingMachine)
def a_selector_waits_for_ever_once_too_much_was_found(patch: Patch) -> None:
    targets.ACTIVATE_SELECTION.replace(patch, lambda selections, selecting: None)


@shows_in(ScheduledMachine)
def a_due_send_left_out_of_a_page_for_its_size_counts_as_removed(patch: Patch) -> None:
    page_read = targets.SEND_WHAT_IS_DUE.original

    def faulty(scheduler: Scheduler, read: DueSendsRead, page: PageResult) -> None:
        page.is_end = True
        page_read(scheduler, read, page)

    targets.SEND_WHAT_IS_DUE.replace(patch, faulty)


@shows_in(ScheduledMachine)
def due_sends_are_searched_only_in_the_lane_of_the_first(patch: Patch) -> None:
    keys = property(lambda read: [message_key(read.lane.key, number) for number in read.lanes])
    targets.KEYS_OF_DUE.replace(patch, keys)


@shows_in(ScheduledMachine)
def due_sends_are_sent_in_the_order_of_their_records(patch: Patch) -> None:
    """In that of its numbers, within what is read together."""
    page_read = targets.SEND_WHAT_IS_DUE.original

    def faulty(scheduler: Scheduler, read: DueSendsRead, page: PageResult) -> None:
        first = scheduler.timers.in_memory[: len(read.lanes)]
        scheduler.timers.in_memory[: len(read.lanes)] = sorted(first, key=lambda timer: split_scheduled_timer(timer)[1])
        page_read(scheduler, read, page)

    targets.SEND_WHAT_IS_DUE.replace(patch, faulty)


# Groups


@shows_in(GroupsMachine)
def a_group_is_overtaken_while_a_message_of_it_is_delayed(patch: Patch) -> None:
    targets.HAS_EARLIER_DELAYED.replace(patch, lambda groups, group, rank, sequence: False)


@shows_in(GroupsMachine, first=3)
def a_group_that_waited_is_forgotten(patch: Patch) -> None:
    freed = targets.GROUP_FREED.original

    def faulty(groups: GroupOwnership, entry: Entry) -> None:
        targets.GROUP_FREED.replace(patch, lambda groups, group: None)
        ended_delay(groups, entry)
        targets.GROUP_FREED.replace(patch, freed)

    ended_delay = targets.ENDED_DELAY_IN_GROUP.original
    targets.ENDED_DELAY_IN_GROUP.replace(patch, faulty)


@shows_in(GroupsMachine)
def a_group_that_waits_holds_back_the_whole_queue(patch: Patch) -> None:
    targets.DELAY.replace(patch, _with_wait(targets.DELAY.original))


def _with_wait(delay: Callable[[DelayedEntries, Entry, int], bool]) -> Callable[[DelayedEntries, Entry, int], bool]:
    def faulty(delays: DelayedEntries, entry: Entry, delay_ms: int) -> bool:
        delay(delays, entry, delay_ms)
        return entry.lane.queue.policy.while_waiting is WhileWaiting.SKIP

    return faulty


@shows_in(GroupsMachine)
def a_busy_group_blocks_the_others(patch: Patch) -> None:
    first_for = targets.FIRST_OF_GROUPS.original

    def faulty(cursor: GroupScanCursor, consumer: BrokerConsumer | None) -> tuple[Entry | None, bool]:
        entry, must_wait = first_for(cursor, consumer)
        if entry is not None and any(
            one.group
            and not one.is_out_of_lane
            and targets.groups_of(cursor).owners.get(one.group, consumer) is not consumer
            for sequence, one in cursor.found.items()
            if sequence < entry.sequence
        ):
            return None, False
        return entry, must_wait

    targets.FIRST_OF_GROUPS.replace(patch, faulty)


@shows_in(GroupsMachine)
def a_group_owner_is_offered_messages_for_all(patch: Patch) -> None:
    targets.HAS_OWN_GROUPS.replace(patch, lambda queue_dispatch, consumer, scan: False)


@shows_in(GroupsMachine)
def a_consumer_held_back_by_a_group_stays_so_when_its_owner_changes(patch: Patch) -> None:
    targets.CLASSES_TO_QUERY.replace(patch, _without(targets.CLASSES_TO_QUERY.original, "times_owned"))


@shows_in(GroupsMachine)
def messages_of_a_closed_group_are_offered_too_late(patch: Patch) -> None:
    targets.CLASSES_TO_QUERY.replace(patch, _without(targets.CLASSES_TO_QUERY.original, "times_freed"))


def _without(asked_again: Callable[..., list[ConsumerClass]], name: str) -> Callable[..., list[ConsumerClass]]:
    def faulty(queue_dispatch: GroupedQueueDispatch, *rest: Any) -> list[ConsumerClass]:
        groups = targets.groups_of_queue_dispatch(queue_dispatch)
        owned, freed = targets.owned_and_freed(queue_dispatch)
        times = (groups.assigned_count, freed) if name == "times_owned" else (owned, groups.freed_count)
        targets.set_owned_and_freed(queue_dispatch, times)
        return asked_again(queue_dispatch, *rest)

    return faulty


@shows_in(GroupsMachine)
def a_group_stays_with_a_consumer_that_is_gone(patch: Patch) -> None:
    targets.UNSUBSCRIBED_FROM_GROUPS.replace(patch, lambda groups, consumer: None)


@shows_in(GroupsMachine)
def a_group_is_handed_to_two_consumers(patch: Patch) -> None:
    def faulty(groups: GroupOwnership, entry: Entry, consumer: BrokerConsumer) -> None:
        is_first = groups.owners.get(entry.group) is None
        took(groups, entry, consumer)
        if entry.sequence % 3 == 0:
            groups.owners.pop(entry.group, None)
            targets.GROUP_FREED.of(groups)(entry.group)
        entry.is_first_of_group = is_first

    took = targets.DISPATCHED_OF_GROUP.original
    targets.DISPATCHED_OF_GROUP.replace(patch, faulty)


@shows_in(GroupsMachine)
def a_group_that_is_closed_stays_its_consumers(patch: Patch) -> None:
    targets.CLOSES_GROUP.replace(patch, lambda message: False)


@shows_in(GroupsMachine)
def skipped_messages_of_a_busy_group_are_skipped_for_good(patch: Patch) -> None:
    def faulty(cursor: GroupScanCursor, group: str) -> tuple[int | None, bool]:
        sequence, is_known = stands(cursor, group)
        return (sequence, True) if is_known else (None, False)

    stands = targets.HEAD_OF_GROUP.original
    targets.HEAD_OF_GROUP.replace(patch, faulty)


@shows_in(GroupsMachine)
def skipped_messages_of_a_group_are_overtaken(patch: Patch) -> None:
    def faulty(cursor: GroupScanCursor, group: str, sequence: int) -> bool:
        if not passes_over(cursor, group, sequence):
            return False
        if sequence % 2:
            # Only this one.
            del targets.skipped(cursor)[group]
        return True

    passes_over = targets.SKIPS.original
    targets.SKIPS.replace(patch, faulty)


@shows_in(GroupsMachine, first=6)
def a_delayed_message_of_a_group_read_from_a_page_is_overtaken(patch: Patch) -> None:
    def faulty(reading: PageReader, entry: Entry) -> None:
        delay_stray(reading, entry)
        if entry.group:
            assert entry.lane.queue.observer is not None
            entry.lane.queue.observer.on_delay_ended(entry)

    delay_stray = targets.DELAY_SELECTED.original
    targets.DELAY_SELECTED.replace(patch, faulty)


@shows_in(GroupsMachine)
def a_group_is_overtaken_by_later_messages_of_it(patch: Patch) -> None:
    first_for = targets.FIRST_OF_GROUPS.original

    def faulty(cursor: GroupScanCursor, consumer: BrokerConsumer | None) -> tuple[Entry | None, bool]:
        entry, must_wait = first_for(cursor, consumer)
        if entry is None or not entry.group:
            return entry, must_wait
        later = [
            one for one in cursor.found.values() if one.group == entry.group and not one.is_out_of_lane and one.message
        ]
        return max([entry, *later], key=lambda one: one.sequence), must_wait

    targets.FIRST_OF_GROUPS.replace(patch, faulty)


@shows_in(GroupsMachine)
def the_first_of_a_group_is_not_marked_as_that(patch: Patch) -> None:
    def faulty(groups: GroupOwnership, entry: Entry, consumer: BrokerConsumer) -> None:
        took(groups, entry, consumer)
        entry.is_first_of_group = False

    took = targets.DISPATCHED_OF_GROUP.original
    targets.DISPATCHED_OF_GROUP.replace(patch, faulty)


@shows_in(WildcardMachine)
def a_wildcard_is_served_queue_by_queue(patch: Patch) -> None:
    """Lower priorities of one before higher ones of another."""

    def faulty(dispatch: WildcardDispatch, wildcard: Wildcard) -> Entry | None:
        if true_next(dispatch, wildcard) is None:
            return None
        for queue in wildcard.queues:
            if not queue.is_paused and targets.receivers_of(dispatch, queue).exclusive in (None, wildcard):
                head = targets.DISPATCH_OF_QUEUE.of(dispatch)(queue).head_for(wildcard)
                if isinstance(head, Entry):
                    return head
        return None

    true_next = targets.TRUE_NEXT.original
    targets.TRUE_NEXT.replace(patch, faulty)


@shows_in(WildcardMachine)
def a_queue_that_is_made_later_is_missed_by_wildcards(patch: Patch) -> None:
    targets.QUEUE_CREATED.replace(patch, lambda wildcards, queue: None)


@shows_in(WildcardMachine)
def a_wildcard_has_a_window_for_each_of_its_queues(patch: Patch) -> None:
    def faulty(wildcard: Wildcard) -> bool:
        has_room = wildcard.session.unsent_bytes < wildcard.memory.unsent_bytes_max
        return has_room and len(wildcard.held) < wildcard.window * max(1, len(wildcard.queues))

    targets.IS_WILDCARD_OPEN.replace(patch, faulty)


@shows_in(WildcardMachine)
def messages_held_by_an_ended_wildcard_return_to_another_queue(patch: Patch) -> None:
    def faulty(subscribing: Subscribing, consumer: BrokerConsumer, *, is_exempt: bool) -> None:
        queues = consumer.all_queues()
        for entry in consumer.held.values() if len(queues) > 1 else ():
            wrong = queues[0] if queues[0] is not entry.lane.queue else queues[1]
            size = 0 if entry.message is None else size_of(entry.message)
            entry.lane.queue.resident_bytes -= size
            wrong.resident_bytes += size
            entry.lane = wrong.lane(entry.lane.rank)
        end_consumer(subscribing, consumer, is_exempt=is_exempt)

    end_consumer = targets.END_CONSUMER.original
    targets.END_CONSUMER.replace(patch, faulty)


@shows_in(WildcardMachine)
def a_wildcard_overtakes_unread_messages_in_another_queue(patch: Patch) -> None:
    def faulty(way: QueueDispatch, consumer: BrokerConsumer, rank: int, *, may_read: bool = True) -> Head:
        head = head_for(way, consumer, rank, may_read=may_read)
        if isinstance(head, Wait) and head.is_undecided:
            targets.REQUEST_PAGE.of(way)(targets.queue_of(way).lane(rank))
            return None
        return head

    head_for = targets.LANE_HEAD_FOR.original
    targets.LANE_HEAD_FOR.replace(patch, faulty)


@shows_in(WildcardMachine)
def a_wildcard_overtakes_a_commit_in_flight_in_another_queue(patch: Patch) -> None:
    targets.LIMIT_OF_RANK.replace(patch, lambda dispatch, wildcard, rank: UNBOUNDED)


@shows_in(WildcardMachine)
def a_commit_in_flight_holds_back_wildcards_in_all_priorities(patch: Patch) -> None:
    def faulty(dispatch: WildcardDispatch, wildcard: Wildcard, rank: int) -> int:
        return min(limit(dispatch, wildcard, each) for each in range(rank + 1))

    limit = targets.LIMIT_OF_RANK.original
    targets.LIMIT_OF_RANK.replace(patch, faulty)


@shows_rarely_in(WildcardMachine, first=15)
def a_commit_in_flight_when_a_wildcard_subscribed_is_overtaken(patch: Patch) -> None:
    targets.ADD_UNCOMMITTED.replace(patch, lambda wildcards, queues: None)


@shows_in(WildcardMachine)
def a_wildcard_takes_dead_letters_that_it_does_not_name(patch: Patch) -> None:
    def faulty(wildcard: Wildcard, queue: Queue) -> bool:
        is_ordinary = queue.destination.kind is DestinationKind.QUEUE and not queue.destination.topic
        return is_ordinary and matches(wildcard.pattern_words, queue.name.split("."))

    targets.MATCHES_QUEUE.replace(patch, faulty)


@shows_in(WildcardMachine)
def an_acknowledgement_frees_a_wildcard_for_that_queue_alone(patch: Patch) -> None:
    def faulty(acknowledging: Acknowledging, session: ConnectionState, ack: Ack) -> None:
        consumer = session.consumer_of(ack.subscription, ack.sequence)
        queue = consumer.held[ack.sequence].lane.queue
        wildcards = targets.commit_state_of(acknowledging).touched_wildcards
        was_touched = consumer in wildcards
        acknowledge(acknowledging, session, ack)
        if isinstance(consumer, Wildcard) and not was_touched:
            del wildcards[consumer]
            targets.touched(acknowledging)[queue] = None
            for other in consumer.all_queues():
                if other is not queue:
                    for standing in targets.head_sequences(consumer):
                        standing.pop(other, None)

    acknowledge = targets.ACKNOWLEDGE.original
    targets.ACKNOWLEDGE.replace(patch, faulty)


# Releasing ------------------------------------------------------------------------------------------------------------

Kept = set[tuple[str, int, int]]


@shows_in(ReleasingMachine)
def kept_messages_are_released_and_dispatched_again(patch: Patch) -> None:
    release_held = targets.RELEASE_HELD.original
    targets.RELEASE_HELD.replace(patch, lambda releasing, consumer, kept: release_held(releasing, consumer, set()))


@shows_in(ReleasingMachine)
def messages_are_kept_whichever_dispatch_is_named(patch: Patch) -> None:
    def faulty(releasing: Releasing, consumer: BrokerConsumer, kept: Kept) -> None:
        sequences = {sequence for name, sequence, _ in kept if name == consumer.subscription}
        held = [entry for entry in consumer.held.values() if entry.sequence in sequences]
        release_held(releasing, consumer, {(consumer.subscription, entry.sequence, entry.deliveries) for entry in held})

    release_held = targets.RELEASE_HELD.original
    targets.RELEASE_HELD.replace(patch, faulty)


@shows_in(ReleasingMachine)
def a_parked_connection_keeps_messages_not_started(patch: Patch) -> None:
    keep = targets.KEEP_STARTED.original
    targets.KEEP_STARTED.replace(
        patch, lambda releasing, consumer, kept: keep(releasing, consumer, consumer.held.values())
    )


@shows_in(ReleasingMachine)
def a_parked_connection_keeps_nothing(patch: Patch) -> None:
    keep = targets.KEEP_STARTED.original
    targets.KEEP_STARTED.replace(patch, lambda releasing, consumer, kept: keep(releasing, consumer, ()))


def _while_releasing(patch: Patch, target: targets.AnyTarget, with_this: Callable[..., Any]) -> None:
    """Wrong only while that is given back which subscriptions hold."""

    def faulty(releasing: Releasing, consumer: BrokerConsumer, kept: Kept) -> None:
        with pytest.MonkeyPatch.context() as inner:
            target.replace(inner, with_this)
            release_held(releasing, consumer, kept)

    release_held = targets.RELEASE_HELD.original
    targets.RELEASE_HELD.replace(patch, faulty)


@shows_in(ReleasingMachine)
def a_release_counts_an_attempt(patch: Patch) -> None:
    requeue = targets.REQUEUE.original

    def faulty(outcomes: Settlement, entry: Entry, reason: RequeueReason, **options: Any) -> None:
        requeue(outcomes, entry, RequeueReason.LOST, **options)

    _while_releasing(patch, targets.REQUEUE, faulty)


@shows_in(ReleasingMachine)
def released_messages_go_to_the_end(patch: Patch) -> None:
    def faulty(lane: Lane, entry: Entry) -> None:
        _arrived_of(lane).append(entry)

    _while_releasing(patch, targets.RETURN_TO_LANE, faulty)


@shows_in(ReleasingMachine)
def a_release_does_not_raise_the_release_count(patch: Patch) -> None:
    def faulty(releasing: Releasing, session: ConnectionState, request: Release) -> None:
        release(releasing, session, request)
        session.release_count -= 1

    release = targets.RELEASE.original
    targets.RELEASE.replace(patch, faulty)


@shows_in(ReleasingMachine, first=0)
def a_refused_release_has_released_some_subscriptions(patch: Patch) -> None:
    def faulty(releasing: Releasing, session: ConnectionState, request: Release) -> None:
        for name in request.subscriptions:
            consumer = session.consumers.get(name)
            if consumer is not None and consumer.mode is not AckMode.AUTO and session.is_truenext_client:
                targets.RELEASE_HELD.of(releasing)(consumer, set(request.kept))
        release(releasing, session, request)

    release = targets.RELEASE.original
    targets.RELEASE.replace(patch, faulty)


@shows_in(ReleasingMachine)
def an_automatic_window_shrinks_with_released_messages(patch: Patch) -> None:
    def faulty(consumer: BrokerConsumer, now_ms: int) -> None:
        restart_auto_window(consumer, now_ms)
        if consumer.auto_window is not None and not consumer.is_suspended:
            consumer.window = consumer.auto_window.size = max(2, consumer.window // 2)

    restart_auto_window = targets.RESTART_AUTO_WINDOW.original
    targets.RESTART_AUTO_WINDOW.replace(patch, faulty)


@shows_in(ReleasingMachine)
def a_suspended_consumer_gets_messages_once_it_acknowledges(patch: Patch) -> None:
    def faulty(acknowledging: Acknowledging, session: ConnectionState, ack: Ack) -> None:
        consumer = session.consumer_of(ack.subscription, ack.sequence, ack.dispatch)
        acknowledge(acknowledging, session, ack)
        consumer.wake(targets.commit_state_of(acknowledging).now_ms)

    acknowledge = targets.ACKNOWLEDGE.original
    targets.ACKNOWLEDGE.replace(patch, faulty)


@shows_in(ReleasingMachine)
def a_pull_request_does_not_wake_a_suspended_consumer(patch: Patch) -> None:
    def faulty(pulling: Pulling, session: ConnectionState, credit: Credit) -> None:
        with pytest.MonkeyPatch.context() as inner:
            targets.WAKE_CONSUMER.replace(inner, lambda releasing, consumer: None)
            ask(pulling, session, credit)

    ask = targets.PULL.original
    targets.PULL.replace(patch, faulty)


@shows_in(ReleasingGroupsMachine)
def a_group_stays_with_a_suspended_consumer(patch: Patch) -> None:
    targets.FREE_GROUPS_OF_SUSPENDED.replace(patch, lambda groups, queue: None)


@shows_in(ReleasingGroupsMachine)
def a_group_leaves_a_suspended_consumer_although_a_transaction_has_a_message_of_it(patch: Patch) -> None:
    def faulty(groups: GroupOwnership, queue: Queue) -> None:
        sessions = {consumer.session: consumer.session.transactions for consumer in groups.suspended_owners}
        for session, transactions in sessions.items():
            session.transactions = OpenTransactions()
            session.transactions.ended_count = transactions.ended_count
        free(groups, queue)
        for session, transactions in sessions.items():
            session.transactions = transactions

    free = targets.FREE_GROUPS_OF_SUSPENDED.original
    targets.FREE_GROUPS_OF_SUSPENDED.replace(patch, faulty)


@shows_in(ReleasingGroupsMachine)
def a_group_leaves_a_suspended_consumer_that_kept_a_message_of_it(patch: Patch) -> None:
    def faulty(groups: GroupOwnership, queue: Queue) -> None:
        held = {consumer: consumer.held for consumer in groups.suspended_owners}
        for consumer in held:
            consumer.held = {}
        free(groups, queue)
        for consumer, its in held.items():
            consumer.held = its

    free = targets.FREE_GROUPS_OF_SUSPENDED.original
    targets.FREE_GROUPS_OF_SUSPENDED.replace(patch, faulty)


@shows_in(ReleasingMachine, first=2)
def an_earlier_dispatch_is_acknowledged_and_refused(patch: Patch) -> None:
    consumer_of = targets.CONSUMER_OF.original
    targets.CONSUMER_OF.replace(
        patch, lambda session, subscription, sequence, dispatch=0: consumer_of(session, subscription, sequence)
    )


# What is charged ------------------------------------------------------------------------------------------------------


@shows_in(ReleasingMachine)
def an_abort_that_counts_nacks_counts_all(patch: Patch) -> None:
    abort = targets.ABORT_TRANSACTION.original
    targets.ABORT_TRANSACTION.replace(
        patch, lambda transactions, session, name, counts_all: abort(transactions, session, name, counts_all=True)
    )


@shows_in(ReleasingMachine)
def an_abort_that_counts_nacks_counts_nothing(patch: Patch) -> None:
    def faulty(transactions: Transactions, session: ConnectionState, name: str, *, counts_all: bool) -> None:
        if counts_all:
            abort(transactions, session, name, counts_all=True)
        else:
            _abort_without_an_attempt(transactions, session, name)

    abort = targets.ABORT_TRANSACTION.original
    targets.ABORT_TRANSACTION.replace(patch, faulty)


def _count_all(session: ConnectionState, names: Iterable[str | None]) -> None:
    """Make the transactions count all messages, whatever their BEGIN said."""
    for name in names:
        transaction = session.transactions.get(name or "")
        if transaction is not None:
            transaction.counts_all = True


@shows_in(ReleasingMachine, first=2)
def an_abort_counts_all_although_its_transaction_counts_nacks(patch: Patch) -> None:
    def faulty(transactions: Transactions, session: ConnectionState, command: Abort) -> None:
        _count_all(session, [command.transaction])
        abort(transactions, session, command)

    abort = targets.ABORT.original
    targets.ABORT.replace(patch, faulty)


@shows_rarely_in(BrokerMachine, first=4)
def a_repeated_commit_counts_all_although_its_transaction_counts_nacks(patch: Patch) -> None:
    def faulty(transactions: Transactions, session: ConnectionState, command: Commit) -> None:
        _count_all(session, [command.transaction])
        commit(transactions, session, command)

    commit = targets.COMMIT.original
    targets.COMMIT.replace(patch, faulty)


@shows_in(ReleasingMachine)
def a_release_counts_all_although_its_transaction_counts_nacks(patch: Patch) -> None:
    def faulty(releasing: Releasing, session: ConnectionState, request: Release) -> None:
        _count_all(session, [request.transaction])
        release(releasing, session, request)

    release = targets.RELEASE.original
    targets.RELEASE.replace(patch, faulty)


@shows_in(ReleasingMachine, first=1)
def a_lost_connection_counts_all_although_its_transaction_counts_nacks(patch: Patch) -> None:
    def faulty(transactions: Transactions, session: ConnectionState, reason: RequeueReason) -> None:
        _count_all(session, session.transactions)
        abort_all(transactions, session, reason)

    abort_all = targets.ABORT_ALL.original
    targets.ABORT_ALL.replace(patch, faulty)


@shows_in(ReleasingMachine, first=2)
def a_lost_connection_counts_nothing_of_a_transaction_that_counts_nacks(patch: Patch) -> None:
    def faulty(transactions: Transactions, session: ConnectionState, reason: RequeueReason) -> None:
        for name in [name for name, transaction in session.transactions.items() if not transaction.counts_all]:
            _abort_without_an_attempt(transactions, session, name)
        abort_all(transactions, session, reason)

    abort_all = targets.ABORT_ALL.original
    targets.ABORT_ALL.replace(patch, faulty)


@shows_in(ReleasingMachine, first=5)
def a_parked_connection_keeps_a_transaction_that_would_count_nothing(patch: Patch) -> None:
    targets.ABORT_UNCOUNTED.replace(patch, lambda transactions, session: None)


@shows_in(ReleasingMachine)
def a_transaction_ignores_a_nack_of_a_message_it_acknowledged(patch: Patch) -> None:
    def faulty(acknowledging: Acknowledging, session: ConnectionState, nack: Nack) -> None:
        transaction = session.transactions.get(nack.transaction or "")
        was_acknowledged = transaction is not None and transaction.acknowledges(nack.sequence, nack.dispatch)
        nack_message(acknowledging, session, nack)
        if transaction is not None and was_acknowledged:
            del transaction.nacks[nack.sequence]

    nack_message = targets.NACK.original
    targets.NACK.replace(patch, faulty)


@shows_in(ReleasingMachine, first=1)
def a_started_message_counts_as_started_in_its_next_dispatch(patch: Patch) -> None:
    def faulty(outcomes: Settlement, entry: Entry, reason: RequeueReason, **options: Any) -> None:
        was_started = entry.is_started
        requeue(outcomes, entry, reason, **options)
        if was_started:
            entry.start_state = STARTED

    requeue = targets.REQUEUE.original
    targets.REQUEUE.replace(patch, faulty)


@shows_in(ReleasingMachine)
def a_lost_connection_counts_no_attempt_of_a_started_message(patch: Patch) -> None:
    def faulty(acknowledging: Acknowledging, session: ConnectionState, started: Started) -> None:
        say_started(acknowledging, session, started)
        session.consumer(started.subscription).held[started.sequence].start_state = UNSTARTED

    say_started = targets.MARK_STARTED.original
    targets.MARK_STARTED.replace(patch, faulty)


@shows_in(ReleasingMachine, first=3)
def the_started_message_named_by_an_acknowledgement_is_not_started(patch: Patch) -> None:
    def faulty(acknowledging: Acknowledging, session: ConnectionState, ack: Ack) -> None:
        if ack.started is not None:
            session.consumer_of(ack.started.subscription, ack.started.sequence, ack.started.dispatch)
            ack.started = None
        acknowledge(acknowledging, session, ack)

    acknowledge = targets.ACKNOWLEDGE.original
    targets.ACKNOWLEDGE.replace(patch, faulty)


@shows_in(ReleasingMachine)
def a_lost_connection_counts_the_first_message_of_a_truenext_client(patch: Patch) -> None:
    def faulty(subscribing: Subscribing, consumer: BrokerConsumer, *, is_exempt: bool) -> None:
        is_truenext_client, consumer.session.is_truenext_client = consumer.session.is_truenext_client, False
        end_consumer(subscribing, consumer, is_exempt=is_exempt)
        consumer.session.is_truenext_client = is_truenext_client

    end_consumer = targets.END_CONSUMER.original
    targets.END_CONSUMER.replace(patch, faulty)


@shows_in(ReleasingMachine)
def a_restart_forgets_that_an_attempt_was_a_lost_connection(patch: Patch) -> None:
    def faulty(reading: PageReader, lane: Lane, found: PageMessage, message: SentMessage) -> Entry:
        entry = new_entry(reading, lane, found, message)
        entry.was_lost = False
        return entry

    new_entry = targets.LOAD_ENTRY.original
    targets.LOAD_ENTRY.replace(patch, faulty)


@shows_rarely_in(ReleasingMachine, first=19)
def a_nacked_message_is_still_reported_as_lost(patch: Patch) -> None:
    def faulty(outcomes: Settlement, entry: Entry, reason: RequeueReason, **options: Any) -> None:
        was_lost = entry.was_lost
        requeue(outcomes, entry, reason, **options)
        entry.was_lost |= was_lost

    requeue = targets.REQUEUE.original
    targets.REQUEUE.replace(patch, faulty)


# Redelivered ----------------------------------------------------------------------------------------------------------


def _set_start_state(patch: Patch, state: Callable[[Entry, StartState, bool], StartState]) -> None:
    """Each requeued message gets the state that `state` returns for the entry with its new state, the state of the
    dispatch that ended, and whether its consumer reports started messages."""

    def faulty(outcomes: Settlement, entry: Entry, reason: RequeueReason, **options: Any) -> None:
        before = entry.start_state
        requeue(outcomes, entry, reason, **options)
        entry.start_state = state(entry, before, options.get("reports_started", False))

    requeue = targets.REQUEUE.original
    targets.REQUEUE.replace(patch, faulty)


@shows_in(ReleasingMachine)
def every_message_that_was_dispatched_before_is_redelivered(patch: Patch) -> None:
    _set_start_state(patch, lambda entry, before, reports_started: UNSTARTED)


@shows_in(ReleasingMachine)
def a_released_message_that_was_started_is_not_redelivered(patch: Patch) -> None:
    _set_start_state(
        patch,
        lambda entry, before, reports_started: (
            NEVER_STARTED if reports_started and before is STARTED and entry.deliveries == 1 else entry.start_state
        ),
    )


@shows_in(ReleasingMachine)
def a_message_that_was_started_once_is_not_redelivered_after_a_release(patch: Patch) -> None:
    _set_start_state(
        patch,
        lambda entry, before, reports_started: (
            NEVER_STARTED if reports_started and before is not STARTED else entry.start_state
        ),
    )


@shows_in(ReleasingMachine)
def a_message_is_redelivered_once_it_was_released_twice(patch: Patch) -> None:
    _set_start_state(
        patch, lambda entry, before, reports_started: UNSTARTED if entry.deliveries > 1 else entry.start_state
    )


def _report_started(patch: Patch, reports_started: Callable[[BrokerConsumer], bool]) -> None:
    targets.REPORTS_STARTED.replace(patch, property(reports_started))


@shows_in(ReleasingMachine)
def a_lost_report_of_a_started_message_makes_no_redelivery(patch: Patch) -> None:
    _report_started(patch, lambda consumer: consumer.session.is_truenext_client and consumer.mode is not AckMode.AUTO)


@shows_in(ReleasingMachine)
def messages_of_a_plain_client_are_not_redelivered_after_unsubscribe(patch: Patch) -> None:
    _report_started(patch, lambda consumer: not consumer.session.may_lack_reports and consumer.mode is not AckMode.AUTO)


@shows_in(ReleasingMachine)
def unsent_messages_in_auto_mode_are_not_redelivered(patch: Patch) -> None:
    _report_started(
        patch, lambda consumer: consumer.session.is_truenext_client and not consumer.session.may_lack_reports
    )


@shows_in(ReleasingMachine)
def a_parked_connection_is_taken_to_have_reported_all(patch: Patch) -> None:
    def faulty(connecting: Connecting, session: ConnectionState) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            _report_started(
                inner, lambda consumer: consumer.session.is_truenext_client and consumer.mode is not AckMode.AUTO
            )
            return park(connecting, session)

    park = targets.PARK.original
    targets.PARK.replace(patch, faulty)


@shows_in(ReleasingMachine)
def a_takeover_is_taken_for_a_disconnect(patch: Patch) -> None:
    disconnect = targets.DISCONNECT.original
    targets.DISCONNECT.replace(
        patch,
        lambda connecting, session, *, is_exempt, is_requested=False: disconnect(
            connecting, session, is_exempt=is_exempt, is_requested=is_exempt
        ),
    )


@shows_in(BrokerMachine, first=2)
def a_disconnect_is_taken_for_a_lost_connection(patch: Patch) -> None:
    disconnect = targets.DISCONNECT.original
    targets.DISCONNECT.replace(
        patch,
        lambda connecting, session, *, is_exempt, is_requested=False: disconnect(
            connecting, session, is_exempt=is_exempt
        ),
    )


@shows_in(ReleasingMachine)
def a_nack_makes_messages_redelivered_that_were_not_started(patch: Patch) -> None:
    fail = targets.FAIL.original
    targets.FAIL.replace(
        patch, lambda outcomes, entry, reason, nack=None, **options: fail(outcomes, entry, reason, nack)
    )


@shows_in(ReleasingMachine)
def messages_of_a_rolled_back_transaction_are_not_redelivered(patch: Patch) -> None:
    def faulty(transactions: Transactions, session: ConnectionState, name: str, *, counts_all: bool) -> None:
        held = session.transactions[name].held
        fresh = [entry for entry in held.values() if entry.deliveries == 1 and not entry.is_started]
        abort(transactions, session, name, counts_all=counts_all)
        for entry in fresh:
            entry.start_state = NEVER_STARTED

    abort = targets.ABORT_TRANSACTION.original
    targets.ABORT_TRANSACTION.replace(patch, faulty)


@shows_in(ReleasingMachine)
def a_clean_stop_forgets_that_messages_were_dispatched(patch: Patch) -> None:
    def faulty(reading: PageReader, lane: Lane, found: PageMessage, message: SentMessage) -> Entry:
        entry = new_entry(reading, lane, found, message)
        if found.mark.deliveries:
            entry.start_state = NEVER_STARTED
        return entry

    new_entry = targets.LOAD_ENTRY.original
    targets.LOAD_ENTRY.replace(patch, faulty)


@shows_in(PagingMachine)
def a_browser_is_shown_the_flag_of_the_last_dispatch(patch: Patch) -> None:
    def faulty(browsing: BrowseTask, read: BrowseRead, found: PageMessage) -> Entry | None:
        entry: Entry | None = to_show(browsing, read, found)
        if entry is not None:
            entry.start_state = UNSTARTED
        return entry

    to_show = targets.ENTRY_TO_SHOW.original
    targets.ENTRY_TO_SHOW.replace(patch, faulty)


@shows_in(BrokerMachine, first=1)
def a_queue_to_which_an_open_transaction_sends_goes(patch: Patch) -> None:
    targets.IS_RESERVED.replace(patch, lambda queues, queue: False)


@shows_in(BrokerMachine)
def room_reserved_for_a_transaction_is_never_freed(patch: Patch) -> None:
    targets.FREE_RESERVATIONS.replace(patch, lambda queues, promised: None)


# Causes ---------------------------------------------------------------------------------------------------------------


def _say(patch: Patch, faulty: Callable[[KnownCauses | None, str], KnownCauses]) -> None:
    targets.APPEND_CAUSE.replace(patch, faulty)


@shows_in(FailingMachine)
def the_last_cause_is_not_updated(patch: Patch) -> None:
    with_cause = targets.APPEND_CAUSE.original
    _say(patch, lambda before, cause: with_cause(before, cause) if before is None else before)


@shows_in(FailingMachine, first=2)
def the_first_cause_is_overwritten(patch: Patch) -> None:
    with_cause = targets.APPEND_CAUSE.original
    _say(patch, lambda before, cause: with_cause(None, cause))


@shows_in(FailingMachine)
def a_cause_is_not_written_with_its_attempt(patch: Patch) -> None:
    _say(patch, lambda before, cause: KnownCauses(cause if before is None else before.first, cause))


@shows_in(FailingMachine)
def causes_are_lost_over_a_restart(patch: Patch) -> None:
    def faulty(reading: PageReader, lane: Lane, found: PageMessage, message: SentMessage) -> Entry:
        found.causes = NO_CAUSES
        return new_entry(reading, lane, found, message)

    new_entry = targets.LOAD_ENTRY.original
    targets.LOAD_ENTRY.replace(patch, faulty)


@shows_in(PagingMachine)
def causes_that_left_memory_do_not_come_back(patch: Patch) -> None:
    targets.LOAD_CAUSES.replace(patch, lambda resident, entry, causes: None)


@shows_in(PagingMachine, first=13)
def causes_leave_memory_before_the_store_has_them(patch: Patch) -> None:
    targets.CAN_UNLOAD_CAUSES.replace(patch, lambda resident, entry: True)


@shows_in(FailingMachine)
def an_abort_keeps_the_cause_of_a_nack(patch: Patch) -> None:
    def faulty(outcomes: Settlement, entry: Entry, reason: RequeueReason, *, cause: str = "", **options: Any) -> None:
        requeue(outcomes, entry, reason, cause=cause or said.pop(entry.sequence, ""), **options)

    def noting(acknowledging: Acknowledging, session: ConnectionState, nack: Nack) -> None:
        said[nack.sequence] = nack.cause
        nack_message(acknowledging, session, nack)

    said: dict[int, str] = {}
    nack_message, requeue = targets.NACK.original, targets.REQUEUE.original
    targets.NACK.replace(patch, noting)
    targets.REQUEUE.replace(patch, faulty)


@shows_in(FailingMachine)
def only_the_message_that_a_nack_names_gets_its_cause(patch: Patch) -> None:
    def faulty(
        outcomes: Settlement, entry: Entry, reason: RequeueReason, nack: Nack | None = None, **options: Any
    ) -> None:
        if nack is not None and nack.sequence != entry.sequence:
            nack = Nack(nack.subscription, nack.sequence, None, nack.delay_ms, nack.is_rejected)
        fail(outcomes, entry, reason, nack, **options)

    fail = targets.FAIL.original
    targets.FAIL.replace(patch, faulty)


@shows_in(FailingMachine, first=2)
def an_attempt_without_a_cause_forgets_the_last_one(patch: Patch) -> None:
    def faulty(outcomes: Settlement, entry: Entry, reason: RequeueReason, *, cause: str = "", **options: Any) -> None:
        if entry.causes is not None and not cause:
            entry.causes = KnownCauses(entry.causes.first, entry.causes.first, entry.causes.batch)
        requeue(outcomes, entry, reason, cause=cause, **options)

    requeue = targets.REQUEUE.original
    targets.REQUEUE.replace(patch, faulty)


@shows_in(FailingMachine)
def a_dead_letter_does_not_say_its_causes(patch: Patch) -> None:
    def faulty(
        message: SentMessage, origin: str, policy: Policy, *, attempts: int, causes: Causes, reason: str, now_ms: int
    ) -> FailedMessage:
        return made(message, origin, policy, attempts=attempts, causes=NO_CAUSES, reason=reason, now_ms=now_ms)

    made = targets.MAKE_DEAD_LETTER.original
    targets.MAKE_DEAD_LETTER.replace(patch, faulty)


# Reports and handlers -------------------------------------------------------------------------------------------------


def _dead_lettered_by(patch: Patch, change: Callable[[SentMessage, FailedMessage], FailedMessage]) -> None:
    def faulty(message: SentMessage, *arguments: Any, **named: Any) -> FailedMessage:
        return change(message, made(message, *arguments, **named))

    made = targets.MAKE_DEAD_LETTER.original
    targets.MAKE_DEAD_LETTER.replace(patch, faulty)


def _reported_by(patch: Patch, change: Callable[[SentMessage, SentMessage], SentMessage]) -> None:
    """Change each report; `change` gets the dead letter and the report."""

    def faulty(failed: FailedMessage) -> tuple[Destination, SentMessage] | None:
        report = made(failed)
        return None if report is None else (report[0], change(failed.message, report[1]))

    made = targets.MAKE_REPORT.original
    targets.MAKE_REPORT.replace(patch, faulty)


def _with_headers(message: SentMessage, **changed: str | None) -> SentMessage:
    headers = decode_header_lines(message.header)
    for name, value in changed.items():
        name = name.replace("_", "-")
        if value is None:
            headers.pop(name, None)
        else:
            headers[name] = value
    return structs.replace(message, header=encode_header_lines(headers))


@shows_in(ReportingMachine)
def a_report_comes_in_a_later_batch(patch: Patch) -> None:
    late: list[tuple[Settlement, Entry, FailedMessage]] = []
    send, turn = targets.SEND_REPORT.original, targets.TURN.original

    def faulty(settlement: Settlement, entry: Entry, failed: FailedMessage) -> None:
        late.append((settlement, entry, failed))

    def turn_later(own: Turn) -> Any:
        reports, late[:] = list(late), []
        for report in reports:
            if report[0]._commit_state is own._commit_state:
                send(*report)
        return turn(own)

    targets.SEND_REPORT.replace(patch, faulty)
    targets.TURN.replace(patch, turn_later)


@shows_in(ReportingMachine)
def a_report_has_the_body_of_the_message(patch: Patch) -> None:
    _reported_by(patch, lambda letter, report: structs.replace(report, body=letter.body))


@shows_in(ReportingMachine)
def a_report_does_not_name_the_id(patch: Patch) -> None:
    _reported_by(patch, lambda letter, report: _with_headers(report, correlation_id=""))


@shows_in(ReportingMachine)
def a_report_is_transient(patch: Patch) -> None:
    _reported_by(patch, lambda letter, report: structs.replace(report, persistent=False))


@shows_in(ReportingMachine)
def a_report_is_not_sent(patch: Patch) -> None:
    targets.SEND_REPORT.replace(patch, lambda *_: None)


@shows_in(ReportingMachine)
def a_handler_stays_in_the_header(patch: Patch) -> None:
    def change(message: SentMessage, failed: FailedMessage) -> FailedMessage:
        handlers = decode_header_lines(message.header).get("truenext-on-failure")
        return failed._replace(message=_with_headers(failed.message, truenext_on_failure=handlers))

    _dead_lettered_by(patch, change)


@shows_in(ReportingMachine)
def handlers_are_forgotten_at_the_first(patch: Patch) -> None:
    _dead_lettered_by(
        patch,
        lambda _, failed: failed._replace(message=_with_headers(failed.message, truenext_on_failure=None)),
    )


@shows_in(ReportingMachine)
def a_handled_message_is_reported(patch: Patch) -> None:
    _dead_lettered_by(patch, lambda _, failed: failed._replace(is_handled=False))


@shows_in(ReportingMachine)
def a_second_failure_replaces_the_facts_of_the_first(patch: Patch) -> None:
    made = targets.MAKE_DEAD_LETTER.original

    def faulty(message: SentMessage, *arguments: Any, **named: Any) -> FailedMessage:
        return made(_with_headers(message, truenext_failure=None), *arguments, **named)

    targets.MAKE_DEAD_LETTER.replace(patch, faulty)


@shows_in(ReportingMachine)
def a_handled_message_is_as_persistent_as_it_was(patch: Patch) -> None:
    _dead_lettered_by(
        patch,
        lambda message, failed: (
            failed._replace(message=structs.replace(failed.message, persistent=message.persistent))
            if failed.is_handled
            else failed
        ),
    )


@shows_in(ReleasingMachine, first=2)
def a_doomed_transaction_is_committed(patch: Patch) -> None:
    def faulty(transactions: Transactions, session: ConnectionState, commit: Commit) -> None:
        if commit.transaction in session.transactions:
            session.transactions[commit.transaction].is_rollback_only = False
        commit_it(transactions, session, commit)

    commit_it = targets.COMMIT.original
    targets.COMMIT.replace(patch, faulty)


# Turns ----------------------------------------------------------------------------------------------------------------


@shows_in(BrokerMachine)
def a_connection_gets_more_than_it_may_hold(patch: Patch) -> None:
    targets.COUNT_DISPATCHED.replace(patch, lambda clients, session, count: None)


@shows_in(BrokerMachine)
def messages_that_a_wildcard_consumer_holds_count_once(patch: Patch) -> None:
    targets.HELD_WEIGHT_OF_WILDCARDS.replace(patch, 1)


@shows_in(BrokerMachine)
def acknowledgements_of_open_transactions_do_not_count_as_held(patch: Patch) -> None:
    def faulty(session: ConnectionState) -> int:
        with pytest.MonkeyPatch.context() as inner:
            targets.SETTLING_TRANSACTIONS.replace(inner, ())
            return count_held(session)

    count_held = targets.COUNT_HELD.original
    targets.COUNT_HELD.replace(patch, faulty)


@shows_in(WindowsMachine, first=1)
def a_full_connection_gets_express_dispatch(patch: Patch) -> None:
    def faulty(consumer: BrokerConsumer, rank: int) -> bool:
        session = consumer.session
        is_full, session.holds_too_much = session.holds_too_much, False
        has_credit = has_express_credit(consumer, rank)
        session.holds_too_much = is_full
        return has_credit

    has_express_credit = targets.HAS_EXPRESS_CREDIT.original
    targets.HAS_EXPRESS_CREDIT.replace(patch, faulty)


@shows_in(BrokerMachine, first=5)
def a_full_connection_that_has_acknowledged_is_not_woken(patch: Patch) -> None:
    def faulty(clients: ClientRegistry) -> list[ConnectionState]:
        take_freed(clients)
        return []

    take_freed = targets.TAKE_FREED_SESSIONS.original
    targets.TAKE_FREED_SESSIONS.replace(patch, faulty)


@shows_in(BrokerMachine)
def queues_that_a_turn_did_not_reach_are_forgotten(patch: Patch) -> None:
    def faulty_dispatch(dispatcher: Dispatcher, queue: Queue, deliveries: Deliveries) -> Lane | None:
        reached.append(queue)
        return dispatch(dispatcher, queue, deliveries)

    def faulty_turn(turn: TurnDispatch, deliveries: Deliveries) -> None:
        reached.clear()
        touched = list(targets.touched(turn))
        dispatch_in_turn(turn, deliveries)
        for queue in touched:
            if queue not in reached and not queue.has_wildcards:
                targets.touched(turn).pop(queue, None)

    dispatch, dispatch_in_turn = targets.DISPATCH.original, targets.DISPATCH_OF_TURN.original
    reached: list[Queue] = []
    targets.DISPATCH.replace(patch, faulty_dispatch)
    targets.DISPATCH_OF_TURN.replace(patch, faulty_turn)


def _forget_cut_queues(patch: Patch, *, are_selective: bool) -> None:
    """Forget queues whose dispatch has reached the limit of a turn."""

    def faulty(dispatcher: Dispatcher, queue: Queue, deliveries: Deliveries) -> Lane | None:
        lane = dispatch(dispatcher, queue, deliveries)
        if (queue.observer is not None) is are_selective:
            targets.touched(dispatcher).pop(queue, None)
        return lane

    dispatch = targets.DISPATCH.original
    targets.DISPATCH.replace(patch, faulty)


@shows_in(BrokerMachine)
def a_queue_that_a_turn_cut_is_forgotten(patch: Patch) -> None:
    _forget_cut_queues(patch, are_selective=False)


@shows_in(GroupsMachine)
def a_queue_with_selectors_that_a_turn_cut_is_forgotten(patch: Patch) -> None:
    _forget_cut_queues(patch, are_selective=True)


@shows_in(WildcardMachine)
def queues_of_wildcards_that_a_turn_cut_are_forgotten(patch: Patch) -> None:
    targets.TOUCH_AGAIN.replace(patch, lambda dispatch: None)


def _after_search(
    patch: Patch, then: Callable[[TurnDispatch, WildcardDispatch, dict[Queue, bool | None]], None]
) -> None:
    """Do more after a turn has searched some of the changed queues."""

    def faulty(
        turn: TurnDispatch,
        dispatch: WildcardDispatch,
        shared: dict[Queue, bool | None],
        wildcards: dict[Wildcard, None],
        search_count: int,
    ) -> None:
        search_some(turn, dispatch, shared, wildcards, search_count)
        then(turn, dispatch, shared)

    search_some = targets.SEARCH_SOME.original
    targets.SEARCH_SOME.replace(patch, faulty)


@shows_in(WildcardMachine)
def wildcards_are_served_before_all_changed_queues_are_searched(patch: Patch) -> None:
    def serve(turn: TurnDispatch, dispatch: WildcardDispatch, _: dict[Queue, bool | None]) -> None:
        for lane in dispatch.run({}, targets.touched_wildcards(turn)):
            targets.REQUEST_PAGE.of(turn)(lane)

    _after_search(patch, serve)


@shows_in(WildcardMachine)
def a_queue_that_changes_after_its_search_is_not_searched_again(patch: Patch) -> None:
    def note_searched(_: TurnDispatch, __: WildcardDispatch, shared: dict[Queue, bool | None]) -> None:
        searched.update(queue for queue in shared if shared[queue])

    def faulty_run(
        dispatch: WildcardDispatch, queues: Mapping[Queue, bool | None], wildcards: Iterable[Wildcard]
    ) -> Iterable[Lane]:
        lanes = run(
            dispatch, {queue: is_searched or queue in searched for queue, is_searched in queues.items()}, wildcards
        )
        searched.clear()
        return lanes

    run = targets.WILDCARD_RUN.original
    searched: set[Queue] = set()
    _after_search(patch, note_searched)
    targets.WILDCARD_RUN.replace(patch, faulty_run)


@shows_in(FailingMachine)
def messages_are_dispatched_before_all_due_retries_have_returned(patch: Patch) -> None:
    def faulty_step(retries: RetryTask) -> tuple[()]:
        stepped.append(retries)
        return end_delays(retries)

    def faulty_turn(turn: Turn) -> Effects:
        stepped.clear()
        effects = take_turn(turn)
        stepped.clear()
        return effects

    end_delays, is_due, take_turn = targets.END_DELAYS.original, targets.IS_RETRY_DUE.original, targets.TURN.original
    stepped: list[RetryTask] = []
    targets.END_DELAYS.replace(patch, faulty_step)
    targets.IS_RETRY_DUE.replace(patch, lambda retries: not stepped and is_due(retries))
    targets.TURN.replace(patch, faulty_turn)


@shows_in(BrokerMachine)
def eviction_gives_up_after_a_round_in_which_messages_became_durable(patch: Patch) -> None:
    def faulty(eviction: Eviction, queues: Collection[Queue]) -> list[Queue]:
        before = targets.round_of_eviction(eviction)
        too_slow = enforce(eviction, queues)
        if before is not None and targets.round_of_eviction(eviction) is not before:
            targets.end_round_of_eviction(eviction)
        return too_slow

    enforce = targets.ENFORCE_MEMORY_LIMITS.original
    targets.ENFORCE_MEMORY_LIMITS.replace(patch, faulty)


# Pulling --------------------------------------------------------------------------------------------------------------


def _say_that_nothing_is_ready(patch: Patch, is_faulty: Callable[[BrokerConsumer, Queue], bool]) -> None:
    """End no-wait pull requests before a read or a comparison has shown whether a message is ready."""

    def faulty(nothing_ready: NoWaitPullEnder, consumer: BrokerConsumer, queue: Queue) -> bool:
        if is_nothing_ready(nothing_ready, consumer, queue):
            return True
        queue_dispatch = targets.queue_dispatch_of(nothing_ready, queue)
        return is_faulty(consumer, queue) and not isinstance(queue_dispatch.head_for(consumer), Entry)

    is_nothing_ready = targets.IS_NOTHING_READY.original
    targets.IS_NOTHING_READY.replace(patch, faulty)


@shows_in(ReleasingMachine)
def a_no_wait_pull_request_ends_while_a_page_is_read(patch: Patch) -> None:
    _say_that_nothing_is_ready(patch, lambda consumer, queue: queue.observer is None)


@shows_in(ReleasingGroupsMachine)
def a_no_wait_pull_request_ends_while_a_selector_is_compared(patch: Patch) -> None:
    _say_that_nothing_is_ready(patch, lambda consumer, queue: consumer.selector is not None)


@shows_in(ReleasingGroupsMachine)
def a_no_wait_pull_request_of_a_wildcard_ends_while_a_page_is_read(patch: Patch) -> None:
    def faulty(dispatch: WildcardDispatch, wildcard: Wildcard) -> bool:
        targets.awaiting_page(dispatch).discard(wildcard)
        return is_nothing_ready(dispatch, wildcard)

    is_nothing_ready = targets.IS_NOTHING_READY_ANYWHERE.original
    targets.IS_NOTHING_READY_ANYWHERE.replace(patch, faulty)


@shows_in(ReleasingMachine)
def an_acknowledgement_gives_credit_to_a_pulling_consumer(patch: Patch) -> None:
    def faulty(acknowledging: Acknowledging, session: ConnectionState, ack: Ack) -> None:
        consumer = session.consumer_of(ack.subscription, ack.sequence, ack.dispatch)
        acknowledge(acknowledging, session, ack)
        if consumer.pull_request is not None:
            consumer.pull_request.remaining += 1

    acknowledge = targets.ACKNOWLEDGE.original
    targets.ACKNOWLEDGE.replace(patch, faulty)


@shows_in(ReleasingMachine)
def a_release_leaves_the_pull_request(patch: Patch) -> None:
    _while_releasing(patch, targets.FORGET_PULL_REQUEST, lambda pull_requests, consumer: None)


@shows_in(ReleasingMachine)
def a_pull_request_ended_by_a_release_is_answered(patch: Patch) -> None:
    def faulty(pull_requests: PullRequests, consumer: BrokerConsumer) -> None:
        if consumer.pull_request is not None:
            with pytest.MonkeyPatch.context() as inner:
                targets.FORGET_PULL_REQUEST.replace(inner, targets.FORGET_PULL_REQUEST.original)
                pull_requests.end_with_notice(consumer)

    _while_releasing(patch, targets.FORGET_PULL_REQUEST, faulty)


@shows_in(ReleasingMachine)
def a_waiting_pull_request_ends_when_no_message_is_ready(patch: Patch) -> None:
    def faulty(pull_requests: PullRequests, consumer: BrokerConsumer, wait_ms: int = 0) -> None:
        add(pull_requests, consumer, wait_ms)
        pull_requests.no_wait_by_queue.setdefault(consumer.queue or consumer, {})[consumer] = None

    add = targets.ADD_PULL_REQUEST.original
    targets.ADD_PULL_REQUEST.replace(patch, faulty)


@shows_in(ReleasingMachine)
def a_pull_request_replaces_the_earlier_one(patch: Patch) -> None:
    def faulty(pulling: Pulling, session: ConnectionState, credit: Credit) -> EndedPullRequest | None:
        consumer = session.consumers.get(credit.subscription)
        if consumer is not None and consumer.pull_request is not None and 0 < credit.messages < 200:
            consumer.pull_request.remaining = 0
        return ask(pulling, session, credit)

    ask = targets.PULL.original
    targets.PULL.replace(patch, faulty)


@shows_in(ReleasingMachine)
def messages_come_after_the_end_of_a_pull_request(patch: Patch) -> None:
    def faulty(pull_requests: PullRequests) -> list[EndedPullRequest]:
        ended = take_ended(pull_requests)
        for one in ended:
            if one.consumer.pull_request is not None:
                one.consumer.pull_request.remaining = one.unused
        return ended

    take_ended = targets.TAKE_ENDED_PULL_REQUESTS.original
    targets.TAKE_ENDED_PULL_REQUESTS.replace(patch, faulty)


@shows_in(GroupsMachine)
def the_end_of_a_pull_request_lets_no_express_dispatch_go_on(patch: Patch) -> None:
    def faulty(pull_requests: PullRequests, consumer: BrokerConsumer) -> EndedPullRequest:
        assert consumer.pull_request is not None
        ended = EndedPullRequest(consumer, consumer.pull_request.remaining, consumer.pull_request.correlation)
        pull_requests.end_without_notice(consumer)
        return ended

    targets.WITHDRAW_PULL_REQUEST.replace(patch, faulty)


@shows_in(BrokerMachine)
def a_drain_does_not_notice_new_messages(patch: Patch) -> None:
    moment = targets.COUNT_MOMENT.original
    targets.COUNT_MOMENT.replace(patch, lambda count: (0, moment(count)[1]))


@shows_in(BrokerMachine)
def a_drain_does_not_notice_messages_that_come_back(patch: Patch) -> None:
    moment = targets.COUNT_MOMENT.original
    targets.COUNT_MOMENT.replace(patch, lambda count: (moment(count)[0], 0))


@shows_in(FailingMachine)
def a_drain_waits_for_delayed_messages(patch: Patch) -> None:
    targets.IS_BLOCKING.replace(patch, lambda count, entry: False)


@shows_in(FailingMachine)
def a_drain_takes_messages_that_were_removed_for_delayed_ones(patch: Patch) -> None:
    targets.IS_BLOCKING.replace(
        patch, lambda count, entry: entry.due_us != 0 and entry.sequence not in entry.lane.delayed
    )


@shows_in(BrokerMachine)
def a_drain_forgets_what_transactions_have(patch: Patch) -> None:
    def faulty(count: RemainderCount, entries: Collection[Entry]) -> Iterator[None]:
        yield

    targets.COUNT_ALL_HELD.replace(patch, faulty)


@shows_in(FailingMachine)
def a_drain_waits_for_dead_letters_that_are_held(patch: Patch) -> None:
    def faulty(count: RemainderCount, queue: Queue, number: int) -> None:
        count._of(queue).held += number

    targets.ADD_HELD.replace(patch, faulty)


@shows_in(BulkMachine)
def a_drain_waits_for_messages_in_paused_queues(patch: Patch) -> None:
    count_waiting = targets.COUNT_WAITING.original

    def faulty(count: RemainderCount, queue: Queue, waiting: int, given_up: int, blocking: Iterable[Entry]) -> None:
        is_paused, queue.is_paused = queue.is_paused, False
        count_waiting(count, queue, waiting, given_up, blocking)
        queue.is_paused = is_paused

    targets.COUNT_WAITING.replace(patch, faulty)


# Counts of queues -----------------------------------------------------------------------------------------------------


def a_requeued_message_counts_twice(patch: Patch) -> None:
    requeue = targets.REQUEUE.original

    def faulty(settlement: Settlement, entry: Entry, *options: Any, **more: Any) -> None:
        requeue(settlement, entry, *options, **more)
        entry.lane.queue.counts.rare.returned += 1

    targets.REQUEUE.replace(patch, faulty)


def a_first_failure_counts_as_one_of_a_message_that_fails_again(patch: Patch) -> None:
    requeue = targets.REQUEUE.original

    def faulty(settlement: Settlement, entry: Entry, *options: Any, **more: Any) -> None:
        attempts = entry.attempts
        requeue(settlement, entry, *options, **more)
        entry.lane.queue.counts.rare.failed_again += (attempts, entry.attempts) == (0, 1)

    targets.REQUEUE.replace(patch, faulty)


def a_message_dispatched_again_is_held_since_its_first_dispatch(patch: Patch) -> None:
    dispatch_entry = targets.DISPATCH_ENTRY.original

    def faulty(dispatcher: Dispatcher, entry: Entry, consumer: BrokerConsumer, deliveries: Deliveries) -> None:
        first_us = entry.dispatched_us
        dispatch_entry(dispatcher, entry, consumer, deliveries)
        entry.dispatched_us = first_us or entry.dispatched_us

    targets.DISPATCH_ENTRY.replace(patch, faulty)


def a_message_that_is_acknowledged_in_a_transaction_counts_in_no_queue(patch: Patch) -> None:
    acknowledge = targets.ACKNOWLEDGED.original

    def faulty(settlement: Settlement, entry: Entry) -> bool:
        entry.lane.queue.counts.acknowledged -= 1
        return acknowledge(settlement, entry)

    targets.ACKNOWLEDGED.replace(patch, faulty)


@shows_in(BulkMachine)
def a_moved_message_counts_as_purged(patch: Patch) -> None:
    execute = targets.EXECUTE_BULK.original

    def faulty(bulk: BulkPieceExecutor, request: BulkRequest, read: BulkRead, page: PageResult) -> BulkResult:
        rare = read.lane.queue.counts.rare
        moved = rare.moved
        result = execute(bulk, request, read, page)
        rare.moved, rare.purged = moved, rare.purged + rare.moved - moved
        return result

    targets.EXECUTE_BULK.replace(patch, faulty)


def the_counts_of_a_removed_queue_are_forgotten(patch: Patch) -> None:
    remove = targets.REMOVE_QUEUE.original

    def faulty(queues: Queues, queue: Queue) -> None:
        queue.counts = Counts()
        remove(queues, queue)

    targets.REMOVE_QUEUE.replace(patch, faulty)


@shows_in(TopicsMachine)
def messages_of_an_ended_subscription_count_as_nothing(patch: Patch) -> None:
    end = targets.END_SUBSCRIPTION.original

    def faulty(queues: Queues, queue: Queue) -> int:
        expired = queue.counts.rare.expired
        dropped = end(queues, queue)
        queues.removed.rare.expired -= queue.counts.rare.expired - expired
        return dropped

    targets.END_SUBSCRIPTION.replace(patch, faulty)


def targets_of(fault: Fault) -> dict[str, targets.AnyTarget]:
    """Return the targets that a fault replaces, at once or for a while, by their names in the table."""
    return {name: vars(targets)[name] for name in _replaced_in(fault.__name__)}


def _replaced_in(name: str) -> Iterator[str]:
    """In a function or class of this file, and in those that it uses."""
    for each in ast.walk(_definitions()[name]):
        match each:
            case ast.Attribute(ast.Attribute(ast.Name("targets"), target), "replace"):
                yield target
            case ast.Name(used) if used in _definitions() and used != name:
                yield from _replaced_in(used)


@cache
def _definitions() -> dict[str, ast.stmt]:
    body = ast.parse(Path(__file__).read_text()).body
    return {each.name: each for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef)}


def faults_of(machine: type[BrokerMachine]) -> list[Fault]:
    """Return the faults that show soonest in the machine."""
    return [fault for fault in faults() if machine_of(fault) is machine]


def faults() -> list[Fault]:
    """Return all faults of this file, in its order."""
    return [
        value
        for name, value in globals().items()
        if isinstance(value, FunctionType)
        and value.__module__ == __name__
        and not name.startswith("_")
        and value
        not in (
            faults,
            plain_dispatch_without_a_fault,
            shows_in,
            shows_rarely_in,
            is_rare,
            machine_of,
            first_round_of,
            targets_of,
            faults_of,
        )
    ]
