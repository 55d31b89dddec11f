"""Flows: requests of a program that can wait without knowing tasks or threads.

A *flow* is a generator. It runs until it must wait, and then yields a Wait. The driver waits for the signal in a task
or a thread. Then it sends True into the flow if the signal was set before the deadline, else False. An exception that
ends the wait, such as a cancellation, is thrown into the flow. So each flow also decides what happens with a request if
its caller stops waiting.
"""

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple, TypeVar

import msgspec

T = TypeVar("T")


class Signal(msgspec.Struct, eq=False):
    """Event that happens once. One or several flows may wait for it."""

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
    """Value that a flow yields when it must wait. The driver resumes the flow when the signal is set, or at the
    deadline."""

    signal: Signal
    deadline: float | None = None
    """Time of the deadline in seconds, by `ClientContext.clock`. None means no deadline."""


Flow = Generator[Wait, bool, T]
"""Generator that yields a Wait when it must wait. The driver sends True if the signal was set, and False at the
deadline."""


# ---- Delayed calls ----


class DelayedCall(msgspec.Struct, eq=False):
    """Function that `DelayedCalls` calls at a given time, unless the call is cancelled before."""

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
        """Time at which the driver must call `run_due`; None if no call is pending."""
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
