"""Tests of requests and replies over any number of endpoints and stages. Source: docs/stages.md"""

import asyncio
from typing import Any

import pytest

from tests.stages.flows import Memo, Number, Text, run
from truenext.stage import Endpoint, Flow, Service
from truenext.testing.stages import Stages


def test_terminator_receives_the_message_as_it_was_sent() -> None:
    app = Service("shop")
    received: list[Text] = []

    @app.terminator("take", Text)
    async def take(text: Text) -> None:
        received.append(text)

    async def work(t: Stages) -> None:
        await t.send(take, Text("tea \N{SNOWMAN}\n\0"))
        await t.wait_until_ended()
        assert received == [Text("tea \N{SNOWMAN}\n\0")]

    run(app, work)


def test_reply_goes_to_reply_to_with_the_reply_state() -> None:
    app = Service("shop")
    received: list[tuple[Number, Memo]] = []

    @app.single("double", Number, Number)
    async def double(request: Number) -> Number:
        return Number(2 * request.n)

    @app.terminator("take", Number, state=Memo)
    async def take(reply: Number, memo: Memo) -> None:
        received.append((reply, memo))

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            initiation.send(double, Number(21), trace="test", reply_to=take, reply_state=Memo(7, "x"))
        await t.wait_until_ended()
        assert received == [(Number(42), Memo(7, "x"))]

    run(app, work)


def three_levels(app: Service, seen: list[str]) -> Endpoint[Number, Number]:
    """Make an endpoint of four stages, which requests one of two stages, which requests one of one stage."""

    @app.single("leaf", Number, Number)
    async def leaf(request: Number) -> Number:
        return Number(request.n * 2)

    middle = app.endpoint("middle", Number, Number, state=Memo)

    @middle.stage
    async def asks_leaf(request: Number, memo: Memo, flow: Flow) -> None:
        assert memo == Memo()
        memo.n, memo.text = request.n, "middle"
        flow.request(leaf, request)

    @middle.stage
    def answers(reply: Number, memo: Memo) -> Number:
        assert memo.text == "middle"
        seen.append(f"middle {memo.n}")
        return Number(reply.n * 3)

    outer = app.endpoint("outer", Number, Number, state=Memo)

    @outer.stage
    def first(request: Number, memo: Memo, flow: Flow) -> None:
        assert memo == Memo()
        memo.n, memo.text = request.n, "1"
        flow.request(middle, request)

    @outer.stage
    async def second(reply: Number, memo: Memo, flow: Flow) -> None:
        assert memo.text == "1"
        memo.text += "2"
        flow.next(Number(reply.n + 1))

    @outer.stage
    async def third(reply: Number, memo: Memo, flow: Flow) -> None:
        assert memo.text == "12"
        memo.text += "3"
        flow.request(leaf, reply)

    @outer.stage
    async def fourth(reply: Number, memo: Memo) -> Number:
        seen.append(f"outer {memo.n} {memo.text}")
        return Number(reply.n + memo.n)

    return outer


