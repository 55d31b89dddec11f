"""Tests of requests, and of state, attachments and properties. Source: docs/stages.md"""

import asyncio
from collections import Counter
from contextlib import suppress

import pytest

from tests.stages.flows import Memo, Number, Text, run
from truenext.stage import Endpoint, Flow, FlowFailed, Service
from truenext.testing.stages import Stages


def test_two_requests_bring_two_replies_each_with_the_state_of_its_request() -> None:
    app = Service("shop")
    seen: Counter[str] = Counter()
    ended: Counter[str] = Counter()

    @app.single("leaf", Number, Number)
    async def leaf(request: Number) -> Number:
        return request

    @app.terminator("end", Number, state=Memo)
    async def end(number: Number, memo: Memo) -> None:
        ended[memo.text] += 1

    # Two in the first stage, then one reply each to the third by three messages: 2 times 3 ends.
    outer = app.endpoint("outer", Number, Number, state=Memo)

    @outer.stage
    async def ask_twice(request: Number, memo: Memo, flow: Flow) -> None:
        memo.text = "a"
        flow.request(leaf, Number(1))
        memo.text = "b"
        flow.request(leaf, Number(2))
        memo.text = "not seen"

    @outer.stage
    async def ask_thrice(reply: Number, memo: Memo, flow: Flow) -> None:
        seen[f"{memo.text}{reply.n}"] += 1
        for n in range(3):
            memo.n = n
            flow.request(leaf, reply)

    @outer.stage
    async def answer(reply: Number, memo: Memo) -> Number:
        seen[f"{memo.text}{reply.n}{memo.n}"] += 1
        return reply

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            initiation.send(outer, Number(), trace="test", reply_to=end, reply_state=Memo(text="mine"))
        await t.wait_until_ended()
        assert seen == Counter(["a1", "b2", "a10", "a11", "a12", "b20", "b21", "b22"])
        assert ended == {"mine": 6}

    run(app, work)


def test_requested_endpoint_does_not_see_the_state_of_the_requester() -> None:
    app = Service("shop")
    seen: list[Memo] = []

    request = app.endpoint("asked", Number, Number, state=Memo)

    @request.stage
    async def answer(number: Number, memo: Memo) -> Number:
        seen.append(Memo(memo.n, memo.text))
        memo.text = "theirs"
        return number

    outer = app.endpoint("outer", Number, Text, state=Memo)

    @outer.stage
    async def ask(number: Number, memo: Memo, flow: Flow) -> None:
        memo.text = "mine"
        flow.request(request, number)

    @outer.stage
    async def end(number: Number, memo: Memo) -> Text:
        return Text(memo.text)

    async def work(t: Stages) -> None:
        assert await t.ask(outer, Number()) == Text("mine")
        assert seen == [Memo()]

    run(app, work)


def test_the_state_of_one_flow_is_not_seen_by_another() -> None:
    """Its state has a list: no default is shared."""
    app = Service("shop")
    seen: list[list[int]] = []
    gather = app.endpoint("gather", Number, state=dict[str, list[int]])

    @gather.stage
    async def one(number: Number, state: dict[str, list[int]], flow: Flow) -> None:
        state.setdefault("numbers", []).append(number.n)
        flow.next(number)

    @gather.stage
    async def two(number: Number, state: dict[str, list[int]]) -> None:
        seen.append(state["numbers"])

    async def work(t: Stages) -> None:
        for n in range(3):
            await t.send(gather, Number(n))
        await t.wait_until_ended()
        assert sorted(seen) == [[0], [1], [2]]

    run(app, work)


def test_an_initial_state_comes_to_the_first_stage_of_what_is_sent_or_asked() -> None:
    app = Service("shop")
    seen: list[Memo] = []
    outer = app.endpoint("outer", Number, Number, state=Memo)

    @outer.stage
    async def one(number: Number, memo: Memo, flow: Flow) -> None:
        seen.append(Memo(memo.n, memo.text))
        flow.next(number)

    @outer.stage
    async def two(number: Number, memo: Memo) -> Number:
        seen.append(memo)
        return number

    @app.terminator("take", Number, state=Memo)
    async def take(number: Number, memo: Memo) -> None:
        seen.append(memo)

    @app.terminator("begin", Number)
    async def begins(number: Number, flow: Flow) -> None:
        flow.send(take, number, state=Memo(3))

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            initiation.send(outer, Number(), trace="t", state=Memo(1), reply_to=take, reply_state=Memo(2))
        await t.send(begins, Number())
        await t.wait_until_ended()
        assert sorted(memo.n for memo in seen) == [1, 1, 2, 3]

    run(app, work)


