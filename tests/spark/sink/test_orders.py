"""Test of two processes of a sink that write to the broker in any order: each batch is published once.

Each run tries some orders, drawn anew; TRUENEXT_SEARCH=all has all of them, in an hour, TRUENEXT_SEED=7 the same again.
"""

from __future__ import annotations

import os
from random import Random, SystemRandom

import pytest

from tests.spark.sink.orders import SCENARIOS, End, Order, Orders, Scenario, Turn, orders
from truenext.testing import blocking_broker

DRAWN = 4
"""Orders drawn of each scenario."""


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_sink_publishes_each_batch_once_in_every_order(scenario: Scenario) -> None:
    seed = int(os.environ.get("TRUENEXT_SEED") or SystemRandom().randrange(2**32))
    chosen = list(orders(count_writes(scenario)))
    if os.environ.get("TRUENEXT_SEARCH") != "all":
        chosen = Random(seed).sample(chosen, DRAWN)
    print(f"TRUENEXT_SEED={seed}, {len(chosen)} orders")
    for order in chosen:
        run_order(scenario, order)


def count_writes(scenario: Scenario) -> tuple[int, int]:
    """Return the number of writes of each process if it runs first."""
    first, second = (run_order(scenario, (Turn(process, 0, End.LEFT),))[process] for process in (0, 1))
    return first, second


def run_order(scenario: Scenario, order: Order) -> tuple[int, int]:
    """Raises: Disagreement"""
    steps: list[str] = []
    try:
        with blocking_broker() as here, pytest.MonkeyPatch.context() as patch:
            return Orders(scenario, here, patch, steps).run(order)
    except BaseException:
        print("\n".join(steps))
        print(order)
        raise
