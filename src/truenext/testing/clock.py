"""A clock that goes on as all clocks do, and that a test can put forward; and an event loop that keeps time by it."""

from asyncio import AbstractEventLoop, Future, TimerHandle
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import ceil
from socket import socket
from typing import Any

from truenext.clock import monotonic_ns, time_ns

ADVANCE_MARGIN_NS = 1000
"""Put forward by so much more, so that what is due is due: seconds are rounded."""


class OffsetClock:
    """The clock of one broker, through all of its runs."""

    def __init__(self) -> None:
        self._advanced_ns = 0

    def wall_ns(self) -> int:
        """Nanoseconds since the epoch."""
        return time_ns() + self._advanced_ns

    def steady_ns(self) -> int:
        return monotonic_ns() + self._advanced_ns

    @property
    def steady_seconds(self) -> float:
        """Of the steady one."""
        return self.steady_ns() / 1e9

    def advance_to(self, seconds: float) -> None:
        """`seconds` are those of the steady clock; if they are over, nothing is done."""
        self._advanced_ns += max(0, ceil(seconds * 1e9) + ADVANCE_MARGIN_NS - self.steady_ns())


class LoopTimer:
    """What `Loop.call_later` returns."""

    __slots__ = ("action", "is_cancelled")

    def __init__(self, action: Callable[[], object]) -> None:
        self.action = action
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class AdvanceableLoop:
    """As much of an event loop as a broker uses, in front of the real one.

    Its timers go by the clock, and what it does is counted, so that it can be known when nothing is left to do. Once
    ended it does nothing any more, as if its process had been killed.
    """

    def __init__(self, loop: AbstractEventLoop, clock: OffsetClock, on_failed: Callable[[Exception], None]) -> None:
        """`on_failed` is told what an action raised."""
        self._loop = loop
        self._clock = clock
        self._on_failed = on_failed
        self._timers: list[tuple[float, int, LoopTimer]] = []
        """A heap: when, by the clock, and a number that tells equals apart."""
        self._tie_breakers = count()
        self._first_timer_handle: TimerHandle | None = None
        """Of the real loop, for the first timer."""
        self._readers: dict[socket, Callable[[], object]] = {}
        self._writers: dict[socket, Callable[[], object]] = {}
        self._unwatched: set[socket] = set()
        self._has_ended = False
        self.pending_action_count = 0
        """Actions that are due, whatever the time is."""
        self.run_action_count = 0
        """Actions, ever."""

    # ---- Time ----

    def time(self) -> float:
        return self._clock.steady_seconds

    def call_later(self, seconds: float, action: Callable[[], object]) -> LoopTimer:
        timer = LoopTimer(action)
        heappush(self._timers, (self.time() + seconds, next(self._tie_breakers), timer))
        if self._timers[0][2] is timer:
            self._set_alarm()
        return timer

    @property
    def next_due_at(self) -> float | None:
        """When the first timer is due; None if there is none."""
        timers = self._timers
        while timers and timers[0][2].is_cancelled:
            heappop(timers)
        return timers[0][0] if timers else None

    def run_due(self) -> None:
        """Do what is due by now. To be called whenever the clock was put forward."""
        now = self.time()
        while (due := self.next_due_at) is not None and due <= now:
            self._run(heappop(self._timers)[2].action)
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
        """Whatever comes or goes there, nobody is told until `watch`."""
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
        """No socket may be watched any more."""
        self._timers.clear()
        self._set_alarm()
        self._has_ended = True
