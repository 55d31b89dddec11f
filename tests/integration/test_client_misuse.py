"""Tests of mistakes that a program makes which knows the client from its docs alone: they are refused or reported,
never silent."""

import asyncio
import logging
import math
from collections.abc import Callable
from socket import socket
from typing import Any

import pytest

from truenext import testing
from truenext.client.core import flows, send_buffer
from truenext.client.tasks.connection import Connection, connect
from truenext.errors import ConnectionLost, InDoubt, LocalProtocolError, Refused, TruenextError
from truenext.model.url import Address
from truenext.testing.local import LocalBroker
from truenext.tls import TlsSocket

PATIENCE_S = 60.0


def run(test: Callable[[LocalBroker, Connection], Any]) -> None:
    async def main() -> None:
        async with testing.broker() as broker, connect(broker.url) as connection:
            await asyncio.wait_for(test(broker, connection), PATIENCE_S)

    asyncio.run(main())


def test_close_confirms_messages_of_send_nowait_over_a_reconnect() -> None:
    """Regression: the messages were dropped silently if the connection was lost for a moment."""

    async def main() -> None:
        async with testing.broker() as broker:
            async with connect(broker.url) as connection:
                broker.drop()
                for number in range(20):
                    connection.send_nowait("/queue/q", str(number))
            assert (await broker.queue("q")).bodies == [str(number).encode() for number in range(20)]

    asyncio.run(main())


def test_close_reports_refused_and_unconfirmed_sends() -> None:
    async def main() -> None:
        async with testing.broker() as broker:
            with pytest.raises(Refused, match="CRON"):
                async with connect(broker.url) as connection:
                    connection.send_nowait("/queue/q", "x", cron="no such time")
            connection = await connect(broker.url)
            broker.freeze()
            connection.send_nowait("/queue/q", "x")
            with pytest.raises(TimeoutError, match="may have arrived"):
                await connection.close(timeout=0.3)

    asyncio.run(main())


def test_an_exception_in_the_block_of_a_connection_is_not_hidden_by_unconfirmed_sends() -> None:
    async def main() -> None:
        async with testing.broker() as broker:
            with pytest.raises(ZeroDivisionError):
                async with connect(broker.url) as connection:
                    broker.freeze()
                    connection.send_nowait("/queue/q", "x")
                    raise ZeroDivisionError

    asyncio.run(main())


def test_a_block_of_a_transaction_can_be_neither_nested_nor_used_twice() -> None:
    """Regression: the inner block committed the sends of the outer one."""

    async def test(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True) as session:
            with pytest.raises(LocalProtocolError, match="another session"):
                async with session.transaction():
                    await session.send("/queue/q", "outer")
                    async with session.transaction():
                        pass
            assert (await broker.queue("q")).waiting == 0
            block = session.transaction()
            async with block:
                await session.send("/queue/q", "first")
            with pytest.raises(LocalProtocolError, match="used only once"):
                async with block:
                    pass
        assert (await broker.queue("q")).bodies == [b"first"]

    run(test)


@pytest.mark.parametrize("delay", [-1.0, -0.5, 1e300, math.nan, math.inf])
def test_an_invalid_delay_is_refused_and_ends_nothing(delay: float) -> None:
    """Regression: the broker refused the NACK, which ended the whole connection."""
    with pytest.raises(ValueError, match="delay must be 0 to"):
        flows.failed_disposition(delay)


@pytest.mark.parametrize(
    "options",
    [
        *({"priority": 7.0}, {"priority": True}, {"persistent": None}, {"persistent": "false"}, {"ttl": "1"}),
        *({"ttl": math.nan}, {"delay": None}, {"repeat": 3.0}, {"group": 1}, {"reply_to": True}, {"headers": None}),
        *({"headers": [("a", "b")]}, {"correlation_id": []}, {"closes_group": 1}, {"producer": "p", "number": "1"}),
    ],
)
def test_an_option_of_a_wrong_type_is_refused_by_name_and_spoils_no_later_send(options: dict[str, Any]) -> None:
    """Regression: a priority of 7.0 made a later one of 7 wrong, as both were the same key of a cache."""

    async def test(broker: LocalBroker, connection: Connection) -> None:
        with pytest.raises((TypeError, ValueError), match=next(iter(options)) + "|number"):
            await connection.send("/queue/q", "x", **options)
        await connection.send("/queue/q", "y", priority=7, repeat=3, period=60, persistent=True)

    run(test)


def test_send_many_refuses_a_single_text() -> None:
    async def test(broker: LocalBroker, connection: Connection) -> None:
        for text in ("abc", b"abc"):
            with pytest.raises(TypeError, match="use send for one"):
                await connection.send_many("/queue/q", text)  # type: ignore[arg-type]
        assert (await broker.queue("q")).waiting == 0

    run(test)


@pytest.mark.parametrize("timeout", [-1, math.nan, "", "1"])
def test_an_invalid_timeout_is_refused(timeout: Any) -> None:
    async def test(_: LocalBroker, connection: Connection) -> None:
        async with connection.consumer("/queue/q") as consumer:
            with pytest.raises(ValueError, match="timeout must be"):
                await consumer.receive(timeout)

    run(test)


