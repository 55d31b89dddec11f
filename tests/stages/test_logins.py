"""Tests of the logins of a service: each of its connections has its user and password."""

import asyncio
from pathlib import Path

import pytest

from tests.login_broker import login_broker
from truenext.errors import ConfigurationError
from truenext.stage import Service
from truenext.testing.stages import stages


@pytest.mark.parametrize("has_file", [False, True])
def test_service_with_credentials_logs_in_with_them_on_each_connection(has_file: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("secret\n")

    async def connect(url: str) -> None:
        if has_file:
            service = Service("shop", broker=url, user="shop", password_file=tmp_path / "file")
        else:
            service = Service("shop", broker=url, user="shop", password="secret")
        async with service.connected():
            pass

    with login_broker() as broker:
        asyncio.run(connect(broker.url))
    assert broker.credentials() == [("shop", "secret")] * 2


def test_service_with_a_missing_password_file_is_refused_when_it_connects(tmp_path: Path) -> None:
    async def connect() -> None:
        async with Service("shop", user="shop", password_file=tmp_path / "file").connected():
            pass

    with pytest.raises(ConfigurationError, match=r"password file '.*/file' cannot be read"):
        asyncio.run(connect())


def test_service_in_a_test_needs_no_password_file(tmp_path: Path) -> None:
    service = Service("shop", user="shop", password_file=tmp_path / "file")

    @service.terminator("order.place", str)
    async def place(order: str) -> None:
        pass

    async def run() -> None:
        async with stages(service) as t:
            await t.send(place, "a book")
            assert await t.wait_until_ended() == []

    asyncio.run(run())
