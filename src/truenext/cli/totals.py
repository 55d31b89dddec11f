"""How far long work has come, where no bar can show it."""

import time

from truenext.cli import terminal

PROGRESS_SECONDS = 2.0
"""Time between two lines of progress."""


class Totals:
    """How far long work has come, in a line on standard error now and then."""

    def __init__(self, done: str) -> None:
        """`done` is what becomes of each thing, such as "sent"."""
        self._done = done
        self._said_at = time.monotonic()

    def say(self, count: int) -> None:
        """If it is time again."""
        if time.monotonic() - self._said_at > PROGRESS_SECONDS:
            self._said_at = time.monotonic()
            terminal.say(f"{count:,} {self._done} so far", err=True)
