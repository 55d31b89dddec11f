"""Tests of a database that becomes unavailable under load, and returns. Source: docs/stages.md"""

import asyncio
import os
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from tests.drawing import one_of
from tests.stages.postgres import PostgresServer
from tests.stages.services.job import Job
from truenext.stage import Flow, Service
from truenext.stage.core.health import assess_health
from truenext.stage.gate import UNCOUNTED_RETRIES
from truenext.stage.sql.errors import DatabaseErrorKind, DatabaseUnavailable
from truenext.testing.stages import stages

MESSAGES = 400
AWAY_S = float(os.environ.get("TRUENEXT_AWAY_S", "4"))
"""Longer than the kit waits for messages without a consumer."""


@pytest.mark.timeout(120 + 2 * AWAY_S)
@one_of("once", [False, True], ids=["best effort", "once"])
def test_unavailable_database_under_load_costs_no_attempt_and_all_flows_end(
    own_postgres: PostgresServer, once: bool
) -> None:
    attempts: Counter[int] = Counter()
    app = Service("shop", concurrency=4, exactly_once=once)
    work = app.endpoint("work", Job)

    @work.stage
    async def insert(job: Job, flow: Flow, sql: AsyncSession) -> None:
        attempts[flow.attempt] += 1
        await sql.execute(text("INSERT INTO inserted VALUES (:number)"), {"number": job.number})
        flow.next(job)

    @work.stage
    def insert_in_a_thread(job: Job, flow: Flow, sql: Session) -> None:
        attempts[flow.attempt] += 1
        sql.execute(text("INSERT INTO inserted VALUES (:number)"), {"number": -job.number})

    async def main(name: str) -> None:
        async with stages(app, database=own_postgres.url(name)) as t:
            async with t.sql() as sql:
                await sql.execute(text("CREATE TABLE inserted (number INTEGER)"))
            async with app.initiate() as initiation:
                for number in range(1, MESSAGES + 1):
                    initiation.send(work, Job(number), trace=f"job {number}")
            while sum(attempts.values()) < MESSAGES // 4:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(own_postgres.stop)
            # Who waits for the flows waits as long as the stages rest.
            ended = asyncio.create_task(t.wait_until_ended(timeout=AWAY_S + 60))
            await asyncio.sleep(AWAY_S)
            seen = sum(attempts.values())
            assert seen < 2 * MESSAGES, "it was to be in the middle of its work"
            await asyncio.to_thread(own_postgres.start)
            await ended
            async with t.sql() as sql:
                rows = Counter((await sql.execute(text("SELECT number FROM inserted"))).scalars())
        expected = {sign * number for number in range(1, MESSAGES + 1) for sign in (1, -1)}
        assert set(rows) == expected
        # What was under way when the server stopped may have been committed without an answer: that is the commit gap.
        assert sum(rows.values()) <= len(expected) + (0 if once else 8)
        assert set(attempts) == {1}

    with own_postgres.database() as name:
        asyncio.run(main(name))


def test_message_that_alone_finds_the_database_unavailable_counts_an_attempt_after_some_retries(
    postgres: PostgresServer, postgres_database: str
) -> None:
    """The function makes its own transaction read-only, which raises the same error as a read-only database."""
    attempts: Counter[int] = Counter()
    done: list[int] = []
    app = Service("shop", concurrency=2)

    @app.terminator("work", Job, attempts=2, retry={Exception: "0s"})
    async def work(job: Job, flow: Flow, sql: AsyncSession) -> None:
        if job.number == 0:
            attempts[flow.attempt] += 1
            await sql.execute(text("SET TRANSACTION READ ONLY"))
        await sql.execute(text("INSERT INTO inserted VALUES (:number)"), {"number": job.number})
        done.append(job.number)

    async def main() -> None:
        async with stages(app, database=postgres.url(postgres_database)) as t:
            async with t.sql() as sql:
                await sql.execute(text("CREATE TABLE inserted (number INTEGER)"))
            for number in range(4):
                await t.send(work, Job(number), trace=f"job {number}")
            (letter,) = await t.wait_until_ended(dead_letters=1)
            assert "read-only transaction" in letter.last_cause

    asyncio.run(main())
    assert sorted(done) == [1, 2, 3]
    assert attempts == {1: 1 + UNCOUNTED_RETRIES[DatabaseErrorKind.UNAVAILABLE], 2: 1}


def test_message_still_running_after_an_outage_of_the_database_is_reported_as_blocking_its_stage(
    tmp_path: Path,
) -> None:
    app = Service("shop", concurrency=2)
    is_started, may_end = asyncio.Event(), asyncio.Event()
    done: list[int] = []

    @app.terminator("work", Job)
    async def work(job: Job, sql: AsyncSession) -> None:
        if job.number == 0:
            is_started.set()
            await may_end.wait()
        done.append(job.number)

    sqlite3.connect(tmp_path / "shop.db").close()

    async def main() -> None:
        async with stages(app, database=f"sqlite:///{tmp_path / 'shop.db'}") as t:
            await t.send(work, Job(0))
            await is_started.wait()
            gate = t._service_run.context.gate
            assert gate is not None
            gate.close_on_error(DatabaseUnavailable("for a moment"))
            await gate.until_open()
            await t.send(work, Job(1))
            why = (
                "work consumes no other messages yet: messages from before the loss of the database are still being "
                "processed"
            )
            while why not in assess_health(t._service_run.status(), stalled_after_s=300).reasons:
                await asyncio.sleep(0.001)
            may_end.set()
            await t.wait_until_ended()
            health = assess_health(t._service_run.status(), stalled_after_s=300)
            assert health.facts.database == "available"
            assert not any("went" in each for each in health.reasons)

    asyncio.run(main())
    assert done == [0, 1]
