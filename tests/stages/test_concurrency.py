"""Tests of the number of messages that a stage handles concurrently. Source: docs/stages.md

They do not measure time: functions that wait for one another must run concurrently.
"""

import asyncio
import threading

import pytest

from tests.stages.flows import Number, run, until
from truenext.stage import DefinitionError, Flow, Service
from truenext.testing.stages import Stages

PATIENCE_S = 60.0


class Crowd:
    """Counter of the functions inside, which lets them leave only when `size` are inside."""

    def __init__(self, size: int) -> None:
        self._lock = threading.Lock()
        self._all_there = threading.Event()
        self._size = size
        self._inside = 0
        self.most = 0

    def enter(self) -> None:
        with self._lock:
            self._inside += 1
            self.most = max(self.most, self._inside)
            if self._inside >= self._size:
                self._all_there.set()

    def exit(self) -> None:
        with self._lock:
            self._inside -= 1

    def wait_in_thread(self) -> None:
        self.enter()
        assert self._all_there.wait(PATIENCE_S)
        self.exit()

    async def wait_in_task(self) -> None:
        self.enter()
        await until(self._all_there.is_set)
        # Whoever else could come in now would.
        await asyncio.sleep(0.01)
        self.exit()


@pytest.mark.parametrize("is_async", [True, False])
def test_8_messages_of_a_stage_are_handled_at_once_unless_told(is_async: bool) -> None:
    crowd = Crowd(8)
    app = Service("shop")
    take = app.endpoint("take", Number)

    async def asynchronous(number: Number) -> None:
        await crowd.wait_in_task()

    def plain(number: Number) -> None:
        crowd.wait_in_thread()

    take.stage(asynchronous if is_async else plain)

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            for n in range(24):
                initiation.send(take, Number(n), trace=f"{n}")
        await t.wait_until_ended()
        assert crowd.most == 8

    run(app, work)


def test_concurrency_is_that_of_the_stage_its_endpoint_or_its_service() -> None:
    """All functions run concurrently: they wait for one another."""
    counts = {"service": 3, "endpoint": 2, "stage": 4}
    crowd = Crowd(sum(counts.values()))
    crowds = {name: Crowd(count) for name, count in counts.items()}
    app = Service("shop", concurrency=3)
    of_service = app.endpoint("service", Number)
    of_endpoint = app.endpoint("endpoint", Number, concurrency=2)
    of_stage = app.endpoint("staged", Number, concurrency=1)

    async def wait_in(name: str) -> None:
        crowd.enter()
        await crowds[name].wait_in_task()
        await until(lambda: crowd.most >= sum(counts.values()))

    @of_service.stage
    async def service(number: Number) -> None:
        await wait_in("service")

    @of_endpoint.stage
    async def endpoint(number: Number) -> None:
        await wait_in("endpoint")

    @of_stage.stage(concurrency=4)
    async def stage(number: Number) -> None:
        await wait_in("stage")

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            for to in (of_service, of_endpoint, of_stage):
                for n in range(6):
                    initiation.send(to, Number(n), trace=f"{n}")
        await until(lambda: crowd.most >= sum(counts.values()))
        await t.wait_until_ended()
        assert {name: crowd.most for name, crowd in crowds.items()} == counts

    run(app, work)


def test_stages_of_one_endpoint_work_at_the_same_time() -> None:
    """8 functions of the first stage and 4 of the second run concurrently."""
    app = Service("shop")
    crowd = Crowd(12)
    chain = app.endpoint("chain", Number)

    @chain.stage(concurrency=8)
    async def first(number: Number, flow: Flow) -> None:
        if number.n < 8:
            await crowd.wait_in_task()
        flow.next(number)

    @chain.stage(concurrency=4)
    async def second(number: Number) -> None:
        if number.n >= 8:
            await crowd.wait_in_task()

    async def work(t: Stages) -> None:
        for n in (8, 9, 10, 11, *range(8)):
            await t.send(chain, Number(n))
        await t.wait_until_ended()
        assert crowd.most == 12

    run(app, work)


def test_a_stage_that_holds_all_its_workers_holds_up_no_other_stage() -> None:
    app = Service("shop", concurrency=2)
    may_continue = asyncio.Event()
    received: list[int] = []

    @app.terminator("slow", Number)
    async def slow(number: Number) -> None:
        await may_continue.wait()

    @app.terminator("quick", Number)
    def quick(number: Number) -> None:
        received.append(number.n)

    async def work(t: Stages) -> None:
        for n in range(5):
            await t.send(slow, Number(n))
        await t.send(quick, Number(7))
        await until(lambda: received == [7])
        may_continue.set()
        await t.wait_until_ended()

    run(app, work)


def test_plain_stages_that_hold_all_their_threads_hold_up_no_other_plain_stage() -> None:
    app = Service("shop", concurrency=2)
    may_continue = threading.Event()
    received: list[int] = []

    @app.terminator("slow", Number)
    def slow(number: Number) -> None:
        assert may_continue.wait(PATIENCE_S)

    @app.terminator("quick", Number)
    def quick(number: Number) -> None:
        received.append(number.n)

    async def work(t: Stages) -> None:
        for n in range(5):
            await t.send(slow, Number(n))
        await t.send(quick, Number(7))
        await until(lambda: received == [7])
        may_continue.set()
        await t.wait_until_ended()

    run(app, work)


@pytest.mark.parametrize("count", [0, -1, 1001])
def test_a_concurrency_that_is_none_is_refused_by_name(count: int) -> None:
    with pytest.raises(DefinitionError, match=r"concurrency of service shop must be 1 to 1000"):
        Service("shop", concurrency=count)
    app = Service("shop")
    with pytest.raises(DefinitionError, match=r"concurrency of take must be 1 to 1000"):
        app.endpoint("take", Number, concurrency=count)
    with pytest.raises(DefinitionError, match=r"concurrency of a stage of other must be 1 to 1000"):
        app.endpoint("other", Number).stage(concurrency=count)


# ---- What comes after the loss of a process ----


def test_message_whose_last_attempt_was_lost_runs_alone_in_its_process() -> None:
    app = Service("shop", concurrency=4)
    nobody = app.remote("nobody", Number)
    lost, hold, end = asyncio.Event(), asyncio.Event(), asyncio.Event()
    started: list[int] = []
    inside: list[int] = []
    concurrent: list[tuple[int, int, int]] = []

    @app.terminator("take", Number)
    async def take(number: Number, flow: Flow) -> None:
        if flow.attempt == 1:
            # By the same connection: the broker knows that it has begun.
            await app.send(nobody, number, trace="t")
            lost.set()
            await end.wait()
            return
        before = len(started)
        await asyncio.sleep(0.05)
        concurrent.append((flow.attempt, len(inside), len(started) - before))

    @app.terminator("other", Number)
    async def other(number: Number) -> None:
        started.append(number.n)
        inside.append(number.n)
        await hold.wait()
        inside.remove(number.n)

    async def work(t: Stages) -> None:
        for n in range(10):
            await t.send(other, Number(n))
        await t.send(take, Number(), interactive=True)
        await lost.wait()
        await until(lambda: len(inside) == 4)
        (lane,) = [each for each in t._service_run._pools if each.is_interactive]
        t.broker.freeze(lane.connection)
        # The broker gives it up, and with it an attempt of its message.
        await t.advance(seconds=60)
        t.broker.thaw()
        end.set()
        await asyncio.sleep(0.05)
        assert concurrent == []
        hold.set()
        await until(lambda: bool(concurrent) and len(started) == 10)
        assert concurrent == [(2, 0, 0)]

    run(app, work)
