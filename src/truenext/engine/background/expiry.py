"""Expired messages are removed wherever they are, whether or not anybody comes upon them.

    a message with an expiry is accepted   -> arrivals.py   -> a timer for its block, at the next whole second
    the timer is due                       -> `step`        -> what has expired of the block and is in memory goes at
                                                               once; for the rest the block becomes a Look, a page
    the page is there                      -> `page_read`   -> what has expired on it, and is not in memory, goes

What is above a lane's horizon goes without coming into memory, and the lane's own reading knows nothing of it. A page
that was read before that is durable still shows it: until no such page can come any more, the lane remembers
(`Lane.removed`).

What a consumer or an open transaction has does not expire; its block is looked at again after a minute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from truenext.engine.lifecycle.arrivals import EXPIRY_ROUND_MS
from truenext.engine.state.pages import Look, PageRead
from truenext.engine.state.queue import WHOLE, Entry, Lane, is_expired
from truenext.engine.writing.background_task import BackgroundTask
from truenext.limits import PAGE_BYTES
from truenext.record import BLOCK_BITS, split_timer, timer

if TYPE_CHECKING:
    from truenext.engine.lifecycle.outcomes import Outcomes
    from truenext.engine.memory.reading import Reading
    from truenext.engine.memory.resident_set import ResidentSet
    from truenext.engine.memory.timers import Timers
    from truenext.engine.queues.queues import Queues
    from truenext.engine.state.clients import Clients
    from truenext.engine.state.pages import Found
    from truenext.engine.writing.ledger import Ledger

AGAIN_MS = 60_000
"""After that time a block is looked at again in which somebody held something."""

STEP_MAX = 1000
"""Expired messages, about, that one step takes out of memory."""

BLOCK = 1 << BLOCK_BITS


class BlockLook(Look):
    """A page of a block that was due."""

    __slots__ = ("_expiry", "again_ms", "is_early", "timer", "until")

    def __init__(
        self,
        expiry: Expiry,
        lane: Lane,
        after_sequence: int,
        until: int,
        timer: bytes,
        again_ms: int,
        *,
        is_early: bool,
    ) -> None:
        super().__init__(lane, after_sequence, lane.queue.policy.page_size, PAGE_BYTES)
        self._expiry = expiry
        self.until = until
        """The first sequence that is not in the block."""
        self.timer = timer
        self.again_ms = again_ms
        """When it is to be looked at again, for somebody had something of it when it was due; 0 is never. It may come
        back behind what was looked at."""
        self.is_early = is_early
        """Something of it was over and not visible yet when it was due. Meanwhile it may have become visible, and left
        memory, without the page showing it."""

    def on_page(self, page: PageRead) -> None:
        self._expiry.page_read(self, page)


class Expiry(BackgroundTask):
    def __init__(
        self,
        ledger: Ledger,
        timers: Timers,
        clients: Clients,
        resident: ResidentSet,
        reading: Reading,
        queues: Queues,
        outcomes: Outcomes,
    ) -> None:
        self._ledger = ledger
        self._timers = timers
        self._clients = clients
        self._resident = resident
        self._reading = reading
        self._queues = queues
        self._outcomes = outcomes
        self._look: BlockLook | None = None
        """One at a time."""
        self._wanted: BlockLook | None = None
        """It has not been handed out yet."""
        self._waiting: list[bytes] = []
        """Timers that were due when something that has expired was not visible yet; the next commit changes that."""

    # ---- What is due ----

    @property
    def source(self) -> object:
        return self._timers

    @property
    def has_any(self) -> bool:
        return bool(self._timers.in_memory) or self._wanted is not None

    def is_due(self) -> bool:
        if self._wanted is not None:
            return True
        if self._look is not None or self._ledger.is_full:
            return False
        due_ms = self._timers.next_due_ms
        return due_ms is not None and due_ms <= self._ledger.now_ms

    def next_due_ms(self) -> int | None:
        due_ms = self._timers.next_due_ms
        # If one is due and nothing is done, something else has to happen before.
        return due_ms if due_ms is not None and due_ms > self._ledger.now_ms else None

    def step(self) -> list[BlockLook]:
        """Go on with what is due, until something has to be read or enough was removed for now."""
        self._take_due()
        wanted, self._wanted = self._wanted, None
        return [] if wanted is None else [wanted]

    def _take_due(self) -> None:
        left = STEP_MAX
        while left > 0 and self._wanted is None and self.is_due():
            due = self._timers.take()
            assert due is not None, "one is due"
            _, lane_key, first = split_timer(due)
            lane = self._queues.lane_of(lane_key)
            if lane is None:
                self._timers.clear(due)
                continue
            until = first + BLOCK
            left -= 1 + self._take_from_memory(lane, first, until)
            again_ms = 0
            if self._is_held(lane, first, until):
                again_ms = -(-(self._ledger.now_ms + AGAIN_MS) // EXPIRY_ROUND_MS) * EXPIRY_ROUND_MS
            is_early = self._is_early(lane, first, until)
            if any(first <= sequence < until for sequence in _bodiless(lane)):
                self._read(BlockLook(self, lane, max(first - 1, 0), until, due, again_ms, is_early=is_early))
            elif lane.needs_page and lane.horizon < until - 1:
                self._read(BlockLook(self, lane, max(first - 1, lane.horizon), until, due, again_ms, is_early=is_early))
            else:
                self._finish(lane, due, again_ms)

    def page_read(self, look: BlockLook, page: PageRead) -> None:
        """Take out what has expired on a page that names no batch that is not known to be durable."""
        lane, until = look.lane, look.until
        if self._queues.lane_of(lane.key) is not lane:
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
            is_known = found.sequence in lane.removed or found.sequence in in_memory
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
            self._read(BlockLook(self, lane, last, until, look.timer, look.again_ms, is_early=look.is_early))

    def _read(self, look: BlockLook) -> None:
        self._look = self._wanted = look
        self._ledger.busy[self._timers] = None

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
            return entry.batch <= committed and is_expired(entry.message, now_ms)

        over = [entry for entry in lane.between(first - 1, until - 1) if is_over(entry)]
        self._take_out(lane, over)
        return len(over)

    def _entry_of(self, lane: Lane, found: Found) -> list[Entry]:
        """Of a message that only the store has; none of what is in memory, held, or gone already."""
        assert found.message is not None, "it is known to be over"
        if found.sequence > lane.horizon and (
            lane.out_of_turn is None or found.sequence not in lane.out_of_turn.strays
        ):
            return [self._reading.entry(lane, found, found.message)]
        entry = lane.delayed.get(found.sequence) or lane.bodiless.get(found.sequence)
        if entry is None or entry.message is not None or self._resident.awaits_dead_letter(entry):
            return []
        entry.message = found.message
        self._resident.entered_memory(entry, found.message)
        self._resident.causes_back_from_disk(entry, found.causes)
        return [entry]

    def _take_out(self, lane: Lane, over: list[Entry]) -> None:
        if over:
            self._resident.remove_from_lane(lane, over)
            for entry in over:
                self._outcomes.expire(entry)
                # Whoever waited for it to be read or to be committed waits no longer.
                self._ledger.touched[lane.queue] = None

    def _is_early(self, lane: Lane, first: int, until: int) -> bool:
        """Something of a block is over, and not visible yet."""
        committed, now_ms = self._ledger.committed, self._ledger.now_ms
        in_memory = lane.between(first - 1, until - 1, with_delayed=False)
        return any(one.batch > committed and is_expired(one.message, now_ms) for one in in_memory)

    def _is_held(self, lane: Lane, first: int, until: int) -> bool:
        """Somebody has a message of a block that may have expired."""
        now_ms = self._ledger.now_ms
        return any(
            entry.lane is lane and (entry.message is None or is_expired(entry.message, now_ms))
            for entry in self._clients.taken_of(lane.queue, first, until)
        )

    # ---- What was not visible ----

    def committed(self) -> None:
        """A batch is durable."""
        waiting, self._waiting = self._waiting, []
        for due in waiting:
            self._timers.put_back(due)


def _bodiless(lane: Lane) -> list[int]:
    """Messages of a lane that are not above its horizon and have to be read before anything can be known of them."""
    return [*lane.bodiless, *(entry.sequence for entry in lane.delayed.values() if entry.message is None)]
