"""How a command gets to a broker: at once or not at all, and what it says if that fails."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import msgspec

from truenext.blocking import Connection, connect
from truenext.cli import terminal
from truenext.cli.ending import Failure
from truenext.cli.values import URL
from truenext.errors import ConnectionLost, TruenextError
from truenext.url import DEFAULT_URL

url_option = click.option("--url", type=URL, default=DEFAULT_URL, show_default=True, help="Where the broker listens.")


@contextmanager
def connected(url: str, *, reconnect: bool = False, failure: type[Failure] = Failure) -> Iterator[Connection]:
    """A connection, whose loss is the end unless it is to `reconnect`.

    Raises: `failure` for whatever goes wrong with it
    """
    logger = logging.getLogger("truenext.client")
    logger.addHandler(_Said() if reconnect else logging.NullHandler())
    logger.propagate = False
    try:
        with connect(url, reconnect=reconnect) as connection:
            yield connection
    except TimeoutError as error:
        raise failure(ConnectionLost(f"{url} does not answer in time: {error}")) from error
    except TruenextError as error:
        raise failure(error) from error


class _Said(logging.Handler):
    """What becomes of a connection that is to last, on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        error = getattr(record, "error", "")
        terminal.say(f"truenext: {record.getMessage()}{f' ({error})' if error else ''}", err=True)


def ask(connection: Connection, verb: str, question: object = None) -> Any:
    """The broker's answer, read. Raises: TruenextError, TimeoutError"""
    return msgspec.json.decode(connection.ask(verb, question))
