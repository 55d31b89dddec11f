"""Tests of invalid calls of a flow or an initiation: they are refused at the call, and the stage fails. Source:
docs/stages.md"""

from collections.abc import Callable, Mapping
from functools import cache

import pytest

from tests.stages.flows import Memo, Number, Text, run
from truenext.errors import LocalProtocolError
from truenext.stage import Flow, FlowError, Service
from truenext.testing.stages import Stages

Misuse = Callable[[Flow, "Shop"], object]


class Shop:
    """A service whose stages make invalid calls of a test."""

    def __init__(self, misuse: Mapping[str, Misuse]) -> None:
        """`misuse`: invalid calls, by the text of the message at which they are made."""
        self.app = app = Service("shop", attempts=1)
        self.heard: dict[str, str] = {}
        self.leaf = app.remote("leaf", Number, Number)
        self.texts = app.remote("texts", Number, Text)
        self.sink = app.remote("sink", Number)
        self.topic = app.topic("numbers", Number)
        self.stateless = app.endpoint("stateless", Number, Number)
        self.other = app.endpoint("other", Number, Text)
        self.chain = app.endpoint("chain", Text, Number, state=Memo)

        @self.stateless.stage
        async def answer(number: Number) -> Number:
            return number

        @self.other.stage
        async def answer_text(number: Number) -> Text:
            return Text()

        def hears(name: str, flow: Flow) -> None:
            try:
                misuse[name](flow, self)
            except FlowError as error:
                self.heard[name] = str(error)
                raise

        @self.chain.stage
        async def first(name: Text, memo: Memo, flow: Flow) -> None:
            if memo.n:
                flow.next(Number())
            else:
                hears(name.text, flow)

        @self.chain.stage
        async def last(number: Number, memo: Memo, flow: Flow) -> Number:
            hears(memo.text, flow)
            return number

        @app.terminator("terminator", Text)
        async def terminator(name: Text, flow: Flow) -> None:
            hears(name.text, flow)

        self.terminator = terminator


@cache
def heard() -> Mapping[str, str]:
    """Return the error of each of the calls below, each made in a stage that failed with it."""
    shop = Shop(IN_THE_FIRST | IN_THE_LAST | IN_A_TERMINATOR | PAIRS)

    async def work(t: Stages) -> None:
        async with shop.app.initiate() as initiation:
            for name in IN_THE_FIRST | PAIRS:
                # Somebody waits for the reply.
                initiation.send(shop.chain, Text(name), trace="t", reply_to=shop.sink)
            for name in IN_THE_LAST:
                initiation.send(shop.chain, Text(name), trace="t", state=Memo(1, name), reply_to=shop.sink)
            for name in IN_A_TERMINATOR:
                initiation.send(shop.terminator, Text(name), trace="t")
        await t.wait_until_ended(dead_letters=len(IN_THE_FIRST | IN_THE_LAST | IN_A_TERMINATOR | PAIRS))
        assert not (await t.broker.queue("sink")).waiting

    run(shop.app, work)
    return shop.heard


