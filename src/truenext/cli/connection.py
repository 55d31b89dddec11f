"""Connection of a command to a broker. The command does not wait for a broker that is down. Errors are printed for the
user."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import click
import msgspec
from click.core import ParameterSource

from truenext.blocking import Connection, connect
from truenext.cli import terminal
from truenext.cli.exit_status import CommandFailure
from truenext.cli.values import TEXT, URL, PathParam, UrlOption, VariableOption, seconds_option
from truenext.client.core.client import NO_ANSWER_HINT
from truenext.client.core.context import DRAINING_TEXT, NO_SPACE_TEXT
from truenext.client.core.credentials import CREDENTIAL_FILES, Credentials
from truenext.client.core.flows import CLOSE_TIMEOUT_S
from truenext.errors import Code, ConnectionLost, LocalProtocolError, Refused, RemoteProtocolError, TruenextError
from truenext.model.url import DEFAULT_URL

URL_VARIABLE = "TRUENEXT_URL"
"""Environment variable with the address of the broker. The option `--url` overrides it. A blank value counts as
unset."""

USER_VARIABLE, PASSWORD_VARIABLE, PASSWORD_FILE_VARIABLE = (
    "TRUENEXT_USER",
    "TRUENEXT_PASSWORD",
    "TRUENEXT_PASSWORD_FILE",
)
"""Environment variables with user and password. Blank values count as unset. There is no option for a password, because
other users of the machine could read it in the list of processes."""
CA_VARIABLE = "TRUENEXT_CA"
"""Environment variable with the path of a file of certificates. The certificates are those of the authorities that sign
brokers' certificates. A blank value counts as unset."""
LOGIN_HINT = f"set {USER_VARIABLE} and {PASSWORD_FILE_VARIABLE}, or --user and --password-file"

_user_option = click.option(
    "--user",
    cls=VariableOption,
    type=TEXT,
    envvar=USER_VARIABLE,
    show_envvar=True,
    help="Name of the user with which to log in at the broker.",
)
_password_file_option = click.option(
    "--password-file",
    cls=VariableOption,
    type=PathParam(dir_okay=False),
    envvar=PASSWORD_FILE_VARIABLE,
    show_envvar=True,
    help=f"File with the user's password in its first line. {PASSWORD_VARIABLE} may have the password itself.",
)
ca_option = click.option(
    "--ca",
    cls=VariableOption,
    type=PathParam(dir_okay=False),
    envvar=CA_VARIABLE,
    show_envvar=True,
    help="PEM file with certificates of authorities that may sign the broker's certificate, for stomp+ssl:// "
    "addresses; by default the authorities that the system trusts.",
)
_certificate_option = click.option(
    "--certificate",
    type=PathParam(dir_okay=False),
    help="PEM file with a certificate that the command shows to the broker.",
)
_key_option = click.option(
    "--key",
    type=PathParam(dir_okay=False),
    help="PEM file with the private key of --certificate; by default the key is in the same file.",
)


timeout_option = seconds_option(
    "--timeout",
    "connect_timeout_s",
    default=CLOSE_TIMEOUT_S,
    help="Seconds within which the broker must accept the login. Several addresses share them.",
)


class BrokerOptions(NamedTuple):
    """Addresses of brokers, the credentials for them, and how long to wait for them. The values come from the command
    line and the environment. The first broker that answers is used."""

    urls: tuple[str, ...]
    credentials: Credentials
    timeout_s: float = CLOSE_TIMEOUT_S
    """Seconds within which the broker must accept the login."""

    def connect(self, *, reconnect: bool) -> Connection:
        """Connect to the broker.

        Raises: ConfigurationError if a file of the credentials cannot be used; otherwise the errors of
        `truenext.blocking.connect`
        """
        return connect(*self.urls, **self.credentials.arguments(), reconnect=reconnect, timeout=self.timeout_s)


