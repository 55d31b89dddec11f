"""Where the messages of one queue and one priority wait.

A lane holds persistent and transient messages together, in the order of their sequences. What is in memory is a
beginning of it; the rest, if any, is in the store alone and is read page by page:

    returned, arrived                            unread
    <----- in memory, in order -----> horizon <----- in the store, or being written ----->

Every message at or below the horizon that waits is in memory, every one above it is returned by a page of the store or
stands in `recent`, because its write is under way. Whoever was dispatched is below it. So there is one unread region,
and a page never brings what is in memory, held or gone already.

There may be a hundred thousand of them, most with a message or none: what holds messages is made when the first comes,
and until then it is one empty thing that all lanes share and none can change (empty.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from heapq import heapify, heappop, heappush, merge
from operator import attrgetter
from sys import maxsize
from typing import TYPE_CHECKING, cast

import msgspec

from truenext.engine.aside import Aside
from truenext.engine.empty import EMPTY, with_sequence
from truenext.engine.memory import ASIDE_BYTES, PLACES_BYTES
from truenext.message import Message

if TYPE_CHECKING:
    from collections.abc import Iterator

    from truenext.engine.paging import Read
    from truenext.engine.queue import Queue

WHOLE = maxsize
"""The horizon of a lane that is in memory wholly."""


NO_ENTRIES = cast("deque[Entry]", ())
_NO_PLACES = cast("list[tuple[int, Entry]]", ())


class Entry(msgspec.Struct, gc=False):
    """A message's place in a queue, and what became of it there so far."""

    sequence: int
    message: Message | None
    """None if only the store has it: it has left memory, or it is done with."""
    lane: Lane
    batch: int
    """It is visible once this batch is durable; 0 is at once."""
    persistent: bool
    """What a crash must leave of it here; not so in a subscription that ends with its connection, whatever it is."""
    stored: int | None
    """The batch that gives it to the store, 0 for one of an earlier run: its removal must be told to the store. None
    if the store has never heard of it."""
    deliveries: int = 0
    attempts: int = 0
    marked: bool = False
    """The store has a mark for it (batch.Mark)."""
    due_us: int = 0
    """If not 0: it failed, and waits until then for its next try; see delays.py."""
    is_taken: bool = False
    """It stands in its lane no more; only kept while its queue is served by selectors."""
    is_again: bool = False
    """It is not in `Lane.arrived`: it was given back, or stays known while its body may leave."""
    group: str = ""
    """That of its message; see groups.py."""
    is_first_of_group: bool = False
    """Its last dispatch has made its group its consumer's."""
    content: int = 0
    """If not 0: the store has its content once for several queues, under this number."""

    @property
    def address(self) -> str:
        """Of the queue in which it is."""
        return self.lane.queue.destination.address


