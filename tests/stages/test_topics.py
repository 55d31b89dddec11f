"""Tests of topics and their subscribers. Source: docs/stages.md, "Endpoints and stages" """

import asyncio
import contextlib
from typing import Any

import pytest

import truenext
from tests.stages.flows import Number, Text, run, until
from truenext.stage import DefinitionError, Endpoint, Flow, Reject, Service, Topic
from truenext.testing.local import broker as local_broker
from truenext.testing.stages import Stages


def test_subscribers_of_a_topic_all_get_a_published_message() -> None:
    app = Service("shop")
    topic = app.topic("prices", Number)
    received: list[str] = []

    @app.subscriber(topic)
    async def first(number: Number, flow: Flow) -> None:
        received.append(f"first {number.n} {flow.trace}")

    @app.subscriber(topic)
    def second(number: Number) -> None:
        received.append(f"second {number.n}")

    async def work(t: Stages) -> None:
        await t.publish(topic, Number(1), trace="p1")
        await t.wait_until_ended()
        assert sorted(received) == ["first 1 p1", "second 1"]

    run(app, work)


def test_a_subscriber_gets_what_is_published_once_whatever_its_priority() -> None:
    app = Service("shop")
    topic = app.topic("prices", Number)
    received: list[int] = []

    @app.subscriber(topic)
    async def listen(number: Number) -> None:
        received.append(number.n)

    async def work(t: Stages) -> None:
        await t.publish(topic, Number(1))
        await t.publish(topic, Number(2), interactive=True)
        await t.wait_until_ended()
        assert sorted(received) == [1, 2]

    run(app, work)


def test_a_subscriber_takes_one_message_at_a_time() -> None:
    app = Service("shop", concurrency=8)
    topic = app.topic("prices", Number)
    inside: list[int] = []
    received: list[int] = []

    @app.subscriber(topic)
    async def listen(number: Number) -> None:
        inside.append(number.n)
        assert len(inside) == 1
        await asyncio.sleep(0.001)
        inside.clear()
        received.append(number.n)

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            for n in range(10):
                initiation.publish(topic, Number(n), trace=f"{n}")
        await t.wait_until_ended()
        assert received == list(range(10))

    run(app, work)


def test_published_message_reaches_all_running_processes_and_no_later_one() -> None:
    received: list[tuple[str, int]] = []

    def make(process: str) -> tuple[Service, Topic[Number]]:
        app = Service("shop")
        topic = app.topic("prices", Number)

        @app.subscriber(topic)
        async def listen(number: Number) -> None:
            received.append((process, number.n))

        return app, topic

    first, topic = make("a")
    second, _ = make("b")

    async def work(t: Stages) -> None:
        second.broker = (t.broker.url,)
        await t.publish(topic, Number(1))
        await until(lambda: received == [("a", 1)])
        async with second.running():
            # Until it has subscribed.
            async with asyncio.timeout(20):
                while ("b", 0) not in received:
                    await t.publish(topic, Number(0))
                    await asyncio.sleep(0.01)
            await t.publish(topic, Number(2))
            await until(lambda: ("a", 2) in received and ("b", 2) in received)
        await t.publish(topic, Number(3))
        await until(lambda: ("a", 3) in received)
        await t.wait_until_ended()
        assert {("a", 1), ("b", 1), ("b", 3)} & set(received) == {("a", 1)}

    run(first, work)


def test_a_stage_publishes_in_its_transaction() -> None:
    app = Service("shop")
    topic = app.topic("prices", Number)
    received: list[str] = []

    @app.subscriber(topic)
    async def listen(number: Number, flow: Flow) -> None:
        received.append(f"{number.n} {flow.trace} {flow.sender}")

    @app.terminator("tells", Number)
    async def tells(number: Number, flow: Flow) -> None:
        flow.publish(topic, number, trace="child")
        if flow.attempt == 1:
            raise ValueError("not yet")

    async def work(t: Stages) -> None:
        await t.send(tells, Number(4), trace="parent")
        await t.wait_until_ended()
        assert received == ["4 parent|child shop tells"]

    run(app, work)


def test_a_subscriber_asks_and_sends_as_any_stage() -> None:
    app = Service("shop")
    topic = app.topic("prices", Number)
    received: list[int] = []

    @app.terminator("take", Number)
    async def take(number: Number) -> None:
        received.append(number.n)

    @app.single("double", Number, Number)
    async def double(number: Number) -> Number:
        return Number(2 * number.n)

    @app.subscriber(topic)
    async def listen(number: Number, flow: Flow) -> None:
        flow.send(double, number, reply_to=take)

    async def work(t: Stages) -> None:
        await t.publish(topic, Number(4))
        await t.wait_until_ended()
        assert received == [8]

    run(app, work)


@pytest.mark.parametrize("attempts", [None, 2, 9])
@pytest.mark.parametrize("is_async", [True, False])
def test_message_that_a_subscriber_gives_up_is_dropped_and_the_next_is_delivered(
    attempts: int | None, is_async: bool
) -> None:
    app = Service("shop", attempts=attempts)
    topic = app.topic("prices", Number)
    seen: list[int] = []
    received: list[int] = []

    def plain(number: Number, flow: Flow) -> None:
        if number.n == 0:
            seen.append(flow.attempt)
            raise ValueError("no")
        received.append(number.n)

    async def asynchronous(number: Number, flow: Flow) -> None:
        plain(number, flow)

    app.subscriber(topic)(asynchronous if is_async else plain)

    async def work(t: Stages) -> None:
        await t.publish(topic, Number(0))
        for _ in range(100):
            await t.wait_until_ended()
            if len(seen) == (attempts or 7):
                break
            await t.advance(seconds=2)
        for _ in range(5):
            await t.advance(seconds=10)
            await t.wait_until_ended()
        assert seen == list(range(1, (attempts or 7) + 1))
        await t.publish(topic, Number(2))
        await until(lambda: received == [2])

    run(app, work)


