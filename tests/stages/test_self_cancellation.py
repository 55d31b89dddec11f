"""Tests of programs that cancel the task in which their own code runs: the worker is not cancelled. Source:
docs/stages.md, "Failures and outages" """

import asyncio
import contextlib
import gc
import sqlite3
import threading
import warnings
from collections.abc import Callable

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession

import truenext
from tests.stages.flows import Number, run
from truenext.stage import Flow, Service
from truenext.stage.interceptors.interceptor import Execution, ExecutionResult, Interceptor
from truenext.stage.user_code import run_user_coroutine
from truenext.testing.local import broker as local_broker
from truenext.testing.stages import Stages, stages


async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(3600)


async def is_cancelled_by_its_watchdog() -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_later(0.001, task.cancel)
    await asyncio.sleep(3600)


@pytest.mark.parametrize("cancel", [cancels_itself, is_cancelled_by_its_watchdog])
def test_a_stage_that_cancels_its_own_task_has_failed_and_its_worker_goes_on(
    cancel: Callable[[], asyncio.Future[None]],
) -> None:
    app = Service("shop", concurrency=1)
    ran: list[tuple[int, int]] = []

    @app.terminator("take", Number, attempts=3)
    async def take(number: Number, flow: Flow) -> None:
        ran.append((number.n, flow.attempt))
        if number.n == 0:
            await cancel()

    async def work(t: Stages) -> None:
        await t.send(take, Number(0))
        await t.send(take, Number(1))
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert "CancelledError" in letter.last_cause
        assert sorted(ran) == [(0, 1), (0, 2), (0, 3), (1, 1)]

    run(app, work)


def test_a_hook_that_cancels_its_own_task_is_logged_and_its_worker_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    app = Service("shop", concurrency=1)
    ran: list[int] = []

    @app.terminator("take", Number)
    async def take(number: Number, flow: Flow) -> None:
        flow.after_commit(cancels_itself)
        flow.after_commit(ran.append, number.n)

    async def work(t: Stages) -> None:
        await t.send(take, Number(1))
        await t.send(take, Number(2))
        await t.wait_until_ended()
        assert ran == [1, 2]

    run(app, work)
    assert len([each for each in caplog.records if "after_commit" in each.getMessage()]) == 2


def test_a_handler_of_consume_that_cancels_its_own_task_leaves_its_worker_where_it_is() -> None:
    """The message is redelivered without an attempt, as docs/client.md says of a cancellation."""
    attempts: list[int] = []
    received: list[bytes] = []

    async def handle(message: truenext.Message, session: truenext.Session) -> None:
        if message.body == b"first" and len(attempts) < 3:
            attempts.append(message.attempts)
            await cancels_itself()
        received.append(message.body)

    async def main() -> None:
        async with local_broker() as broker, truenext.connect(broker.url) as connection:
            for body in (b"first", b"second"):
                await connection.send("/queue/q", body)
            consuming = asyncio.create_task(connection.consume("/queue/q", handle))
            async with asyncio.timeout(30):
                while len(received) < 2:
                    await asyncio.sleep(0.001)
            consuming.cancel()
            with pytest.raises(asyncio.CancelledError):
                await consuming

    asyncio.run(main())
    assert attempts == [0, 0, 0]
    assert sorted(received) == [b"first", b"second"]


def test_hook_of_a_plain_stage_runs_in_a_thread() -> None:
    app = Service("shop")
    threads: list[str] = []

    @app.terminator("take", Number)
    def take(number: Number, flow: Flow) -> None:
        flow.after_commit(lambda: threads.append(threading.current_thread().name))

    async def work(t: Stages) -> None:
        await t.send(take, Number(1))
        await t.wait_until_ended()
        assert threads and all(each.startswith("truenext stage") for each in threads)

    run(app, work)


def test_a_stop_during_a_hook_tells_one_ending() -> None:
    outcomes: list[str] = []
    is_started = asyncio.Event()

    class Ended(Interceptor):
        def ended(self, execution: Execution, ending: ExecutionResult) -> None:
            outcomes.append(ending.outcome)

    app = Service("shop", interceptors=[Ended()])

    async def hangs() -> None:
        is_started.set()
        await asyncio.sleep(3600)

    @app.terminator("take", Number)
    async def take(number: Number, flow: Flow) -> None:
        flow.after_commit(hangs)

    async def main() -> None:
        async with stages(app) as t:
            await t.send(take, Number(1))
            await is_started.wait()
            await t._service_run.stop(0.0)

    asyncio.run(main())
    assert outcomes == ["completed"]


def test_a_stage_that_cancels_itself_when_it_runs_again_in_place_has_failed() -> None:
    """Fixed: the error of the first run was taken for that of the second, five times, so that no attempt was
    counted."""
    app = Service("shop", database="sqlite://")
    ran: list[int] = []

    @app.terminator("take", Number, attempts=2)
    async def take(number: Number, flow: Flow, sql: AsyncSession) -> None:
        ran.append(flow.attempt)
        await sql.execute(text("SELECT 1"))
        if ran.count(flow.attempt) == 1:
            busy = sqlite3.OperationalError("database is locked")
            busy.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise OperationalError("SELECT 1", None, busy)
        await cancels_itself()

    async def work(t: Stages) -> None:
        await t.send(take, Number(1))
        await t.wait_until_ended(dead_letters=1)
        assert ran == [1, 1, 2, 2]

    run(app, work, database="sqlite://")


def test_consume_continues_though_its_caller_swallowed_an_earlier_cancellation() -> None:
    received: list[bytes] = []

    async def handle(message: truenext.Message, session: truenext.Session) -> None:
        if message.body == b"first" and not received:
            received.append(b"cancelled")
            await cancels_itself()
        received.append(message.body)

    async def main() -> None:
        async with local_broker() as broker, truenext.connect(broker.url) as connection:
            await connection.send("/queue/q", b"first")

            async def restarts() -> None:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(3600)
                await connection.consume("/queue/q", handle)

            consuming = asyncio.create_task(restarts())
            await asyncio.sleep(0)
            consuming.cancel()
            async with asyncio.timeout(30):
                while len(received) < 2 and not consuming.done():
                    await asyncio.sleep(0.001)
            assert not consuming.done()
            consuming.cancel()
            await asyncio.wait({consuming})

    asyncio.run(main())
    assert received == [b"cancelled", b"first"]


def test_a_stage_that_is_cancelled_before_it_began_is_not_said_to_be_never_awaited() -> None:
    """Fixed: a process that ended at that moment printed a RuntimeWarning."""

    async def stage() -> None:
        raise AssertionError("it has not begun")

    async def main() -> None:
        task = asyncio.ensure_future(run_user_coroutine(stage()))
        # Until it has made its own task, which has not begun then.
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert not warned
