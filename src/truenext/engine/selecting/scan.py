"""The progress of one selector in a queue: what it wants, and how far each lane was tested."""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heappush

from truenext.engine.state.consumer import BrokerConsumer
from truenext.engine.state.memory import NO_SEQUENCES, add_sequence
from truenext.engine.state.queue import UNBOUNDED, Entry, Lane, Queue
from truenext.model.limits import SCAN_FOUND_MAX
from truenext.model.message import SentMessage
from truenext.model.selector import Selector

PENDING_ENTRIES_MAX = 10_000
"""Messages of a lane that are noted at a time to be tested: to get to the middle of a lane takes a while."""


def _descending_sequence(entry: Entry) -> int:
    return -entry.sequence


class ScanCursor:
    """How far one lane was tested for one selector, and what was found in it."""

    __slots__ = ("_found_heap", "_selector", "_untested", "found", "lane", "pending", "pending_to", "position")

    def __init__(self, lane: Lane, selector: Selector | None) -> None:
        self._selector = selector
        self.lane = lane
        self.position = 0 if len(lane) else UNBOUNDED
        """All that waits in the lane up to this sequence was tested."""
        self.found: dict[int, Entry] = {}
        """What is wanted, by sequence; some may have been taken by others."""
        self._found_heap: list[int] = []
        """The same, as a heap."""
        self._untested = NO_SEQUENCES
        """Those whose bodies have left memory, so that they are still to be tested."""
        self.pending: list[Entry] = []
        """What follows in memory, the last first."""
        self.pending_to = 0
        """Up to here."""

    @property
    def is_unfinished(self) -> bool:
        return self.position < UNBOUNDED

    @property
    def tested_to(self) -> int:
        """All that waits in the lane up to this sequence was tested, if not of groups."""
        return self.position

    @property
    def is_full(self) -> bool:
        return len(self.found) >= SCAN_FOUND_MAX

    @property
    def has_space(self) -> bool:
        """Of what may wait half was taken."""
        return len(self.found) <= SCAN_FOUND_MAX // 2

    def stop_before(self, sequence: int) -> bool:
        """If too much was found go no further than before this one."""
        if not self.is_full:
            return False
        self.position = sequence - 1
        return True

    def advance_to(self, sequence: int) -> None:
        """All up to this one was tested."""
        self.position = sequence

    def first(self) -> Entry | None:
        """The first of what was found, if all before it was tested. One without a body has to be read."""
        while self._found_heap:
            sequence = self._found_heap[0]
            entry = self.found[sequence]
            if not entry.is_out_of_lane and self._is_match(entry):
                return entry if sequence <= self.position else None
            heappop(self._found_heap)
            del self.found[sequence]
            self._untested.discard(sequence)
        return None

    def _is_match(self, entry: Entry) -> bool:
        if entry.sequence not in self._untested or entry.message is None:
            return True
        self._untested.discard(entry.sequence)
        return self._selector is None or self._selector.matches(entry.message)

    def matches(self, message: SentMessage, _sequence: int) -> bool:
        return self._selector is None or self._selector.matches(message)

    def test(self, entry: Entry) -> bool:
        """Add a message that waits, if it is wanted or that cannot be said yet. True if it was added."""
        message = entry.message
        sequence = entry.sequence
        if message is None:
            self._untested = add_sequence(self._untested, sequence)
        elif not self.matches(message, sequence):
            return False
        self.add(entry)
        return True

    def on_arrived(self, entry: Entry) -> bool:
        """The same of one that has just arrived."""
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
        """One came back that is not tested yet: if what follows it was noted it is noted too. It is not among what was
        found: too much of that would leave no room to test what is before it.
        """
        pending = self.pending
        if not pending or entry.sequence > self.pending_to:
            return
        index = bisect_left(pending, -entry.sequence, key=_descending_sequence)
        if index < len(pending) and pending[index].sequence == entry.sequence:
            # It was noted before somebody took it.
            pending[index] = entry
        else:
            pending.insert(index, entry)

    def load_pending(self) -> None:
        """See what follows in memory; nothing if nothing does."""
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

    def test_pending(self, count: int) -> int:
        """Test what follows in memory, at most so much. Returns how much that was."""
        remaining = count
        pending = self.pending
        while pending and remaining > 0 and not self.is_full:
            entry = pending.pop()
            if not entry.is_out_of_lane:
                self.test(entry)
            self.advance_to(entry.sequence)
            remaining -= 1
        return count - remaining


class QueueScan:
    """What one selector wants of a queue."""

    __slots__ = ("consumers", "cursors", "selector")

    def __init__(self, selector: Selector | None, cursors: dict[int, ScanCursor]) -> None:
        self.selector = selector
        """None wants all; only where there are groups."""
        self.consumers = 0
        self.cursors = cursors
        """By rank, those of the lanes in which there can be anything that is wanted."""


class ConsumerScans:
    """The scan of each consumer that has one, in each of its queues."""

    __slots__ = ("_by_consumer", "_by_wildcard")

    def __init__(self) -> None:
        self._by_consumer: dict[BrokerConsumer, QueueScan] = {}
        """Of those who take from one queue."""
        self._by_wildcard: dict[BrokerConsumer, dict[Queue, QueueScan]] = {}

    def find_scan(self, consumer: BrokerConsumer, queue: Queue) -> QueueScan | None:
        """None if it wants all, in a queue without groups."""
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
        """It takes from a queue no more. Returns the scan that it had there."""
        if consumer.queue is not None:
            return self._by_consumer.pop(consumer, None)
        scans = self._by_wildcard.get(consumer)
        if scans is None:
            return None
        scan = scans.pop(queue, None)
        if not scans:
            del self._by_wildcard[consumer]
        return scan