def test_message_that_a_subscriber_rejects_or_cannot_read_is_dropped_at_once(caplog: pytest.LogCaptureFixture) -> None:
    app = Service("shop")
    topic = app.topic("prices", Number)
    seen: list[int] = []

    @app.subscriber(topic)
    async def listen(number: Number, flow: Flow) -> None:
        seen.append(flow.attempt)
        raise Reject("not this one")

    async def work(t: Stages) -> None:
        async with truenext.connect(t.broker.url) as connection:
            await connection.send("/topic/prices", "plain text")
        await t.publish(topic, Number(0))
        await until(lambda: len(refusals()) == 2)
        for _ in range(5):
            await t.advance(seconds=10)
            await t.wait_until_ended()
        assert (len(refusals()), seen) == (2, [1])

    def refusals() -> list[str]:
        return [each.message for each in caplog.records if each.message == "a stage has rejected its message"]

    run(app, work)


def test_message_whose_subscriber_sends_too_much_is_dropped_after_its_attempts() -> None:
    app = Service("shop", attempts=2)
    topic = app.topic("prices", Number)
    ran: list[int] = []

    @app.terminator("take", Text)
    async def take(text: Text) -> None: ...

    @app.subscriber(topic)
    async def listen(number: Number, flow: Flow) -> None:
        ran.append(number.n)
        for _ in range(number.n):
            flow.send(take, Text("x" * 9_000_000))

    async def work(t: Stages) -> None:
        await t.publish(topic, Number(2))
        await until(lambda: len(ran) == 3)
        await t.publish(topic, Number(0))
        await until(lambda: 0 in ran)
        # The first time the broker refuses the commit, which counts no attempt.
        assert ran == [2, 2, 2, 0]
        assert not (await t.broker.queue("take")).messages

    run(app, work)


def test_a_subscriber_is_checked_as_any_stage() -> None:
    app = Service("shop")
    topic = app.topic("prices", Number)

    async def wrong(text: str) -> None: ...

    async def replies(number: Number) -> Number:
        return number

    with pytest.raises(DefinitionError, match=r"wrong.*takes Number.*cannot take str"):
        app.subscriber(topic)(wrong)
    with pytest.raises(DefinitionError, match=r"replies.*returns Number, but the endpoint replies nothing"):
        app.subscriber(topic)(replies)


def test_a_reply_to_a_topic_reaches_all_that_listen() -> None:
    app = Service("shop")
    topic = app.topic("replies", Number)
    received: list[int] = []
    endpoints: list[Endpoint[Number, Number]] = []

    @app.single("double", Number, Number)
    async def double(number: Number) -> Number:
        return Number(2 * number.n)

    endpoints.append(double)

    @app.subscriber(topic)
    async def first(number: Number) -> None:
        received.append(number.n)

    @app.subscriber(topic)
    async def second(number: Number) -> None:
        received.append(number.n)

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            initiation.send(double, Number(3), trace="t", reply_to=topic)
        await t.wait_until_ended()
        assert received == [6, 6]

    run(app, work)


def test_subscribers_of_one_topic_send_messages_with_different_ids() -> None:
    """Otherwise a consumer that skips repeats would skip the message of the second subscriber."""
    app = Service("shop")
    topic = app.topic("prices", Number)
    received: list[str] = []

    @app.terminator("take", Number)
    async def take(number: Number, flow: Flow) -> None:
        received.append(flow.message_id)

    @app.subscriber(topic)
    async def first(number: Number, flow: Flow) -> None:
        flow.send(take, number)

    @app.subscriber(topic)
    async def second(number: Number, flow: Flow) -> None:
        flow.send(take, number)

    async def work(t: Stages) -> None:
        await t.publish(topic, Number(1))
        await t.wait_until_ended()
        assert len(received) == len(set(received)) == 2

    run(app, work)


def test_subscriber_sends_messages_with_different_ids_in_two_processes() -> None:
    async def main() -> set[str]:
        ids = set()
        async with local_broker() as broker:
            publisher = Service("publisher", broker=broker.url)
            async with contextlib.AsyncExitStack() as stack:
                received: list[str] = []
                for _ in range(2):
                    # As in two processes: two services of one name, each with its own run.
                    app = Service("shop", broker=broker.url)
                    topic = app.topic("prices", Number)
                    take = app.remote("take", Number)

                    @app.subscriber(topic)
                    async def listen(number: Number, flow: Flow, *, take: Any = take) -> None:
                        received.append(flow.send(take, number))

                    await stack.enter_async_context(app.running())
                async with publisher.connected():
                    await publisher.publish(publisher.topic("prices", Number), Number(1), trace="t")
                    await until(lambda: len(received) == 2)
                ids |= set(received)
        return ids

    assert len(asyncio.run(main())) == 2
