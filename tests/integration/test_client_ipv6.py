"""Tests that clients connect to IPv6 addresses, and show them in brackets."""

import asyncio
import logging
import socket

import pytest

from tests.integration.broker_here import broker_here
from truenext import blocking
from truenext.client.tasks.connection import connect
from truenext.errors import ConfigurationError, ConnectionLost
from truenext.model.url import parse_url


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no ::1")
def test_client_connects_to_an_ipv6_address_and_shows_it_in_brackets(caplog: pytest.LogCaptureFixture) -> None:
    def use(url: str) -> None:
        with blocking.connect(url) as connection:
            connection.send("/queue/q", "2")

    def expect_no_listener(url: str) -> None:
        with pytest.raises(ConnectionLost, match="no broker at") as raised:
            blocking.connect(url, reconnect=False)
        assert str(raised.value) == f"no broker at {url}: Connection refused"

    async def main() -> None:
        async with broker_here(url="stomp://[::1]:0") as listener:
            url = listener.url
            assert url.startswith("stomp://[::1]:")
            async with connect(url) as connection:
                await connection.send("/queue/q", "1")
                await asyncio.get_running_loop().run_in_executor(None, use, url)
                assert [shown.text async for shown in connection.browse("/queue/q")] == ["1", "2"]
        await asyncio.get_running_loop().run_in_executor(None, expect_no_listener, url)
        with pytest.raises(ConnectionLost) as raised:
            await connect(url, timeout=0.2)
        assert str(raised.value) == f"no broker at {url}: Connection refused"
        assert f"cannot connect to {url}: Connection refused" in caplog.messages

    with caplog.at_level(logging.WARNING, "truenext.client"):
        asyncio.run(asyncio.wait_for(main(), 60))


def test_address_has_the_url_that_it_was_parsed_from() -> None:
    for url in ("stomp://[::1]:61613", "stomp://127.0.0.1:1", "stomp://[fe80::1%lo]:7", "stomp://broker:61613"):
        assert parse_url(url).url == url
    assert parse_url("stomp://[::1]").url == "stomp://[::1]:61613"


def test_ipv6_address_without_brackets_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigurationError, match=r"is written in brackets, stomp://\[::1\]:61613"):
        parse_url("stomp://::1:61613")
