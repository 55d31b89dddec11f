"""Benchmark of flows and `ask` beside those of an earlier version of truenext.

The earlier version is a checkout. Its broker, its services and its part of this benchmark are processes that import
from there.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from pathlib import Path

from bench.brokers import Truenext
from bench.flows import interactive, shop
from bench.flows.pairs import Side, check_nothing_waits, compare, importing, start_flows
from bench.flows.work import Order, Sizes
from bench.progress import print_line

FLOWS_TARGET, ASK_TARGET = 0.99, 0.97


def compare_before(broker: Truenext, folder: Path, sizes: Sizes) -> None:
    checkout = sizes.checkout
    assert checkout is not None, "the case is left out without it"
    with ExitStack() as stack:
        with importing(checkout):
            earlier = stack.enter_context(Truenext(folder))
        compare(
            "before",
            (_side("this version", broker), _side("the earlier version", earlier, checkout)),
            sizes.flows,
            sizes.runs,
            target=FLOWS_TARGET,
        )
        _compare_asks(broker, earlier, checkout, max(sizes.flows // 20, interactive.PER_S), sizes.runs)


def _side(name: str, broker: Truenext, checkout: Path | None = None) -> Side:
    def prepare(order: Order) -> None:
        with importing(checkout):
            start_flows(order)

    return Side(name, shop.serve, prepare, check_nothing_waits, broker.port, broker, checkout=checkout)


def _compare_asks(broker: Truenext, earlier: Truenext, checkout: Path, asks: int, runs: int) -> None:
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(runs):
        for trips, port, of in ((ours, broker.port, None), (theirs, earlier.port, checkout)):
            with importing(of):
                each = interactive.ask_quietly(Order(port, f"before.ask.{number}", asks))
            trips.append(statistics.median(each))
    for name, trips in (("this version", ours), ("the earlier version", theirs)):
        print_line(f"  ask, {name}: median {statistics.median(trips) * 1000:.2f} ms")
    ratio = statistics.median(their / our for our, their in zip(ours, theirs, strict=True))
    print_line(f"  {ratio:.2f} of the speed of ask in the earlier version (at least {ASK_TARGET:g})")
