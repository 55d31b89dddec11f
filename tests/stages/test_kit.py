"""Test of the kit for tests of stages while a test drops the broker's connections. Source: docs/tutorial-stages.md,
step 10"""

import asyncio

from tests.stages.flows import Number, run
from truenext.stage import Service
from truenext.testing.stages import Stages


def test_the_end_of_all_flows_is_known_while_the_test_drops_all_connections_again_and_again() -> None:
    app = Service("shop")
    received: set[int] = set()

    @app.terminator("take", Number)
    async def take(number: Number) -> None:
        received.add(number.n)

    async def drop(t: Stages) -> None:
        while True:
            t.broker.drop()
            await asyncio.sleep(0)

    async def work(t: Stages) -> None:
        for n in range(3):
            await t.send(take, Number(n))
            dropping = asyncio.ensure_future(drop(t))
            asyncio.get_running_loop().call_later(0.05, dropping.cancel)
            await t.wait_until_ended()
            await asyncio.wait({dropping})
        assert received == {0, 1, 2}

    run(app, work)
