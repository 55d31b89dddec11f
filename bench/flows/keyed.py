"""Benchmark of `ask` under a key, beside a transaction of the program's own that starts a flow, and an `ask` without a
key."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncSession

from bench import queues
from bench.brokers import Truenext
from bench.flows import sql
from bench.flows.pairs import hired, report_medians
from bench.flows.shop import OrderReply, OrderRequest, service
from bench.flows.work import Order, Sizes, run
from bench.workers import Gate

TARGET = 2.5
"""Largest ratio of the medians."""


def compare_keyed(broker: Truenext, database: str, folder: Path, sizes: Sizes) -> None:
    medians: list[tuple[float, float]] = []
    for number in range(sizes.runs):
        sql.prepare(database)
        order = Order(broker.port, f"keyed.{number}", sizes.flows, database)
        medians.append(hired(ask_by_turns, order))
        waiting = asyncio.run(queues.waiting(order.port))
        if waiting != {_other(order): order.flows}:
            raise ValueError(f"{order.flows} flows of initiate were to wait, and these do: {waiting}")
        asyncio.run(queues.empty(order.port, list(waiting)))
    report_medians(("ask under a key", "initiate(session), and ask"), medians, TARGET)


def _other(order: Order) -> str:
    """Return the queue of the flows of `initiate`, which no consumer takes."""
    return f"{order.name}.other"


def ask_by_turns(gate: Gate, order: Order) -> tuple[float, float]:
    """Ask one after the other with and without a key. Return the median seconds of both."""

    async def program() -> tuple[float, float]:
        app = service(order, exactly_once=True)

        @app.single(order.name, OrderRequest, OrderReply)
        async def check(request: OrderRequest) -> OrderReply:
            return OrderReply(request.id)

        other_endpoint = app.remote(_other(order), OrderRequest)
        engine = sql.engine_of(order.database)
        keyed: list[float] = []
        other: list[float] = []
        gate.ready()
        gc.enable()
        async with app.running():
            for number in range(order.flows):
                request, trace = OrderRequest(number), f"question {number}"
                started = time.perf_counter()
                await app.ask(check, request, trace=trace, key=f"{order.name} {number}")
                keyed.append(time.perf_counter() - started)
                started = time.perf_counter()
                async with AsyncSession(engine) as session:
                    async with app.initiate(session) as initiation:
                        initiation.send(other_endpoint, request, trace=trace)
                    await session.commit()
                await app.ask(check, request, trace=trace)
                other.append(time.perf_counter() - started)
        await engine.dispose()
        return statistics.median(keyed), statistics.median(other)

    return run(program())
