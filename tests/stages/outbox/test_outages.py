"""Tests of exactly-once processing with a broker that is away or full, large messages, crossing transactions of users,
and a database that is locked or not ready.

Source: docs/stages-database.md
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from tests.integration.broker_process import BrokerProcess
from tests.prometheus_samples import samples_of
from tests.stages.flows import Number, Text, run
from tests.stages.outbox.test_exactly_once import INSERT, Shop, all_is_over, expect, make_table, numbers
from tests.stages.postgres import PostgresServer
from tests.stages.service_process import ServiceProcess
from truenext.stage import Flow, Service
from truenext.stage.outbox.housekeeping import CHECK_INTERVAL_S, TIME_SHARE
from truenext.stage.sql import apply_schema, sqlite
from truenext.testing.stages import Stages

PATIENCE_S = 30
MIB = 1024 * 1024
THREADS, TIMES, ROWS = 6, 20, 5
BEGIN = None
"""Step of a program's transaction that initiates a flow; the other steps change a row."""


@pytest.mark.alternates("stages without a broker")
def test_flows_initiated_without_a_broker_are_sent_once_when_it_is_back(database: str) -> None:
    shop = Shop(is_async=True)

    async def work(t: Stages) -> None:
        await make_table(t)
        t.broker.kill()
        for n in range(100):
            async with t.sql() as sql, shop.app.initiate(sql, key=f"{n % 80}") as initiation:
                initiation.send(shop.place, Number(n % 80), trace=f"order {n % 80}")
        # The relay looks, and finds nobody.
        await asyncio.sleep(2)
        assert await numbers(t, "SELECT sum(messages) FROM truenext_outbox") == [80]
        await t.broker._start_again()
        await expect(t, *range(80))

    run(shop.app, work, database=database)


@pytest.mark.parametrize("size", [15 * MIB, 9 * MIB])
def test_outbox_unit_may_be_as_large_as_a_message(database: str, size: int) -> None:
    app = Service("shop", exactly_once=True)
    received: Counter[int] = Counter()

    @app.terminator("take", Text)
    async def take(text: Text) -> None:
        received[len(text.text)] += 1

    @app.terminator("placing", Number)
    async def placing(number: Number, flow: Flow, sql: AsyncSession) -> None:
        await sql.execute(INSERT, {"n": number.n})
        flow.send(take, Text("x" * size))

    async def work(t: Stages) -> None:
        await make_table(t)
        t.at("SQL committed", t.broker.drop, stage="placing")
        async with app.initiate() as initiation:
            for n in range(3):
                initiation.send(placing, Number(n), trace=f"order {n}")
        await all_is_over(t)
        await t.wait_until_ended()
        assert received == {size: 3}
        assert await numbers(t, "SELECT n FROM orders") == [0, 1, 2]

    run(app, work, database=database)


