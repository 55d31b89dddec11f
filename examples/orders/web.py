"""Web application of the demo: it starts the flows, and keeps a list of the committed orders.

Three kinds of orders come concurrently:

    customer   a user's own transaction has a row and a flow, or neither (`app.initiate(session, key=)`). Some are
               rolled back. Some are repeated, as by a second click, and are one order all the same
    asked      a user waits for the reply of the flow (`app.ask`)
    batch      a file of orders is imported, 25 at a time, over the broker (`app.initiate()`)

The flows of the first two are interactive. `python -m examples.orders.web BROKER DATABASE LIST CUSTOMERS ASKED BATCH`
"""

import argparse
import asyncio
import time
from contextlib import suppress
from pathlib import Path

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from examples.orders.service import DECLINED, SOLD_OUT, Order, app, place
from truenext import InDoubt, RolledBack
from truenext.stage import FlowFailed

# Inserts one row, however often the user clicks.
INSERT = text("INSERT INTO orders SELECT :id, :item WHERE NOT EXISTS (SELECT 1 FROM orders WHERE id = :id)")

TOGETHER = 25
"""Number of orders of the batch that are started in one transaction."""
PAUSE_S = 0.08
"""Seconds between two orders of one user."""
BATCH_PAUSE_S = 0.5
"""Seconds between two parts of the batch."""
REPLY_S = 10.0


class Listed(msgspec.Struct):
    """Order of which the web application knows the outcome of its transaction."""

    order: str
    kind: str
    ordered_at: float
    """Seconds since the epoch, just before the transaction was committed."""
    rejected_by: str | None = None
    """Queue of the stage that always fails for this order."""
    is_rolled_back: bool = False
    times: int = 1
    """Number of times that the user has placed it."""


class Cancelled(Exception):
    """Request that the user has left in the middle of the transaction."""


class OrderList:
    """File of the web application's own list, a line of JSON for each order."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)

    def add(self, listed: Listed) -> None:
        self._file.write(msgspec.json.encode(listed) + b"\n")


def read_list(path: Path) -> list[Listed]:
    return msgspec.json.Decoder(Listed).decode_lines(path.read_bytes())


def make_order(kind: str, number: int) -> tuple[Order, str | None]:
    """Return an order, and the queue of the stage that always fails for it."""
    order = Order(f"{kind}-{number}", "tea", "4111", cents=100 + number)
    if kind != "asked" and number % 20 == 5:
        order.item = SOLD_OUT
        return order, "stock.reserve"
    if kind != "asked" and number % 20 == 15:
        order.card = DECLINED
        return order, "payment.charge"
    return order, None


async def place_customer_orders(engine: AsyncEngine, orders: OrderList, count: int) -> None:
    for number in range(count):
        order, rejected_by = make_order("customer", number)
        is_rolled_back = number % 10 == 3
        times = 2 if number % 7 == 0 else 1
        ordered_at = time.time()
        for _ in range(times):
            with suppress(Cancelled):
                await buy(engine, order, is_cancelled=is_rolled_back)
        orders.add(Listed(order.id, "customer", ordered_at, rejected_by, is_rolled_back, times))
        await asyncio.sleep(PAUSE_S)


async def buy(engine: AsyncEngine, order: Order, *, is_cancelled: bool) -> None:
    """Write the order's row and start its flow, as a request's handler. Raises: Cancelled; nothing has happened"""
    async with AsyncSession(engine) as sql, sql.begin():
        await sql.execute(INSERT, {"id": order.id, "item": order.item})
        async with app.initiate(sql, key=order.id) as initiation:
            initiation.send(place, order, trace=order.id, interactive=True)
        if is_cancelled:
            raise Cancelled


async def place_asked_orders(orders: OrderList, count: int) -> None:
    for number in range(count):
        order, rejected_by = make_order("asked", number)
        ordered_at = time.time()
        while not await ask(order):
            ordered_at = time.time()
        orders.add(Listed(order.id, "asked", ordered_at, rejected_by))
        await asyncio.sleep(PAUSE_S)


async def ask(order: Order) -> bool:
    """Place an order and wait for the reply. Return False if the flow has not started."""
    try:
        await app.ask(place, order, trace=order.id, interactive=True, timeout=REPLY_S)
    except RolledBack:
        return False
    except InDoubt as doubt:
        return await app.outcome(doubt) == "committed"
    except TimeoutError:
        # The flow has started, and goes on. The reply was lost with the broker, or comes too late.
        pass
    except FlowFailed:
        # The flow has started, and ended in a dead letter.
        pass
    return True


async def place_batch_orders(orders: OrderList, count: int) -> None:
    for first in range(0, count, TOGETHER):
        part = [make_order("batch", number) for number in range(first, min(first + TOGETHER, count))]
        ordered_at = time.time()
        while not await start_flows([order for order, _ in part]):
            ordered_at = time.time()
        for order, rejected_by in part:
            orders.add(Listed(order.id, "batch", ordered_at, rejected_by))
        await asyncio.sleep(BATCH_PAUSE_S)


async def start_flows(part: list[Order]) -> bool:
    """Start the flows of all orders, or none, and wait for an unavailable broker. Return False for none."""
    try:
        async with app.initiate() as initiation:
            for order in part:
                initiation.send(place, order, trace=order.id)
    except RolledBack:
        return False
    except InDoubt as doubt:
        return await app.outcome(doubt) == "committed"
    return True


async def main(broker: str, database: str, path: str, *counts: str) -> None:
    app.broker, app.database = (broker,), database
    orders = OrderList(Path(path))
    # The services write to the same file, so that each writer waits for the others.
    engine = create_async_engine(database.replace("sqlite:", "sqlite+aiosqlite:"), connect_args={"timeout": 60})
    customer_count, asked_count, batch_count = map(int, counts)
    async with app.connected(), asyncio.TaskGroup() as parts:
        parts.create_task(place_customer_orders(engine, orders, customer_count))
        parts.create_task(place_asked_orders(orders, asked_count))
        parts.create_task(place_batch_orders(orders, batch_count))
    await engine.dispose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m examples.orders.web", description="The web application of the demo."
    )
    for name, about in (
        ("url", "address of the broker"),
        ("database", "its URL, as SQLAlchemy writes it"),
        ("list", "the file of what it has committed"),
        ("customers", "so many orders in users' transactions"),
        ("asked", "so many whose reply is waited for"),
        ("batch", "so many of a file"),
    ):
        parser.add_argument(name, help=about)
    asyncio.run(main(*vars(parser.parse_args()).values()))
