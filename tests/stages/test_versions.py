"""Test of a service that is changed while flows are under way. Source: docs/stages.md, "Endpoints and stages";
docs/stages-running.md"""

import asyncio

import msgspec

import truenext.testing
from truenext.stage import Flow, Service


class Order(msgspec.Struct):
    id: str


class Reserve(msgspec.Struct):
    item: str


class Reserved(msgspec.Struct):
    ok: bool


class Placed(msgspec.Struct):
    id: str
    price: int = 0


class OldMemo(msgspec.Struct):
    id: str = ""


class NewMemo(msgspec.Struct):
    id: str = ""
    price: int = 7


def old_shop(url: str) -> Service:
    app = Service("shop", broker=url)
    stock = app.remote("stock.reserve", Reserve, Reserved)
    place = app.endpoint("order.place", Order, Placed, state=OldMemo)

    @place.stage
    async def check(order: Order, memo: OldMemo, flow: Flow) -> None:
        memo.id = order.id
        flow.request(stock, Reserve("tea"))

    @place.stage
    async def finish(answer: Reserved, memo: OldMemo) -> Placed:
        return Placed(memo.id)

    return app


def new_shop(url: str, priced: list[str]) -> Service:
    """The shop with one more stage in the middle, and one more field in the state."""
    app = Service("shop", broker=url)
    stock = app.remote("stock.reserve", Reserve, Reserved)
    prices = app.remote("prices", Reserve, Placed)
    place = app.endpoint("order.place", Order, Placed, state=NewMemo)

    @place.stage
    async def check(order: Order, memo: NewMemo, flow: Flow) -> None:
        memo.id = order.id
        flow.request(prices, Reserve("tea"))

    @place.stage
    async def price(price: Placed, memo: NewMemo, flow: Flow) -> None:
        priced.append(memo.id)
        memo.price = price.price
        flow.request(stock, Reserve("tea"))

    @place.stage
    async def finish(answer: Reserved, memo: NewMemo) -> Placed:
        return Placed(memo.id, memo.price)

    return app


def test_a_stage_in_the_middle_and_a_field_of_the_state_are_added_while_flows_are_under_way() -> None:
    async def main() -> None:
        async with truenext.testing.broker() as broker:
            ended: dict[str, int] = {}
            priced: list[str] = []
            other = Service("other", broker=broker.url)
            go_on = asyncio.Event()

            @other.single("stock.reserve", Reserve, Reserved)
            async def reserve(request: Reserve) -> Reserved:
                await go_on.wait()
                return Reserved(ok=True)

            @other.single("prices", Reserve, Placed)
            async def price(request: Reserve) -> Placed:
                return Placed("", 9)

            @other.terminator("ended", Placed)
            async def end(placed: Placed) -> None:
                ended[placed.id] = placed.price

            async def begin(number: int) -> None:
                place = other.remote("order.place", Order, Placed)
                async with other.initiate() as started:
                    started.send(place, Order(f"o{number}"), trace=f"o{number}", reply_to=end)

            async with other.running():
                async with old_shop(broker.url).running():
                    for number in range(5):
                        await begin(number)
                    # Old flows wait for the stock, with an old state, and for a stage that is to be the third.
                    while (await broker.queue("stock.reserve")).unacknowledged < 5:
                        await asyncio.sleep(0.01)
                await begin(5)
                async with new_shop(broker.url, priced).running():
                    await begin(6)
                    go_on.set()
                    async with asyncio.timeout(10):
                        while len(ended) < 7:
                            await asyncio.sleep(0.01)
            assert ended == {f"o{number}": 7 if number < 5 else 9 for number in range(7)}
            assert priced == ["o5", "o6"]

    asyncio.run(main())
