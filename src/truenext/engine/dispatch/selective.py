"""Dispatch from queues with selectors or groups.

All consumers with the same selector form a class, and so do all without a selector. A consumer that owns a group with
waiting messages is a class by itself. One search for each class finds the first message that is ready for its
consumers, and offers it to the class. The first of all offered messages is dispatched, to the preferred consumer of the
classes that were offered this message. So there are as many searches as classes, however many consumers there are; and
no search goes through a lane, because the scans (selecting/) have found the matches before. Source: docs/contract.md,
"True next"
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from heapq import heappop, heappush
from operator import attrgetter

from truenext.engine.dispatch.heads import (
    COMMITTING,
    DELAYED,
    READING,
    Head,
    Wait,
    cursor_head,
    first_head,
    group_cursor_head,
)
from truenext.engine.lifecycle.settlement import Settlement
from truenext.engine.memory import horizon
from truenext.engine.memory.reading import PageReader
from truenext.engine.memory.resident_set import ResidentSet
from truenext.engine.selecting.groups import GroupOwnership, GroupScanCursor
from truenext.engine.selecting.scan import ConsumerScans, QueueScan, ScanCursor
from truenext.engine.selecting.selecting import QueueSelection
from truenext.engine.state.clients import QueueReceivers
from truenext.engine.state.consumer import BrokerConsumer
from truenext.engine.state.queue import NO_ENTRIES, Entry, Lane, Queue, is_expired
from truenext.engine.writing.commit_state import CommitState
from truenext.model.limits import EXPIRED_PER_TURN
from truenext.model.order import RANKS

RankedConsumer = tuple[int, int, int, int, BrokerConsumer]
"""Item of a heap of consumers, of which the first is served first: service rank, messages held, last dispatch number,
index among the consumers, and the consumer."""

_BEST_RANK = RANKS[0]
_last_ack_number = attrgetter("last_ack_number")

Offer = tuple[int, int, int, Entry, "ConsumerClass"]
"""Rank and sequence of a message, number of the class to which it is offered, the message, and the class."""


class ConsumerClass:
    """Consumers for which one search finds the next message: all with the same selector, or one owner of groups."""

    __slots__ = ("group_owner", "may_get_better_offer", "number", "offered_entry", "receivers", "scan")

    def __init__(self, number: int, scan: QueueScan | None, group_owner: BrokerConsumer | None) -> None:
        self.number = number
        self.scan = scan
        self.group_owner = group_owner
        """Only consumer of the class, if this consumer owns groups; else None."""
        self.receivers: list[RankedConsumer] = []
        """Heap of the consumers, the preferred one first. Consumers may have lost their credit meanwhile."""
        self.offered_entry: Entry | None = None
        """Message that the last search found for the class; None if none was found, or it was dispatched."""
        self.may_get_better_offer = False
        """True if a dispatch to another class may make an earlier message ready for this class."""

    def has_receiver(self, rank: int) -> bool:
        """Return whether a consumer of the class may get a message of this rank. Removes consumers without credit."""
        # Subscriptions of one connection share its unsent bytes.
        while self.receivers and not self.receivers[0][4].has_credit():
            heappop(self.receivers)
        return bool(self.receivers)

    def best_preference(self) -> tuple[int, int, int, int]:
        """Return the preference of the first consumer: the class with the smallest preference is served. Call this
        method only if the class has a consumer."""
        return self.receivers[0][:4]


class ExpressClass(ConsumerClass):
    """Class of consumers that get messages only by express dispatch. During a turn, each message offered is no more
    urgent than the one before. A consumer that has no express credit for one of them has none for later ones, so it is
    removed for the rest of the turn."""

    __slots__ = ()

    def has_receiver(self, rank: int) -> bool:
        while self.receivers and not self.receivers[0][4].has_express_credit(rank):
            heappop(self.receivers)
        return bool(self.receivers)


class QueueDispatch:
    """Dispatch from one queue in one turn, to consumers that may match different messages."""

    __slots__ = (
        "_commit_state",
        "_has_skipped_uncommitted",
        "_is_express",
        "_page_reader",
        "_queue",
        "_resident",
        "_scans",
        "_selection",
        "_settlement",
        "awaited_lane",
        "expired_count",
        "is_cut",
    )

    def __init__(
        self,
        queue: Queue,
        scans: ConsumerScans,
        selection: QueueSelection | None,
        commit_state: CommitState,
        resident: ResidentSet,
        page_reader: PageReader,
        settlement: Settlement,
    ) -> None:
        self._queue = queue
        self._scans = scans
        self._selection = selection
        self._commit_state = commit_state
        self._resident = resident
        self._page_reader = page_reader
        self._settlement = settlement
        self._has_skipped_uncommitted = False
        """True if the last search skipped an earlier message because that message is being committed."""
        self._is_express = False
        """True while messages are dispatched beyond the windows, because no consumer has credit."""
        self.awaited_lane: Lane | None = None
        """Last lane that a search without a selector reached; its next page may have to be read."""
        self.expired_count = 0
        """Number of messages that this search has expired."""
        self.is_cut = False
        """True if the limit of this turn was reached before all ready messages were dispatched and all expired ones
        removed."""

    def dispatch(
        self, consumers: Sequence[BrokerConsumer], dispatch_entry: Callable[[Entry, BrokerConsumer], object], limit: int
    ) -> None:
        """Dispatch messages, always the true next one first, until no consumer has credit, no message is ready, or
        `limit` searches were made."""
        classes: dict[Hashable, ConsumerClass] = {}
        for index, consumer in enumerate(consumers):
            if consumer.has_credit():
                self._add_consumer(classes, consumer, index)
        self._dispatch_to(classes, dispatch_entry, limit)

    def dispatch_express(
        self, receivers: QueueReceivers, dispatch_entry: Callable[[Entry, BrokerConsumer], object], limit: int
    ) -> None:
        """Dispatch messages beyond the windows of express consumers, if no consumer has credit. Such a message is more
        urgent than a whole window of messages that its consumer holds. Stops after `limit` searches."""
        owner = receivers.exclusive
        preferred = express_receivers(self._queue, receivers.express if owner is None else [owner])
        if not preferred or any(one.has_credit() for one in (receivers.all() if owner is None else [owner])):
            return
        self._is_express = True
        classes: dict[Hashable, ConsumerClass] = {}
        for index, consumer in enumerate(reversed(preferred)):
            self._add_consumer(classes, consumer, index)
        self._dispatch_to(classes, dispatch_entry, limit)
        self._is_express = False

    def _dispatch_to(
        self,
        classes: dict[Hashable, ConsumerClass],
        dispatch_entry: Callable[[Entry, BrokerConsumer], object],
        limit: int,
    ) -> None:
        offers: list[Offer] = []
        to_query = list(classes.values())
        while limit > 0:
            # One message may be the next one of very many classes.
            limit -= len(to_query) or 1
            for consumer_class in to_query:
                self._has_skipped_uncommitted = False
                head = self._head_of_class(consumer_class) if consumer_class.has_receiver(_BEST_RANK) else None
                entry = head if isinstance(head, Entry) else None
                if self._is_express and entry is not None and not consumer_class.has_receiver(entry.lane.rank):
                    entry = None
                consumer_class.offered_entry = entry
                consumer_class.may_get_better_offer = isinstance(head, Wait) or self._has_skipped_uncommitted
                if entry is not None:
                    heappush(offers, (entry.lane.rank, entry.sequence, consumer_class.number, entry, consumer_class))
            if not offers or self.is_cut:
                return
            entry = offers[0][3]
            to_query = []
            while offers and offers[0][3] is entry:
                consumer_class = heappop(offers)[4]
                # Otherwise a later search has replaced this offer.
                if consumer_class.offered_entry is entry:
                    consumer_class.offered_entry = None
                    to_query.append(consumer_class)
            rank = entry.lane.rank
            candidates = [
                consumer_class
                for consumer_class in to_query
                if consumer_class.has_receiver(rank) and self._is_available_to(consumer_class, entry)
            ]
            if candidates:
                consumer_class = min(candidates, key=ConsumerClass.best_preference)
                *_, index, consumer = heappop(consumer_class.receivers)
                remove_from_lane(entry)
                dispatch_entry(entry, consumer)
                to_query = self._classes_to_query(classes, to_query, offers)
                if self._is_express:
                    consumer.on_express_dispatch()
                if consumer.has_express_credit(rank) if self._is_express else consumer.has_credit():
                    consumer_class = self._add_consumer(classes, consumer, index)
                    if consumer_class.offered_entry is None and consumer_class not in to_query:
                        to_query.append(consumer_class)
        self.is_cut = True

    def _add_consumer(
        self, classes: dict[Hashable, ConsumerClass], consumer: BrokerConsumer, index: int
    ) -> ConsumerClass:
        """Add a consumer to its class, and return the class. `index` is the consumer's index among all."""
        scan = None if self._selection is None else self._scans.find_scan(consumer, self._queue)
        has_own_groups = self._owns_groups(consumer, scan)
        key = consumer if has_own_groups else scan
        consumer_class = classes.get(key)
        if consumer_class is None:
            kind = ExpressClass if self._is_express else ConsumerClass
            consumer_class = classes[key] = kind(len(classes), scan, consumer if has_own_groups else None)
        preference = (0, 0, 0, index) if self._is_express else service_preference(consumer, index)
        heappush(consumer_class.receivers, (*preference, consumer))
        return consumer_class

    def _owns_groups(self, consumer: BrokerConsumer, scan: QueueScan | None) -> bool:
        return False

    def _is_available_to(self, consumer_class: ConsumerClass, entry: Entry) -> bool:
        return True

    def _classes_to_query(
        self, classes: dict[Hashable, ConsumerClass], queried: list[ConsumerClass], offers: list[Offer]
    ) -> list[ConsumerClass]:
        """Return the classes that need a new search after a dispatch. `queried` are the classes that were offered the
        dispatched message. All other classes keep their offers."""
        return queried

    def head_for(self, consumer: BrokerConsumer) -> Head:
        return self._head_of_queue(None if self._selection is None else self._scans.find_scan(consumer, self._queue))

    def _head_of_class(self, consumer_class: ConsumerClass) -> Head:
        return self._head_of_queue(consumer_class.scan)

    def _head_of_queue(self, scan: QueueScan | None) -> Head:
        if scan is None:
            return first_head(map(self._lane_head, self._queue.lanes))
        return first_head(map(self._cursor_head, scan.cursors.values()))

    def _lane_head(self, lane: Lane) -> Head:
        if not (lane.arrived or lane.requeued or lane.unread):
            if lane.arrived is not NO_ENTRIES:
                lane.free_arrived()
            return None
        self.awaited_lane = lane
        while True:
            entry = lane.head()
            if entry is None:
                if lane.needs_page:
                    return Wait(READING, lane.horizon + 1)
                if not lane.unread:
                    return None
                if horizon.is_first_uncommitted(lane, self._commit_state.last_committed):
                    return Wait(COMMITTING, lane.horizon + 1)
                self._resident.load_unread_in_memory(lane)
                continue
            if entry.batch > self._commit_state.last_committed:
                return Wait(COMMITTING, entry.sequence)
            if entry.due_us:
                return Wait(DELAYED, entry.sequence)
            if entry.message is None:
                return Wait(READING, entry.sequence)
            if not self._is_expired(entry):
                return entry
            if not self._expire(entry):
                return Wait(READING, entry.sequence)

    def _cursor_head(self, cursor: ScanCursor, *, may_read: bool = True) -> Head:
        head = cursor_head(cursor, self._commit_state.last_committed)
        while isinstance(head, Entry) and self._is_expired(head):
            if not self._expire(head):
                return Wait(READING, head.sequence)
            head = cursor_head(cursor, self._commit_state.last_committed)
        if isinstance(head, Wait):
            self._prepare(head, cursor, may_read=may_read)
        return head

    def _prepare(self, wait: Wait, cursor: ScanCursor, *, may_read: bool) -> None:
        if wait.reason is COMMITTING:
            self._has_skipped_uncommitted = True
        elif wait.reason is READING and may_read:
            # The message must be read to know whether it matches, and so blocks later messages.
            self._page_reader.request_body(cursor.found[wait.sequence])

    def lane_head_for(self, consumer: BrokerConsumer, rank: int, *, may_read: bool = True) -> Head:
        """Return the head of one lane for a consumer. If `may_read` and the head is evicted, its body is requested from
        the store."""
        scan = None if self._selection is None else self._scans.find_scan(consumer, self._queue)
        if scan is None:
            lane = self._queue.find_lane(rank)
            return None if lane is None else self._lane_head(lane)
        cursor = scan.cursors.get(rank)
        return None if cursor is None else self._cursor_head(cursor, may_read=may_read)

    def _is_expired(self, entry: Entry) -> bool:
        return is_expired(entry.message, self._commit_state.now_ms)

    def _expire(self, entry: Entry) -> bool:
        """Expire a message whose time has come, and return True. Return False if this turn has already expired the
        permitted number of messages; the search must then wait for the next turn."""
        if self.expired_count == EXPIRED_PER_TURN:
            self.is_cut = True
            return False
        self.expired_count += 1
        remove_from_lane(entry)
        self._settlement.expire(entry)
        return True


