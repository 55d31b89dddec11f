"""Tests of `ask`: a program waits for the reply of a flow. Source: docs/stages.md, "Start a flow" """

import asyncio
import contextlib
import logging
from typing import Any

import msgspec
import pytest

import truenext
from tests.stages.flows import Number, Text, disconnected, run, until
from truenext.errors import ClosedError, InDoubt, Refused, RolledBack
from truenext.stage import Flow, FlowError, NotDecoded, Service
from truenext.testing.stages import Stages


def test_an_ask_that_gives_up_says_so_and_its_flow_goes_on_and_its_reply_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "truenext.stage")
    app = Service("shop")
    may_continue = asyncio.Event()
    ended: list[int] = []

    @app.single("slow", Number, Number)
    async def slow(number: Number) -> Number:
        await may_continue.wait()
        ended.append(number.n)
        return number

    async def work(t: Stages) -> None:
        # On a busy machine it takes a while until it is asked at all.
        text = "slow has not replied within 1.5 s; the reply may still come. If it does not, look for the request"
        with pytest.raises(TimeoutError, match=text):
            await t.ask(slow, Number(1), timeout=1.5)
        may_continue.set()
        await t.wait_until_ended()
        assert ended == [1]
        await until(
            lambda: any("a reply came after its request had ended" in each.getMessage() for each in caplog.records)
        )
        assert await t.ask(slow, Number(2)) == Number(2)

    run(app, work)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True, "5", None])
def test_a_timeout_in_which_nothing_can_happen_is_refused_and_nothing_begins(timeout: Any) -> None:
    app = Service("shop")

    @app.single("answer", Number, Number)
    async def answer(number: Number) -> Number:
        raise AssertionError("nothing began")

    async def work(t: Stages) -> None:
        pattern = r"timeout must be a number of seconds above 0, not "
        with pytest.raises(ValueError, match=pattern):
            await app.ask(answer, Number(), trace="t", timeout=timeout)
        with pytest.raises(ValueError, match=pattern):
            await app.send(answer, Number(), trace="t", timeout=timeout)
        with pytest.raises(ValueError, match=pattern):
            app.initiate(timeout=timeout)
        await t.wait_until_ended()

    run(app, work)


def test_a_reply_that_is_not_what_was_expected_ends_the_ask_with_an_error() -> None:
    class Wrong(msgspec.Struct):
        n: str

    app = Service("shop")
    remote_endpoint = app.remote("answer", Number, Number)
    other = Service("other")

    @other.single("answer", Number, Wrong)
    async def answer(number: Number) -> Wrong:
        return Wrong("x")

    async def work(t: Stages) -> None:
        other.broker = (t.broker.url,)
        async with other.running():
            with pytest.raises(NotDecoded, match="Number"):
                await t.ask(remote_endpoint, Number())

    run(app, work)


def test_a_hundred_asks_at_once_get_each_its_own_reply() -> None:
    app = Service("shop")

    @app.single("double", Number, Number)
    async def double(number: Number) -> Number:
        return Number(2 * number.n)

    @app.single("text", Number, Text)
    def text(number: Number) -> Text:
        return Text(f"{number.n}")

    async def work(t: Stages) -> None:
        doubles = asyncio.gather(*(t.ask(double, Number(n)) for n in range(50)))
        texts = asyncio.gather(*(t.ask(text, Number(n)) for n in range(50)))
        assert await doubles == [Number(2 * n) for n in range(50)]
        assert await texts == [Text(f"{n}") for n in range(50)]

    run(app, work)


def test_an_ask_that_is_cancelled_leaves_nothing_behind_and_its_flow_goes_on() -> None:
    app = Service("shop")
    may_continue = asyncio.Event()
    ended: list[int] = []

    @app.single("slow", Number, Number)
    async def slow(number: Number) -> Number:
        await may_continue.wait()
        ended.append(number.n)
        return number

    async def work(t: Stages) -> None:
        reply = asyncio.create_task(t.ask(slow, Number(1)))
        await until(lambda: bool(t._service_run.active_stages))
        reply.cancel()
        await asyncio.wait([reply])
        assert reply.cancelled()
        may_continue.set()
        await t.wait_until_ended()
        assert ended == [1]

    run(app, work)


def test_an_ask_without_a_broker_says_that_nothing_was_sent() -> None:
    app = Service("shop")

    @app.single("double", Number, Number)
    async def double(number: Number) -> Number:
        return Number(2 * number.n)

    async def work(t: Stages) -> None:
        assert await t.ask(double, Number(1)) == Number(2)
        async with disconnected(t.broker):
            with pytest.raises((RolledBack, InDoubt, TimeoutError)):
                await t.ask(double, Number(2), timeout=0.2)
        assert await t.ask(double, Number(3)) == Number(6)

    run(app, work)


