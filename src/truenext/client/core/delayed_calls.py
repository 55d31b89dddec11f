"""What is to be done at a time, by a clock that somebody else has."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


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
