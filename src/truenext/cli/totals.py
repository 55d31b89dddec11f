"""Progress of long work as lines of text, where no bar can show it."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from truenext.cli import terminal

REPORT_INTERVAL_S = 2.0

T = TypeVar("T")


class ProgressReporter:
    """Reporter of long work: prints a line on standard error every few seconds."""

    def __init__(self, done: str) -> None:
        """`done` is the participle for the counted items, such as "sent"."""
        self._done = done
        self._reported_at = time.monotonic()
        self.count = 0
        """Number of items that have passed `count_each`."""

    def count_each(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, and count each once the caller asks for the next."""
        for item in items:
            yield item
            self.count += 1
            if self.count % 1000 == 0:
                self.report_if_due(self.count)

    def report_if_due(self, count: int) -> None:
        if time.monotonic() - self._reported_at > REPORT_INTERVAL_S:
            self._reported_at = time.monotonic()
            terminal.echo(f"{count:,} {self._done} so far", err=True)