def test_an_ask_outlives_a_crash_of_the_broker() -> None:
    app = Service("shop")
    there = asyncio.Event()
    may_continue = asyncio.Event()

    @app.single("slow", Number, Number)
    async def slow(number: Number) -> Number:
        there.set()
        await may_continue.wait()
        return number

    async def work(t: Stages) -> None:
        reply = asyncio.create_task(t.ask(slow, Number(1)))
        await there.wait()
        await t.broker.crash()
        # Nothing waits in a topic: a reply that comes before this process has subscribed anew is lost.
        await until(lambda: t._service_run.connection.health().reconnects == 1)
        await until(lambda: {each.state for each in t._service_run.connection.health().consumers} == {"open"})
        may_continue.set()
        assert await reply == Number(1)

    run(app, work)


def test_a_stage_may_ask_and_wait_though_it_holds_its_worker() -> None:
    app = Service("shop", concurrency=1)

    @app.single("double", Number, Number)
    async def double(number: Number) -> Number:
        return Number(2 * number.n)

    @app.single("asks", Number, Number)
    async def asks(number: Number, flow: Flow) -> Number:
        return await app.ask(double, number, trace=flow.trace, timeout=10)

    async def work(t: Stages) -> None:
        assert await t.ask(asks, Number(4)) == Number(8)

    run(app, work)


def test_a_program_that_asks_without_stages_gets_its_reply() -> None:
    app = Service("shop")

    @app.single("double", Number, Number)
    async def double(number: Number) -> Number:
        return Number(2 * number.n)

    web = Service("web")
    remote_endpoint = web.remote("double", Number, Number)

    async def work(t: Stages) -> None:
        web.broker = (t.broker.url,)
        async with web.connected():
            replies = await asyncio.gather(
                *(web.ask(remote_endpoint, Number(n), trace="t", timeout=10) for n in range(5))
            )
        assert replies == [Number(2 * n) for n in range(5)]

    run(app, work)


class Choosy(msgspec.Struct):
    """A type that validates itself, and raises an error that is no ValueError."""

    n: int = 0

    def __post_init__(self) -> None:
        if self.n < 0:
            raise KeyError("n")


def test_a_reply_whose_type_raises_ends_its_ask_and_no_other() -> None:
    app = Service("shop")

    @app.single("answer", Number, Number)
    async def answer(number: Number) -> Number:
        return number

    # As another service would have it.
    other = Service("other").remote("answer", Number, Choosy)

    async def work(t: Stages) -> None:
        with pytest.raises(NotDecoded, match="the JSON is not of type Choosy: 'n'"):
            await app.ask(other, Number(-1), trace="t")
        assert await app.ask(other, Number(1), trace="t") == Choosy(1)

    run(app, work)


def test_a_message_whose_type_raises_is_a_dead_letter_at_once() -> None:
    app = Service("shop")
    remote = Service("other").remote("take", Number)

    @app.terminator("take", Choosy)
    async def take(choosy: Choosy) -> None:
        raise AssertionError("it was not decoded")

    async def work(t: Stages) -> None:
        await app.send(remote, Number(-1), trace="t")
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.attempts == 1

    run(app, work)


def test_an_ask_goes_on_when_the_subscription_for_replies_was_refused_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truenext.stage.pending_replies.PAUSE_S", 0.01)
    app = Service("shop")
    received_request, may_end = asyncio.Event(), asyncio.Event()

    @app.single("answer", Number, Number)
    async def answer(number: Number) -> Number:
        if number.n == 2:
            received_request.set()
            await may_end.wait()
        return number

    async def work(t: Stages) -> None:
        reply = t._service_run.initiator._pending_replies
        refusals = 0

        class Refusing:
            """A consumer whose subscription the broker refuses once after a reconnection."""

            def __init__(self, consumer: truenext.Consumer) -> None:
                self._consumer = consumer

            def __aiter__(self) -> "Refusing":
                return self

            async def __anext__(self) -> truenext.Message:
                nonlocal refusals
                if received_request.is_set() and not refusals:
                    refusals += 1
                    await self._consumer.close()
                    raise Refused("no room for one more")
                return await anext(self._consumer)

        class Refuser:
            async def consumer(self, destination: str) -> Refusing:
                return Refusing(await t._service_run.connection.consumer(destination))

        reply._connection = Refuser()  # type: ignore[assignment]
        assert await t.ask(answer, Number(1)) == Number(1)
        waiting = asyncio.create_task(t.ask(answer, Number(2), timeout=30))
        await received_request.wait()
        # A reply in which the refusal shows; it is lost with the subscription, perhaps.
        with contextlib.suppress(TimeoutError):
            await t.ask(answer, Number(3), timeout=1)
        assert await t.ask(answer, Number(4)) == Number(4)
        assert refusals == 1
        may_end.set()
        assert await waiting == Number(2)

    run(app, work)


