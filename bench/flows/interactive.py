"""How long does `ask` take whose flow goes through three stages, alone and beside batch flows in the same queues?"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time

from bench import queues
from bench.brokers import Truenext
from bench.client.work import Done
from bench.flows import shop
from bench.flows.pairs import begin, nothing_waits
from bench.flows.work import Order, run
from bench.load import SILENCE
from bench.progress import say
from bench.workers import Crew, Gate

PER_S = 20
WARM_UP = PER_S
"""A second of questions that are not counted."""
TARGET = 3.0
"""Of the 99 % of a quiet system, at most."""
BACKLOG_PER_S = 2500
"""More flows than any service here ends in a second."""


def ask(gate: Gate, order: Order) -> list[float]:
    """Ask so often, at fixed times, whether replies have come or not. Returns the seconds of each round trip."""

    async def program() -> list[float]:
        app = shop.service(order)
        place = app.remote(order.name, shop.Asked, shop.Placed)

        async def one(number: int) -> float:
            started = time.perf_counter()
            placed = await app.ask(place, shop.Asked(number), trace=f"question {number}", interactive=True)
            if placed.id != number:
                raise ValueError(f"{number} was asked, and {placed.id} replied")
            return time.perf_counter() - started

        async with app.connected():
            gc.enable()
            gate.ready()
            loop = asyncio.get_running_loop()
            started = loop.time()
            asking = []
            for number in range(order.flows):
                await asyncio.sleep(started + number / PER_S - loop.time())
                asking.append(asyncio.ensure_future(one(number)))
            return await asyncio.gather(*asking)

    return run(program())


def compare(broker: Truenext, questions: int, runs: int) -> None:
    quiet: list[list[float]] = []
    loaded: list[list[float]] = []
    for number in range(runs):
        quiet.append(_run(Order(broker.port, f"interactive.{number}.quiet", questions), 0))
        seconds = (questions + WARM_UP) / PER_S
        loaded.append(_run(Order(broker.port, f"interactive.{number}.loaded", questions), int(seconds * BACKLOG_PER_S)))
    say(f"  quiet {_told(quiet)}")
    say(f"  beside batch flows {_told(loaded)}")
    for name, of in (("median", _median), ("99 %", _slow)):
        ratio = statistics.median(of(one) / of(other) for one, other in zip(loaded, quiet, strict=True))
        aim = f" (at most {TARGET:g})" if of is _slow else ""
        say(f"  {ratio:.2f} of the {name} when it is quiet{aim}")


def _run(order: Order, backlog: int) -> list[float]:
    """Seconds of each round trip."""
    order = order._replace(flows=order.flows + WARM_UP)
    if backlog:
        begin(order._replace(flows=backlog))
    with Crew() as crew:
        for job in (shop.serve_interactive, ask):
            worker = crew.hire(job, order)
            worker.await_ready()
            worker.go()
        served: Done
        trips: list[float]
        served, trips = crew.finish(SILENCE + order.flows / PER_S)
    if not backlog:
        nothing_waits(order)
        return trips[WARM_UP:]
    left = asyncio.run(queues.waiting(order.port))
    if not left.get(order.name):
        raise ValueError(f"{backlog:,} batch flows were gone before the last question: BACKLOG_PER_S is too small")
    rate = (backlog - sum(left.values())) / served.seconds
    say(f"    at least {rate:,.0f} batch flows/s went on meanwhile, {left[order.name]:,} had not begun")
    asyncio.run(queues.empty(order.port, list(left)))
    return trips[WARM_UP:]


def _median(trips: list[float]) -> float:
    return statistics.median(trips)


def _slow(trips: list[float]) -> float:
    """What 99 % are below."""
    return sorted(trips)[len(trips) * 99 // 100]


def _told(runs: list[list[float]]) -> str:
    told = []
    for name, of in (("median", _median), ("99 %", _slow)):
        each = [of(trips) * 1000 for trips in runs]
        told.append(f"{name} {statistics.median(each):.1f} ms ({min(each):.1f}-{max(each):.1f})")
    return "; ".join(told)
