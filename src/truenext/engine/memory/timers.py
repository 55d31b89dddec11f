"""Timers in order of due time: any number of timers, in bounded memory.

A timer (model/record.py) says at which time a block of a lane, or a scheduled send, is due. All timers are in the
store, or being written to it. The first timers are in memory, too, up to a horizon:

    in memory, in order -----> horizon <----- in the store, or being written (`_unstored_batches`)

When few timers are left in memory, the next page is read. A page names the last batch that it includes. Timers that
later batches set are added to memory in the same step, if they are below the new horizon.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

from truenext.engine.writing.commit_state import CommitState
from truenext.model.record import TIMER_SIZE, split_timer

TIMERS_MAX = 4000
"""Maximum number of timers in memory. When there are more, only the first TIMERS_MAX / 2 timers stay in memory."""

PAGE_SIZE = 1000
"""Number of timers on a page. The next page is read when fewer than half as many are in memory."""

BEYOND_ALL_TIMERS = b"\xff" * (TIMER_SIZE + 1)
"""Key that is greater than every timer."""


class TimerRead(NamedTuple):
    """Request to the store for at most `limit` timers after the timer `after`."""

    after: bytes
    limit: int


class TimersResult(NamedTuple):
    """Page of timers that was read from the store."""

    timers: list[bytes]
    """Timers in order."""
    as_of: int
    """Last batch whose timers the page includes; timers set by later batches may be missing."""
    is_end: bool
    """True if no timers followed the page after batch `as_of`."""


class Timers:
    """Timers of one kind. At first none is in memory, and the store may have some."""

    def __init__(self, commit_state: CommitState, *, first: bytes = b"", end: bytes = BEYOND_ALL_TIMERS) -> None:
        """Manage the timers after `first` and before `end`."""
        self._commit_state = commit_state
        self._end = end
        self.in_memory: list[bytes] = []
        """Timers in order, each once; timers that `pop_due` has returned are left out. Only this module changes it."""
        self._horizon = first
        """Greatest timer up to which all timers are in memory or were popped."""
        self._unstored_batches: dict[bytes, int] = {}
        """Timers that may not be in the store yet, each with the batch that sets it."""
        self._reading: TimerRead | None = None

    @property
    def next_due_ms(self) -> int | None:
        """Due time of the first timer in memory, in milliseconds since the epoch; None if no timer is in memory."""
        return split_timer(self.in_memory[0])[0] if self.in_memory else None

    @property
    def first(self) -> bytes | None:
        """First timer in memory; None if no timer is in memory."""
        return self.in_memory[0] if self.in_memory else None

    def set(self, timer: bytes) -> None:
        """Set a timer. It is valid at once, and durable with the gathering batch. Setting a timer again is cheap."""
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
        """Remove the first timer from memory and return it, if it is due; else return None. When the timer's work is
        done, the caller calls `clear_unless_set_again`."""
        if not self.in_memory or split_timer(self.in_memory[0])[0] > self._commit_state.now_ms:
            return None
        timer = self.in_memory.pop(0)
        # A timer set from now on must fire again.
        self._unstored_batches.pop(timer, None)
        return timer

    def pop_first(self) -> None:
        """Remove the first timer, whose work is done. The removal is durable with the gathering batch."""
        self.remove(self.in_memory[0])

    def remove(self, timer: bytes) -> None:
        """Cancel a timer. The removal is durable with the gathering batch. A page that is being read may still add the
        timer again."""
        if self._is_in_memory(timer):
            del self.in_memory[bisect_left(self.in_memory, timer)]
        self._unstored_batches.pop(timer, None)
        self.clear_unless_set_again(timer)

    def put_back(self, timer: bytes) -> None:
        """Put back a popped timer whose work could not be done yet. The timer stays due."""
        # The batch that sets it may not be durable: a page read before that does not contain it.
        self._unstored_batches[timer] = self._commit_state.batch.number
        if timer <= self._horizon and not self._is_in_memory(timer):
            insort(self.in_memory, timer)
        self._commit_state.active_work[self] = None

    def clear_unless_set_again(self, timer: bytes) -> None:
        """Remove a popped timer from the store, unless it was set again since. The removal is durable with the
        gathering batch."""
        if timer not in self._unstored_batches and not self._is_in_memory(timer):
            batch = self._commit_state.batch
            batch.cleared_timers.append(timer)
            batch.timers.pop(timer, None)
            batch.size += TIMER_SIZE

    # ---- Reading ----

    def next_read(self) -> TimerRead | None:
        """Return a request for the next page, if it is needed now; else None. Pass the page to `on_page_read`."""
        if self._reading is not None or self._horizon == BEYOND_ALL_TIMERS or len(self.in_memory) >= PAGE_SIZE // 2:
            return None
        self._reading = TimerRead(self._horizon, PAGE_SIZE)
        return self._reading

    def on_page_read(self, read: TimerRead, page: TimersResult) -> None:
        if self._reading is not read:
            # The horizon has moved down meanwhile.
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
        self._forget_durable(self._commit_state.last_committed)

    def _forget_durable(self, committed: int) -> None:
        """Forget which batches have set timers, for batches that are durable: pages requested from now on contain these
        timers."""
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
