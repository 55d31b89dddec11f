"""What one selector wants of a queue, and how far each lane was tested for it; see selecting.py."""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING

from truenext.engine.state.empty import NO_SEQUENCES, with_sequence
from truenext.engine.state.queue import WHOLE
from truenext.limits import SCAN_FOUND_MAX

if TYPE_CHECKING:
    from truenext.engine.state.consumer import BrokerConsumer
    from truenext.engine.state.queue import Entry, Lane, Queue
    from truenext.message import SentMessage
    from truenext.selector import Selector

CHUNK = 10_000
"""Messages of a lane that are noted at a time to be tested: to get to the middle of a lane takes a while."""

_sequence = attrgetter("sequence")


def _last_first(entry: Entry) -> int:
    return -entry.sequence


class ScanCursor:
    """How far one lane was tested for one selector, and what was found in it."""

    __slots__ = ("_order", "_selector", "_unsure", "found", "lane", "noted", "noted_to", "position")

    def __init__(self, lane: Lane, selector: Selector | None) -> None:
        self._selector = selector
        self.lane = lane
        self.position = 0 if len(lane) else WHOLE
        """All that waits in the lane up to this sequence was tested."""
        self.found: dict[int, Entry] = {}
        """What is wanted, by sequence; some may have been taken by others."""
        self._order: list[int] = []
        """The same, as a heap."""
        self._unsure = NO_SEQUENCES
        """Those whose bodies have left memory, so that they are still to be tested."""
        self.noted: list[Entry] = []
        """What follows in memory, the last first."""
        self.noted_to = 0
        """Up to here."""

    @property
    def is_behind(self) -> bool:
        return self.position < WHOLE

    @property
    def tested(self) -> int:
        """All that waits in the lane up to this sequence was tested, if not of groups."""
        return self.position

    @property
    def is_full(self) -> bool:
        return len(self.found) >= SCAN_FOUND_MAX

    @property
    def has_room(self) -> bool:
        """Of what may wait half was taken."""
        return len(self.found) <= SCAN_FOUND_MAX // 2

    def stop_before(self, sequence: int) -> bool:
        """If too much was found go no further than before this one."""
        if not self.is_full:
            return False
        self.position = sequence - 1
        return True

    def passed(self, sequence: int) -> None:
        """All up to this one was tested."""
        self.position = sequence

    def first(self) -> Entry | None:
        """The first of what was found, if all before it was tested. One without a body has to be read."""
        while self._order:
            sequence = self._order[0]
            entry = self.found[sequence]
            if not entry.has_left_lane and self._is_wanted(entry):
                return entry if sequence <= self.position else None
            heappop(self._order)
            del self.found[sequence]
            self._unsure.discard(sequence)
        return None

    def _is_wanted(self, entry: Entry) -> bool:
        if entry.sequence not in self._unsure or entry.message is None:
            return True
        self._unsure.discard(entry.sequence)
        return self._selector is None or self._selector.matches(entry.message)

    def wants(self, message: SentMessage, _sequence: int) -> bool:
        return self._selector is None or self._selector.matches(message)

    def test(self, entry: Entry) -> bool:
        """Add a message that waits, if it is wanted or that cannot be said yet. True if it was added."""
        message = entry.message
        sequence = entry.sequence
        if message is None:
            self._unsure = with_sequence(self._unsure, sequence)
        elif not self.wants(message, sequence):
            return False
        self.add(entry)
        return True

    def heard_of(self, entry: Entry) -> bool:
        """The same of one that has just arrived."""
        return self.test(entry)

    def add(self, entry: Entry) -> None:
        sequence = entry.sequence
        if sequence not in self.found:
            heappush(self._order, sequence)
        self.found[sequence] = entry

    def came_back(self, entry: Entry) -> None:
        if entry.sequence <= self.position:
            self.test(entry)
        else:
            self.note_again(entry)

    def note_again(self, entry: Entry) -> None:
        """One came back that is not tested yet: if what follows it was noted it is noted too. It is not among what was
        found: too much of that would leave no room to test what is before it.
        """
        noted = self.noted
        if not noted or entry.sequence > self.noted_to:
            return
        at = bisect_left(noted, -entry.sequence, key=_last_first)
        if at < len(noted) and noted[at].sequence == entry.sequence:
            # It was noted before somebody took it.
            noted[at] = entry
        else:
            noted.insert(at, entry)

    def note(self) -> None:
        """See what follows in memory; nothing if nothing does."""
        lane = self.lane
        noted = lane.between(self.position, lane.horizon, most=CHUNK, with_delayed=False, with_recent=False)
        to = noted[-1].sequence if len(noted) == CHUNK else lane.horizon
        noted.reverse()
        self.noted = noted
        self.noted_to = noted[0].sequence if noted else 0
        if not noted:
            self.passed(to)

    def test_noted(self, count: int) -> int:
        """Test what follows in memory, at most so much. Returns how much that was."""
        left = count
        noted = self.noted
        while noted and left > 0 and not self.is_full:
            entry = noted.pop()
            if not entry.has_left_lane:
                self.test(entry)
            self.passed(entry.sequence)
            left -= 1
        return count - left


class Scan:
    """What one selector wants of a queue."""

    __slots__ = ("consumers", "places", "selector")

    def __init__(self, selector: Selector | None, places: dict[int, ScanCursor]) -> None:
        self.selector = selector
        """None wants all; only where there are groups."""
        self.consumers = 0
        self.places = places
        """By rank, those of the lanes in which there can be anything that is wanted."""


class Scans:
    """The scan of each consumer that has one, in each of its queues."""

    __slots__ = ("_of_many", "_of_one")

    def __init__(self) -> None:
        self._of_one: dict[BrokerConsumer, Scan] = {}
        """Of those who take from one queue."""
        self._of_many: dict[BrokerConsumer, dict[Queue, Scan]] = {}

    def of(self, consumer: BrokerConsumer, queue: Queue) -> Scan | None:
        """None if it wants all, in a queue without groups."""
        if consumer.queue is not None:
            return self._of_one.get(consumer)
        scans = self._of_many.get(consumer)
        return None if scans is None else scans.get(queue)

    def add(self, consumer: BrokerConsumer, queue: Queue, scan: Scan) -> None:
        if consumer.queue is not None:
            self._of_one[consumer] = scan
        else:
            self._of_many.setdefault(consumer, {})[queue] = scan

    def end(self, consumer: BrokerConsumer, queue: Queue) -> Scan | None:
        """It takes from a queue no more. Returns the scan that it had there."""
        if consumer.queue is not None:
            return self._of_one.pop(consumer, None)
        scans = self._of_many.get(consumer)
        if scans is None:
            return None
        scan = scans.pop(queue, None)
        if not scans:
            del self._of_many[consumer]
        return scan
