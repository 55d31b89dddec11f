"""A clock that a test can advance, and an event loop whose timers use that clock."""

from asyncio import AbstractEventLoop, Future, TimerHandle
from collections.abc import Callable
from functools import partial
from math import ceil
from socket import socket
from typing import Any

from truenext.client.core.waiting import DelayedCall, DelayedCalls
from truenext.clock import monotonic_ns, time_ns

ADVANCE_MARGIN_NS = 1000
"""Nanoseconds that are added to each advance. Seconds are rounded, and a timer that is due at that time must run."""


class OffsetClock:
    """Clock of one test broker, which the test can advance. A restart of the broker keeps the same clock."""

    def __init__(self) -> None:
        self._advanced_ns = 0

    def wall_ns(self) -> int:
        """Return the time in nanoseconds since the epoch."""
        return time_ns() + self._advanced_ns

    def steady_ns(self) -> int:
        return monotonic_ns() + self._advanced_ns

    @property
    def steady_seconds(self) -> float:
        return self.steady_ns() / 1e9

    def advance_to(self, seconds: float) -> None:
        """Advance the clock to `seconds` of the steady clock. If the clock is already beyond that time, do nothing."""
        self._advanced_ns += max(0, ceil(seconds * 1e9) + ADVANCE_MARGIN_NS - self.steady_ns())


class AdvanceableLoop:
    """Wrapper of the real event loop, with the methods that a broker uses.

    Timers use the test's clock. Actions are counted, so that the test kit knows when the broker is idle. After `end`,
    the loop runs no further actions, like a killed process.
    """

    def __init__(self, loop: AbstractEventLoop, clock: OffsetClock, on_failed: Callable[[Exception], None]) -> None:
        """Wrap `loop`. If an action raises an exception, `on_failed` is called with the exception."""
        self._loop = loop
        self._clock = clock
        self._on_failed = on_failed
        self._timers = DelayedCalls()
        self._first_timer_handle: TimerHandle | None = None
        self._readers: dict[socket, Callable[[], object]] = {}
        self._writers: dict[socket, Callable[[], object]] = {}
        self._unwatched: set[socket] = set()
        self._has_ended = False
        self.pending_action_count = 0
        """Number of actions that `call_soon` was given and that have not run yet."""
        self.run_action_count = 0

    # ---- Time ----

    def time(self) -> float:
        return self._clock.steady_seconds

    def call_later(self, seconds: float, action: Callable[[], object]) -> DelayedCall:
        due_before = self.next_due_at
        timer = self._timers.call_at(self.time() + seconds, partial(self._run, action))
        if self.next_due_at != due_before:
            self._set_alarm()
        return timer

    @property
    def next_due_at(self) -> float | None:
        """Time in seconds of the clock at which the first timer is due; None if there is no timer."""
        return self._timers.next_due_at

    def run_due(self) -> None:
        """Run the timers that are due. Call this after `OffsetClock.advance_to`."""
        self._timers.run_due(self.time())
        self._set_alarm()

    def _set_alarm(self) -> None:
        if self._first_timer_handle is not None:
            self._first_timer_handle.cancel()
            self._first_timer_handle = None
        due = self.next_due_at
        if due is not None:
            self._first_timer_handle = self._loop.call_later(max(0.0, due - self.time()), self.run_due)

    # ---- Actions ----

    def call_soon(self, action: Callable[..., object], *arguments: Any) -> None:
        self.pending_action_count += 1
        self._loop.call_soon(self._run_soon, action, *arguments)

    def call_soon_threadsafe(self, action: Callable[..., object], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(self._run, action, *arguments)

    def create_future(self) -> Future[Any]:
        return self._loop.create_future()

    def _run_soon(self, action: Callable[..., object], *arguments: Any) -> None:
        self.pending_action_count -= 1
        self._run(action, *arguments)

    def _run(self, action: Callable[..., object], *arguments: Any) -> None:
        if self._has_ended:
            return
        self.run_action_count += 1
        try:
            action(*arguments)
        except Exception as error:
            self._on_failed(error)

    # ---- Sockets ----

    def add_reader(self, sock: socket, action: Callable[[], object]) -> None:
        self._readers[sock] = action
        if sock not in self._unwatched:
            self._loop.add_reader(sock, self._run, action)

    def add_writer(self, sock: socket, action: Callable[[], object]) -> None:
        self._writers[sock] = action
        if sock not in self._unwatched:
            self._loop.add_writer(sock, self._run, action)

    def remove_reader(self, sock: socket) -> None:
        if self._readers.pop(sock, None) is not None and sock not in self._unwatched:
            self._loop.remove_reader(sock)

    def remove_writer(self, sock: socket) -> None:
        if self._writers.pop(sock, None) is not None and sock not in self._unwatched:
            self._loop.remove_writer(sock)

    def unwatch(self, sock: socket) -> None:
        """Stop watching the socket for input and output, until `watch` is called."""
        if sock in self._readers:
            self._loop.remove_reader(sock)
        if sock in self._writers:
            self._loop.remove_writer(sock)
        self._unwatched.add(sock)

    def watch(self, sock: socket) -> None:
        self._unwatched.discard(sock)
        for actions, add in ((self._readers, self._loop.add_reader), (self._writers, self._loop.add_writer)):
            if sock in actions:
                add(sock, self._run, actions[sock])

    # ---- The end ----

    def end(self) -> None:
        """Cancel all timers, and run no more actions. The caller must remove all readers and writers first."""
        self._timers = DelayedCalls()
        self._set_alarm()
        self._has_ended = True
