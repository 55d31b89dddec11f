"""How a command gets to a broker: at once or not at all, and what it says if that fails."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import msgspec

from truenext.blocking import Connection, connect
from truenext.cli import terminal
from truenext.cli.exit_status import CommandFailure
from truenext.cli.values import URL, UrlOption
from truenext.client.core.context import NO_SPACE_TEXT
from truenext.errors import ConnectionLost, LocalProtocolError, Refused, RemoteProtocolError, TruenextError
from truenext.model.url import DEFAULT_URL

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
def connected(
    url: str, *, reconnect: bool = False, failure: type[CommandFailure] = CommandFailure
) -> Iterator[Connection]:
    """A connection, whose loss is the end unless it is to `reconnect`; at first a broker must be there in any case.

    Raises: `failure` for whatever goes wrong with it
    """
    logger = logging.getLogger("truenext.client")
    # Where a command says nothing, logging would print warnings by itself.
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    report = _ConnectionReport()
    logger.addHandler(report)
    try:
        if reconnect:
            with connect(url, reconnect=False):
                report.is_lasting = True
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
        logger.removeHandler(report)


class _ConnectionReport(logging.Handler):
    """Prints to standard error what happens to the connection of a command while it waits: that the broker takes no
    messages, and, of a connection that `is_lasting`, that it was lost and that it is back, once each."""

    is_lasting = False
    _is_lost = False

    def emit(self, record: logging.LogRecord) -> None:
        # Only what has come has a session.
        is_connected = isinstance(record.args, dict) and "session" in record.args
        if record.msg == NO_SPACE_TEXT:
            terminal.echo(f"truenext: {record.getMessage()}", err=True)
        elif self.is_lasting and is_connected is self._is_lost:
            self._is_lost = not is_connected
            terminal.echo(f"truenext: {'connected again' if is_connected else record.getMessage()}", err=True)


def send_control_request(connection: Connection, verb: str, request: object = None) -> Any:
    """The broker's answer, read. Raises: TruenextError, TimeoutError"""
    return msgspec.json.decode(connection.control_request(verb, request))
