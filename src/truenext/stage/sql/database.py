"""One database of a program that runs stages: its pools, and whether it is there.

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
from truenext.stage.sql.exactly_once_writer import ExactlyOnceWriter
from truenext.stage.sql.outbox_table import Outbox
from truenext.stage.sql.sqlite import write_queue_of
from truenext.stage.sql.transaction import watch_transactions
from truenext.stage.sql.url import DatabaseAddress, address_of
from truenext.stage.sql.work import AsyncSqlWork, ThreadSqlWork

T = TypeVar("T")

OUTBOX_CONNECTIONS = 3
PROBE_TIMEOUT_S = 10.0
"""A database that has not answered by then is away."""


OUTBOX_LIMITS = "SET lock_timeout = '5s'; SET idle_in_transaction_session_timeout = '15s'"
"""A process that stands still in the middle of a transaction is not to have all others wait for its locks."""
_OUTBOX_ENGINE_OPTIONS: dict[bool, dict[str, Any]] = {
    # What two of its statements see is relied on, whatever the database's own level is. Each second the same connection
    # is taken, and need not be asked whether it lives.
    True: {"isolation_level": "READ COMMITTED", "pool_use_lifo": True},
    False: {},
}
"""By whether it is PostgreSQL."""


class Database:
    """It belongs to the event loop in which it is opened."""

    def __init__(self, url: str, *, interactive: int, others: int) -> None:
        """`interactive` and `others` are how many workers there are of each: so many connections each has, for `async`
        functions and for plain ones, as far as there are such functions. Nothing is connected yet.

        Raises: ConfigurationError
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
        """For what belongs to no message."""
        self._was_writable = False
        self._is_closed = False

    def __str__(self) -> str:
        """Its URL without the password."""
        return str(self._address)

    async def open(self) -> None:
        """Find out whether the database is there, and whether it can be written to.

        Raises: DatabaseUnavailable
        """
        self._was_writable = await self._run_probe(_can_write)
        if self._was_writable and self._address.file is not None:
            await self._run_probe(sqlite.enable_wal)

    async def probe(self) -> None:
        """Find out whether the database is there, as it was when it was opened.

        Over a connection of its own, so that it waits for no worker.

        Raises: DatabaseUnavailable, also if it can no longer be written to
        """
        if not await self._run_probe(_can_write) and self._was_writable:
            raise DatabaseUnavailable(f"{self} can only be read")

    async def close(self) -> None:
        """Close all connections; those of works that still run are closed when these end."""
        self._is_closed = True
        for pools in (*self._sql_engines.values(), self._outbox_engines):
            if pools is not None:
                await pools.close()
        await self._probe_engine.dispose()

    def new_async_work(
        self, *, is_interactive: bool = False, inbox_id: str | None = None, stage: str = ""
    ) -> AsyncSqlWork:
        """What one message is about to do, with an `async` function. `once` is the id by which the inbox is to know it,
        if its effects happen once; `stage` is named in errors."""
        pool = self._sql_engines[is_interactive].for_tasks
        return AsyncSqlWork(
            pool, lambda: self._is_closed, None if inbox_id is None else ExactlyOnceWriter(inbox_id), stage
        )

    def new_thread_work(
        self, *, is_interactive: bool = False, inbox_id: str | None = None, stage: str = ""
    ) -> ThreadSqlWork:
        """What one message is about to do, with a plain function."""
        pool = self._sql_engines[is_interactive].for_threads
        return ThreadSqlWork(
            pool, lambda: self._is_closed, None if inbox_id is None else ExactlyOnceWriter(inbox_id), stage
        )

    def outbox(self, service: str, owner: str, instance: str) -> Outbox:
        """What is said to the outbox beside all works; as `Outbox`."""
        if self._outbox_engines is None:
            # Few and short transactions, some of them for what somebody waits for: with SQLite they go first, too.
            self._outbox_engines = _SqlEngines(
                self._address,
                True,
                OUTBOX_CONNECTIONS,
                limits=OUTBOX_LIMITS,
                **_OUTBOX_ENGINE_OPTIONS[self._address.file is None],
            )
        return Outbox(self._outbox_engines.for_tasks, service, owner, instance)

    async def _run_probe(self, probe: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        file = self._address.file
        try:
            if file is not None and not file.exists():
                # SQLite would make an empty one, and all messages would fail for want of a table.
                raise DatabaseUnavailable(f"there is no file {file}: create the database before the stages start")
            async with asyncio.timeout(PROBE_TIMEOUT_S), self._probe_engine.connect() as connection:
                return await probe(connection)
        except TimeoutError as error:
            raise DatabaseUnavailable(f"{self} has not answered for {PROBE_TIMEOUT_S:g} seconds") from error
        except (SQLAlchemyError, OSError) as error:
            raise DatabaseUnavailable(f"{self} is not there: {error}") from error


class _SqlEngines:
    """The connections of the interactive workers, or of the others."""

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
            # Somebody writes to it now.
            return True
        if error.orig is not None and getattr(error.orig, "sqlite_errorname", "").startswith("SQLITE_READONLY"):
            return False
        raise
    await connection.exec_driver_sql("ROLLBACK")
    return True
