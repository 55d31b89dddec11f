"""For how long does the event loop look again before it sleeps?

To be put to sleep and woken up takes its time. Whoever has a core to spare can have the loop ask again and again for a
while after something has happened: what comes next is then read as soon as it is there.
"""

from asyncio import AbstractEventLoop
from collections.abc import Callable


class BusyPoll:
    def __init__(self, loop: AbstractEventLoop, microseconds: int, monotonic_ns: Callable[[], int]) -> None:
        self._loop = loop
        self._nanoseconds = microseconds * 1000
        self._monotonic_ns = monotonic_ns
        self._until_ns = 0
        self._is_polling = False

    def start(self) -> None:
        """Something has happened: from now on for as long as it was told."""
        self._until_ns = self._monotonic_ns() + self._nanoseconds
        if not self._is_polling:
            self._is_polling = True
            self._loop.call_soon(self._poll_again)

    def _poll_again(self) -> None:
        # Something is due, so the loop looks at its sockets and does not wait for them.
        self._is_polling = self._monotonic_ns() < self._until_ns
        if self._is_polling:
            self._loop.call_soon(self._poll_again)
