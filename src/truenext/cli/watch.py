"""`--watch`: shows an answer again every few seconds, until Ctrl-C."""

import shutil
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import click

INTERVAL_S = 2.0

_CLEAR = "\x1b[H\x1b[2J\x1b[3J"
"""Moves the cursor of a terminal to its first line, and clears the terminal."""

watch_option = click.option(
    "--watch",
    "is_watched",
    is_flag=True,
    help=f"Show it again every {INTERVAL_S:g} seconds, until Ctrl-C (exit status 130) or until the broker has gone.",
)


def show_repeatedly(show: Callable[[], object]) -> NoReturn:
    """Call `show` again and again. On a terminal, what was shown before is cleared; else a blank line separates."""
    is_first = True
    while True:
        separate(is_first=is_first)
        is_first = False
        show()
        sys.stdout.flush()
        time.sleep(INTERVAL_S)


def separate(*, is_first: bool) -> None:
    """Clear what a terminal shows. Elsewhere print a blank line, unless nothing was shown before."""
    if sys.stdout.isatty():
        click.echo(_CLEAR, nl=False)
    elif not is_first:
        click.echo()


def rows_that_fit(others: int) -> int:
    """Return how many lines a terminal has besides `others` lines, at least one."""
    return max(1, shutil.get_terminal_size().lines - others)
