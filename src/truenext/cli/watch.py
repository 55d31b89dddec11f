"""`--watch`: shows an answer again every few seconds, until Ctrl-C."""

import shutil
import sys
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

import click

T = TypeVar("T")

INTERVAL_S = 2.0

_CLEAR = "\x1b[H\x1b[2J\x1b[3J"
"""Moves the cursor of a terminal to its first line, and clears the terminal."""

watch_option = click.option(
    "--watch",
    "is_watched",
    is_flag=True,
    help=f"Show it again every {INTERVAL_S:g} seconds, until Ctrl-C (exit status 130) or until the broker has gone.",
)


def show_repeatedly(request: Callable[[], T], show: Callable[[T], object], pause_s: float = INTERVAL_S) -> NoReturn:
    """Show what `request` returns, and again after each pause. On a terminal, what was shown before is cleared; else a
    blank line separates."""
    is_first = True
    while True:
        answer = request()
        _separate(is_first=is_first)
        is_first = False
        show(answer)
        sys.stdout.flush()
        time.sleep(pause_s)


def _separate(*, is_first: bool) -> None:
    """Clear what a terminal shows. Elsewhere print a blank line, unless nothing was shown before."""
    if sys.stdout.isatty():
        click.echo(_CLEAR, nl=False)
    elif not is_first:
        click.echo()


def rows_that_fit(others: int) -> int:
    """Return how many lines a terminal has besides `others` lines, at least one."""
    return max(1, shutil.get_terminal_size().lines - others)
