"""SQL transaction of one message: refuses calls that would end it, and checks whether it can still be committed.

Only the stage's worker begins and ends the transaction. Events of SQLAlchemy's engine report all calls of the function
on the connection. A call that would end the transaction, or begin another one, is refused. An error after which the
transaction cannot be committed is remembered until the worker checks the transaction.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from enum import Enum
from threading import Lock
from typing import Any
from weakref import WeakSet

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import ExceptionContext, ExecutionContext
from sqlalchemy.engine.interfaces import DBAPICursor
from sqlalchemy.orm import Session

from truenext.errors import LocalProtocolError
from truenext.stage.sql.error_kind import classify_error
from truenext.stage.sql.errors import DatabaseErrorKind, Swallowed
from truenext.stage.sql.exactly_once_writer import ExactlyOnceWriter

INTERRUPT_S = 5.0
"""Seconds that interrupted statements may take to end."""
PAUSE_MAX_S = 0.02
"""Longest pause in seconds between two attempts to interrupt the statements of a connection."""

_stage_transaction: ContextVar["SqlTransaction | None"] = ContextVar("truenext transaction", default=None)
"""Transaction whose worker is executing statements in this context. Tasks and threads that a function has left running
have other contexts."""

_OPTION = "truenext_transaction"
"""Name of the execution option by which a connection knows its SqlTransaction."""


class SqlTransaction:
    def __init__(self, exactly_once: ExactlyOnceWriter | None = None, stage: str = "") -> None:
        """Create the transaction of one message. `exactly_once` executes its first statement; None without exactly-once
        processing. `stage` is the stage's name in errors."""
        self.exactly_once = exactly_once
        self._stage = stage
        self.session: Session | None = None
        self.is_ending = False
        """True while the worker commits or rolls back. Then a COMMIT or ROLLBACK is allowed."""
        self.is_commit_sent = False
        self._is_closed = False
        self._attach_lock = Lock()
        """Lock of `attach` and `stop_attaching`. A connection that arrives after `stop_attaching` is returned to its
        pool."""
        self._is_connection_unusable = False
        """True after an UNAVAILABLE error. The connection must then be closed, because its server may have become
        read-only."""
        self._connection: Connection | None = None
        self._has_begun = False
        """True if the database has begun the transaction. psycopg begins it with the first statement."""
        self._running_cursors: set[DBAPICursor] = set()
        """Cursors of statements that the database has not answered yet."""
        self._unread_cursors: set[DBAPICursor] | WeakSet[DBAPICursor] = set()
        """Cursors from which rows may still be read. Some of them may have been read to their end."""
        self._keeps_cursors = False
        """True if the driver reads rows from the database only on request of the function."""
        self.has_returned = False
        """True if the function has returned. Then only the worker may execute statements."""
        self._forbidden: LocalProtocolError | None = None
        self._broken_by: BaseException | None = None

    def attach(self, connection: Connection) -> None:
        """Attach the connection that the session has got. The session calls this again for each savepoint. The first
        call inserts the message's id into the inbox, with exactly-once processing.

        Raises: LocalProtocolError if the transaction is over, and then the connection is returned to its pool or
        closed; errors of `ExactlyOnceWriter.insert_inbox_id`
        """
        with self._attach_lock:
            is_first = self._connection is None
            if is_first and not self._is_closed and self._is_usable:
                self._connection = connection
        if self._connection is None:
            _return_to_pool(connection)
            raise self._late_error()
        if is_first:
            connection.execution_options(**{_OPTION: self})
            self._has_begun = transaction_state_of(connection) is DbapiTransactionState.ALIVE
            if not connection.dialect.is_async:
                # A collected cursor has closed itself. Cursors of the asynchronous adapters have no weak reference.
                self._unread_cursors = WeakSet()
                self._keeps_cursors = connection.dialect.name == "sqlite"
            if self.exactly_once is not None:
                self.exactly_once.insert_inbox_id(connection)

    def stop_attaching(self) -> None:
        """Attach no connection from now on. A statement may still be waiting for a connection."""
        with self._attach_lock:
            self._is_closed = True

    @contextlib.contextmanager
    def issued_by_stage(self) -> Iterator[None]:
        """Mark the statements of the block as statements of the worker, not of the function."""
        token = _stage_transaction.set(self)
        try:
            yield
        finally:
            _stage_transaction.reset(token)

    @property
    def _is_usable(self) -> bool:
        return not self.has_returned or _stage_transaction.get() is self

    def check_usable(self) -> None:
        """Check that a statement may be executed now.

        Raises: LocalProtocolError if the transaction is over or is being committed, or the function has returned
        """
        if self._is_closed or self.is_commit_sent or not self._is_usable:
            raise self._late_error()

    def check_committable(self) -> None:
        """Check that the transaction can be committed. With PostgreSQL, this sends a query to the server, too.

        Raises: Swallowed if the transaction cannot be committed; errors of SQLAlchemy if the connection is lost
        """
        self.check_unbroken()
        if self._connection is not None and self._has_begun and self._connection.dialect.name != "sqlite":
            self._connection.exec_driver_sql("SELECT 1")

    def check_unbroken(self) -> None:
        """Check, without asking the database, that the transaction can be committed. Raises: Swallowed if it cannot"""
        fault = self.commit_fault()
        if fault is not None:
            raise fault

    def commit_fault(self) -> Swallowed | None:
        """Return, without asking the database, why the transaction can no longer be committed; None if it can be
        committed."""
        if self._forbidden is not None:
            return _swallowed_error("the function continued after a statement was refused", self._forbidden)
        if self.session is not None and not self.session.is_active:
            if self._connection is None and self._broken_by is None:
                return Swallowed(
                    "the function returned while a statement of its session still waited for its connection: await "
                    "every statement before the function returns; nothing was committed"
                )
            return _swallowed_error("the transaction was rolled back, and the function continued", self._broken_by)
        return self._connection_fault()

    def _connection_fault(self) -> Swallowed | None:
        if self._is_running():
            return Swallowed(
                "the function returned while a statement of its session was running: await every statement before the "
                "function returns; nothing was committed"
            )
        if self._connection is None or not self._has_begun:
            return None
        state = transaction_state_of(self._connection)
        if state is DbapiTransactionState.ALIVE:
            return None
        return _swallowed_error(f"the transaction {state.value}, and the function continued", self._broken_by)

    def forbid_statement(self, what: str) -> LocalProtocolError:
        """Return the error for a call that the function must not make. From now on the transaction cannot be
        committed."""
        self._forbidden = LocalProtocolError(
            f"{what} is refused: the stage begins the transaction, commits it when the function returns and all its "
            "messages are sent, and rolls back if it raises. Use session.begin_nested() for statements that may fail"
        )
        return self._forbidden

    def _late_error(self) -> LocalProtocolError:
        owner = f"of stage {self._stage}" if self._stage else "that has the session"
        return LocalProtocolError(
            f"the transaction of this statement has ended: await every statement before the function {owner} ends"
        )

    def mark_broken(self, error: BaseException) -> None:
        """Remember an error after which the transaction cannot be committed. Only the first such error is kept."""
        if self._broken_by is None:
            self._broken_by = error

    def has_ended(self) -> bool:
        """Return whether the driver reports that the transaction has ended. After a COMMIT was sent, this means that
        the database has answered."""
        return self._connection is not None and transaction_state_of(self._connection) is DbapiTransactionState.ENDED

    def roll_back(self) -> None:
        """Roll back through the driver, without SQLAlchemy. After a COMMIT that failed or was refused, SQLAlchemy
        considers the transaction ended, and would not roll back. A connection that must not return to its pool is
        closed instead.

        Raises: errors of the driver
        """
        if self._connection is None or self._connection.closed or self._connection.invalidated:
            return
        # A statement that waits for another one of the same connection would run after the rollback, outside of any
        # transaction.
        if self._is_connection_unusable or self._is_running() or is_autocommit(self._connection):
            self.discard()
        else:
            self.close_cursors()
            self._connection.connection.rollback()
            root = self._connection.get_transaction()
            if root is not None:
                # Otherwise the session would roll back to each open savepoint, which is gone by now.
                root.close()

    def discard(self) -> None:
        """Close the connection instead of returning it to its pool, even if statements are running on it.

        Raises: errors of SQLAlchemy
        """
        if self._connection is not None and not self._connection.closed:
            try:
                self._interrupt(self._connection)
                if self._connection.dialect.name == "sqlite":
                    # Open cursors keep the lock when the connection is closed.
                    self.close_cursors()
            finally:
                try:
                    self._connection.invalidate()
                finally:
                    self._connection.close()

    def _interrupt(self, connection: Connection) -> None:
        """Interrupt running statements, and wait until they have ended, so that the connection can be closed. Closing
        it while a thread reads from its socket would be unsafe: the system may give the socket's number to a new
        connection, and the thread would then read the bytes of that connection."""
        pause_s, until = 0.001, time.monotonic() + INTERRUPT_S
        while self._is_running() and time.monotonic() < until:
            with contextlib.suppress(Exception):
                interrupt_statement(connection)
            sleep_on_driver(connection, pause_s)
            # The next statement may have waited for the one before.
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def close_cursors(self) -> None:
        """Close the cursors, so that no further rows are read. The connection is about to go to another message's
        transaction."""
        for cursor in list(self._unread_cursors):
            with contextlib.suppress(Exception):
                cursor.close()
        self._unread_cursors.clear()

    def _is_running(self) -> bool:
        """Return whether a statement is running, or rows are being read from the server."""
        return bool(self._running_cursors) or (self._connection is not None and is_statement_active(self._connection))

    def _before_statement(self, statement: str, cursor: DBAPICursor) -> None:
        self.check_usable()
        forbidden = find_transaction_statement(statement)
        if forbidden is not None:
            raise self.forbid_statement(forbidden)
        if self._has_begun and self._connection is not None:
            state = transaction_state_of(self._connection)
            if state is DbapiTransactionState.ALIVE:
                # The transaction is repaired: the function has rolled back to a savepoint.
                self._broken_by = None
            elif state is DbapiTransactionState.ENDED:
                # SQLite has ended it after an error. This statement would be a transaction of its own.
                raise _swallowed_error(f"the transaction {state.value}, and the function continued", self._broken_by)
        self._running_cursors.add(cursor)

    def _after_statement(self, cursor: DBAPICursor, context: ExecutionContext | None) -> None:
        self._running_cursors.discard(cursor)
        if self._is_closed:
            raise self._late_error()
        if self._keeps_cursors or (context is not None and context.execution_options.get("stream_results")):
            self._unread_cursors.add(cursor)
        self._has_begun = True
        if self._connection is not None and transaction_state_of(self._connection) is DbapiTransactionState.ENDED:
            raise (
                self._late_error() if self.is_ending else self.forbid_statement("a statement that ends the transaction")
            )

    def _on_statement_failed(self, error: BaseException, cursor: DBAPICursor | None, *, is_lost: bool) -> None:
        if cursor is not None:
            self._running_cursors.discard(cursor)
        if self._is_closed:
            raise self._late_error()
        assert self._connection is not None
        state = DbapiTransactionState.LOST if is_lost else transaction_state_of(self._connection)
        # psycopg begins the transaction before it checks the statement.
        self._has_begun = True
        self._is_connection_unusable = (
            self._is_connection_unusable or classify_error(error) is DatabaseErrorKind.UNAVAILABLE
        )
        if state is not DbapiTransactionState.ALIVE:
            self.mark_broken(error)