@pytest.mark.parametrize("interactive", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_three_levels_of_endpoints_have_states_of_their_own(interactive: bool, persistent: bool) -> None:
    app = Service("shop")
    seen: list[str] = []
    outer = three_levels(app, seen)

    async def work(t: Stages) -> None:
        reply = await t.ask(outer, Number(5), interactive=interactive, persistent=persistent)
        assert reply == Number((5 * 2 * 3 + 1) * 2 + 5)
        assert seen == ["middle 5", "outer 5 123"]
        await t.wait_until_ended()

    run(app, work)


def test_flows_that_go_on_at_the_same_time_keep_apart() -> None:
    app = Service("shop")
    outer = three_levels(app, [])
    replies: dict[int, int] = {}

    @app.terminator("take", Number, state=Memo)
    async def take(reply: Number, memo: Memo) -> None:
        replies[memo.n] = reply.n

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            for n in range(50):
                initiation.send(
                    outer, Number(n), trace=f"{n}", reply_to=take, reply_state=Memo(n=n), interactive=n % 2 == 0
                )
        await t.wait_until_ended()
        assert replies == {n: (n * 6 + 1) * 2 + n for n in range(50)}

    run(app, work)


@pytest.mark.parametrize("is_returned", [False, True])
def test_a_reply_that_is_returned_and_one_that_is_said_are_the_same(is_returned: bool) -> None:
    app = Service("shop")
    double = app.endpoint("double", Number, Number)

    @double.stage
    async def answer(request: Number, flow: Flow) -> Number | None:
        if is_returned:
            return Number(2 * request.n)
        flow.reply(Number(2 * request.n))
        return None

    async def work(t: Stages) -> None:
        assert await t.ask(double, Number(4)) == Number(8)

    run(app, work)


def test_reply_without_reply_to_is_dropped() -> None:
    app = Service("shop")
    ran: list[int] = []

    @app.single("double", Number, Number)
    async def double(request: Number) -> Number:
        ran.append(request.n)
        return Number(2 * request.n)

    async def work(t: Stages) -> None:
        await t.send(double, Number(4))
        assert await t.wait_until_ended() == []
        assert ran == [4]

    run(app, work)


def test_an_endpoint_may_reply_from_an_early_stage_and_then_its_later_ones_do_not_run() -> None:
    app = Service("shop")
    ran: list[str] = []
    double = app.endpoint("double", Number, Number)

    @double.stage
    async def early(request: Number, flow: Flow) -> Number | None:
        if request.n == 0:
            return Number(0)
        flow.next(request)
        return None

    @double.stage
    async def late(request: Number) -> Number:
        ran.append("late")
        return Number(2 * request.n)

    async def work(t: Stages) -> None:
        assert await t.ask(double, Number(0)) == Number(0)
        assert ran == []
        assert await t.ask(double, Number(1)) == Number(2)

    run(app, work)


def test_a_stage_that_says_nothing_ends_its_flow() -> None:
    app = Service("shop")
    ran: list[str] = []
    double = app.endpoint("double", Number, Number)

    @double.stage
    async def silent(request: Number) -> None:
        ran.append("silent")

    @double.stage
    async def late(request: Number) -> Number:
        ran.append("late")
        return request

    async def work(t: Stages) -> None:
        await t.send(double, Number(0))
        assert await t.wait_until_ended() == []
        assert ran == ["silent"]

    run(app, work)


def test_the_id_that_a_sender_is_told_is_that_of_the_flow_and_of_its_first_message() -> None:
    app = Service("shop")
    received: list[tuple[str, str]] = []

    @app.terminator("take", Number)
    async def take(number: Number, flow: Flow) -> None:
        received.append((flow.id, flow.message_id))

    async def work(t: Stages) -> None:
        id = await t.send(take, Number())
        await t.wait_until_ended()
        assert received == [(id, id)]
        assert len(id) == 32

    run(app, work)


def test_stages_of_a_flow_see_one_flow_id_and_different_message_ids() -> None:
    app = Service("shop")
    flows: set[str] = set()
    messages: list[str] = []
    senders: list[str] = []

    def note(flow: Flow) -> None:
        flows.add(flow.id)
        messages.append(flow.message_id)
        senders.append(flow.sender)

    @app.single("leaf", Number, Number)
    async def leaf(request: Number, flow: Flow) -> Number:
        note(flow)
        return request

    outer = app.endpoint("outer", Number, Number)

    @outer.stage
    async def ask(request: Number, flow: Flow) -> None:
        note(flow)
        flow.request(leaf, request)

    @outer.stage
    async def answer(reply: Number, flow: Flow) -> Number:
        note(flow)
        return reply

    async def work(t: Stages) -> None:
        id = await t.send(outer, Number())
        await t.wait_until_ended()
        assert flows == {id}
        assert messages[0] == id and len(set(messages)) == 3
        assert senders == ["shop", "shop outer", "shop leaf"]

    run(app, work)


def test_plain_functions_and_async_ones_may_follow_one_another() -> None:
    app = Service("shop")
    chain = app.endpoint("chain", Number, Number)

    @chain.stage
    def one(request: Number, flow: Flow) -> None:
        flow.next(Number(request.n + 1))

    @chain.stage
    async def two(request: Number, flow: Flow) -> None:
        flow.next(Number(request.n + 1))

    @chain.stage
    def three(request: Number) -> Number:
        return Number(request.n + 1)

    async def work(t: Stages) -> None:
        assert await t.ask(chain, Number(0)) == Number(3)

    run(app, work)


def test_an_endpoint_of_another_service_is_asked_as_one_of_ones_own() -> None:
    app = Service("shop")
    stock = app.remote("stock.reserve", Number, Text)
    place = app.endpoint("place", Number, Text, state=Memo)

    @place.stage
    async def ask(request: Number, memo: Memo, flow: Flow) -> None:
        memo.n = request.n
        flow.request(stock, Number(request.n + 1))

    @place.stage
    async def answer(reply: Text, memo: Memo) -> Text:
        return Text(f"{memo.n}: {reply.text}")

    async def work(t: Stages) -> None:
        request = t.mock(stock, lambda number: Text(f"{number.n} reserved"))
        assert await t.ask(place, Number(1)) == Text("1: 2 reserved")
        assert request == [Number(2)]

    run(app, work)


def test_two_services_on_one_broker_work_in_one_flow() -> None:
    stock = Service("stock")

    @stock.single(".reserve", Number, Text)
    async def reserve(request: Number, flow: Flow) -> Text:
        return Text(f"{request.n} for {flow.sender}, {flow.trace}")

    shop = Service("shop")
    remote_endpoint = shop.remote("stock.reserve", Number, Text)
    place = shop.endpoint("place", Number, Text)

    @place.stage
    async def ask(request: Number, flow: Flow) -> None:
        flow.request(remote_endpoint, request)

    @place.stage
    async def answer(reply: Text) -> Text:
        return reply

    async def work(t: Stages) -> None:
        stock.broker = (t.broker.url,)
        async with stock.running():
            assert await t.ask(place, Number(3), trace="web o3") == Text("3 for shop place, web o3")

    run(shop, work)


def test_the_stages_of_a_service_are_shared_by_all_processes_that_run_it() -> None:
    """Two runs of the same definitions, as two processes have them, each with one worker."""
    both = asyncio.Barrier(2)
    ran: list[str] = []

    def make(process: str) -> tuple[Service, Endpoint[Number, Number]]:
        app = Service("shop", concurrency=1)
        count = app.endpoint("count", Number, Number, state=Memo)

        @count.stage
        async def one(request: Number, memo: Memo, flow: Flow) -> None:
            memo.n = request.n
            ran.append(f"one {process}")
            await both.wait()
            flow.next(request)

        @count.stage
        async def two(request: Number, memo: Memo) -> Number:
            assert memo.n == request.n
            ran.append(f"two {process}")
            await both.wait()
            return request

        return app, count

    first, count = make("a")
    second, _ = make("b")

    async def work(t: Stages) -> None:
        second.broker = (t.broker.url,)
        async with second.running():
            await t.send(count, Number(1))
            await t.send(count, Number(2))
            await t.wait_until_ended()
        assert sorted(ran) == ["one a", "one b", "two a", "two b"]

    run(first, work)


# ---- None is no reply ----


def none_of(number: Number) -> Any:
    """Return None, like a function that forgets a branch, or whose types are not checked."""
    return None


def test_a_stage_that_must_reply_and_returns_none_is_a_dead_letter_at_once() -> None:
    app = Service("shop")

    @app.single("forgets", Number, Number)
    async def forgets(number: Number) -> Number:
        return none_of(number)  # type: ignore[no-any-return]

    @app.single("plain", Number, Number)
    def plain(number: Number) -> Number:
        return none_of(number)  # type: ignore[no-any-return]

    async def work(t: Stages) -> None:
        await t.send(forgets, Number())
        await t.send(plain, Number())
        letters = await t.wait_until_ended(dead_letters=2)
        for name, letter in zip(("forgets", "plain"), letters, strict=True):
            assert letter.attempts == 1
            assert f"{name} must return Number, but returned None" in letter.last_cause
            assert "annotate `-> Number | None`" in letter.last_cause

    run(app, work)


def test_a_stage_that_returns_none_may_have_replied_or_gone_on_or_may_end_the_flow() -> None:
    app = Service("shop")
    received: list[str] = []
    chain = app.endpoint("chain", Text, Number)

    @chain.stage
    async def first(how: Text, flow: Flow) -> Number:
        match how.text:
            case "reply":
                flow.reply(Number(1))
            case "next":
                flow.next(Number(2))
            case "next_direct":
                flow.next_direct(Number(2))
            case _:
                flow.goto(chain, Text("reply"))
        return none_of(Number())  # type: ignore[no-any-return]

    @chain.stage
    async def may_end(number: Number) -> Number | None:
        return number if number.n else None

    @app.terminator("take", Number, state=Memo)
    async def take(number: Number, memo: Memo) -> None:
        received.append(memo.text)

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            for how in ("reply", "next", "next_direct", "goto"):
                initiation.send(chain, Text(how), trace="t", reply_to=take, reply_state=Memo(0, how))
        await t.wait_until_ended()
        assert sorted(received) == ["goto", "next", "next_direct", "reply"]

    run(app, work)
