"""For how long does the event loop look again before it sleeps?

To be put to sleep and woken up takes its time. Whoever has a core to spare can have the loop ask again and again for a
while after something has happened: what comes next is then read as soon as it is there.
"""

from asyncio import AbstractEventLoop
from collections.abc import Callable


class Poll:
    def __init__(self, loop: AbstractEventLoop, microseconds: int, steady_ns: Callable[[], int]) -> None:
        self._loop = loop
        self._nanoseconds = microseconds * 1000
        self._steady_ns = steady_ns
        self._until_ns = 0
        self._goes_on = False

    def start(self) -> None:
        """Something has happened: from now on for as long as it was told."""
        self._until_ns = self._steady_ns() + self._nanoseconds
        if not self._goes_on:
            self._goes_on = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        # Something is due, so the loop looks at its sockets and does not wait for them.
        self._goes_on = self._steady_ns() < self._until_ns
        if self._goes_on:
            self._loop.call_soon(self._go_on)