def test_a_state_that_was_not_given_is_an_empty_one() -> None:
    app = Service("shop")
    seen: list[Memo] = []

    @app.single("leaf", Number, Number)
    async def leaf(request: Number) -> Number:
        return request

    @app.terminator("take", Number, state=Memo)
    async def take(number: Number, memo: Memo) -> None:
        seen.append(memo)

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            initiation.send(take, Number(), trace="t")
            initiation.send(take, Number(), trace="t", state=None)
            initiation.send(leaf, Number(), trace="t", reply_to=take)
            initiation.send(leaf, Number(), trace="t", reply_to=take, reply_state=None)
        await t.wait_until_ended()
        assert seen == [Memo()] * 4

    run(app, work)


def test_attachments_go_with_one_message_and_no_further() -> None:
    app = Service("shop")
    seen: list[tuple[str, dict[str, bytes]]] = []
    every_byte = bytes(range(256))

    @app.single("leaf", Number, Number)
    async def leaf(request: Number, flow: Flow) -> Number | None:
        seen.append(("leaf", dict(flow.attachments)))
        flow.reply(request, attachments={"r": b"reply"})
        return None

    outer = app.endpoint("outer", Number, Number)

    @outer.stage
    async def one(number: Number, flow: Flow) -> None:
        seen.append(("one", dict(flow.attachments)))
        flow.request(leaf, number, attachments={"a": b"asked", "all": every_byte})

    @outer.stage
    async def two(number: Number, flow: Flow) -> None:
        seen.append(("two", dict(flow.attachments)))
        flow.next(number)

    @outer.stage
    async def three(number: Number, flow: Flow) -> Number:
        seen.append(("three", dict(flow.attachments)))
        return number

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            initiation.send(outer, Number(), trace="t", attachments={"first": b"1"})
        await t.wait_until_ended()
        assert seen == [
            ("one", {"first": b"1"}),
            ("leaf", {"a": b"asked", "all": every_byte}),
            ("two", {"r": b"reply"}),
            ("three", {}),
        ]

    run(app, work)


def test_messages_of_one_transaction_have_attachments_and_properties_of_their_own() -> None:
    app = Service("shop")
    seen: dict[int, tuple[dict[str, bytes], dict[str, object]]] = {}

    @app.terminator("take", Number)
    async def take(number: Number, flow: Flow) -> None:
        seen[number.n] = dict(flow.attachments), flow.properties

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            initiation.send(take, Number(0), trace="t", attachments={"x": b"0"}, properties={"p": 0})
            initiation.send(take, Number(1), trace="t")
            initiation.send(take, Number(2), trace="t", attachments={"y": b"2"}, properties={"q": [2]})
        await t.wait_until_ended()
        assert seen == {0: ({"x": b"0"}, {"p": 0}), 1: ({}, {}), 2: ({"y": b"2"}, {"q": [2]})}

    run(app, work)


def test_properties_that_a_stage_sets_are_seen_by_all_that_comes_after_it() -> None:
    app = Service("shop")
    seen: dict[str, dict[str, object]] = {}

    @app.single("leaf", Number, Number)
    async def leaf(request: Number, flow: Flow) -> Number:
        seen["leaf"] = dict(flow.properties)
        flow.properties["leaf"] = {"deep": [1, None, "x"]}
        return request

    outer = app.endpoint("outer", Number, Number)

    @outer.stage
    async def one(number: Number, flow: Flow) -> None:
        seen["one"] = dict(flow.properties)
        flow.properties["one"] = 1
        flow.request(leaf, number)

    @outer.stage
    async def two(number: Number, flow: Flow) -> Number | None:
        seen["two"] = dict(flow.properties)
        flow.send(beside, number)
        flow.goto(another, number)
        return None

    @app.terminator("beside", Number)
    async def beside(number: Number, flow: Flow) -> None:
        seen["beside"] = dict(flow.properties)

    @app.single("another", Number, Number)
    async def another(number: Number, flow: Flow) -> Number:
        seen["another"] = dict(flow.properties)
        return number

    async def work(t: Stages) -> None:
        await t.ask(outer, Number(), properties={"begun": "x"})
        await t.wait_until_ended()
        all_of_it = {"begun": "x", "one": 1, "leaf": {"deep": [1, None, "x"]}}
        assert seen == {
            "one": {"begun": "x"},
            "leaf": {"begun": "x", "one": 1},
            "two": all_of_it,
            "beside": all_of_it,
            "another": all_of_it,
        }

    run(app, work)


# ---- Circles ----


def count_down(app: Service) -> tuple[Endpoint[Number, Number], list[int]]:
    """Make an endpoint that requests itself recursively, as often as the number says."""
    reached: list[int] = []
    down = app.endpoint("down", Number, Number)

    @down.stage
    async def ask(left: Number, flow: Flow) -> Number | None:
        reached.append(left.n)
        if left.n == 0:
            return left
        flow.request(down, Number(left.n - 1))
        return None

    @down.stage
    async def answer(reply: Number) -> Number:
        return Number(reply.n + 1)

    return down, reached


