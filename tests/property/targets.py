"""Places in the engine that tests replace, call or read.

Only this file knows them; other tests use it too. If something in the engine is moved or renamed, its line here
changes, and the tests stay as they are.

A target is named for what it does. A fault replaces it, and may call the original:

    accept = targets.ACCEPT.original
    targets.ACCEPT.replace(patch, faulty)
    targets.ACCEPT.of(engine)(queue, message, 0)      as it is now, faulty or not

Functions at the end of this file return the state of the engine: `targets.touched(engine)`.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import pytest

from tests.property.disk import Disk
from truenext.engine import lifespan as run_module
from truenext.engine import remainder as remainder_module
from truenext.engine import turn as turn_module
from truenext.engine.background import browsing as browsing_module
from truenext.engine.background import bulk as bulk_module
from truenext.engine.background import expiry as expiry_module
from truenext.engine.background import scheduled as scheduled_module
from truenext.engine.background.browsing import BrowseRead, BrowseTask
from truenext.engine.background.bulk import BulkRead, plan_piece
from truenext.engine.background.bulk_work import BulkPieceExecutor
from truenext.engine.background.expiry import ExpiryTask
from truenext.engine.background.retries import RetryTask
from truenext.engine.background.scheduled import DueSendsRead, Scheduler
from truenext.engine.commands import subscribing as subscribing_module
from truenext.engine.commands.acknowledging import Acknowledging
from truenext.engine.commands.administering import Administering
from truenext.engine.commands.connecting import Connecting
from truenext.engine.commands.pulling import Pulling
from truenext.engine.commands.releasing import Releasing
from truenext.engine.commands.sending import Sending
from truenext.engine.commands.subscribing import Subscribing
from truenext.engine.commands.transactions import Transactions
from truenext.engine.dispatch import plain as plain_module
from truenext.engine.dispatch import selective as selective_module
from truenext.engine.dispatch.heads import first_head
from truenext.engine.dispatch.plain import Dispatcher
from truenext.engine.dispatch.selective import GroupedQueueDispatch, QueueDispatch
from truenext.engine.dispatch.wildcard import WildcardDispatch
from truenext.engine.engine import Engine
from truenext.engine.idle import _QueueInspection
from truenext.engine.lifecycle import settlement as outcomes_module
from truenext.engine.lifecycle.arrivals import Arrivals
from truenext.engine.lifecycle.pull_requests import PullRequests
from truenext.engine.lifecycle.redelivery import make_dead_letter, make_report
from truenext.engine.lifecycle.settlement import Settlement
from truenext.engine.lifespan import EngineLifespan
from truenext.engine.memory import delays as delays_module
from truenext.engine.memory import eviction as eviction_module
from truenext.engine.memory import horizon as horizon_module
from truenext.engine.memory import reading as reading_module
from truenext.engine.memory import resident_set as resident_set_module
from truenext.engine.memory import spilled_subscriptions as spilling_module
from truenext.engine.memory import timers as timers_module
from truenext.engine.memory.delays import DelayedEntries
from truenext.engine.memory.entries_by_lane import EntriesByLane
from truenext.engine.memory.eviction import Eviction
from truenext.engine.memory.reading import PageReader
from truenext.engine.memory.resident_set import ResidentSet
from truenext.engine.memory.spilled_subscriptions import SpilledSubscriptions
from truenext.engine.memory.timers import Timers
from truenext.engine.queues import queues as queues_module
from truenext.engine.queues import subscription_cleanup as endings_module
from truenext.engine.queues import topics as topics_module
from truenext.engine.queues import wildcards as wildcards_module
from truenext.engine.queues.queues import Queues
from truenext.engine.queues.subscription_cleanup import SubscriptionCleanup
from truenext.engine.queues.topics import Route, RouteAhead, TopicRouter
from truenext.engine.queues.unused import must_keep
from truenext.engine.queues.wildcards import Wildcards
from truenext.engine.remainder import RemainderCount
from truenext.engine.selecting import groups as groups_module
from truenext.engine.selecting import scan as scan_module
from truenext.engine.selecting import selecting as selecting_module
from truenext.engine.selecting import selections as selections_module
from truenext.engine.selecting.groups import GroupOwnership, GroupScanCursor
from truenext.engine.selecting.keyed import KeyedScans
from truenext.engine.selecting.scan import ComparisonBudget, ScanCursor
from truenext.engine.selecting.selecting import QueueSelection
from truenext.engine.selecting.selections import Selections
from truenext.engine.state import balance as balance_module
from truenext.engine.state import clients as clients_module
from truenext.engine.state import consumer as consumer_module
from truenext.engine.state import producer as producer_module
from truenext.engine.state.balance import DiskBalance, _stored_bytes, is_of_spark
from truenext.engine.state.causes import append_cause
from truenext.engine.state.clients import ClientRegistry, QueueReceivers
from truenext.engine.state.consumer import BrokerConsumer, Browser, ConnectionState
from truenext.engine.state.memory import MemoryBudget
from truenext.engine.state.producer import Producer, check_gap
from truenext.engine.state.queue import Entry, Lane, Queue, SelectedEntries, is_undeliverable
from truenext.engine.state.transaction import BrokerTransaction, EntryHolder, OpenTransactions
from truenext.engine.state.wildcard import Wildcard
from truenext.engine.turn import NoWaitPullEnder, StoreResults, Turn, TurnDispatch
from truenext.engine.writing import entries as entries_module
from truenext.engine.writing import producers as producers_module
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.engine_state import EngineState
from truenext.engine.writing.entries import (
    dereference_content,
    introduce_queue,
    mark,
    put,
    put_content,
    put_copies,
    remove,
)
from truenext.engine.writing.event_log import EventLog
from truenext.engine.writing.numbers import QueueNumberAllocator
from truenext.engine.writing.producers import JmsProducerRegistry, ProducerRegistry
from truenext.model import record as record_module
from truenext.model.answers import Answer
from truenext.model.batch import Batch
from truenext.model.commands import Commit, Send
from truenext.model.destination import Destination, parse_stored_queue_name, virtual_topic
from truenext.model.forms import closes_group
from truenext.model.message import SentMessage
from truenext.model.pattern import matches
from truenext.model.policy import Policies
from truenext.model.record import scheduled_timer_key, split_scheduled_timer
from truenext.model.selector import Selector, are_equivalent

P = ParamSpec("P")
R = TypeVar("R")
Part = TypeVar("Part")
Owner = type | ModuleType


class Target(Generic[P, R]):
    """A method, where it is defined, or a function, in the modules that call it."""

    def __init__(self, original: Callable[Concatenate[Any, P], R], *owners: Owner) -> None:
        """Raises: LookupError, if it is not what an owner has by this name."""
        self.original = original
        self.owners = owners
        self.name = original.__name__
        for owner in owners:
            if getattr(owner, self.name, None) is not original:
                raise LookupError(f"{owner.__name__} has no such {self.name}: the table of targets is to be changed")

    @property
    def current(self) -> Callable[Concatenate[Any, P], R]:
        """Return the function as it is now: the original, or its replacement."""
        found: Callable[Concatenate[Any, P], R] = getattr(self.owners[0], self.name)
        return found

    def replace(self, patch: pytest.MonkeyPatch, replacement: Callable[..., Any]) -> None:
        for owner in self.owners:
            patch.setattr(owner, self.name, replacement)

    def check_arguments(self, replacement: Callable[..., Any]) -> None:
        """Raises: TypeError, if the replacement does not take all arguments of the original."""
        if not isinstance(self.original, type):
            arguments = inspect.signature(self.original).parameters.values()
            named = {each.name: None for each in arguments if each.kind is each.KEYWORD_ONLY}
            inspect.signature(replacement).bind(*[None] * (len(arguments) - len(named)), **named)

    def watch(self, patch: pytest.MonkeyPatch, called: Callable[[str], object]) -> None:
        """Report each call with its place to `called`; the behaviour stays the same."""
        for owner, label in zip(self.owners, self.labels, strict=True):
            patch.setattr(owner, self.name, _watched(self.original, partial(called, label)))

    @property
    def labels(self) -> list[str]:
        """Return the places where the function is called."""
        return [_label(owner, self.name) for owner in self.owners]

    def of(self, one: object) -> Callable[P, R]:
        """Return the method of `one` itself, or of the part of it that has it; as it is now, replaced or not.

        Raises: LookupError, if neither has it.
        """
        kinds = tuple(owner for owner in self.owners if isinstance(owner, type))
        found: Callable[P, R] = getattr(_part(one, *kinds), self.name)
        return found


class Attribute:
    """A property, a slot or a constant."""

    def __init__(self, name: str, owner: Owner) -> None:
        """Raises: LookupError, if the owner has nothing of this name."""
        self.name = name
        self.owner = owner
        self.original: Any = getattr(owner, name, None)
        """Original value; None if only instances have it."""
        if not hasattr(owner, name) and not (isinstance(owner, type) and _is_set_by(owner, name)):
            raise LookupError(f"{owner.__name__} has no {name}: the table of targets is to be changed")

    def replace(self, patch: pytest.MonkeyPatch, replacement: object) -> None:
        patch.setattr(self.owner, self.name, replacement, raising=False)

    def watch(self, patch: pytest.MonkeyPatch, called: Callable[[str], object]) -> None:
        """Report each read of a property with its place to `called`; the behaviour stays the same."""
        for label in self.labels:
            getter = _watched(self.original.fget, partial(called, label))
            self.replace(patch, property(getter, self.original.fset))

    @property
    def labels(self) -> list[str]:
        """Return the places where a property is read; none for slots and constants."""
        return [_label(self.owner, self.name)] if isinstance(self.original, property) else []


AnyTarget = Target[..., Any] | Attribute


def _label(owner: Owner, name: str) -> str:
    return f"{owner.__name__}.{name}"


def _watched(original: Callable[..., Any], called: Callable[[], object]) -> Callable[..., Any]:
    def watched(*arguments: Any, **named: Any) -> Any:
        called()
        return original(*arguments, **named)

    return watched


def _is_set_by(owner: type, name: str) -> bool:
    return name in owner.__init__.__code__.co_names  # type: ignore[misc]


def _part(one: object, *kinds: type[Part]) -> Part:
    """`one` itself, or what it has in an attribute, or what that has in one."""
    seen = {id(one)}
    found = deque([one])
    while found:
        part = found.popleft()
        if isinstance(part, kinds):
            return part
        for other in _attributes(part):
            if id(other) not in seen and type(other).__module__.startswith("truenext.engine"):
                seen.add(id(other))
                found.append(other)
    raise LookupError(f"nothing in {type(one).__name__} is a {' or '.join(kind.__name__ for kind in kinds)}")


def _attributes(one: object) -> Iterator[object]:
    for value in getattr(one, "__dict__", {}).values():
        yield getattr(value, "__self__", value)
    for kind in type(one).__mro__:
        yield from (getattr(one, slot, None) for slot in getattr(kind, "__slots__", ()))


# The engine: what the shell asks of it --------------------------------------------------------------------------------
MAKE_ENGINE = Target(Engine.__init__, Engine)
RESTORE_QUEUE = Target(EngineLifespan.restore_queue, EngineLifespan)
RESTORE_PAUSE = Target(EngineLifespan.restore_pause, EngineLifespan)
TICK = Target(CommitState.tick, CommitState)
START = Target(EngineLifespan.start, EngineLifespan)
LAST_BATCHES = Target(EngineLifespan.final_batches, EngineLifespan)
DISCONNECT = Target(Connecting.disconnect, Connecting)
ANSWER = Target(CommitState.answer, CommitState)
SEND = Target(Sending.send, Sending)
WITH_TTL = Target(Sending.with_ttl, Sending)
CHECK_DISK = Target(Sending._check_disk, Sending)
COUNT_ACKNOWLEDGED = Target(DiskBalance.acknowledge, DiskBalance)
COUNT_CONTENTS = Target(DiskBalance.count_contents, DiskBalance)
COUNT_SENT = Target(DiskBalance.send, DiskBalance)
IS_OF_SPARK = Target(is_of_spark, balance_module)
SPARK_SURPLUS = Attribute("SPARK_SURPLUS_BYTES_MAX", balance_module)
STORED_BYTES = Target(_stored_bytes, balance_module)
NACK_ACKNOWLEDGED = Target(BrokerTransaction.nack_acknowledged, BrokerTransaction)
SUBSCRIBE = Target(Subscribing.subscribe, Subscribing)
UNSUBSCRIBE = Target(Subscribing.unsubscribe, Subscribing)
ACKNOWLEDGE = Target(Acknowledging.acknowledge, Acknowledging)
NACK = Target(Acknowledging.nack, Acknowledging)
COMMIT = Target(Transactions.commit, Transactions)
ABORT = Target(Transactions.abort, Transactions)
CAN_EXECUTE_BULK = Attribute("can_execute", BulkPieceExecutor)
EXECUTE_BULK = Target(BulkPieceExecutor.execute, BulkPieceExecutor)
RESUME = Target(Administering.resume, Administering)
TURN = Target(Turn.run, Turn)
DISPATCH_OF_TURN = Target(TurnDispatch.run, TurnDispatch)
PAGE_READ = Target(StoreResults.on_page_read, StoreResults)
CHANGE_POLICIES = Target(Administering.change_policies, Administering)
COMMITTED = Target(StoreResults.on_committed, StoreResults)

# Accept ---------------------------------------------------------------------------------------------------------------
ACCEPT = Target(Arrivals.accept, Arrivals)
SPREAD = Target(Arrivals.accept_copies, Arrivals)
SHARE = Target(Arrivals.share_content, Arrivals)
QUEUES_FOR = Target(Queues.queues_for, Queues)
QUEUES_OF_PARTS = Target(Queues.queues_for_copies, Queues)
QUEUES_OF_TOPIC = Target(TopicRouter.queues_of, TopicRouter)
IS_REPEAT = Target(Sending.is_repeat, Sending)

# Give back, give up, be done with -------------------------------------------------------------------------------------
FAIL = Target(Settlement.fail, Settlement)
REQUEUE = Target(Settlement.requeue, Settlement)
END_CONSUMER = Target(Subscribing.end_consumer, Subscribing)
REQUEUE_DELIVERED = Target(Subscribing.requeue_delivered, Subscribing)
SEQUENCES_UP_TO = Target(BrokerConsumer.sequences_up_to, BrokerConsumer)
TAKE_KEPT = Target(Acknowledging.take_kept, Acknowledging)
FORGET_JMS_PRODUCER_EARLY = Target(JmsProducerRegistry._forget_early, JmsProducerRegistry)
LONGEST_UNUSED_JMS_PRODUCER = Target(JmsProducerRegistry._oldest_dispensable, JmsProducerRegistry)
PRODUCERS_OF = Target(EngineState.producers_of, EngineState)
END_DELAY = Target(Settlement.end_delay, Settlement)
DEAD_LETTER_EXHAUSTED = Target(Settlement.dead_letter_exhausted, Settlement)
MAKE_DEAD_LETTER = Target(make_dead_letter, outcomes_module)
MAKE_REPORT = Target(make_report, outcomes_module)
SEND_REPORT = Target(Settlement._send_report, Settlement)
APPEND_CAUSE = Target(append_cause, resident_set_module)
LOAD_CAUSES = Target(ResidentSet.load_causes, ResidentSet)
CAN_UNLOAD_CAUSES = Target(ResidentSet.can_unload_causes, ResidentSet)
DEAD_LETTER = Target(Settlement.dead_letter, Settlement)
GIVE_UP = Target(Settlement._give_up, Settlement)
POP_GIVEN_UP = Target(EntriesByLane.pop, EntriesByLane)
AWAITING_DEAD_LETTER = Target(ResidentSet.awaiting_dead_letter, ResidentSet)
ABORT_TRANSACTION = Target(Transactions.abort_open, Transactions)
ABORT_ALL = Target(Transactions.abort_all, Transactions)
ABORT_UNCOUNTED = Target(Transactions.abort_uncounted, Transactions)
DROP_QUEUE_OF_HOLDER = Target(EntryHolder.drop_queue, EntryHolder)
ACKNOWLEDGED = Target(Settlement.acknowledge, Settlement)
FORGET = Target(Settlement.complete, Settlement)
STORE_ENTRY = Target(EngineLifespan._put_final_state, EngineLifespan)
WRITE_MARK = Target(mark, outcomes_module, run_module)
WRITE_REMOVAL = Target(remove, outcomes_module)
IS_UNDELIVERABLE = Target(is_undeliverable, outcomes_module)

# Releasing and pulling ------------------------------------------------------------------------------------------------
RELEASE = Target(Releasing.release, Releasing)
KEEP_STARTED = Target(Releasing.release_all_but, Releasing)
RELEASE_HELD = Target(Releasing._release_held, Releasing)
WAKE_CONSUMER = Target(Releasing.wake_consumer, Releasing)
REPORTS_STARTED = Attribute("reports_started", BrokerConsumer)
PARK = Target(Connecting.park, Connecting)
MARK_STARTED = Target(Acknowledging.mark_started, Acknowledging)
PULL = Target(Pulling.pull, Pulling)
ADD_PULL_REQUEST = Target(PullRequests.add, PullRequests)
WITHDRAW_PULL_REQUEST = Target(PullRequests.withdraw, PullRequests)
FORGET_PULL_REQUEST = Target(PullRequests.end_without_notice, PullRequests)
END_OVERDUE_PULL_REQUESTS = Target(PullRequests.end_overdue, PullRequests)
TAKE_ENDED_PULL_REQUESTS = Target(PullRequests.take_ended, PullRequests)
IS_NOTHING_READY = Target(NoWaitPullEnder._has_nothing_ready_for, NoWaitPullEnder)
IS_NOTHING_READY_ANYWHERE = Target(WildcardDispatch.has_nothing_ready_for, WildcardDispatch)
RESTART_AUTO_WINDOW = Target(BrokerConsumer.restart_auto_window, BrokerConsumer)
CONSUMER_OF = Target(ConnectionState.consumer_of, ConnectionState)

# Queues and subscriptions ---------------------------------------------------------------------------------------------
GET_OR_CREATE_QUEUE = Target(Queues.get_or_create, Queues)
STORED_QUEUE = Target(parse_stored_queue_name, queues_module)
REMOVE_QUEUE = Target(Queues.remove, Queues)
NEW_NUMBER = Target(QueueNumberAllocator.allocate, QueueNumberAllocator)
UNPIN = Target(ResidentSet.unpin, ResidentSet)
LANE_OF = Target(Queues.lane_of, Queues)
DURABLE_SUBSCRIPTION = Target(Subscribing._get_or_create_durable, Subscribing)
ARE_SAME = Target(are_equivalent, subscribing_module)
END_SUBSCRIPTION = Target(Queues.end_durable_subscription, Queues)
ADD_ENDED_QUEUE = Target(SubscriptionCleanup.add_ended_queue, SubscriptionCleanup)
DEREFERENCE_CONTENT_OF_ENDED = Target(dereference_content, endings_module)
MUST_KEEP = Target(must_keep, queues_module)
IS_RESERVED = Target(Queues.has_open_sends, Queues)
FREE_RESERVATIONS = Target(Queues.free_reserved, Queues)
INTRODUCE = Target(introduce_queue, queues_module)
AWAIT_INTRODUCTION = Target(Queues.await_introduction, Queues)
ADD_TO_TOPICS = Target(TopicRouter.add, TopicRouter)
MATCHES_TOPIC = Target(matches, topics_module)
VIRTUAL_TOPIC = Target(virtual_topic, topics_module)

# Queues that go -------------------------------------------------------------------------------------------------------
IS_QUEUE_NEEDED = Attribute("is_needed", Queue)
IS_QUEUE_REMOVABLE = Target(Queues.is_removable, Queues)
DISPOSE_QUEUE = Target(Queue.dispose, Queue)
FREE_NUMBER = Target(QueueNumberAllocator.free, QueueNumberAllocator)

# Dispatch -------------------------------------------------------------------------------------------------------------
DISPATCH = Target(Dispatcher.dispatch, Dispatcher)
DISPATCH_ENTRY = Target(Dispatcher.dispatch_entry, Dispatcher)
DISPATCH_LANE = Target(Dispatcher._dispatch_lane, Dispatcher)
EXPRESS = Target(Dispatcher._dispatch_express, Dispatcher)
HAS_EXPRESS_CREDIT = Target(BrokerConsumer.has_express_credit, BrokerConsumer)
EXPRESS_MAX = Attribute("EXPRESS_MAX", consumer_module)
COVERED_BY = Target(BrokerConsumer.covered_sequences, BrokerConsumer)
CHOOSE_OWNER = Target(QueueReceivers.choose_exclusive, QueueReceivers)
COUNT_DISPATCHED = Target(ClientRegistry.count_dispatched, ClientRegistry)
COUNT_HELD = Target(ConnectionState.count_held, ConnectionState)
SETTLING_TRANSACTIONS = Attribute("settling_transactions", OpenTransactions)
TAKE_FREED_SESSIONS = Target(ClientRegistry.take_freed_sessions, ClientRegistry)

# Lanes ----------------------------------------------------------------------------------------------------------------
RETURN_TO_LANE = Target(Lane.requeue, Lane)
POP_DURABLE = Target(horizon_module.pop_durable, horizon_module)
LOWER_HORIZON = Target(horizon_module.lower_horizon, horizon_module)
FORGET_REMOVED = Target(Lane.forget_durable_removals, Lane)
IS_LANE_PINNED = Attribute("is_pinned", Lane)
IS_SELECTED_EMPTY = Attribute("is_empty", SelectedEntries)

# Paging ---------------------------------------------------------------------------------------------------------------
APPLY_PAGE = Target(PageReader.on_page_read, PageReader)
LOAD_RECENT = Target(ResidentSet.load_unread_in_memory, ResidentSet)
REQUEST_PAGE = Target(PageReader.request_page, PageReader)
LOAD_ENTRY = Target(PageReader.load_entry, PageReader)
NEW_ENTRY_OF_PAGE = Target(Entry, reading_module)
MOVE_HORIZON = Target(ResidentSet.move_horizon, ResidentSet)
LOWER_HORIZON_OF_ONE = Target(Eviction._lower_horizon, Eviction)
LOWER_HORIZONS = Target(Eviction._lower_horizons, Eviction)
ENFORCE_MEMORY_LIMITS = Target(Eviction.enforce_memory_limits, Eviction)
UNLOAD_BODIES = Target(Eviction._unload_bodies, Eviction)
RESTORE_BODY = Target(PageReader._restore_body, PageReader)
WRITE_EVICTED = Target(put_copies, eviction_module)
COUNT_LOADED = Target(ResidentSet.count_loaded, ResidentSet)
UNLOAD = Target(ResidentSet.unload, ResidentSet)
UNLOAD_TO_DISK = Target(ResidentSet.unload_to_disk, ResidentSet)
COUNT_LOADED_FROM_DISK = Target(ResidentSet.count_loaded_from_disk, ResidentSet)
AWAIT_DEAD_LETTER = Target(ResidentSet.await_dead_letter, ResidentSet)
REMOVE_FROM_LANE = Target(ResidentSet.remove_entries, ResidentSet)
FORGET_LANE = Target(ResidentSet.forget_lane, ResidentSet)
MEMORY_LIMIT_CHANGED = Target(ResidentSet.on_policy_changed, ResidentSet)
DELAY_SELECTED = Target(PageReader.delay_selected, PageReader)
FORGET_SELECTED = Target(ResidentSet.forget_selected, ResidentSet)

# Spilling and contents that are shared --------------------------------------------------------------------------------
END_SPILLING = Target(SpilledSubscriptions.remove, SpilledSubscriptions)
ENDED_PREFIX_OF_SPILLED = Attribute("ENDED_PREFIX", spilling_module)
SHARE_CONTENT = Target(put_content, entries_module)

# Delays ---------------------------------------------------------------------------------------------------------------
DELAY = Target(DelayedEntries.delay, DelayedEntries)
RESTORE_DELAY = Target(DelayedEntries.restore, DelayedEntries)
DUE_MS = Target(DelayedEntries.due_ms, DelayedEntries)
IS_RETRY_DUE = Target(RetryTask.can_step, RetryTask)
END_DELAYS = Target(RetryTask.step, RetryTask)

# Expiry and timers ----------------------------------------------------------------------------------------------------
EXPIRE_STEP = Target(ExpiryTask.step, ExpiryTask)
EXPIRE_IN_PAGE = Target(ExpiryTask.on_page_read, ExpiryTask)
UNLOADED_ENTRIES = Target(ExpiryTask._unloaded_entries, ExpiryTask)
EXPIRE_WHAT_IS_COMMITTED = Target(ExpiryTask.on_committed, ExpiryTask)
IS_HELD = Target(ExpiryTask._has_held, ExpiryTask)
SET_TIMER = Target(Timers.set, Timers)
REMOVE_TIMER = Target(Timers.remove, Timers)
TIMERS_PAGE_READ = Target(Timers.on_page_read, Timers)

# Scheduled sends ------------------------------------------------------------------------------------------------------
SCHEDULE = Target(Sending.schedule, Sending)
ACCEPT_SCHEDULED = Target(Scheduler.accept, Scheduler)
COUNT_SCHEDULED = Target(Queues.scheduled_count, Queues)
IS_SCHEDULED_DUE = Target(Scheduler.can_step, Scheduler)
SEND_WHAT_IS_DUE = Target(Scheduler.on_page_read, Scheduler)
DUE_MESSAGE = Target(Scheduler._due_message, Scheduler)
ACCEPT_DUE = Target(Arrivals.accept_with_batch, Arrivals)
KEYS_OF_DUE = Attribute("keys", DueSendsRead)
UNWRITTEN_SCHEDULED = Attribute("_uncommitted_batches", Scheduler)
LIST_OR_CANCEL_SCHEDULED = Target(Scheduler.list_or_cancel, Scheduler)
WRITE_SCHEDULED = Target(put, scheduled_module)
REMOVE_SCHEDULED = Target(remove, scheduled_module)
DUE_TIMER = Target(scheduled_timer_key, scheduled_module)
SPLIT_DUE_TIMER = Target(split_scheduled_timer, scheduled_module)

# Bulk work ------------------------------------------------------------------------------------------------------------
PLAN_BULK_PIECE = Target(plan_piece, bulk_module)
IN_MEMORY_OF_BULK = Target(bulk_module._entries_in_memory, bulk_module)
IS_UNDELIVERABLE_IN_BULK = Target(is_undeliverable, bulk_module)
NEW_ENTRY_OF_BULK = Target(Entry, bulk_module)
NEXT_OF_BULK = Target(BulkRead.next_position, BulkRead)

# Browsing -------------------------------------------------------------------------------------------------------------
SHOW_SLICE = Target(BrowseTask._show_slice, BrowseTask)
SHOW_PAGE = Target(BrowseTask._show_page, BrowseTask)
SHOW = Target(BrowseTask._show_entry, BrowseTask)
PAGE_READ_FOR_BROWSER = Target(BrowseTask.on_page_read, BrowseTask)
ENTRY_TO_SHOW = Target(BrowseTask._entry_to_show, BrowseTask)
READ_FOR_BROWSER = Target(BrowseRead.__init__, BrowseRead)
IN_MEMORY_OF_BROWSER = Target(browsing_module._entries_in_memory, browsing_module)
IS_BROWSER_OPEN = Target(Browser.has_credit, Browser)
MATCHES_SELECTOR = Target(Selector.matches, Selector)

# Producers ------------------------------------------------------------------------------------------------------------
RECORD_PRODUCER = Target(ProducerRegistry.record_use, ProducerRegistry)
FIND_REPEATED = Target(ProducerRegistry.find_repeat, ProducerRegistry)
DISPENSABLE_PRODUCER = Target(ProducerRegistry._oldest_dispensable, ProducerRegistry)
FORGET_PRODUCER = Target(ProducerRegistry._forget_producer, ProducerRegistry)
QUERY_PRODUCER = Target(ProducerRegistry.query, ProducerRegistry)
FORGET_PRODUCERS = Target(ProducerRegistry.forget, ProducerRegistry)
STATE_OF_PRODUCER = Target(ProducerRegistry._state, ProducerRegistry)
HAS_USED = Target(Producer.has_used, Producer)
USE_NUMBER = Target(Producer.record_use, Producer)
IS_USE_UNKNOWN = Target(Producer.is_use_unknown, Producer)
RESOLVE = Target(Producer.resolve, Producer)
CHECK_GAP = Target(check_gap, producer_module, producers_module)
PRODUCER_RETENTION_MS_MIN = Attribute("PRODUCER_RETENTION_MS_MIN", producers_module)

# Selectors of consumers -----------------------------------------------------------------------------------------------
CANDIDATE_SCANS = Target(KeyedScans.candidate_scans, KeyedScans)
TEST_PAGE = Target(QueueSelection.test_page, QueueSelection)
TEST_ABOVE = Target(QueueSelection._test_above_horizon, QueueSelection)
COMPARE_WHAT_ARRIVED = Target(QueueSelection.on_arrived, QueueSelection)
COMPARE_REQUEUED = Target(QueueSelection.on_requeued, QueueSelection)
LANE_CREATED = Target(QueueSelection.on_lane_created, QueueSelection)
HAS_FOUND = Target(QueueSelection.has_found, QueueSelection)
ACTIVATE_SELECTION = Target(Selections.activate_selection, Selections)
FIRST_OF_CURSOR = Target(ScanCursor.first, ScanCursor)
KNOWN_TO = Attribute("known_to", ScanCursor)
STOP_BEFORE = Target(ScanCursor.stop_before, ScanCursor)
TEST_DEFERRED = Target(QueueSelection.test_deferred, QueueSelection)
HAS_DEFERRED = Attribute("has_deferred", QueueSelection)
IS_MATCH = Target(ScanCursor._is_match, ScanCursor)
HEAD_OF_QUEUE = Target(QueueDispatch._head_of_queue, QueueDispatch)
LANE_HEAD_OF_SELECTIVE = Target(QueueDispatch._lane_head, QueueDispatch)
FIRST_HEAD = Target(first_head, selective_module)
LANE_HEAD_ASKED_FOR = Target(_QueueInspection._lane_head, _QueueInspection)
LANE_HEAD_FOR = Target(QueueDispatch.lane_head_for, QueueDispatch)

# Groups ---------------------------------------------------------------------------------------------------------------
HAS_EARLIER_DELAYED = Target(GroupOwnership.has_earlier_delayed, GroupOwnership)
GROUP_FREED = Target(GroupOwnership._on_freed, GroupOwnership)
ENDED_DELAY_IN_GROUP = Target(GroupOwnership.on_delay_ended, GroupOwnership)
FREE_GROUPS_OF_SUSPENDED = Target(GroupOwnership.free_groups_of_suspended, GroupOwnership)
DISPATCHED_OF_GROUP = Target(GroupOwnership.on_dispatched, GroupOwnership)
UNSUBSCRIBED_FROM_GROUPS = Target(GroupOwnership.on_unsubscribed, GroupOwnership)
CLOSES_GROUP = Target(closes_group, groups_module)
FIRST_OF_GROUPS = Target(GroupScanCursor.first_for, GroupScanCursor)
HEAD_OF_GROUP = Target(GroupScanCursor._head_and_is_known, GroupScanCursor)
SKIPS = Target(GroupScanCursor._skips_sequence, GroupScanCursor)
HAS_OWN_GROUPS = Target(GroupedQueueDispatch._owns_groups, GroupedQueueDispatch)
CLASSES_TO_QUERY = Target(GroupedQueueDispatch._classes_to_query, GroupedQueueDispatch)

# Wildcards ------------------------------------------------------------------------------------------------------------
TRUE_NEXT = Target(WildcardDispatch._true_next, WildcardDispatch)
SEARCH_SOME = Target(TurnDispatch._search_some, TurnDispatch)
WILDCARD_RUN = Target(WildcardDispatch.run, WildcardDispatch)
TOUCH_AGAIN = Target(WildcardDispatch._touch_again, WildcardDispatch)
DISPATCH_OF_QUEUE = Target(WildcardDispatch._queue_dispatch, WildcardDispatch)
LIMIT_OF_RANK = Target(WildcardDispatch._first_uncommitted, WildcardDispatch)
QUEUE_CREATED = Target(Wildcards.on_queue_created, Wildcards)
QUEUE_REMOVED = Target(Wildcards.on_queue_removed, Wildcards)
ADD_UNCOMMITTED = Target(Wildcards._add_uncommitted, Wildcards)
IS_WILDCARD_OPEN = Target(Wildcard.has_credit, Wildcard)
MATCHES_QUEUE = Target(Wildcard.matches_queue, Wildcard)

# Drains ---------------------------------------------------------------------------------------------------------------
COUNT_MOMENT = Target(RemainderCount._moment, RemainderCount)
COUNT_WAITING = Target(RemainderCount._add_waiting, RemainderCount)
COUNT_ALL_HELD = Target(RemainderCount._count_held, RemainderCount)
ADD_HELD = Target(RemainderCount._add_held, RemainderCount)
IS_BLOCKING = Target(RemainderCount._is_blocking, RemainderCount)

# The disk of these tests ----------------------------------------------------------------------------------------------
WRITE_TO_DISK = Target(Disk.write, Disk)
READ_FROM_DISK = Target(Disk.read, Disk)

# Sizes that are made small, so that few messages make what needs many ------------------------------------------------
BLOCK_BITS = Attribute("BLOCK_BITS", record_module)
BLOCK = Attribute("BLOCK_SIZE", expiry_module)
TIMERS_MAX = Attribute("TIMERS_MAX", timers_module)
TIMERS_PAGE_SIZE = Attribute("PAGE_SIZE", timers_module)
CONTENT_BYTES_MIN = Attribute("CONTENT_BYTES_MIN", entries_module)
STORE_TRANSACTION_BYTES_MAX = Attribute("STORE_TRANSACTION_BYTES_MAX", run_module)
DUE_PAGE_BYTES = Attribute("PAGE_BYTES", scheduled_module)
PRODUCERS_MAX = Attribute("PRODUCERS_MAX", producers_module)
RESOLVED_MAX = Attribute("RESOLVED_MAX", producer_module)
SCAN_MESSAGES_PER_TURN = Attribute("SCAN_MESSAGES_PER_TURN", selecting_module)
SCAN_PAGE_SIZE = Attribute("SCAN_PAGE_SIZE", selections_module)
SCAN_FOUND_MAX = Attribute("SCAN_FOUND_MAX", scan_module)
SCAN_CHUNK = Attribute("PENDING_ENTRIES_MAX", scan_module)
SCAN_FOUND_MAX_OF_GROUPS = Attribute("SCAN_FOUND_MAX", groups_module)
GROUP_FOUND_MIN = Attribute("GROUP_FOUND_MIN", groups_module)
JOIN_QUEUES_PER_TURN = Attribute("JOIN_QUEUES_PER_TURN", wildcards_module)
LEAVE_QUEUES_PER_TURN = Attribute("LEAVE_QUEUES_PER_TURN", wildcards_module)
DISPATCHES_PER_TURN = Attribute("DISPATCHES_PER_TURN", plain_module)
DISPATCHES_OF_WILDCARDS_PER_TURN = Attribute("DISPATCHES_PER_TURN", turn_module)
SEARCHES_MIN = Attribute("SEARCHES_MIN", turn_module)
EXPIRED_PER_TURN = Attribute("EXPIRED_PER_TURN", selective_module)
RETRIES_PER_TURN = Attribute("RETRIES_PER_TURN", delays_module)
DEAD_LETTERS_PER_TURN = Attribute("DEAD_LETTERS_PER_TURN", outcomes_module)
EVICTED_BYTES_PER_TURN = Attribute("EVICTED_BYTES_PER_TURN", eviction_module)
EVICTION_QUEUES_PER_TURN = Attribute("EVICTION_QUEUES_PER_TURN", eviction_module)
EVICTION_QUEUES_SORTED_PER_TURN = Attribute("EVICTION_QUEUES_SORTED_PER_TURN", eviction_module)
HELD_MAX = Attribute("HELD_MAX", consumer_module)
HELD_MAX_TO_COUNT = Attribute("HELD_MAX", clients_module)
QUEUES_COUNTED_PER_STEP = Attribute("QUEUES_PER_STEP", remainder_module)
ENTRIES_COUNTED_PER_STEP = Attribute("ENTRIES_PER_STEP", remainder_module)
HELD_WEIGHT_OF_WILDCARDS = Attribute("held_weight", Wildcard)


# What the engine has noted -------------------------------------------------------------------------------------------


def all_queues(part: object) -> Queues:
    """The room that all others of an engine know."""
    return _part(part, Queues)


def window_of(consumer: BrokerConsumer) -> int:
    """Return the consumer's window, also while it is suspended."""
    return consumer.window if consumer.awake_window is None else consumer.awake_window


