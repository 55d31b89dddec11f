"""Flows by procrastinate: three jobs in the same PostgreSQL. Each inserts a row and defers the next one in the same
transaction, over one connection, as procrastinate's documentation shows.

One worker runs as many jobs at once as our three stages, hears of new ones by NOTIFY, and deletes those that have
succeeded. psycopg itself inserts the rows, since procrastinate cannot use SQLAlchemy's connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import procrastinate
import psycopg_pool
from psycopg import AsyncConnection
from sqlalchemy import create_engine, make_url, text

from bench.client.work import Done, Stopwatch
from bench.flows.shop import TOGETHER, OrderRequest
from bench.flows.work import STAGES, Ended, Order, run
from bench.workers import Gate

CHOSEN = "one worker, as many jobs at once as our three stages have workers, done ones deleted"
OWN_CONNECTIONS = 4
"""Number of connections of the worker itself, besides those of its jobs."""
_QUEUE = "bench"
_TABLES = "procrastinate_jobs, procrastinate_events, procrastinate_periodic_defers, procrastinate_workers"
_INSERT = "INSERT INTO done (flow, stage, note) VALUES (%s, %s, %s)"


def enqueue_jobs(gate: Gate, order: Order) -> None:
    """Enqueue the first job of each flow, and remove all others."""

    async def program() -> None:
        note = OrderRequest(0).note
        shop = _shop(order, lambda: None)
        gate.ready()
        async with shop.pool, shop.app.open_async(shop.pool):
            if not await shop.app.check_connection_async():
                await shop.app.schema_manager.apply_schema_async()
            async with shop.pool.connection() as connection:
                await connection.execute(f"TRUNCATE {_TABLES} CASCADE")
            for first in range(0, order.flows, TOGETHER):
                jobs = [{"flow": number, "note": note} for number in range(order.flows)[first : first + TOGETHER]]
                await shop.tasks[0].batch_defer_async(*jobs)

    run(program())


def work(gate: Gate, order: Order) -> Done:
    """Run until the last job has ended, and this is written."""
    logging.disable(logging.INFO)

    async def program() -> Done:
        ended = Ended(order.flows)
        shop = _shop(order, ended.one)
        watch = Stopwatch(gate)
        watch.start()
        async with shop.pool, shop.app.open_async(shop.pool):
            working = asyncio.ensure_future(
                shop.app.run_worker_async(
                    queues=[_QUEUE],
                    concurrency=STAGES * order.concurrency,
                    delete_jobs="successful",
                    install_signal_handlers=False,
                )
            )
            await asyncio.wait({working, asyncio.ensure_future(ended.wait())}, return_when=asyncio.FIRST_COMPLETED)
            # Running jobs end first.
            working.cancel()
            await asyncio.wait({working})
            return watch.stop()

    return run(program())


def check(order: Order) -> None:
    """Raises: ValueError unless no job is left"""
    engine = create_engine(order.database)
    with engine.connect() as connection:
        remaining = connection.execute(text("SELECT count(*) FROM procrastinate_jobs")).scalar_one()
    engine.dispose()
    if remaining:
        raise ValueError(f"{remaining} jobs are left")


class _Shop(NamedTuple):
    app: Any
    pool: Any
    tasks: Sequence[Any]
    """Tasks check, reserve and confirm."""


def _shop(order: Order, ended: Callable[[], None]) -> _Shop:
    jobs = STAGES * order.concurrency
    url = make_url(order.database).set(drivername="postgresql").render_as_string(hide_password=False)
    pool = psycopg_pool.AsyncConnectionPool(url, min_size=jobs, max_size=jobs + OWN_CONNECTIONS, open=False)
    app = procrastinate.App(connector=procrastinate.PsycopgConnector())

    async def insert(connection: AsyncConnection[Any], flow: int, stage: str, note: str) -> None:
        await connection.execute(_INSERT, (flow, stage, note))

    async def check(flow: int, note: str) -> None:
        async with pool.connection() as connection:
            await insert(connection, flow, "check", note)
            await tasks[1].configure(connection=connection).defer_async(flow=flow, note=note)

    async def reserve(flow: int, note: str) -> None:
        async with pool.connection() as connection:
            await insert(connection, flow, "reserve", note)
            await tasks[2].configure(connection=connection).defer_async(flow=flow, note=note)

    async def confirm(flow: int, note: str) -> None:
        async with pool.connection() as connection:
            await insert(connection, flow, "confirm", note)
        ended()

    tasks = [app.task(each, name=each.__name__, queue=_QUEUE) for each in (check, reserve, confirm)]
    return _Shop(app, pool, tasks)
