"""Progress of a long measurement, and its end after an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bench.brokers import BrokerError
from bench.memory import MemoryWatch
from bench.workers import Counter, Crew, Job, WorkerError, counter

_EVERY = 5.0


class Progress:
    """Report of a worker's progress every few seconds."""

    def __init__(self, done: str, total: int, memory: MemoryWatch) -> None:
        self.counter: Counter = counter()
        self._done = done
        self._total = total
        self._memory = memory
        self._started = self._printed_at = time.monotonic()
        self._printed_count = 0

    def start(self) -> None:
        self._started = self._printed_at = time.monotonic()

    def print_progress(self) -> None:
        now = time.monotonic()
        if now - self._printed_at < _EVERY:
            return
        count = self.counter.value
        lately = (count - self._printed_count) / (now - self._printed_at)
        elapsed = now - self._started
        print_line(
            f"  {self._done} {count:,} of {self._total:,} in {elapsed:.0f} s: {count / elapsed:,.0f} a second so far,"
            f" {lately:,.0f} lately; RssAnon {mib(self._memory.now)}"
        )
        self._printed_count, self._printed_at = count, now


def work(done: str, total: int, memory: MemoryWatch, seconds: float, job: Job, *arguments: object) -> Any:
    """Run a worker, and return its result; meanwhile print its progress. `seconds` is the time limit.

    Raises: WorkerError
    """
    progress = Progress(done, total, memory)
    with Crew() as crew:
        worker = crew.hire(job, *arguments, progress.counter)
        worker.await_ready()
        progress.start()
        worker.start()
        return crew.finish(seconds, progress.print_progress)[0]


@contextmanager
def phase(name: str, memory: MemoryWatch) -> Iterator[None]:
    """Print the memory that the block has used."""
    memory.enter(name)
    yield
    print_line(f"  {name}: RssAnon at most {mib(memory.peaks[name])}")


def guarded(measure: Callable[[], object]) -> int:
    """Measure, and return the exit status. If it ends early, the figures so far can be shown."""
    try:
        measure()
    except KeyboardInterrupt:
        print_line("interrupted")
        return 130
    except (BrokerError, WorkerError, OSError, ValueError) as error:
        print_line(f"failed: {error}")
        return 1
    return 0


def print_line(text: str) -> None:
    print(text, flush=True)


def mib(kib: float) -> str:
    return f"{kib / 1024:,.0f} MiB"
