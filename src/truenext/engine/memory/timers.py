"""Which timers are due, of any number of them in bounded memory.

A timer (record.py) says at what time which block of which lane is to be looked at. All of them are in the store, or on
their way to it; the first ones are in memory as well, up to a horizon:

    in memory, in order -----> horizon <----- in the store, or being written (`_unstored_batches`)

When those in memory become few, the next page is read. As with lanes, a page names the batch up to which it is true,
and what was set meanwhile below the new horizon comes into memory in the same step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

from truenext.engine.writing.commit_state import CommitState
from truenext.model.record import TIMER_SIZE, split_timer

TIMERS_MAX = 4000
"""Timers in memory: of more than these the last half leaves."""

PAGE_SIZE = 1000
"""Timers read at a time, when fewer than half of them are left."""

BEYOND_ALL_TIMERS = b"\xff" * (TIMER_SIZE + 1)
"""Behind every timer."""


class TimerRead(NamedTuple):
    """A page of timers that is wanted."""

    after: bytes
    limit: int


class TimersResult(NamedTuple):
    """What was there."""

    timers: list[bytes]
    """In order."""
    as_of: int
    """Every batch up to this one is in it; what later ones set may be missing."""
    is_end: bool
    """As of then, there were none behind these."""


class Timers:
    """To begin with, nothing is known but that there may be timers in the store."""

    def __init__(self, commit_state: CommitState, *, first: bytes = b"", end: bytes = BEYOND_ALL_TIMERS) -> None:
        """These are all timers behind `first` and before `end`."""
        self._commit_state = commit_state
        self._end = end
        self.in_memory: list[bytes] = []
        """In order, each once; those that were taken as due are not among them. For this module to change."""
        self._horizon = first
        """Every timer up to here is in memory, or was taken."""
        self._unstored_batches: dict[bytes, int] = {}
        """Those that were set and need not be in the store yet, and the batch that sets them."""
        self._reading: TimerRead | None = None

    @property
    def next_due_ms(self) -> int | None:
        """Milliseconds since the epoch; None if that is not known, or there are none."""
        return split_timer(self.in_memory[0])[0] if self.in_memory else None

    @property
    def first(self) -> bytes | None:
        """None if that is not known, or there are none."""
        return self.in_memory[0] if self.in_memory else None

    def set(self, timer: bytes) -> None:
        """It is in force at once, and durable with the gathering batch. Costs little if it is set already."""
        if timer in self._unstored_batches:
            return
        if timer <= self._horizon:
            if self._is_in_memory(timer):
                return
            insort(self.in_memory, timer)
            self._commit_state.active_work[self] = None
            if len(self.in_memory) > TIMERS_MAX:
                self._lower_horizon()
        batch = self._commit_state.batch
        self._unstored_batches[timer] = batch.number
        batch.timers[timer] = None
        batch.size += TIMER_SIZE

    def pop_due(self) -> bytes | None:
        """The first timer that is due, which is no longer in memory; it is to be cleared once it is obeyed."""
        if not self.in_memory or split_timer(self.in_memory[0])[0] > self._commit_state.now_ms:
            return None
        timer = self.in_memory.pop(0)
        # Whoever sets it from now on wants it to be obeyed again.
        self._unstored_batches.pop(timer, None)
        return timer

    def pop_first(self) -> None:
        """The first one was obeyed, and is gone with the gathering batch."""
        timer = self.in_memory.pop(0)
        self._unstored_batches.pop(timer, None)
        self.clear_unless_set_again(timer)

    def remove(self, timer: bytes) -> None:
        """It is not to be obeyed any more, and gone with the gathering batch. A page that is being read may bring it
        back."""
        if self._is_in_memory(timer):
            del self.in_memory[bisect_left(self.in_memory, timer)]
        self._unstored_batches.pop(timer, None)
        self.clear_unless_set_again(timer)

    def put_back(self, timer: bytes) -> None:
        """It could not be obeyed yet, and is due still."""
        # The batch that sets it need not be durable: a page that is read before that does not show it.
        self._unstored_batches[timer] = self._commit_state.batch.number
        if timer <= self._horizon and not self._is_in_memory(timer):
            insort(self.in_memory, timer)
        self._commit_state.active_work[self] = None

    def clear_unless_set_again(self, timer: bytes) -> None:
        """It was obeyed, and is gone with the gathering batch, unless it has been set again since it was taken."""
        if timer not in self._unstored_batches and not self._is_in_memory(timer):
            batch = self._commit_state.batch
            batch.cleared_timers.append(timer)
            batch.timers.pop(timer, None)
            batch.size += TIMER_SIZE

    # ---- Reading ----

    def next_read(self) -> TimerRead | None:
        """The page that is to be read now; `on_page_read` takes it."""
        if self._reading is not None or self._horizon == BEYOND_ALL_TIMERS or len(self.in_memory) >= PAGE_SIZE // 2:
            return None
        self._reading = TimerRead(self._horizon, PAGE_SIZE)
        return self._reading

    def on_page_read(self, read: TimerRead, page: TimersResult) -> None:
        if self._reading is not read:
            # Meanwhile the horizon has moved down.
            return
        self._reading = None
        timers = page.timers[: bisect_left(page.timers, self._end)]
        up_to = BEYOND_ALL_TIMERS if page.is_end or len(timers) < len(page.timers) else timers[-1]
        recent = {timer for timer in self._unstored_batches if self._horizon < timer <= up_to}
        self.in_memory += sorted(recent.union(timers))
        if self.in_memory:
            self._commit_state.active_work[self] = None
        self._horizon = up_to
        self._forget_durable(page.as_of)
        if len(self.in_memory) > TIMERS_MAX:
            self._lower_horizon()

    def on_committed(self) -> None:
        """A batch is durable."""
        self._forget_durable(self._commit_state.last_committed)

    def _forget_durable(self, committed: int) -> None:
        """What this batch sets is in every page that is asked for from now on."""
        if self._unstored_batches and self._reading is None:
            self._unstored_batches = {
                timer: batch for timer, batch in self._unstored_batches.items() if batch > committed
            }

    def _is_in_memory(self, timer: bytes) -> bool:
        at = bisect_left(self.in_memory, timer)
        return at < len(self.in_memory) and self.in_memory[at] == timer

    def _lower_horizon(self) -> None:
        del self.in_memory[TIMERS_MAX // 2 :]
        self._horizon = self.in_memory[-1]
        self._reading = None
