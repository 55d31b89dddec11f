"""Processes of the shop that run within the test's process and can be killed.

A kill cuts the sockets and the database connections of the process: neither the broker nor the database receives
anything from it after that, not even a farewell.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import OperationalError

from tests.stages.outbox.shop import Shop
from tests.stages.outbox.virtual_time import VirtualTime
from truenext.stage.core.definitions import Stage
from truenext.stage.service_run import RunResources, ServiceRun
from truenext.stage.sql.outbox_table import StoredUnit


class AtCommit(NamedTuple):
    """A fault at one of the SQL COMMITs of a process."""

    remaining: int
    """Number of COMMITs that pass before the fault."""
    when: str
    """"before" the COMMIT, so that it does not happen, or "after" it, so that its answer is lost."""
    is_killed: bool


class AtStatement(NamedTuple):
    remaining: int


class Line:
    """Proxy of all connections of one process to the broker, which can be cut with the process."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.WriteTransport | Any] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"stomp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer.transport)
        try:
            there, to = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        else:
            self._open.add(to.transport)
            # Whichever side goes, the other is gone, too.
            pumps = {asyncio.ensure_future(_pump(reader, to)), asyncio.ensure_future(_pump(there, writer))}
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                writer.transport.abort()
                to.transport.abort()
                for each in pumps:
                    each.cancel()
                await asyncio.wait(pumps)
                self._open -= {writer.transport, to.transport}
        finally:
            self._tasks.discard(task)

    def cut(self) -> None:
        """Abort all connections, with the bytes not forwarded yet, and accept no others."""
        if self._server is not None:
            self._server.close()
        for each in list(self._open):
            each.abort()

    async def end(self) -> None:
        self.cut()
        while self._tasks:
            await asyncio.wait(set(self._tasks))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)


class _Running(ServiceRun):
    def __init__(self, prepare: Callable[[Engine], None], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._prepare = prepare

    async def _open_database(self) -> None:
        await super()._open_database()
        assert self.context.gate is not None
        database = self.context.gate.database
        # Otherwise it is made later.
        database.outbox("", "", "")
        assert database._outbox_engines is not None
        for pools in (*database._sql_engines.values(), database._outbox_engines):
            self._prepare(pools.for_tasks.sync_engine)
            self._prepare(pools.for_threads)


class Process:
    def __init__(
        self,
        shop: Shop,
        url: str,
        port: int,
        virtual: VirtualTime,
        reached: Callable[[Process, str, str], None],
    ) -> None:
        """`reached` is called at each point that a message passes, with its stage."""
        self.shop = shop
        self.is_dead = False
        self.at_commit: AtCommit | None = None
        self.at_statement: AtStatement | None = None
        self.killed: Callable[[Process], None] = lambda _: None
        self._url = url
        self._line = Line(port)
        self._virtual = virtual
        self._reached = reached
        self._running: ServiceRun | None = None

    @property
    def running(self) -> ServiceRun:
        assert self._running is not None, "it was started"
        return self._running

    async def start(self) -> None:
        await self._line.start()
        app = self.shop.app
        self._running = running = _Running(
            self._prepare,
            app,
            app.plans(has_database=True),
            RunResources((self._line.url,), self._url),
            waits=True,
            creates_tables=True,
        )
        running.context.on_test_point = self._point
        app._current_run = running
        await running.connect()
        await running.prepare()
        await running.start()
        self._watch_relay()

    def _watch_relay(self) -> None:
        once = self.running.exactly_once
        assert once is not None
        relay = once._relay
        is_sent = relay._send_unit

        async def watched(unit: StoredUnit) -> bool:
            self._reached(self, "relay sends", "outbox")
            answer = await is_sent(unit)
            self._reached(self, "relay sent", "outbox")
            return answer

        relay._send_unit = watched  # type: ignore[method-assign]

    def _point(self, point: str, stage: Stage) -> None:
        self._reached(self, point, stage.queue)

    def _prepare(self, engine: Engine) -> None:
        self._virtual.patch_database_clock(engine)
        do_commit = engine.dialect.do_commit

        def commit(connection: Any) -> None:
            if self.is_dead:
                raise _io_error()
            at = self.at_commit
            if at is None:
                do_commit(connection)
                return
            if at.remaining:
                self.at_commit = at._replace(remaining=at.remaining - 1)
                do_commit(connection)
                return
            self.at_commit = None
            if at.when == "after":
                do_commit(connection)
            if at.is_killed:
                self.kill_from_any_thread()
            raise _io_error()

        engine.dialect.do_commit = commit  # type: ignore[method-assign, assignment]

        @event.listens_for(engine, "before_cursor_execute")
        def before(connection: Connection, _: object, statement: str, *__: object) -> None:
            at = self.at_statement
            if self.is_dead:
                raise OperationalError(statement, {}, _io_error())
            if at is None:
                return
            self.at_statement = at._replace(remaining=at.remaining - 1) if at.remaining else None
            if not at.remaining:
                raise OperationalError(statement, {}, _io_error())

    def cleans_now(self) -> None:
        """Start the cleaning of the inbox now, not within a minute."""
        once = None if self._running is None else self._running.exactly_once
        if once is not None:
            once._cleaner.wake()

    def kill_from_any_thread(self) -> None:
        """Cut the process off from broker and database. Its remains are swept up later."""
        if not self.is_dead:
            self.is_dead = True
            self.running.context.loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        self._line.cut()
        self.killed(self)

    def kill(self) -> None:
        if not self.is_dead:
            self.is_dead = True
            self._cut()

    async def swept_up(self) -> None:
        """Stop the remains of a process that was killed."""
        await self.stop(timeout=0)

    async def stop(self, timeout: float = 30) -> None:
        try:
            if self._running is not None:
                await self._running.stop(timeout)
        finally:
            self.shop.app._current_run = None
            await self._line.end()


def _io_error() -> sqlite3.OperationalError:
    """Return an error that does not tell whether something was committed."""
    error = sqlite3.OperationalError("disk I/O error, by a test")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR
    error.sqlite_errorname = "SQLITE_IOERR"
    return error
