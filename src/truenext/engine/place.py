"""How far one lane was tested for one selector, and what was found in it; see selecting.py."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from heapq import heappop, heappush
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from truenext.engine.empty import NO_SEQUENCES, with_sequence
from truenext.engine.lane import WHOLE
from truenext.limits import SCAN_FOUND_MAX

if TYPE_CHECKING:
    from truenext.engine.lane import Entry, Lane
    from truenext.message import Message
    from truenext.selector import Selector

CHUNK = 10_000
"""Messages of a lane that are noted at a time to be tested: to get to the middle of a lane takes a while."""

_sequence = attrgetter("sequence")


def _last_first(entry: Entry) -> int:
    return -entry.sequence


class Place:
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
            if not entry.is_taken and self._is_wanted(entry):
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

    def wants(self, message: Message, _sequence: int) -> bool:
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
        aside = lane.aside
        assert aside is not None, "somebody has a selector"
        arrived = lane.arrived
        at = bisect_right(arrived, self.position, key=_sequence)
        # Turned until they are in front: to get to the middle of it step by step takes longer.
        following: list[Entry] = []
        if arrived:
            arrived.rotate(-at)
            following = list(islice(arrived, min(CHUNK, len(arrived) - at)))
            arrived.rotate(at)
        is_all = at + len(following) == len(arrived)
        to = lane.horizon if is_all or not following else following[-1].sequence
        again = [entry for entry in lane.again() if self.position < entry.sequence <= to]
        self.noted = [entry for entry in following if entry.sequence not in aside.tombs] + again
        self.noted.sort(key=_sequence, reverse=True)
        self.noted_to = self.noted[0].sequence if self.noted else 0
        if not self.noted:
            self.passed(to)

    def test_noted(self, count: int) -> int:
        """Test what follows in memory, at most so much. Returns how much that was."""
        left = count
        noted = self.noted
        while noted and left > 0 and not self.is_full:
            entry = noted.pop()
            if not entry.is_taken:
                self.test(entry)
            self.passed(entry.sequence)
            left -= 1
        return count - left
