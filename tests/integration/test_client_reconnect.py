"""Tests of the errors and outcomes that a program gets from the client when its connection is lost.

Source of what is expected: docs/client.md, "Lost connections" and "Transactions".
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

import truenext.testing
from tests.integration.broken_network import Network, broken_network
from tests.integration.broker_here import broker_here
from truenext.client.tasks.connection import Connection, connect
from truenext.errors import ConnectionLost, InDoubt, Refused, RolledBack
from truenext.testing.local import LocalBroker

PATIENCE_S = 60.0


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def timed() -> None:
        await asyncio.wait_for(test(), PATIENCE_S)

    asyncio.run(timed())


@asynccontextmanager
async def before(port: int) -> AsyncIterator[tuple[Network, Connection]]:
    """Connect a client to a broker through a network that can break."""
    async with (
        broken_network(lambda: port, random.Random(0)) as network,
        connect(network.url, heart_beat=0) as connection,
    ):
        yield network, connection


async def reconnected(connection: Connection, times: int = 1) -> None:
    while connection.health().reconnects < times or connection.health().state != "connected":
        await asyncio.sleep(0.001)


async def bodies(connection: Connection, queue: str) -> list[str]:
    return [shown.text async for shown in connection.browse(queue)]


def port(broker: LocalBroker) -> int:
    return int(broker.url.rpartition(":")[2])


# ---- A COMMIT whose answer is lost ----


@pytest.mark.parametrize("when", ["before", "after"])
def test_outcome_of_a_lost_commit_is_known(when: Literal["before", "after"]) -> None:
    async def test() -> None:
        async with (
            truenext.testing.broker() as broker,
            connect(broker.url) as connection,
            connection.session(transacted=True) as session,
        ):
            await connection.send("/queue/in", "1")
            consumer = await session.consumer("/queue/in")
            broker.lose_commit(when)
            transaction = session.transaction()
            if when == "after":
                async with transaction:
                    message = await consumer.receive()
                    await session.send("/queue/out", "2")
            else:
                with pytest.raises(RolledBack):
                    async with transaction:
                        message = await consumer.receive()
                        await session.send("/queue/out", "2")
            assert transaction.outcome.value == {"after": "committed", "before": "rolled back"}[when]
            assert connection.health().reconnects == 1
            if when == "before":
                # It comes again, and nobody was charged.
                message = await consumer.receive(5)
                assert message is not None and (message.text, message.attempts) == ("1", 0)
                await session.commit()
            assert await bodies(connection, "/queue/in") == []
            assert await bodies(connection, "/queue/out") == (["2"] if when == "after" else [])

    run(test)


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_outcome_of_a_commit_in_doubt_can_be_asked_from_any_connection(when: Literal["before", "after"]) -> None:
    async def test() -> None:
        async with (
            truenext.testing.broker() as broker,
            before(port(broker)) as (network, connection),
            connect(broker.url) as other,
            connection.session(transacted=True) as session,
        ):
            await session.send("/queue/out", "1")
            broker.lose_commit(when)
            committing = asyncio.create_task(session.commit(timeout=0.5))
            while not committing.done() and connection.health().state == "connected":
                await asyncio.sleep(0)
            await network.close()
            with pytest.raises(InDoubt) as caught:
                await committing
            expected = {"before": "rolled back", "after": "committed"}[when]
            assert await other.outcome(caught.value.token) == expected
            await network.open()
            await reconnected(connection)
            assert await connection.outcome(caught.value) == expected
            # The session goes on.
            await session.send("/queue/out", "2")
            await session.commit()
            assert await bodies(other, "/queue/out") == (["1", "2"] if when == "after" else ["2"])
            async with truenext.testing.broker() as another, connect(another.url) as elsewhere:
                assert await elsewhere.outcome(caught.value.token) == "unknown"

    run(test)


def test_session_goes_on_when_another_connection_has_resolved_its_commit() -> None:
    """The broker has not got the COMMIT when it is asked.

    Regression: every later transaction was committed under its number, and refused.
    """

    async def test() -> None:
        async with (
            truenext.testing.broker() as broker,
            connect(broker.url) as connection,
            connect(broker.url) as other,
        ):
            await connection.send("/queue/in", "1")
            async with connection.session(transacted=True) as session:
                consumer = await session.consumer("/queue/in")
                await consumer.receive()
                await session.send("/queue/out", "lost")
                await session.flush()
                broker.freeze(connection)
                with pytest.raises(InDoubt) as caught:
                    await session.commit(timeout=0.1)
                assert await other.outcome(caught.value.token) == "rolled back"
                broker.thaw(connection)
                message = await consumer.receive(5)
                assert message is not None and (message.text, message.attempts) == ("1", 0)
                await session.send("/queue/out", "2")
                await session.commit()
            async with connection.session(transacted=True) as session:
                await session.send("/queue/out", "3")
                await session.commit()
            assert await bodies(other, "/queue/in") == []
            assert await bodies(other, "/queue/out") == ["2", "3"]

    run(test)


@pytest.mark.parametrize("is_abandoned", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_commit_cancelled_while_in_doubt_is_waited_for_and_left_undecided_by_a_second_cancellation(
    when: Literal["before", "after"], is_abandoned: bool
) -> None:
    async def test() -> None:
        expected = {"before": "rolled back", "after": "committed"}[when]
        async with truenext.testing.broker() as broker, connect(broker.url) as other:
            async with before(port(broker)) as (network, connection), connection.session(transacted=True) as session:
                transaction = session.transaction()

                async def block() -> None:
                    async with transaction:
                        await session.send("/queue/out", "1")
                        broker.lose_commit(when)

                task = asyncio.create_task(block())
                while connection.health().state == "connected":
                    await asyncio.sleep(0)
                await network.close()
                task.cancel()
                assert await asyncio.wait([task], timeout=0.1) == (set(), {task})
                if is_abandoned:
                    task.cancel()
                else:
                    await network.open()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert transaction.outcome.value == ("in doubt" if is_abandoned else expected)
            # The connection was left, and nobody on it asks any more.
            if is_abandoned:
                assert await other.outcome(transaction.token) == expected
            else:
                assert transaction.token == ""
            assert await bodies(other, "/queue/out") == (["1"] if when == "after" else [])

    run(test)


def test_a_commit_unknown_to_another_broker_is_in_doubt() -> None:
    async def test() -> None:
        async with truenext.testing.broker() as broker, truenext.testing.broker() as another:
            where = port(broker)
            async with (
                broken_network(lambda: where, random.Random(0)) as network,
                connect(network.url) as connection,
                connection.session(transacted=True) as session,
            ):
                await session.send("/queue/out", "1")
                where = port(another)
                broker.lose_commit("after")
                with pytest.raises(InDoubt) as caught:
                    await session.commit()
                assert await connection.outcome(caught.value) == "unknown"
                await session.send("/queue/out", "2")
                await session.commit()
                assert await bodies(connection, "/queue/out") == ["2"]

    run(test)


# ---- Several brokers ----


def test_the_next_url_is_tried_when_no_broker_is_at_the_first() -> None:
    async def test() -> None:
        async with truenext.testing.broker() as first:
            async with (
                truenext.testing.broker() as second,
                connect("stomp://127.0.0.1:1", first.url, second.url) as connection,
            ):
                await connection.send("/queue/q", "1")
                assert (await first.queue("q")).waiting == 1
            async with connect("stomp://127.0.0.1:1", second.url, first.url) as connection:
                assert await bodies(connection, "/queue/q") == ["1"]

    run(test)


def test_a_send_in_doubt_with_one_broker_is_not_repeated_to_another() -> None:
    async def test() -> None:
        async with (
            truenext.testing.broker() as broker,
            truenext.testing.broker() as another,
            connect(broker.url, another.url) as connection,
        ):
            await connection.send("/queue/q", "1")
            broker.freeze()
            sent = connection.send_nowait("/queue/q", "2")
            await asyncio.sleep(0.05)
            broker.kill()
            with pytest.raises(ConnectionLost):
                await sent
            await connection.send("/queue/q", "3")
            assert (await another.queue("q")).bodies == [b"3"]

    run(test)


# ---- Subscriptions ----


def test_a_consumer_whose_subscription_is_refused_after_a_reconnect_ends_with_the_error() -> None:
    async def test() -> None:
        async with truenext.testing.broker() as broker, before(port(broker)) as (network, connection):
            name = f"stomp://127.0.0.1:{network.port}"
            async with (
                connect(name, client_id="c", heart_beat=0) as mine,
                mine.consumer("/topic/t", durable="d") as consumer,
                mine.consumer("/queue/q", prefetch=0) as unharmed,
            ):
                await network.close()
                async with connect(broker.url, client_id="c") as thief:
                    while True:
                        try:
                            stolen = await thief.consumer("/topic/t", durable="d")
                            break
                        except Refused:
                            await asyncio.sleep(0.01)
                    receiving = asyncio.create_task(consumer.receive())
                    waiting = asyncio.create_task(unharmed.receive())
                    await network.open()
                    with pytest.raises(Refused) as caught:
                        await receiving
                    assert caught.value.code == "in-use"
                    with pytest.raises(Refused):
                        await consumer.receive()
                    await connection.send("/queue/q", "1")
                    got = await waiting
                    assert got is not None and got.text == "1"
                    assert mine.health().reconnects == 1
                    await stolen.close()

    run(test)


def test_the_first_message_of_a_topic_after_a_reconnect_may_have_missed_others() -> None:
    async def test() -> None:
        async with (
            truenext.testing.broker() as broker,
            connect(broker.url) as sender,
            connect(broker.url, client_id="c") as connection,
            connection.consumer("/topic/t") as topic,
            connection.consumer("/topic/t", durable="d") as durable,
            connection.consumer("/queue/q") as queue,
        ):
            consumers = (topic, durable, queue)

            async def send_to_all(body: str) -> list[bool]:
                await sender.send("/topic/t", body)
                await sender.send("/queue/q", body)
                got = [await consumer.receive(5) for consumer in consumers]
                return [message is not None and message.text == body and message.may_have_missed for message in got]

            assert await send_to_all("1") == [False, False, False]
            broker.drop(connection)
            await reconnected(connection)
            for consumer in consumers:
                while not consumer._subscription.is_open:
                    await asyncio.sleep(0.001)
            assert await send_to_all("2") == [True, False, False]
            assert await send_to_all("3") == [False, False, False]

    run(test)


# ---- What cannot be repeated ----


def test_a_request_and_a_browse_raise_when_the_connection_is_lost() -> None:
    async def test() -> None:
        async with truenext.testing.broker() as broker, before(port(broker)) as (network, connection):
            request = asyncio.create_task(connection.request("/queue/nobody-answers", "?"))
            await connection.send_many("/queue/q", [bytes(1000)] * 5000)
            browser = connection.browse("/queue/q")
            await anext(browser)
            network.cut()
            with pytest.raises(ConnectionLost):
                await request
            with pytest.raises(ConnectionLost):
                async for _ in browser:
                    pass
            await reconnected(connection)
            assert len(await bodies(connection, "/queue/q")) == 5000

    run(test)


def test_a_store_that_was_exported_is_another(tmp_path: Path) -> None:
    """The two data folders do not know each other's commits."""

    async def test() -> None:
        async with broker_here(tmp_path / "one") as one, connect(one.url) as connection:
            async with connection.session(transacted=True) as session:
                await session.send("/queue/out", "1")
                await session.commit()
                producer = session._source.core.require_transactions()._producer
                token = f"{producer.store_id} {producer.name} {producer.last_number}"
            assert await connection.outcome(token) == "committed"
        async with broker_here(tmp_path / "two") as two, connect(two.url) as connection:
            assert await connection.outcome(token) == "unknown"

    run(test)
