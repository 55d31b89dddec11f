"""Tests of what is gathered for all logins."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import truenext
from tests.console.here import console_here
from tests.integration.broker_process import BrokerProcess
from truenext.client.core.credentials import NO_CREDENTIALS
from truenext.console import shared
from truenext.console.app import Console
from truenext.console.gathering import StageGathering
from truenext.console.link import Broker, Link
from truenext.console.logins import IDLE_S, Login
from truenext.console.rights import Rights
from truenext.console.shared import Flows, Shared
from truenext.console.work import Selection, Work
from truenext.flows.search import FoundFlows


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


# ---- Flows ----


def test_search_of_files_does_not_delay_other_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    def search(*arguments: object) -> FoundFlows:
        assert is_over.wait(10)
        return FoundFlows([], 3, [])

    monkeypatch.setattr(shared, "find_flows", search)

    async def main() -> None:
        flows = Flows([tmp_path])
        search = asyncio.create_task(flows.find("order 7"))
        await asyncio.sleep(0.01)
        try:
            async with asyncio.timeout(5):
                assert await flows.count_given_up(0) == 0
        finally:
            is_over.set()
        assert await search == ([], ["earlier flows of this trace are left out: 3"])

    asyncio.run(main())


def test_flows_are_read_again_after_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "FLOWS_S", 0.001)

    async def main() -> None:
        flows, calls = Flows([tmp_path]), asyncio.Queue[None]()
        loop = asyncio.get_running_loop()

        def read() -> bool:
            loop.call_soon_threadsafe(calls.put_nowait, None)
            raise ValueError("a fault")

        monkeypatch.setattr(flows.reader, "read", read)
        flows.start()
        async with asyncio.timeout(5):
            for _ in range(3):
                await calls.get()
        await flows.close()

    asyncio.run(main())


# ---- Tasks and logins that end ----


class _FaultyLink(Link):
    async def ask(self, *arguments: object) -> None:  # type: ignore[override]
        raise LookupError("a fault of the console")


NOWHERE = Broker(("stomp://127.0.0.1:1",), NO_CREDENTIALS)


def test_work_with_a_fault_of_the_console_has_failed() -> None:
    async def main() -> None:
        work = Work(_FaultyLink(NOWHERE, None, "otto"), Selection("purge", {"queue": "a"}), "Purge", "/", None)
        await work.finished()
        assert (work.state, work.is_over) == ("failed", True) and "see its log" in work.totals.error

    asyncio.run(main())


def test_gathering_that_has_ended_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        all = Shared(NOWHERE, (), {})
        login = Login(b"", _FaultyLink(NOWHERE, None, "otto"), 0.0)
        ended = all.gathering(login, Rights(None), lambda login: False)
        await asyncio.sleep(0.01)
        assert not ended.is_running
        other = all.gathering(login, Rights(None), lambda login: True)
        assert other is not ended and other is all.gathering(login, Rights(None), lambda login: True)
        await all.close()

    asyncio.run(main())


def test_login_without_use_ends_while_nobody_logs_in(
    open_broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    # C35.3
    monkeypatch.setattr("truenext.console.app.TIDY_S", 0.01)

    async def main() -> None:
        async with console_here(open_broker.url) as here:
            await here.opened()
            (login,) = here.console.logins.all()
            login.used_s -= IDLE_S + 1
            async with asyncio.timeout(5):
                while here.console.logins.all():
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def test_logins_end_at_once_beside_a_broker_that_does_not_answer(
    own_broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truenext.console.link.CLOSE_S", 0.3)

    async def main() -> None:
        async with console_here(own_broker.url) as here:
            console: Console = here.console
            for _ in range(20):
                link = Link(console.broker, await console.broker.connect(None, None), "user")
                console.logins.open(link)
            with own_broker.asleep():
                async with asyncio.timeout(4):
                    await console.close()

    asyncio.run(main())


def test_page_of_an_error_knows_the_user_and_has_no_links_to_what_it_may_not_see(
    own_broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with console_here(own_broker.url) as here:
            browser = await here.opened()
            (login,) = here.console.logins.all()
            await browser.page("/queues")
            login.link.user, login.link._rights = "clerk", None
            monkeypatch.setattr("truenext.console.link.ANSWER_S", 0.2)
            with own_broker.asleep():
                answer = await browser.get("/queues")
            assert answer.status == 504 and "Log out" in answer.text and "clerk" in answer.text
            assert 'href="/connections"' not in answer.text

    asyncio.run(main())


def test_page_without_a_part_that_changes_has_no_stream(open_broker: BrokerProcess) -> None:
    async def main() -> None:
        async with console_here(open_broker.url) as here:
            browser = await here.opened()
            assert (await browser.get("/settings", {"accept": "text/event-stream"})).status == 204

    asyncio.run(main())
