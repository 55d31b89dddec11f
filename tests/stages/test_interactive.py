"""Tests of interactive flows, which overtake other flows. Source: docs/stages.md, "Start a flow" """

import asyncio
import threading

import pytest

from tests.stages.flows import Number, run, until
from truenext.stage import Flow, Service
from truenext.testing.stages import Stages


def test_interactive_flows_that_begin_later_end_before_400_others() -> None:
    app = Service("shop", concurrency=1)
    order: list[bool] = []
    go_on = asyncio.Event()
    chain = app.endpoint("chain", Number)

    @chain.stage
    async def first(number: Number, flow: Flow) -> None:
        if number.n < 0:
            await go_on.wait()
        flow.next(number)

    @chain.stage
    async def second(number: Number, flow: Flow) -> None:
        order.append(flow.interactive)

    async def work(t: Stages) -> None:
        # The ordinary worker of the first stage is busy while the others come.
        await t.send(chain, Number(-1))
        async with app.initiate() as initiation:
            for n in range(400):
                initiation.send(chain, Number(n), trace=f"{n}")
        async with app.initiate() as initiation:
            for n in range(40):
                initiation.send(chain, Number(n), trace=f"i{n}", interactive=True)
        await until(lambda: len(order) == 40)
        go_on.set()
        await t.wait_until_ended()
        assert all(order[:40]) and len(order) == 441

    run(app, work)


@pytest.mark.parametrize("is_async", [True, False])
def test_interactive_messages_have_workers_of_their_own_as_many_as_the_others(is_async: bool) -> None:
    app = Service("shop", concurrency=2)
    four = threading.Barrier(4)
    four_tasks = asyncio.Barrier(4)
    seen: list[bool] = []
    take = app.endpoint("take", Number)

    async def asynchronous(number: Number, flow: Flow) -> None:
        await four_tasks.wait()
        seen.append(flow.interactive)

    def plain(number: Number, flow: Flow) -> None:
        four.wait(20)
        seen.append(flow.interactive)

    take.stage(asynchronous if is_async else plain)

    async def work(t: Stages) -> None:
        for n in range(2):
            await t.send(take, Number(n))
            await t.send(take, Number(n), interactive=True)
        await t.wait_until_ended()
        assert sorted(seen) == [False, False, True, True]

    run(app, work)


def test_messages_of_an_interactive_flow_have_priority_9_and_of_others_4() -> None:
    app = Service("shop")
    there = app.remote("there", Number, Number)
    chain = app.endpoint("chain", Number, Number)
    beside = app.remote("beside", Number)

    @chain.stage
    async def first(number: Number, flow: Flow) -> None:
        flow.next(number)

    @chain.stage
    async def second(number: Number, flow: Flow) -> None:
        flow.send(beside, number)
        flow.request(there, number)

    @chain.stage
    async def third(number: Number) -> Number:
        return number

    async def work(t: Stages) -> None:
        for interactive in (False, True):
            await t.send(chain, Number(), interactive=interactive)
        await until(lambda: not t._service_run.active_stages)
        for _ in range(100):
            waiting = [*(await t.broker.queue("there")).messages, *(await t.broker.queue("beside")).messages]
            if len(waiting) == 4:
                break
            await asyncio.sleep(0.01)
        assert sorted(each.headers["priority"] for each in waiting) == ["4", "4", "9", "9"]

    run(app, work)


def test_a_reply_that_is_asked_for_interactively_passes_those_that_are_not() -> None:
    """The stage blocks the other flows; the interactive one passes through request and reply."""
    app = Service("shop", concurrency=1)
    held = asyncio.Event()
    outer = app.endpoint("outer", Number, Number)

    @app.single("leaf", Number, Number)
    async def leaf(number: Number, flow: Flow) -> Number:
        if not flow.interactive:
            await held.wait()
        return number

    @outer.stage
    async def ask(number: Number, flow: Flow) -> None:
        flow.request(leaf, number)

    @outer.stage
    async def answer(number: Number) -> Number:
        return number

    async def work(t: Stages) -> None:
        for n in range(10):
            await t.send(outer, Number(n))
        assert await t.ask(outer, Number(7), interactive=True) == Number(7)
        held.set()
        await t.wait_until_ended()

    run(app, work)


# ---- Persistent or not ----


def test_a_persistent_flow_survives_a_crash_of_the_broker_at_each_stage_and_another_may_be_lost() -> None:
    app = Service("shop")
    ended: list[tuple[int, bool]] = []
    is_held = True
    chain = app.endpoint("chain", Number)
    later = app.remote("later", Number, Number)

    @chain.stage
    async def first(number: Number, flow: Flow) -> None:
        flow.request(later, number)

    @chain.stage
    async def last(number: Number, flow: Flow) -> None:
        ended.append((number.n, flow.persistent))

    async def work(t: Stages) -> None:
        for n in range(3):
            await t.send(chain, Number(n))
            await t.send(chain, Number(n), persistent=False)
        for _ in range(500):
            if (await t.broker.queue("later")).waiting == 6:
                break
            await asyncio.sleep(0.01)
        assert is_held
        await t.broker.crash()
        assert (await t.broker.queue("later")).waiting == 3
        t.mock(later, lambda number: number)
        await t.wait_until_ended()
        assert sorted(ended) == [(0, True), (1, True), (2, True)]

    run(app, work)


