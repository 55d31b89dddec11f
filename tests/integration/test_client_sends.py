"""Tests of sends of a client: refused, after a refused one, on a full disk, too late, too many at once.

Source of what is expected: docs/client.md, "Send".
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from socket import socket
from unittest.mock import patch

import pytest

from tests.integration.client_here import on_a_connection
from tests.integration.test_client_handlers import until
from truenext import testing
from truenext.client.core import send_buffer
from truenext.client.core.send_options import SendOptions
from truenext.client.core.subscriptions import ConsumerOptions
from truenext.client.tasks.connection import Connection, Message, Session, connect
from truenext.errors import ClosedError, Code, Refused, RolledBack
from truenext.model.limits import BODY_BYTES_MAX, TRANSACTIONS_MAX
from truenext.model.url import Address
from truenext.testing.local import LocalBroker
from truenext.tls import TlsSocket

PATIENCE_S = 60.0
NOWHERE = "/queue/"
"""Destination that each broker refuses."""


async def bodies(broker: LocalBroker, queue: str) -> list[str]:
    return [body.decode() for body in (await broker.queue(queue)).bodies]


def test_send_many_takes_whatever_can_be_iterated() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async def asynchronously() -> AsyncIterator[str]:
            for number in range(3):
                await asyncio.sleep(0)
                yield str(number)

        assert await connection.send_many("/queue/q", asynchronously()) == 3
        assert await connection.send_many("/queue/q", (str(number) for number in range(3, 5))) == 2
        with pytest.raises(TypeError, match="not iterable"):
            await connection.send_many("/queue/q", 5)  # type: ignore[arg-type]
        assert await bodies(broker, "q") == list("01234")

    on_a_connection(work)


# ---- Refused ----


def test_a_refused_message_raises_in_its_send_and_its_neighbours_arrive_in_order() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        def send(number: int) -> Awaitable[None]:
            return connection.send(NOWHERE if number % 3 == 1 else "/queue/q", f"{number}", timeout=PATIENCE_S)

        results = await asyncio.gather(*map(send, range(20)), return_exceptions=True)
        assert [index for index, result in enumerate(results) if isinstance(result, Refused)] == list(range(1, 20, 3))
        assert all(result is None or isinstance(result, Refused) for result in results)
        assert await bodies(broker, "q") == [str(number) for number in range(20) if number % 3 != 1]

    on_a_connection(work)


@pytest.mark.parametrize(
    "options",
    [
        {"headers": {"long": "x" * 70_000}},
        {"headers": {f"{number}": "" for number in range(200)}},
        {"headers": {"": "no name"}},
        {"headers": {"a": "NUL \0"}},
        {"headers": {"a": "half a character \ud800"}},
        {"correlation_id": "\0"},
        {"producer": "\0", "number": 1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_no_frame_can_hold_raise_and_end_no_connection(options: SendOptions) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True) as session:
            for sends in (connection.send, session.send, connection.request):
                with pytest.raises(ValueError):
                    await sends("/queue/q", "1", timeout=PATIENCE_S, **options)
            await session.commit()
        await connection.send("/queue/q", "2", timeout=PATIENCE_S)
        assert await bodies(broker, "q") == ["2"]
        assert connection.health().reconnects == 0

    on_a_connection(work)


def test_a_body_that_is_too_large_raises_in_its_send() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        with pytest.raises(ValueError, match="too large"):
            await connection.send("/queue/q", bytes(BODY_BYTES_MAX + 1))
        await connection.send("/queue/q", bytes(BODY_BYTES_MAX))
        assert connection.health().reconnects == 0

    on_a_connection(work)


@pytest.mark.parametrize(
    "options",
    [{"selector": "\0"}, {"durable": "\0"}, {"headers": {"": "x"}}, {"headers": {"x": "x" * 70_000}}],
    ids=lambda options: next(iter(options)),
)
def test_a_consumer_with_options_that_no_frame_can_hold_is_refused_and_ends_no_connection(
    options: ConsumerOptions,
) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        with pytest.raises(ValueError):
            await connection.consumer("/topic/t", **options)
        with pytest.raises(ValueError):
            await anext(aiter(connection.browse("/queue/\0")))
        with pytest.raises(ValueError):
            await connection.control_request("\0")
        with pytest.raises(ValueError):
            await connection.unsubscribe("\0")
        assert connection.health().reconnects == 0

    on_a_connection(work)


@pytest.mark.parametrize("name", ["user", "password", "client_id"])
def test_connect_refuses_line_feeds_in_login_headers(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        connect(**{name: "a\nclient-id:b"})  # type: ignore[arg-type]


def test_a_refused_send_with_its_callers_own_number_holds_up_no_later_send() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        results = await asyncio.gather(
            connection.send(NOWHERE, "1", producer="p", number=1, timeout=PATIENCE_S),
            connection.send("/queue/q", "2", timeout=PATIENCE_S),
            connection.send("/queue/q", "3", producer="p", number=2, timeout=PATIENCE_S),
            return_exceptions=True,
        )
        assert isinstance(results[0], Refused) and results[1] is results[2] is None, results
        await connection.send("/queue/q", "4", timeout=PATIENCE_S)
        assert await bodies(broker, "q") == ["2", "3", "4"]

    on_a_connection(work)


def test_sends_that_the_caller_numbers_are_accepted_once_among_other_sends() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        for _ in range(2):
            for number in range(1, 4):
                await connection.send("/queue/q", f"mine {number}", producer="p", number=number)
                await connection.send("/queue/other", "x")
        assert await bodies(broker, "q") == ["mine 1", "mine 2", "mine 3"]
        assert len(await bodies(broker, "other")) == 6

    on_a_connection(work)


# ---- A full disk ----


def test_senders_wait_for_a_full_disk_and_their_messages_arrive_in_order() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send("/queue/full", "held")
        async with connection.consumer("/queue/full", ack="individual", prefetch=1) as consumer:
            held = await consumer.receive(PATIENCE_S)
            assert held is not None
            broker.fill_disk()
            sending = [
                asyncio.create_task(connection.send("/queue/q", f"{number}", timeout=PATIENCE_S))
                for number in range(50)
            ]
            await asyncio.sleep(0.4)
            assert not any(task.done() for task in sending)
            # The consumer of the same connection goes on.
            await held.nack()
            again = await consumer.receive(PATIENCE_S)
            assert again is not None and again.attempts == 1
            await again.ack()
            broker.free_disk()
            await asyncio.gather(*sending)
        assert await bodies(broker, "q") == [str(number) for number in range(50)]
        assert await bodies(broker, "full") == []
        assert connection.health().reconnects == 0

    on_a_connection(work)


def test_a_send_is_confirmed_though_the_next_one_was_cancelled_before_both_were_written() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        buffer = connection._driver.client.send_buffer
        async with connection.consumer("/queue/other"):
            broker.fill_disk()
            first = asyncio.create_task(connection.send("/queue/q", "1", timeout=PATIENCE_S))
            second = asyncio.create_task(connection.send("/queue/q", "2", timeout=PATIENCE_S))
            # Both were refused, and wait to be written again.
            await until(lambda: buffer._is_backing_off and not buffer._in_flight_count)
            second.cancel()
            broker.free_disk()
            await first
        assert second.cancelled()
        assert await bodies(broker, "q") == ["1"]

    with patch.object(send_buffer, "NO_SPACE_RETRY_S", 1.0):
        on_a_connection(work)


def test_a_transaction_on_a_full_disk_is_rolled_back_and_counts_no_attempt() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send("/queue/q", "work")
        async with connection.session(transacted=True) as session, session.consumer("/queue/q"):
            broker.fill_disk()
            with pytest.raises(RolledBack):
                async with session.transaction(timeout=PATIENCE_S):
                    assert await session.receive(PATIENCE_S)
                    await session.send("/queue/done", "result")
            broker.free_disk()
            async with session.transaction(timeout=PATIENCE_S):
                again = await session.receive(PATIENCE_S)
                assert again is not None and again.attempts == 0
                await session.send("/queue/done", "result")
        assert await bodies(broker, "done") == ["result"]
        assert await bodies(broker, "q") == []

    on_a_connection(work)


@pytest.mark.parametrize("messages, size", [(2, 1 << 20), (2000, 1000)])
def test_a_client_that_only_sends_keeps_its_connection_while_the_disk_is_full(messages: int, size: int) -> None:
    """Regression: the client sent an empty transaction for its receipt; the refusal of BEGIN for lack of space ended
    the connection, three times a second."""

    async def work(broker: LocalBroker, connection: Connection) -> None:
        broker.fill_disk()
        sending = [
            asyncio.create_task(connection.send("/queue/q", b"x" * size, timeout=PATIENCE_S)) for _ in range(messages)
        ]
        await asyncio.sleep(1.0)
        broker.free_disk()
        await asyncio.gather(*sending)
        assert (await broker.queue("q")).waiting == messages
        assert connection.health().reconnects == 0

    on_a_connection(work)


@pytest.mark.parametrize("how", ["commits", "raises at once", "raises"])
def test_transactions_that_only_send_keep_their_connection_while_the_disk_is_full(how: str) -> None:
    """Regression: BEGIN was refused, and so was the ABORT of the transaction that had not begun."""

    async def work(broker: LocalBroker, connection: Connection) -> None:
        broker.fill_disk()
        async with connection.session(transacted=True) as session:
            for _ in range(5):
                with pytest.raises((RolledBack, InterruptedError)) as caught:
                    async with session.transaction(timeout=PATIENCE_S):
                        await session.send("/queue/q", "x")
                        if how == "raises":
                            await asyncio.sleep(0.05)
                        if how != "commits":
                            raise InterruptedError
                if how == "commits":
                    cause = caught.value.__cause__
                    assert isinstance(cause, Refused) and cause.code == Code.NO_SPACE
            # The broker reads what was said while the disk is full.
            await asyncio.sleep(0.1)
            broker.free_disk()
            async with session.transaction(timeout=PATIENCE_S):
                await session.send("/queue/q", "y")
        assert await bodies(broker, "q") == ["y"]
        assert connection.health().reconnects == 0

    on_a_connection(work)


def test_a_send_before_a_refused_one_is_confirmed_though_the_disk_is_full_meanwhile() -> None:
    """The client asks for its receipt with an empty transaction, which is refused for lack of space."""

    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send("/queue/q", "x")
        broker.fill_disk()
        before = connection.send_nowait("/temp-queue/t", "x")
        refused = connection.send_nowait(NOWHERE, "x")
        with pytest.raises(Refused):
            await refused
        await asyncio.sleep(0.1)
        broker.free_disk()
        async with asyncio.timeout(PATIENCE_S):
            await before
        assert connection.health().reconnects == 0

    on_a_connection(work)


def test_a_client_that_begins_too_many_transactions_keeps_its_connection() -> None:
    """Regression: BEGIN was refused, and then the ABORT that was to release its message."""

    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send("/queue/q", "x")
        async with AsyncExitStack() as stack:
            for _ in range(TRANSACTIONS_MAX):
                session = await stack.enter_async_context(connection.session(transacted=True))
                await session.send("/queue/other", "x")
            session = await stack.enter_async_context(connection.session(transacted=True))
            async with session.consumer("/queue/q"):
                with pytest.raises(RolledBack) as caught:
                    async with session.transaction():
                        assert await session.receive(PATIENCE_S)
                        await asyncio.sleep(0.1)
                cause = caught.value.__cause__
                assert isinstance(cause, Refused) and cause.code == Code.LIMIT
            await connection.send("/queue/other", "y")
            assert connection.health().reconnects == 0
        assert await bodies(broker, "q") == ["x"]

    on_a_connection(work)


def test_a_handler_is_not_called_again_and_again_while_the_disk_is_full() -> None:
    """Regression: the answer to the COMMIT said only that a frame had been refused before, and the handler ran 3,000
    times a second."""

    async def work(broker: LocalBroker, connection: Connection) -> None:
        calls = 0

        async def handler(message: Message, session: Session) -> None:
            nonlocal calls
            calls += 1
            assert message.attempts == 0
            await session.send("/queue/done", message.body)

        await connection.send("/queue/q", "work")
        broker.fill_disk()
        consuming = asyncio.create_task(connection.consume("/queue/q", handler, transacted=True))
        await asyncio.sleep(1.0)
        assert 1 <= calls <= 6
        broker.free_disk()
        while not await bodies(broker, "done"):
            await asyncio.sleep(0.01)
        consuming.cancel()
        await asyncio.wait([consuming])

    on_a_connection(work)


def test_the_cause_of_a_rollback_is_known_though_the_commit_was_sent_already() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True) as session:
            with pytest.raises(RolledBack) as caught:
                async with session.transaction(timeout=PATIENCE_S):
                    await session.send(NOWHERE, "x")
        cause = caught.value.__cause__
        assert isinstance(cause, Refused) and cause.code == Code.DESTINATION

    on_a_connection(work)


# ---- Too late, too much ----


def test_the_time_to_live_counts_from_the_call() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.consumer("/queue/other"):
            broker.fill_disk()
            short = asyncio.create_task(connection.send("/queue/q", "short", ttl=0.2, timeout=PATIENCE_S))
            long = asyncio.create_task(connection.send("/queue/q", "long", ttl=60.0, timeout=PATIENCE_S))
            await asyncio.sleep(0.4)
            broker.free_disk()
            await long
            with pytest.raises(TimeoutError, match="ttl of the message was over"):
                await short
        (message,) = (await broker.queue("q")).messages
        lives_ms = int(message.headers["expires"]) - int(message.headers["timestamp"])
        assert message.body == b"long" and 50_000 < lives_ms < 59_800

    on_a_connection(work)


def test_senders_wait_while_too_much_is_unconfirmed_and_send_nowait_raises() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        with patch.object(send_buffer, "UNCONFIRMED_MESSAGES_MAX", 10):
            broker.slow_disk(1000)
            for number in range(10):
                connection.send_nowait("/queue/q", f"{number}")
            with pytest.raises(BlockingIOError):
                connection.send_nowait("/queue/q", "too much")
            with pytest.raises(TimeoutError):
                await connection.send("/queue/q", "too late", timeout=0.05)
            waits = [asyncio.create_task(connection.send("/queue/q", f"{number}")) for number in range(10, 30)]
            await asyncio.sleep(0.05)
            assert connection.health().unconfirmed == 10
            broker.slow_disk(0)
            await asyncio.gather(*waits, connection.flush(timeout=PATIENCE_S))
        assert await bodies(broker, "q") == [str(number) for number in range(30)]

    on_a_connection(work)


def test_sends_beyond_the_byte_limit_wait_and_a_single_larger_message_goes_alone() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        with patch.object(send_buffer, "UNCONFIRMED_BYTES_MAX", 1000):
            await connection.send("/queue/q", "x" * 5000, timeout=PATIENCE_S)
            await connection.send_many("/queue/q", ["x" * 600] * 20, timeout=PATIENCE_S)
        assert len(await bodies(broker, "q")) == 21

    on_a_connection(work)


# ---- Flush ----


def test_a_refused_send_raises_in_each_flush_that_waits() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        for number in range(20):
            connection.send_nowait("/queue/q", f"{number}")
        await asyncio.gather(*(connection.flush(timeout=PATIENCE_S) for _ in range(3)))
        refused = connection.send_nowait(NOWHERE, "")
        results = await asyncio.gather(
            *(connection.flush(timeout=PATIENCE_S) for _ in range(3)), return_exceptions=True
        )
        assert [type(result) for result in results] == [Refused] * 3
        with pytest.raises(Refused):
            await refused
        await connection.flush()

    on_a_connection(work)


def test_a_refusal_after_a_flush_that_timed_out_raises_in_the_next_flush() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        broker.slow_disk(1000)
        connection.send_nowait("/queue/q", "1")
        with pytest.raises(TimeoutError):
            await connection.flush(timeout=0.05)
        connection.send_nowait(NOWHERE, "2")
        await asyncio.sleep(0.05)
        broker.slow_disk(0)
        with pytest.raises(Refused):
            await connection.flush(timeout=PATIENCE_S)

    on_a_connection(work)


def test_close_ends_waiting_sends_and_flushes_and_refuses_new_ones() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        broker.slow_disk(1000)
        sent = connection.send_nowait("/queue/q", "1")
        sending = asyncio.create_task(connection.send("/queue/q", "2"))
        flushing = asyncio.create_task(connection.flush())
        await asyncio.sleep(0.05)
        await connection.close(timeout=0.05)
        for waiting in (sending, flushing, sent):
            with pytest.raises(ClosedError):
                await waiting
        with pytest.raises(ClosedError):
            connection.send_nowait("/queue/q", "3")
        with contextlib.suppress(ClosedError):
            await connection.send("/queue/q", "4")

    on_a_connection(work)


def test_the_time_to_live_of_a_send_in_a_transaction_and_of_a_request_counts_from_the_call() -> None:
    """Regression: it counted from the moment of the connection instead."""

    async def test() -> None:
        async with (
            testing.broker() as broker,
            connect(broker.url) as connection,
            connection.session(transacted=True) as session,
        ):
            may_send = asyncio.Event()
            connect_now = connection._driver._connect

            async def connect_later(address: Address) -> socket | TlsSocket:
                await may_send.wait()
                return await connect_now(address)

            with patch.object(connection._driver, "_connect", connect_later):
                broker.drop()
                await asyncio.sleep(0.1)
                late = asyncio.create_task(session.send("/queue/q", "late", ttl=0.3, timeout=PATIENCE_S))
                request = asyncio.create_task(connection.request("/queue/q", "asked", ttl=0.3, timeout=PATIENCE_S))
                await asyncio.sleep(0.5)
                may_send.set()
                for each in (late, request):
                    with pytest.raises(TimeoutError, match="ttl of the message was over"):
                        await each

    asyncio.run(test())


# ---- Headers ----


@pytest.mark.parametrize("transacted", [True, False])
def test_message_may_have_110_headers_of_the_program_and_not_111(transacted: bool) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        headers = {f"name-{number}": "x" for number in range(110)}
        async with connection.session(transacted=transacted) as session:
            await session.send("/queue/q", "1", headers=headers)
            # Its time to live is no header of the caller's; each other option here is.
            await session.send("/queue/q", "2", headers=dict(list(headers.items())[:109]), priority=9, ttl=60)
            more = {**headers, "one": "more"}
            others: list[SendOptions] = [{"headers": more}, {"headers": more, "persistent": False, "group": "g"}]
            for options in others:
                with pytest.raises(ValueError, match="113 headers are too many"):
                    await session.send("/queue/q", "3", **options)
            # A transient message has one header less.
            await session.send("/queue/q", "4", headers=more, persistent=False)
            if transacted:
                await session.commit()
        found = {shown.text: shown async for shown in connection.browse("/queue/q")}
        assert sorted(found) == ["1", "2", "4"]
        assert len([name for name in found["1"].application_headers if name.startswith("name-")]) == 110
        assert found["4"].application_headers["one"] == "more"

    on_a_connection(work)
