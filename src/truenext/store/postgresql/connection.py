"""Connections to PostgreSQL.

libpq reads the URL, and finds hosts, certificates and the password (PGPASSFILE, or the service file). All waiting on an
open connection is done here, with a time limit: neither TCP nor a Unix socket shows that a server is frozen.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Generator, Sequence
from itertools import count
from math import ceil
from select import POLLIN, POLLOUT, poll
from typing import Any, LiteralString, Self, TypeVar

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from truenext.clock import monotonic
from truenext.errors import ConfigurationError, StoreError, TruenextError
from truenext.model.database import fault_of_database_url
from truenext.store.postgresql.failed_connection import NoConnectionError, connection_error
from truenext.store.postgresql.standing_by import Origin

Result = TypeVar("Result")

CONNECT_TIMEOUT_S = 10
SILENCE_S = 2.0
"""Time without a byte from the server after which a connection counts as lost."""

VERSION_MIN = 14

_READ, _WRITE = 1, 2
_WAKE_UP_MS = 200
"""Interval at which a waiting thread looks whether its connection was abandoned."""

_SETTINGS = {
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    "search_path": "pg_catalog",
    # A cancelled wait for the standby is told by a WARNING alone.
    "client_min_messages": "warning",
    # psycopg returns texts as bytes if the encoding of the session is SQL_ASCII.
    "client_encoding": "UTF8",
    "quote_all_identifiers": "off",
    "statement_timeout": "0",
    "transaction_timeout": "0",
    "lock_timeout": "0",
    "idle_session_timeout": "0",
    # So the server notices soon that the broker's machine is gone, and frees its locks.
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "4",
    "client_connection_check_interval": "1s",
    # A partition grows from nothing to 4,096 rows: plans must not depend on its statistics.
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "jit": "off",
}
"""Settings of each session. A setting that the server does not have is left out."""

_CONFIGURE = """
SELECT set_config(name, value, false)
FROM unnest(%s::text[], %s::text[]) AS configured (name, value) JOIN pg_settings USING (name)
WHERE name <> 'client_connection_check_interval' OR version() LIKE '%%linux%%'
"""
_SET_SYNCHRONOUS_COMMIT: LiteralString = """
SELECT set_config('synchronous_commit',
    CASE current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, false),
    current_setting('transaction_read_only') = 'on', pg_backend_pid()
