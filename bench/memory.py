"""How much memory of its own does a broker take, and when?"""

from __future__ import annotations

import threading
from types import TracebackType

from bench.brokers import Broker

MEMORY_TARGET = 256 * 1024
"""KiB of a broker's own memory at most (RssAnon), whatever waits in it."""

_EVERY = 0.2


class MemoryWatch:
    """Samples RssAnon of a broker's process every 0.2 s, also while it starts and stops; 0 where the system tells none.

    Pages of files that the process has mapped are not in it: the system takes them back when it needs them.
    """

    def __init__(self, broker: Broker) -> None:
        self.now = 0
        """KiB, when it was last looked at."""
        self.peaks: dict[str, int] = {}
        """KiB at most, by phase."""
        self._broker = broker
        self._phase = "start"
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()

    @property
    def peak(self) -> int:
        """KiB at most, so far."""
        return max(self.peaks.values(), default=0)

    def enter(self, phase: str) -> None:
        """What is sampled from here on belongs to this phase."""
        self._phase = phase
        self._sample()

    def _watch(self) -> None:
        while not self._end.wait(_EVERY):
            self._sample()

    def _sample(self) -> None:
        phase = self._phase
        self.now = self._broker.anonymous_memory() or 0
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.now)
