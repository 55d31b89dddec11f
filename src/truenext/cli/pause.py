"""`truenext pause` and `truenext resume`."""

from typing import Any

import click

from truenext.cli import terminal
from truenext.cli.connection import BrokerOptions, broker_options, connected, send_control_request
from truenext.cli.values import QueueNameParam


@click.command()
@click.argument("queue", type=QueueNameParam(is_creatable=True))
@broker_options
def pause(queue: str, broker: BrokerOptions) -> None:
    """Pause QUEUE: nothing is dispatched until it is resumed.

    The queue stays paused over a restart of the broker.

    Consumers keep the messages that they hold, and messages can be sent. A queue that does not exist is created.
    """
    if _request("pause", queue, broker)["created"]:
        terminal.echo(
            f"there was no queue {queue!r}: created and paused; if it is unused, it disappears a minute after "
            "`truenext resume`"
        )


@click.command()
@click.argument("queue", type=QueueNameParam())
@broker_options
def resume(queue: str, broker: BrokerOptions) -> None:
    """Resume QUEUE: its messages are dispatched again."""
    _request("resume", queue, broker)


def _request(verb: str, queue: str, broker: BrokerOptions) -> dict[str, Any]:
    with connected(broker) as connection:
        answer: dict[str, Any] = send_control_request(connection, verb, {"queue": queue})
    return answer
