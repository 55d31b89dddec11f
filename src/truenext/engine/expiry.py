"""Expired messages are removed wherever they are, whether or not anybody comes upon them.

    a message with an expiry is accepted   -> `accepted`    -> a timer for its block, at the next whole second
    the timer is due                       -> `step`        -> what has expired of the block and is in memory goes at
                                                               once; for the rest the block becomes a Look, a page
    the page is there                      -> `page_read`   -> what has expired on it, and is not in memory, goes

What is above a lane's horizon goes without coming into memory, and the lane's own reading knows nothing of it. A page
that was read before that is durable still shows it: until no such page can come any more, the lane remembers
(`Lane.taken_out`).

What a consumer or an open transaction has is left to it, and the block is looked at again in a while.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter
from typing import TYPE_CHECKING

from truenext.engine.lane import WHOLE, Entry, Lane
from truenext.engine.paging import Look
from truenext.limits import PAGE_BYTES
from truenext.record import BLOCK_BITS, split_timer, timer

if TYPE_CHECKING:
    from collections.abc import Callable

    from truenext.engine.ledger import Ledger
    from truenext.engine.paging import Found, PageRead, Paging
    from truenext.engine.timers import Timers
    from truenext.message import Message

ROUND_MS = 1000
"""Timers of expiry are due at multiples of it: many messages share one."""

AGAIN_MS = 60_000
"""After that time a block is looked at again in which somebody held something."""

STEP_MAX = 1000
"""Expired messages, about, that one step takes out of memory."""

DUE_MAX = (2**63 - 1) // ROUND_MS * ROUND_MS

BLOCK = 1 << BLOCK_BITS


class BlockLook(Look):
    """A page of a block that was due."""

    __slots__ = ("again_ms", "is_early", "timer", "until")

    def __init__(
        self, lane: Lane, after_sequence: int, until: int, timer: bytes, again_ms: int, *, is_early: bool
    ) -> None:
        super().__init__(lane, after_sequence, lane.queue.policy.page_size, PAGE_BYTES)
        self.until = until
        """The first sequence that is not in the block."""
        self.timer = timer
        self.again_ms = again_ms
        """When it is to be looked at again, for somebody had something of it when it was due; 0 is never. It may come
        back behind what was looked at."""
        self.is_early = is_early
        """Something of it was over and not visible yet when it was due. Meanwhile it may have become visible, and left
        memory, without the page showing it."""


class Expiry:
    def __init__(
        self,
        ledger: Ledger,
        timers: Timers,
        paging: Paging,
        *,
        lane_of: Callable[[bytes], Lane | None],
        is_held: Callable[[Lane, int, int], bool],
        expire: Callable[[Entry], object],
    ) -> None:
        """`lane_of` knows lanes by their keys; `is_held` whether somebody has a message of a lane with a sequence from
        the one on and before the other; `expire` is told of each message that was taken out of its lane.
        """
        self._ledger = ledger
        self._timers = timers
        self._paging = paging
        self._lane_of = lane_of
        self._is_held = is_held
        self._expire = expire
        self._look: BlockLook | None = None
        """One at a time."""
        self.is_wanted = False
        """It has not been handed out yet."""
        self._waiting: list[bytes] = []
        """Timers that were due when something that has expired was not visible yet; the next commit changes that."""

    def accepted(self, lane: Lane, sequence: int, expires_ms: int) -> None:
        due_ms = min(-(-expires_ms // ROUND_MS) * ROUND_MS, DUE_MAX)
        self._timers.set(timer(due_ms, lane.key, sequence))

    # ---- What is due ----

    def is_due(self) -> bool:
        """A step would do something."""
        if self._ledger.is_stopped or self._look is not None or self._ledger.is_full:
            return False
        due_ms = self._timers.next_due_ms
        return due_ms is not None and due_ms <= self._ledger.now_ms

    def step(self) -> None:
        """Go on with what is due, until something has to be read or enough was removed for now."""
        left = STEP_MAX
        while left > 0 and self.is_due():
            due = self._timers.take()
            assert due is not None, "one is due"
            _, lane_key, first = split_timer(due)
            lane = self._lane_of(lane_key)
            if lane is None:
                self._timers.clear(due)
                continue
            until = first + BLOCK
            left -= 1 + self._take_from_memory(lane, first, until)
            again_ms = (
                -(-(self._ledger.now_ms + AGAIN_MS) // ROUND_MS) * ROUND_MS if self._is_held(lane, first, until) else 0
            )
            is_early = self._is_early(lane, first, until)
            if any(first <= sequence < until for sequence in _bodiless(lane)):
                self._read(BlockLook(lane, max(first - 1, 0), until, due, again_ms, is_early=is_early))
            elif lane.needs_page and lane.horizon < until - 1:
                self._read(BlockLook(lane, max(first - 1, lane.horizon), until, due, again_ms, is_early=is_early))
            else:
                self._finish(lane, due, again_ms)

    def _again_ms(self) -> int:
        return -(-(self._ledger.now_ms + AGAIN_MS) // ROUND_MS) * ROUND_MS

    def wanted(self) -> list[Look]:
        """What is to be read from the store; `page_read` takes it."""
        is_wanted, self.is_wanted = self.is_wanted, False
        return [self._look] if is_wanted and self._look is not None else []

    def page_read(self, look: BlockLook, page: PageRead) -> None:
        """Take out what has expired on a page that names no batch that is not known to be durable."""
        lane, until = look.lane, look.until
        if self._lane_of(lane.key) is not lane:
            # It ended meanwhile, with its queue.
            self._look = None
            self._timers.clear(look.timer)
            return
        _, _, first = split_timer(look.timer)
        # What came into memory meanwhile is not above the horizon any more.
        self._take_from_memory(lane, first, until)
        in_memory = {entry.sequence for entry in lane.recent}
        over: list[Entry] = []
        for found in page.found:
            if found.sequence >= until:
                break
            is_known = found.sequence in lane.taken_out or found.sequence in in_memory
            if not is_known and is_expired(found.message, self._ledger.now_ms):
                over += self._entry_of(lane, found)
        self._take_out(lane, over)
        self._look = None
        last = page.found[-1].sequence if page.found else WHOLE
        if page.is_end or last >= until - 1:
            if look.is_early and not self._is_early(lane, first, until):
                self._timers.put_back(look.timer)
            else:
                self._finish(lane, look.timer, look.again_ms)
        else:
            self._read(BlockLook(lane, last, until, look.timer, look.again_ms, is_early=look.is_early))

    def _read(self, look: BlockLook) -> None:
        self._look = look
        self.is_wanted = True

    def _finish(self, lane: Lane, due: bytes, again_ms: int) -> None:
        _, _, first = split_timer(due)
        if self._is_early(lane, first, first + BLOCK):
            self._waiting.append(due)
            return
        if again_ms:
            self._timers.set(timer(again_ms, lane.key, first))
        self._timers.clear(due)

    # ---- Taking out ----

    def _take_from_memory(self, lane: Lane, first: int, until: int) -> int:
        """Of this block; what is not visible yet stays. How many they were."""
        committed, now_ms = self._ledger.committed, self._ledger.now_ms

        def is_over(entry: Entry) -> bool:
            return first <= entry.sequence < until and entry.batch <= committed and is_expired(entry.message, now_ms)

        waiting = [
            *_block(lane, first, until),
            *lane.again(),
            *lane.delayed.values(),
            *lane.recent,
        ]
        over = [entry for entry in waiting if is_over(entry)]
        self._take_out(lane, over)
        return len(over)

    def _entry_of(self, lane: Lane, found: Found) -> list[Entry]:
        """Of a message that only the store has; none of what is in memory, held, or gone already."""
        assert found.message is not None, "it is known to be over"
        if found.sequence > lane.horizon and (lane.aside is None or found.sequence not in lane.aside.strays):
            return [self._paging.entry(lane, found, found.message)]
        entry = lane.delayed.get(found.sequence) or lane.bodiless.get(found.sequence)
        if entry is None or entry.message is not None or self._paging.is_doomed(entry):
            return []
        entry.message = found.message
        self._paging.came(entry, found.message)
        return [entry]

    def _take_out(self, lane: Lane, over: list[Entry]) -> None:
        if over:
            self._paging.take_out(lane, over)
            for entry in over:
                self._expire(entry)

    def _is_early(self, lane: Lane, first: int, until: int) -> bool:
        """Something of a block is over, and not visible yet."""
        committed, now_ms = self._ledger.committed, self._ledger.now_ms
        others = (*lane.recent, *lane.again()) if lane.aside is not None else lane.recent
        in_memory = [*_block(lane, first, until), *(one for one in others if first <= one.sequence < until)]
        return any(one.batch > committed and is_expired(one.message, now_ms) for one in in_memory)

    # ---- What was not visible ----

    def committed(self) -> None:
        """A batch is durable."""
        waiting, self._waiting = self._waiting, []
        for due in waiting:
            self._timers.put_back(due)


def is_expired(message: Message | None, now_ms: int) -> bool:
    """Its time is known to have come."""
    return message is not None and 0 < message.expires_ms <= now_ms


def _block(lane: Lane, first: int, until: int) -> list[Entry]:
    """What has arrived of a block."""
    arrived = lane.arrived
    at = bisect_left(arrived, first, key=attrgetter("sequence"))
    found = []
    while at < len(arrived) and arrived[at].sequence < until:
        found.append(arrived[at])
        at += 1
    if lane.aside is not None:
        return [entry for entry in found if entry.sequence not in lane.aside.tombs]
    return found


def _bodiless(lane: Lane) -> list[int]:
    """Messages of a lane that are not above its horizon and have to be read before anything can be known of them."""
    return [*lane.bodiless, *(entry.sequence for entry in lane.delayed.values() if entry.message is None)]
