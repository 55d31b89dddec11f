"""Progress of long work, shown as lines of text where no progress bar is possible."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from truenext.cli import terminal

REPORT_INTERVAL_S = 2.0

T = TypeVar("T")


class ProgressReporter:
    """Reporter that prints the progress of long work as a line on standard error, every few seconds."""

    def __init__(self, done: str) -> None:
        """Start with a count of 0. `done` is the participle for the counted items, such as "sent"."""
        self._done = done
        self._reported_at = time.monotonic()
        self.count = 0
        """Number of items that the caller of `count_each` has finished."""

    def count_each(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items. Each item is counted when the caller asks for the next one."""
        for item in items:
            yield item
            self.count += 1
            if self.count % 1000 == 0:
                self.report_if_due(self.count)

    def report_if_due(self, count: int) -> None:
        if time.monotonic() - self._reported_at > REPORT_INTERVAL_S:
            self._reported_at = time.monotonic()
            terminal.echo(f"{count:,} {self._done} so far", err=True)
