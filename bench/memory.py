"""Samples of a broker's own memory, by phase."""

from __future__ import annotations

import threading
from types import TracebackType

from bench.brokers import Broker

MEMORY_TARGET = 256 * 1024
"""Limit of a broker's own memory (RssAnon) in KiB, whatever waits in it."""

_EVERY = 0.2


class MemoryWatch:
    """Sampler of RssAnon of a broker's process every 0.2 s, also during start and stop; 0 if the system has none.

    Pages of mapped files are not in it: the system takes them back when it needs them.
    """

    def __init__(self, broker: Broker) -> None:
        self.now = 0
        """Last sample in KiB."""
        self.peaks: dict[str, int] = {}
        """Largest sample in KiB, by phase."""
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
        """Largest sample in KiB so far."""
        return max(self.peaks.values(), default=0)

    def enter(self, phase: str) -> None:
        """Start a phase, to which the next samples belong."""
        self._phase = phase
        self._sample()

    def _watch(self) -> None:
        while not self._end.wait(_EVERY):
            self._sample()

    def _sample(self) -> None:
        phase = self._phase
        self.now = self._broker.anonymous_memory() or 0
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.now)