def queue_dispatch_of(nothing_ready: NoWaitPullEnder, queue: Queue) -> QueueDispatch:
    """Return the dispatch of a queue, which finds the next message for each consumer."""
    return nothing_ready._dispatcher.new_queue_dispatch(queue)


def receivers_of(part: object, queue: Queue) -> QueueReceivers:
    """Return the receivers of a queue."""
    return clients_of(part).receivers_of(queue)


def clients_of(part: object) -> ClientRegistry:
    return _part(part, ClientRegistry)


def events_of(part: object) -> EventLog:
    return _part(part, EventLog)


def take_failed(part: object) -> list[Entry]:
    """Messages that pages have shown, and that failed too often."""
    return _part(part, PageReader).take_exhausted()


def commit_state_of(part: object) -> CommitState:
    """Return the commit state of any part of the engine that has it."""
    return _part(part, CommitState)


@contextmanager
def pretending(part: object, **moment: object) -> Iterator[None]:
    """Change attributes of the commit state for a block: the committed or gathering batch, or the time."""
    commit_state = commit_state_of(part)
    before = {name: getattr(commit_state, name) for name in moment}
    for name, value in moment.items():
        setattr(commit_state, name, value)
    yield
    for name, value in before.items():
        setattr(commit_state, name, value)


def touched(part: object) -> dict[Queue, bool | None]:
    """Return the queues in which the next turn dispatches."""
    return commit_state_of(part).touched_queues


