"""Tests of large messages, states and attachments in stages."""

from tests.stages.flows import Memo, Number, Text, run
from truenext.stage import Flow, Service
from truenext.testing.stages import Stages


def test_ten_messages_of_a_megabyte_go_through_a_request_and_a_reply() -> None:
    app = Service("shop")
    received: list[int] = []
    large = "ä" * 500_000

    @app.single("echo", Text, Text)
    async def echo(text: Text) -> Text:
        return Text(text.text + "!")

    outer = app.endpoint("outer", Number, Text, state=Memo)

    @outer.stage
    async def ask(number: Number, memo: Memo, flow: Flow) -> None:
        memo.n = number.n
        flow.request(echo, Text(large))

    @outer.stage
    async def answer(reply: Text, memo: Memo) -> Text:
        assert reply.text == large + "!"
        return reply

    @app.terminator("take", Text, state=Memo)
    async def take(reply: Text, memo: Memo) -> None:
        assert reply.text == large + "!"
        received.append(memo.n)

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            for n in range(10):
                initiation.send(outer, Number(n), trace=f"{n}", reply_to=take, reply_state=Memo(n))
        await t.wait_until_ended()
        assert sorted(received) == list(range(10))

    run(app, work)


def test_large_messages_beyond_the_transaction_bytes_of_a_connection_are_sent_one_by_one() -> None:
    app = Service("shop")
    received: list[int] = []
    large = "x" * 6_000_000

    @app.terminator("take", Text)
    async def take(text: Text) -> None:
        received.append(len(text.text))

    @app.terminator("sends", Number)
    async def sends(number: Number, flow: Flow) -> None:
        flow.send(take, Text(large))

    async def work(t: Stages) -> None:
        for n in range(6):
            await t.send(sends, Number(n))
        await t.wait_until_ended()
        assert received == [len(large)] * 6

    run(app, work)


def test_a_large_state_comes_back_with_the_reply_and_large_attachments_arrive() -> None:
    app = Service("shop")
    seen: list[int] = []
    large = "x" * 1_000_000

    @app.single("leaf", Number, Number)
    async def leaf(number: Number, flow: Flow) -> Number:
        seen.append(len(flow.attachments["a"]))
        return number

    outer = app.endpoint("outer", Number, Number, state=Memo)

    @outer.stage
    async def ask(number: Number, memo: Memo, flow: Flow) -> None:
        memo.text = large
        flow.request(leaf, number, attachments={"a": b"\0" * 1_000_000})

    @outer.stage
    async def answer(reply: Number, memo: Memo) -> Number:
        seen.append(len(memo.text))
        return reply

    async def work(t: Stages) -> None:
        assert await t.ask(outer, Number(1)) == Number(1)
        assert seen == [1_000_000, 1_000_000]

    run(app, work)