def test_a_process_that_begins_while_others_write_to_its_file_waits_for_them(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    """Fixed: the process ended, since it could not reach the outbox."""
    file = tmp_path / "chaos.db"
    file.touch()
    apply_schema(f"sqlite:///{file}")
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode=WAL")
        other.execute("BEGIN IMMEDIATE")
        environment = {"CHAOS_DATABASE": f"sqlite:///{file}"}
        at = f"stomp://127.0.0.1:{broker.port}"
        process = ServiceProcess(tmp_path, "tests.stages.services.chaos:app", at, environment=environment)
        try:
            # Longer than SQLite waits.
            process.await_lines("the outbox is not available yet")
            other.execute("ROLLBACK")
            process.await_lines("chaos runs")
            assert process.stop() == 0
        finally:
            process.kill()


def test_unit_too_large_for_a_broker_transaction_fails_its_stage_and_leaves_no_rows(database: str) -> None:
    app = Service("shop", exactly_once=True, attempts=2)
    take = app.remote("take", Text)

    @app.terminator("placing", Number)
    async def placing(number: Number, flow: Flow, sql: AsyncSession) -> None:
        await sql.execute(INSERT, {"n": number.n})
        for _ in range(2):
            flow.send(take, Text("x" * 9 * MIB))

    async def work(t: Stages) -> None:
        await make_table(t)
        await t.send(placing, Number(1))
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert "transaction_bytes_max" in letter.last_cause
        for table in ("orders", "truenext_inbox", "truenext_outbox"):
            assert await numbers(t, f"SELECT count(*) FROM {table}") == [0], table

    run(app, work, database=database)


def test_full_broker_costs_no_attempt_and_each_message_is_processed_once_afterwards(
    database: str,
) -> None:
    shop = Shop(is_async=True, attempts=1)

    async def work(t: Stages) -> None:
        await make_table(t)
        is_full = asyncio.Event()

        def fill() -> None:
            t.broker.fill_disk()
            is_full.set()

        t.at("run", fill, stage="placing")
        for n in range(3):
            await t.send(shop.place, Number(n))
        await is_full.wait()
        async with t.sql() as sql, shop.app.initiate(sql) as initiation:
            initiation.send(shop.place, Number(3), trace="order 3")
        await asyncio.sleep(1.5)
        assert not await numbers(t, "SELECT n FROM orders")
        assert await numbers(t, "SELECT count(*) FROM truenext_outbox") == [1]
        t.broker.free_disk()
        await expect(t, *range(4))

    run(shop.app, work, database=database)


def test_crossing_user_transactions_get_no_deadlock_from_the_outbox(
    postgres: PostgresServer, postgres_database: str
) -> None:
    """Each user transaction locks rows in its own order, and initiates flows before, between and after, while the
    relay numbers the flows of the others."""
    url = postgres.url(postgres_database)
    shop = Shop(is_async=True)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    errors: list[BaseException] = []

    def cross(number: int) -> None:
        drawn = random.Random(f"{seed} {number}")
        engine = create_engine(url)
        try:
            for n in range(TIMES):
                with Session(engine) as session, session.begin():
                    # Only the rows are in one order.
                    steps: list[int | None] = [*sorted(drawn.sample(range(ROWS), 3))]
                    for _ in range(2):
                        steps.insert(drawn.randrange(len(steps) + 1), BEGIN)
                    for count, step in enumerate(steps):
                        if step is BEGIN:
                            key = drawn.choice([None, f"{number} {n} {count}"])
                            with shop.app.initiate(session, key=key) as initiation:
                                initiation.send(shop.place, Number(1000 * number + 10 * n + count), trace="t")
                        else:
                            session.execute(text("UPDATE rows SET n = n + 1 WHERE id = :id"), {"id": step})
        except BaseException as error:
            errors.append(error)
        finally:
            engine.dispose()

    async def work(t: Stages) -> None:
        await make_table(t)
        async with t.sql() as sql:
            await sql.execute(text("CREATE TABLE rows (id integer PRIMARY KEY, n integer)"))
            await sql.execute(text(f"INSERT INTO rows SELECT i, 0 FROM generate_series(0, {ROWS - 1}) AS i"))
        running = [threading.Thread(target=cross, args=(number,)) for number in range(THREADS)]
        for each in running:
            each.start()
        for each in running:
            await asyncio.to_thread(each.join)
        assert not errors
        await all_is_over(t)
        assert len(await numbers(t, "SELECT n FROM orders")) == THREADS * TIMES * 2
        assert await numbers(t, "SELECT sum(n) FROM rows") == [THREADS * TIMES * 3]

    run(shop.app, work, database=url)


@pytest.mark.parametrize("table", ["truenext_inbox", "truenext_outbox", "truenext_producers"])
def test_tables_that_cannot_be_used_for_a_while_are_no_failure_of_a_message(
    database: str, table: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Fixed: a revoked privilege made dead letters of all messages."""
    shop = Shop(is_async=True, attempts=1)

    async def work(t: Stages) -> None:
        await make_table(t)
        async with t.sql() as sql:
            await sql.execute(text(f"ALTER TABLE {table} RENAME TO elsewhere"))
        for n in range(10):
            await t.send(shop.place, Number(n))
        await asyncio.sleep(1)
        assert not await t.dead_letters()
        async with t.sql() as sql:
            await sql.execute(text(f"ALTER TABLE elsewhere RENAME TO {table}"))
        await expect(t, *range(10))

    run(shop.app, work, database=database)
    rested = [each for each in caplog.records if "stages are suspended" in each.getMessage()]
    assert rested
    for each in rested:
        assert each.getMessage().startswith("the tables of exactly-once processing cannot be used")
        assert f"has no table {table}: create the tables with `truenext stages schema" in vars(each)["reason"]
    assert not [each for each in caplog.records if "database is" in each.getMessage()]


def test_a_table_that_has_lost_a_column_is_named_with_what_to_do(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop(is_async=True, attempts=1)

    async def work(t: Stages) -> None:
        await make_table(t)
        async with t.sql() as sql:
            await sql.execute(text("ALTER TABLE truenext_outbox RENAME COLUMN unit TO elsewhere"))
        await t.send(shop.place, Number(1))
        await asyncio.sleep(1)
        async with t.sql() as sql:
            await sql.execute(text("ALTER TABLE truenext_outbox RENAME COLUMN elsewhere TO unit"))
        await expect(t, 1)

    run(shop.app, work, database=database)
    reasons = [vars(each)["reason"] for each in caplog.records if "stages are suspended" in each.getMessage()]
    assert reasons and all("truenext_outbox" in each and "--sql" in each for each in reasons)


def test_a_database_that_is_locked_for_long_is_no_failure_of_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed: a statement on the outbox that timed out counted as an attempt after some repetitions."""
    file = tmp_path / "stages.db"
    file.touch()
    monkeypatch.setitem(sqlite.CONNECT_ARGS, "timeout", 0.01)
    shop = Shop(is_async=True, attempts=1)

    async def work(t: Stages) -> None:
        await make_table(t)
        # The first of a process waits for a producer, before it says anything itself.
        with closing(sqlite3.connect(file, isolation_level=None, check_same_thread=False)) as other:
            await asyncio.to_thread(other.execute, "BEGIN IMMEDIATE")
            for n in range(3):
                await t.send(shop.place, Number(n))
            await asyncio.sleep(2)
            other.execute("ROLLBACK")
        assert not await t.dead_letters()
        await expect(t, *range(3))

    run(shop.app, work, database=f"sqlite:///{file}")


def test_reading_the_outbox_does_not_wait_for_a_writer(tmp_path: Path) -> None:
    file = tmp_path / "stages.db"
    file.touch()
    shop = Shop(is_async=True)

    async def work(t: Stages) -> None:
        await make_table(t)
        once = t._service_run.exactly_once
        assert once is not None
        async with asyncio.timeout(4):
            async with t.sql() as sql:
                await sql.execute(text("INSERT INTO orders VALUES (1)"))
                assert (await once._outbox.count_unsent()).numbered == 0
                assert not await once.is_processed("0" * 32)
                assert samples_of(await once.collect())["truenext_outbox_oldest_seconds"] < 1

    run(shop.app, work, database=f"sqlite:///{file}")


def test_the_inbox_is_cleaned_as_fast_as_it_grows(database: str) -> None:
    """Fixed: a thousand rows a second were deleted, however many were inserted."""
    shop = Shop(is_async=True)
    rows = 20_000

    async def work(t: Stages) -> None:
        once = t._service_run.exactly_once
        assert once is not None
        async with t.sql() as sql:
            for first in range(0, rows, 1000):
                values = ", ".join(f"('{n:032x}', 1)" for n in range(first, first + 1000))
                await sql.execute(text(f"INSERT INTO truenext_inbox VALUES {values}"))
        loop = asyncio.get_running_loop()
        while True:
            started_at = loop.time()
            pause_s = await once._cleaner.delete_expired()
            if pause_s == CHECK_INTERVAL_S:
                break
            # It goes on as fast as the database is, up to its share of the database's time.
            assert pause_s < (loop.time() - started_at) / TIME_SHARE
        assert not await numbers(t, "SELECT 1 FROM truenext_inbox LIMIT 1")

    run(shop.app, work, database=database)
