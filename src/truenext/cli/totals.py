"""Progress of long work as lines of text, where no bar can show it."""

import time

from truenext.cli import terminal

REPORT_INTERVAL_S = 2.0


class ProgressReporter:
    """Reporter of long work: prints a line on standard error every few seconds."""

    def __init__(self, done: str) -> None:
        """`done` is the participle for the counted items, such as "sent"."""
        self._done = done
        self._reported_at = time.monotonic()

    def report_if_due(self, count: int) -> None:
        if time.monotonic() - self._reported_at > REPORT_INTERVAL_S:
            self._reported_at = time.monotonic()
            terminal.echo(f"{count:,} {self._done} so far", err=True)
