"""Sliced work: long work that does not block the event loop. Alarm: wakes the event loop when a timer is due. Loop
delay: measures for how long the event loop is held.

Work is a generator that yields after each step. A step takes about a millisecond at most. Each turn runs steps for
SLICE_NS, and the next turn continues with the remaining steps. Source: docs/decisions/0037-asking-a-full-broker.md
"""

from asyncio import AbstractEventLoop, TimerHandle
from collections import deque
from collections.abc import Callable, Generator

from truenext.clock import monotonic
from truenext.model.histogram import SHORT_TIME_BUCKETS, HistogramCounter

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


# ---- For how long the event loop is held ----

SAMPLE_INTERVAL_S = 0.1


class LoopDelay:
    """Delay with which timers are called, measured ten times a second. It is the time for which the passes of the event
    loop hold up a client, too."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self.delays = HistogramCounter(SHORT_TIME_BUCKETS)
        """Delays in seconds. The timers of uvloop have a resolution of a millisecond, which is part of them."""
        self._schedule()

    def held_s(self) -> float:
        """Return the seconds for which the event loop has been late by now. Any thread may call this."""
        return max(0.0, monotonic() - self._due)

    def _schedule(self) -> None:
        self._due = monotonic() + SAMPLE_INTERVAL_S
        self._loop.call_later(SAMPLE_INTERVAL_S, self._on_due)

    def _on_due(self) -> None:
        self.delays.add(self.held_s())
        self._schedule()
