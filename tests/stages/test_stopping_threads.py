"""Tests of messages in progress when their service stops, in plain functions above all. Source:
docs/stages-running.md, "Stop" """

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from tests.stages.flows import PATIENCE_S
from tests.stages.services.job import Job
from truenext.stage import Service
from truenext.stage.pool import PriorityPool
from truenext.testing.local import broker as local_broker
from truenext.testing.stages import Stages, stages


async def attempts_of(t: Stages, queue: str) -> list[int]:
    return [int(message.headers["truenext-attempts"]) for message in (await t.broker.queue(queue)).messages]


def test_a_plain_function_that_does_not_end_is_no_attempt(caplog: pytest.LogCaptureFixture) -> None:
    """Nor does the refused rollback count one: the threads accept no work by then."""
    is_started, may_end = threading.Event(), threading.Event()
    app = Service("stopping", database="sqlite://")

    @app.terminator("stopping.never", Job)
    def never(job: Job, sql: Session) -> None:
        sql.execute(text("SELECT 1"))
        is_started.set()
        may_end.wait()

    async def run() -> None:
        async with stages(app, database="sqlite://") as t:
            await t.send(never, Job(1))
            await asyncio.to_thread(is_started.wait)
            await t._service_run.stop(0.0)
            assert await attempts_of(t, "stopping.never") == [0]

    try:
        # At its end all tasks are cancelled, that of the function once more.
        asyncio.run(run())
    finally:
        may_end.set()
    assert [each.message for each in caplog.records if "failed" in each.message] == []


def test_a_stop_that_was_cancelled_goes_on_with_less_time() -> None:
    is_started = asyncio.Event()
    app = Service("stopping")

    @app.terminator("stopping.slow", Job)
    async def slow(job: Job) -> None:
        is_started.set()
        await asyncio.sleep(3600)

    async def run() -> None:
        async with stages(app) as t:
            await t.send(slow, Job(1))
            await is_started.wait()
            stopping = asyncio.create_task(t._service_run.stop(3600))
            await asyncio.sleep(0.01)
            stopping.cancel()
            await asyncio.wait({stopping})
            assert stopping.cancelled()
            await t._service_run.stop(0.0)
            assert await attempts_of(t, "stopping.slow") == [0]

    asyncio.run(run())


def test_a_service_that_is_cancelled_twice_closes_what_it_has_opened() -> None:
    is_started = asyncio.Event()
    closed: list[str] = []

    async def opened() -> AsyncIterator[Job]:
        yield Job(0)
        closed.append("lifespan")

    async def main() -> None:
        async with local_broker() as broker:
            app = Service("stopping", broker=broker.url, lifespan=opened)

            @app.terminator("stopping.slow", Job)
            async def slow(job: Job) -> None:
                is_started.set()
                await asyncio.sleep(3600)

            async def run() -> None:
                async with app.running():
                    await app.send(slow, Job(1), trace="t")
                    await asyncio.sleep(3600)

            running = asyncio.create_task(run())
            await is_started.wait()
            for _ in range(2):
                running.cancel()
                await asyncio.sleep(0.05)
            await asyncio.wait({running})
            assert running.cancelled()
            assert not app.is_running
            # The pool is shut down without waiting for its threads.
            async with asyncio.timeout(PATIENCE_S):
                while any(each.name.startswith("truenext stage") for each in threading.enumerate()):
                    await asyncio.sleep(0.01)

    asyncio.run(main())
    assert closed == ["lifespan"]


def test_an_error_on_the_way_of_a_stop_keeps_nothing_from_being_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    async def opened() -> AsyncIterator[Job]:
        yield Job(0)
        closed.append("lifespan")

    app = Service("stopping", lifespan=opened)

    @app.terminator("stopping.quick", Job)
    async def quick(job: Job) -> None:
        pass

    async def fail(self: PriorityPool) -> None:
        closed.append(self.name)
        await close(self)
        raise OSError("on the way")

    close = PriorityPool.close
    monkeypatch.setattr(PriorityPool, "close", fail)

    async def main() -> None:
        async with local_broker() as broker:
            app.broker = (broker.url,)
            with pytest.raises(OSError, match="on the way"):
                async with app.running():
                    pass

    asyncio.run(main())
    assert closed == ["interactive", "other", "lifespan"]


def test_a_plain_function_that_outlives_the_stop_leaves_no_transaction_open(tmp_path: Path) -> None:
    is_started, may_end = threading.Event(), threading.Event()
    file = tmp_path / "shop.db"
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.execute("CREATE TABLE jobs (number INTEGER)")
    url = f"sqlite:///{file}"
    app = Service("stopping", database=url)
    sessions: list[Session] = []

    @app.terminator("stopping.long", Job)
    def long(job: Job, sql: Session) -> None:
        sql.execute(text("INSERT INTO jobs VALUES (1)"))
        # Otherwise the garbage collector would do it.
        sessions.append(sql)
        is_started.set()
        may_end.wait()

    async def run() -> None:
        async with stages(app, database=url) as t:
            await t.send(long, Job(1))
            await asyncio.to_thread(is_started.wait)
            await t._service_run.stop(0.0)

    try:
        asyncio.run(run())
    finally:
        may_end.set()
    for thread in threading.enumerate():
        if thread.name.startswith("truenext stage"):
            thread.join(30)
    with contextlib.closing(sqlite3.connect(file, timeout=0)) as database:
        database.execute("BEGIN IMMEDIATE")
        assert database.execute("SELECT count(*) FROM jobs").fetchone() == (0,)


def test_plain_function_that_is_cancelled_twice_keeps_its_session_until_it_returns(tmp_path: Path) -> None:
    is_started, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()
    file = tmp_path / "shop.db"
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.execute("CREATE TABLE jobs (number INTEGER)")
    url = f"sqlite:///{file}"
    app = Service("stopping", database=url)
    handling: list[asyncio.Task[object]] = []
    counted: list[object] = []

    @app.terminator("stopping.long", Job)
    def long(job: Job, sql: Session) -> None:
        sql.execute(text("INSERT INTO jobs VALUES (1)"))
        if is_started.is_set():
            # The message was released, and is handled again.
            return
        is_started.set()
        may_end.wait()
        try:
            counted.append(sql.execute(text("SELECT count(*) FROM jobs")).scalar())
        except Exception as error:
            counted.append(error)
        has_ended.set()

    def note_task() -> None:
        task = asyncio.current_task()
        assert task is not None
        handling.append(task)

    async def run() -> None:
        async with stages(app, database=url) as t:
            t.at("received", note_task)
            await t.send(long, Job(1))
            await asyncio.to_thread(is_started.wait)
            (task,) = handling
            task.cancel()
            # The first cancellation waits for the function.
            await asyncio.sleep(0.05)
            assert not task.done()
            task.cancel()
            # A rollback in another thread would end the session here.
            await asyncio.wait({task}, timeout=1)
            may_end.set()
            await asyncio.to_thread(has_ended.wait)

    try:
        asyncio.run(run())
    finally:
        may_end.set()
    assert counted == [1]
