"""Flows with one INSERT in each stage, best-effort or exactly once; and the INSERTs alone, by SQLAlchemy without
stages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sqlalchemy import Column, Integer, MetaData, String, Table, create_engine, delete, event, func, insert, select
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from bench.client.work import Done, Stopwatch
from bench.flows.shop import Memo, OrderRequest, serve_until, service
from bench.flows.work import CONCURRENCY, STAGES, Ended, Order, run
from bench.workers import Gate
from truenext.stage import Flow, Service
from truenext.stage.core.definitions import StatefulEndpoint
from truenext.stage.sql import apply_schema
from truenext.stage.sql.tables import inbox, outbox

_METADATA = MetaData()
DONE = Table(
    "done",
    _METADATA,
    Column("id", Integer, primary_key=True),
    Column("flow", Integer, nullable=False),
    Column("stage", String(20), nullable=False),
    Column("note", String(1000), nullable=False),
)


def prepare(database: str, *, empties_inbox: bool = True) -> None:
    """Create an empty table, and the tables of exactly-once processing."""
    apply_schema(database)
    engine = create_engine(database)
    _METADATA.drop_all(engine)
    _METADATA.create_all(engine)
    with engine.begin() as connection:
        for table in (inbox, outbox) if empties_inbox else (outbox,):
            connection.execute(delete(table))
    engine.dispose()


def check(database: str, flows: int) -> None:
    """Raises: ValueError unless each stage of each flow has its row"""
    engine = create_engine(database)
    with engine.connect() as connection:
        rows = connection.execute(select(func.count()).select_from(DONE)).scalar_one()
        different = connection.execute(
            select(func.count()).select_from(select(DONE.c.flow, DONE.c.stage).distinct().subquery())
        ).scalar_one()
    engine.dispose()
    if not rows == different == STAGES * flows:
        raise ValueError(f"{flows} flows of {STAGES} stages, {rows} rows, {different} different ones")


def define_endpoint(
    app: Service, name: str, ended: Callable[[int], None]
) -> StatefulEndpoint[OrderRequest, None, Memo]:
    """Define three stages that insert a row each. The last one calls `ended` with the number of its flow."""
    endpoint = app.endpoint(name, OrderRequest, state=Memo)

    @endpoint.stage
    async def check(request: OrderRequest, memo: Memo, flow: Flow, sql: AsyncSession) -> None:
        memo.id = request.id
        await insert_row(sql, request.id, "check", request.note)
        flow.next(request)

    @endpoint.stage
    async def reserve(request: OrderRequest, memo: Memo, flow: Flow, sql: AsyncSession) -> None:
        memo.checked = True
        await insert_row(sql, request.id, "reserve", request.note)
        flow.next(request)

    @endpoint.stage
    async def confirm(request: OrderRequest, memo: Memo, flow: Flow, sql: AsyncSession) -> None:
        await insert_row(sql, request.id, "confirm", request.note)
        ended(request.id)

    return endpoint


# ---- Jobs ----


def serve(gate: Gate, order: Order) -> Done:
    """Run until the last flow has ended, and all is confirmed."""
    return _serve(gate, order, exactly_once=False)


def serve_exactly_once(gate: Gate, order: Order) -> Done:
    """Run with exactly-once processing until the last flow has ended, and all is confirmed."""
    return _serve(gate, order, exactly_once=True)


def _serve(gate: Gate, order: Order, *, exactly_once: bool) -> Done:
    async def program() -> Done:
        app, ended = service(order, exactly_once=exactly_once), Ended(order.flows)
        define_endpoint(app, order.name, lambda _: ended.one())
        return await serve_until(app, ended, gate)

    return run(program())


def insert_alone(gate: Gate, order: Order) -> Done:
    """Insert as many rows, each in a transaction of its own, in as many tasks as the stages have workers. SQLite has
    one writing transaction: there all tasks share one connection."""

    async def program() -> Done:
        watch = Stopwatch(gate)
        engine = engine_of(order.database)
        pending = iter([(number, stage) for number in range(order.flows) for stage in ("check", "reserve", "confirm")])
        note = OrderRequest(0).note

        async def work() -> None:
            for number, stage in pending:
                async with AsyncSession(engine) as sql:
                    await insert_row(sql, number, stage, note)
                    await sql.commit()

        watch.start()
        await asyncio.gather(*(work() for _ in range(STAGES * CONCURRENCY)))
        done = watch.stop()
        await engine.dispose()
        return done

    return run(program())


async def insert_row(sql: AsyncSession, flow: int, stage: str, note: str) -> None:
    await sql.execute(insert(DONE).values(flow=flow, stage=stage, note=note))


def engine_of(database: str) -> AsyncEngine:
    if not database.startswith("sqlite:"):
        return create_async_engine(database, pool_size=STAGES * CONCURRENCY, max_overflow=0)
    engine = create_async_engine(
        database.replace("sqlite:", "sqlite+aiosqlite:", 1), pool_size=1, max_overflow=0, pool_timeout=600
    )

    @event.listens_for(engine.sync_engine, "connect")
    def set_pragmas(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        # Settings of a service of stages.
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.close()

    return engine
