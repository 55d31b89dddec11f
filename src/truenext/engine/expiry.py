"""Expired messages are removed wherever they are, whether or not anybody comes upon them.

    a message with an expiry is accepted   -> `accepted`    -> a timer for its block, at the next whole second
    the timer is due                       -> `step`        -> what has expired of the block and is in memory goes at
                                                               once; for the rest the block becomes a Look, a page
    the page is there                      -> `page_read`   -> what has expired on it, and is not in memory, goes

What is above a lane's horizon goes without coming into memory, and the lane's own reading knows nothing of it. A page
that was read before that is durable still shows it: until no such page can come any more, the lane remembers
(`Lane.expired`).

What a consumer or an open transaction has is left to it, and the block is looked at again in a while.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from heapq import heapify
from operator import attrgetter
from typing import TYPE_CHECKING

from truenext.engine.lane import WHOLE, Entry, Lane
from truenext.engine.paging import Read
from truenext.limits import GATHERING_BYTES_MAX, PAGE_BYTES
from truenext.record import BLOCK_BITS, split_timer, timer

if TYPE_CHECKING:
    from collections.abc import Callable

    from truenext.batch import Batch
    from truenext.engine.paging import Found, PageRead, Paging
    from truenext.engine.timers import Timers
    from truenext.message import Message

ROUND_MS = 1000
"""Timers of expiry are due at multiples of it: many messages share one."""

AGAIN_MS = 60_000
"""After that time a block is looked at again in which somebody held something."""

STEP_MAX = 1000
"""Expired messages, about, that one step takes out of memory."""

DUE_MAX = 2**64 - ROUND_MS

BLOCK = 1 << BLOCK_BITS


class Look(Read):
    """A page of a block that was due. It is nobody's next page."""

    __slots__ = ("timer", "until")

    def __init__(self, lane: Lane, after_sequence: int, until: int, timer: bytes) -> None:
        super().__init__(lane, after_sequence, lane.queue.policy.page_size, PAGE_BYTES)
        self.until = until
        """The first sequence that is not in the block."""
        self.timer = timer


