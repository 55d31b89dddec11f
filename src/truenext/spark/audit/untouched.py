"""Untouched messages: they exist at a cut, and the section behind it has no event of theirs.

Of those that wait, a section needs their number, and the first of each priority and group: no message behind it becomes
the true next. Of the others, such as delayed ones, it needs nothing. So a section has no more messages in memory than
it has events, however many wait.

After a start of the broker, an untouched message waits again. If the start has found too few messages, all untouched
ones are in doubt. Other events that apply to all messages of a queue, such as its end, change each one: then none is
untouched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from truenext.spark.audit.cut import MessageRow
from truenext.spark.audit.lifetime import is_continued
from truenext.spark.audit.model import EventCode, MessageState, StartFlag, TimelineRow


class Since(NamedTuple):
    """Effect on untouched messages of the starts and gaps since a cut."""

    has_start: bool
    """True if messages were recovered since the cut: then only messages that wait are untouched."""
    has_gap: bool
    finds_transient: bool
    """True if transient messages are recovered, too."""


def since(marks: Sequence[TimelineRow], *, is_recovered: bool) -> Since | None:
    """Return what has happened since a cut; None if that has changed every message. `marks` are the starts and gaps
    since, in order, and `is_recovered` says whether the run of the cut had finished its recovery."""
    starts = [each for each in marks if each.code == EventCode.RUN_STARTED]
    if not all(map(is_continued, starts)) or (marks and marks[-1].code == EventCode.GAP):
        return None
    has_gap = len(starts) < len(marks)
    finds_transient = not has_gap and all(each.number & StartFlag.CLEAN for each in starts)
    return Since(bool(starts) or not is_recovered, has_gap, finds_transient)


class QueueCuts:
    """Cuts of one queue, and which messages are untouched in the sections behind them.

    Messages are taken by sequence, so the first untouched one of a section is the first of its priority and group.
    Several QueueCuts, each for some of the messages, add up: then a section has several such first messages. Sets of
    sections are integers with a bit for each.
    """

    def __init__(self, cuts: Sequence[int], marks: Sequence[TimelineRow]) -> None:
        self.cuts = cuts
        self.marks = marks
        self._last = 1 << len(cuts) >> 1
        every = (1 << len(cuts)) - 1
        self._unmarked = every & ~self.sections(row.event for row in marks)
        self._with_persistent = every & ~self.sections(row.event for row in marks if not _keeps_persistent(row))
        self._with_transient = every & ~self.sections(row.event for row in marks if not _keeps_transient(row))
        self._with_first: dict[tuple[int, int], int] = {}
        """Sections in which a first waiting message is known, by its priority and group."""
        self._counts: Counter[int] = Counter()
        """Number of further messages by the sections in which they are untouched."""

    def sections(self, events: Iterable[int]) -> int:
        """Return the sections that have some of the events."""
        found = 0
        for event in events:
            # Without the events before the first cut.
            found |= 1 << bisect_right(self.cuts, event) >> 1
        return found

    def take(self, positions: range, message: MessageRow, own: int) -> tuple[Iterable[int], bool]:
        """Count a message in the sections in which it is untouched. Return the positions of the cuts that need its
        row, and whether the last section does without. `message` is its state at all of `positions`, `own` are the
        sections with events of it."""
        every = (1 << positions.stop) - (1 << positions.start)
        visible = every & -(1 << bisect_right(self.cuts, message.visible_event))
        untouched = visible & ~own if message.can_be_untouched(self.cuts[positions.stop - 1]) else 0
        if not untouched:
            return positions, False
        if message.state is not MessageState.WAITING:
            unknown = untouched & self._unmarked
        else:
            untouched &= self._with_persistent if message.is_persistent else self._with_transient
            lane = (message.priority, message.group)
            with_first = self._with_first.get(lane, 0)
            self._with_first[lane] = with_first | untouched
            unknown = untouched & with_first
            self._counts[unknown] += 1
        return _bits(every & ~unknown), bool(unknown & self._last)

    def untouched(self) -> Iterator[tuple[int, int]]:
        """Yield each cut behind which waiting messages are untouched and have no row, with their number."""
        changes = [0] * (len(self.cuts) + 1)
        for sections, count in self._counts.items():
            # Neighbours that differ: where a stretch of sections begins or ends.
            for position in _bits(sections ^ (sections << 1)):
                changes[position] += count if sections >> position & 1 else -count
        for cut, count in zip(self.cuts, accumulate(changes), strict=False):
            if count:
                yield cut, count


def _keeps_persistent(mark: TimelineRow) -> bool:
    """Return whether persistent messages that wait stay untouched by the mark, and by the start behind it."""
    return mark.code == EventCode.GAP or _keeps_transient(mark) or is_continued(mark)


def _keeps_transient(mark: TimelineRow) -> bool:
    """Return whether transient messages that wait stay untouched by the mark."""
    is_clean = bool(mark.number & StartFlag.CLEAN)
    return mark.code == EventCode.NOT_RECOVERED or (is_continued(mark) and is_clean)


def _bits(number: int) -> Iterator[int]:
    """Yield the positions of the bits that are set."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
