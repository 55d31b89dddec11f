"""Benchmark of `ask` through a flow of three stages, alone and beside batch flows in the same queues."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time

from bench import queues
from bench.brokers import Truenext
from bench.client.work import Done
from bench.flows import shop
from bench.flows.pairs import check_nothing_waits, start_flows
from bench.flows.work import Order, run
from bench.load import SILENCE
from bench.progress import print_line
from bench.workers import Crew, Gate

PER_S = 20
WARM_UP = PER_S
"""Number of requests that are not counted: those of a second."""
TARGET = 3.0
"""Largest ratio to the 99th percentile of a quiet system."""
BACKLOG_PER_S = 4000
"""Number of batch flows for each second, more than any service here ends in a second."""


def measure_ask(gate: Gate, order: Order) -> list[float]:
    """Ask at fixed times, whether replies have come or not. Return the seconds of each round trip."""

    async def program() -> list[float]:
        app = shop.service(order)
        endpoint = app.remote(order.name, shop.OrderRequest, shop.OrderReply)

        async def one(number: int) -> float:
            started = time.perf_counter()
            reply = await app.ask(endpoint, shop.OrderRequest(number), trace=f"question {number}", interactive=True)
            if reply.id != number:
                raise ValueError(f"{number} was asked, and {reply.id} replied")
            return time.perf_counter() - started

        async with app.connected():
            gc.enable()
            gate.ready()
            loop = asyncio.get_running_loop()
            started = loop.time()
            pending = []
            for number in range(order.flows):
                await asyncio.sleep(started + number / PER_S - loop.time())
                pending.append(asyncio.ensure_future(one(number)))
            return await asyncio.gather(*pending)

    return run(program())


def compare(broker: Truenext, requests: int, runs: int) -> None:
    quiet: list[list[float]] = []
    loaded: list[list[float]] = []
    for number in range(runs):
        quiet.append(_run(Order(broker.port, f"interactive.{number}.quiet", requests), 0))
        seconds = (requests + WARM_UP) / PER_S
        loaded.append(_run(Order(broker.port, f"interactive.{number}.loaded", requests), int(seconds * BACKLOG_PER_S)))
    print_line(f"  quiet {_describe(quiet)}")
    print_line(f"  beside batch flows {_describe(loaded)}")
    for name, of in (("median", _median), ("99 %", _slow)):
        ratio = statistics.median(of(one) / of(other) for one, other in zip(loaded, quiet, strict=True))
        aim = f" (at most {TARGET:g})" if of is _slow else ""
        print_line(f"  {ratio:.2f} of the {name} when it is quiet{aim}")


def ask_quietly(order: Order) -> list[float]:
    """Return the seconds of each round trip beside no other flows."""
    return _run(order, 0)


def _run(order: Order, backlog: int) -> list[float]:
    """Return the seconds of each round trip."""
    order = order._replace(flows=order.flows + WARM_UP)
    if backlog:
        start_flows(order._replace(flows=backlog))
    with Crew() as crew:
        for job in (shop.serve_interactive, measure_ask):
            worker = crew.hire(job, order)
            worker.await_ready()
            worker.start()
        served: Done
        trips: list[float]
        served, trips = crew.finish(SILENCE + order.flows / PER_S)
    if not backlog:
        check_nothing_waits(order)
        return trips[WARM_UP:]
    waiting = asyncio.run(queues.waiting(order.port))
    if not waiting.get(order.name):
        raise ValueError(f"{backlog:,} batch flows were gone before the last question: BACKLOG_PER_S is too small")
    rate = (backlog - sum(waiting.values())) / served.seconds
    print_line(f"    at least {rate:,.0f} batch flows/s went on meanwhile, {waiting[order.name]:,} had not begun")
    asyncio.run(queues.empty(order.port, list(waiting)))
    return trips[WARM_UP:]


def _median(trips: list[float]) -> float:
    return statistics.median(trips)


def _slow(trips: list[float]) -> float:
    """Return the 99th percentile."""
    return sorted(trips)[len(trips) * 99 // 100]


def _describe(runs: list[list[float]]) -> str:
    parts = []
    for name, of in (("median", _median), ("99 %", _slow)):
        each = [of(trips) * 1000 for trips in runs]
        parts.append(f"{name} {statistics.median(each):.1f} ms ({min(each):.1f}-{max(each):.1f})")
    return "; ".join(parts)