def test_35_endpoints_may_wait_for_one_another() -> None:
    app = Service("shop")
    down, reached = count_down(app)

    async def work(t: Stages) -> None:
        await t.send(down, Number(35))
        await t.wait_until_ended()
        assert reached[-1] == 0

    run(app, work)


def test_the_36th_endpoint_that_waits_is_refused_and_a_dead_letter_at_once() -> None:
    app = Service("shop")
    down, reached = count_down(app)

    async def work(t: Stages) -> None:
        await t.send(down, Number(36))
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert (letter.queue, letter.attempts) == ("down", 1)
        assert reached == list(range(36, 0, -1))

    run(app, work)


@pytest.mark.parametrize("initiation", ["ask", "send with reply_to"])
def test_caller_waiting_for_the_reply_of_a_flow_is_one_of_the_35(initiation: str) -> None:
    app = Service("shop")
    down, reached = count_down(app)
    received: list[Number] = []

    @app.terminator("take", Number)
    async def take(number: Number) -> None:
        received.append(number)

    async def work(t: Stages) -> None:
        async def begins(count: int) -> None:
            if initiation == "ask":
                with suppress(FlowFailed):
                    received.append(await t.ask(down, Number(count), timeout=10))
            else:
                async with app.initiate() as started:
                    started.send(down, Number(count), trace="t", reply_to=take)

        await begins(34)
        await t.wait_until_ended()
        assert received == [Number(34)]
        await begins(35)
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert "more than 35 stages wait for a reply" in letter.last_cause
        assert reached[35:] == list(range(35, 0, -1))

    run(app, work)


@pytest.mark.parametrize("last", [199, 200])
def test_200_messages_one_after_another_are_handled_and_the_next_one_is_refused(last: int) -> None:
    app = Service("shop")
    ran: list[int] = []
    chain = app.endpoint("chain", Number)

    @chain.stage
    async def again(number: Number, flow: Flow) -> None:
        ran.append(number.n)
        if number.n < last:
            flow.goto(chain, Number(number.n + 1))

    async def work(t: Stages) -> None:
        await t.send(chain, Number())
        letters = await t.wait_until_ended(dead_letters=0 if last == 199 else 1)
        assert all("more than 200 messages one after another" in each.last_cause for each in letters)
        assert ran == list(range(200))

    run(app, work)


@pytest.mark.parametrize("kind", ["goto", "request"])
def test_more_than_200_messages_of_one_flow_are_refused_as_a_circle(kind: str) -> None:
    app = Service("shop")
    ran: list[int] = []

    @app.single("leaf", Number, Number)
    async def leaf(request: Number) -> Number:
        return request

    circle = app.endpoint("circle", Number, Number)

    @circle.stage
    async def again(number: Number, flow: Flow) -> None:
        ran.append(number.n)
        if kind == "goto":
            flow.goto(circle, Number(number.n + 1))
        else:
            flow.request(leaf, Number(number.n + 1))

    @circle.stage
    async def back(number: Number, flow: Flow) -> Number | None:
        flow.goto(circle, number)
        return None

    async def work(t: Stages) -> None:
        await t.send(circle, Number())
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.attempts == 1
        # The first message is one of the 200; replies are not counted.
        assert len(ran) == (200 if kind == "goto" else 100)

    run(app, work)


def test_many_requests_of_one_stage_are_no_circle() -> None:
    app = Service("shop")
    ended: list[int] = []

    @app.single("leaf", Number, Number)
    async def leaf(request: Number) -> Number:
        return request

    outer = app.endpoint("outer", Number)

    @outer.stage
    async def ask(number: Number, flow: Flow) -> None:
        for n in range(300):
            flow.request(leaf, Number(n))

    @outer.stage
    async def take(reply: Number) -> None:
        ended.append(reply.n)

    async def work(t: Stages) -> None:
        await t.send(outer, Number())
        await t.wait_until_ended()
        assert sorted(ended) == list(range(300))

    run(app, work)


def test_the_requests_of_a_stage_are_handled_at_once() -> None:
    """Three requests that wait for one another."""
    app = Service("shop")
    three = asyncio.Barrier(3)

    @app.single("leaf", Number, Number)
    async def leaf(request: Number) -> Number:
        await three.wait()
        return request

    outer = app.endpoint("outer", Number)
    ended: list[int] = []

    @outer.stage
    async def ask(number: Number, flow: Flow) -> None:
        for n in range(3):
            flow.request(leaf, Number(n))

    @outer.stage
    async def take(reply: Number) -> None:
        ended.append(reply.n)

    async def work(t: Stages) -> None:
        await t.send(outer, Number())
        await t.wait_until_ended()
        assert sorted(ended) == [0, 1, 2]

    run(app, work)