REFUSED: dict[str, tuple[Misuse, list[str]]] = {
    "a request of what replies nothing": (
        lambda flow, shop: flow.request(shop.sink, Number()),
        ["sink replies nothing", "send"],
    ),
    "a request whose reply the next stage does not take": (
        lambda flow, shop: flow.request(shop.texts, Number()),
        ["texts", "Text", "last", "Number"],
    ),
    "a request with a wrong message": (
        lambda flow, shop: flow.request(shop.leaf, Text("x")),  # type: ignore[misc]
        ["Text", "Number"],
    ),
    "next with a wrong message": (lambda flow, shop: flow.next(Text("x")), ["Text", "Number"]),
    "next_direct with a wrong message": (lambda flow, shop: flow.next_direct(Text("x")), ["Text", "Number"]),
    "a wrong reply": (lambda flow, shop: flow.reply(Text("x")), ["Text", "Number"]),
    "goto to what replies something else": (lambda flow, shop: flow.goto(shop.other, Number()), ["other", "chain"]),
    "goto to what replies nothing": (lambda flow, shop: flow.goto(shop.sink, Number()), ["sink", "chain"]),
    "goto with a state to what has none": (
        lambda flow, shop: flow.goto(shop.stateless, Number(), state=Memo()),
        ["stateless", "no state"],
    ),
    "goto with a wrong message": (
        lambda flow, shop: flow.goto(shop.leaf, Text("x")),  # type: ignore[misc]
        ["Text", "Number"],
    ),
    "send with a wrong message": (
        lambda flow, shop: flow.send(shop.sink, Text("x")),  # type: ignore[misc]
        ["Text", "Number"],
    ),
    "send with a wrong state": (lambda flow, shop: flow.send(shop.chain, Text(), state=Number()), ["Number", "Memo"]),
    "send with who is to take a reply that never comes": (
        lambda flow, shop: flow.send(shop.sink, Number(), reply_to=shop.terminator),  # type: ignore[misc]
        ["sink replies nothing", "terminator"],
    ),
    "send with who does not take the reply": (
        lambda flow, shop: flow.send(shop.texts, Number(), reply_to=shop.sink),  # type: ignore[misc]
        ["texts", "sink"],
    ),
    "send with a state for who takes the reply, and nobody who takes it": (
        lambda flow, shop: flow.send(shop.leaf, Number(), reply_state=Memo()),
        ["reply_state", "reply_to"],
    ),
    "publish with a wrong message": (
        lambda flow, shop: flow.publish(shop.topic, Text("x")),  # type: ignore[misc]
        ["Text", "Number"],
    ),
    "a time to live of nothing": (lambda flow, shop: flow.send(shop.sink, Number(), ttl=0), ["ttl", "0.001"]),
    "a time to live that is text": (
        lambda flow, shop: flow.send(shop.sink, Number(), ttl="5"),  # type: ignore[arg-type]
        ["ttl", "'5'"],
    ),
    "a time to live for ever": (lambda flow, shop: flow.send(shop.sink, Number(), ttl=float("inf")), ["ttl", "inf"]),
    "interactive that is text": (
        lambda flow, shop: flow.send(shop.sink, Number(), interactive="no"),  # type: ignore[arg-type]
        ["interactive must be True or False", "'no'"],
    ),
    "persistent that is a number": (
        lambda flow, shop: flow.publish(shop.topic, Number(), persistent=1),  # type: ignore[arg-type]
        ["persistent must be True or False", "1"],
    ),
    "properties that have no names": (
        lambda flow, shop: flow.send(shop.sink, Number(), properties=5),  # type: ignore[arg-type]
        ["properties", "5"],
    ),
    "attachments that have no names": (
        lambda flow, shop: flow.request(shop.leaf, Number(), attachments=[b"x"]),  # type: ignore[arg-type]
        ["attachments must be a mapping of names to bytes", "list"],
    ),
    "a reply to what is no endpoint": (
        lambda flow, shop: flow.send(shop.leaf, Number(), reply_to="sink"),  # type: ignore[arg-type]
        ["reply_to must be an endpoint or a topic", "'sink'"],
    ),
    "a trace of nothing": (lambda flow, shop: flow.send(shop.sink, Number(), trace="!"), ["trace", "not empty"]),
}


IN_THE_FIRST = {name: misuse for name, (misuse, _) in REFUSED.items()}
IN_THE_LAST: dict[str, Misuse] = {
    "request": lambda flow, shop: flow.request(shop.leaf, Number()),
    "next": lambda flow, shop: flow.next(Number()),
    "next_direct": lambda flow, shop: flow.next_direct(Number()),
}
IN_A_TERMINATOR: dict[str, Misuse] = {"reply": lambda flow, shop: flow.reply(Number())}
ONE_OF_FIVE: dict[str, Misuse] = IN_THE_LAST | {
    "reply": lambda flow, shop: flow.reply(Number()),
    "goto": lambda flow, shop: flow.goto(shop.leaf, Number()),
}


