"""How far has a long measurement come?"""

from __future__ import annotations

import time

from bench.memory import MemoryWatch
from bench.workers import Counter, counter

_EVERY = 5.0


class Progress:
    """Says every few seconds how far a worker has come."""

    def __init__(self, done: str, total: int, memory: MemoryWatch) -> None:
        self.counter: Counter = counter()
        self._done = done
        self._total = total
        self._memory = memory
        self._began = self._told_at = time.monotonic()
        self._told = 0

    def start(self) -> None:
        self._began = self._told_at = time.monotonic()

    def tell(self) -> None:
        now = time.monotonic()
        if now - self._told_at < _EVERY:
            return
        count = self.counter.value
        lately = (count - self._told) / (now - self._told_at)
        elapsed = now - self._began
        say(
            f"  {self._done} {count:,} of {self._total:,} in {elapsed:.0f} s: {count / elapsed:,.0f} a second so far,"
            f" {lately:,.0f} lately; RssAnon {mib(self._memory.now)}"
        )
        self._told, self._told_at = count, now


def say(text: str) -> None:
    print(text, flush=True)


def mib(kib: float) -> str:
    return f"{kib / 1024:,.0f} MiB"
