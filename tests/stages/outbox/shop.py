"""A shop of three stages that fan out: two have a database, one has none. The oracle knows the same shop."""

from __future__ import annotations

from collections import Counter

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from truenext.stage import Endpoint, Flow, Service

TABLES = [
    # No keys: what is done twice is there twice.
    "CREATE TABLE orders (id TEXT, run INTEGER, parts INTEGER)",
    "CREATE TABLE parts (id TEXT, run INTEGER, place INTEGER)",
]
ATTEMPTS = 4
BROKEN = 99
"""It fails until it is mended."""
SENT_BY_PROGRAM = 0
"""The program tells the hall by itself that it has begun an order, under this run: nobody's inbox hides if it does so
twice."""


class Order(msgspec.Struct, frozen=True):
    id: str
    fails: int
    """So many runs of its stage."""
    parts: tuple[int, ...]
    """So many runs of the stage of each part fail."""


class Part(msgspec.Struct, frozen=True):
    order: str
    run: int
    place: int
    fails: int = 0


class Runs:
    """What the world outside of all databases remembers, which nobody takes back."""

    def __init__(self) -> None:
        self._runs: Counter[object] = Counter()
        self.is_mended = False

    def next_of(self, what: object) -> int:
        self._runs[what] += 1
        return self._runs[what]

    def fails(self, run: int, fails: int) -> bool:
        return not self.is_mended if fails == BROKEN else run <= fails


class Shop:
    """The service as one process has it."""

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
            run = runs.next_of(order.id)
            # Each run asks for other parts, and for more of them.
            parts = order.parts if run == 1 else (*order.parts, 0)
            await sql.execute(
                text("INSERT INTO orders VALUES (:id, :run, :parts)"), {"id": order.id, "run": run, "parts": len(parts)}
            )
            for place, fails in enumerate(parts):
                flow.send(pack, Part(order.id, run, place, fails))
            if runs.fails(run, order.fails):
                raise ValueError("no paper for this order")

        self.place: Endpoint[Order, None] = place


QUEUES = ["order.place", "part.pack", "hall.tell"]
