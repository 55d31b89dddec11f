"""Timers in order of due time: any number of them, in bounded memory.

A timer (record.py) says at which time which block of which lane must be checked. All timers are in the store, or on
their way to it; the first ones are in memory too, up to a horizon:

    in memory, in order -----> horizon <----- in the store, or being written (`_unstored_batches`)

When few are left in memory, the next page is read. As with lanes, a page names the last batch that it includes, and
timers set meanwhile below the new horizon are added to memory in the same step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

from truenext.engine.writing.commit_state import CommitState
from truenext.model.record import TIMER_SIZE, split_timer

TIMERS_MAX = 4000
"""Timers in memory; above this the last half leaves."""

PAGE_SIZE = 1000
"""Timers read at a time, when fewer than half of them are left."""

BEYOND_ALL_TIMERS = b"\xff" * (TIMER_SIZE + 1)
"""Greater than every timer."""


class TimerRead(NamedTuple):
    """Request to the store for the timers after a certain one, `limit` at most."""

    after: bytes
    limit: int


class TimersResult(NamedTuple):
    """Page of timers as read from the store."""

    timers: list[bytes]
    """Timers in order."""
    as_of: int
    """Last batch that the page includes; timers set by later batches may be missing."""
    is_end: bool
    """No timers followed these when batch `as_of` was the last."""


class Timers:
    """Timers of one kind. Initially it is only known that the store may have some."""

    def __init__(self, commit_state: CommitState, *, first: bytes = b"", end: bytes = BEYOND_ALL_TIMERS) -> None:
        """Manage the timers after `first` and before `end`."""
        self._commit_state = commit_state
        self._end = end
        self.in_memory: list[bytes] = []
        """Timers in order, each once, without those popped as due. Changed only by this module."""
        self._horizon = first
        """Every timer up to here is in memory, or was popped."""
        self._unstored_batches: dict[bytes, int] = {}
        """Timers that may not be in the store yet, with the batch that sets them."""
        self._reading: TimerRead | None = None

    @property
    def next_due_ms(self) -> int | None:
        """Milliseconds since the epoch; None if not known, or if there are no timers."""
        return split_timer(self.in_memory[0])[0] if self.in_memory else None

    @property
    def first(self) -> bytes | None:
        """First timer; None if not known, or if there are no timers."""
        return self.in_memory[0] if self.in_memory else None

    def set(self, timer: bytes) -> None:
        """Set a timer: valid at once, durable with the gathering batch. Cheap if it is set already."""
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
        """Remove from memory and return the first timer, if it is due. The caller clears it when its work is done."""
        if not self.in_memory or split_timer(self.in_memory[0])[0] > self._commit_state.now_ms:
            return None
        timer = self.in_memory.pop(0)
        # A timer set from now on must fire again.
        self._unstored_batches.pop(timer, None)
        return timer

    def pop_first(self) -> None:
        """Remove the first timer, whose work is done; durable with the gathering batch."""
        timer = self.in_memory.pop(0)
        self._unstored_batches.pop(timer, None)
        self.clear_unless_set_again(timer)

    def remove(self, timer: bytes) -> None:
        """Cancel a timer; durable with the gathering batch. A page that is being read may bring it back."""
        if self._is_in_memory(timer):
            del self.in_memory[bisect_left(self.in_memory, timer)]
        self._unstored_batches.pop(timer, None)
        self.clear_unless_set_again(timer)

    def put_back(self, timer: bytes) -> None:
        """Put a popped timer back, whose work could not be done yet; it stays due."""
        # The batch that sets it may not be durable: a page read before that does not contain it.
        self._unstored_batches[timer] = self._commit_state.batch.number
        if timer <= self._horizon and not self._is_in_memory(timer):
            insort(self.in_memory, timer)
        self._commit_state.active_work[self] = None

    def clear_unless_set_again(self, timer: bytes) -> None:
        """Clear a popped timer, unless it was set again since; durable with the gathering batch."""
        if timer not in self._unstored_batches and not self._is_in_memory(timer):
            batch = self._commit_state.batch
            batch.cleared_timers.append(timer)
            batch.timers.pop(timer, None)
            batch.size += TIMER_SIZE

    # ---- Reading ----

    def next_read(self) -> TimerRead | None:
        """Return a request for the page that is needed now; its result goes to `on_page_read`."""
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
        """Forget timers of durable batches: every page requested from now on contains them."""
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
