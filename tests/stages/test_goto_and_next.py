"""Tests of flows that go on without a request: by `next`, `next_direct` and `goto`. Source: docs/stages.md"""

import threading

import pytest

from tests.stages.flows import Memo, Number, Text, run
from truenext.stage import Flow, Service
from truenext.testing.stages import Stages

# ---- next ----


def test_next_keeps_the_state_and_the_destination_of_the_reply() -> None:
    app = Service("shop")
    chain = app.endpoint("chain", Number, Text, state=Memo)

    @chain.stage
    async def one(number: Number, memo: Memo, flow: Flow) -> None:
        memo.n, memo.text = 5, "one"
        flow.next(Text("from one"))

    @chain.stage
    async def two(text: Text, memo: Memo, flow: Flow) -> None:
        assert (text, memo) == (Text("from one"), Memo(5, "one"))
        memo.text += " two"
        flow.next(text)

    @chain.stage
    async def three(text: Text, memo: Memo) -> Text:
        return Text(f"{memo.n} {memo.text}")

    async def work(t: Stages) -> None:
        assert await t.ask(chain, Number()) == Text("5 one two")

    run(app, work)


def test_next_keeps_the_state_of_the_moment_of_its_call() -> None:
    app = Service("shop")
    chain = app.endpoint("chain", Number, Text, state=Memo)

    @chain.stage
    async def one(number: Number, memo: Memo, flow: Flow) -> None:
        memo.text = "before"
        flow.next(number)
        memo.text = "after"

    @chain.stage
    async def two(number: Number, memo: Memo) -> Text:
        return Text(memo.text)

    async def work(t: Stages) -> None:
        assert await t.ask(chain, Number()) == Text("before")

    run(app, work)


def test_stage_after_next_has_a_transaction_of_its_own() -> None:
    app = Service("shop")
    received: list[Number] = []
    chain = app.endpoint("chain", Number)

    @app.terminator("take", Number)
    async def take(number: Number) -> None:
        received.append(number)

    @chain.stage
    async def one(number: Number, flow: Flow) -> None:
        flow.send(take, number)
        flow.next(number)

    @chain.stage(attempts=1)
    async def two(number: Number) -> None:
        raise ValueError("no")

    async def work(t: Stages) -> None:
        await t.send(chain, Number(1))
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.queue == "chain.stage.two"
        assert received == [Number(1)]

    run(app, work)


# ---- next_direct ----


@pytest.mark.parametrize("is_async", [True, False])
def test_next_direct_runs_the_next_stage_in_the_same_transaction(is_async: bool) -> None:
    app = Service("shop")
    seen: list[object] = []
    received: list[Text] = []
    chain = app.endpoint("chain", Number, Text, state=Memo)

    @app.terminator("take", Text)
    async def take(text: Text) -> None:
        received.append(text)

    def one(number: Number, memo: Memo, flow: Flow) -> None:
        memo.n = number.n
        flow.properties["set"] = "by one"
        flow.send(take, Text("one"))
        flow.next_direct(Text("directly"))

    def two(text: Text, memo: Memo, flow: Flow) -> Text:
        seen.extend([text, memo.n, flow.properties, flow.message_id, dict(flow.attachments), len(received)])
        seen.append(threading.current_thread().name.startswith("truenext stage"))
        flow.send(take, Text("two"))
        return Text(f"{memo.n}")

    async def one_async(number: Number, memo: Memo, flow: Flow) -> None:
        one(number, memo, flow)

    async def two_async(text: Text, memo: Memo, flow: Flow) -> Text:
        return two(text, memo, flow)

    chain.stage(name="one")(one_async if is_async else one)
    chain.stage(name="two")(two_async if is_async else two)

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            id = initiation.send(chain, Number(3), trace="t", attachments={"a": b"a"})
        await t.wait_until_ended()
        assert seen == [Text("directly"), 3, {"set": "by one"}, id, {}, 0, not is_async]
        assert received == [Text("one"), Text("two")]
        assert await t.ask(chain, Number(4)) == Text("4")

    run(app, work)


def test_a_message_that_goes_on_directly_does_not_wait_in_the_queue_of_the_next_stage() -> None:
    """The next stage also gets the object itself, not a copy through JSON."""
    app = Service("shop")
    same: list[bool] = []
    message = Text("this very one")
    chain = app.endpoint("chain", Number)

    @chain.stage
    async def one(number: Number, flow: Flow) -> None:
        flow.next_direct(message)

    @chain.stage
    async def two(text: Text) -> None:
        same.append(text is message)

    async def work(t: Stages) -> None:
        stages: list[str] = []
        t.at("received", lambda: stages.append("second"), stage="chain.stage.two", required=False)
        await t.send(chain, Number())
        await t.wait_until_ended()
        assert (same, stages) == ([True], [])

    run(app, work)


