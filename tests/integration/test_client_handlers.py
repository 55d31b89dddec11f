"""Tests of handlers: their rights, and the fate of their message and of the others.

Source of what is expected: docs/client.md, "Handlers", "Order and prefetch".
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from unittest.mock import patch

import pytest

from tests.integration.client_here import on_a_connection, remaining
from truenext import testing
from truenext.client.core import reconciler
from truenext.client.tasks.connection import Connection, Message, Session, connect
from truenext.errors import ClosedError, ConnectionLost
from truenext.testing.local import LocalBroker

PATIENCE_S = 60.0
Handler = Callable[[Message, Session], Awaitable[None]]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)


async def stopped(consuming: "asyncio.Task[None]") -> None:
    consuming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consuming


# ---- Cancelled ----


@pytest.mark.parametrize("transacted", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1, 10, None])
def test_a_first_cancellation_waits_for_the_handlers_that_run(transacted: bool, prefetch: int | None) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send_many("/queue/q", [f"{number}" for number in range(6)])
        started: list[str] = []
        ended: list[str] = []
        may_continue = asyncio.Event()

        async def handle(message: Message, session: Session) -> None:
            started.append(message.text)
            await may_continue.wait()
            await session.send("/queue/done", message.body)
            ended.append(message.text)

        consuming = asyncio.create_task(
            connection.consume("/queue/q", handle, transacted=transacted, concurrency=3, prefetch=prefetch)
        )
        others = asyncio.create_task(connection.consume("/queue/none", handle, concurrency=2))
        await until(lambda: len(started) == (1 if prefetch == 1 and not transacted else 3))
        consuming.cancel()
        others.cancel()
        await until(others.done)
        await asyncio.sleep(0.05)
        assert not consuming.done() and others.cancelled()
        may_continue.set()
        with pytest.raises(asyncio.CancelledError):
            await consuming
        assert sorted(ended) == sorted(started)
        assert [body for body, _ in await remaining(broker)] == [
            f"{each}" for each in range(6) if f"{each}" not in started
        ]
        assert {attempts for _, attempts in await remaining(broker)} == {0}
        assert sorted(body for body, _ in await remaining(broker, "done")) == sorted(started)

    on_a_connection(work)


@pytest.mark.parametrize("transacted", [False, True])
def test_a_second_cancellation_ends_the_handlers_and_counts_no_attempt(transacted: bool) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send_many("/queue/q", ["0", "1", "2"])
        started: list[str] = []
        cancelled: list[str] = []

        async def handle(message: Message, session: Session) -> None:
            started.append(message.text)
            await session.send("/queue/done", message.body)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(message.text)
                raise

        consuming = asyncio.create_task(connection.consume("/queue/q", handle, transacted=transacted, concurrency=2))
        await until(lambda: len(started) == 2)
        consuming.cancel()
        await asyncio.sleep(0.02)
        assert not cancelled
        await stopped(consuming)
        assert sorted(cancelled) == ["0", "1"]
        assert await remaining(broker) == [("0", 0), ("1", 0), ("2", 0)]
        if transacted:
            assert await remaining(broker, "done") == []
        assert not connection.health().consumers

    on_a_connection(work)


def test_a_handler_that_raises_cancelled_error_releases_its_message_and_the_next_follow() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send_many("/queue/q", ["0", "1"])
        seen: list[tuple[str, int]] = []

        async def handle(message: Message, session: Session) -> None:
            seen.append((message.text, message.attempts))
            if len(seen) == 1:
                other = asyncio.create_task(asyncio.sleep(60))
                other.cancel()
                await other

        consuming = asyncio.create_task(connection.consume("/queue/q", handle))
        await until(lambda: len(seen) == 3)
        assert seen == [("0", 0), ("0", 0), ("1", 0)]
        await stopped(consuming)
        assert await remaining(broker) == []

    on_a_connection(work)


# ---- Ended from inside ----


@pytest.mark.parametrize("transacted", [False, True])
def test_a_handler_that_closes_its_session_ends_its_consume_and_no_other_handler(transacted: bool) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send_many("/queue/q", ["closes", "goes on", "waits"])
        may_continue = asyncio.Event()
        started: list[str] = []

        async def handle(message: Message, session: Session) -> None:
            started.append(message.text)
            await session.send("/queue/done", message.body)
            if message.text == "closes":
                await until(lambda: len(started) == 2)
                await session.close()
                with pytest.raises(ClosedError):
                    await session.receive()
                may_continue.set()
            await may_continue.wait()

        await asyncio.wait_for(connection.consume("/queue/q", handle, transacted=transacted, concurrency=2), PATIENCE_S)
        assert await remaining(broker) == [("closes", 0), ("waits", 0)]
        if transacted:
            assert await remaining(broker, "done") == [("goes on", 0)]
        await connection.send("/queue/q", "usable")

    on_a_connection(work)


@pytest.mark.parametrize("transacted", [False, True])
def test_a_handler_may_close_the_connection(transacted: bool) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connect(broker.url) as other:
            await connection.send_many("/queue/q", ["closes", "goes on", "waits"])
            started: list[str] = []
            ended: list[str] = []

            async def handle(message: Message, session: Session) -> None:
                started.append(message.text)
                if message.text == "closes":
                    await until(lambda: len(started) == 2)
                    await message.ack() if not transacted else await session.commit()
                    await other.close(timeout=PATIENCE_S)
                await asyncio.sleep(0.1)
                ended.append(message.text)

            await asyncio.wait_for(other.consume("/queue/q", handle, transacted=transacted, concurrency=2), PATIENCE_S)
            assert sorted(ended) == ["closes", "goes on"]
            assert await remaining(broker) == [("waits", 0)]

    on_a_connection(work)


def test_a_handler_may_commit_and_roll_back_as_often_as_it_wants() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send_many("/queue/q", ["0", "1"])
        seen: list[tuple[str, int]] = []

        async def handle(message: Message, session: Session) -> None:
            seen.append((message.text, message.attempts))
            await session.send("/queue/done", "not this")
            if len(seen) == 1:
                await session.rollback()
                await session.send("/queue/done", "this")
            else:
                await session.rollback(failed=False) if len(seen) == 2 else await session.commit()
                async with session.transaction():
                    await session.send("/queue/done", "and this")

        consuming = asyncio.create_task(connection.consume("/queue/q", handle, transacted=True))
        await until(lambda: len(seen) == 4)
        await stopped(consuming)
        assert seen == [("0", 0), ("0", 1), ("0", 1), ("1", 0)]
        assert await remaining(broker) == []
        done = [body for body, _ in await remaining(broker, "done")]
        assert done == ["this", "and this", "not this", "and this", "not this", "and this"]

    on_a_connection(work)


class Odd(BaseException):
    pass


@pytest.mark.parametrize("transacted", [False, True])
def test_an_exception_that_is_no_error_ends_consume_and_is_raised(transacted: bool) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send_many("/queue/q", ["0", "1", "2"])
        ended: list[str] = []

        async def handle(message: Message, session: Session) -> None:
            if message.text == "1":
                raise Odd
            await asyncio.sleep(0.05)
            ended.append(message.text)

        with pytest.raises(Odd):
            await asyncio.wait_for(
                connection.consume("/queue/q", handle, transacted=transacted, concurrency=2), PATIENCE_S
            )
        assert ended == ["0"]
        assert await remaining(broker) == [("1", 0), ("2", 0)]

    on_a_connection(work)


# ---- Several at once ----


def test_messages_of_a_group_are_handled_one_at_a_time() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        for number in range(120):
            connection.send_nowait("/queue/q", f"{number}", group=f"group {number % 5}")
        await connection.flush()
        running: set[str] = set()
        most = 0
        seen: dict[str, list[int]] = {}

        async def handle(message: Message, session: Session) -> None:
            nonlocal most
            assert message.group not in running
            running.add(message.group)
            most = max(most, len(running))
            await asyncio.sleep(0.001)
            running.discard(message.group)
            seen.setdefault(message.group, []).append(int(message.text))

        with patch("logging.Logger.warning") as warned:
            consuming = asyncio.create_task(connection.consume("/queue/q", handle, concurrency=8))
            await until(lambda: sum(map(len, seen.values())) == 120)
        await stopped(consuming)
        assert not warned.called
        assert most > 1
        assert all(numbers == sorted(numbers) for numbers in seen.values())
        assert await remaining(broker) == []

    on_a_connection(work)


def test_a_message_whose_last_attempt_was_a_lost_connection_is_handled_alone_in_its_process() -> None:
    """This includes handlers of other queues and connections: a message that ends its process takes no other along."""

    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send("/queue/q", "ends processes")
        async with connect(broker.url, reconnect=False) as ended:
            received = await (await ended.consumer("/queue/q", ack="individual")).receive()
            assert received is not None
            await ended.control_request("status")  # by then the broker knows that it was begun
            broker.drop(ended)
            await broker.advance(seconds=2)
            with pytest.raises((ClosedError, ConnectionLost)):
                await ended.consumer("/queue/q")
        running: set[str] = set()
        seen: list[set[str]] = []

        async def handle(message: Message, session: Session) -> None:
            running.add(message.text)
            seen.append(set(running))
            await asyncio.sleep(0.002 * random.randint(1, 9))
            running.discard(message.text)

        other = await connect(broker.url)
        for number in range(20):
            await connection.send("/queue/q", f"q{number}", priority=9 if number < 3 else 4)
        await connection.send_many("/queue/r", [f"r{number}" for number in range(100)])
        consumings = [
            asyncio.create_task(connection.consume("/queue/q", handle, concurrency=3, transacted=True)),
            asyncio.create_task(connection.consume("/queue/r", handle, concurrency=3)),
            asyncio.create_task(other.consume("/queue/r", handle, concurrency=3)),
        ]
        await until(lambda: len(seen) == 121 and not running)
        assert [each for each in seen if "ends processes" in each] == [{"ends processes"}]
        assert max(map(len, seen)) > 3, "otherwise nothing ran beside anything"
        assert seen.index({"ends processes"}) < 60, "it waited until the others had nothing more to do"
        for consuming in consumings:
            await stopped(consuming)
        await other.close()

    on_a_connection(work)


def test_sixteen_tasks_on_one_connection_handle_each_message_once() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        seen: list[int] = []

        async def task(number: int) -> None:
            ack = "individual" if number % 2 else "auto"
            async with connection.consumer("/queue/q", ack=ack, prefetch=(0, 1, 10, None)[number % 4]) as consumer:
                while (message := await consumer.receive(0.3)) is not None:
                    seen.append(int(message.text))
                    if number % 2:
                        await message.ack()
                    await connection.send("/queue/done", message.body)

        tasks = [asyncio.create_task(task(number)) for number in range(16)]
        await connection.send_many("/queue/q", [f"{number}" for number in range(500)])
        await asyncio.gather(*tasks)
        assert sorted(seen) == list(range(500))
        assert len(await remaining(broker, "done")) == 500

    on_a_connection(work)


def test_sixteen_tasks_share_one_consumer_and_all_their_messages_are_acknowledged() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send_many("/queue/q", [f"{number}" for number in range(200)])
        seen: list[int] = []
        async with connection.consumer("/queue/q", prefetch=20) as consumer:

            async def task() -> None:
                while (message := await consumer.receive(0.2)) is not None:
                    seen.append(int(message.text))

            await asyncio.gather(*(task() for _ in range(16)))
        assert sorted(seen) == list(range(200))
        assert await remaining(broker) == []

    on_a_connection(work)


def test_an_auto_message_received_in_a_finished_task_is_acknowledged_at_the_next_receive() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send_many("/queue/q", [f"{number}" for number in range(10)])
        async with connection.consumer("/queue/q", prefetch=2) as consumer:
            for number in range(10):
                (message,) = await asyncio.gather(asyncio.create_task(consumer.receive(1)))
                assert message is not None and message.text == f"{number}"

    on_a_connection(work)


# ---- The event loop ----


def test_a_handler_that_blocks_the_loop_beyond_the_heart_beat_is_reported_and_loses_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        with testing.blocking_broker() as broker:
            async with connect(broker.url, heart_beat=0.3) as connection:
                await connection.send_many("/queue/q", ["0", "1", "2"])
                seen: list[str] = []

                async def handle(message: Message, session: Session) -> None:
                    if not seen:
                        seen.append(message.text)
                        time.sleep(2.5)
                        return
                    seen.append(message.text)

                consuming = asyncio.create_task(connection.consume("/queue/q", handle, prefetch=1))
                await until(lambda: len(seen) == 3)
                await stopped(consuming)
                assert seen == ["0", "1", "2"]
                assert connection.health().reconnects == 1
            assert broker.queue("q").bodies == []

    with caplog.at_level(logging.WARNING, "truenext.client"):
        asyncio.run(asyncio.wait_for(work(), 30))
    assert any(each.startswith("the event loop was blocked") for each in caplog.messages)
    assert any(each.startswith("connection lost") for each in caplog.messages)


def test_loop_that_is_blocked_twice_is_reported_twice_however_many_connections_it_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        with testing.blocking_broker() as broker:
            async with connect(broker.url, heart_beat=0.3), connect(broker.url, heart_beat=0.3):
                for _ in range(2):
                    time.sleep(1.6)
                    await asyncio.sleep(0.5)

    with caplog.at_level(logging.WARNING, "truenext.client"):
        asyncio.run(asyncio.wait_for(work(), 30))
    reports = [each for each in caplog.messages if each.startswith("the event loop was blocked")]
    assert len(reports) == 2
    assert all("PYTHONASYNCIODEBUG=1" in each for each in reports)


# ---- Buffers ----


def test_messages_of_a_paused_consumer_go_to_others_and_come_back() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send_many("/queue/q", [f"{number}" for number in range(10)])
        async with connection.consumer("/queue/q", prefetch=10) as first, connect(broker.url) as other:
            message = await first.receive(PATIENCE_S)
            assert message is not None and message.text == "0"
            await first.pause()
            async with other.consumer("/queue/q", prefetch=3) as second:
                assert await first.receive(0.05) is None
                for number in range(1, 4):
                    message = await second.receive(PATIENCE_S)
                    assert message is not None and message.text == f"{number}"
                await second.pause()
                await first.resume()
                for number in range(4, 10):
                    message = await first.receive(PATIENCE_S)
                    assert message is not None and message.text == f"{number}" and message.attempts == 0
        assert await remaining(broker) == []

    on_a_connection(work)


def test_a_receive_that_waits_while_it_is_paused_goes_on_when_it_is_resumed() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        for prefetch in (0, 1, 10, None):
            async with connection.consumer("/queue/q", prefetch=prefetch) as consumer:
                await consumer.pause()
                receiving = asyncio.create_task(consumer.receive(PATIENCE_S))
                await connection.send("/queue/q", "1")
                await asyncio.sleep(0.05)
                assert not receiving.done(), prefetch
                await consumer.resume()
                message = await receiving
                assert message is not None and message.text == "1", prefetch

    on_a_connection(work)


def test_an_idle_buffer_is_released_and_comes_again_with_the_next_receive() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send_many("/queue/q", [f"{number}" for number in range(10)])
        with patch.object(reconciler, "RELEASE_IDLE_INTERVAL_S", 0.1):
            async with connect(broker.url) as other, other.consumer("/queue/q", prefetch=10) as consumer:
                message = await consumer.receive(PATIENCE_S)
                assert message is not None and message.text == "0"

                async def is_returned() -> bool:
                    contents = await broker.queue("q")
                    return contents.unacknowledged == 1 and contents.waiting == 9

                async with asyncio.timeout(PATIENCE_S):
                    while not await is_returned():
                        await asyncio.sleep(0.01)
                for number in range(1, 10):
                    message = await consumer.receive(PATIENCE_S)
                    assert message is not None and message.text == f"{number}" and message.attempts == 0
        assert await remaining(broker) == []

    on_a_connection(work)


# ---- What there is at this moment ----


@pytest.mark.parametrize("prefetch", [0, 1, 10, None])
def test_receive_0_returns_a_ready_message_of_the_broker_and_none_only_without_one(prefetch: int | None) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        for number in range(300):
            connection.send_nowait("/queue/q", f"{number}", headers={"colour": "red" if number % 100 == 99 else "blue"})
        await connection.flush()
        async with connection.consumer("/queue/q", prefetch=prefetch, selector="colour = 'red'") as red:
            for number in (99, 199, 299):
                message = await red.receive(0)
                assert message is not None and message.text == f"{number}"
            assert await red.receive(0) is None
        async with connection.consumer("/queue/q", prefetch=prefetch, ack="individual") as consumer:
            first = await consumer.receive(0)
            assert first is not None and first.text == "0"
            await first.nack(delay=60)
            second = await consumer.receive(0)
            assert second is not None and second.text == "1"
            await second.ack()
            for _ in range(295):
                message = await consumer.receive(0)
                assert message is not None
                await message.ack()
            assert await consumer.receive(0) is None
            await broker.advance(seconds=61)
            message = await consumer.receive(0)
            assert message is not None and message.text == "0" and message.attempts == 1
            await message.ack()
        for number in range(4):
            await connection.send("/queue/groups", f"{number}", group="g" if number % 2 == 0 else "")
        async with (
            connection.consumer("/queue/groups", prefetch=1, ack="individual") as owner,
            connection.consumer("/queue/groups", prefetch=prefetch, ack="individual") as consumer,
        ):
            mine = await owner.receive(PATIENCE_S)
            assert mine is not None and mine.group == "g"
            for text in ("1", "3"):
                message = await consumer.receive(0)
                assert message is not None and message.text == text
                await message.ack()
            assert await consumer.receive(0) is None

    on_a_connection(work)
