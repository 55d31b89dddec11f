"""How what a program asks for waits, without a task and without a thread.

A *flow* is one request of a program. It is a generator: it runs as far as it can without waiting, and yields a Wait
where it cannot go on. Whoever drives it, with a task or with a thread, waits for the signal and tells it whether that
came before the deadline. An exception that ends the waiting, such as a cancellation, is thrown into the flow: so what
becomes of a request that nobody waits for any more is decided here as well, in one place.
"""

from collections.abc import Callable, Generator
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
