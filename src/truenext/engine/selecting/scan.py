"""The scan of a queue for one selector: the matches found, and how far each lane was tested."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from heapq import heappop, heappush

from truenext.engine.state.consumer import BrokerConsumer
from truenext.engine.state.memory import NO_SEQUENCES, add_sequence
from truenext.engine.state.queue import UNBOUNDED, Entry, Lane, Queue
from truenext.model.forms import reading_ns
from truenext.model.limits import COSTLY_COMPARISON_NS, SCAN_FOUND_MAX
from truenext.model.message import SentMessage
from truenext.model.selector import Selector

PENDING_ENTRIES_MAX = 10_000
"""Maximum number of messages that are collected at once for tests. The number is high, because reaching the middle of a
lane takes long."""


class ComparisonBudget:
    """Estimated time that comparisons with selectors may take in one step. Half of the time is for costly comparisons,
    so that these leave time for cheap ones."""

    __slots__ = ("_costly_ns", "_ns", "_total_ns")

    def __init__(self, total_ns: int) -> None:
        self._total_ns = total_ns
        self._ns = self._costly_ns = total_ns // 2

    def renew(self) -> None:
        self._ns = self._costly_ns = self._total_ns // 2

    @property
    def is_spent(self) -> bool:
        return self._ns <= 0 and self._costly_ns <= 0

    def is_spent_for_requeued(self, has_groups: bool) -> bool:
        """Return whether no time is left to compare a requeued message. `has_groups` is True if its queue has groups.
        A method of its own for speed, because one event may requeue very many messages."""
        return self._ns <= 0 and (has_groups or self._costly_ns <= 0)

    @property
    def has_time(self) -> bool:
        """Whether there is time for other work than costly comparisons."""
        return self._ns > 0

    def spend(self, ns: int) -> None:
        """Subtract the time of work that was done from the budget."""
        self._ns -= ns

    def take(self, selector: Selector | None, message: SentMessage | None) -> bool:
        """Take the time of one comparison from the budget. Returns False if no time is left."""
        if selector is None or message is None:
            return True
        # As `comparison_ns`, inlined.
        cost_ns = selector.base_ns + selector.byte_ns * len(message.header)
        if message.form:
            cost_ns += reading_ns(message, selector.byte_ns, 1)
        if cost_ns < COSTLY_COMPARISON_NS:
            if self._ns <= 0:
                return False
            self._ns -= cost_ns
        else:
            if self._costly_ns <= 0:
                return False
            self._costly_ns -= cost_ns
        return True


class ScanCursor:
    """Cursor of one selector in one lane: the position up to which the lane was tested, and the matches found."""

    __slots__ = ("_found_heap", "_untested", "found", "lane", "pending", "pending_to", "position", "selector")

    def __init__(self, lane: Lane, selector: Selector | None) -> None:
        self.selector = selector
        self.lane = lane
        self.position = 0 if len(lane) else UNBOUNDED
        """Sequence up to which all messages waiting in the lane were tested."""
        self.found: dict[int, Entry] = {}
        """Matches by sequence. Some may have been dispatched since."""
        self._found_heap: list[int] = []
        self._untested = NO_SEQUENCES
        """Sequences in `found` of evicted messages, which cannot be tested before they are read."""
        self.pending: list[Entry] = []
        """Messages in memory that are tested next, in descending order of sequence."""
        self.pending_to = 0
        """Last sequence in `pending`."""

    @property
    def is_unfinished(self) -> bool:
        return self.position < UNBOUNDED

    @property
    def tested_to(self) -> int:
        """Sequence up to which all messages waiting in the lane were tested, or skipped because a group queue was
        full."""
        return self.position

    @property
    def known_to(self) -> int:
        """Sequence up to which all messages waiting in the lane were tested, including requeued messages whose tests
        were deferred."""
        selected = self.lane.selected
        if selected is None or selected.deferred is None:
            return self.tested_to
        return min(self.tested_to, selected.deferred.first.sequence - 1)

    @property
    def is_full(self) -> bool:
        return len(self.found) >= SCAN_FOUND_MAX

    @property
    def has_space(self) -> bool:
        """Whether at most half of the permitted number of matches wait. A scan that was full continues when this is
        true."""
        return len(self.found) <= SCAN_FOUND_MAX // 2

    def stop_before(self, sequence: int, *, if_full: bool = True) -> bool:
        """Stop the scan before this sequence; with `if_full`, only if the scan is full. Returns whether the scan has
        stopped."""
        if if_full and not self.is_full:
            return False
        self.position = sequence - 1
        return True

    def advance_to(self, sequence: int) -> None:
        """Note that all messages up to this sequence were tested."""
        self.position = sequence

    def first(self) -> Entry | None:
        """Return the first match. None if there is none, or if an untested message comes before it. An evicted match
        must be read before it is dispatched."""
        while self._found_heap:
            sequence = self._found_heap[0]
            entry = self.found[sequence]
            if not entry.is_out_of_lane and self._is_match(entry):
                return entry if sequence <= self.known_to else None
            heappop(self._found_heap)
            del self.found[sequence]
            self._untested.discard(sequence)
        return None

    def _is_match(self, entry: Entry) -> bool:
        if entry.sequence not in self._untested or entry.message is None:
            return True
        self._untested.discard(entry.sequence)
        return self.selector is None or self.selector.matches(entry.message)

    def matches(self, message: SentMessage, _sequence: int) -> bool:
        return self.selector is None or self.selector.matches(message)

    def test(self, entry: Entry) -> bool:
        """Add a waiting message if it matches, or if it is evicted and cannot be tested yet. Returns whether it was
        added."""
        message = entry.message
        sequence = entry.sequence
        if message is None:
            self._untested = add_sequence(self._untested, sequence)
        elif not self.matches(message, sequence):
            return False
        self.add(entry)
        return True

    def on_arrived(self, entry: Entry) -> bool:
        """Test a message that has just arrived. Returns whether it was added."""
        return self.test(entry)

    def add(self, entry: Entry) -> None:
        sequence = entry.sequence
        if sequence not in self.found:
            heappush(self._found_heap, sequence)
        self.found[sequence] = entry

    def on_requeued(self, entry: Entry) -> None:
        if entry.sequence <= self.position:
            self.test(entry)
        else:
            self.add_pending(entry)

    def add_pending(self, entry: Entry) -> None:
        """Add a requeued, untested message to `pending`, if its sequence is in the range of `pending`. The entry is not
        added to `found`, because many such messages would leave no space there for earlier matches."""
        pending = self.pending
        if not pending or entry.sequence > self.pending_to:
            return
        index = bisect_left(pending, -entry.sequence, key=lambda one: -one.sequence)
        if index < len(pending) and pending[index].sequence == entry.sequence:
            # It was pending already before it was dispatched.
            pending[index] = entry
        else:
            pending.insert(index, entry)

    def load_pending(self) -> None:
        """Collect in `pending` the messages in memory that follow the position. If there are none, move the position
        up to the horizon."""
        lane = self.lane
        pending = lane.entries_between(
            self.position, lane.horizon, limit=PENDING_ENTRIES_MAX, with_delayed=False, with_unread=False
        )
        up_to = pending[-1].sequence if len(pending) == PENDING_ENTRIES_MAX else lane.horizon
        pending.reverse()
        self.pending = pending
        self.pending_to = pending[0].sequence if pending else 0
        if not pending:
            self.advance_to(up_to)

    def test_pending(self, count: int, budget: ComparisonBudget) -> int:
        """Test up to `count` pending messages. Returns how many were tested, or `count` if the budget is used up."""
        remaining = count
        pending = self.pending
        while pending and remaining > 0 and not self.is_full:
            entry = pending[-1]
            if not entry.is_out_of_lane:
                if not budget.take(self.selector, entry.message):
                    return count
                self.test(entry)
            pending.pop()
            self.advance_to(entry.sequence)
            remaining -= 1
        return count - remaining


@dataclass(slots=True, eq=False)
class QueueScan:
    """Scan of a queue for one selector. All consumers with this selector share the scan."""

    selector: Selector | None
    """Selector. None matches all messages, and is used only in queues with groups."""
    cursors: dict[int, ScanCursor]
    """Cursors of the lanes that can contain matches, by rank."""
    consumers: int = 0


class ConsumerScans:
    __slots__ = ("_by_consumer", "_by_wildcard")

    def __init__(self) -> None:
        self._by_consumer: dict[BrokerConsumer, QueueScan] = {}
        """Scans of the consumers that are no wildcard consumers."""
        self._by_wildcard: dict[BrokerConsumer, dict[Queue, QueueScan]] = {}

    def find_scan(self, consumer: BrokerConsumer, queue: Queue) -> QueueScan | None:
        """Return the consumer's scan in a queue. None if the consumer has no selector and the queue no groups."""
        if consumer.queue is not None:
            return self._by_consumer.get(consumer)
        scans = self._by_wildcard.get(consumer)
        return None if scans is None else scans.get(queue)

    def add(self, consumer: BrokerConsumer, queue: Queue, scan: QueueScan) -> None:
        if consumer.queue is not None:
            self._by_consumer[consumer] = scan
        else:
            self._by_wildcard.setdefault(consumer, {})[queue] = scan

    def remove(self, consumer: BrokerConsumer, queue: Queue) -> QueueScan | None:
        if consumer.queue is not None:
            return self._by_consumer.pop(consumer, None)
        scans = self._by_wildcard.get(consumer)
        if scans is None:
            return None
        scan = scans.pop(queue, None)
        if not scans:
            del self._by_wildcard[consumer]
        return scan
