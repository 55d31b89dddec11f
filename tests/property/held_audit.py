"""Audit that compares for how long consumers hold messages with the dispatches of each turn (C32.16)."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from truenext.broker.queues_request import NONE_HELD, Held, inspect_held, inspect_held_by_wildcards
from truenext.engine.dispatch.plain import Deliveries
from truenext.engine.engine import Engine
from truenext.engine.state.queue import Queue

T = TypeVar("T")


class HeldAudit:
    """Audit of one run of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._dispatched: dict[tuple[int, int], int] = {}
        """Time of the last dispatch of each message to each consumer, by the consumer's number and the sequence."""

    def add(self, deliveries: Deliveries) -> None:
        """Add the dispatches of a turn."""
        for consumer, entries in deliveries.items():
            for entry in entries:
                self._dispatched[consumer.number, entry.sequence] = self._engine.state.commit_state.now_us

    def differing(self) -> list[str]:
        """Return the queues of which consumers seem to hold other messages, or for another time."""
        expected: dict[Queue, Held] = {}
        for session in self._engine.state.clients.sessions.values():
            for consumer in session.consumers.values():
                for sequence, entry in consumer.held.items():
                    queue, since_us = entry.lane.queue, self._dispatched[consumer.number, sequence]
                    expected[queue] = expected.get(queue, NONE_HELD).plus(Held(1, since_us))
        by_wildcards = _result(inspect_held_by_wildcards(self._engine))
        found = {}
        for queue in self._engine.queues.by_name.values():
            consumers = self._engine.state.clients.receivers_of(queue).consumers
            found[queue] = _result(inspect_held(consumers)).plus(by_wildcards.get(queue, NONE_HELD))
        return [
            f"{queue.name}: {held}, dispatched {expected.get(queue)}"
            for queue, held in found.items()
            if held != expected.get(queue, NONE_HELD)
        ]


def _result(steps: Generator[None, None, T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
