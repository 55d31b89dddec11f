"""When the event loop must wake though nothing happens: at the next time at which a timer is due."""

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable

SLEEP_SECONDS_MAX = 1.0
"""Longest time until the clock is looked at again: it may be set, and the loop does not notice."""


class Alarm:
    def __init__(self, loop: AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop = loop
        self._wake = wake
        self._due_ms: int | None = None
        self._handle: TimerHandle | None = None

    def set(self, due_ms: int | None, now_ms: int) -> None:
        """Wake at `due_ms`, milliseconds since the epoch, or a little earlier; None is never. To be said at every
        turn.
        """
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
