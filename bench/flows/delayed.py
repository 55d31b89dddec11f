"""Benchmark of delayed flows that are due at once, beside scheduled sends of the client.

Flows and sends have the same bodies. The clock runs from the due time until all messages wait in their queue, where no
consumer takes them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

from bench import queues
from bench.brokers import Truenext
from bench.flows.pairs import hired
from bench.flows.shop import TOGETHER, OrderRequest, service
from bench.flows.work import Order, Sizes, run
from bench.load import SILENCE
from bench.progress import print_line
from bench.workers import Gate, Job
from truenext import connect
from truenext.flows.envelope import CONTENT_TYPE
from truenext.stage.core.initiation import Initiation
from truenext.stage.core.output import Output

TARGET = 0.9
SENT_PER_S = 1500
"""Least rate of the sends. All are due when they are sent at that rate."""
LEAST_S = 3.0
CHECK_INTERVAL_S = 0.02


def compare_delayed(broker: Truenext, folder: Path, sizes: Sizes) -> None:
    rates: tuple[list[float], list[float]] = [], []
    for number in range(sizes.runs):
        for index, job in enumerate((start_flows, send)):
            rates[index].append(_measure(job, Order(broker.port, f"delayed.{number}.{index}", sizes.units)))
    for name, each in zip(("delayed flows", "scheduled sends of the client"), rates, strict=True):
        print_line(f"  {name} {statistics.median(each):,.0f} messages/s ({min(each):,.0f}-{max(each):,.0f})")
    ratio = statistics.median(our / their for our, their in zip(*rates, strict=True))
    print_line(f"  {ratio:.2f} of the rate of the client's scheduled sends (at least {TARGET:g})")


def _measure(job: Job, order: Order) -> float:
    """Return the number of messages that become due in a second."""
    due: float = hired(job, order)
    seconds = asyncio.run(_await_all(order, due))
    asyncio.run(queues.empty(order.port, [order.name]))
    return order.flows / seconds


async def _await_all(order: Order, due: float) -> float:
    """Return the seconds from the due time until all messages wait. Raises: ValueError if sends have lasted longer"""
    if time.time() >= due:
        raise ValueError(f"not all was sent before it was due: SENT_PER_S, {SENT_PER_S}, is too large")
    if waiting := await queues.waiting(order.port):
        raise ValueError(f"these came early: {waiting}")
    await asyncio.sleep(due - time.time())
    async with asyncio.timeout(SILENCE + order.flows / 100):
        while (await queues.waiting(order.port)).get(order.name, 0) < order.flows:
            await asyncio.sleep(CHECK_INTERVAL_S)
    return time.time() - due


def _due(order: Order) -> float:
    return time.time() + LEAST_S + order.flows / SENT_PER_S


# ---- Jobs ----


def start_flows(gate: Gate, order: Order) -> float:
    """Start flows with one due time, and return it."""

    async def program() -> float:
        app = service(order)
        endpoint = app.remote(order.name, OrderRequest)
        gate.ready()
        due = _due(order)
        at = datetime.fromtimestamp(due, UTC)
        async with app.connected():
            for first in range(0, order.flows, TOGETHER):
                async with app.initiate() as initiation:
                    for number in range(first, min(first + TOGETHER, order.flows)):
                        initiation.send(endpoint, OrderRequest(number), trace=f"order {number}", at=at)
        return due

    return run(program())


def send(gate: Gate, order: Order) -> float:
    """Send the same bodies with the client, with one due time, and return it."""

    async def program() -> float:
        endpoint = service(order).remote(order.name, OrderRequest)
        gate.ready()
        due = _due(order)
        headers = {"AMQ_SCHEDULED_TIME": str(round(due * 1000))}
        async with connect(f"stomp://127.0.0.1:{order.port}") as connection:
            for first in range(0, order.flows, TOGETHER):
                output = Output(f"{first:032x}", "bench")
                initiation = Initiation(output, time.time_ns() // 1_000_000, {})
                for number in range(first, min(first + TOGETHER, order.flows)):
                    initiation.send(endpoint, OrderRequest(number), trace=f"order {number}")
                async with connection.session(transacted=True) as session:
                    for each in output.outgoing:
                        message = each.encode({})
                        await session.send(
                            message.destination, message.body, content_type=CONTENT_TYPE, headers=headers
                        )
                    await session.commit()
        return due

    return run(program())
