"""Idle reasons: the next message of a subscription, or the reason why none comes.

The search finds the consumer's next message as dispatch does, but changes nothing: it dispatches and expires no
message, and requests no page. The search inspects the lanes of each queue in order of rank. It stops at the first
message that could be dispatched, or that must first be read or compared. Of several queues, the message with the
smallest key counts.

There may be tens of thousands of queues, so the search runs in steps and inspects the queues at different moments.
Expired messages that are still in a queue count as not expired: the next turn removes them.

Source: docs/protocol.md, "Control requests"
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from truenext.engine.dispatch.heads import (
    COMMITTING,
    DELAYED,
    READING,
    Head,
    Wait,
    WaitReason,
    cursor_head,
    entry_head,
    first_head,
    group_cursor_head,
)
from truenext.engine.engine import Engine
from truenext.engine.selecting.groups import GroupScanCursor
from truenext.engine.selecting.scan import QueueScan, ScanCursor
from truenext.engine.state.consumer import BrokerConsumer
from truenext.engine.state.queue import Entry, Lane, Queue
from truenext.engine.state.wildcard import Wildcard

ITEMS_PER_STEP = 50
"""Number of queues, groups or messages that one step inspects."""

_REASON_ORDER = {reason: index for index, reason in enumerate(WaitReason)}


def find_next(engine: Engine, consumer: BrokerConsumer) -> Generator[None, None, Entry | WaitReason]:
    """Return the next message of a consumer, or the reason why none comes. The search runs in steps, and the consumer
    may end between two steps."""
    own_reason = _consumer_reason(consumer)
    if own_reason is not None:
        return own_reason
    inspection = _QueueInspection(engine, consumer)
    queues = consumer.all_queues()
    for number, queue in enumerate(queues, 1):
        inspection.inspect_queue(queue)
        if number % ITEMS_PER_STEP == 0:
            yield
    head = inspection.first_head()
    if head is not None:
        return head.reason if isinstance(head, Wait) else head
    for number, queue in enumerate(queues, 1):
        yield from inspection.inspect_entries_not_ready(queue)
        if number % ITEMS_PER_STEP == 0:
            yield
    return min(inspection.queue_reasons, key=_REASON_ORDER.__getitem__, default=WaitReason.EMPTY)


def _consumer_reason(consumer: BrokerConsumer) -> WaitReason | None:
    """Return why the consumer gets nothing from any queue; None if there is no such reason."""
    if consumer.is_suspended:
        return WaitReason.SUSPENDED
    pull_request = consumer.pull_request
    if not pull_request.remaining if pull_request is not None else len(consumer.held) >= consumer.window:
        return WaitReason.NO_CREDIT
    if consumer.session.holds_too_much:
        return WaitReason.NO_CREDIT
    if consumer.session.unsent_bytes >= consumer.memory.unsent_bytes_max:
        return WaitReason.UNREAD
    if isinstance(consumer, Wildcard) and consumer.is_joining:
        return WaitReason.JOINING
    return None


class _QueueInspection:
    """Search of all queues of one consumer for its next message, or for the reasons why none comes."""

    def __init__(self, engine: Engine, consumer: BrokerConsumer) -> None:
        self._engine = engine
        self._consumer = consumer
        self._is_wildcard = isinstance(consumer, Wildcard)
        self._committed = engine.state.commit_state.last_committed
        self._heads: dict[int, Entry | Wait] = {}
        """Head (next message, or reason to wait for it) with the lowest sequence in all queues, by rank."""
        self.queue_reasons: set[WaitReason] = set()
        """Reasons why a queue has no next message for the consumer."""

    def first_head(self) -> Head:
        return first_head(self._head_of_rank(rank) for rank in sorted(self._heads))

    def _head_of_rank(self, rank: int) -> Entry | Wait:
        """Return the first head of one rank in all queues. A wildcard consumer also waits while an earlier message of
        this rank is being committed, even in a queue that a delayed message blocks."""
        head = self._heads[rank]
        consumer = self._consumer
        if isinstance(head, Entry) and isinstance(consumer, Wildcard):
            first_uncommitted = self._engine.queues.wildcards.first_uncommitted(consumer, rank)
            if first_uncommitted < head.sequence:
                return Wait(COMMITTING, first_uncommitted)
        return head

    def inspect_queue(self, queue: Queue) -> None:
        scan = self._engine.queues.selections.scan_of(self._consumer, queue)
        is_empty = self._is_wildcard and not queue.waiting_count()
        if is_empty and scan is None:
            return
        reason = self._queue_reason(queue)
        if reason is not None:
            if not is_empty:
                self.queue_reasons.add(reason)
            return
        # In an empty queue a scan may be unfinished: dispatch waits for it.
        for rank, head in self._heads_by_rank(queue, scan):
            if head is None:
                continue
            if isinstance(head, Wait) and head.reason is DELAYED:
                # It blocks all later messages.
                self.queue_reasons.add(DELAYED)
                return
            # With the same sequence, a wait goes before an entry.
            self._heads[rank] = min(
                head, self._heads.get(rank, head), key=lambda one: (one.sequence, isinstance(one, Entry))
            )
            if isinstance(head, Wait) and head.is_undecided:
                return

    def _queue_reason(self, queue: Queue) -> WaitReason | None:
        """Return why the consumer gets no message at all from a queue; None if there is no such reason."""
        if queue.is_paused:
            return WaitReason.PAUSED
        if self._engine.state.clients.receivers_of(queue).exclusive not in (None, self._consumer):
            return WaitReason.EXCLUSIVE
        return None

    def _heads_by_rank(self, queue: Queue, scan: QueueScan | None) -> Iterator[tuple[int, Head]]:
        if scan is None:
            for lane in queue.lanes:
                yield lane.rank, self._lane_head(lane)
        else:
            for rank, cursor in scan.cursors.items():
                yield rank, self._cursor_head(cursor)

    def _lane_head(self, lane: Lane) -> Head:
        entry = lane.head()
        if entry is None:
            if lane.needs_page:
                return Wait(READING, lane.horizon + 1)
            if not lane.unread:
                return None
            entry = lane.unread_in_memory[0]
            if lane.selected is not None and lane.selected.loaded_early:
                entry = min(entry, *lane.selected.loaded_early.values(), key=lambda one: one.sequence)
        if entry.due_us and entry.batch <= self._committed:
            # Its body may be evicted: a delayed entry blocks the queue whatever its body is.
            return Wait(DELAYED, entry.sequence)
        return entry_head(entry, self._committed)

    def _cursor_head(self, cursor: ScanCursor) -> Head:
        if not isinstance(cursor, GroupScanCursor):
            return cursor_head(cursor, self._committed)
        needs_refill = cursor.needs_refill
        head = group_cursor_head(cursor, self._consumer, self._committed)
        # Only dispatch requests a refill.
        cursor.needs_refill = needs_refill
        return head

    def inspect_entries_not_ready(self, queue: Queue) -> Generator[None, None, None]:
        """Add, in steps, the reasons of a queue that has no next message: messages in groups of other consumers, and
        messages that wait for their next try."""
        scan = self._engine.queues.selections.scan_of(self._consumer, queue)
        cursors = [] if scan is None else list(scan.cursors.values())
        for cursor in cursors:
            if isinstance(cursor, GroupScanCursor):
                for number, group in enumerate(cursor.groups_with_heads(), 1):
                    if cursor.is_owned_by_another(group, self._consumer):
                        self.queue_reasons.add(WaitReason.GROUP)
                        return
                    if number % ITEMS_PER_STEP == 0:
                        yield
        for lane in queue.lanes:
            for number, entry in enumerate(list(lane.delayed.values()), 1):
                if self._may_match(scan, entry):
                    is_open = not entry.group or self._is_group_open(queue, entry.group)
                    self.queue_reasons.add(WaitReason.DELAYED if is_open else WaitReason.GROUP)
                    if not (is_open and queue.has_groups):
                        return
                if number % ITEMS_PER_STEP == 0:
                    yield

    def _may_match(self, scan: QueueScan | None, entry: Entry) -> bool:
        """Return whether a message may match the consumer's selector. An evicted message counts as a match."""
        selector = None if scan is None else scan.selector
        return selector is None or entry.message is None or selector.matches(entry.message)

    def _is_group_open(self, queue: Queue, group: str) -> bool:
        return not queue.has_groups or self._engine.queues.selections.existing_groups_of(queue).is_open_to(
            self._consumer, group
        )
