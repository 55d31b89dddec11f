"""Benchmark of the outbox after an outage of the broker: time until it is empty, and latency of new flows meanwhile.

The outbox has flows in the form in which `initiate(session)` writes them. Then a service starts and its relay sends
them. For comparison the client sends the same messages by `send_many`. Meanwhile interactive flows of three stages
start in the same way, and end.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import create_engine, func, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from bench import queues
from bench.brokers import Truenext
from bench.client.work import Done, Stopwatch
from bench.flows import sql
from bench.flows.pairs import hired
from bench.flows.shop import OrderRequest, service
from bench.flows.work import Order, Sizes, run
from bench.load import SILENCE
from bench.progress import print_line
from bench.workers import Gate
from truenext import Outgoing, connect
from truenext.flows.envelope import CONTENT_TYPE
from truenext.stage import Endpoint
from truenext.stage.context import ServiceContext
from truenext.stage.core.initiation import Initiation
from truenext.stage.core.outbox_unit import EncodedMessage, OutboxUnit
from truenext.stage.core.output import Output
from truenext.stage.sql.tables import outbox

TARGET = 0.5
LATENCY_S = 1.0
"""Largest latency of an interactive flow, in seconds."""
EVERY_S = 0.2
"""Seconds between two interactive flows."""
CHECK_INTERVAL_S = 0.05
TOGETHER = 1000
"""Number of units that are written in one transaction."""


class Drained(NamedTuple):
    seconds: float
    trips: list[float]
    """Seconds of each interactive flow, from before its transaction to the end of its last stage."""


def compare_drain(broker: Truenext, database: str, folder: Path, sizes: Sizes) -> None:
    outbox_rates: list[float] = []
    send_many_rates: list[float] = []
    trips: list[float] = []
    for number in range(sizes.runs):
        order = Order(broker.port, f"drain.{number}", sizes.units, database)
        sql.prepare(database)
        hired(write, order)
        print_line(f"    {sizes.units:,} units are in the outbox")
        drained: Drained = hired(drain, order)
        _check(order, len(drained.trips))
        sent: Done = hired(send, order)
        _check(order, len(drained.trips))
        outbox_rates.append(sizes.units / drained.seconds)
        send_many_rates.append(sizes.units / sent.seconds)
        trips += drained.trips
    print_line(f"  the outbox {_describe(outbox_rates)}")
    print_line(f"  send_many {_describe(send_many_rates)}")
    ratio = statistics.median(our / their for our, their in zip(outbox_rates, send_many_rates, strict=True))
    print_line(f"  {ratio:.2f} of the rate of send_many (at least {TARGET:g})")
    print_line(
        f"  {len(trips)} interactive flows meanwhile: median {statistics.median(trips) * 1000:.0f} ms, "
        f"longest {max(trips) * 1000:.0f} ms (at most {LATENCY_S * 1000:.0f})"
    )


def _describe(rates: list[float]) -> str:
    return f"{statistics.median(rates):,.0f} messages/s ({min(rates):,.0f}-{max(rates):,.0f})"


def _check(order: Order, interactive: int) -> None:
    """Raises: ValueError unless each message waits, and each interactive flow has its rows"""
    sql.check(order.database, interactive)
    waiting = asyncio.run(queues.waiting(order.port))
    if waiting != {_later(order): order.flows}:
        raise ValueError(f"{order.flows} messages were to wait, and these do: {waiting}")
    asyncio.run(queues.empty(order.port, list(waiting)))


def _later(order: Order) -> str:
    """Return the queue of messages that no consumer takes."""
    return f"{order.name}.later"


def _sent(order: Order) -> Iterator[tuple[str, list[EncodedMessage]]]:
    """Yield the id and the messages of each initiation."""
    app = service(order)
    later: Endpoint[OrderRequest, None] = app.remote(_later(order), OrderRequest)
    for number in range(order.flows):
        id = ServiceContext.new_id()
        output = Output(id, app.name)
        Initiation(output, time.time_ns() // 1_000_000, {}).send(later, OrderRequest(number), trace=f"order {number}")
        yield id, [each.encode({}) for each in output.outgoing]


# ---- Jobs ----


def write(gate: Gate, order: Order) -> None:
    """Write all units into the outbox."""
    engine = create_engine(order.database)
    name = service(order).name
    sent = _sent(order)
    gate.ready()
    while some := list(islice(sent, TOGETHER)):
        rows = [
            {
                "id": id,
                "service": name,
                "interactive": False,
                "messages": len(messages),
                "written_ms": time.time_ns() // 1_000_000,
                "unit": OutboxUnit(messages, False).encode(),
            }
            for id, messages in some
        ]
        with engine.begin() as connection:
            connection.execute(insert(outbox), rows)
    engine.dispose()


def drain(gate: Gate, order: Order) -> Drained:
    """Run the service from its start until the outbox has only interactive units."""

    async def program() -> Drained:
        app = service(order, exactly_once=True)
        started: dict[int, float] = {}
        trips: dict[int, float] = {}

        def ended(number: int) -> None:
            trips.setdefault(number, time.monotonic() - started[number])

        endpoint = sql.define_endpoint(app, order.name, ended)
        app.plans()
        engine = sql.engine_of(order.database)

        async def start_one(number: int) -> None:
            started[number] = time.monotonic()
            async with AsyncSession(engine) as session:
                async with app.initiate(session) as initiation:
                    initiation.send(endpoint, OrderRequest(number), trace=f"question {number}", interactive=True)
                await session.commit()

        watch = Stopwatch(gate)
        watch.start()
        async with app.running():
            drained = asyncio.ensure_future(_until_drained(engine, order))
            starting: list[asyncio.Future[None]] = []
            while not drained.done():
                starting.append(asyncio.ensure_future(start_one(len(starting))))
                await asyncio.wait({drained}, timeout=EVERY_S)
            seconds = drained.result() - watch.started
            await asyncio.gather(*starting)
            async with asyncio.timeout(SILENCE):
                while len(trips) < len(starting):
                    await asyncio.sleep(CHECK_INTERVAL_S)
        await engine.dispose()
        return Drained(seconds, list(trips.values()))

    return run(program())


async def _until_drained(engine: AsyncEngine, order: Order) -> float:
    """Wait, and return the time of the end."""
    undrained = select(func.count()).select_from(select(outbox.c.id).where(~outbox.c.interactive).limit(1).subquery())
    while (await queues.waiting(order.port)).get(_later(order), 0) < order.flows:
        await asyncio.sleep(CHECK_INTERVAL_S)
    while True:
        async with engine.connect() as connection:
            if not (await connection.execute(undrained)).scalar_one():
                return time.monotonic()
        await asyncio.sleep(CHECK_INTERVAL_S)


def send(gate: Gate, order: Order) -> Done:
    """Send the same messages with the client."""

    async def program() -> Done:
        messages = [
            Outgoing(each.body, correlation_id=each.id, priority=each.priority, persistent=each.persistent)
            for _, sent in _sent(order)
            for each in sent
        ]
        watch = Stopwatch(gate)
        async with connect(f"stomp://127.0.0.1:{order.port}") as connection:
            watch.start()
            await connection.send_many(f"/queue/{_later(order)}", messages, content_type=CONTENT_TYPE)
            return watch.stop()

    return run(program())