def touched_wildcards(part: object) -> dict[Wildcard, None]:
    """Return the wildcard consumers for which the next turn dispatches."""
    return commit_state_of(part).touched_wildcards


def to_be_dispatched(engine: Engine) -> set[BrokerConsumer]:
    """Return the consumers that may get more in the next turn, because the last one has reached its limit."""
    state = commit_state_of(engine)
    consumers: set[BrokerConsumer] = set(state.touched_wildcards)
    retries = _part(engine, DelayedEntries)
    if retries.next_us is not None and retries.next_us <= state.now_us:
        return {consumer for session in clients_of(engine).sessions.values() for consumer in session.consumers.values()}
    for queue in state.touched_queues:
        consumers.update(receivers_of(engine, queue).all())
    if any(queue.has_wildcards for queue in state.touched_queues):
        # Express dispatch beside wildcard consumers follows the turn that leaves nothing else.
        for queue in _part(engine, Wildcards).express_queues:
            consumers.update(receivers_of(engine, queue).all())
    return consumers


def round_of_eviction(eviction: Eviction) -> object:
    """Return the eviction that goes on with the next call; None if there is none."""
    return eviction._round


def end_round_of_eviction(eviction: Eviction) -> None:
    """End an eviction, as if nothing else could leave memory now."""
    eviction._round = None
    eviction._resident.nothing_evictable_at = eviction._moment()


