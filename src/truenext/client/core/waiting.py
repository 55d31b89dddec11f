"""Flows: requests of a program, which wait without a task and without a thread.

A *flow* is a generator: it runs as far as it can without waiting, and yields a Wait where it cannot go on. The
driver, with a task or with a thread, waits for the signal, and sends whether it was set before the deadline. An
exception that ends the wait, such as a cancellation, is thrown into the flow: so each flow also decides what becomes
of a request for which its caller no longer waits.
"""

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple, TypeVar

import msgspec

T = TypeVar("T")


class Signal(msgspec.Struct, eq=False):
    """Event that happens once, for which one or several flows wait."""

    is_set: bool = False
    _callbacks: list[Callable[[], None]] = []

    def set(self) -> None:
        if not self.is_set:
            self.is_set = True
            for callback in self._callbacks:
                callback()

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Add a function that is called when the signal is set."""
        self._callbacks.append(callback)

    def remove_callback(self, callback: Callable[[], None]) -> None:
        self._callbacks.remove(callback)


class Wait(NamedTuple):
    """Value that a flow yields to its driver, to be resumed when the signal is set or at the deadline."""

    signal: Signal
    deadline: float | None = None
    """Time by the core's clock, in seconds; None waits for ever."""


Flow = Generator[Wait, bool, T]
"""Generator that yields a Wait where it must wait, and is then sent True if the signal was set, False at the
deadline."""


# ---- Delayed calls ----


class DelayedCall(msgspec.Struct, eq=False):
    """Function that `DelayedCalls` calls at a certain time, unless it is cancelled before."""

    action: Callable[[], None] | None

    def cancel(self) -> None:
        self.action = None


class DelayedCalls:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, DelayedCall]] = []
        self._serial = count()

    def call_at(self, when: float, action: Callable[[], None]) -> DelayedCall:
        timer = DelayedCall(action)
        heappush(self._heap, (when, next(self._serial), timer))
        return timer

    @property
    def next_due_at(self) -> float | None:
        """Time at which `run_due` is to be called; None if there are no calls."""
        heap = self._heap
        while heap and heap[0][2].action is None:
            heappop(heap)
        return heap[0][0] if heap else None

    def run_due(self, now: float) -> None:
        while (due := self.next_due_at) is not None and due <= now:
            timer = heappop(self._heap)[2]
            action, timer.action = timer.action, None
            assert action is not None, "those that were cancelled are not due"
            action()
