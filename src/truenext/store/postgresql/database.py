"""Database of a log: one connection, made again when it is lost, and calls that are repeated until they succeed.

A call fails only when PostgreSQL refuses, or when its patience has ended. What the caller must know of a doubt, such as
a lost answer, it finds out itself when it is called again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import psycopg

from truenext.clock import boottime, monotonic
from truenext.errors import ConfigurationError, StoreError
from truenext.store.log import Awaited, Wait
from truenext.store.postgresql import log_rows, takeover
from truenext.store.postgresql.background import begin_wait, describe_refusal
from truenext.store.postgresql.connection import (
    CONNECT_TIMEOUT_S,
    SILENCE_S,
    Connection,
    SilentServerError,
    StandbyWaitError,
    describe,
)
from truenext.store.postgresql.layout import attach_partitions
from truenext.store.postgresql.log_end import LogEnd
from truenext.store.postgresql.outcome import ErrorKind, NewRow, kind_of_error
from truenext.store.store import Progress

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_PAUSE_MIN_S = 0.05
_PAUSE_MAX_S = 1.0

_CANNOT_FOLLOW = "connection to PostgreSQL lost: cannot follow the log until it is back"
_WARNINGS = {
    ErrorKind.LOST: "connection to PostgreSQL lost: nothing is confirmed until it is back",
    ErrorKind.STANDBY: "the synchronous standby does not confirm: nothing is confirmed until it does",
    ErrorKind.DISK_FULL: "PostgreSQL's disk is full: nothing is confirmed until it has space",
    ErrorKind.INTERRUPTED: "PostgreSQL has interrupted a statement: trying again",
}


_AWAITED = {ErrorKind.STANDBY: Awaited.STANDBY, ErrorKind.DISK_FULL: Awaited.SPACE}


class Database:
    def __init__(self, parameters: dict[str, str], end: LogEnd, *, is_replicated: bool, patience_s: float) -> None:
        """Calls wait up to `patience_s` seconds for a database that is not available."""
        self.parameters = parameters
        self._end = end
        self.is_replicated = is_replicated
        self.patience_s = patience_s
        self.connection: Connection | None = None
        self.server = ""
        """Host and port of the last connection."""
        self.wait: Wait | None = None
        self.is_full = False
        self.is_active = False
        """True once the broker has taken over, so that it confirms nothing while the database is away."""
        self.is_stopping = False
        """True if a full disk is not to be waited for any longer than the patience."""
        self.pending: PendingAppend | None = None
        """Append that was begun, and whose answer is still to be read, on the connection on which it was begun."""
        self._unconfirmed: _Attempts | None = None
        """Attempts of `call` whose result was not confirmed yet."""
        self._standby_s = 0.0
        """Seconds for which the server may be silent in addition, while it waits for a slow synchronous standby.
        Without this allowance, each wait would be cut, and a row never be certain."""

    def open(self) -> Connection:
        """Connect for the first time. Raises: ConfigurationError; psycopg.Error"""
        self.connection = connection = Connection.open(self.parameters)
        _check_server(connection, is_replicated=self.is_replicated)
        self.server = connection.where
        return connection

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()

    def call(
        self,
        action: Callable[[Connection], Result],
        silence_s: float = SILENCE_S,
        is_confirmed: Callable[[Result], bool] | None = None,
    ) -> Result:
        """Call `action` with a connection, until it succeeds or the patience ends.

        If `is_confirmed` returns False for a result, PostgreSQL's synchronous standby may lack what was done. Then the
        next call with `is_confirmed` goes on with the same patience.

        Raises: StoreError if PostgreSQL refuses the action, or was not available for too long
        """
        attempts = (is_confirmed and self._unconfirmed) or _Attempts(self.patience_s)
        while True:
            try:
                connection = self._connected(attempts)
                connection.silence_s = silence_s
                if is_confirmed is not None:
                    connection.silence_s = min(silence_s + self._standby_s, max(silence_s, attempts.left_s))
                result = action(connection)
            except psycopg.Error as error:
                self._handle(error, attempts)
            else:
                if is_confirmed is not None:
                    self._unconfirmed = None if is_confirmed(result) else attempts
                    if attempts.passed_s < SILENCE_S:
                        self.note_quick_answer()
                if attempts.has_failed and self._unconfirmed is None:
                    # A warning, because the last line of the log must not be that nothing is confirmed.
                    logger.warning(
                        "PostgreSQL is available again",
                        extra={"schema": self._end.schema, "seconds": round(attempts.passed_s, 1)},
                    )
                    self.is_full = False
                    self.wait = None
                return result

    def check_standbys(self, are_named: bool) -> None:
        """Raises: StoreError if there must be synchronous standbys, and none `are_named`"""
        if self.is_replicated and not are_named:
            raise StoreError(takeover.NO_STANDBYS)

    def note_quick_answer(self) -> None:
        """Note that the server has confirmed a row in less than SILENCE_S."""
        self._standby_s = 0.0

    def _connected(self, attempts: _Attempts, timeout_s: float = CONNECT_TIMEOUT_S) -> Connection:
        # The loss of the connection of an append that was begun is found by reading its answer.
        if self.connection is None or (self.connection.closed and self.pending is None):
            self.connection = self._connect_again(min(timeout_s, attempts.left_s))
            self.server = self.connection.where
        return self.connection

    def _connect_again(self, timeout_s: float) -> Connection:
        try:
            with ExitStack() as resources:
                connection = Connection.open(self.parameters, timeout_s)
                resources.callback(connection.close)
                # It may be another server than before.
                _check_server(connection, is_replicated=self.is_replicated)
                self._end.check_is_no_copy(connection)
                resources.pop_all()
                return connection
        except ConfigurationError as error:
            # It was right when the log was opened.
            raise StoreError(str(error)) from error

    def _handle(self, error: psycopg.Error, attempts: _Attempts) -> None:
        """Do what makes another attempt possible, and wait. Raises: StoreError if there shall be none"""
        kind = ErrorKind.STANDBY if isinstance(error, StandbyWaitError) else kind_of_error(error.sqlstate)
        # An error of a constraint has the same SQLSTATE, and a name.
        if kind is ErrorKind.NO_PARTITION and error.diag.constraint_name is None and not attempts.has_attached:
            self._attach(attempts)
            return
        if kind in (ErrorKind.OTHER, ErrorKind.NUMBER_EXISTS, ErrorKind.NO_PARTITION):
            raise StoreError(f"PostgreSQL refuses to write to the log: {describe_refusal(error)}") from error
        if kind is ErrorKind.LOST and self.connection is not None:
            self.connection.close()
        if isinstance(error, SilentServerError) and self._waits_for_standby(attempts):
            kind = ErrorKind.STANDBY
            self._standby_s = min(2 * self._standby_s + SILENCE_S, self.patience_s / 2)
        self._note(kind, error, attempts)
        if kind is ErrorKind.DISK_FULL:
            self.is_full = True
            if not self.is_stopping:
                attempts.extend()
        if not attempts.wait():
            raise self._unavailable(error, attempts) from error

    def _waits_for_standby(self, attempts: _Attempts) -> bool:
        """Connect again, and return whether the silence is a wait for a synchronous standby."""
        try:
            return log_rows.waits_for_standby(self._connected(attempts, SILENCE_S))
        except psycopg.Error:
            return False

    def _note(self, kind: ErrorKind, error: psycopg.Error, attempts: _Attempts) -> None:
        if kind not in attempts.kinds:
            reason = {} if kind is ErrorKind.STANDBY else {"reason": describe(error)}
            cannot_follow = kind is ErrorKind.LOST and not self.is_active
            text = _CANNOT_FOLLOW if cannot_follow else _WARNINGS[kind]
            logger.warning(text, extra={"schema": self._end.schema, "server": self.server} | reason)
        attempts.note(kind)
        awaited = _AWAITED.get(attempts.cause, Awaited.DATABASE)
        self.wait = self.wait._replace(awaited=awaited) if self.wait else begin_wait(awaited)

    def _unavailable(self, error: psycopg.Error, attempts: _Attempts) -> StoreError:
        if attempts.cause is ErrorKind.STANDBY:
            return StoreError(
                f"the synchronous standby of PostgreSQL at {self.server} has not confirmed for {self.patience_s:g} "
                "seconds: start the standby, or change synchronous_standby_names, and start the broker again"
            )
        return StoreError(
            f"PostgreSQL was not available for {self.patience_s:g} seconds ({describe(error)}): start the broker "
            "again when it is"
        )

    def _attach(self, attempts: _Attempts) -> None:
        attempts.has_attached = True
        try:
            connection = self._connected(attempts)
            last = log_rows.last_row(connection, self._end.schema)
            attach_partitions(connection, self._end.schema, self._end.number if last is None else last.number + 1)
        except psycopg.Error as error:
            self._handle(error, attempts)
            attempts.has_attached = False


class PendingAppend:
    """Append that was begun on a connection. `advance` goes on with it, and gets it."""

    def __init__(self, connection: Connection, new: NewRow, advance: Callable[[PendingAppend], Progress]) -> None:
        self.connection = connection
        self.new = new
        self.began = boottime()
        self.socket = connection.pgconn.socket
        self.is_sent = False
        self._advance = advance

    def advance(self) -> Progress:
        return self._advance(self)


class _Attempts:
    """Attempts at one action, with pauses between them that grow."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._started = monotonic()
        self._deadline = self._started + patience_s
        self._pause_s = _PAUSE_MIN_S
        self.kinds: set[ErrorKind] = set()
        """Kinds of the errors so far."""
        self.cause = ErrorKind.LOST
        """Kind of the error that has made the other ones follow."""
        self.has_attached = False
        """True if partitions were attached for this action."""

    def note(self, kind: ErrorKind) -> None:
        # The session that waits for the standby keeps the lock from the next attempt.
        if kind is not ErrorKind.INTERRUPTED or not self.kinds:
            self.cause = kind
        self.kinds.add(kind)

    @property
    def has_failed(self) -> bool:
        return bool(self.kinds)

    def extend(self) -> None:
        """Begin the patience anew."""
        self._deadline = monotonic() + self._patience_s

    @property
    def passed_s(self) -> float:
        return monotonic() - self._started

    @property
    def left_s(self) -> float:
        return max(0.0, self._deadline - monotonic())

    def wait(self) -> bool:
        """Wait before the next attempt. Return False if the patience has ended."""
        left_s = self.left_s
        if left_s == 0:
            return False
        time.sleep(min(self._pause_s, left_s))
        self._pause_s = min(2 * self._pause_s, _PAUSE_MAX_S)
        return True


def _check_server(connection: Connection, *, is_replicated: bool) -> None:
    """Raises: ConfigurationError if the server cannot keep what it confirms"""
    takeover.check_fsync(connection)
    row = connection.execute(
        "SELECT current_setting('synchronous_standby_names') <> '', current_setting('max_wal_senders') <> '0'"
    ).fetchone()
    assert row is not None
    names_standbys, has_senders = row
    if is_replicated and not names_standbys:
        raise ConfigurationError(takeover.NO_STANDBYS)
    if is_replicated and not has_senders:
        raise ConfigurationError(
            f"PostgreSQL at {connection.where} has max_wal_senders = 0, and waits for no standby: set max_wal_senders, "
            'or set durability = "local"'
        )
