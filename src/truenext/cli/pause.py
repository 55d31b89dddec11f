"""`truenext pause` and `truenext resume`."""

from typing import Any

import click

from truenext.cli import terminal
from truenext.cli.connection import connected, send_control_request, url_option
from truenext.cli.values import QueueNameParam


@click.command()
@click.argument("queue", type=QueueNameParam(is_creatable=True))
@url_option
def pause(queue: str, url: str) -> None:
    """Dispatch nothing from QUEUE until it is resumed.

    It stays paused over a restart.

    What consumers hold stays with them, and sends go on. A queue that is not there is made.
    """
    if _request("pause", queue, url)["created"]:
        terminal.echo(f"there was no queue {queue!r}: made and paused")


@click.command()
@click.argument("queue", type=QueueNameParam())
@url_option
def resume(queue: str, url: str) -> None:
    """Dispatch from QUEUE again."""
    _request("resume", queue, url)


def _request(verb: str, queue: str, url: str) -> dict[str, Any]:
    with connected(url) as connection:
        answer: dict[str, Any] = send_control_request(connection, verb, {"queue": queue})
    return answer
