"""How does SQLite keep the promises that a database of a service makes?

Durable: a log beside the file (WAL), synced with each commit. Fair: one line of writers in this process; those of other
processes are waited for. Transactions are begun here, since Python's driver would begin them late, and deferred: then
two that have read may not both write, and one of them fails.

Source: https://sqlite.org/wal.html, https://sqlite.org/lang_transaction.html, https://sqlite.org/c3ref/close.html
"""

import contextlib
from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.pool import ConnectionPoolEntry

from truenext.stage.sql.serialized import SerializedConnection
from truenext.stage.sql.write_queue import WriteQueue

BUSY_S = 5.0
"""For how long another process's transaction is waited for."""

CONNECT_ARGS: dict[str, Any] = {"isolation_level": None, "timeout": BUSY_S}
"""With `isolation_level` None the driver begins and ends nothing by itself."""
THREAD_ARGS = CONNECT_ARGS | {"factory": SerializedConnection}
"""Those of plain functions: a thread that one of them has left may use the connection while it is closed."""

_READ_ONLY = "truenext_reads"
READ_ONLY: dict[str, Any] = {_READ_ONLY: True}
"""Options of an engine whose transactions only read."""

_TURN = "truenext: its turn to write"


async def enable_wal(connection: AsyncConnection) -> None:
    """Have the file keep its log (WAL), which it then does for good. Whoever changes that needs the file for himself:
    not when works have begun.

    Raises: DBAPIError, if somebody else uses it now
    """
    await connection.exec_driver_sql("PRAGMA journal_mode=WAL")


def set_up(engine: Engine, write_queue: WriteQueue, *, is_interactive: bool) -> None:
    """Of all connections of `engine`, which may be the inner one of an AsyncEngine."""
    is_async = engine.dialect.is_async

    @event.listens_for(engine, "connect")
    def prepare(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        cursor = connection.cursor()
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            cursor.execute("PRAGMA synchronous=FULL")
            cursor.execute("PRAGMA foreign_keys=ON")
        finally:
            cursor.close()

    @event.listens_for(engine, "invalidate")
    def abort(connection: DBAPIConnection, _: ConnectionPoolEntry, __: BaseException | None) -> None:
        # A statement that was cancelled runs on in its thread. And a connection that is closed before its statements
        # have ended keeps its lock until they are garbage.
        with contextlib.suppress(Exception):
            if is_async:
                driver: Any = connection
                driver.run_async(lambda inner: inner.interrupt())
            connection.rollback()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if connection.get_execution_options().get(_READ_ONLY):
            # Writers are not waited for, and it sees what was committed before.
            connection.exec_driver_sql("BEGIN")
            return
        pooled = connection.connection
        notes = pooled.record_info
        assert notes is not None
        if _TURN not in notes:
            if is_async:
                driver: Any = pooled.dbapi_connection
                driver.run_async(lambda _: write_queue.wait_in_task(is_interactive=is_interactive))
            else:
                write_queue.wait_in_thread(is_interactive=is_interactive)
            notes[_TURN] = write_queue
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    # The turn ends when the connection is back in its pool, whatever has brought it there: its transaction is over.
    @event.listens_for(engine, "checkin")
    def end_turn(_: DBAPIConnection | None, entry: ConnectionPoolEntry) -> None:
        notes = entry.record_info
        if notes is not None and notes.pop(_TURN, None) is not None:
            write_queue.end_write()