def broker_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--timeout` and the options of `address_options` to a command. The command gets them as the argument
    `broker`."""

    @wraps(command)
    def with_timeout(*, broker: BrokerOptions, connect_timeout_s: float, **values: Any) -> None:
        command(broker=broker._replace(timeout_s=connect_timeout_s), **values)

    return address_options(timeout_option(with_timeout))


def broker_urls_option(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the option, with this name, for addresses of brokers. The command gets them as the argument `urls`."""
    return click.option(
        name,
        "urls",
        cls=UrlOption,
        type=URL,
        envvar=URL_VARIABLE,
        show_envvar=True,
        default=[DEFAULT_URL],
        show_default=True,
        help="Address of the broker, stomp://HOST:PORT, or stomp+ssl://HOST:PORT with TLS. May be repeated, and the "
        "variable may have several, with spaces between them: the first broker that answers is used.",
    )


def address_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--url` and the options of `credentials_options` to a command. The command gets them as the argument
    `broker`."""

    @wraps(command)
    def with_broker(*, urls: tuple[str, ...], credentials: Credentials, **values: Any) -> None:
        command(broker=BrokerOptions(urls, credentials), **values)

    return broker_urls_option("--url")(credentials_options(with_broker))


def credentials_options(command: Callable[..., None], *, has_key: bool = True) -> Callable[..., None]:
    """Add the options for the login and for TLS to a command. The command gets them as the argument `credentials`.
    Without `has_key` there is no `--key`: the private key is in the file of the certificate."""

    @wraps(command)
    def with_credentials(*, user: str | None, **values: Any) -> None:
        files = {name: values.pop(name, None) for name in CREDENTIAL_FILES}
        command(credentials=_credentials(user, files), **values)

    with_key = _key_option(with_credentials) if has_key else with_credentials
    return _user_option(_password_file_option(ca_option(_certificate_option(with_key))))


def _credentials(user: str | None, files: Mapping[str, Path | None]) -> Credentials:
    if files["key"] is not None and files["certificate"] is None:
        raise click.UsageError("--key needs --certificate: set both, or neither")
    context = click.get_current_context()
    password = os.environ.get(PASSWORD_VARIABLE, "")
    if not password.strip() or context.get_parameter_source("password_file") is ParameterSource.COMMANDLINE:
        password = ""
    elif files["password_file"] is not None:
        raise click.UsageError(f"{PASSWORD_VARIABLE} excludes {PASSWORD_FILE_VARIABLE}: unset one of them")
    named = {name: str(file) for name, file in files.items() if file is not None}
    try:
        return Credentials(user=user, password=password or None, **named)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def split_by_source(merged: Credentials) -> tuple[Credentials, Credentials]:
    """Split a command's credentials by their source. The first result has the credentials of the command line. The
    second has the login of the environment. The user of this login is that of the environment, even if the command line
    names another user.

    Raises: click.UsageError if the environment's login is invalid
    """
    context = click.get_current_context()
    names = [
        each for each in ("user", "password_file") if context.get_parameter_source(each) is ParameterSource.COMMANDLINE
    ]
    line = replace(merged, password=None, **{each: None for each in ("user", "password_file") if each not in names})
    variable = os.environ.get(USER_VARIABLE, "")
    try:
        environment = Credentials(
            user=variable if variable.strip() else None,
            password=merged.password,
            password_file=None if "password_file" in names else merged.password_file,
        )
    except ValueError as error:
        raise click.UsageError(f"{USER_VARIABLE}: {error}") from error
    return line, environment


def with_login_hint(error: TruenextError, credentials: Credentials) -> TruenextError:
    """Return the error. If a login without a user was refused, add to its text how to name a user."""
    if isinstance(error, Refused) and error.code == Code.LOGIN and credentials.user is None:
        return Refused(f"{error}; {LOGIN_HINT}", error.code)
    return error


@contextmanager
def connected(
    broker: BrokerOptions,
    *,
    reconnect: bool = False,
    drain_timeout_s: float = 0.0,
    failure: type[CommandFailure] = CommandFailure,
) -> Iterator[Connection]:
    """Connect to a broker without waiting for it to come up. With `reconnect` a lost connection is opened again. A
    broker that is being drained has `drain_timeout_s` seconds until it must accept the login.

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
            with broker.connect(reconnect=False):
                report.is_lasting = True
                logger.setLevel(logging.INFO)
        with _connect_after_drain(broker, drain_timeout_s, reconnect=reconnect) as connection:
            yield connection
    except TimeoutError as error:
        if isinstance(error.__cause__, Refused):
            # The broker did answer, but refused each attempt.
            raise failure(TruenextError(str(error))) from error
        urls = " or ".join(broker.urls)
        raise failure(ConnectionLost(f"{urls} does not answer in time: {error}; {NO_ANSWER_HINT}")) from error
    except LocalProtocolError as error:
        # The request was right, so the peer is not a truenext broker.
        raise failure(RemoteProtocolError(str(error))) from error
    except TruenextError as error:
        raise failure(with_login_hint(error, broker.credentials)) from error
    finally:
        logger.removeHandler(report)


def _connect_after_drain(broker: BrokerOptions, timeout_s: float, *, reconnect: bool) -> Connection:
    ends_at = monotonic() + timeout_s
    while True:
        try:
            return broker.connect(reconnect=reconnect)
        except Refused as error:
            if error.code != Code.DRAINING or monotonic() >= ends_at:
                raise


class _ConnectionReport(logging.Handler):
    """Log handler that prints some events of a connection to standard error: that the broker has no space for messages
    or is being drained, and, if the connection `is_lasting`, each loss and each reconnect."""

    is_lasting = False
    _is_lost = False

    def emit(self, record: logging.LogRecord) -> None:
        # Only the log record of a new connection has a session.
        is_connected = isinstance(record.args, dict) and "session" in record.args
        if record.msg in (DRAINING_TEXT, NO_SPACE_TEXT):
            terminal.echo(f"truenext: {record.getMessage()}", err=True)
        elif self.is_lasting and is_connected is self._is_lost:
            self._is_lost = not is_connected
            terminal.echo(f"truenext: {'connected again' if is_connected else record.getMessage()}", err=True)


def send_control_request(connection: Connection, verb: str, request: object = None) -> Any:
    """Send a control request, and return the decoded answer.

    Raises: TruenextError if the broker refuses it, or the connection is lost; TimeoutError without an answer
    """
    return msgspec.json.decode(connection.control_request(verb, request))


def control_answers(connection: Connection, verb: str, request: dict[str, Any]) -> Iterator[Any]:
    """Yield the decoded answers to a control request that the broker does in pieces, until nothing is left. The caller
    may change `request` between two answers.

    Raises: TruenextError if the broker refuses a piece, or the connection is lost; TimeoutError without an answer
    """
    after: list[int] | None = [0, 0]
    until: dict[str, int] = {}
    while after is not None:
        answer = send_control_request(connection, verb, request | until | {"after": after})
        after, until = answer["next"], {"until": answer["until"]}
        yield answer
