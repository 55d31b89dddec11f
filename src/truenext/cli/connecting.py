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
from truenext.cli.values import URL, UrlOption
from truenext.client.core.context import NO_ROOM
from truenext.errors import ConnectionLost, LocalProtocolError, Refused, RemoteProtocolError, TruenextError
from truenext.url import DEFAULT_URL

URL_VARIABLE = "TRUENEXT_URL"
"""Environment variable for the address of the broker; the option overrides it, and an empty or blank one counts as
unset."""

url_option = click.option(
    "--url",
    cls=UrlOption,
    type=URL,
    envvar=URL_VARIABLE,
    show_envvar=True,
    default=[DEFAULT_URL],
    show_default=True,
    help="Address of the broker.",
)


@contextmanager
def connected(url: str, *, reconnect: bool = False, failure: type[Failure] = Failure) -> Iterator[Connection]:
    """A connection, whose loss is the end unless it is to `reconnect`; at first a broker must be there in any case.

    Raises: `failure` for whatever goes wrong with it
    """
    logger = logging.getLogger("truenext.client")
    # Where a command says nothing, logging would print warnings by itself.
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    said = _Said()
    logger.addHandler(said)
    try:
        if reconnect:
            with connect(url, reconnect=False):
                said.lasts = True
                logger.setLevel(logging.INFO)
        with connect(url, reconnect=reconnect) as connection:
            yield connection
    except TimeoutError as error:
        if isinstance(error.__cause__, Refused):
            # The broker has answered, again and again.
            raise failure(TruenextError(str(error))) from error
        raise failure(ConnectionLost(f"{url} does not answer in time: {error}")) from error
    except LocalProtocolError as error:
        # What was asked for is right; whoever has answered is no broker of ours.
        raise failure(RemoteProtocolError(str(error))) from error
    except TruenextError as error:
        raise failure(error) from error
    finally:
        logger.removeHandler(said)


class _Said(logging.Handler):
    """Prints to standard error what happens to the connection of a command while it waits: that the broker takes no
    messages, and, of a connection that `lasts`, that it was lost and that it is back, once each."""

    lasts = False
    _has_gone = False

    def emit(self, record: logging.LogRecord) -> None:
        # Only what has come has a session.
        has_come = isinstance(record.args, dict) and "session" in record.args
        if record.msg == NO_ROOM:
            terminal.say(f"truenext: {record.getMessage()}", err=True)
        elif self.lasts and has_come is self._has_gone:
            self._has_gone = not has_come
            terminal.say(f"truenext: {'connected again' if has_come else record.getMessage()}", err=True)


def ask(connection: Connection, verb: str, question: object = None) -> Any:
    """The broker's answer, read. Raises: TruenextError, TimeoutError"""
    return msgspec.json.decode(connection.control_request(verb, question))
