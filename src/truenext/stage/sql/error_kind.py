"""Kind of a database error: whether the message or the database is at fault, and whether a retry may help.

Source: docs/stages-database.md, "Kinds of database errors"; PostgreSQL 18, appendix A; https://sqlite.org/rescode.html
"""

import sqlite3

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from truenext.stage.sql.errors import DatabaseErrorKind, DatabaseUnavailable

_BY_SQLSTATE = {
    # Classes: all errors of a class that are not listed below.
    "08": DatabaseErrorKind.LOST,
    "40": DatabaseErrorKind.RETRYABLE,
    "53": DatabaseErrorKind.FULL,
    # transaction_integrity_constraint_violation
    "40002": DatabaseErrorKind.APPLICATION,
    # configuration_limit_exceeded: this statement needed more than its limit
    "53400": DatabaseErrorKind.APPLICATION,
    # lock_not_available
    "55P03": DatabaseErrorKind.RETRYABLE,
    # io_error
    "58030": DatabaseErrorKind.FULL,
    # admin_shutdown: the server stops, or an administrator has ended this connection alone
    "57P01": DatabaseErrorKind.LOST,
    # read_only_sql_transaction: a standby answers this, too
    "25006": DatabaseErrorKind.UNAVAILABLE,
    # crash_shutdown: the fault of another connection
    "57P02": DatabaseErrorKind.UNAVAILABLE,
    # cannot_connect_now, database_dropped, data_corrupted, index_corrupted
    **dict.fromkeys(("57P03", "57P04", "XX001", "XX002"), DatabaseErrorKind.UNAVAILABLE),
}
"""Kinds of PostgreSQL's errors by SQLSTATE or its first two characters. All other errors are APPLICATION, including the
timeouts 25P03 and 25P04, which mean that the function took too long."""
_BY_SQLITE_CODE = {
    **dict.fromkeys((sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM), DatabaseErrorKind.FULL),
    sqlite3.SQLITE_CANTOPEN: DatabaseErrorKind.UNAVAILABLE,
    sqlite3.SQLITE_CORRUPT: DatabaseErrorKind.UNAVAILABLE,
    sqlite3.SQLITE_NOTADB: DatabaseErrorKind.UNAVAILABLE,
    sqlite3.SQLITE_PERM: DatabaseErrorKind.UNAVAILABLE,
    sqlite3.SQLITE_READONLY: DatabaseErrorKind.UNAVAILABLE,
    sqlite3.SQLITE_BUSY: DatabaseErrorKind.RETRYABLE,
    sqlite3.SQLITE_LOCKED: DatabaseErrorKind.RETRYABLE,
    sqlite3.SQLITE_PROTOCOL: DatabaseErrorKind.RETRYABLE,
}
"""Kinds of SQLite's errors by result code. All other errors are APPLICATION."""


def classify_error(error: BaseException) -> DatabaseErrorKind:
    """Return the kind of an error. If the error itself is APPLICATION, the errors in its group, and the errors that
    caused it, are classified, too: the nearest one of another kind decides."""
    seen: set[int] = set()
    rest: list[BaseException | None] = [error]
    while rest:
        each = rest.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        kind = _classify_one(each)
        if kind is not DatabaseErrorKind.APPLICATION:
            return kind
        rest.append(each.__cause__ or each.__context__)
        if isinstance(each, BaseExceptionGroup):
            rest.extend(reversed(each.exceptions))
    return DatabaseErrorKind.APPLICATION


def is_definite_failure(error: BaseException) -> bool:
    """Return whether an error of a COMMIT proves that nothing was committed.

    An I/O error of SQLite proves nothing: the next process that opens the file may find the transaction committed.
    """
    if not isinstance(error, DBAPIError) or error.connection_invalidated or error.orig is None:
        return False
    state = _sqlstate_of(error.orig)
    if state is not None:
        # 40003: statement_completion_unknown.
        return state != "40003" and not state.startswith("08")
    code = _sqlite_code_of(error.orig)
    return code is not None and code != sqlite3.SQLITE_IOERR


def _sqlstate_of(error: BaseException) -> str | None:
    """Return the SQLSTATE, PostgreSQL's code of an error; None if the server has sent no code."""
    found = getattr(error, "sqlstate", None)
    return found if isinstance(found, str) else None


def _sqlite_code_of(error: BaseException) -> int | None:
    """Return SQLite's primary result code; None if the error does not come from SQLite."""
    code = getattr(error, "sqlite_errorcode", None)
    # The bytes above the lowest one say more precisely what happened.
    return code & 0xFF if isinstance(code, int) else None


def _classify_one(error: BaseException) -> DatabaseErrorKind:
    if isinstance(error, DatabaseUnavailable):
        return error.kind
    if isinstance(error, PoolTimeoutError):
        return DatabaseErrorKind.UNAVAILABLE
    if isinstance(error, DBAPIError):
        return _classify_statement_error(error)
    return _classify_server_error(error) or DatabaseErrorKind.APPLICATION


def _classify_statement_error(error: DBAPIError) -> DatabaseErrorKind:
    kind = None if error.orig is None else _classify_server_error(error.orig)
    if kind is not None:
        return kind
    if error.connection_invalidated:
        return DatabaseErrorKind.LOST
    if error.statement is None and error.orig is not None and type(error).__name__ == "OperationalError":
        # Never connected: no server has answered, or it refused the connection, for which psycopg gives no SQLSTATE. A
        # connection that is lost later is invalidated.
        return DatabaseErrorKind.UNAVAILABLE
    return DatabaseErrorKind.APPLICATION


def _classify_server_error(error: BaseException) -> DatabaseErrorKind | None:
    """Return the kind of an error that the database has reported; None if the error has another source."""
    state = _sqlstate_of(error)
    if state is not None:
        return _BY_SQLSTATE.get(state) or _BY_SQLSTATE.get(state[:2], DatabaseErrorKind.APPLICATION)
    code = _sqlite_code_of(error)
    return None if code is None else _BY_SQLITE_CODE.get(code, DatabaseErrorKind.APPLICATION)
