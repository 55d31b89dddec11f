"""How far long work has come, where no bar can show it."""

import time

from truenext.cli import terminal

REPORT_INTERVAL_S = 2.0
"""Time between two lines of progress."""


class ProgressReporter:
    """How far long work has come, in a line on standard error now and then."""

    def __init__(self, done: str) -> None:
        """`done` is what becomes of each thing, such as "sent"."""
        self._done = done
        self._reported_at = time.monotonic()

    def report_if_due(self, count: int) -> None:
        """If it is time again."""
        if time.monotonic() - self._reported_at > REPORT_INTERVAL_S:
            self._reported_at = time.monotonic()
            terminal.echo(f"{count:,} {self._done} so far", err=True)