def test_messages_of_a_persistent_flow_are_persistent_and_of_others_transient() -> None:
    app = Service("shop")
    there = app.remote("there", Number)
    chain = app.endpoint("chain", Number)

    @chain.stage
    async def first(number: Number, flow: Flow) -> None:
        flow.send(there, number)
        flow.goto(there, number)

    async def work(t: Stages) -> None:
        await t.send(chain, Number(), persistent=False)
        await t.send(chain, Number())
        for _ in range(500):
            waiting = (await t.broker.queue("there")).messages
            if len(waiting) == 4:
                break
            await asyncio.sleep(0.01)
        assert sorted(each.headers.get("persistent", "false") for each in waiting) == ["false", "false", "true", "true"]

    run(app, work)


# ---- The time of a flow ----


def test_the_time_to_live_is_that_of_the_whole_flow() -> None:
    """Half of the time passes during the first wait, and the rest is too short for the second."""
    app = Service("shop")
    ended: list[int] = []
    later = app.remote("later", Number, Number)
    chain = app.endpoint("chain", Number)

    @chain.stage
    async def first(number: Number, flow: Flow) -> None:
        flow.request(later, number)

    @chain.stage
    async def second(number: Number, flow: Flow) -> None:
        flow.next(number)

    @chain.stage(concurrency=1)
    async def last(number: Number) -> None:
        ended.append(number.n)

    async def waits(t: Stages, count: int) -> None:
        async with asyncio.timeout(20):
            while (await t.broker.queue("later")).waiting != count:
                await asyncio.sleep(0.01)

    async def work(t: Stages) -> None:
        for n, ttl in enumerate((60, 200)):
            await t.send(chain, Number(n), ttl=ttl)
        await t.send(chain, Number(2))
        await waits(t, 3)
        await t.advance(seconds=40)
        await waits(t, 3)
        await t.advance(seconds=40)
        await waits(t, 2)
        t.mock(later, lambda number: number)
        await t.wait_until_ended()
        assert sorted(ended) == [1, 2]

    run(app, work)


def test_a_flow_that_expires_does_so_at_whichever_stage_it_is() -> None:
    app = Service("shop")
    ran: list[str] = []
    later = app.remote("later", Number, Number)
    chain = app.endpoint("chain", Number)

    @chain.stage
    async def first(number: Number, flow: Flow) -> None:
        ran.append("first")
        flow.next(number)

    @chain.stage
    async def second(number: Number, flow: Flow) -> None:
        ran.append("second")
        flow.request(later, number)

    @chain.stage
    async def last(number: Number) -> None:
        ran.append("last")

    async def work(t: Stages) -> None:
        await t.send(chain, Number(), ttl=100)
        async with asyncio.timeout(20):
            while (await t.broker.queue("later")).waiting != 1:
                await asyncio.sleep(0.01)
        (message,) = (await t.broker.queue("later")).messages
        assert int(message.headers["expires"]) > 0
        await t.advance(seconds=102)
        # An expired message is no dead letter unless the policy of its queue says so.
        await t.wait_until_ended()
        assert ran == ["first", "second"]

    run(app, work)


def test_a_flow_that_a_stage_begins_has_a_time_of_its_own() -> None:
    app = Service("shop")
    there = app.remote("there", Number)

    @app.terminator("begins", Number)
    async def begins(number: Number, flow: Flow) -> None:
        flow.send(there, Number(1))
        flow.send(there, Number(2), ttl=1000)

    async def work(t: Stages) -> None:
        await t.send(begins, Number(), ttl=10)
        async with asyncio.timeout(20):
            while (await t.broker.queue("there")).waiting != 2:
                await asyncio.sleep(0.01)
        first, second = (await t.broker.queue("there")).messages
        assert "expires" not in first.headers
        assert "expires" in second.headers
        await t.advance(seconds=20)
        assert (await t.broker.queue("there")).waiting == 2

    run(app, work)


def test_expired_message_is_skipped() -> None:
    app = Service("shop", concurrency=1)
    received: list[int] = []
    go_on = asyncio.Event()

    @app.terminator("take", Number)
    async def take(number: Number) -> None:
        received.append(number.n)
        await go_on.wait()

    async def work(t: Stages) -> None:
        await t.send(take, Number(0))
        await until(lambda: received == [0])
        await t.send(take, Number(1), ttl=5)
        await t.send(take, Number(2))
        await t.advance(seconds=10)
        go_on.set()
        await t.wait_until_ended()
        assert received == [0, 2]

    run(app, work)


def test_the_time_of_a_flow_begins_when_the_broker_has_its_first_message() -> None:
    """A delay of the network before that does not count, although that may look like an error."""
    app = Service("shop")
    received: list[int] = []

    @app.terminator("take", Number)
    async def take(number: Number) -> None:
        received.append(number.n)

    async def work(t: Stages) -> None:
        t.broker.freeze()
        sending = asyncio.create_task(t.send(take, Number(1), ttl=2))
        # It is in the socket by then.
        await asyncio.sleep(0.05)
        await t.advance(seconds=4)
        t.broker.thaw()
        await sending
        await t.wait_until_ended()
        assert received == [1]

    run(app, work)
