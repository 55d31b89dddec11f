"""Service of the browser's tests: it takes orders. It rejects those without a customer, and fails for some."""

import asyncio

import msgspec

from truenext.stage import Flow, Reject, Service

UNKNOWN = "Bob"
"""Customer for whom the stock fails, again and again."""


class Order(msgspec.Struct):
    number: int
    customer: str = ""


class Reserve(msgspec.Struct):
    number: int
    customer: str


class Reserved(msgspec.Struct):
    shelf: str


class Billed(msgspec.Struct):
    number: int


class Memo(msgspec.Struct):
    number: int = 0


class StockAway(Exception):
    pass


app = Service("shop", attempts=3, retry={StockAway: "150ms"})
take_order = app.endpoint("shop.order", Order, Billed, state=Memo)


@app.single("shop.stock", Reserve, Reserved)
async def reserve(request: Reserve) -> Reserved:
    await asyncio.sleep(0.02)
    if request.customer == UNKNOWN:
        raise StockAway("the stock does not answer")
    return Reserved("A 7")


@take_order.stage
async def check(order: Order, memo: Memo, flow: Flow) -> None:
    if not order.customer:
        raise Reject(f"order {order.number} has no customer")
    memo.number = order.number
    flow.request(reserve, Reserve(order.number, order.customer))


@take_order.stage
async def bill(reserved: Reserved, memo: Memo) -> Billed:
    return Billed(memo.number)