class Lane:
    __slots__ = (
        "arrived",
        "aside",
        "bodiless",
        "delayed",
        "horizon",
        "horizon_min",
        "is_pinned",
        "key",
        "looks",
        "queue",
        "rank",
        "reading",
        "recent",
        "returned",
        "taken_out",
        "unread",
    )

    def __init__(self, key: bytes, queue: Queue) -> None:
        self.key = key
        """What the store's keys of this lane begin with, see record.py."""
        self.queue = queue
        self.rank = key[-1]
        self.arrived = NO_ENTRIES
        """Not given back in this run, in order of sequence. Whoever appends keeps it so, and says `begin_arrived` to an
        empty one first."""
        self.returned = _NO_PLACES
        """Given back, as a heap by sequence."""
        self.bodiless: dict[int, Entry] = EMPTY
        """Those whose message has to be read before anything can be done with them, by sequence: given back ones, and
        failed ones on their way to the dead-letter queue."""
        self.delayed: dict[int, Entry] = EMPTY
        """Those that wait for their next try while others pass, by sequence; they stand nowhere else."""
        self.horizon = WHOLE
        """The highest sequence up to which this lane is in memory."""
        self.horizon_min = 0
        """The horizon stays above this: a page has brought this message, and it may be anywhere by now."""
        self.unread = 0
        """Messages above the horizon."""
        self.recent = NO_ENTRIES
        """Those of them whose write is under way, or was when the page was asked for that is being read; in order."""
        self.reading: Read | None = None
        """The page that is being read."""
        self.is_pinned = False
        """Nothing leaves memory: a page is being read, and is laid beside what is there."""
        self.looks = 0
        """Other pages of it that are being read, and are nobody's next ones."""
        self.aside: Aside | None = None
        """What was taken out of its turn; where there are consumers with selectors or groups, and where there were as
        long as something is."""
        self.taken_out: dict[int, int] = EMPTY
        """Messages that have left out of their turn, by sequence, and the batch that removes them: pages may still show
        them."""

    def __len__(self) -> int:
        length = len(self.arrived) + len(self.returned) + len(self.delayed) + self.unread
        aside = self.aside
        return length if aside is None else length + len(aside.plucked) - len(aside.tombs) - len(aside.lifted)

    def __iter__(self) -> Iterator[Entry]:
        """Those in memory, in no particular order."""
        aside = self.aside
        if aside is None:
            yield from self.arrived
        else:
            yield from (entry for entry in self.arrived if entry.sequence not in aside.tombs)
        yield from self.again()
        yield from self.delayed.values()

    def again(self) -> Iterator[Entry]:
        """Those in memory that wait and have not just arrived, in no particular order: they may lose their bodies."""
        aside = self.aside
        if aside is None:
            for _, entry in self.returned:
                yield entry
        else:
            yield from (entry for sequence, entry in self.returned if sequence not in aside.lifted)
            yield from aside.plucked.values()

    def head(self) -> Entry | None:
        """The earliest message in memory, ready or not."""
        arrived, returned = self.arrived, self.returned
        if returned and (not arrived or returned[0][0] < arrived[0].sequence):
            return returned[0][1]
        return arrived[0] if arrived else None

    def pop(self) -> Entry:
        """Take the head out."""
        arrived, returned = self.arrived, self.returned
        if returned and (not arrived or returned[0][0] < arrived[0].sequence):
            entry = heappop(returned)[1]
        else:
            entry = arrived.popleft()
        if self.aside is not None:
            self._strip()
        return entry

    def give_back(self, entry: Entry) -> None:
        """Put a message that was dispatched at its place again."""
        sequence = entry.sequence
        entry.is_taken = False
        entry.is_again = True
        aside = self.aside
        if aside is not None and sequence > self.horizon:
            aside.plucked[sequence] = entry
        elif aside is not None and sequence in aside.lifted:
            aside.lifted.discard(sequence)
        else:
            self._push(sequence, entry)
        if entry.message is None:
            self.keep_bodiless(entry)

    def _push(self, sequence: int, entry: Entry) -> None:
        if self.returned is _NO_PLACES:
            self.returned = []
        heappush(self.returned, (sequence, entry))

    def keep_bodiless(self, entry: Entry) -> None:
        """It has to be read before anything can be done with it."""
        if self.bodiless is EMPTY:
            self.bodiless = {}
        self.bodiless[entry.sequence] = entry

    def remember_taken_out(self, sequence: int, batch: int) -> None:
        """A message has left out of its turn; `batch` removes it."""
        if self.taken_out is EMPTY:
            self.taken_out = {}
        self.taken_out[sequence] = batch

    def delay(self, entry: Entry) -> None:
        """It waits for its next try, and others pass it, if not of its group."""
        if self.delayed is EMPTY:
            self.delayed = {}
        self.delayed[entry.sequence] = entry
        if entry.group:
            self.queue.known_groups.delayed(entry)

    def end_delay(self, sequence: int) -> None:
        """If it waited, it does no longer."""
        entry = self.delayed.pop(sequence, None)
        if entry is not None and entry.group:
            self.queue.known_groups.ended_delay(entry)

    def leave_out(self, entry: Entry) -> None:
        """Forget a message that was given back."""
        entry.is_taken = True
        if self.aside is not None:
            self.aside.plucked.pop(entry.sequence, None)
            self.aside.strays.pop(entry.sequence, None)
            self.aside.lifted.discard(entry.sequence)
        self.returned = [(sequence, one) for sequence, one in self.returned if one is not entry]
        heapify(self.returned)

    def take_out(self, entries: list[Entry], batch: int) -> list[Entry]:
        """Take messages out that wait anywhere in the lane; `batch` removes them. Returns those that were recent."""
        gone = {entry.sequence for entry in entries}
        # The store never hears of what it was not told of before this batch.
        for one in entries:
            if one.stored not in (None, batch):
                self.remember_taken_out(one.sequence, batch)
        self._take_from_arrived(gone)
        aside = self.aside
        if aside is not None:
            for entry in entries:
                entry.is_taken = True
                aside.plucked.pop(entry.sequence, None)
            # Who came back stands elsewhere; its empty place goes as well.
            aside.tombs -= gone
            aside.lifted -= gone
        if any(sequence in gone for sequence, _ in self.returned):
            self.returned = [place for place in self.returned if place[0] not in gone]
            heapify(self.returned)
        for sequence in gone:
            self.end_delay(sequence)
            self.bodiless.pop(sequence, None)
        recent = [entry for entry in self.recent if entry.sequence in gone]
        if recent:
            self.recent = deque(entry for entry in self.recent if entry.sequence not in gone) or NO_ENTRIES
        self.unread -= sum(
            sequence > self.horizon and (aside is None or sequence not in aside.strays) for sequence in gone
        )
        self.end_horizon()
        return recent

    def _take_from_arrived(self, gone: set[int]) -> None:
        arrived = self.arrived
        first, last = min(gone), max(gone)
        if not arrived or arrived[0].sequence > last or arrived[-1].sequence < first:
            return
        # Turned until the first of them is in front: what is before and behind them is not looked at.
        at = bisect_left(arrived, first, key=attrgetter("sequence"))
        arrived.rotate(-at)
        kept: list[Entry] = []
        for _ in range(len(arrived) - at):
            if arrived[0].sequence > last:
                break
            entry = arrived.popleft()
            if entry.sequence not in gone:
                kept.append(entry)
        arrived.extendleft(reversed(kept))
        arrived.rotate(at)

    def forget_taken_out(self, committed: int) -> None:
        """This batch is durable: pages that are asked for from now on do not show what it removed."""
        if self.reading is None and not self.looks:
            left = {sequence: batch for sequence, batch in self.taken_out.items() if batch > committed}
            self.taken_out = left or EMPTY

    def clear(self) -> None:
        if self.arrived:
            self.arrived.clear()
        if self.returned:
            self.returned.clear()
        if self.delayed:
            self.delayed.clear()
        self.let_go_of_places()
        if self.aside is not None:
            self._drop_aside()

    # ---- Places ----

    def begin_arrived(self) -> deque[Entry]:
        """For the first message that comes; it stays until somebody finds the lane empty, or memory is short."""
        assert self.arrived is NO_ENTRIES, "it has begun"
        self.queue.memory.places += PLACES_BYTES
        self.arrived = deque()
        return self.arrived

    def end_arrived(self) -> None:
        """Nothing is there any more."""
        self.arrived = NO_ENTRIES
        self.queue.memory.places -= PLACES_BYTES

    def begin_recent(self) -> deque[Entry]:
        self.recent = deque()
        return self.recent

    def let_go_of_places(self) -> None:
        """What holds no message takes no memory either, until one comes."""
        if not self.arrived and self.arrived is not NO_ENTRIES:
            self.end_arrived()
        if not self.returned:
            self.returned = _NO_PLACES
        if not self.bodiless:
            self.bodiless = EMPTY
        if not self.delayed:
            self.delayed = EMPTY
        if not self.taken_out:
            self.taken_out = EMPTY
        if self.aside is not None and self.queue.selecting is None:
            self.end_aside()

    @property
    def has_places(self) -> bool:
        """Memory for messages that are still to come."""
        return self.arrived is not NO_ENTRIES

    @property
    def is_needed(self) -> bool:
        """It has messages, or is being read, or knows something that must not be forgotten yet."""
        aside = self.aside
        return bool(
            self.arrived
            or self.returned
            or self.unread
            or self.delayed
            or self.recent
            or self.bodiless
            or self.taken_out
            or self.looks
            or self.is_pinned
            or self.reading is not None
            or (aside is not None and (aside.strays or aside.plucked or aside.scanning or aside.embodying))
        )

    # ---- Out of turn ----

    def begin_aside(self) -> None:
        """Somebody has a selector, or there are groups."""
        if self.aside is None:
            self.aside = Aside()
            self.queue.memory.queues += ASIDE_BYTES

    def end_aside(self) -> None:
        """Nobody has a selector, and there are no groups; it stays while something is out of its turn."""
        if self.aside is not None and self.aside.is_empty:
            self._drop_aside()

    def _drop_aside(self) -> None:
        self.aside = None
        self.queue.memory.queues -= ASIDE_BYTES

    def lift(self, entry: Entry) -> None:
        """Take a message out that waits in memory, wherever it stands."""
        aside = self.aside
        assert aside is not None, "somebody has a selector"
        entry.is_taken = True
        if entry is self.head():
            self.pop()
            return
        sequence = entry.sequence
        if aside.plucked.pop(sequence, None) is None:
            if entry.is_again:
                aside.lifted = with_sequence(aside.lifted, sequence)
            else:
                aside.tombs = with_sequence(aside.tombs, sequence)
            self._strip()
        aside.strays[sequence] = entry
        self.bodiless.pop(sequence, None)

    def pluck(self, entry: Entry) -> None:
        """Have a message in memory that is above the horizon."""
        assert self.aside is not None, "somebody has a selector"
        self.aside.strays[entry.sequence] = self.aside.plucked[entry.sequence] = entry
        entry.is_again = True
        self.unread -= 1

    def keep_above(self) -> None:
        """Move the horizon below the last message in memory, and have that in memory all the same."""
        entry = self.lower_horizon()
        self.pluck(entry)

    def end_horizon(self) -> None:
        """To be called when messages above the horizon have left: if there are none it is nowhere."""
        if not self.unread:
            if self.aside is not None and self.horizon != WHOLE:
                self.aside.rises += 1
            self.horizon = WHOLE
        if self.aside is not None:
            self._strip()
            self.stand_again()

    def stand_again(self) -> None:
        """The horizon has moved: what was taken out of its turn and waits stands on its other side."""
        aside = self.aside
        assert aside is not None, "somebody has a selector"
        if aside.plucked and min(aside.plucked) <= self.horizon:
            for sequence in [sequence for sequence in aside.plucked if sequence <= self.horizon]:
                self._push(sequence, aside.plucked.pop(sequence))
        if self.horizon != WHOLE and any(sequence > self.horizon for sequence, _ in self.returned):
            above = [place for place in self.returned if place[0] > self.horizon]
            aside.plucked.update(place for place in above if place[0] not in aside.lifted)
            aside.lifted.difference_update(sequence for sequence, _ in above)
            self.returned = [place for place in self.returned if place[0] <= self.horizon]
            heapify(self.returned)

    def _strip(self) -> None:
        """Let both ends of what is in memory be no empty places."""
        aside = self.aside
        assert aside is not None, "somebody has a selector"
        tombs, lifted = aside.tombs, aside.lifted
        arrived, returned = self.arrived, self.returned
        while tombs and arrived and arrived[0].sequence in tombs:
            tombs.discard(arrived.popleft().sequence)
        while tombs and arrived and arrived[-1].sequence in tombs:
            tombs.discard(arrived.pop().sequence)
        while lifted and returned and returned[0][0] in lifted:
            lifted.discard(heappop(returned)[0])

    # ---- The horizon ----

    @property
    def needs_page(self) -> bool:
        """There are messages that only the store has."""
        return self.unread > len(self.recent)

    def fix_horizon(self) -> None:
        """What is in memory stays known there; its bodies can leave."""
        for entry in self.arrived:
            if self.aside is None or entry.sequence not in self.aside.tombs:
                entry.is_again = True
                self._push(entry.sequence, entry)
        if self.arrived:
            self.arrived.clear()
            self.let_go_of_places()
        if self.aside is not None:
            self.aside.tombs.clear()

    def lower_horizon(self) -> Entry:
        """Move the last message in memory above the horizon; whoever asked for a page must ask again."""
        entry = self.arrived.pop()
        self.horizon = entry.sequence - 1
        self.unread += 1
        self.reading = None
        if self.aside is not None:
            self._strip()
        return entry

    def has_plucked_before(self, sequence: int) -> bool:
        """A selector keeps something in memory that stands above the horizon, and before this."""
        return self.aside is not None and any(each < sequence for each in self.aside.plucked)

    def take_in_recent(self) -> None:
        """Nothing above the horizon has left memory: the lane is whole again."""
        if self.arrived is NO_ENTRIES:
            self.begin_arrived()
        self.arrived.extend(self.recent)
        self.recent = NO_ENTRIES
        self.unread = 0
        self.end_horizon()
        self.reading = None

    def take_in(self, page: list[Entry], left_out: int, up_to: int, as_of: int) -> tuple[list[Entry], list[Entry]]:
        """Move the horizon up to sequence `up_to`, WHOLE at the lane's end; `page` is what the store had between the
        two when batch `as_of` was the last, `left_out` how many of it do not belong into the lane.

        Returns what was recent up to there: what is in the page as well, and what is not and has come into the lane.
        """
        in_page: list[Entry] = []
        not_in_page: list[Entry] = []
        while self.recent and self.recent[0].sequence <= up_to:
            entry = self.recent.popleft()
            (in_page if is_stored(entry, as_of) else not_in_page).append(entry)
        # Nothing of what was written meanwhile may be left behind: it is below the horizon now.
        come = merge(page, not_in_page, key=attrgetter("sequence")) if not_in_page else page
        if page or not_in_page:
            if self.arrived is NO_ENTRIES:
                self.begin_arrived()
            self.arrived.extend(come)
        self.unread -= len(page) + len(not_in_page) + left_out
        self.horizon = up_to
        if self.aside is not None:
            self.aside.rises += 1
            self.end_horizon()
        return in_page, not_in_page

    def let_go(self, committed: int) -> list[Entry]:
        """What no longer has to be in memory, now that this batch is durable; not while a page is being read."""
        if self.reading is not None or self.is_pinned or (self.aside is not None and self.aside.scanning):
            # It may have been read before the batch was written.
            return []
        gone = [entry for entry in self.recent if is_stored(entry, committed)]
        if len(gone) == len(self.recent):
            self.recent = NO_ENTRIES
        elif gone:
            self.recent = deque(entry for entry in self.recent if not is_stored(entry, committed))
        return gone


def is_stored(entry: Entry, as_of: int) -> bool:
    """The store had it when this batch was the last."""
    return entry.stored is not None and entry.stored <= as_of
