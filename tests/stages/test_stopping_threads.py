"""What becomes of messages in hand when a service stops? Source: docs/stages.md, "Stopping" """

import asyncio
import threading

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from tests.stages.services.job import Job
from truenext.stage import Service
from truenext.testing.stages import Stages, stages


async def attempts_of(t: Stages, queue: str) -> list[int]:
    return [int(message.headers["truenext-attempts"]) for message in (await t.broker.queue(queue)).messages]


def test_a_plain_function_that_does_not_end_is_no_attempt(caplog: pytest.LogCaptureFixture) -> None:
    """Nor is it one that the threads, which take nothing any more by then, refuse to roll back."""
    is_begun, may_end = threading.Event(), threading.Event()
    app = Service("stopping", database="sqlite://")

    @app.terminator("stopping.never", Job)
    def never(job: Job, sql: Session) -> None:
        sql.execute(text("SELECT 1"))
        is_begun.set()
        may_end.wait()

    async def run() -> None:
        async with stages(app, database="sqlite://") as t:
            await t.send(never, Job(1))
            await asyncio.to_thread(is_begun.wait)
            await t._running.stop(0.0)
            assert await attempts_of(t, "stopping.never") == [0]

    try:
        # At its end all tasks are cancelled, that of the function once more.
        asyncio.run(run())
    finally:
        may_end.set()
    assert [each.message for each in caplog.records if "failed" in each.message] == []


def test_a_stop_that_was_cancelled_goes_on_with_less_time() -> None:
    is_begun = asyncio.Event()
    app = Service("stopping")

    @app.terminator("stopping.slow", Job)
    async def slow(job: Job) -> None:
        is_begun.set()
        await asyncio.sleep(3600)

    async def run() -> None:
        async with stages(app) as t:
            await t.send(slow, Job(1))
            await is_begun.wait()
            stopping = asyncio.create_task(t._running.stop(3600))
            await asyncio.sleep(0.01)
            stopping.cancel()
            await asyncio.wait({stopping})
            assert stopping.cancelled()
            await t._running.stop(0.0)
            assert await attempts_of(t, "stopping.slow") == [0]

    asyncio.run(run())
