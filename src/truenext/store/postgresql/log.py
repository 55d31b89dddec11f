"""PostgresqlLog: the log of a store in PostgreSQL.

    append      one statement: inserts row N if row N - 1 has the epoch and the digest that this broker knows
    takeover    one transaction under a lock: reads the last row, and inserts a row with the next epoch (takeover.py)

An append whose answer is lost is repeated under the same number, on a new connection, until the patience ends. The rows
show which of the attempts succeeded (outcome.py).

`begin_append` sends the statement, and its caller goes on meanwhile. Only an answer without any doubt ends that append;
`append` takes over from any other point, as if it had sent the statement itself.

Partitions, compaction and sizes are the work of a thread
(background.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import psycopg

from truenext.clock import monotonic
from truenext.errors import ConfigurationError, StoreError, StoreForgottenError
from truenext.model.disk_level import DiskLevel
from truenext.store.checkpoint_format import FORMAT_VERSION
from truenext.store.log import Awaited, LogPosition, LogStatus, Relation, Snapshot, Wait
from truenext.store.postgresql import kept, layout, log_rows, takeover
from truenext.store.postgresql.background import Background, begin_wait, fenced_error
from truenext.store.postgresql.connection import (
    CONNECT_TIMEOUT_S,
    SILENCE_S,
    Connection,
    SilentServerError,
    describe,
    opening_error,
    parse_url,
)
from truenext.store.postgresql.log_rows import NewRow
from truenext.store.postgresql.outcome import ErrorKind, Finding, Row, RowChain, find, kind_of_error, relate
from truenext.store.store import Pending, Progress

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

TAKEOVER_SILENCE_S = takeover.LOCK_TIMEOUT_S + SILENCE_S
SNAPSHOT_SILENCE_S = 60.0
SLOWEST_DISK = 4 * 1024 * 1024
"""Bytes a second that PostgreSQL writes at least. It is silent while it writes: without this allowance, a large row
would be begun again and again on a slow disk."""
HINT_PATIENCE_S = 2.0
"""Time for which an opener waits until the session of a broker that has died is gone."""
SLOW_S = 0.1
"""Duration of an append after which the append is checked again. Meanwhile this process may have been stopped, and
another broker may have taken over; or the names of the synchronous standbys may have been removed."""

_PAUSE_MIN_S = 0.05
_PAUSE_MAX_S = 1.0


class PostgresqlLog:
    def __init__(
        self,
        url: str,
        schema: str,
        *,
        take_over: bool,
        is_replicated: bool,
        database_limit: int,
        patience_s: float,
    ) -> None:
        """Connect to the log in `schema` of the database at `url`, `postgresql://...` without a password.

        With `take_over` this broker becomes active even if another one is. With `is_replicated` a row is durable only
        when a synchronous standby has it, too. The schema may have `database_limit` bytes, from which `disk_level`
        follows. Reading and appending wait up to `patience_s` seconds for a database that is not available.

        Raises: ConfigurationError if an option or the database must be changed, or another broker is active; StoreError
        if the database cannot be reached
        """
        self._parameters = parse_url(url)
        layout.check_schema_name(schema)
        self._schema = schema
        self._may_take_over = take_over
        self._is_replicated = is_replicated
        self._patience_s = patience_s
        self._connection: Connection | None = None
        self._background = Background(self._parameters, schema, database_limit)
        self._is_database_full = False
        self._epoch = 0
        self._begun: _BegunAppend | None = None
        """Append that was begun, and whose answer `append` must read."""
        self._is_active = False
        self._is_stopping = False
        self._last_number = 0
        self._server = ""
        self._wait: Wait | None = None
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    # ---- Opening ----

    def _open(self) -> None:
        try:
            self._connection = connection = Connection.open(self._parameters)
            _check_server(connection, is_replicated=self._is_replicated)
            layout.check_layout(connection, self._schema)
            facts = kept.read_facts(connection, self._schema)
            self._background.position = kept.read_position(connection, self._schema).number
            last = log_rows.last_row(connection, self._schema)
            if last is None:
                raise takeover.empty_log_error(self._schema)
            self._mark_as_active()
            self._background.measure()
        except psycopg.Error as error:
            raise opening_error(error, "cannot open the log in PostgreSQL") from error
        self.identity = facts.recovered.identity
        self._server = connection.where
        self._epoch, self._last_number = last.epoch, last.number

    def _mark_as_active(self) -> None:
        """Raises: ConfigurationError if another broker is active, and this one may not take over"""
        deadline = monotonic() + HINT_PATIENCE_S
        while active := self._background.find_active_broker():
            if self._may_take_over:
                return
            if monotonic() >= deadline:
                raise ConfigurationError(
                    f"another broker is active on the log in schema {self._schema!r}: {active}; stop that broker, or "
                    "take over with --take-over"
                )
            time.sleep(_PAUSE_MIN_S)

    # ---- Reading ----

    @property
    def next_history(self) -> tuple[int, int]:
        # Not as of the opening: until it is taken over, another broker may go on, and compact its rows.
        return self._call(lambda connection: kept.read_facts(connection, self._schema)).next_history

    def relation(self, position: LogPosition) -> Relation:
        found = self._call(lambda connection: log_rows.read_relation(connection, self._schema, position.number))
        if found is None:
            raise takeover.empty_log_error(self._schema)
        digest, compacted, last = found
        relation = relate(position, digest, compacted, last)
        if relation is None:
            raise kept.DamagedLogError(self._schema, f"row {position.number} is missing or changed")
        return relation

    def snapshot(self) -> AbstractContextManager[Snapshot]:
        return self._snapshot()

    @contextmanager
    def _snapshot(self) -> Iterator[Snapshot]:
        try:
            with Connection.open(self._parameters) as connection:
                connection.silence_s = SNAPSHOT_SILENCE_S
                with kept.open_snapshot(connection, self._schema) as snapshot:
                    yield snapshot
        except psycopg.Error as error:
            raise StoreError(f"cannot read the compacted rows of the log: {describe(error)}") from error

    def rows_after(self, position: LogPosition) -> Iterator[bytes]:
        end = self._call(lambda connection: log_rows.last_row(connection, self._schema))
        chain = RowChain(position)
        while end is not None and chain.last.number < end.number:
            piece = self._call(
                partial(log_rows.read_piece, schema=self._schema, first=chain.next_part, last=end.number)
            )
            if not piece:
                raise self._missing(chain, f"row {chain.last.number + 1} is missing or changed")
            yield from self._checked(chain, piece)

    def _checked(self, chain: RowChain, piece: list[tuple[int, int, int | None, bytes, bytes]]) -> Iterator[bytes]:
        for number, part, format_version, digest, payload in piece:
            if format_version is not None and format_version > FORMAT_VERSION:
                raise takeover.format_error(self._schema, format_version)
            try:
                whole = chain.add(number, part, digest, payload)
            except ValueError as error:
                raise self._missing(chain, str(error)) from None
            if whole is not None:
                yield whole

    def _missing(self, chain: RowChain, problem: str) -> StoreError:
        """Return the error for the row after the chain, which the log does not have."""
        number = chain.last.number + 1
        position = self._call(lambda connection: kept.read_position(connection, self._schema)).number
        if position < number:
            return kept.DamagedLogError(self._schema, problem)
        return StoreError(
            f"another broker has compacted the log in schema {self._schema!r} up to row {position} meanwhile, and this "
            f"broker's folder lacks the rows from {number} on: start this broker again; if that does not help, stop "
            "the other broker before"
        )

    # ---- Writing ----

    def take_over(self) -> None:
        self._call(lambda _: self._mark_as_active())
        # A takeover whose answer was lost is repeated with yet another epoch: a row with the first epoch may be that of
        # another broker.
        while not self._call(self._take_over, TAKEOVER_SILENCE_S):
            pass
        self._is_active = True
        logger.info("took over the log", extra={"schema": self._schema, "epoch": self._epoch})

    def _take_over(self, connection: Connection) -> bool:
        """Take over. Return whether the standby has the row for certain, too, if there must be one."""
        connection.has_warned = False
        try:
            row = takeover.insert_takeover(connection, self._schema, is_replicated=self._is_replicated)
        except psycopg.errors.LockNotAvailable:
            takeover.end_sessions_in_the_way(connection, self._schema)
            raise
        self._epoch, self._last_number = row.epoch, row.number
        return not (self._is_replicated and connection.has_warned)

    def append(self, number: int, before: bytes, digest: bytes, parts: list[bytes]) -> bool:
        if not self._is_active:
            raise StoreError("the log cannot be written before it was taken over")
        new = NewRow(number, self._epoch, digest, before, b"".join(parts))
        assert self._begun is None or self._begun.new == new
        started = monotonic() if self._begun is None else self._begun.started
        is_certain = self._call(partial(self._append, new=new), SILENCE_S + len(new.payload) / SLOWEST_DISK)
        while monotonic() - started > SLOW_S:
            started = monotonic()
            self._call(partial(self._check_appended, new=new))
        self._last_number = number
        return is_certain or not self._is_replicated

    def begin_append(self, number: int, before: bytes, digest: bytes, parts: list[bytes]) -> Pending | None:
        connection = self._connection
        if connection is None or connection.closed or not connection.has_prepared_append:
            return None
        if self._background.failure is not None:
            return None
        new = NewRow(number, self._epoch, digest, before, b"".join(parts))
        if not new.has_one_part:
            return None
        self._begun = begun = _BegunAppend(self, connection, new)
        connection.has_warned = False
        try:
            log_rows.begin_append(connection, new)
            return begun if connection.is_sent else None
        except psycopg.Error:
            # `append` finds the error again.
            return None

    def end_begun(self, begun: _BegunAppend) -> Progress:
        """Find out whether an append that was begun has ended without any doubt. Do not wait."""
        connection, new = begun.connection, begun.new
        try:
            if not connection.read_answer():
                return Progress.WAITING
            names_standbys = log_rows.finish_append(connection)
        except psycopg.Error:
            return Progress.IN_DOUBT
        is_certain = names_standbys is not None and (names_standbys or not self._is_replicated)
        if connection.has_warned or not is_certain or monotonic() - begun.started > SLOW_S:
            return Progress.IN_DOUBT
        self._begun = None
        self._last_number = new.number
        return Progress.APPLIED

    def _append(self, connection: Connection, new: NewRow) -> bool:
        """Append a row. Return whether the standby has it for certain, too, if there must be one."""
        begun, self._begun = self._begun, None
        if begun is None:
            self._prepare_append(connection)
        try:
            names_standbys = (
                log_rows.append_row(connection, new) if begun is None else log_rows.finish_append(connection)
            )
        except psycopg.errors.UniqueViolation:
            names_standbys = None
        if names_standbys is None:
            # Right only if the row is there from an earlier attempt.
            self._check_appended(connection, new)
            return False
        self._check_standbys(names_standbys)
        return not connection.has_warned

    def _prepare_append(self, connection: Connection) -> None:
        """Raises: StoreError if the background work has failed"""
        if self._background.failure is not None:
            raise self._background.failure
        if not connection.has_prepared_append:
            # Not at the opening: it waits for the lock of a takeover whose broker has died, which `take_over` ends.
            log_rows.prepare_append(connection, self._schema)
        connection.has_warned = False

    def _check_appended(self, connection: Connection, new: NewRow) -> None:
        """Check that the row is there, and that no broker has taken over since."""
        rows, names_standbys = log_rows.rows_near(connection, self._schema, new.number)
        found = find(new.row, new.before, rows)
        last = max(rows, default=None)
        if found is Finding.FENCED and last is not None:
            raise fenced_error(self._schema, last.epoch, new.epoch)
        if found is not Finding.APPENDED:
            raise self._forgotten(new, last)
        self._check_standbys(names_standbys)

    def _check_standbys(self, are_named: bool) -> None:
        if self._is_replicated and not are_named:
            raise StoreError(takeover.NO_STANDBYS)

    def _forgotten(self, new: NewRow, last: Row | None) -> StoreForgottenError:
        there = "none" if last is None else f"row {last.number} of epoch {last.epoch}"
        return StoreForgottenError(
            f"the database at {self._server} has lost rows of the log in schema {self._schema!r} that it had "
            f"confirmed: its last row is {there}, this broker's last confirmed row is {new.number - 1} of epoch "
            f"{new.epoch}; is this a former primary? Then name the present one in --store; otherwise restore the "
            "database that has that row"
        )

    # ---- Connections ----

    def _call(self, action: Callable[[Connection], Result], silence_s: float = SILENCE_S) -> Result:
        """Call `action` with a connection, until it succeeds or the patience ends.

        Raises: StoreError if PostgreSQL refuses the action, or was not available for too long
        """
        attempts = _Attempts(self._patience_s)
        while True:
            try:
                connection = self._connected(attempts)
                connection.silence_s = silence_s
                result = action(connection)
            except psycopg.Error as error:
                self._handle(error, attempts)
            else:
                if attempts.has_failed:
                    # A warning, because the last line of the log must not be that nothing is confirmed.
                    logger.warning(
                        "PostgreSQL is available again",
                        extra={"schema": self._schema, "seconds": round(attempts.passed_s, 1)},
                    )
                    self._is_database_full = False
                    self._wait = None
                return result

    def _connected(self, attempts: _Attempts, timeout_s: float = CONNECT_TIMEOUT_S) -> Connection:
        # The loss of the connection of an append that was begun is found by reading its answer.
        if self._connection is None or (self._connection.closed and self._begun is None):
            self._connection = self._connect_again(min(timeout_s, attempts.left_s))
            self._server = self._connection.where
        return self._connection

    def _connect_again(self, timeout_s: float) -> Connection:
        try:
            with ExitStack() as resources:
                connection = Connection.open(self._parameters, timeout_s)
                resources.callback(connection.close)
                # It may be another server than before.
                _check_server(connection, is_replicated=self._is_replicated)
                resources.pop_all()
                return connection
        except ConfigurationError as error:
            # It was right when the log was opened.
            raise StoreError(str(error)) from error

    def _handle(self, error: psycopg.Error, attempts: _Attempts) -> None:
        """Do what makes another attempt possible, and wait. Raises: StoreError if there shall be none"""
        kind = kind_of_error(error.sqlstate)
        # An error of a constraint has the same SQLSTATE, and a name.
        if kind is ErrorKind.NO_PARTITION and error.diag.constraint_name is None and not attempts.has_attached:
            self._attach(attempts)
            return
        if kind in (ErrorKind.OTHER, ErrorKind.NUMBER_EXISTS, ErrorKind.NO_PARTITION):
            raise StoreError(f"PostgreSQL refuses to write to the log: {describe(error)}") from error
        if kind is ErrorKind.LOST and self._connection is not None:
            self._connection.close()
        if isinstance(error, SilentServerError) and self._waits_for_standby(attempts):
            kind = ErrorKind.STANDBY
        self._note(kind, error, attempts)
        if kind is ErrorKind.DISK_FULL:
            self._is_database_full = True
            if not self._is_stopping:
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
            logger.warning(_WARNINGS[kind], extra={"schema": self._schema, "server": self._server} | reason)
        attempts.note(kind)
        awaited = _AWAITED.get(attempts.cause, Awaited.DATABASE)
        self._wait = self._wait._replace(awaited=awaited) if self._wait else begin_wait(awaited)

    def _unavailable(self, error: psycopg.Error, attempts: _Attempts) -> StoreError:
        if attempts.cause is ErrorKind.STANDBY:
            return StoreError(
                f"the synchronous standby of PostgreSQL at {self._server} has not confirmed for {self._patience_s:g} "
                "seconds: start the standby, or change synchronous_standby_names, and start the broker again"
            )
        return StoreError(
            f"PostgreSQL was not available for {self._patience_s:g} seconds ({describe(error)}): start the broker "
            "again when it is"
        )

    def _attach(self, attempts: _Attempts) -> None:
        attempts.has_attached = True
        try:
            connection = self._connected(attempts)
            last = log_rows.last_row(connection, self._schema)
            layout.attach_partitions(connection, self._schema, self._last_number if last is None else last.number + 1)
        except psycopg.Error as error:
            self._handle(error, attempts)
            attempts.has_attached = False

    # ---- Background ----

    def start(self) -> None:
        self._background.start(self._epoch)

    def begin_stop(self) -> None:
        self._is_stopping = True

    @property
    def failure(self) -> StoreError | None:
        return self._background.failure

    @property
    def disk_level(self) -> DiskLevel:
        return max(self._background.level, DiskLevel.NONE) if self._is_database_full else self._background.level

    @property
    def disk_level_bytes(self) -> Mapping[str, int]:
        return self._background.bytes

    @property
    def status(self) -> LogStatus:
        return LogStatus(
            server=self._server,
            wait=self._wait or self._background.wait,
            epoch=self._epoch,
            number=self._last_number,
            position=self._background.position,
            is_replicated=self._is_replicated,
        )

    def close(self) -> None:
        self._background.close()
        if self._connection is not None:
            self._connection.close()


_WARNINGS = {
    ErrorKind.LOST: "connection to PostgreSQL lost: nothing is confirmed until it is back",
    ErrorKind.STANDBY: "the synchronous standby does not confirm: nothing is confirmed until it does",
    ErrorKind.DISK_FULL: "PostgreSQL's disk is full: nothing is confirmed until it has space",
    ErrorKind.INTERRUPTED: "PostgreSQL has interrupted a statement: trying again",
}


_AWAITED = {ErrorKind.STANDBY: Awaited.STANDBY, ErrorKind.DISK_FULL: Awaited.SPACE}


class _BegunAppend:
    def __init__(self, log: PostgresqlLog, connection: Connection, new: NewRow) -> None:
        self.connection = connection
        self.new = new
        self.started = monotonic()
        self.socket = connection.pgconn.socket
        self._log = log

    def advance(self) -> Progress:
        return self._log.end_begun(self)


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