def test_an_ask_keeps_its_time_though_the_broker_says_nothing() -> None:
    app = Service("shop")

    @app.single("answer", Number, Number)
    async def answer(number: Number) -> Number:
        return number

    async def work(t: Stages) -> None:
        async with disconnected(t.broker):
            started = asyncio.get_running_loop().time()
            with pytest.raises((TimeoutError, RolledBack)):
                await t.ask(answer, Number(1), timeout=0.1)
            # Amply: it was a minute.
            assert asyncio.get_running_loop().time() - started < 20
        assert await t.ask(answer, Number(2)) == Number(2)

    run(app, work)


# ---- Asks that could never be answered ----


def test_an_ask_of_its_own_endpoint_is_refused_in_each_stage_of_it() -> None:
    app = Service("shop", concurrency=1)
    chain = app.endpoint("chain", Number, Number)
    heard: list[str] = []

    async def ask_itself() -> None:
        with pytest.raises(FlowError) as caught:
            await app.ask(chain, Number(), trace="t", timeout=0.2)
        heard.append(str(caught.value))

    @chain.stage
    async def first(number: Number, flow: Flow) -> None:
        await ask_itself()
        flow.next(number)

    @chain.stage
    async def last(number: Number) -> Number:
        # A task that it waits for waits as well.
        await asyncio.create_task(ask_itself())
        return number

    async def work(t: Stages) -> None:
        assert await t.ask(chain, Number(3)) == Number(3)
        assert [each.partition(":")[0] for each in heard] == [
            "stage first of chain asks chain itself",
            "stage last of chain asks chain itself",
        ]

    run(app, work)


def test_an_ask_of_an_endpoint_of_the_same_name_by_another_service_is_not_refused() -> None:
    app, bridge = Service("shop"), Service("bridge")

    @app.single("double", Number, Number)
    async def double(number: Number) -> Number:
        if number.n > 3:
            return Number(2 * number.n)
        # Perhaps at another broker.
        return await bridge.ask(remote_endpoint, Number(number.n + 1), trace="t", timeout=10)

    remote_endpoint = bridge.remote("double", Number, Number)

    async def work(t: Stages) -> None:
        bridge.broker = (t.broker.url,)
        async with bridge.connected():
            assert await t.ask(double, Number(1)) == Number(8)

    run(app, work)


def test_async_methods_that_a_plain_stage_calls_are_refused_at_the_call() -> None:
    app = Service("shop", attempts=1)
    other = app.remote("other", Number, Number)
    news = app.topic("news", Number)
    heard: list[str] = []

    @app.single("plain", Number, Number)
    def plain(number: Number) -> Number:
        calls: list[Any] = [
            lambda: app.ask(other, number, trace="t"),
            lambda: app.send(other, number, trace="t"),
            lambda: app.publish(news, number, trace="t"),
            lambda: app.outcome("token"),
        ]
        for call in calls:
            with pytest.raises(FlowError, match="stage plain of plain is a plain function") as caught:
                call()
            heard.append(str(caught.value).partition(" must be awaited")[0])
        return number

    async def work(t: Stages) -> None:
        assert await t.ask(plain, Number(1)) == Number(1)
        assert heard == ["shop.ask", "shop.send", "shop.publish", "shop.outcome"]

    run(app, work)


def test_an_async_method_is_a_hook_of_a_plain_stage_and_is_awaited() -> None:
    app = Service("shop")
    received: list[int] = []

    @app.terminator("take", Number)
    async def take(number: Number) -> None:
        received.append(number.n)

    @app.terminator("plain", Number)
    def plain(number: Number, flow: Flow) -> None:
        flow.after_commit(app.send, take, number, trace="t")

    async def work(t: Stages) -> None:
        await t.send(plain, Number(7))
        await until(lambda: received == [7])
        await t.wait_until_ended()

    run(app, work)


def test_a_service_used_in_another_event_loop_says_so() -> None:
    app = Service("shop")

    @app.single("double", Number, Number)
    async def double(number: Number) -> Number:
        return Number(2 * number.n)

    async def initiates() -> None:
        async with app.initiate() as initiation:
            initiation.send(double, Number(), trace="t")

    async def outside(call: Any) -> None:
        with pytest.raises(ClosedError, match="shop belongs to the event loop in which it was connected"):
            await call()

    async def work(t: Stages) -> None:
        for call in (
            lambda: app.ask(double, Number(), trace="t"),
            lambda: app.send(double, Number(), trace="t"),
            lambda: app.outcome("token"),
            initiates,
        ):
            await asyncio.to_thread(asyncio.run, outside(call))
        assert await t.ask(double, Number(4)) == Number(8)

    run(app, work)
