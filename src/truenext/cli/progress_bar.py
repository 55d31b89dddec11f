"""Progress bar of a command, on standard error if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar while the block runs. The function in the `with` statement gets the bytes that are done and their
    total, which is 0 while it is not known. `what` is a participle, such as "checked"."""
    console = Console(stderr=True)
    # Text printed meanwhile goes around the bar, but a redirected standard output stays redirected.
    with Progress(
        console=console, transient=True, redirect_stdout=sys.stdout.isatty(), disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total or None)
