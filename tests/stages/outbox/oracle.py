"""Naive oracle of exactly-once processing, written from docs/stages-database.md alone and not from the code.

A program initiates an order, and sends a message about it to the hall. The order's stage writes one row and requests
some parts. The stage of a part writes one row and sends a message to the hall. The hall has no database: its messages
stay in its queue until the end. No table has a key, so an effect that happens twice leaves two rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple


class Started(Enum):
    """The program's knowledge of its initiation."""

    YES = "its transaction is committed, and its answer is here"
    NO = "it was rolled back"
    PERHAPS = "its answer was lost"


class Part(NamedTuple):
    order: str
    run: int
    """Run of the order's stage that requested the part: each run requests other parts. 0 is the program's own
    message to the hall, and no part."""
    place: int


class Seen(NamedTuple):
    """Contents of database and queues when everything has settled."""

    orders: list[tuple[str, int, int]]
    """Id, run and number of requested parts of each row of an order."""
    parts: list[Part]
    reported: list[Part]
    """Messages in the queue of the hall."""
    dead_orders: list[str]
    dead_parts: list[Part]
    unsent: int
    """Units in the outbox."""


class Oracle:
    def __init__(self) -> None:
        self._started: dict[str, Started] = {}
        self._spoiled: set[str] = set()
        self.sent_often: set[str] = set()
        """Orders that were sent in several messages with the same id. Some of the messages may be given up, and one
        be processed."""

    def start(self, order: str, started: Started) -> None:
        # What began once has begun, whatever becomes of those who say it again.
        if self._started.get(order) is not Started.YES:
            self._started[order] = started

    def something_was_lost(self, under_way: Iterable[str]) -> None:
        """Note that the database or the broker was restored: little is promised for the orders under way then."""
        self._spoiled.update(under_way)

    @property
    def started(self) -> set[str]:
        """Orders that may have begun."""
        return {order for order, started in self._started.items() if started is not Started.NO}

    def done(self, seen: Seen) -> set[str]:
        """Return the orders that are complete. Messages that were given up may still be re-driven."""
        alive = seen._replace(dead_orders=[], dead_parts=[])
        return {order for order in self.started if not list(self._missing(order, alive))}

    def contradictions(self, seen: Seen) -> list[str]:
        """Return all violations when everything has settled."""
        return [*self._at_any_time(seen), *self._at_the_end(seen)]

    def _at_any_time(self, seen: Seen) -> Iterable[str]:
        for order, many in Counter(order for order, _run, _parts in seen.orders).items():
            if many > 1:
                yield f"order {order} was handled {many} times"
            if self._started.get(order, Started.NO) is Started.NO:
                yield f"order {order} was handled, and never began"
        for part, many in Counter(seen.parts).items():
            if many > 1:
                yield f"{part} was handled {many} times"
        for part, many in Counter(seen.reported).items():
            if many > 1 and part.order not in self._spoiled:
                yield f"the hall was told {many} times of {part}"
        requested = {Part(order, run, place) for order, run, parts in seen.orders for place in range(parts)}
        for part in {*seen.parts, *seen.reported, *seen.dead_parts} - requested:
            if part.run and part.order not in self._spoiled:
                yield f"{part} was asked for by a run that was taken back"
        for part in {part for part in seen.reported if not part.run}:
            if self._started.get(part.order, Started.NO) is Started.NO:
                yield f"the hall was told of {part.order}, which never began"
        for part in {part for part in seen.reported if part.run} - set(seen.parts):
            if part.order not in self._spoiled:
                yield f"the hall was told of {part}, which is not in the database"
        dead: list[str | Part] = [*seen.dead_orders, *seen.dead_parts]
        alive: set[str | Part] = {*(order for order, _run, _parts in seen.orders), *seen.reported}
        for each, many in Counter(dead).items():
            spoiled = (each.order if isinstance(each, Part) else each) in self._spoiled
            if not spoiled and each not in self.sent_often and (many > 1 or each in alive):
                yield f"{each} is a dead letter {many} times, and done: {each in alive}"

    def _at_the_end(self, seen: Seen) -> Iterable[str]:
        if seen.unsent:
            yield f"{seen.unsent} units are in the outbox still"
        for order, started in self._started.items():
            if order not in self._spoiled:
                traces = [*(each for each, _run, _parts in seen.orders), *(part.order for part in seen.reported)]
                if started is Started.YES or (started is Started.PERHAPS and order in [*traces, *seen.dead_orders]):
                    yield from self._missing(order, seen)

    @staticmethod
    def _missing(order: str, seen: Seen) -> Iterable[str]:
        if Part(order, 0, 0) not in seen.reported:
            yield f"the hall was not told that {order} began"
        if order in seen.dead_orders and not any(each == order for each, _run, _parts in seen.orders):
            return
        rows = [(run, parts) for each, run, parts in seen.orders if each == order]
        if not rows:
            yield f"order {order} has begun, and was not handled"
        for run, parts in rows:
            for place in range(parts):
                part = Part(order, run, place)
                if part in seen.dead_parts:
                    continue
                if part not in seen.parts:
                    yield f"{part} was not handled"
                elif part not in seen.reported:
                    yield f"the hall was not told of {part}"
