"""Signals that arrive while `truenext serve` or `truenext stages run` starts, from the first line of the command on. A
broker that stands by is still starting.

SIGTERM, SIGINT    end the start at once, with exit status 0. An interrupted start does no harm.
SIGHUP             is noted if a broker starts. Only the parsed options tell whether the broker has files to reload. A
                   broker with such files reloads them once it stands by or listens. A broker without such files ends,
                   as at any later SIGHUP.

The handlers of the running broker or service later replace these handlers.
"""

import os
import signal
from collections.abc import Sequence

_noted: list[int] = []
"""SIGHUPs that have arrived and have had no effect yet."""

_former: list[signal.Handlers] = []
"""Handler of SIGHUP before `listen` replaced it; empty if `listen` has not replaced it."""


def listen(arguments: Sequence[str]) -> None:
    """Set the signal handlers, if these arguments of `truenext` start a broker or a service."""
    is_broker = arguments[:1] == ["serve"]
    if is_broker or arguments[:2] == ["stages", "run"]:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda *_: os._exit(0))
    if is_broker:
        is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        _former.append(signal.SIG_IGN if is_ignored else signal.SIG_DFL)
        signal.signal(signal.SIGHUP, lambda number, _: _noted.append(number))


def take_noted_sighup() -> bool:
    """Return whether a SIGHUP was noted since the last call."""
    is_noted = bool(_noted)
    _noted.clear()
    return is_noted


def restore_sighup() -> None:
    """Restore the earlier handling of SIGHUP. If a SIGHUP was noted, raise it again."""
    if _former:
        signal.signal(signal.SIGHUP, _former.pop())
    if _noted:
        signal.raise_signal(signal.SIGHUP)
