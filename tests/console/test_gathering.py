"""Tests of what is gathered for all logins."""

from __future__ import annotations

import asyncio

import pytest

import truenext
from tests.integration.broker_process import BrokerProcess
from truenext.client.core.credentials import NO_CREDENTIALS
from truenext.console.gathering import StageGathering
from truenext.console.link import Broker, Link


def test_only_the_login_that_gathers_consumes_reports(
    open_broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truenext.console.gathering.FIRST_REPORTS_S", 0.01)

    async def main() -> None:
        async with truenext.connect(open_broker.url) as anna, truenext.connect(open_broker.url) as otto:
            broker, gathering = Broker((open_broker.url,), NO_CREDENTIALS), StageGathering()
            for connection in (anna, otto, anna):
                await gathering._gather(Link(broker, connection, "user"))
                counts = [len(each.health().consumers) for each in (anna, otto)]
                assert counts == ([1, 0] if connection is anna else [0, 1])

    asyncio.run(main())


def test_page_does_not_wait_for_ever_for_others_that_read_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truenext.console.link.BROWSE_WAIT_S", 0.01)

    async def main() -> None:
        broker = Broker(("stomp://127.0.0.1:1",), NO_CREDENTIALS)
        broker.browses = asyncio.Semaphore(0)
        with pytest.raises(TimeoutError):
            await Link(broker, None, None).browse(
                "/queue/a", count=1, after=None, selector=None, bytes_max=1, body_max=None
            )

    asyncio.run(main())
