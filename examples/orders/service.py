"""Service that processes orders, in five stages.

Each stage writes one row, with exactly-once processing (docs/stages-database.md). No table has a primary key, so a row
that was written twice is there twice.

    order.place                    placed
        asks stock.reserve         reserved     rejects an order that is sold out
    order.place.stage.bill         billed
        asks payment.charge        charged      fails with a card that is declined
    order.place.stage.ship         shipped

`python -m examples.orders.tables` makes the tables. `truenext stages run examples.orders.service:app` runs it, in as
many processes as you like.
"""

import os

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from truenext.stage import Flow, Reject, Service

TABLES = {
    "order.place": "placed",
    "stock.reserve": "reserved",
    "order.place.stage.bill": "billed",
    "payment.charge": "charged",
    "order.place.stage.ship": "shipped",
}
"""Table of each stage, in the order of the stages in a flow."""
WEB_TABLE = "orders"
"""Table of the web application, which writes a row in the transaction that starts the flow."""

SOLD_OUT = "unicorn"
DECLINED = "4000"


class Order(msgspec.Struct):
    id: str
    item: str
    card: str
    cents: int


class Reserve(msgspec.Struct):
    order: str
    item: str


class Reserved(msgspec.Struct):
    shelf: str


class Charge(msgspec.Struct):
    order: str
    card: str
    cents: int


class Charged(msgspec.Struct):
    payment: str


class Shipped(msgspec.Struct):
    order: str
    shelf: str
    payment: str


class Memo(msgspec.Struct):
    """State of an order's flow, from stage to stage."""

    id: str = ""
    card: str = ""
    cents: int = 0
    shelf: str = ""


class CardDeclined(Exception):
    pass


app = Service(
    "orders",
    database="sqlite:///orders.db",
    exactly_once=True,
    user=os.environ.get("TRUENEXT_USER"),
    password_file=os.environ.get("TRUENEXT_PASSWORD_FILE"),
    ca=os.environ.get("TRUENEXT_CA"),
)
place = app.endpoint("order.place", Order, Shipped, state=Memo)


@place.stage
async def check(order: Order, memo: Memo, flow: Flow, sql: AsyncSession) -> None:
    await sql.execute(text("INSERT INTO placed VALUES (:id)"), {"id": order.id})
    memo.id, memo.card, memo.cents = order.id, order.card, order.cents
    flow.request(reserve, Reserve(order.id, order.item))


@app.single("stock.reserve", Reserve, Reserved)
async def reserve(request: Reserve, sql: AsyncSession) -> Reserved:
    if request.item == SOLD_OUT:
        raise Reject(f"there is no {request.item} on any shelf")
    await sql.execute(text("INSERT INTO reserved VALUES (:order)"), {"order": request.order})
    return Reserved(f"shelf of {request.item}")


@place.stage
async def bill(reserved: Reserved, memo: Memo, flow: Flow, sql: AsyncSession) -> None:
    await sql.execute(text("INSERT INTO billed VALUES (:id)"), {"id": memo.id})
    memo.shelf = reserved.shelf
    flow.request(charge, Charge(memo.id, memo.card, memo.cents))


# A declined card raises an ordinary exception, so the charge is retried, and given up after three attempts.
@app.single("payment.charge", Charge, Charged, attempts=3, retry={CardDeclined: "100ms"})
async def charge(request: Charge, sql: AsyncSession) -> Charged:
    await sql.execute(text("INSERT INTO charged VALUES (:order)"), {"order": request.order})
    if request.card == DECLINED:
        # The exception also rolls back the row above.
        raise CardDeclined(f"the bank says no to card {request.card}")
    return Charged(f"payment of {request.order}")


@place.stage
async def ship(charged: Charged, memo: Memo, sql: AsyncSession) -> Shipped:
    await sql.execute(text("INSERT INTO shipped VALUES (:id)"), {"id": memo.id})
    return Shipped(memo.id, memo.shelf, charged.payment)
