"""Tests that a program whose time a test has stopped still reaches its broker. Source: docs/testing.md, "Time"."""

from __future__ import annotations

import asyncio
import datetime
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, date, timedelta
from typing import Any

import msgspec
import pytest
import uvloop
from freezegun import freeze_time

import truenext
from truenext import blocking, testing
from truenext.errors import ConfigurationError
from truenext.stage import Flow, Service
from truenext.testing.stages import stages

FROZEN = {
    "ahead": lambda **more: freeze_time("2035-01-01", **more),
    "behind": lambda **more: freeze_time("1999-01-01", **more),
    "goes on": lambda **more: freeze_time("2035-01-01", tick=True, **more),
    "leaps by itself": lambda **more: freeze_time("2035-01-01", auto_tick_seconds=3600, **more),
}
MOVES: dict[str, Callable[[Any], object]] = {
    "stays": lambda frozen: None,
    "days on": lambda frozen: frozen.tick(timedelta(days=5)),
    "years back": lambda frozen: frozen.move_to("1990-01-01"),
}
in_any_frozen_time = pytest.mark.parametrize(
    ("how", "move"),
    [
        ("ahead", "stays"),
        ("behind", "days on"),
        ("ahead", "years back"),
        ("goes on", "days on"),
        ("leaps by itself", "stays"),
    ],
)


def frozen(how: str, *, real_asyncio: bool = False) -> Any:
    return FROZEN[how](real_asyncio=real_asyncio)


def text_of(message: truenext.Message | blocking.Message | None) -> str:
    assert message is not None, "it has come"
    return message.text


# ---- Programs that block ----


@in_any_frozen_time
def test_a_blocking_client_works_while_its_time_stands_still_or_leaps(how: str, move: str) -> None:
    with testing.blocking_broker() as broker, blocking.connect(broker.url) as before:
        with frozen(how) as now, blocking.connect(broker.url) as connection:
            session = connection.session_id, before.session_id
            with connection.consumer("/queue/orders") as orders:
                before.send("/queue/orders", "1")
                assert text_of(orders.receive(timeout=10)) == "1"
                MOVES[move](now)
                before.send("/queue/orders", "2", delay=0.1)
                assert text_of(orders.receive(timeout=10)) == "2"
                # By a clock that goes on.
                assert orders.receive(timeout=0.01) is None
            connection.send("/queue/later", "3", delay=60)
            broker.advance(seconds=60)
            assert broker.queue("later").waiting == 1
            connection.send("/queue/orders", "4")
            # Neither was given up.
            assert (connection.session_id, before.session_id) == session
            broker.restart()
        before.send("/queue/orders", "5")
        assert broker.queue("orders").bodies == [b"4", b"5"]


def test_the_fixture_works_in_a_test_whose_time_stands_still_before_truenext_is_imported() -> None:
    program = """
from freezegun import freeze_time
with freeze_time("2035-01-01"):
    from truenext import blocking, testing
    with testing.blocking_broker() as broker, blocking.connect(broker.url) as connection:
        connection.send("/queue/orders", "1", delay=0.1)
        with connection.consumer("/queue/orders") as orders:
            assert orders.receive(timeout=10).text == "1"
            assert orders.receive(timeout=0.01) is None
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# ---- asyncio ----


async def talk(now: Any, move: str, before: truenext.Connection, broker: testing.LocalBroker) -> None:
    seen: list[float] = []

    async def handle(message: Any, session: truenext.Session) -> None:
        seen.append(time.time())

    async with truenext.connect(broker.url) as connection:
        session = connection.session_id, before.session_id
        async with connection.consumer("/queue/orders") as orders:
            await before.send("/queue/orders", "1")
            assert text_of(await orders.receive(timeout=10)) == "1"
            MOVES[move](now)
            await before.send("/queue/orders", "2", delay=0.1)
            assert text_of(await orders.receive(timeout=10)) == "2"
            assert await orders.receive(timeout=0.01) is None
        handling = asyncio.create_task(connection.consume("/queue/handled", handle))
        await connection.send("/queue/handled", "3")
        while not seen:
            await asyncio.sleep(0.01)
        handling.cancel()
        await asyncio.wait({handling})
        # The program has the time that its test wants, in handlers too.
        assert abs(seen[0] - datetime.datetime.now(UTC).timestamp()) < 100 * 3600
        await broker.advance(seconds=60)
        await connection.send("/queue/orders", "4")
        assert (connection.session_id, before.session_id) == session
        await broker.crash()


async def talk_while(freezing: Any, move: str) -> None:
    async with testing.broker() as broker, truenext.connect(broker.url) as before:
        with freezing as now:
            await talk(now, move, before, broker)
        await before.send("/queue/orders", "5")


@in_any_frozen_time
def test_an_asyncio_client_works_while_its_time_stands_still_or_leaps_if_its_loop_goes_on(how: str, move: str) -> None:
    asyncio.run(talk_while(frozen(how, real_asyncio=True), move))


def test_an_asyncio_client_in_uvloop_works_while_its_time_leaps() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(talk_while(frozen("ahead"), "days on"))


def test_a_loop_whose_time_stands_still_is_refused_with_what_to_say() -> None:
    app = Service("shop")

    async def main() -> None:
        async with testing.broker() as broker:
            with freeze_time("2035-01-01"):
                for refused in (
                    truenext.connect(broker.url).__aenter__,
                    testing.broker().__aenter__,
                    stages(app).__aenter__,
                    lambda: broker.advance(seconds=1),
                    lambda: broker.queue("orders"),
                    broker.restart,
                ):
                    with pytest.raises(ConfigurationError, match=r"stands still, .*real_asyncio=True"):
                        await refused()

    asyncio.run(main())


# ---- Stages ----


class Order(msgspec.Struct):
    at: datetime.datetime
    day: date


@pytest.mark.alternates("frozen stages")
@pytest.mark.parametrize("is_started_before", [False, True])
@in_any_frozen_time
def test_stages_work_while_the_time_of_their_program_stands_still_or_leaps(
    how: str, move: str, is_started_before: bool
) -> None:
    app = Service("shop", exactly_once=True, retry={ConnectionError: "1h"})
    received: list[Order] = []

    @app.terminator("take", Order)
    async def take(order: Order, flow: Flow) -> None:
        if flow.attempt == 1:
            raise ConnectionError("not yet")
        # As the program has it.
        assert abs(time.time() - datetime.datetime.now(UTC).timestamp()) < 100 * 3600
        received.append(order)

    async def use(now: Any) -> None:
        async with stages(app, database="sqlite://") as t:
            MOVES[move](now)
            order = Order(datetime.datetime.now(UTC), date.today())
            async with t.sql() as sql, app.initiate(sql) as initiation:
                initiation.send(take, order, trace="t")
            await t.wait_until_ended()
            assert received == [order]

    async def main() -> None:
        with frozen(how, real_asyncio=True) as now:
            await use(now)

    if is_started_before:
        asyncio.run(main())
    else:
        with frozen(how, real_asyncio=True) as now:
            asyncio.run(use(now))
