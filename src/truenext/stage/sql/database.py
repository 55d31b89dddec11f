"""Database of a service: its connection pools, and a probe that checks whether the database is available.

database = Database("postgresql+psycopg:///shop", interactive=2, others=8)
await database.open()
work = database.new_async_work()
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool, NullPool, QueuePool

from truenext.stage.sql import postgresql, sqlite
from truenext.stage.sql.error_kind import classify_error
from truenext.stage.sql.errors import DatabaseErrorKind, DatabaseUnavailable
from truenext.stage.sql.outbox_table import Outbox
from truenext.stage.sql.reply_table import ReplyStore
from truenext.stage.sql.sqlite import write_queue_of
from truenext.stage.sql.transaction import watch_transactions
from truenext.stage.sql.url import DatabaseAddress, address_of
from truenext.stage.sql.work import AsyncSqlWork, ThreadSqlWork

T = TypeVar("T")

OUTBOX_CONNECTIONS = 3
REPLIES_CONNECTIONS = 5
PROBE_TIMEOUT_S = 10.0
"""Seconds for a probe. A database that has not answered within this time counts as unavailable."""


OUTBOX_LIMITS = "SET lock_timeout = '5s'; SET idle_in_transaction_session_timeout = '15s'"
"""Timeouts for the outbox's transactions. Without them, a process that has stopped in a transaction would keep its
locks, and other processes would wait for ever."""


class Database:
    """Database of a service: its connection pools, from which each message gets a connection for its transaction. A
    Database belongs to one event loop."""

    def __init__(self, url: str, *, interactive: int, others: int) -> None:
        """Create the pools, without connecting. `interactive` and `others` are the numbers of workers for interactive
        and for other messages. Each of the two groups may open one connection per worker for `async` functions, and as
        many for plain functions.

        Raises: ConfigurationError if the URL is invalid, or its driver is not installed
        """
        self._address = address_of(url)
        with self._address.loading_driver():
            self._sql_engines = {
                True: _SqlEngines(self._address, True, interactive),
                False: _SqlEngines(self._address, False, others),
            }
            self._probe_engine = create_async_engine(
                self._address.for_tasks,
                poolclass=NullPool,
                connect_args={} if self._address.file is None else {**sqlite.CONNECT_ARGS, "timeout": 0},
            )
        self._outbox_engines: _SqlEngines | None = None
        """Connections of the outbox; None before `outbox` is called. Messages' transactions do not use them."""
        self._replies_engines: _SqlEngines | None = None
        """Connections of callers that wait for kept replies; None before `reply_store` is called."""
        self._was_writable = False
        self._is_closed = False

    def __str__(self) -> str:
        """Return the URL without the password."""
        return str(self._address)

    async def open(self) -> None:
        """Check that the database is available, and record whether it can be written to.

        Raises: DatabaseUnavailable
        """
        self._was_writable = await self._run_probe(_can_write)
        if self._was_writable and self._address.file is not None:
            await self._run_probe(sqlite.enable_wal)

    async def probe(self) -> None:
        """Check that the database is available. Unless the database was read-only when it was opened, check that it can
        still be written to. The probe has a connection of its own, so that it does not wait for workers.

        Raises: DatabaseUnavailable if the database does not answer, or can no longer be written to
        """
        if not await self._run_probe(_can_write) and self._was_writable:
            raise DatabaseUnavailable(
                f"{self} is read-only, and could be written to before: check whether it is a standby now"
            )

    async def close(self) -> None:
        """Close all connections. A connection whose work still runs is closed when the work ends."""
        self._is_closed = True
        for pools in (*self._sql_engines.values(), self._outbox_engines, self._replies_engines):
            if pools is not None:
                await pools.close()
        await self._probe_engine.dispose()

    def new_async_work(
        self, *, is_interactive: bool = False, inbox_id: str | None = None, stage: str = ""
    ) -> AsyncSqlWork:
        """Return the SQL transaction for one message, for an `async` function. `inbox_id` is the message's id in the
        inbox; None without exactly-once processing. `stage` is the stage's name in errors."""
        return AsyncSqlWork(self._sql_engines[is_interactive].for_tasks, lambda: self._is_closed, inbox_id, stage)

    def new_thread_work(
        self, *, is_interactive: bool = False, inbox_id: str | None = None, stage: str = ""
    ) -> ThreadSqlWork:
        """Return the SQL transaction for one message, for a plain function. `inbox_id` is the message's id in the
        inbox; None without exactly-once processing. `stage` is the stage's name in errors."""
        return ThreadSqlWork(self._sql_engines[is_interactive].for_threads, lambda: self._is_closed, inbox_id, stage)

    def outbox(self, service: str, owner: str, instance: str) -> Outbox:
        """Return the outbox of a service, which has connections of its own. `owner` is the id of this run, and
        `instance` is the human-readable name of the run."""
        if self._outbox_engines is None:
            self._outbox_engines = self._engines_of_tables(OUTBOX_CONNECTIONS)
        return Outbox(self._outbox_engines.for_tasks, service, owner, instance)

    def reply_store(self) -> ReplyStore:
        """Return the reader of kept replies, which has connections of its own, so that many callers do not delay the
        relay."""
        if self._replies_engines is None:
            self._replies_engines = self._engines_of_tables(REPLIES_CONNECTIONS)
        return ReplyStore(self._replies_engines.for_tasks)

    def _engines_of_tables(self, connections: int) -> "_SqlEngines":
        # Transactions are short, and callers wait for some of them: with SQLite they go before other writers.
        options: dict[str, Any] = {"limits": OUTBOX_LIMITS}
        if self._address.file is None:
            # The outbox relies on what two statements of a transaction see, whatever the database's own level is.
            # LIFO takes the same connection each second, so that it needs no ping.
            options |= {"isolation_level": "READ COMMITTED", "pool_use_lifo": True}
        engines = _SqlEngines(self._address, True, connections, **options)
        if self._address.file is None:
            postgresql.read_binary(engines.for_tasks.sync_engine)
        return engines

    async def _run_probe(self, probe: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        file = self._address.file
        try:
            if file is not None and not file.exists():
                # SQLite would create an empty file, and all messages would fail as it has no tables.
                raise DatabaseUnavailable(f"there is no file {file}: create the database before the stages start")
            async with asyncio.timeout(PROBE_TIMEOUT_S), self._probe_engine.connect() as connection:
                return await probe(connection)
        except TimeoutError as error:
            raise DatabaseUnavailable(f"{self} has not answered for {PROBE_TIMEOUT_S:g} seconds") from error
        except (SQLAlchemyError, OSError) as error:
            raise DatabaseUnavailable(f"{self} is not available: {error}") from error


class _SqlEngines:
    """Two connection pools, one for tasks and one for threads. The interactive workers, the other workers, the outbox,
    and the callers that wait for kept replies have two pools each."""

    def __init__(
        self, address: DatabaseAddress, is_interactive: bool, workers: int, *, limits: str = "", **others: Any
    ) -> None:
        options: dict[str, Any] = {
            **others,
            # A pool of size 0 would have no limit.
            "pool_size": max(1, workers),
            "max_overflow": 0,
        }
        task_args, thread_args = ({}, {}) if address.file is None else (sqlite.CONNECT_ARGS, sqlite.THREAD_ARGS)
        self.for_tasks: AsyncEngine = create_async_engine(
            address.for_tasks, poolclass=AsyncAdaptedQueuePool, connect_args=task_args, **options
        )
        self.for_threads: Engine = create_engine(
            address.for_threads, poolclass=QueuePool, connect_args=thread_args, **options
        )
        for engine in (self.for_tasks.sync_engine, self.for_threads):
            watch_transactions(engine)
            if address.file is None:
                postgresql.set_up(engine, limits=limits)
            else:
                sqlite.set_up(engine, write_queue_of(address.file), is_interactive=is_interactive)

    async def close(self) -> None:
        await self.for_tasks.dispose()
        self.for_threads.dispose()


async def _can_write(connection: AsyncConnection) -> bool:
    if connection.dialect.name != "sqlite":
        answer = await connection.exec_driver_sql("SELECT current_setting('transaction_read_only')")
        return bool(answer.scalar_one() == "off")
    try:
        await connection.exec_driver_sql("BEGIN IMMEDIATE")
    except DBAPIError as error:
        if classify_error(error) is DatabaseErrorKind.RETRYABLE:
            # Another connection writes to the file now.
            return True
        if error.orig is not None and getattr(error.orig, "sqlite_errorname", "").startswith("SQLITE_READONLY"):
            return False
        raise
    await connection.exec_driver_sql("ROLLBACK")
    return True
