"""Tests of flows that are stashed as bytes and continued later. Source: docs/stages.md"""

import asyncio
import os
import threading

import pytest

from tests.stages.flows import Memo, Number, Text, run
from truenext.stage import Endpoint, Flow, FlowError, Service
from truenext.testing.stages import Stages


def test_flow_continues_from_each_unstash_with_its_state_and_reply_to() -> None:
    app = Service("shop")
    stashed: list[bytes] = []
    replies: list[str] = []

    inner = app.endpoint("inner", Number, Text, state=Memo)

    @inner.stage
    async def one(number: Number, memo: Memo, flow: Flow) -> None:
        memo.n = number.n
        flow.next(Text("x"))

    @inner.stage
    async def waits(text: Text, memo: Memo, flow: Flow) -> None:
        memo.text = "before"
        flow.properties["p"] = 1
        stashed.append(flow.stash())
        memo.text = "after"

    @inner.stage
    async def last(text: Text, memo: Memo, flow: Flow) -> Text:
        return Text(f"{memo.n} {memo.text} {text.text} {flow.properties} {flow.trace}")

    outer = app.endpoint("outer", Number, Text, state=Memo)

    @outer.stage
    async def ask(number: Number, memo: Memo, flow: Flow) -> None:
        memo.text = "outer"
        flow.request(inner, number)

    @outer.stage
    async def answer(reply: Text, memo: Memo) -> Text:
        return Text(f"{memo.text} {reply.text}")

    @app.terminator("take", Text, state=Memo)
    async def take(reply: Text, memo: Memo) -> None:
        replies.append(f"{memo.n}: {reply.text}")

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            initiation.send(outer, Number(5), trace="o5", reply_to=take, reply_state=Memo(9))
        # The flow stays where it is: nobody has gone on with it.
        await t.wait_until_ended()
        assert replies == []
        (data,) = stashed
        for text in ("first", "second"):
            async with app.initiate() as initiation:
                flow = initiation.unstash(data)
                assert (flow.message, flow.state, flow.trace) == (Text("x"), Memo(5, "before"), "o5")
                flow.next(Text(text))
        await t.wait_until_ended()
        assert sorted(replies) == [f"9: outer 5 before {text} {{'p': 1}} o5" for text in ("first", "second")]

    run(app, work)


def test_unstash_is_a_separate_continuation_also_within_one_initiation() -> None:
    app = Service("shop")
    stashed: list[bytes] = []
    ids: list[str] = []
    chain = app.endpoint("chain", Number, Number)

    @chain.stage
    async def waits(number: Number, flow: Flow) -> None:
        stashed.append(flow.stash())

    @chain.stage
    async def last(number: Number, flow: Flow) -> Number:
        ids.append(flow.message_id)
        return number

    async def work(t: Stages) -> None:
        await t.send(chain, Number())
        await t.wait_until_ended()
        for _ in range(2):
            async with app.initiate() as initiation:
                initiation.unstash(stashed[0]).next(Number(1))
                initiation.unstash(stashed[0]).next(Number(2))
        await t.wait_until_ended()
        assert len(set(ids)) == 4

    run(app, work)


def test_stashed_flow_may_reply_request_and_goto() -> None:
    app = Service("shop")
    stashed: list[bytes] = []
    replies: list[Text] = []

    @app.single("leaf", Number, Text)
    async def leaf(number: Number) -> Text:
        return Text(f"leaf {number.n}")

    chain = app.endpoint("chain", Number, Text, state=Memo)

    @chain.stage
    async def waits(number: Number, memo: Memo, flow: Flow) -> None:
        memo.text = "kept"
        stashed.append(flow.stash())

    @chain.stage
    async def last(text: Text, memo: Memo) -> Text:
        return Text(f"{memo.text} {text.text}")

    @app.terminator("take", Text)
    async def take(reply: Text) -> None:
        replies.append(reply)

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            initiation.send(chain, Number(), trace="t", reply_to=take)
        await t.wait_until_ended()
        async with app.initiate() as initiation:
            initiation.unstash(stashed[0]).reply(Text("at once"))
        await t.wait_until_ended()
        async with app.initiate() as initiation:
            initiation.unstash(stashed[0]).request(leaf, Number(1))
        await t.wait_until_ended()
        async with app.initiate() as initiation:
            initiation.unstash(stashed[0]).goto(leaf, Number(2))
        await t.wait_until_ended()
        assert replies == [Text("at once"), Text("kept leaf 1"), Text("leaf 2")]
        # What it was refused in its stage it is refused here.
        with pytest.raises(FlowError):
            async with app.initiate() as initiation:
                initiation.unstash(stashed[0]).reply(Number())

    run(app, work)


def test_next_direct_has_no_stage_to_go_on_with_from_a_stash() -> None:
    """A stash has no transaction of a stage that the next stage could share."""
    app = Service("shop")
    stashed: list[bytes] = []
    ran: list[str] = []
    chain = app.endpoint("chain", Number, Number)

    @chain.stage
    async def waits(number: Number, flow: Flow) -> None:
        stashed.append(flow.stash())

    @chain.stage
    async def last(number: Number) -> Number:
        ran.append("last")
        return number

    async def work(t: Stages) -> None:
        await t.send(chain, Number())
        await t.wait_until_ended()
        with pytest.raises(FlowError, match="next_direct"):
            async with app.initiate() as initiation:
                initiation.unstash(stashed[0]).next_direct(Number())

    run(app, work)


