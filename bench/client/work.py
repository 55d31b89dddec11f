"""What is one run of a program: what it is to do, and what it says of it."""

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
    """Where the messages are, or go to."""
    messages: int
    batch: int = 1
    """Messages of a transaction."""
    target: str = ""
    """Where a transaction sends them."""
    prefetch: int | None = None
    """None leaves it to the broker, as the client does unless told."""
    is_counted: bool = False
    """Say what was written; such a run is not timed."""


class Done(NamedTuple):
    seconds: float
    processor: float
    """Seconds of it that this process used."""
    trip: float = 0.0
    """The median of the seconds from a request to its reply."""
    written: Written | None = None


class Stopwatch:
    """Measures a program from where it is ready until all that it has said is confirmed."""

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