def both(one: Misuse, other: Misuse) -> Misuse:
    return lambda flow, shop: (one(flow, shop), other(flow, shop))


PAIRS = {
    f"{one} and {other}": both(ONE_OF_FIVE[one], ONE_OF_FIVE[other])
    for one in ONE_OF_FIVE
    for other in ONE_OF_FIVE
    if (one, other) != ("request", "request")
}


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_call_is_refused_with_its_reason(what: str) -> None:
    text = heard()[what]
    assert all(word in text for word in REFUSED[what][1]), text


@pytest.mark.parametrize("what", IN_THE_LAST)
def test_last_stage_cannot_call_request_or_next(what: str) -> None:
    text = heard()[what]
    assert all(word in text for word in ("last", "chain", what)), text


def test_terminator_cannot_reply() -> None:
    assert "terminator replies nothing" in heard()["reply"]


@pytest.mark.parametrize("pair", PAIRS)
def test_stage_may_combine_only_requests_with_each_other(pair: str) -> None:
    one, _, other = pair.partition(" and ")
    text = heard()[pair]
    assert all(word in text for word in ("chain", one, other)), text


def test_refused_call_that_was_caught_leaves_no_trace() -> None:
    app = Service("shop")
    received: list[Number] = []
    chain = app.endpoint("chain", Number)

    @chain.stage
    async def one(number: Number, flow: Flow) -> None:
        flow.next(Number(1))
        with pytest.raises(LocalProtocolError):
            flow.next(Number(2))
        with pytest.raises(FlowError):
            flow.send(chain, Text("x"))  # type: ignore[misc]

    @chain.stage
    async def two(number: Number) -> None:
        received.append(number)

    async def work(t: Stages) -> None:
        await t.send(chain, Number())
        await t.wait_until_ended()
        assert received == [Number(1)]

    run(app, work)


# ---- Where flows begin outside of stages ----


def test_invalid_call_of_an_initiation_is_refused_and_nothing_is_sent() -> None:
    shop = Shop({})
    app = shop.app

    async def work(t: Stages) -> None:
        with pytest.raises(FlowError, match=r"Text.*Number"):
            async with app.initiate() as initiation:
                initiation.send(shop.stateless, Number(), trace="t")
                initiation.send(shop.stateless, Text("x"), trace="t")  # type: ignore[misc]
        with pytest.raises(FlowError, match=r"trace.*not empty"):
            await app.send(shop.stateless, Number(), trace="")
        with pytest.raises(FlowError, match=r"ttl.*0.001"):
            await app.send(shop.stateless, Number(), trace="t", ttl=-1)
        with pytest.raises(FlowError, match=r"ttl.*0.001"):
            await app.send(shop.stateless, Number(), trace="t", ttl=float("nan"))
        with pytest.raises(TypeError, match="prio"):
            await app.send(shop.stateless, Number(), trace="t", prio=9)  # type: ignore[call-arg]
        with pytest.raises(FlowError, match="terminator replies nothing"):
            await app.ask(shop.terminator, Text(), trace="t")
        with pytest.raises(FlowError, match=r"property.*JSON"):
            await app.send(shop.stateless, Number(), trace="t", properties={"x": object()})
        assert await t.wait_until_ended() == []
        assert not (await t.broker.queue("stateless")).waiting

    run(app, work)


def test_an_initiation_without_a_connection_says_what_to_do() -> None:
    app = Service("shop")
    with pytest.raises(LocalProtocolError, match=r"shop is not connected: use async with shop.connected\(\)"):
        app.initiate()


def test_a_service_runs_once_in_a_process() -> None:
    app = Service("shop")

    async def work(t: Stages) -> None:
        with pytest.raises(LocalProtocolError, match="shop runs already"):
            async with app.connected():
                raise AssertionError("not reached")

    run(app, work)


def test_with_instead_of_async_with_is_refused_in_the_event_loop() -> None:
    app = Service("shop")

    async def work(t: Stages) -> None:
        with pytest.raises(LocalProtocolError, match="async with"), app.initiate():
            raise AssertionError("not reached")

    run(app, work)
