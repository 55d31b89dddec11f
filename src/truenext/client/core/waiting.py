"""How what a program asks for waits, without a task and without a thread.

A *flow* is one request of a program. It is a generator: it runs as far as it can without waiting, and yields a Wait
where it cannot go on. Whoever drives it, with a task or with a thread, waits for the signal and tells it whether that
came before the deadline. An exception that ends the waiting, such as a cancellation, is thrown into the flow: so what
becomes of a request that nobody waits for any more is decided here as well, in one place.
"""

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Signal:
    """Something has happened that one waits for, or several do."""

    __slots__ = ("_callbacks", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._callbacks: list[Callable[[], None]] = []

    def set(self) -> None:
        if not self.is_set:
            self.is_set = True
            for callback in self._callbacks:
                callback()

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Have it called when the signal is set; only by whoever drives the flow."""
        self._callbacks.append(callback)

    def remove_callback(self, callback: Callable[[], None]) -> None:
        self._callbacks.remove(callback)


class Wait(NamedTuple):
    """What a flow waits for."""

    signal: Signal
    deadline: float | None = None
    """By the clock of the core, in seconds; None waits for ever."""


Flow = Generator[Wait, bool, T]
"""It is sent whether the signal came; False: the deadline did."""


# ---- What is to be done at a time, by a clock that somebody else has ----


class DelayedCall:
    """Something that is to be done, unless it is cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

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
        """When `run_due` is to be called; None if nothing is to be done."""
        heap = self._heap
        while heap and heap[0][2].action is None:
            heappop(heap)
        return heap[0][0] if heap else None

    def run_due(self, now: float) -> None:
        """Do what is due."""
        while (due := self.next_due_at) is not None and due <= now:
            timer = heappop(self._heap)[2]
            action, timer.action = timer.action, None
            assert action is not None, "those that were cancelled are not due"
            action()