"""
# The control file has the timeline only after a checkpoint: a server that was just promoted would name the former one.
_READ_ORIGIN: LiteralString = """
SELECT system_identifier, CASE WHEN NOT pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END
FROM pg_control_system()
"""
_BEGIN_SESSION: LiteralString = f"SELECT * FROM ({_SET_SYNCHRONOUS_COMMIT}) AS session, ({_READ_ORIGIN}) AS origin"
_BEGIN_SESSION_ALONE: LiteralString = f"SELECT *, NULL, NULL FROM ({_SET_SYNCHRONOUS_COMMIT}) AS session"

_UNKNOWN_ORIGIN = (
    psycopg.errors.InsufficientPrivilege,
    # Some managed services do without these functions.
    psycopg.errors.UndefinedFunction,
    psycopg.errors.FeatureNotSupported,
)

_SESSIONS = count(1)


class SilentServerError(psycopg.OperationalError):
    """The server has sent nothing for some time."""


class StandbyWaitError(psycopg.OperationalError):
    """A lock is kept by a session that waits for a synchronous standby."""


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """Connection that waits at most `silence_s` seconds for a next byte of the server. Then it is closed."""

    silence_s = SILENCE_S
    has_warned = False
    """True if the server has sent a WARNING since this was set to False."""
    has_prepared_append = False
    """True if the session has the statements of `log_rows.append_row`."""
    is_read_only = False
    """True if the server cannot be written to, such as a standby."""
    session = 0
    """Number of this connection among those that the process has opened."""
    origin: Origin | None = None
    """System identifier and timeline of the server; None if it is a standby, or the role may not read them."""
    _answer: pq.abc.PGresult | None = None
    """First result of the last prepared statement."""
    is_abandoned = False
    """True if all waiting shall end. Another thread may set it."""

    def wait(self, gen: Generator[Any, Any, Result], interval: float = 0.0, timeout: float | None = None) -> Result:
        try:
            interest = next(gen)
            while True:
                interest = gen.send(self._wait_until_ready(interest))
        except StopIteration as end:
            result: Result = end.value
            return result

    def execute_prepared(self, name: bytes, parameters: Sequence[bytes], formats: Sequence[int]) -> list[bytes | None]:
        """Execute a prepared statement. Parameters and results are binary.

        Return the values of the first row; an empty list if there is none. Raises: psycopg.Error
        """
        self.begin_prepared(name, parameters, formats)
        return self.finish_prepared()

    def begin_prepared(self, name: bytes, parameters: Sequence[bytes], formats: Sequence[int]) -> None:
        """Begin to execute a prepared statement, without waiting. Raises: psycopg.Error"""
        self._answer = None
        self.pgconn.send_query_prepared(name, parameters, formats, pq.Format.BINARY)

    def send(self) -> bool:
        """Send what the socket takes of the statement that was begun, without waiting. Return whether all of it is
        sent. Raises: psycopg.Error"""
        return not self.pgconn.flush()

    def read_answer(self) -> bool:
        """Read what has arrived, without waiting. Return whether the answer is complete. Raises: psycopg.Error"""
        self.pgconn.consume_input()
        return self._is_answered()

    def finish_prepared(self) -> list[bytes | None]:
        """Return what `execute_prepared` does, for the statement that was begun. May be called again after it.

        Raises: psycopg.Error
        """
        result = self._fetch()
        if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
            raise psycopg.errors.error_from_result(result, self.info.encoding)
        return [result.get_value(0, column) for column in range(result.nfields)] if result.ntuples else []

    def prepare(self, name: bytes, statement: str, types: Sequence[int]) -> None:
        """Prepare a statement whose parameters have these types, by their OIDs. Raises: psycopg.Error"""
        self._answer = None
        self.pgconn.send_prepare(name, statement.encode(), types)
        result = self._fetch()
        if result.status != pq.ExecStatus.COMMAND_OK:
            raise psycopg.errors.error_from_result(result, self.info.encoding)

    def _fetch(self) -> pq.abc.PGresult:
        """Send all that is to be sent, and return the first result."""
        pgconn = self.pgconn
        while pgconn.flush():
            if self._wait_until_ready(_READ | _WRITE) & _READ:
                pgconn.consume_input()
        while not self._is_answered():
            self._wait_until_ready(_READ)
            pgconn.consume_input()
        if self._answer is None:
            raise psycopg.OperationalError("the server has sent no result")
        return self._answer

    def _is_answered(self) -> bool:
        """Take the results that have arrived. Return whether there will be no other."""
        pgconn = self.pgconn
        while not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:
                return True
            self._answer = self._answer or result
        return False

    def _wait_until_ready(self, interest: int) -> int:
        """Wait until the socket is ready for reading, writing, or one of both, as `interest` says. Return for which it
        is ready. Both numbers are sums of _READ and _WRITE."""
        waiting = poll()
        waiting.register(
            self.pgconn.socket, (POLLIN if interest & _READ else 0) | (POLLOUT if interest & _WRITE else 0)
        )
        deadline = monotonic() + self.silence_s
        while not self.is_abandoned:
            for _, events in waiting.poll(_WAKE_UP_MS):
                ready = (_READ if events & POLLIN else 0) | (_WRITE if events & POLLOUT else 0)
                # An error or the end of the connection is found by reading or writing.
                return ready or interest
            if monotonic() >= deadline:
                break
        self.close()
        raise SilentServerError(f"the server has not answered for {self.silence_s:.0f} seconds")

    def _note(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        if diagnostic.severity_nonlocalized == "WARNING":
            self.has_warned = True

    @classmethod
    def open(cls, parameters: dict[str, str], timeout_s: float = CONNECT_TIMEOUT_S) -> Self:
        """Connect, and configure the session. `parameters` are those of `parse_url`.

        Raises: ConfigurationError if the server is too old, or behind a pooler; psycopg.errors.ReadOnlySqlTransaction
        if it is read-only; NoConnectionError if no connection could be opened; psycopg.Error
        """
        connection = cls.open_for_reading(parameters, timeout_s)
        if connection.is_read_only:
            connection.close()
            raise psycopg.errors.ReadOnlySqlTransaction("the server is read-only")
        return connection

    @classmethod
    def open_for_reading(cls, parameters: dict[str, str], timeout_s: float = CONNECT_TIMEOUT_S) -> Self:
        """Connect as `open` does, to a read-only server, too."""
        limits = {"connect_timeout": str(max(2, ceil(timeout_s))), "application_name": application_name()}
        try:
            connection = cls.connect(make_conninfo("", **(limits | parameters)), autocommit=True)
        except psycopg.Error as error:
            # Its own text may have values of the URL.
            raise connection_error(error, parameters) from None
        try:
            connection._configure()
        except BaseException:
            connection.close()
            raise
        return connection

    def _configure(self) -> None:
        self.add_notice_handler(self._note)
        # After an ALTER, psycopg would deallocate the statements that it has prepared, and those of `prepare`, too.
        self.prepare_threshold = None
        if self.info.server_version < VERSION_MIN * 10_000:
            raise ConfigurationError(
                f"PostgreSQL at {self.where} is version {self.info.server_version // 10_000}: truenext needs version "
                f"{VERSION_MIN} or later"
            )
        self.execute(_CONFIGURE, (list(_SETTINGS), list(_SETTINGS.values())))
        try:
            row = self.execute(_BEGIN_SESSION).fetchone()
        except _UNKNOWN_ORIGIN:
            row = self.execute(_BEGIN_SESSION_ALONE).fetchone()
        assert row is not None
        if row[2] != self.info.backend_pid:
            raise ConfigurationError(
                "the URL of the store leads to a connection pooler: name PostgreSQL itself, because a log needs a "
                "session of its own"
            )
        self.is_read_only = row[1]
        self.session = next(_SESSIONS)
        self.origin = None if row[4] is None else Origin(row[3], int(row[4], 16))

    @property
    def where(self) -> str:
        """Host and port of the server, for errors."""
        return f"{self.info.host}:{self.info.port}"


def application_name() -> str:
    """Return the name under which the sessions of this process are shown. PostgreSQL cuts names after 63 bytes."""
    tail = f" {os.getpid()}"
    host = platform.node().encode("ascii", "replace").decode()
    return f"truenext {host}"[: 63 - len(tail)] + tail


def parse_url(url: str) -> dict[str, str]:
    """Return the parameters of libpq that a URL `postgresql://...` has. Of several hosts libpq takes the one that can
    be written to.

    Raises: ConfigurationError if the URL cannot be read, or has a password. The text has nothing of the URL.
    """
    if fault := fault_of_database_url(url):
        raise ConfigurationError(f"the URL of the store {fault}")
    try:
        parsed = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
    except psycopg.Error as error:
        # libpq's text has a part of the URL, which may be a password.
        raise ConfigurationError(_fault_of_url(url, str(error))) from None
    if "," in parsed.get("host", "") + parsed.get("hostaddr", ""):
        parsed.setdefault("target_session_attrs", "read-write")
    return parsed


def _fault_of_url(url: str, libpq_text: str) -> str:
    option = re.search(r'invalid URI query parameter: "([a-z_]+)"', libpq_text)
    # With an @ behind the question mark, the option may be the end of a password.
    if option and "@" not in url.partition("?")[2]:
        return f'libpq has no option "{option[1]}": correct the URL of the store'
    return "the URL of the store cannot be read: write postgresql://USER@HOST:PORT/DATABASE"


def opening_error(error: psycopg.Error, failure: str) -> TruenextError:
    """Return the error for a broker or a command that cannot begin because of `error`. `failure` says what has failed:
    "cannot open the log in PostgreSQL", for example."""
    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
        return ConfigurationError(
            "the URL of the store leads to a PostgreSQL that is read-only, such as a standby: name the primary"
        )
    if isinstance(error, NoConnectionError):
        return ConfigurationError(str(error)) if error.is_lasting else StoreError(str(error))
    return StoreError(f"{failure}: {describe(error)}")


def describe(error: psycopg.Error) -> str:
    """Return PostgreSQL's text of an error, in one line. Details of a violated constraint are left out: they show the
    row, and so a message."""
    text = error.diag.message_primary or str(error)
    if error.diag.message_detail and not isinstance(error, psycopg.IntegrityError):
        text += f" ({error.diag.message_detail})"
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
