"""Connection of a command to a broker: made at once or not at all, with its errors for the user."""

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
"""Environment variable with the address of the broker. The option overrides it; a blank value counts as unset."""

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
    """Connect to a broker, which must answer at once. Only with `reconnect` does the connection outlive a loss.

    Raises: `failure` for each error of the connection
    """
    logger = logging.getLogger("truenext.client")
    # Without a handler, logging would print warnings to standard error.
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
            # The broker did answer, but refused each attempt.
            raise failure(TruenextError(str(error))) from error
        raise failure(ConnectionLost(f"{url} does not answer in time: {error}")) from error
    except LocalProtocolError as error:
        # The request was right, so the peer is not a truenext broker.
        raise failure(RemoteProtocolError(str(error))) from error
    except TruenextError as error:
        raise failure(error) from error
    finally:
        logger.removeHandler(report)


class _ConnectionReport(logging.Handler):
    """Log handler that prints to standard error that the broker takes no messages, and, if the connection
    `is_lasting`, each loss and each reconnect once."""

    is_lasting = False
    _is_lost = False

    def emit(self, record: logging.LogRecord) -> None:
        # Only the log record of a new connection has a session.
        is_connected = isinstance(record.args, dict) and "session" in record.args
        if record.msg == NO_SPACE_TEXT:
            terminal.echo(f"truenext: {record.getMessage()}", err=True)
        elif self.is_lasting and is_connected is self._is_lost:
            self._is_lost = not is_connected
            terminal.echo(f"truenext: {'connected again' if is_connected else record.getMessage()}", err=True)


def send_control_request(connection: Connection, verb: str, request: object = None) -> Any:
    """Send a control request and return the decoded answer.

    Raises: TruenextError, TimeoutError
    """
    return msgspec.json.decode(connection.control_request(verb, request))
