"""What a recording sends: the cases in which a broker with two buckets breaks the order."""

import random
from collections.abc import Callable
from typing import NamedTuple

PRODUCTION_SHARE = 4
"""One in so many messages of the production case is interactive."""


class WorkloadMessage(NamedTuple):
    """One message to send; its sequence is its place in the list, from 1."""

    priority: int
    persistent: bool


def make_production(count: int, _: random.Random) -> list[WorkloadMessage]:
    """Ordinary messages (persistent, priority 4), then interactive ones (non-persistent, priority 9), 3 to 1."""
    interactive = count // PRODUCTION_SHARE
    return [WorkloadMessage(4, True)] * (count - interactive) + [WorkloadMessage(9, False)] * interactive


def make_alternation(count: int, _: random.Random) -> list[WorkloadMessage]:
    """Persistent and non-persistent in turn, all of priority 4: order of arrival alone decides."""
    return [WorkloadMessage(4, number % 2 == 0) for number in range(count)]


def make_mix(count: int, rng: random.Random) -> list[WorkloadMessage]:
    """Any priority, persistent or not."""
    return [WorkloadMessage(rng.randrange(10), rng.random() < 0.5) for _ in range(count)]


WORKLOADS: dict[str, Callable[[int, random.Random], list[WorkloadMessage]]] = {
    "production": make_production,
    "alternation": make_alternation,
    "mix": make_mix,
}