def gathering(part: object) -> Batch:
    return commit_state_of(part).batch


def committed(part: object) -> int:
    """The last batch that is known to be durable."""
    return commit_state_of(part).last_committed


def next_sequence(part: object) -> int:
    return commit_state_of(part).next_sequence


def skip_sequence(part: object) -> None:
    commit_state_of(part).next_sequence += 1


def use_up_sequences(engine: Engine, count: int) -> None:
    """Use up all reserved sequences except `count`."""
    engine.state.commit_state.next_sequence = engine.state.commit_state.sequence_limit - count


def sessions(engine: Engine) -> dict[str, ConnectionState]:
    return engine.state.clients.sessions


def waiting_queues(engine: Engine) -> dict[int, dict[Queue, None]]:
    """Return the queues with uncommitted messages, by the batch that makes those visible."""
    return engine.state.commit_state.waiting_queues


def numbered(engine: Engine) -> dict[int, Queue]:
    """Return the queues that the store may know, by number."""
    return engine.queues._by_number


def last_number(engine: Engine) -> int:
    """The largest that a queue was ever given."""
    return engine.queues._numbers._last


def topics(engine: Engine) -> TopicRouter:
    return engine.queues.topics


def topic_patterns(engine: Engine) -> Collection[str]:
    """Return the patterns by which consumers subscribe to topics."""
    return engine.queues.topics._by_pattern