def watch_transactions(engine: Engine) -> None:
    """Report calls on all connections of `engine` to their SqlTransactions; for an AsyncEngine pass its
    `sync_engine`."""

    @event.listens_for(engine, "set_connection_execution_options")
    def options(connection: Connection, options: Mapping[str, Any]) -> None:
        level = options.get("isolation_level")
        if level is None:
            return
        if str(level).upper() == "AUTOCOMMIT" or connection.dialect.name == "sqlite":
            transaction = _transaction_of(connection) or SqlTransaction()
            raise transaction.forbid_statement(f"isolation_level={level!r}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        transaction = _transaction_of(connection)
        if transaction is not None:
            transaction.check_usable()
            raise transaction.forbid_statement("another transaction")

    @event.listens_for(engine, "commit")
    def commit(connection: Connection) -> None:
        transaction = _transaction_of(connection)
        if transaction is None:
            return
        if not transaction.is_ending:
            raise transaction.forbid_statement("a COMMIT by the connection")
        # Checked again, as hooks of the session may have done something since.
        fault = transaction._connection_fault()
        if fault is not None:
            raise fault
        transaction.is_commit_sent = True

    @event.listens_for(engine, "rollback")
    def rollback(connection: Connection) -> None:
        transaction = _transaction_of(connection)
        # After a failed flush SQLAlchemy rolls back by itself, and its session is not active any more.
        if (
            transaction is not None
            and not transaction.is_ending
            and transaction.session is not None
            and transaction.session.is_active
        ):
            raise transaction.forbid_statement("a ROLLBACK by the connection")

    @event.listens_for(engine, "before_cursor_execute")
    def before(connection: Connection, cursor: DBAPICursor, statement: str, *_: object) -> None:
        transaction = _transaction_of(connection)
        if transaction is not None:
            transaction._before_statement(statement, cursor)

    @event.listens_for(engine, "after_cursor_execute")
    def after(
        connection: Connection, cursor: DBAPICursor, _: str, __: object, context: ExecutionContext | None, ___: bool
    ) -> None:
        transaction = _transaction_of(connection)
        if transaction is not None:
            transaction._after_statement(cursor, context)

    @event.listens_for(engine, "handle_error")
    def failed(context: ExceptionContext) -> None:
        transaction = None if context.connection is None else _transaction_of(context.connection)
        if transaction is not None:
            error = context.sqlalchemy_exception or context.original_exception
            execution: Any = context.execution_context
            cursor = None if execution is None else execution.cursor
            transaction._on_statement_failed(error, cursor, is_lost=context.is_disconnect)


def _transaction_of(connection: Connection) -> SqlTransaction | None:
    found = connection.get_execution_options().get(_OPTION)
    return found if isinstance(found, SqlTransaction) else None


def _return_to_pool(connection: Connection) -> None:
    """Roll back a connection, and return it to its pool. Close the connection if the rollback fails."""
    try:
        connection.connection.rollback()
    except BaseException:
        connection.invalidate()
        raise
    finally:
        connection.close()


def _swallowed_error(event_text: str, error: BaseException | None) -> Swallowed:
    swallowed = Swallowed(
        f"{event_text}; nothing of it was committed"
        if error is None
        else f"{event_text}; the function has swallowed: {error}"
    )
    if isinstance(error, Exception):
        # A cancellation is no cause: it has cancelled a statement, and not this work.
        swallowed.__cause__ = error
    return swallowed


# ---- State of a connection's transaction, as the driver knows it without asking the database ----


class DbapiTransactionState(Enum):
    ALIVE = "is alive"
    FAILED = "has failed"
    """In PostgreSQL: a statement has failed. A COMMIT would roll back, without an error."""
    ENDED = "has ended"
    """The transaction is over. Further statements would not belong to it."""
    LOST = "was lost with its connection"


# libpq's PGTransactionStatusType.
_LIBPQ_STATES = {
    0: DbapiTransactionState.ENDED,
    1: DbapiTransactionState.ALIVE,
    2: DbapiTransactionState.ALIVE,
    3: DbapiTransactionState.FAILED,
    4: DbapiTransactionState.LOST,
}


_ACTIVE = 1

CANCEL_S = 5.0
"""Seconds for which a cancellation of a statement waits for the server's answer."""


def is_statement_active(connection: Connection) -> bool:
    """Return whether PostgreSQL is executing a statement. With SQLite always False, since its drivers do not report
    it."""
    if connection.dialect.name == "sqlite" or connection.closed or connection.invalidated:
        return False
    driver: Any = connection.connection.driver_connection
    return int(driver.pgconn.transaction_status) == _ACTIVE


def interrupt_statement(connection: Connection) -> None:
    """Interrupt the statement that runs on the connection, so that it fails. The statement may run in another task or
    thread.

    Raises: errors of the driver
    """
    pooled: Any = connection.connection.dbapi_connection
    if connection.dialect.name == "sqlite":
        if connection.dialect.is_async:
            pooled.run_async(lambda inner: inner.interrupt())
        else:
            pooled.interrupt()
    elif connection.dialect.is_async:
        pooled.run_async(lambda inner: inner.cancel_safe(timeout=CANCEL_S))
    else:
        pooled.cancel_safe(timeout=CANCEL_S)


def sleep_on_driver(connection: Connection, seconds: float) -> None:
    """Sleep without blocking other tasks or threads."""
    if connection.dialect.is_async:
        adapted: Any = connection.connection.dbapi_connection
        adapted.run_async(lambda _: asyncio.sleep(seconds))
    else:
        time.sleep(seconds)


def is_autocommit(connection: Connection) -> bool:
    """Return whether the driver commits each statement at once. This mode was then set at the driver, so SQLAlchemy
    does not know of it, and would not end it."""
    driver: Any = connection.connection.driver_connection
    return connection.dialect.name != "sqlite" and bool(driver.autocommit)


def transaction_state_of(connection: Connection) -> DbapiTransactionState:
    """Return the state of a transaction that has begun at the database, as the connection's driver knows it."""
    if connection.closed or connection.invalidated:
        return DbapiTransactionState.LOST
    # A psycopg.Connection, psycopg.AsyncConnection, sqlite3.Connection or aiosqlite.Connection.
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name == "sqlite":
        return DbapiTransactionState.ALIVE if driver.in_transaction else DbapiTransactionState.ENDED
    return _LIBPQ_STATES[int(driver.pgconn.transaction_status)]


# ---- Statements that would begin or end the transaction, and are refused ----

_COMMENT = r"--[^\n]*(?:\n|$) | /\*.*?\*/"
# Text to skip, which may contain any word: strings, also PostgreSQL's E'...' in which a backslash escapes, quoted
# names, comments, PostgreSQL's dollar quotes.
_IGNORED = re.compile(
    rf"""\b[eE]'(?:[^'\\]|''|\\.)*' | '(?:[^']|'')*' | "(?:[^"]|"")*" | {_COMMENT}
    | (?P<dollar>\$\w*\$).*?(?P=dollar)""",
    re.DOTALL | re.VERBOSE,
)
# SQLite skips a byte order mark.
_START = rf"(?:\s | \ufeff | {_COMMENT})*"
# Body of a trigger or function, which runs when it is called: there BEGIN and END are brackets.
_BODY = re.compile(
    rf"""(?:^|;){_START} CREATE\s[^;]*?\b(?:TRIGGER|FUNCTION|PROCEDURE)\b .*? \bBEGIN\b .* \bEND\b""",
    re.IGNORECASE | re.DOTALL | re.VERBOSE,
)
_SAVEPOINT = r"ROLLBACK\s+(?:(?:WORK|TRANSACTION)\s+)?TO\b"
_FORBIDDEN = re.compile(
    rf"""{_START}
    (?: BEGIN\b | START\s+TRANSACTION\b | COMMIT\b | END\b | ABORT\b | (?!{_SAVEPOINT})ROLLBACK\b
      | PREPARE\s+TRANSACTION\b | SET\s[^;]*\bAUTOCOMMIT\b )""",
    re.IGNORECASE | re.DOTALL | re.VERBOSE,
)


def find_transaction_statement(statement: str) -> str | None:
    """Return the part of `statement` that would begin or end a transaction; None if there is none.

    Only keywords of SQL are found. A procedure or the driver may also end the transaction; this is detected after the
    statement.
    """
    if ";" not in statement:
        return statement.strip() if _FORBIDDEN.match(statement) else None
    for part in _BODY.sub(";", _IGNORED.sub(" ", statement)).split(";"):
        if _FORBIDDEN.match(part):
            return part.strip()
    return None