class Expiry:
    def __init__(
        self,
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
        self._timers = timers
        self._paging = paging
        self._lane_of = lane_of
        self._is_held = is_held
        self._expire = expire
        self._is_stopped = False
        self._look: Look | None = None
        """One at a time."""
        self._is_wanted = False
        """It has not been handed out yet."""
        self._waiting: list[bytes] = []
        """Timers that were due when something that has expired was not visible yet; the next commit changes that."""
        self._remembering: dict[Lane, None] = {}
        """Lanes with something in `expired`."""

    def accepted(self, lane: Lane, sequence: int, expires_ms: int, batch: Batch) -> None:
        due_ms = min(-(-expires_ms // ROUND_MS) * ROUND_MS, DUE_MAX)
        self._timers.set(timer(due_ms, lane.key, sequence), batch)

    def stop(self) -> None:
        """Nothing expires any more: what waits is being written down."""
        self._is_stopped = True

    # ---- What is due ----

    def is_due(self, now_ms: int, batch: Batch) -> bool:
        """A step would do something."""
        if self._is_stopped or self._look is not None or batch.size >= GATHERING_BYTES_MAX:
            return False
        due_ms = self._timers.next_due_ms
        return due_ms is not None and due_ms <= now_ms

    def step(self, now_ms: int, committed: int, batch: Batch) -> None:
        """Go on with what is due, until something has to be read or enough was removed for now."""
        left = STEP_MAX
        while left > 0 and self.is_due(now_ms, batch):
            due = self._timers.take(now_ms)
            assert due is not None, "one is due"
            _, lane_key, first = split_timer(due)
            lane = self._lane_of(lane_key)
            if lane is None:
                self._timers.clear(due, batch)
                continue
            until = first + BLOCK
            left -= 1 + self._take_from_memory(lane, first, until, now_ms, committed, batch)
            if any(first <= sequence < until for sequence in lane.bodiless):
                self._read(Look(lane, max(first - 1, 0), until, due))
            elif lane.needs_page and lane.horizon < until - 1:
                self._read(Look(lane, max(first - 1, lane.horizon), until, due))
            else:
                self._finish(lane, first, due, now_ms, committed, batch)

    def wanted(self) -> list[Read]:
        """What is to be read from the store; `page_read` takes it."""
        is_wanted, self._is_wanted = self._is_wanted, False
        return [self._look] if is_wanted and self._look is not None else []

    def page_read(self, look: Look, page: PageRead, now_ms: int, committed: int, batch: Batch) -> None:
        """Take out what has expired on a page that names no batch later than `committed`."""
        if self._is_stopped:
            return
        lane, until = look.lane, look.until
        _, _, first = split_timer(look.timer)
        # What came into memory meanwhile is not above the horizon any more.
        self._take_from_memory(lane, first, until, now_ms, committed, batch)
        in_memory = {entry.sequence for entry in lane.recent}
        for found in page.found:
            if found.sequence >= until:
                break
            is_known = found.sequence in lane.expired or found.sequence in in_memory
            if not is_known and is_expired(found.message, now_ms):
                self._take_found(lane, found, batch)
        self._look = None
        last = page.found[-1].sequence if page.found else WHOLE
        if page.is_end or last >= until - 1:
            self._finish(lane, first, look.timer, now_ms, committed, batch)
        else:
            self._read(Look(lane, last, until, look.timer))
        self.shown(lane, page.as_of)

    def _read(self, look: Look) -> None:
        self._look = look
        self._is_wanted = True

    def _finish(self, lane: Lane, first: int, due: bytes, now_ms: int, committed: int, batch: Batch) -> None:
        until = first + BLOCK
        in_memory = [*_block(lane, first, until), *(one for one in lane.recent if first <= one.sequence < until)]
        if any(one.batch > committed and is_expired(one.message, now_ms) for one in in_memory):
            self._waiting.append(due)
            return
        if self._is_held(lane, first, until):
            again_ms = -(-(now_ms + AGAIN_MS) // ROUND_MS) * ROUND_MS
            self._timers.set(timer(again_ms, lane.key, first), batch)
        self._timers.clear(due, batch)

    # ---- Taking out ----

    def _take_from_memory(self, lane: Lane, first: int, until: int, now_ms: int, committed: int, batch: Batch) -> int:
        """Of this block; what is not visible yet stays. How many they were."""

        def is_over(entry: Entry) -> bool:
            return first <= entry.sequence < until and entry.batch <= committed and is_expired(entry.message, now_ms)

        over: list[Entry] = []
        arrived = lane.arrived
        if arrived and arrived[0].sequence < until and arrived[-1].sequence >= first:
            # Turned until the block is in front.
            at = bisect_left(arrived, first, key=attrgetter("sequence"))
            arrived.rotate(-at)
            kept: list[Entry] = []
            for _ in range(len(arrived) - at):
                if arrived[0].sequence >= until:
                    break
                entry = arrived.popleft()
                (over if is_over(entry) else kept).append(entry)
            arrived.extendleft(reversed(kept))
            arrived.rotate(at)
        returned = [entry for _, entry in lane.returned if is_over(entry)]
        if returned:
            _leave_out(lane, returned)
        recent = [entry for entry in lane.recent if is_over(entry)]
        if recent:
            gone = {entry.sequence for entry in recent}
            lane.recent = deque(entry for entry in lane.recent if entry.sequence not in gone)
            self._paging.left_recent(recent)
            self._left_unread(lane, len(recent))
        for entry in (*over, *returned, *recent):
            self._gone(entry, batch)
        return len(over) + len(returned) + len(recent)

    def _take_found(self, lane: Lane, found: Found, batch: Batch) -> None:
        """One that only the store has; what is in memory, held, or gone already stays as it is."""
        assert found.message is not None, "it is known to be over"
        if found.sequence > lane.horizon:
            entry = self._paging.entry(lane, found, found.message)
            self._left_unread(lane, 1)
        elif found.sequence in lane.bodiless:
            entry = lane.bodiless[found.sequence]
            if not any(one is entry for _, one in lane.returned):
                # On its way to the dead-letter queue.
                return
            del lane.bodiless[found.sequence]
            _leave_out(lane, [entry])
            entry.message = found.message
            self._paging.came(entry, found.message)
        else:
            return
        self._gone(entry, batch)

    def _left_unread(self, lane: Lane, count: int) -> None:
        lane.unread -= count
        if not lane.unread:
            lane.horizon = WHOLE

    def _gone(self, entry: Entry, batch: Batch) -> None:
        if entry.stored is not None and entry.stored != batch.number:
            entry.lane.expired[entry.sequence] = batch.number
            self._remembering[entry.lane] = None
        self._expire(entry)

    # ---- What need not be remembered any more ----

    def committed(self, batch: int) -> None:
        """This batch is durable."""
        for lane in list(self._remembering):
            if lane.reading is None and (self._look is None or self._look.lane is not lane):
                self.shown(lane, batch)
        waiting, self._waiting = self._waiting, []
        for due in waiting:
            self._timers.put_back(due)

    def shown(self, lane: Lane, as_of: int) -> None:
        """No page of the lane will come that does not show this batch."""
        if lane.expired:
            lane.expired = {sequence: batch for sequence, batch in lane.expired.items() if batch > as_of}
        if not lane.expired:
            self._remembering.pop(lane, None)


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
    return found


def _leave_out(lane: Lane, entries: list[Entry]) -> None:
    """Forget messages that were given back."""
    gone = {entry.sequence for entry in entries}
    lane.returned = [(sequence, one) for sequence, one in lane.returned if sequence not in gone]
    heapify(lane.returned)