def size_of_known_topics(engine: Engine) -> int:
    return engine.queues.topics._routes_size


def ready_answers(part: object) -> list[tuple[ConnectionState, Answer]]:
    """Return the answers that leave with the next turn."""
    return commit_state_of(part)._answers


def queues(part: object) -> dict[str, Queue]:
    return all_queues(part).by_name


def introduced(part: object) -> dict[Queue, int]:
    """Queues that remember of which the store does not know durably yet, and the batch that tells it."""
    return all_queues(part)._introduction_batches


def durable_subscriptions(part: object) -> dict[str, Queue]:
    return all_queues(part).durable_by_key


def queues_that_ended(part: object) -> list[Queue]:
    return _part(part, SubscriptionCleanup).queues()


def queues_of_scheduled(engine: Engine) -> list[Queue]:
    """The hidden ones in which scheduled sends wait."""
    return list(engine.queues.hidden_by_name.values())


def names_of_scheduled(engine: Engine) -> list[str]:
    """Return the names of the queues with scheduled sends."""
    return list(engine.queues.hidden_by_name)


def selectors_of_topics(engine: Engine) -> list[Selector]:
    """Return the selectors of subscriptions to topics."""
    subscriptions = engine.queues.topics._subscriptions.values()
    return [each.selector for each in subscriptions if each.selector is not None]


