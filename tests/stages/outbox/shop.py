"""A shop of three stages that fan out: two have a database, one has none. The oracle knows the same shop."""

from __future__ import annotations

from collections import Counter

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from truenext.stage import Endpoint, Flow, Service
from truenext.stage.context import ServiceContext

TABLES = [
    # No keys: what is done twice is there twice.
    "CREATE TABLE orders (id TEXT, run INTEGER, parts INTEGER)",
    "CREATE TABLE parts (id TEXT, run INTEGER, place INTEGER)",
]
ATTEMPTS = 4
CLOCK_MS = 2
"""Milliseconds by which the clock of the database may differ, as it counts days."""
BROKEN = 99
"""Failures of a stage that fails until it is mended."""
SENT_BY_PROGRAM = 0
"""Run under which the program itself reports an order to the hall. No inbox would hide a report that is sent twice."""


class Order(msgspec.Struct, frozen=True):
    id: str
    fails: int
    """Number of runs of the order's stage that fail."""
    parts: tuple[int, ...]
    """Number of runs of the stage that fail, for each part."""
    delay_s: float = 0
    """Delay of each part."""


class Part(msgspec.Struct, frozen=True):
    order: str
    run: int
    place: int
    fails: int = 0


class Runs:
    """Counts of runs outside of all databases, which no rollback takes back."""

    def __init__(self) -> None:
        self._runs: Counter[object] = Counter()
        self.is_mended = False
        self.due_ms: dict[object, int] = {}
        """Earliest time of each delayed order and part."""
        self.early: list[object] = []

    def next_of(self, what: object) -> int:
        self._runs[what] += 1
        return self._runs[what]

    def delay(self, what: object, delay_s: float) -> None:
        if delay_s:
            self.due_ms.setdefault(what, ServiceContext.now_ms() + int(delay_s * 1000))

    def check_due(self, what: object) -> None:
        if ServiceContext.now_ms() < self.due_ms.get(what, 0) - CLOCK_MS:
            self.early.append(what)

    def fails(self, run: int, fails: int) -> bool:
        return not self.is_mended if fails == BROKEN else run <= fails


class Shop:
    """The service in one process."""

    def __init__(self, runs: Runs, concurrency: int) -> None:
        self.app = app = Service(
            "shop", exactly_once=True, attempts=ATTEMPTS, retry={ValueError: "1ms"}, concurrency=concurrency
        )
        self.told: Endpoint[Part, None] = app.remote("hall.told", Part)
        told = self.told

        @app.terminator("hall.tell", Part, exactly_once=False)
        async def tell(part: Part, flow: Flow) -> None:
            flow.send(told, part)

        @app.terminator("part.pack", Part)
        def pack(part: Part, flow: Flow, sql: Session) -> None:
            runs.check_due(part)
            run = runs.next_of(part)
            sql.execute(
                text("INSERT INTO parts VALUES (:order, :run, :place)"),
                {"order": part.order, "run": part.run, "place": part.place},
            )
            flow.send(tell, part)
            if runs.fails(run, part.fails):
                raise ValueError("this part does not fit")

        @app.terminator("order.place", Order)
        async def place(order: Order, flow: Flow, sql: AsyncSession) -> None:
            runs.check_due(order.id)
            run = runs.next_of(order.id)
            # Each run asks for other parts, and for more of them.
            parts = order.parts if run == 1 else (*order.parts, 0)
            await sql.execute(
                text("INSERT INTO orders VALUES (:id, :run, :parts)"), {"id": order.id, "run": run, "parts": len(parts)}
            )
            for place, fails in enumerate(parts):
                part = Part(order.id, run, place, fails)
                runs.delay(part, order.delay_s)
                flow.send(pack, part, delay=order.delay_s)
            if runs.fails(run, order.fails):
                raise ValueError("no paper for this order")

        self.place: Endpoint[Order, None] = place


QUEUES = ["order.place", "part.pack", "hall.tell"]
