"""A small service of stages with every outcome of a message, for the audit of stages.

`python -m tests.spark.shop URL FOLDER` runs it, until it kills itself with the first message to `kills.at.first`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import msgspec

from truenext.stage import Flow, Reject, Service


class Memo(msgspec.Struct):
    order: str = ""


class Busy(Exception):
    pass


def shop(url: str, folder: str) -> Service:
    app = Service("shop", broker=url, events=folder, concurrency=4)
    price = app.endpoint("price", str, int)
    place = app.endpoint("order.place", str, str, state=Memo)
    broken = app.endpoint("broken", str, attempts=2, retry={Busy: "1ms"})
    refused = app.endpoint("refused", str)
    kills = app.endpoint("kills.at.first", str)
    news = app.topic("news", str)

    @app.terminator("mail", str)
    def mail(order: str) -> None:
        pass

    @app.subscriber(news)
    async def hear(order: str) -> None:
        pass

    @price.stage
    async def tell(item: str, flow: Flow) -> int:
        if item == "tea" and flow.attempt == 1:
            raise Busy("come again")
        return 7

    @place.stage
    async def check(item: str, memo: Memo, flow: Flow) -> None:
        memo.order = flow.trace
        flow.request(price, item)

    @place.stage
    async def reserve(price: int, memo: Memo, flow: Flow) -> str:
        flow.send(mail, memo.order, trace="mail")
        flow.publish(news, memo.order)
        return memo.order

    @broken.stage
    async def never(order: str) -> None:
        raise Busy("never again")

    @refused.stage
    async def no(order: str) -> None:
        raise Reject("no")

    @kills.stage
    async def kill(order: str, flow: Flow) -> None:
        if flow.attempt == 1:
            # What it says of this message is written down first.
            await asyncio.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)

    return app


async def serve(url: str, folder: str) -> None:
    app = shop(url, folder)
    async with app.running():
        await app.send(app.endpoints["kills.at.first"], "o", trace="killed")
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2]))