def joining(engine: Engine) -> dict[Wildcard, int]:
    """Wildcards that have not joined all of their queues, and the bytes that each of them has for that."""
    return engine.queues.wildcards.joining


def hear_of_due(
    engine: Engine, hear: Callable[[Callable[..., int], str, str, SentMessage, RouteAhead | None], int]
) -> None:
    """Call `hear` instead of the method that makes a message of a scheduled send; it gets that method first."""
    arrivals: Any = _part(engine, Arrivals)
    arrivals.accept_with_batch = partial(hear, arrivals.accept_with_batch)


def find_all_queues_ahead(engine: Engine) -> None:
    """Find the queues of each message to a topic before it is accepted, however quick that is."""
    sending: Any = _part(engine, Sending)
    send, commit = engine.commands.send, engine.commands.commit

    def find(sends: Iterable[Send]) -> None:
        for _ in sending._find_queues_ahead(list(sends)):
            pass

    def send_found(session: ConnectionState, command: Send) -> None:
        if command.destination.is_multi_queue and command.transaction is None and command.schedule is None:
            find([command])
        send(session, command)

    def commit_found(session: ConnectionState, command: Commit) -> None:
        transaction = session.transactions.get(command.transaction)
        if transaction is not None:
            find(transaction.sends_of_copies)
        commit(session, command)

    engine.commands.send = send_found  # type: ignore[assignment]
    engine.commands.commit = commit_found  # type: ignore[assignment]