def test_sends_that_timed_out_free_the_send_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: they filled the send buffer as long as there was no connection, though they are never sent."""
    monkeypatch.setattr(send_buffer, "UNCONFIRMED_MESSAGES_MAX", 10)

    async def test(broker: LocalBroker, connection: Connection) -> None:
        may_send = asyncio.Event()
        connect_now = connection._driver._connect

        async def connect_later(address: Address) -> socket | TlsSocket:
            await may_send.wait()
            return await connect_now(address)

        monkeypatch.setattr(connection._driver, "_connect", connect_later)
        broker.drop()
        await asyncio.sleep(0.1)
        late = [connection.send("/queue/q", "late", timeout=0.2) for _ in range(10)]
        assert all(isinstance(each, TimeoutError) for each in await asyncio.gather(*late, return_exceptions=True))
        assert connection.health().unconfirmed == 0
        may_send.set()
        connection.send_nowait("/queue/q", "in time")
        await connection.flush()
        assert (await broker.queue("q")).bodies == [b"in time"]

    run(test)


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((None,), {}, TypeError),
        ((), {"heart_beat": None}, ValueError),
        ((), {"heart_beat": math.nan}, ValueError),
        ((), {"heart_beat": math.inf}, ValueError),
        ((), {"heart_beat": -1.0}, ValueError),
        ((), {"user": 0}, TypeError),
    ],
)
def test_connect_refuses_wrong_arguments_before_it_connects(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        connect(*arguments, **options)


def test_connect_to_an_invalid_host_name_finds_no_broker() -> None:
    async def main() -> None:
        with pytest.raises(ConnectionLost, match="no broker at"):
            await connect(f"stomp://{'a' * 70}.example:1", timeout=0.5)

    asyncio.run(main())


def test_connect_says_of_a_silent_server_that_it_does_not_answer() -> None:
    async def main() -> None:
        writers: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionLost, match="listens there, but has not answered as a STOMP broker within"):
            await connect(f"stomp://127.0.0.1:{port}", timeout=0.3)
        server.close()
        # What is left to the collector of garbage warns in a test that comes later.
        for writer in writers:
            writer.close()
            await writer.wait_closed()

    asyncio.run(main())


def test_warnings_are_printed_where_logging_is_not_configured(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A command that ran in this process keeps the log for itself.
    monkeypatch.setattr(logging.getLogger("truenext.client"), "propagate", True)

    async def main() -> None:
        with pytest.raises(TruenextError):
            await connect("stomp://127.0.0.1:1", timeout=0.2)

    with caplog.at_level(logging.WARNING, "truenext.client"):
        asyncio.run(main())
    assert "cannot connect to stomp://127.0.0.1:1: Connection refused" in caplog.messages


def test_a_slow_browser_is_shown_all_messages() -> None:
    """The client does not read the browser's connection while it has more messages than it may hold."""

    async def work(broker: LocalBroker, connection: Connection) -> None:
        bodies = [str(number) for number in range(3000)]
        await connection.send_many("/queue/q", bodies)
        browser = connection.browse("/queue/q")
        first = await anext(browser)
        await asyncio.sleep(0.2)
        assert [first.text, *[content.text async for content in browser]] == bodies

    run(work)


# ---- Tokens ----


@pytest.mark.parametrize(
    "token", ["", " ", "store producer", "store producer x", "a b 1 2", "a b \u00b2", "a b 0", " b 1"]
)
def test_outcome_of_a_text_that_is_no_token_is_refused(token: str) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        with pytest.raises(ValueError, match="attribute `token` of an InDoubt"):
            await connection.outcome(token)
        with pytest.raises(TypeError, match="needs an InDoubt, or its token"):
            await connection.outcome(None)  # type: ignore[arg-type]
        # That of another broker has none.
        assert await connection.outcome(InDoubt("reason", "")) == "unknown"

    run(work)


@pytest.mark.parametrize("headers", [{5: "a"}, {"a": 5}])
def test_a_header_that_is_no_text_is_refused_with_its_name_and_value(headers: dict[Any, Any]) -> None:
    async def test(broker: LocalBroker, connection: Connection) -> None:
        with pytest.raises(TypeError, match="name and value of a header must be text"):
            await connection.send("/queue/q", "x", headers=headers)
        with pytest.raises(TypeError, match="name and value of a header must be text"):
            await connection.consumer("/queue/q", headers=headers)

    run(test)


@pytest.mark.parametrize(
    ("destination", "options"), [(None, {}), (5, {}), ("/queue/q", {"selector": 5}), ("/queue/q", {"prefetch": True})]
)
def test_a_consumer_option_of_a_wrong_type_is_refused_with_the_types_it_may_have(
    destination: Any, options: dict[str, Any]
) -> None:
    async def test(broker: LocalBroker, connection: Connection) -> None:
        with pytest.raises((TypeError, ValueError), match=r"must be text, not|must be a whole number"):
            await connection.consumer(destination, **options)

    run(test)
