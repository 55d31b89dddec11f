"""Comparison of several ways to do the same work, which run by turns."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench import queues
from bench.brokers import Broker, Truenext
from bench.client.work import Done
from bench.flows import shop
from bench.flows.work import CONCURRENCY, STAGES, Order
from bench.load import SILENCE
from bench.progress import print_line
from bench.workers import Crew, Job


class Side(NamedTuple):
    name: str
    work: Job
    """Job in a process of its own, which takes an Order and returns Done."""
    prepare: Callable[[Order], None]
    """Called before the clock starts."""
    check: Callable[[Order], None]
    """Called after the clock has stopped. Raises: ValueError unless everything was done once"""
    port: int = 0
    """Port of its broker."""
    broker: Broker | None = None
    database: str = ""
    """URL of its database."""
    checkout: Path | None = None
    """Checkout from which its job imports; None for this one."""


class _Figures(NamedTuple):
    rate: float
    """Flows a second."""
    program: float
    """Processor time of a stage's execution, in microseconds."""
    broker: float


def compare(
    key: str,
    sides: Sequence[Side],
    flows: int,
    runs: int,
    *,
    target: float | None = None,
    concurrency: int = CONCURRENCY,
) -> None:
    """Run all sides by turns. The ratio of the first side, ours, to each other one is the median over the rounds."""
    figures: list[list[_Figures]] = [[] for _ in sides]
    for number in range(runs):
        for index, side in enumerate(sides):
            order = Order(side.port, f"{key}.{number}.{index}", flows, side.database, concurrency)
            figures[index].append(_run(side, order))
    for side, each in zip(sides, figures, strict=True):
        print_line(f"  {side.name} {_describe(side, each)}")
    aim = "" if target is None else f" (at least {target:g})"
    for side, peer_figures in zip(sides[1:], figures[1:], strict=True):
        ratio = statistics.median(our.rate / their.rate for our, their in zip(figures[0], peer_figures, strict=True))
        print_line(f"  {ratio:.2f} of the rate of {side.name}{aim}")


def report_medians(names: tuple[str, str], medians: Sequence[tuple[float, float]], target: float) -> None:
    """Report the median time of two kinds of question, and the ratio of the first kind to the second. `medians` has a
    pair for each run, in seconds."""
    for index, name in enumerate(names):
        print_line(f"  {name}: median {statistics.median(each[index] for each in medians) * 1000:.2f} ms")
    ratio = statistics.median(first / second for first, second in medians)
    print_line(f"  {ratio:.2f} of the median of {names[1]} (at most {target:g})")


def _run(side: Side, order: Order) -> _Figures:
    side.prepare(order)
    before = side.broker.processor_seconds() if side.broker is not None else 0.0
    with importing(side.checkout):
        done: Done = hired(side.work, order)
    after = side.broker.processor_seconds() if side.broker is not None else 0.0
    side.check(order)
    executions = order.flows * STAGES
    return _Figures(order.flows / done.seconds, done.processor / executions * 1e6, (after - before) / executions * 1e6)


def _describe(side: Side, figures: list[_Figures]) -> str:
    rate, program, broker = (statistics.median(each) for each in zip(*figures, strict=True))
    low, high = min(each.rate for each in figures), max(each.rate for each in figures)
    used = f", broker {broker:.0f} us" if side.broker is not None else ""
    return f"{rate:,.0f} flows/s ({low:,.0f}-{high:,.0f}); processor time a stage {program:.0f} us{used}"


@contextmanager
def importing(checkout: Path | None) -> Iterator[None]:
    """Let processes that are started in the block import from a checkout; from here if it is None."""
    paths, variable = sys.path[:], os.environ.get("PYTHONPATH")
    if checkout is not None:
        own = [str(checkout), str(checkout / "src")]
        sys.path[:0] = own
        os.environ["PYTHONPATH"] = os.pathsep.join([*own, *filter(None, [variable])])
    try:
        yield
    finally:
        sys.path[:] = paths
        if variable is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = variable


def hired(job: Job, order: Order) -> Any:
    """Run a job in a process of its own, and return its result."""
    with Crew() as crew:
        worker = crew.hire(job, order)
        worker.await_ready()
        worker.start()
        return crew.finish(SILENCE + order.flows / 10)[0]


# ---- On truenext ----


def truenext_side(broker: Truenext, work: Job, *, name: str = "truenext") -> Side:
    """Return a side whose flows wait in the queue of their first stage."""
    return Side(name, work, start_flows, check_nothing_waits, broker.port, broker)


def start_flows(order: Order) -> None:
    hired(shop.start_flows, order)


def check_nothing_waits(order: Order) -> None:
    waiting = asyncio.run(queues.waiting(order.port))
    if waiting:
        raise ValueError(f"these wait still: {waiting}")