def compare_one_message_a_turn(engine: Engine) -> None:
    """Leave no time for comparisons of messages that arrive or are requeued, and little for those in the background."""
    engine.queues.selections._arrival_budget = ComparisonBudget(0)
    engine.queues.selections._scan_ns = 2


def set_policies(part: object, policies: Policies) -> None:
    """Set the policies of queues created later."""
    all_queues(part).policies = policies


def memory(of: object) -> MemoryBudget:
    return _part(of, MemoryBudget)


def expire(dispatcher: Dispatcher, entry: Entry) -> None:
    dispatcher._settlement.expire(entry)


def forget_what_may_be_redelivered(reading: PageReader) -> None:
    reading._redelivered_below = 0


def waiting_for_commit(expiry: ExpiryTask) -> list[bytes]:
    """Return the expiry timers of messages that were not visible when they were due."""
    return expiry._waiting_timers


def next_retry_us(engine: Engine) -> int | None:
    """Return the time of the next retry."""
    return _part(engine, DelayedEntries).next_us


def forget_ends_of_pull_requests(pull_requests: PullRequests) -> None:
    pull_requests._end_heap.clear()


def timers_being_written(timers: Timers) -> dict[bytes, int]:
    return timers._unstored_batches


def producers(of: ProducerRegistry) -> Mapping[str, Producer]:
    return of._producers


