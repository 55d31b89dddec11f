"""Tests of messages when their service stops. Source: docs/stages-running.md, "Stop" """

import asyncio
import threading

import pytest

from tests.stages.flows import Number, run, until
from truenext.stage import Flow, Service, context
from truenext.testing.stages import Stages


@pytest.mark.parametrize("is_async", [True, False])
def test_a_service_that_stops_finishes_what_its_stages_have_begun_and_gives_back_the_rest(is_async: bool) -> None:
    app = Service("shop", concurrency=2)
    started: list[int] = []
    ended: list[int] = []
    may_continue, thread_may_continue = asyncio.Event(), threading.Event()
    take = app.endpoint("take", Number)
    done = app.remote("done", Number)

    async def asynchronous(number: Number, flow: Flow) -> None:
        started.append(number.n)
        await may_continue.wait()
        flow.send(done, number)
        ended.append(number.n)

    def plain(number: Number, flow: Flow) -> None:
        started.append(number.n)
        assert thread_may_continue.wait(20)
        flow.send(done, number)
        ended.append(number.n)

    take.stage(asynchronous if is_async else plain)

    async def work(t: Stages) -> None:
        app.broker = (t.broker.url,)

        async def run_until(stop: asyncio.Event) -> None:
            async with app.running():
                async with app.initiate() as initiation:
                    for n in range(5):
                        initiation.send(take, Number(n), trace=f"{n}")
                await stop.wait()

        stop = asyncio.Event()
        running = asyncio.create_task(run_until(stop))
        await until(lambda: len(started) == 2)
        stop.set()
        await asyncio.sleep(0.05)
        assert not running.done()
        may_continue.set()
        thread_may_continue.set()
        await running
        assert sorted(started) == sorted(ended) == [0, 1]
        remaining = await t.broker.queue("take")
        assert (remaining.waiting, remaining.unacknowledged) == (3, 0)
        assert {each.headers["truenext-attempts"] for each in remaining.messages} == {"0"}
        assert (await t.broker.queue("done")).waiting == 2

    run(Service("nobody"), work)


def test_stage_that_outlasts_the_stop_is_released_without_an_attempt() -> None:
    app = Service("shop")
    started: list[int] = []

    @app.terminator("take", Number)
    async def take(number: Number) -> None:
        started.append(number.n)
        await asyncio.Event().wait()

    async def work(t: Stages) -> None:
        app.broker = (t.broker.url,)
        async with app.running():
            await app.send(take, Number(1), trace="t")
            await until(lambda: started == [1])
            running = app._current_run
            assert running is not None
            await running.stop(timeout=0.05)
        remaining = await t.broker.queue("take")
        assert [each.headers["truenext-attempts"] for each in remaining.messages] == ["0"]

    run(Service("nobody"), work)


def test_a_service_can_run_again_after_it_has_stopped() -> None:
    app = Service("shop")
    received: list[int] = []

    @app.terminator("take", Number)
    async def take(number: Number) -> None:
        received.append(number.n)

    async def work(t: Stages) -> None:
        app.broker = (t.broker.url,)
        for n in range(3):
            async with app.running():
                await app.send(take, Number(n), trace=f"{n}")
                await until(lambda: len(received) == n + 1)  # noqa: B023

    run(Service("nobody"), work)


def test_message_waiting_for_an_interactive_one_is_released_at_the_stop_without_an_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(context, "WAIT_MAX_S", 1000.0)
    app = Service("shop")
    started: list[str] = []
    may_continue = asyncio.Event()

    @app.terminator("take", Number)
    async def take(number: Number, flow: Flow) -> None:
        started.append(flow.trace)
        await may_continue.wait()

    async def work(t: Stages) -> None:
        app.broker = (t.broker.url,)
        async with app.running():
            running = app._current_run
            assert running is not None
            await app.send(take, Number(1), trace="first", interactive=True)
            await until(lambda: started == ["first"])
            await app.send(take, Number(2), trace="second")
            await until(lambda: sum(each.worker.active_count for each in running.stage_consumers) == 2)
            await running.stop(timeout=0.05)
        assert started == ["first"]
        remaining = await t.broker.queue("take")
        assert (remaining.waiting, remaining.unacknowledged) == (2, 0)
        assert {each.headers["truenext-attempts"] for each in remaining.messages} == {"0"}

    run(Service("nobody"), work)
