"""Dispatch from queues with selectors or groups.

Consumers with the same selector, or without one, form a class; the owner of a group with waiting messages is a class
by itself. One search per class finds the first message that is ready for its consumers. The first of all these
messages is dispatched, to the preferred consumer among those to which it was offered. So no lane is scanned, however
many messages wait in it, and the searches are as many as the selectors, not the consumers. Source: docs/contract.md,
"True next"
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from heapq import heappop, heappush

from truenext.engine.lifecycle.settlement import Settlement
from truenext.engine.memory import horizon
from truenext.engine.memory.reading import PageReader
from truenext.engine.memory.resident_set import ResidentSet
from truenext.engine.selecting.groups import GroupOwnership, GroupScanCursor
from truenext.engine.selecting.scan import ConsumerScans, QueueScan, ScanCursor
from truenext.engine.selecting.selecting import QueueSelection
from truenext.engine.state.consumer import BrokerConsumer
from truenext.engine.state.queue import NO_ENTRIES, Entry, Lane, Queue
from truenext.engine.writing.commit_state import CommitState

RankedConsumer = tuple[int, int, int, int, BrokerConsumer]
"""Service rank, messages held, last dispatch number, index among the consumers, and the consumer."""

Offer = tuple[int, int, int, Entry, "ConsumerClass"]
"""Rank and sequence of a message, number of the class that it is offered to, the message, and that class."""

Head = Entry | int | None
"""First ready message of a lane for a consumer; None if none is ready, or it is being committed. A number if
something must be read or compared first: from this sequence on, from POSITION_UNKNOWN on, or, with BLOCKED_BY_RETRY,
nowhere in the queue."""

BLOCKED_BY_RETRY = -1
"""A message blocks all after it until it is due."""

POSITION_UNKNOWN = 0
"""Stands for a position that is not known; less than every sequence."""


class ConsumerClass:
    """Consumers with the same selector, or one owner of groups: one search finds the next message for all."""

    __slots__ = ("group_owner", "may_get_better_offer", "number", "offered_entry", "receivers", "scan")

    def __init__(self, number: int, scan: QueueScan | None, group_owner: BrokerConsumer | None) -> None:
        self.number = number
        self.scan = scan
        self.group_owner = group_owner
        """The only consumer, if the class is the owner of groups."""
        self.receivers: list[RankedConsumer] = []
        """Heap, the preferred consumer first; others may have no credit any more."""
        self.offered_entry: Entry | None = None
        """Message that was found for the class and is not dispatched yet."""
        self.may_get_better_offer = False
        """After a dispatch to another class, an earlier message may be ready for this one."""

    def has_receiver_with_credit(self) -> bool:
        # Subscriptions of one connection share its unsent bytes.
        while self.receivers and not self.receivers[0][4].has_credit():
            heappop(self.receivers)
        return bool(self.receivers)

    def best_preference(self) -> tuple[int, int, int, int]:
        """Preference of the first consumer; the smallest is served. There must be a consumer."""
        return self.receivers[0][:4]


class QueueDispatch:
    """Dispatch of the true nexts of one queue in one turn, to consumers that may match different messages."""

    __slots__ = (
        "_commit_state",
        "_has_skipped_uncommitted",
        "_page_reader",
        "_queue",
        "_resident",
        "_scans",
        "_selection",
        "_settlement",
        "awaited_lane",
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
        """The last search would have found an earlier message, were that not being committed."""
        self.awaited_lane: Lane | None = None
        """Lane that consumers without a selector wait for until it is read, or the last one that was reached."""

    def dispatch(
        self, consumers: Sequence[BrokerConsumer], dispatch_entry: Callable[[Entry, BrokerConsumer], object]
    ) -> None:
        """Dispatch true nexts until no consumer has credit or no message is ready."""
        classes: dict[Hashable, ConsumerClass] = {}
        for index, consumer in enumerate(consumers):
            if consumer.has_credit():
                self._add_consumer(classes, consumer, index)
        offers: list[Offer] = []
        to_query = list(classes.values())
        while True:
            for consumer_class in to_query:
                self._has_skipped_uncommitted = False
                consumer_class.offered_entry = entry = (
                    self._first_of_class(consumer_class) if consumer_class.has_receiver_with_credit() else None
                )
                consumer_class.may_get_better_offer = entry is None or self._has_skipped_uncommitted
                if entry is not None:
                    heappush(offers, (entry.lane.rank, entry.sequence, consumer_class.number, entry, consumer_class))
            if not offers:
                return
            entry = offers[0][3]
            to_query = []
            while offers and offers[0][3] is entry:
                consumer_class = heappop(offers)[4]
                # Else the class was searched for once more since.
                if consumer_class.offered_entry is entry:
                    consumer_class.offered_entry = None
                    to_query.append(consumer_class)
            candidates = [
                consumer_class
                for consumer_class in to_query
                if consumer_class.has_receiver_with_credit() and self._is_available_to(consumer_class, entry)
            ]
            if candidates:
                consumer_class = min(candidates, key=ConsumerClass.best_preference)
                *_, index, consumer = heappop(consumer_class.receivers)
                horizon.remove_entry(entry.lane, entry)
                dispatch_entry(entry, consumer)
                to_query = self._classes_to_query(classes, to_query, offers)
                if consumer.has_credit():
                    consumer_class = self._add_consumer(classes, consumer, index)
                    if consumer_class.offered_entry is None and consumer_class not in to_query:
                        to_query.append(consumer_class)

    def _add_consumer(
        self, classes: dict[Hashable, ConsumerClass], consumer: BrokerConsumer, index: int
    ) -> ConsumerClass:
        """Add a consumer, with its index among all, to its class."""
        scan = None if self._selection is None else self._scans.find_scan(consumer, self._queue)
        has_own_groups = self._owns_groups(consumer, scan)
        key = consumer if has_own_groups else scan
        consumer_class = classes.get(key)
        if consumer_class is None:
            consumer_class = classes[key] = ConsumerClass(len(classes), scan, consumer if has_own_groups else None)
        heappush(consumer_class.receivers, (*service_preference(consumer, index), consumer))
        return consumer_class

    def _owns_groups(self, consumer: BrokerConsumer, scan: QueueScan | None) -> bool:
        """Return whether the consumer owns groups with waiting messages."""
        return False

    def _is_available_to(self, consumer_class: ConsumerClass, entry: Entry) -> bool:
        """Return whether an offered message is still available to the class."""
        return True

    def _classes_to_query(
        self, classes: dict[Hashable, ConsumerClass], queried: list[ConsumerClass], offers: list[Offer]
    ) -> list[ConsumerClass]:
        """Return the classes to search for again, after a message was dispatched that was offered to `queried`; all
        others keep their offers."""
        return queried

    def dispatch_express(
        self, consumers: Sequence[BrokerConsumer], dispatch_entry: Callable[[Entry, BrokerConsumer], object]
    ) -> None:
        """Without credit, dispatch messages more urgent than all that an express consumer holds to that consumer."""
        while not any(consumer.has_credit() for consumer in consumers):
            offers = []
            for consumer in consumers:
                entry = self.first_for(consumer) if consumer.has_express else None
                if entry is not None and consumer.has_express_credit(entry.lane.rank):
                    offers.append(
                        (entry.lane.rank, entry.sequence, -consumer.last_ack_number, consumer.number, consumer)
                    )
            if not offers:
                return
            receiver = min(offers)[4]
            entry = self.first_for(receiver)
            assert entry is not None, "it was there"
            remove_from_lane(entry)
            dispatch_entry(entry, receiver)

    def first_for(self, consumer: BrokerConsumer) -> Entry | None:
        """Return the first ready message for a consumer; None also if something must be read or compared first."""
        return self._first_of_scan(None if self._selection is None else self._scans.find_scan(consumer, self._queue))

    def _first_of_class(self, consumer_class: ConsumerClass) -> Entry | None:
        return self._first_of_scan(consumer_class.scan)

    def _first_of_scan(self, scan: QueueScan | None) -> Entry | None:
        return self._first_of_queue() if scan is None else self._first_in_scan(scan)

    def _first_of_queue(self) -> Entry | None:
        for lane in self._queue.lanes:
            head = self._lane_head(lane)
            if head is not None:
                return None if isinstance(head, int) else head
        return None

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
                    return lane.horizon + 1
                if not lane.unread or horizon.is_first_uncommitted(lane, self._commit_state.last_committed):
                    return None
                self._resident.load_unread_in_memory(lane)
                continue
            if entry.batch > self._commit_state.last_committed:
                return None
            if entry.due_us:
                return BLOCKED_BY_RETRY
            if entry.message is None:
                return entry.sequence
            if not self._expire_if_expired(entry):
                return entry

    def _first_in_scan(self, scan: QueueScan) -> Entry | None:
        for cursor in scan.cursors.values():
            head = self._scan_head(cursor)
            if head is not None:
                return None if isinstance(head, int) else head
        return None

    def _scan_head(self, cursor: ScanCursor) -> Head:
        while True:
            entry = cursor.first()
            if entry is None:
                return cursor.position + 1 if cursor.is_unfinished else None
            if not self._expire_if_expired(entry):
                return self._head_from_entry(entry)

    def _head_from_entry(self, entry: Entry) -> Head:
        """Return the head of a lane whose first matching entry is this one."""
        if entry.batch > self._commit_state.last_committed:
            self._has_skipped_uncommitted = True
            return None
        if entry.message is None:
            # Whether it matches, and so blocks later messages, is known when it is read.
            self._page_reader.request_body(entry)
            return entry.sequence
        return BLOCKED_BY_RETRY if entry.due_us else entry

    def head_for(self, consumer: BrokerConsumer, rank: int) -> Head:
        """Return the head of one lane for a consumer."""
        scan = None if self._selection is None else self._scans.find_scan(consumer, self._queue)
        if scan is None:
            lane = self._queue.find_lane(rank)
            return None if lane is None else self._lane_head(lane)
        cursor = scan.cursors.get(rank)
        return None if cursor is None else self._scan_head(cursor)

    def _expire_if_expired(self, entry: Entry) -> bool:
        """Expire a ready message whose time has come. True if it was expired."""
        message = entry.message
        if message is None or not 0 < message.expires_ms <= self._commit_state.now_ms:
            return False
        if entry.batch > self._commit_state.last_committed or entry.due_us:
            return False
        remove_from_lane(entry)
        self._settlement.expire(entry)
        return True


def remove_from_lane(entry: Entry) -> None:
    """Remove an entry from its lane; without selectors and groups it is the head."""
    lane = entry.lane
    if lane.selected is None:
        lane.pop()
    else:
        horizon.remove_entry(lane, entry)


class GroupedQueueDispatch(QueueDispatch):
    """Dispatch of a queue with groups: the first ready message differs from consumer to consumer."""

    __slots__ = ("_counts",)

    @property
    def _groups(self) -> GroupOwnership:
        assert self._selection is not None, "there are groups"
        return self._selection.existing_groups

    def dispatch(
        self, consumers: Sequence[BrokerConsumer], dispatch_entry: Callable[[Entry, BrokerConsumer], object]
    ) -> None:
        groups = self._groups
        # Counts as of the last search.
        self._counts = groups.assigned_count, groups.freed_count
        super().dispatch(consumers, dispatch_entry)

    def _owns_groups(self, consumer: BrokerConsumer, scan: QueueScan | None) -> bool:
        assert scan is not None, "with groups each consumer has a scan"
        return any(
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
        if groups.freed_count != freed:
            # An earlier message may be ready for any class.
            offers.clear()
            return list(classes.values())
        if groups.assigned_count != owned:
            # Uncommitted and unread messages of this group do not block other consumers any more.
            queried += [
                consumer_class
                for consumer_class in classes.values()
                if consumer_class.may_get_better_offer and consumer_class not in queried
            ]
        return queried

    def _first_of_class(self, consumer_class: ConsumerClass) -> Entry | None:
        assert consumer_class.scan is not None, "with groups each consumer has a scan"
        return self._first_in_groups(consumer_class.scan, consumer_class.group_owner)

    def first_for(self, consumer: BrokerConsumer) -> Entry | None:
        scan = self._scans.find_scan(consumer, self._queue)
        assert scan is not None, "with groups each consumer has a scan"
        return self._first_in_groups(scan, consumer)

    def _first_in_groups(self, scan: QueueScan, consumer: BrokerConsumer | None) -> Entry | None:
        """Return the first ready message for a consumer; `consumer` is None for all that own no group."""
        for cursor in scan.cursors.values():
            head = self._group_head(cursor, consumer)
            if head is not None:
                return None if isinstance(head, int) else head
        return None

    def head_for(self, consumer: BrokerConsumer, rank: int) -> Head:
        scan = self._scans.find_scan(consumer, self._queue)
        assert scan is not None, "with groups each consumer has a scan"
        cursor = scan.cursors.get(rank)
        return None if cursor is None else self._group_head(cursor, consumer)

    def _group_head(self, cursor: ScanCursor, consumer: BrokerConsumer | None) -> Head:
        assert isinstance(cursor, GroupScanCursor), "there are groups"
        while True:
            entry, must_wait = cursor.first_for(consumer)
            if entry is None:
                if cursor.needs_refill:
                    cursor.refill()
                    assert self._selection is not None, "there are groups"
                    self._selection.unfinished_cursors[cursor] = None
                return POSITION_UNKNOWN if must_wait else None
            if not self._expire_if_expired(entry):
                return self._head_from_entry(entry)


def service_preference(consumer: BrokerConsumer, index: int) -> tuple[int, int, int, int]:
    return consumer.service_rank, len(consumer.held), consumer.last_dispatch_number, index
