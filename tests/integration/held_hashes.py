"""Broker whose checks of passwords a test can hold: `truenext serve` that checks none while a file exists.

A login may take as long as a loaded machine needs.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

from truenext.broker import logins
from truenext.broker.users import UserEntry
from truenext.cli.main import main as truenext
from truenext.wire.stomp.server import STOMP_RULES, StompSession

OPENING_SECONDS = 60.0


def main(arguments: Sequence[str]) -> None:
    """Run `truenext`. The arguments are the path of the file and a command line."""
    hold, *command = arguments
    # Not that of `passwords`: a test may have planted another.
    find_credential: Callable[[UserEntry | None, str], str] = vars(logins)["find_credential"]

    def find(entry: UserEntry | None, passcode: str) -> str:
        while Path(hold).exists():
            time.sleep(0.0005)
        return find_credential(entry, passcode)

    rules = STOMP_RULES._replace(opening_seconds_max=OPENING_SECONDS)
    with mock.patch.object(logins, "find_credential", find), mock.patch.object(StompSession, "rules", rules):
        truenext(command)
