"""A service for type checkers: a line that says `# wrong` must be an error, and no other may be one."""

from dataclasses import dataclass
from typing import assert_type

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from truenext.stage import Endpoint, Failure, Flow, Service, Topic


class Order(msgspec.Struct):
    id: str


class Placed(msgspec.Struct):
    id: str


class Reserve(msgspec.Struct):
    item: str


class Reserved(msgspec.Struct):
    ok: bool


@dataclass
class Memo:
    id: str = ""


app = Service("shop")
stock = app.remote("stock.reserve", Reserve, Reserved)
sink = app.remote("sink", Order)
topic = app.topic("orders", Order)
place = app.endpoint("order.place", Order, Placed, state=Memo)
plain = app.endpoint("plain", Order, Placed)
silent = app.endpoint("silent", Order)

assert_type(stock, Endpoint[Reserve, Reserved])
assert_type(sink, Endpoint[Order, None])
assert_type(topic, Topic[Order])


@place.stage
async def check(order: Order, memo: Memo, flow: Flow) -> None:
    memo.id = order.id
    flow.request(stock, Reserve(order.id))
    flow.request(stock, order)  # wrong
    flow.goto(plain, order)
    flow.goto(plain, Reserve("x"))  # wrong
    flow.send(sink, order)
    flow.send(sink, Placed("x"))  # wrong
    flow.send(stock, Reserve("x"), reply_to=takes_reserved)
    flow.send(stock, Reserve("x"), reply_to=sink)  # wrong
    flow.publish(topic, order)
    flow.publish(topic, Placed("x"))  # wrong
    flow.send(sink, order, interactiv=True)  # wrong
    flow.send(sink, order, ttl="soon")  # wrong
    flow.after_commit(print, order.id)
    flow.after_commit(takes_a_number, "x")  # wrong


@place.stage(concurrency=8, retry={ConnectionError: "2s"})
async def reserve(answer: Reserved, memo: Memo, flow: Flow, sql: AsyncSession) -> Placed:
    return Placed(memo.id)


@place.stage
async def may_reply(answer: Reserved, memo: Memo, flow: Flow) -> Placed | None:
    return None


@place.stage
def not_async(answer: Reserved, memo: Memo) -> Placed:
    return Placed(memo.id)


@place.stage  # wrong
async def another_state(answer: Reserved, memo: Order) -> Placed:
    return Placed("x")


@place.stage  # wrong
async def another_reply(answer: Reserved, memo: Memo) -> Reserved:
    return answer


@place.stage(concurrency=2)  # wrong
async def another_reply_with_options(answer: Reserved, memo: Memo) -> Reserved:
    return answer


@place.stage  # wrong
def not_async_another_reply(answer: Reserved, memo: Memo) -> Reserved:
    return answer


@plain.stage
async def answers(order: Order) -> Placed:
    return Placed(order.id)


@plain.stage  # wrong
async def answers_something_else(order: Order) -> Order:
    return order


@silent.stage  # wrong
async def replies_all_the_same(order: Order) -> Placed:
    return Placed(order.id)


@place.on_failure
async def place_failed(failure: Failure, memo: Memo, flow: Flow) -> Placed | None:
    flow.next(Reserved(False))
    return None


@place.on_failure(attempts=3)
def place_failed_with_options(failure: Failure, memo: Memo) -> None: ...


@place.on_failure  # wrong
async def no_failure(order: Order, memo: Memo) -> None: ...


@place.on_failure  # wrong
async def failed_with_another_state(failure: Failure, memo: Order) -> None: ...


@place.on_failure  # wrong
async def failed_with_another_reply(failure: Failure, memo: Memo) -> Reserved:
    return Reserved(False)


@plain.on_failure
async def plain_failed(failure: Failure) -> Placed:
    return Placed(failure.stage)


@plain.on_failure  # wrong
def plain_failed_with_another_reply(failure: Failure) -> Order:
    return Order("x")


@app.single("double", Order, Placed)
async def double(order: Order) -> Placed:
    return Placed(order.id)


@app.terminator("takes", Reserved)
async def takes_reserved(answer: Reserved) -> None: ...


@takes_reserved.on_failure
async def reserved_failed(failure: Failure) -> None: ...


@app.terminator("takes with a state", Reserved, state=Memo)
async def takes_reserved_with_a_state(answer: Reserved, memo: Memo) -> None: ...


@takes_reserved_with_a_state.on_failure
async def failed_with_a_state(failure: Failure, memo: Memo) -> None: ...


@takes_reserved_with_a_state.on_failure  # wrong
async def failed_with_a_wrong_state(failure: Failure, memo: Order) -> None: ...


def takes_a_number(number: int) -> None: ...


async def program() -> None:
    async with app.connected():
        placed = await app.ask(place, Order("x"), trace="t", interactive=True, timeout=5)
        assert_type(placed, Placed)
        assert_type(await app.ask(double, Order("x"), trace="t"), Placed)
        await app.ask(place, Reserve("x"), trace="t")  # wrong
        assert_type(await app.ask(place, Order("x"), trace="t", key="x"), Placed)
        await app.ask(place, Order("x"), trace="t", key=7)  # wrong
        assert_type(await app.reply(place, key="x", timeout=0), Placed)
        await app.reply(place)  # wrong
        await app.send(place, Order("x"), trace="t")
        await app.send(place, Placed("x"), trace="t")  # wrong
        await app.send(place, Order("x"))  # wrong
        await app.publish(topic, Order("x"), trace="t")
        await app.publish(topic, Placed("x"), trace="t")  # wrong
        await app.publish(place, Order("x"), trace="t")  # wrong
        async with app.initiate() as initiation:
            initiation.send(stock, Reserve("x"), trace="t", reply_to=takes_reserved)
            initiation.send(stock, Reserve("x"), trace="t", reply_to=place)  # wrong
            initiation.send(place, Order("x"), trace=7)  # wrong
            initiation.send(place, Order("x"), trace="t", keep_reply=True)
            initiation.send(place, Order("x"), trace="t", keep_reply="yes")  # wrong
    app.endpoint("odd", Order, Placed, concurrency="8")  # wrong
    app.endpoint("odd", Order, Placed, retry={"ValueError": "2s"})  # wrong
    app.endpoint("odd", Order, Placed, speed=3)  # wrong
    app.endpoint("odd", Order, state=Memo, attempts="2")  # wrong
    app.single("odd", Order, Placed, concurrency="8")  # wrong
    app.terminator("odd", Order, speed=3)  # wrong
    place.stage(speed=3)  # wrong
    place.on_failure(name="x")  # wrong
    plain.stage(exactly_once="yes")  # wrong
    app.subscriber(topic, exactly_once=True)  # wrong
