"""Do the effects of a stage happen once, whatever is lost? Source: docs/stages-outbox.md"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from msgspec.json import decode as decode_json
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from tests.stages.flows import Number, run
from truenext.errors import ConnectionLost
from truenext.stage import Endpoint, Flow, Service
from truenext.stage.core.envelope import decode
from truenext.testing.stages import Point, Stages

LEFT = "SELECT 1 FROM truenext_outbox"
INSERT = text("INSERT INTO orders VALUES (:n)")


@pytest.fixture(params=[True, False], ids=["async", "plain"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class Shop:
    """A stage that inserts a row and sends a message, whose effects happen once. Nobody takes that message: what is in
    its queue is what was sent."""

    def __init__(self, is_async: bool, **settings: Any) -> None:
        self.app = app = Service("shop", exactly_once=True, **settings)
        self.runs: list[int] = []
        self.body: Callable[[Number, Flow], None] = lambda number, flow: None
        self.take = take = app.remote("take", Number)

        async def asynchronous(number: Number, flow: Flow, sql: AsyncSession) -> None:
            self.runs.append(number.n)
            await sql.execute(INSERT, {"n": number.n})
            flow.send(take, number)
            self.body(number, flow)

        def plain(number: Number, flow: Flow, sql: Session) -> None:
            self.runs.append(number.n)
            sql.execute(INSERT, {"n": number.n})
            flow.send(take, number)
            self.body(number, flow)

        place = app.endpoint("placing", Number)
        place.stage(asynchronous if is_async else plain)
        self.place: Endpoint[Number, None] = place


async def make_table(t: Stages) -> None:
    async with t.sql() as sql:
        # No key: what is done twice is there twice.
        await sql.execute(text("CREATE TABLE orders (n INTEGER)"))


async def numbers(t: Stages, of: str) -> list[int]:
    async with t.sql() as sql:
        return sorted((await sql.execute(text(of))).scalars())


async def sent(t: Stages) -> list[int]:
    return sorted(decode_json(decode(each.body).message)["n"] for each in (await t.broker.queue("take")).messages)


async def all_is_over(t: Stages) -> None:
    async with asyncio.timeout(30):
        while True:
            # The connection over which the test asks is lost with the others.
            with suppress(OSError, ConnectionLost):
                queue = await t.broker.queue("placing")
                if not queue.messages and not queue.unacknowledged and not await numbers(t, LEFT):
                    return
            await asyncio.sleep(0.02)


async def expect(t: Stages, *placed: int) -> None:
    """Each of these was done once, and sent once."""
    await all_is_over(t)
    assert not await t.dead_letters()
    assert await numbers(t, "SELECT n FROM orders") == sorted(placed)
    assert await sent(t) == sorted(placed)
    assert len(await numbers(t, "SELECT 1 FROM truenext_inbox")) == len(placed)


def test_what_a_stage_does_is_done_and_sent_and_nothing_is_left_in_the_outbox(database: str, is_async: bool) -> None:
    shop = Shop(is_async)

    async def work(t: Stages) -> None:
        await make_table(t)
        for n in range(20):
            await t.send(shop.place, Number(n))
        await expect(t, *range(20))
        assert sorted(shop.runs) == list(range(20))
        assert sum(await numbers(t, "SELECT number FROM truenext_producers")) == 20

    run(shop.app, work, database=database)


def test_a_function_without_a_session_is_remembered_too(database: str) -> None:
    app = Service("shop", exactly_once=True)
    came: list[int] = []

    @app.terminator("take", Number)
    async def take(number: Number, flow: Flow) -> None:
        came.append(number.n)

    async def work(t: Stages) -> None:
        await t.send(take, Number(1))
        await t.ended()
        assert came == [1]
        assert len(await numbers(t, "SELECT 1 FROM truenext_inbox")) == 1

    run(app, work, database=database)


POINTS: list[Point] = ["received", "run", "checked", "sent", "SQL committed", "committed"]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("fault", ["connections dropped", "broker crashed"])
def test_a_connection_or_broker_that_is_lost_at_any_point_doubles_and_loses_nothing(
    database: str, is_async: bool, point: Point, fault: str
) -> None:
    shop = Shop(is_async)

    async def work(t: Stages) -> None:
        await make_table(t)
        starting: list[asyncio.Task[None]] = []

        def crash() -> None:
            t.broker.end()
            starting.append(asyncio.create_task(t.broker._start_again()))

        t.at(point, t.broker.drop if fault == "connections dropped" else crash, stage="placing")
        for n in range(5):
            await t.send(shop.place, Number(n))
        await asyncio.gather(*starting)
        await expect(t, *range(5))

    run(shop.app, work, database=database)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lost_answer_of_the_broker_to_its_commit_doubles_and_loses_nothing(
    database: str, is_async: bool, when: str
) -> None:
    shop = Shop(is_async)

    async def work(t: Stages) -> None:
        await make_table(t)
        t.at("SQL committed", lambda: t.broker.lose_commit("before" if when == "before" else "after"), stage="placing")
        for n in range(5):
            await t.send(shop.place, Number(n))
        await expect(t, *range(5))

    run(shop.app, work, database=database)
