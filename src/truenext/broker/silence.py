"""Silence of a broker whose last confirmed append to its log began too long ago: another broker may have taken over.

a turn, a read of a socket     does nothing
bytes for a client             wait in the connection's output
an append is confirmed         all that has waited goes on
"""

from collections.abc import Callable

from truenext.clock import boottime
from truenext.store.log import Log


class Silence:
    def __init__(self, log: Log) -> None:
        self._log = log
        self._waiting: list[Callable[[], object]] = []

    def is_silent(self) -> bool:
        """Return whether the broker must be silent now. The clock is read each time: the process may have been stopped
        since."""
        return boottime() >= self._log.silent_from

    def add(self, wake: Callable[[], object]) -> None:
        """Call `wake` when the silence has ended."""
        self._waiting.append(wake)

    def wake_all(self) -> None:
        """Call all that was added; called when the silence has ended."""
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()