def sent_once(of: ProducerRegistry) -> dict[str, None]:
    """Producers that may be forgotten early, the one used first first."""
    return of._used_once


def known_routes(topics: TopicRouter) -> dict[str, Route]:
    """Routes of the topics that were sent to."""
    return topics._routes


def spilling_queues(spilling: SpilledSubscriptions) -> dict[Queue, None]:
    return spilling._queues


def numbers_of(spilling: SpilledSubscriptions) -> QueueNumberAllocator:
    return spilling._numbers


def free_numbers(numbers: QueueNumberAllocator) -> list[int]:
    return numbers._free


def pending_free_numbers(numbers: QueueNumberAllocator) -> list[tuple[int, int]]:
    """Batches, and the number that is free once each is durable."""
    return numbers._pending_free


def groups_of_queue_dispatch(queue_dispatch: GroupedQueueDispatch) -> GroupOwnership:
    return queue_dispatch._groups


def queue_of(queue_dispatch: QueueDispatch) -> Queue:
    return queue_dispatch._queue


def owned_and_freed(queue_dispatch: GroupedQueueDispatch) -> tuple[int, int]:
    """Return the numbers of owned and freed groups at the last query of consumers."""
    return queue_dispatch._counts


def set_owned_and_freed(queue_dispatch: GroupedQueueDispatch, times: tuple[int, int]) -> None:
    queue_dispatch._counts = times


def groups_of(cursor: GroupScanCursor) -> GroupOwnership:
    return cursor._groups


def skipped(cursor: GroupScanCursor) -> dict[str, int]:
    """Groups of which something was left where it is, and the first sequence of that."""
    return cursor._skipped


def awaiting_page(dispatch: WildcardDispatch) -> set[BrokerConsumer]:
    """Wildcards of which what is next has to be read first."""
    return dispatch._awaiting_page


def head_sequences(wildcard: Wildcard) -> list[dict[Queue, int]]:
    """Per rank, where the earliest message stands that it may take of each queue."""
    return wildcard._head_sequences


def awaiting_dead_letter(engine: Engine) -> list[Entry]:
    """Return the entries that were given up and are not dead-lettered yet."""
    return engine._memory.resident.awaiting_dead_letter()


def reserved(engine: Engine) -> dict[str, Destination]:
    """Queues that are not there, and for which room is kept because an open transaction sends to them."""
    return engine.queues._reservations._missing_queues
