"""Tests of exactly-once processing at each isolation level of PostgreSQL, and behind a pooler. Source:
docs/stages-database.md"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from tests.drawing import one_of
from tests.stages.flows import Number, run
from tests.stages.outbox.test_exactly_once import Shop, expect, make_table
from tests.stages.pooler import Pooler
from tests.stages.postgres import PostgresServer
from truenext.client.tasks.connection import connect
from truenext.stage.core.initiation import Initiation
from truenext.stage.core.output import Output
from truenext.testing.stages import Stages


@pytest.fixture(params=["read committed", "repeatable read", "serializable"])
def leveled(request: pytest.FixtureRequest, postgres: PostgresServer, postgres_database: str) -> str:
    """URL of a database with this default isolation level."""
    with postgres.connect() as connection:
        connection.execute(f"ALTER DATABASE {postgres_database} SET default_transaction_isolation = '{request.param}'")
    return postgres.url(postgres_database)


@one_of("is_async", [True, False], ["async", "plain"])
def test_a_message_that_two_handle_at_once_is_done_once_at_each_level(leveled: str, is_async: bool) -> None:
    shop = Shop(is_async)

    async def work(t: Stages) -> None:
        await make_table(t)
        output = Output("0" * 32, "elsewhere")
        Initiation(output, 0, {}).send(shop.place, Number(1), trace="order 1")
        async with connect(t.broker.url) as connection:
            for _ in range(6):
                # No redelivery: a foreign program sends it six times, and several workers take it.
                await connection.send("/queue/placing", output.outgoing[0].encode({}).body)
        await expect(t, 1)
        once = t._service_run.exactly_once
        assert once is not None
        assert once.counters.already_processed == 5

    run(shop.app, work, database=leveled)


@one_of("is_async", [True, False], ["async", "plain"])
def test_concurrent_messages_are_processed_without_an_attempt_at_each_isolation_level(
    leveled: str, is_async: bool
) -> None:
    shop = Shop(is_async, attempts=1)

    async def work(t: Stages) -> None:
        await make_table(t)
        for n in range(60):
            await t.send(shop.place, Number(n))
        await expect(t, *range(60))

    run(shop.app, work, database=leveled)


@pytest.fixture
def pooler(postgres: PostgresServer, postgres_database: str) -> Iterator[Pooler]:
    """A pooler with fewer connections to the server than a service has workers."""
    with Pooler(postgres.folder, postgres_database, connections=3) as pooler:
        yield pooler


@one_of("is_async", [True, False], ["async", "plain"])
def test_a_pooler_that_gives_each_transaction_another_connection_changes_nothing(
    pooler: Pooler, postgres: PostgresServer, postgres_database: str, is_async: bool
) -> None:
    shop = Shop(is_async, attempts=1)
    url = postgres.url(postgres_database, "127.0.0.1", pooler.port)

    async def work(t: Stages) -> None:
        await make_table(t)
        for n in range(40):
            await t.send(shop.place, Number(n))

        def start_flows() -> None:
            engine = create_engine(url, connect_args={"prepare_threshold": None})
            for n in range(40, 60):
                with Session(engine) as session, session.begin(), shop.app.initiate(session, key=f"{n}") as initiation:
                    initiation.send(shop.place, Number(n), trace=f"order {n}")
            engine.dispose()

        await asyncio.to_thread(start_flows)
        t.at("SQL committed", t.broker.drop, stage="placing")
        await t.send(shop.place, Number(60))
        await expect(t, *range(61))
        assert pooler.clients > 3

    run(shop.app, work, database=url)