def remove_from_lane(entry: Entry) -> None:
    """Remove an entry from its lane. In a queue without selectors and groups, the entry must be the lane's head."""
    lane = entry.lane
    if lane.selected is None:
        lane.pop()
    else:
        horizon.remove_entry(lane, entry)


class GroupedQueueDispatch(QueueDispatch):
    """Dispatch from a queue with groups, where the first ready message may differ from consumer to consumer."""

    __slots__ = ("_counts",)

    @property
    def _groups(self) -> GroupOwnership:
        assert self._selection is not None, "there are groups"
        return self._selection.existing_groups

    def _dispatch_to(
        self,
        classes: dict[Hashable, ConsumerClass],
        dispatch_entry: Callable[[Entry, BrokerConsumer], object],
        limit: int,
    ) -> None:
        groups = self._groups
        # Counts as of the last search.
        self._counts = groups.assigned_count, groups.freed_count
        super()._dispatch_to(classes, dispatch_entry, limit)

    def _owns_groups(self, consumer: BrokerConsumer, scan: QueueScan | None) -> bool:
        assert scan is not None, "with groups each consumer has a scan"
        return self._groups.owns_any(consumer) and any(
            isinstance(cursor, GroupScanCursor) and cursor.heads_by_owner.get(consumer)
            for cursor in scan.cursors.values()
        )

    def _is_available_to(self, consumer_class: ConsumerClass, entry: Entry) -> bool:
        # Another consumer may have become the owner of its group meanwhile.
        owner = self._groups.owners.get(entry.group)
        return owner is None or owner is consumer_class.group_owner

    def _classes_to_query(
        self, classes: dict[Hashable, ConsumerClass], queried: list[ConsumerClass], offers: list[Offer]
    ) -> list[ConsumerClass]:
        groups = self._groups
        owned, freed = self._counts
        self._counts = groups.assigned_count, groups.freed_count
        if self._is_express and (groups.freed_count, groups.assigned_count) != (freed, owned):
            # A more urgent message may be ready now, also for consumers that were left out: the next turn begins anew.
            self.is_cut = groups.freed_count != freed or any(each.may_get_better_offer for each in classes.values())
            return [] if self.is_cut else queried
        if groups.freed_count != freed:
            # An earlier message may be ready for any class.
            offers.clear()
            return list(classes.values())
        if groups.assigned_count != owned:
            # Uncommitted and unread messages of this group do not block other consumers any more.
            known = set(queried)
            queried += [each for each in classes.values() if each.may_get_better_offer and each not in known]
        return queried

    def _head_of_class(self, consumer_class: ConsumerClass) -> Head:
        return self._head_in_groups(consumer_class.scan, consumer_class.group_owner)

    def head_for(self, consumer: BrokerConsumer) -> Head:
        return self._head_in_groups(self._scans.find_scan(consumer, self._queue), consumer)

    def _head_in_groups(self, scan: QueueScan | None, consumer: BrokerConsumer | None) -> Head:
        """Return the head of the queue for a consumer; `consumer` is None for all consumers that own no group."""
        assert scan is not None, "with groups each consumer has a scan"
        return first_head(self._group_head(cursor, consumer) for cursor in scan.cursors.values())

    def lane_head_for(self, consumer: BrokerConsumer, rank: int, *, may_read: bool = True) -> Head:
        scan = self._scans.find_scan(consumer, self._queue)
        assert scan is not None, "with groups each consumer has a scan"
        cursor = scan.cursors.get(rank)
        return None if cursor is None else self._group_head(cursor, consumer, may_read=may_read)

    def _group_head(self, cursor: ScanCursor, consumer: BrokerConsumer | None, *, may_read: bool = True) -> Head:
        assert isinstance(cursor, GroupScanCursor), "there are groups"
        head = group_cursor_head(cursor, consumer, self._commit_state.last_committed)
        while isinstance(head, Entry) and self._is_expired(head):
            if not self._expire(head):
                return Wait(READING, head.sequence)
            head = group_cursor_head(cursor, consumer, self._commit_state.last_committed)
        if isinstance(head, Wait):
            self._prepare(head, cursor, may_read=may_read)
            if cursor.needs_refill:
                cursor.refill()
                assert self._selection is not None, "there are groups"
                self._selection.unfinished_cursors[cursor] = None
        return head


def service_preference(consumer: BrokerConsumer, index: int) -> tuple[int, int, int, int]:
    return consumer.service_rank, len(consumer.held), consumer.last_dispatch_number, index


def express_receivers(queue: Queue, consumers: Sequence[BrokerConsumer]) -> list[BrokerConsumer]:
    """Return the consumers that have express credit for the most urgent waiting message, the preferred one last. The
    consumer that acknowledged last is preferred; among equals, the one that subscribed first."""
    rank = next((lane.rank for lane in queue.lanes if len(lane)), None)
    if rank is None:
        return []
    receivers = [consumer for consumer in reversed(consumers) if consumer.has_express_credit(rank)]
    receivers.sort(key=_last_ack_number)
    return receivers