def test_a_stage_that_has_stashed_may_go_on_at_the_same_time() -> None:
    app = Service("shop")
    stashed: list[bytes] = []
    chain = app.endpoint("chain", Number, Text)

    @chain.stage
    async def waits(number: Number, flow: Flow) -> Text:
        stashed.append(flow.stash())
        return Text("first answer")

    async def work(t: Stages) -> None:
        assert await t.ask(chain, Number()) == Text("first answer")
        async with app.initiate() as initiation:
            initiation.unstash(stashed[0]).reply(Text("dropped, for nobody waits any more"))
        await t.wait_until_ended()

    run(app, work)


def test_bytes_that_were_not_stashed_or_by_another_service_are_refused() -> None:
    app, other = Service("shop"), Service("other")
    stashed: list[bytes] = []

    @other.terminator("theirs", Number)
    async def theirs(number: Number, flow: Flow) -> None:
        stashed.append(flow.stash())

    async def of_others(t: Stages) -> None:
        await t.send(theirs, Number())
        await t.wait_until_ended()

    run(other, of_others)

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            for data in (b"", b"{}", b"\xff", b"[" * 100_000):
                with pytest.raises(FlowError, match="not the stash of a stage"):
                    initiation.unstash(data)
            for data, advice in (
                (
                    stashed[0].replace(b'"version":2', b'"version":3'),
                    "3, .* reads version 2: update truenext",
                ),
                (of_version_1(stashed[0]), "1, .* reads version 2: use the version that stashed it"),
            ):
                with pytest.raises(FlowError, match=f"the stash has version {advice}"):
                    initiation.unstash(data)
            with pytest.raises(FlowError, match=r"theirs.*this service does not have"):
                initiation.unstash(stashed[0])

    run(app, work)


def of_version_1(stash: bytes) -> bytes:
    named = stash.replace(b'"startedMs"', b'"begunMs"').replace(b'"startedBy"', b'"begunBy"')
    return named.replace(b'"version":2', b'"version":1')


def stashing(app: Service, stashed: list[bytes]) -> Endpoint[Number, Number]:
    """Make an endpoint whose first stage stashes the flow, and whose last one replies with its message."""
    chain = app.endpoint("chain", Number, Number)

    @chain.stage
    async def waits(number: Number, flow: Flow) -> None:
        stashed.append(flow.stash())

    @chain.stage
    async def last(number: Number) -> Number:
        return number

    return chain


def test_after_commit_of_what_was_unstashed_is_called_when_its_initiation_is_committed() -> None:
    app = Service("shop")
    stashed: list[bytes] = []
    called: list[str] = []
    chain = stashing(app, stashed)

    async def work(t: Stages) -> None:
        await t.send(chain, Number())
        await t.wait_until_ended()
        async with app.initiate() as initiation:
            flow = initiation.unstash(stashed[0])
            flow.after_commit(called.append, "committed")
            flow.next(Number())
            assert called == []
        assert called == ["committed"]
        with pytest.raises(ZeroDivisionError):
            async with app.initiate() as initiation:
                flow = initiation.unstash(stashed[0])
                flow.after_commit(called.append, "never")
                raise ZeroDivisionError
        assert called == ["committed"]

    run(app, work)


def test_a_flow_that_was_stashed_keeps_the_end_of_its_time() -> None:
    app = Service("shop")
    stashed: list[bytes] = []
    ended: list[str] = []
    chain = app.endpoint("chain", Number)

    @chain.stage
    async def waits(number: Number, flow: Flow) -> None:
        stashed.append(flow.stash())

    @chain.stage
    async def last(number: Number) -> None:
        ended.append("last")

    async def work(t: Stages) -> None:
        await t.send(chain, Number(), ttl=100)
        await t.wait_until_ended()
        async with app.initiate() as initiation:
            initiation.unstash(stashed[0]).next(Number())
        await t.wait_until_ended()
        assert ended == ["last"]
        await t.advance(seconds=101)
        async with app.initiate() as initiation:
            initiation.unstash(stashed[0]).next(Number())
        await t.wait_until_ended()
        assert ended == ["last"]

    run(app, work)


def test_hooks_of_flows_unstashed_in_threads_are_called() -> None:
    """As many threads at once as the event loop has: hooks in another thread would never be called."""
    app = Service("shop")
    stashed: list[bytes] = []
    called: list[bool] = []
    many = min(32, (os.cpu_count() or 1) + 4)
    chain = stashing(app, stashed)

    async def asynchronous() -> None:
        called.append(True)

    def initiation() -> None:
        here = threading.current_thread()
        with app.initiate() as initiation:
            flow = initiation.unstash(stashed[0])
            flow.after_commit(lambda: called.append(threading.current_thread() is here))
            flow.after_commit(asynchronous)
            flow.next(Number())

    async def work(t: Stages) -> None:
        await t.send(chain, Number())
        await t.wait_until_ended()
        await asyncio.gather(*(asyncio.to_thread(initiation) for _ in range(many)))
        await t.wait_until_ended()
        assert called == [True] * 2 * many

    run(app, work)
