"""Is the transaction of a connection still good? What the driver knows of it, without asking the database."""

import asyncio
import time
from enum import Enum
from typing import Any

from sqlalchemy import Connection


class DbapiTransactionState(Enum):
    ALIVE = "is alive"
    FAILED = "has failed"
    """PostgreSQL: a COMMIT would roll back, without an error."""
    ENDED = "has ended"
    """It is not there any more; what is done now is outside of it."""
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
"""For how long the answer to a cancellation is waited for."""


def is_statement_active(connection: Connection) -> bool:
    """PostgreSQL has not answered a statement. False with SQLite, whose drivers do not know that."""
    if connection.dialect.name == "sqlite" or connection.closed or connection.invalidated:
        return False
    driver: Any = connection.connection.driver_connection
    return int(driver.pgconn.transaction_status) == _ACTIVE


def interrupt_statement(connection: Connection) -> None:
    """Have the statement that runs fail, in whatever task or thread it runs.

    Raises: what the driver raises
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
    """Let other tasks or threads go on."""
    if connection.dialect.is_async:
        adapted: Any = connection.connection.dbapi_connection
        adapted.run_async(lambda _: asyncio.sleep(seconds))
    else:
        time.sleep(seconds)


def is_autocommit(connection: Connection) -> bool:
    """Its driver was told to commit each statement, which SQLAlchemy does not know, and would not undo."""
    driver: Any = connection.connection.driver_connection
    return connection.dialect.name != "sqlite" and bool(driver.autocommit)


def transaction_state_of(connection: Connection) -> DbapiTransactionState:
    """Of a connection that has begun its transaction at the database."""
    if connection.closed or connection.invalidated:
        return DbapiTransactionState.LOST
    # A psycopg.Connection, psycopg.AsyncConnection, sqlite3.Connection or aiosqlite.Connection.
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name == "sqlite":
        return DbapiTransactionState.ALIVE if driver.in_transaction else DbapiTransactionState.ENDED
    return _LIBPQ_STATES[int(driver.pgconn.transaction_status)]
