"""Service of the browser's tests: it takes orders, and rejects those without a customer."""

import msgspec

from truenext.stage import Flow, Reject, Service


class Order(msgspec.Struct):
    number: int
    customer: str = ""


class Bill(msgspec.Struct):
    number: int


app = Service("shop", attempts=3)
billed = app.remote("shop.billed", Bill)
bill_order = app.remote("shop.bill", Bill)


@app.terminator("shop.order", Order)
async def order(order: Order, flow: Flow) -> None:
    if not order.customer:
        raise Reject(f"order {order.number} has no customer")
    flow.send(bill_order, Bill(order.number))


@app.terminator("shop.bill", Bill)
async def bill(bill: Bill, flow: Flow) -> None:
    flow.send(billed, bill)
