"""Messages that rest: they exist at a cut, and the section behind it has no event of theirs.

Of waiting messages that rest, a section needs their number, and the first of each priority and group: no message behind
it becomes the true next. So a section has no more messages in memory than it has events, however many wait. Messages
that rest in another state, such as delayed ones, matter to no other message.

The start of a broker leaves a waiting message as it was, or all that rest in doubt if it has not found as many. Other
events that apply to all messages of a queue, such as its end, change each one: then none rests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from truenext.spark.audit.cut import MessageRow
from truenext.spark.audit.model import EventCode, MessageState, StartFlag, TimelineRow


class QueueCuts:
    """Cuts of one queue, and which messages rest in the sections behind them. Messages are given in order. Sets of
    sections are integers with a bit for each."""

    def __init__(self, cuts: Sequence[int], marks: Sequence[TimelineRow]) -> None:
        self.cuts = cuts
        self.marks = marks
        self._last = 1 << len(cuts) >> 1
        every = (1 << len(cuts)) - 1
        self._unmarked = every & ~self.sections(row.event for row in marks)
        self._with_persistent = every & ~self.sections(row.event for row in marks if not _keeps_persistent(row))
        self._with_transient = every & ~self.sections(row.event for row in marks if not _keeps_transient(row))
        self._with_first: dict[tuple[int, int], int] = {}
        """For each priority and group, sections that have the first waiting message that rests in them."""
        self._counts: Counter[int] = Counter()
        """Number of further messages by the sections in which they rest."""

    def sections(self, events: Iterable[int]) -> int:
        """Return the sections that have some of the events."""
        found = 0
        for event in events:
            # Without the events before the first cut.
            found |= 1 << bisect_right(self.cuts, event) >> 1
        return found

    def rest(self, positions: range, message: MessageRow, own: int) -> tuple[Iterable[int], bool]:
        """Return the positions of cuts that need a row of the message, and whether it rests in the last section without
        one. Nothing happens to it from the first of `positions` to the last. `own` are the sections that have events of
        the message."""
        every = (1 << positions.stop) - (1 << positions.start)
        visible = every & -(1 << bisect_right(self.cuts, message.visible_event))
        rests = visible & ~own if message.can_rest(self.cuts[positions.stop - 1]) else 0
        if not rests:
            return positions, False
        if message.state is not MessageState.WAITING:
            rests &= self._unmarked
            unknown = rests
        else:
            rests &= self._with_persistent if message.is_persistent else self._with_transient
            lane = (message.priority, message.group)
            with_first = self._with_first.get(lane, 0)
            self._with_first[lane] = with_first | rests
            unknown = rests & with_first
            self._counts[unknown] += 1
        return _bits(every & ~unknown), bool(unknown & self._last)

    def resting(self) -> Iterator[tuple[int, int]]:
        """Yield each cut behind which waiting messages rest without a row, with their number."""
        for position, cut in enumerate(self.cuts):
            count = sum(count for sections, count in self._counts.items() if sections >> position & 1)
            if count:
                yield cut, count


def _keeps_persistent(mark: TimelineRow) -> bool:
    """Return whether persistent messages that wait rest through the mark, and the start behind it."""
    return mark.code == EventCode.GAP or _keeps_transient(mark) or _is_continued(mark)


def _keeps_transient(mark: TimelineRow) -> bool:
    """Return whether transient messages that wait rest through the mark."""
    is_clean = bool(mark.number & StartFlag.CLEAN)
    return mark.code == EventCode.NOT_RECOVERED or (_is_continued(mark) and is_clean)


def _is_continued(mark: TimelineRow) -> bool:
    return mark.code == EventCode.RUN_STARTED and bool(mark.number & StartFlag.CONTINUED)


def _bits(number: int) -> Iterator[int]:
    """Yield the positions of the bits that are set."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
