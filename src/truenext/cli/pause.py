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
    """Pause QUEUE: nothing is dispatched until it is resumed.

    The queue stays paused over a restart of the broker.

    Consumers keep the messages that they hold, and messages can be sent. A queue that does not exist is created.
    """
    if _request("pause", queue, url)["created"]:
        terminal.echo(f"there was no queue {queue!r}: created and paused")


@click.command()
@click.argument("queue", type=QueueNameParam())
@url_option
def resume(queue: str, url: str) -> None:
    """Resume QUEUE: its messages are dispatched again."""
    _request("resume", queue, url)


def _request(verb: str, queue: str, url: str) -> dict[str, Any]:
    with connected(url) as connection:
        answer: dict[str, Any] = send_control_request(connection, verb, {"queue": queue})
    return answer
