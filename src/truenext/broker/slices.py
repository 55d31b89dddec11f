"""What takes long is done a slice at a time, so that nobody waits for all of it.

Work is a generator that yields after each step, of which none takes longer than a millisecond or so. Right behind a
turn steps are taken until SLICE_NS are over; the next turn goes on. Source: docs/decisions/0037-asking-a-full-broker.md
"""

from collections import deque
from collections.abc import Callable, Generator

SLICE_NS = 2_000_000
"""Nanoseconds after which a slice takes no further step."""

Steps = Generator[None, None, None]


class SlicedWork:
    def __init__(self, monotonic_ns: Callable[[], int]) -> None:
        self._monotonic_ns = monotonic_ns
        self.pending: deque[Steps] = deque()
        """What is not done yet, in the order in which it will be."""

    def add(self, steps: Steps) -> None:
        """To be done behind all that was begun before."""
        self.pending.append(steps)

    def run_slice(self) -> None:
        pending = self.pending
        until_ns = self._monotonic_ns() + SLICE_NS
        while pending:
            try:
                next(pending[0])
            except StopIteration:
                pending.popleft()
            if self._monotonic_ns() >= until_ns:
                return

    def drop(self) -> None:
        """What is not done yet will not be."""
        self.pending.clear()