def test_next_direct_may_follow_itself_and_be_followed_by_requests_and_new_flows() -> None:
    app = Service("shop")
    received: list[str] = []
    trail: list[str] = []

    @app.single("leaf", Number, Number)
    async def leaf(request: Number) -> Number:
        return Number(request.n * 10)

    @app.terminator("take", Text)
    async def take(text: Text, flow: Flow) -> None:
        received.append(f"{text.text}: {flow.trace}")

    chain = app.endpoint("chain", Number, Number, state=Memo)

    @chain.stage
    async def one(number: Number, memo: Memo, flow: Flow) -> None:
        trail.append("one")
        memo.text += "1"
        flow.send(take, Text("one"), trace="child")
        flow.next_direct(number)

    @chain.stage
    async def two(number: Number, memo: Memo, flow: Flow) -> None:
        trail.append("two")
        memo.text += "2"
        flow.next_direct(number)

    @chain.stage
    async def three(number: Number, memo: Memo, flow: Flow) -> None:
        trail.append("three")
        memo.text += "3"
        flow.request(leaf, number)
        flow.request(leaf, Number(number.n + 1))

    @chain.stage
    async def four(reply: Number, memo: Memo, flow: Flow) -> None:
        trail.append(f"four {memo.text} {reply.n}")
        flow.send(take, Text("four"))
        flow.next_direct(Number(reply.n + 1))

    @chain.stage
    async def five(number: Number, memo: Memo) -> Number:
        trail.append(f"five {memo.text} {number.n}")
        return number

    async def work(t: Stages) -> None:
        await t.send(chain, Number(4), trace="parent")
        await t.wait_until_ended()
        assert trail[:3] == ["one", "two", "three"]
        assert sorted(trail[3:]) == ["five 123 41", "five 123 51", "four 123 40", "four 123 50"]
        assert sorted(received) == ["four: parent", "four: parent", "one: parent|child"]

    run(app, work)


def test_a_failure_of_the_stage_that_goes_on_directly_takes_back_what_the_one_before_has_said() -> None:
    app = Service("shop")
    received: list[Number] = []
    hooks: list[str] = []
    ran: list[str] = []
    chain = app.endpoint("chain", Number, attempts=2)

    @app.terminator("take", Number)
    async def take(number: Number) -> None:
        received.append(number)

    @chain.stage
    async def one(number: Number, flow: Flow) -> None:
        ran.append("one")
        flow.send(take, number)
        flow.after_commit(hooks.append, "one")
        flow.next_direct(number)

    @chain.stage
    async def two(number: Number) -> None:
        ran.append("two")
        raise ValueError("no")

    async def work(t: Stages) -> None:
        await t.send(chain, Number(1))
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert (letter.queue, letter.attempts) == ("chain", 2)
        assert (received, hooks, ran) == ([], [], ["one", "two"] * 2)

    run(app, work)


@pytest.mark.parametrize("first_is_async", [True, False])
def test_an_async_and_a_plain_stage_cannot_be_in_one_transaction(first_is_async: bool) -> None:
    app = Service("shop")
    chain = app.endpoint("chain", Number, attempts=1)
    seen: list[str] = []

    def plain(number: Number, flow: Flow) -> None:
        if flow.message_id not in seen:
            seen.append(flow.message_id)
            flow.next_direct(number)

    async def asynchronous(number: Number, flow: Flow) -> None:
        plain(number, flow)

    chain.stage(name="one")(asynchronous if first_is_async else plain)
    chain.stage(name="two")(plain if first_is_async else asynchronous)

    async def work(t: Stages) -> None:
        await t.send(chain, Number())
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.queue == "chain"

    run(app, work)


# ---- goto ----


def test_the_endpoint_to_which_a_flow_goes_replies_in_the_place_of_the_one_that_was_asked() -> None:
    app = Service("shop")
    seen: list[str] = []

    @app.single("other", Number, Text)
    async def other(number: Number, flow: Flow) -> Text:
        seen.append(flow.sender)
        return Text(f"other {number.n}")

    goes = app.endpoint("goes", Number, Text, state=Memo)

    @goes.stage
    async def go(number: Number, memo: Memo, flow: Flow) -> Text | None:
        if number.n < 0:
            return Text("negative")
        flow.goto(other, number)
        return None

    outer = app.endpoint("outer", Number, Text, state=Memo)

    @outer.stage
    async def ask(number: Number, memo: Memo, flow: Flow) -> None:
        memo.text = "mine"
        flow.request(goes, number)

    @outer.stage
    async def answer(reply: Text, memo: Memo, flow: Flow) -> Text:
        seen.append(flow.sender)
        return Text(f"{memo.text}: {reply.text}")

    async def work(t: Stages) -> None:
        assert await t.ask(outer, Number(2)) == Text("mine: other 2")
        assert seen == ["shop goes", "shop other"]
        assert await t.ask(outer, Number(-2)) == Text("mine: negative")

    run(app, work)


@pytest.mark.parametrize("state", [None, Memo(7, "given")])
def test_goto_brings_along_the_state_that_it_is_given_and_else_an_empty_one(state: Memo | None) -> None:
    app = Service("shop")
    seen: list[Memo] = []
    other = app.endpoint("other", Number, Text, state=Memo)

    @other.stage
    async def answer(number: Number, memo: Memo) -> Text:
        seen.append(memo)
        return Text()

    goes = app.endpoint("goes", Number, Text, state=Memo)

    @goes.stage
    async def first(number: Number, memo: Memo, flow: Flow) -> None:
        memo.text = "of goes"
        flow.next(number)

    @goes.stage
    async def go(number: Number, memo: Memo, flow: Flow) -> Text | None:
        flow.goto(other, number, state=state)
        return None

    async def work(t: Stages) -> None:
        await t.ask(goes, Number(2))
        assert seen == [state or Memo()]

    run(app, work)


def test_goto_may_be_followed_by_goto() -> None:
    app = Service("shop")
    c = app.endpoint("c", Number, Text)
    b = app.endpoint("b", Number, Text)
    a = app.endpoint("a", Number, Text)

    @a.stage
    async def in_a(number: Number, flow: Flow) -> Text | None:
        flow.goto(b, Number(number.n + 1))
        return None

    @b.stage
    async def in_b(number: Number, flow: Flow) -> Text | None:
        flow.goto(c, Number(number.n + 1))
        return None

    @c.stage
    async def in_c(number: Number) -> Text:
        return Text(f"{number.n}")

    async def work(t: Stages) -> None:
        assert await t.ask(a, Number(1)) == Text("3")

    run(app, work)
