"""`truenext pause` and `truenext resume`."""

import click
import msgspec

from truenext.cli.client import Failure, url_option
from truenext.client.connection import Connection
from truenext.errors import TruenextError


@click.command()
@click.argument("queue")
@url_option
def pause(queue: str, url: str) -> None:
    """Dispatch nothing from QUEUE any more, until it is resumed; also after a restart.

    What consumers hold stays with them, and sends go on.
    """
    _ask("pause", queue, url)


@click.command()
@click.argument("queue")
@url_option
def resume(queue: str, url: str) -> None:
    """Dispatch from QUEUE again."""
    _ask("resume", queue, url)


def _ask(verb: str, queue: str, url: str) -> None:
    try:
        with Connection(url) as connection:
            connection.ask(verb, msgspec.json.encode({"queue": queue.removeprefix("/queue/")}))
    except TruenextError as error:
        raise Failure(error) from error
