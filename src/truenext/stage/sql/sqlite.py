"""Connections to SQLite: makes commits durable, lets writers wait in a queue, and begins transactions with a write
lock.

Each commit syncs the write-ahead log (WAL). The writers of this process wait in one queue, in a fair order. Writers of
other processes are not in this queue: SQLite itself waits for their locks. Python's driver would begin a transaction
without a write lock. Then, if two transactions have read and both want to write, one of them fails. So this module
begins transactions with the lock.

Source: https://sqlite.org/wal.html, https://sqlite.org/lang_transaction.html, https://sqlite.org/c3ref/close.html
"""

import asyncio
import contextlib
import sqlite3
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import RLock
from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.pool import ConnectionPoolEntry

# ---- A connection of sqlite3 that one thread may close while another one uses it ----
#
# Python's driver uses its connection and its statement again when SQLite has answered. If another thread has closed
# them by then, the interpreter crashes. So each call waits here until that of another thread has ended.


def _locked(method: Callable[..., Any]) -> Any:
    def locked(self: "SerializedConnection | _SerializedCursor", *args: Any, **options: Any) -> Any:
        with self.lock:
            return method(self, *args, **options)

    return locked


class SerializedConnection(sqlite3.Connection):
    def __init__(self, *args: Any, **options: Any) -> None:
        self.lock = RLock()
        """Lock of the thread whose call SQLite is executing. All calls but `interrupt` wait for it."""
        super().__init__(*args, **options)

    def cursor(self, factory: Any = None) -> Any:
        return super().cursor(_SerializedCursor if factory is None else factory)

    commit = _locked(sqlite3.Connection.commit)
    rollback = _locked(sqlite3.Connection.rollback)
    close = _locked(sqlite3.Connection.close)


class _SerializedCursor(sqlite3.Cursor):
    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__(connection)
        assert isinstance(connection, SerializedConnection)
        self.lock = connection.lock

    execute = _locked(sqlite3.Cursor.execute)
    executemany = _locked(sqlite3.Cursor.executemany)
    executescript = _locked(sqlite3.Cursor.executescript)
    fetchone = _locked(sqlite3.Cursor.fetchone)
    fetchmany = _locked(sqlite3.Cursor.fetchmany)
    fetchall = _locked(sqlite3.Cursor.fetchall)
    __next__ = _locked(sqlite3.Cursor.__next__)
    close = _locked(sqlite3.Cursor.close)


# Queue of writers to an SQLite file: one at a time in a process, interactive work first, then in order of arrival.
#
# SQLite lets one transaction write, and makes those that come meanwhile try again and again, in no order. Tasks and
# threads wait in one queue, since they write to one file.

WriteGrant = Future[None]
"""Future that is done when it is the writer's turn."""


class WriteQueue:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_busy = False
        self._interactive_waiting: deque[WriteGrant] = deque()
        self._others_waiting: deque[WriteGrant] = deque()

    async def wait_in_task(self, *, is_interactive: bool) -> None:
        """Wait in a task until it is the caller's turn to write. The turn lasts until `end_write`. A cancelled call
        gets no turn."""
        grant = self._enqueue(is_interactive)
        try:
            await asyncio.wrap_future(grant)
        except BaseException:
            self._cancel(grant)
            raise

    def wait_in_thread(self, *, is_interactive: bool) -> None:
        """Wait in a thread until it is the caller's turn to write. The turn lasts until `end_write`."""
        grant = self._enqueue(is_interactive)
        try:
            grant.result()
        except BaseException:
            self._cancel(grant)
            raise

    def end_write(self) -> None:
        """End the caller's turn, and begin the next writer's turn. Any task or thread may call this."""
        with self._lock:
            self._is_busy = False
            for waiting in (self._interactive_waiting, self._others_waiting):
                while waiting:
                    grant = waiting.popleft()
                    if grant.set_running_or_notify_cancel():
                        self._is_busy = True
                        grant.set_result(None)
                        return

    def _enqueue(self, is_interactive: bool) -> WriteGrant:
        grant = WriteGrant()
        with self._lock:
            if self._is_busy:
                (self._interactive_waiting if is_interactive else self._others_waiting).append(grant)
            else:
                self._is_busy = True
                grant.set_running_or_notify_cancel()
                grant.set_result(None)
        return grant

    def _cancel(self, grant: WriteGrant) -> None:
        with self._lock:
            was_granted = not grant.cancel()
        if was_granted:
            # The turn came while the wait was being cancelled.
            self.end_write()


_QUEUES: weakref.WeakValueDictionary[Path, WriteQueue] = weakref.WeakValueDictionary()
_QUEUES_LOCK = threading.Lock()


def write_queue_of(file: Path) -> WriteQueue:
    """Return this process's queue of writers for the file. Different paths to one file have the same queue."""
    with _QUEUES_LOCK:
        return _QUEUES.setdefault(file.resolve(), WriteQueue())


# ---- Connections of SQLAlchemy ----

BUSY_S = 5.0
"""Seconds for which a transaction waits for the write lock of another process."""

CONNECT_ARGS: dict[str, Any] = {"isolation_level": None, "timeout": BUSY_S}
"""Options for connections. With `isolation_level` None, the driver itself begins and ends no transactions."""
THREAD_ARGS = CONNECT_ARGS | {"factory": SerializedConnection}
"""Options for connections of plain functions. A lock serializes the calls on such a connection, because a thread that
the function has left running may use the connection while it is closed."""

_READ_ONLY = "truenext_reads"
READ_ONLY: dict[str, Any] = {_READ_ONLY: True}
"""Execution options for an engine whose transactions only read."""

_TURN = "truenext: its turn to write"


async def enable_wal(connection: AsyncConnection) -> None:
    """Switch the file to a write-ahead log (WAL). The file keeps this setting. The switch needs exclusive access to the
    file, so it comes before the transactions of messages.

    Raises: DBAPIError if another connection uses the file now
    """
    await connection.exec_driver_sql("PRAGMA journal_mode=WAL")


def set_up(engine: Engine, write_queue: WriteQueue, *, is_interactive: bool) -> None:
    """Prepare every connection that `engine` makes: it gets its PRAGMAs, and waits in `write_queue` before it writes.

    For an AsyncEngine pass its `sync_engine`. With `is_interactive`, these connections write before others in the
    queue.
    """
    is_async = engine.dialect.is_async

    @event.listens_for(engine, "connect")
    def prepare(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        with contextlib.closing(connection.cursor()) as cursor:
            cursor.execute("PRAGMA journal_mode=WAL")
            cursor.execute("PRAGMA synchronous=FULL")
            cursor.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "invalidate")
    def abort(connection: DBAPIConnection, _: ConnectionPoolEntry, __: BaseException | None) -> None:
        # A cancelled statement runs on in its thread. And a connection that is closed before its statements have ended
        # keeps its lock until they are collected.
        with contextlib.suppress(Exception):
            if is_async:
                driver: Any = connection
                driver.run_async(lambda inner: inner.interrupt())
            connection.rollback()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if connection.get_execution_options().get(_READ_ONLY):
            # A reader does not wait for writers, and sees what was committed before.
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

    # The turn ends when the connection is back in its pool: its transaction is over then, for whatever reason.
    @event.listens_for(engine, "checkin")
    def end_turn(_: DBAPIConnection | None, entry: ConnectionPoolEntry) -> None:
        notes = entry.record_info
        if notes is not None and notes.pop(_TURN, None) is not None:
            write_queue.end_write()
