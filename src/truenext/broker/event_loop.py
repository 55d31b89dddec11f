"""Sliced work: long work that does not block the event loop. Alarm: wakes the event loop when a timer is due.

Work is a generator that yields after each step. A step takes about a millisecond at most. Each turn runs steps for
SLICE_NS, and the next turn continues with the remaining steps. Source: docs/decisions/0037-asking-a-full-broker.md
"""

from asyncio import AbstractEventLoop, TimerHandle
from collections import deque
from collections.abc import Callable, Generator

SLICE_NS = 2_000_000
"""Nanoseconds after which a slice begins no further step."""

Steps = Generator[None, None, None]


class SlicedWork:
    def __init__(self, monotonic_ns: Callable[[], int], slice_ns: int = SLICE_NS) -> None:
        self._monotonic_ns = monotonic_ns
        self._slice_ns = slice_ns
        self.pending: deque[Steps] = deque()
        """Generators that are not finished, in the order in which they run. Each `next` does one step."""

    def add(self, steps: Steps) -> None:
        """Add work, which begins after all earlier work is done."""
        self.pending.append(steps)

    def run_slice(self) -> None:
        pending = self.pending
        until_ns = self._monotonic_ns() + self._slice_ns
        while pending:
            try:
                next(pending[0])
            except StopIteration:
                pending.popleft()
            if self._monotonic_ns() >= until_ns:
                return

    def drop(self) -> None:
        self.pending.clear()


# ---- When the event loop must wake though nothing happens: at the next time at which a timer is due ----

SLEEP_SECONDS_MAX = 1.0
"""Longest time for which the alarm sleeps before the wall clock is read again. The event loop does not notice when the
wall clock is set."""


class Alarm:
    def __init__(self, loop: AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop = loop
        self._wake = wake
        self._due_ms: int | None = None
        self._handle: TimerHandle | None = None

    def set(self, due_ms: int | None, now_ms: int) -> None:
        """Wake the loop at `due_ms` (milliseconds since the epoch) or earlier; with None, do not wake the loop. Each
        turn must call this."""
        if due_ms == self._due_ms and (due_ms is None or self._handle is not None):
            return
        self.cancel()
        if due_ms is not None:
            seconds = max(0.0, (due_ms - now_ms) / 1000)
            self._due_ms = due_ms
            self._handle = self._loop.call_later(min(seconds, SLEEP_SECONDS_MAX), self._ring)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._due_ms = None

    def _ring(self) -> None:
        self._handle = None
        self._wake()
