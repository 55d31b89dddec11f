"""Idle reasons: why a subscription gets no messages.

The consumer's next message is searched for as dispatch does it, but nothing is changed: nothing expires, is
dispatched or requested. In a queue the lanes are inspected in order of rank, until one has a message that could be
dispatched, or that must be read or compared first; of several queues the first of these counts, in the order of
keys. There may be tens of thousands of queues, so the search is done in steps, and its parts are of different
moments. Expired messages that are still there count as if they had not expired: the next turn removes them. Source:
docs/stomp.md, "What a connection may ask"
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from enum import Enum

from truenext.engine.engine import Engine
from truenext.engine.selecting.groups import GroupScanCursor
from truenext.engine.selecting.scan import QueueScan, ScanCursor
from truenext.engine.state.consumer import BrokerConsumer
from truenext.engine.state.queue import Entry, Lane, Queue
from truenext.engine.state.wildcard import Wildcard

ITEMS_PER_STEP = 50
"""Queues, groups or messages inspected in one step."""


class IdleReason(Enum):
    """Reason for no messages. The first one that is true is reported, of several queues that of the next message."""

    BROWSES = "browses"
    SUSPENDED = "suspended"
    NO_CREDIT = "no credit"
    UNREAD = "unread"
    JOINING = "joining"
    PAUSED = "paused"
    EXCLUSIVE = "exclusive"
    SCANNING = "scanning"
    READING = "reading"
    COMMITTING = "committing"
    GROUP = "group"
    DELAYED = "delayed"
    EMPTY = "empty"
    NOT_IDLE = ""
    """A message could be dispatched."""


_REASON_ORDER = {reason: index for index, reason in enumerate(IdleReason)}
_UNDECIDED_REASONS = (IdleReason.SCANNING, IdleReason.READING)

LaneIdleReason = tuple[int, IdleReason]
"""Sequence from which the reason holds in a lane, and the reason."""


def idle_reason(engine: Engine, consumer: BrokerConsumer) -> Generator[None, None, IdleReason]:
    """Return why a consumer gets no messages now, found in steps. The consumer may end meanwhile."""
    own_reason = _consumer_reason(consumer)
    if own_reason is not None:
        return own_reason
    inspection = _QueueInspection(engine, consumer)
    queues = consumer.all_queues()
    for number, queue in enumerate(queues, 1):
        inspection.inspect_queue(queue)
        if number % ITEMS_PER_STEP == 0:
            yield
    first = inspection.first_reason()
    if first is not None:
        return first
    for number, queue in enumerate(queues, 1):
        yield from inspection.inspect_entries_not_ready(queue)
        if number % ITEMS_PER_STEP == 0:
            yield
    return min(inspection.queue_reasons, key=_REASON_ORDER.__getitem__, default=IdleReason.EMPTY)


def _consumer_reason(consumer: BrokerConsumer) -> IdleReason | None:
    """Return the reason that holds whatever is in the queues, if there is one."""
    if consumer.is_suspended:
        return IdleReason.SUSPENDED
    pull_request = consumer.pull_request
    if not pull_request.remaining if pull_request is not None else len(consumer.held) >= consumer.window:
        return IdleReason.NO_CREDIT
    if consumer.session.unsent_bytes >= consumer.memory.unsent_bytes_max:
        return IdleReason.UNREAD
    if isinstance(consumer, Wildcard) and consumer.is_joining:
        return IdleReason.JOINING
    return None


class _QueueInspection:
    """Search in all queues of one consumer for the reason why the consumer gets no messages."""

    def __init__(self, engine: Engine, consumer: BrokerConsumer) -> None:
        self._engine = engine
        self._consumer = consumer
        self._is_wildcard = isinstance(consumer, Wildcard)
        self._first_reasons: dict[int, LaneIdleReason] = {}
        """Reason with the lowest sequence of all queues, by rank."""
        self.queue_reasons: set[IdleReason] = set()
        """Reasons that hold back all messages of a queue, or all later ones."""

    def first_reason(self) -> IdleReason | None:
        """Return the first reason in the order of keys, not COMMITTING if NOT_IDLE follows; None if none was found."""
        committing = None
        for _, (_, reason) in sorted(self._first_reasons.items()):
            if reason is not IdleReason.COMMITTING:
                # A message being committed holds back only its equals.
                return reason if reason is IdleReason.NOT_IDLE or committing is None else committing
            committing = reason
        return committing

    def inspect_queue(self, queue: Queue) -> None:
        if self._is_wildcard and not queue.waiting_count():
            return
        if queue.is_paused:
            self.queue_reasons.add(IdleReason.PAUSED)
            return
        if self._engine.clients.receivers_of(queue).exclusive not in (None, self._consumer):
            self.queue_reasons.add(IdleReason.EXCLUSIVE)
            return
        scan = self._engine.selections.scan_of(self._consumer, queue)
        for rank, reason in self._reasons_by_rank(queue, scan):
            if reason is None:
                continue
            if reason[1] is IdleReason.DELAYED:
                # It blocks all later messages.
                self.queue_reasons.add(IdleReason.DELAYED)
                return
            self._first_reasons[rank] = min(reason, self._first_reasons.get(rank, reason), key=lambda one: one[0])
            if reason[1] in _UNDECIDED_REASONS:
                return

    def _reasons_by_rank(self, queue: Queue, scan: QueueScan | None) -> Iterator[tuple[int, LaneIdleReason | None]]:
        if scan is None:
            for lane in queue.lanes:
                yield lane.rank, self._lane_reason(lane)
        else:
            for rank, cursor in scan.cursors.items():
                yield rank, self._cursor_reason(cursor)

    def _lane_reason(self, lane: Lane) -> LaneIdleReason | None:
        entry = lane.head()
        if entry is None:
            if lane.needs_page:
                return lane.horizon + 1, IdleReason.READING
            if not lane.unread:
                return None
            entry = lane.unread_in_memory[0]
            if lane.selected is not None and lane.selected.loaded_early:
                entry = min(entry, *lane.selected.loaded_early.values(), key=lambda one: one.sequence)
        if entry.due_us and entry.batch <= self._engine.commit_state.last_committed:
            return entry.sequence, IdleReason.DELAYED
        return self._entry_reason(entry)

    def _cursor_reason(self, cursor: ScanCursor) -> LaneIdleReason | None:
        if isinstance(cursor, GroupScanCursor):
            needs_refill = cursor.needs_refill
            entry, must_wait = cursor.first_for(self._consumer)
            # Only dispatch requests a refill.
            cursor.needs_refill = needs_refill
            if entry is None:
                return (0, IdleReason.SCANNING) if must_wait else None
        else:
            entry = cursor.first()
            if entry is None:
                return (cursor.position + 1, IdleReason.SCANNING) if cursor.is_unfinished else None
        return self._entry_reason(entry)

    def _entry_reason(self, entry: Entry) -> LaneIdleReason:
        if entry.batch > self._engine.commit_state.last_committed:
            return entry.sequence, IdleReason.COMMITTING
        if entry.message is None:
            return entry.sequence, IdleReason.READING
        return entry.sequence, IdleReason.DELAYED if entry.due_us else IdleReason.NOT_IDLE

    def inspect_entries_not_ready(self, queue: Queue) -> Generator[None, None, None]:
        """Inspect, in steps, the waiting messages of a queue without a next one: of others' groups, and delayed
        ones."""
        scan = self._engine.selections.scan_of(self._consumer, queue)
        cursors = [] if scan is None else list(scan.cursors.values())
        for cursor in cursors:
            if isinstance(cursor, GroupScanCursor):
                for number, group in enumerate(cursor.groups_with_heads(), 1):
                    if cursor.is_owned_by_another(group, self._consumer):
                        self.queue_reasons.add(IdleReason.GROUP)
                        return
                    if number % ITEMS_PER_STEP == 0:
                        yield
        for lane in queue.lanes:
            for number, entry in enumerate(list(lane.delayed.values()), 1):
                if self._may_match(scan, entry):
                    is_open = not entry.group or self._is_group_open(queue, entry.group)
                    self.queue_reasons.add(IdleReason.DELAYED if is_open else IdleReason.GROUP)
                    if not (is_open and queue.has_groups):
                        return
                if number % ITEMS_PER_STEP == 0:
                    yield

    def _may_match(self, scan: QueueScan | None, entry: Entry) -> bool:
        """Return whether a message may match; a body that is not in memory counts as a match."""
        selector = None if scan is None else scan.selector
        return selector is None or entry.message is None or selector.matches(entry.message)

    def _is_group_open(self, queue: Queue, group: str) -> bool:
        return not queue.has_groups or self._engine.selections.existing_groups_of(queue).is_open_to(
            self._consumer, group
        )
