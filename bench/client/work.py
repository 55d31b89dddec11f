"""One run of a job: its order and its result."""

from __future__ import annotations

import gc
import statistics
import time
from typing import NamedTuple

from bench.client.tap import Tap, Written
from bench.workers import Gate


class Order(NamedTuple):
    port: int
    queue: str
    """Queue from which the job receives, or to which it sends."""
    messages: int
    batch: int = 1
    """Number of messages of a transaction."""
    target: str = ""
    """Queue to which a transaction sends."""
    prefetch: int | None = None
    """Prefetch; None leaves it to the broker, as the client does by default."""
    is_counted: bool = False
    """Report what was written; such a run is not timed."""


class Done(NamedTuple):
    seconds: float
    processor: float
    """Seconds of this process's processor time."""
    trip: float = 0.0
    """Median of the seconds from a request to its reply."""
    written: Written | None = None


class Stopwatch:
    """Clock from when a program is ready until all its frames are confirmed."""

    def __init__(self, gate: Gate, order: Order | None = None) -> None:
        self._gate = gate
        self._tap = Tap.install() if order is not None and order.is_counted else None
        self.started = self._processor = 0.0

    def start(self) -> None:
        gc.enable()  # the workers of other benchmarks do without; who uses a client does not
        self._gate.ready()
        if self._tap is not None:
            self._tap.clear()
        self._processor = time.process_time()
        self.started = time.monotonic()

    def stop(self, trips: list[float] | None = None) -> Done:
        ended = time.monotonic()
        processor = time.process_time() - self._processor
        written = None if self._tap is None else Written.of(self._tap)
        return Done(ended - self.started, processor, statistics.median(trips) if trips else 0.0, written)


def check_numbers(numbers: list[int], count: int) -> None:
    """Raises: ValueError unless each message has come exactly once"""
    if sorted(numbers) != list(range(count)):
        raise ValueError(f"{count} messages sent, {len(numbers)} received, {len(set(numbers))} different ones")
