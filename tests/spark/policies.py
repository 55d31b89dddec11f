"""Queues served by right and wrong policies, with a naive count of the violations.

Producers are faster than the consumer at first, so that a backlog forms; then the queue is emptied.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.spark.histories import EPOCH, Event
from truenext.spark.schema import EVENTS

Waiting = list[Event]
Policy = Callable[[Waiting, int], Event]


def key(message: Event) -> tuple[int, int]:
    return (9 - message["priority"], message["sequence"])


def true_next(waiting: Waiting, _turn: int) -> Event:
    return min(waiting, key=key)


def two_buckets(waiting: Waiting, _turn: int) -> Event:
    """Keep transient messages of a priority apart from persistent ones, and serve them first."""
    return min(waiting, key=lambda each: (9 - each["priority"], each["persistent"], each["sequence"]))


def alternating_buckets(waiting: Waiting, turn: int) -> Event:
    """Serve the two buckets in turn."""
    own = [each for each in waiting if each["persistent"] is (turn % 2 == 0)] or waiting
    return min(own, key=key)


def three_classes(waiting: Waiting, _turn: int) -> Event:
    """Treat priorities 0 to 3, 4, and 5 to 9 as one priority each."""
    return min(
        waiting, key=lambda each: (0 if each["priority"] > 4 else 1 if each["priority"] == 4 else 2, each["sequence"])
    )


def serve(policy: Policy, seed: int, messages: int = 300) -> tuple[list[Event], Counter[str]]:
    """Return the history of a served queue, and the dispatches that were inversions or out of order, counted
    naively."""
    numbers = random.Random(seed)
    events: list[Event] = []
    wrong: Counter[str] = Counter()
    waiting: Waiting = []

    def add(kind: str, **columns: Any) -> Event:
        at = EPOCH + timedelta(milliseconds=len(events))
        events.append(
            dict.fromkeys(EVENTS.names)
            | {"event": len(events) + 1, "run": 1, "at": at, "kind": kind, "date": at.date()}
            | columns
        )
        return events[-1]

    add("run-started", reason="clean")
    add("subscribed", queue="orders", consumer=1, mode="client-individual", window=1)
    sent = turn = 0
    while sent < messages or waiting:
        if sent < messages and (not waiting or numbers.random() < 0.7):
            sent += 1
            persistent = numbers.random() < 0.5
            batch = sent if persistent else 0
            waiting.append(
                add(
                    "accepted",
                    queue="orders",
                    sequence=sent,
                    priority=numbers.randint(0, 9),
                    persistent=persistent,
                    size=1,
                    batch=batch,
                )
            )
            if persistent:
                add("committed", batch=batch)
            continue
        chosen = policy(waiting, turn)
        turn += 1
        waiting.remove(chosen)
        if any(each["priority"] > chosen["priority"] for each in waiting):
            wrong["inversion"] += 1
        elif any(key(each) < key(chosen) for each in waiting):
            wrong["order"] += 1
        add("dispatched", queue="orders", sequence=chosen["sequence"], consumer=1, deliveries=1)
        add("acknowledged", queue="orders", sequence=chosen["sequence"], consumer=1)
    return events, wrong
