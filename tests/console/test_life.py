"""Tests of a console beside a broker that restarts, is slow, old, or none; and of logins that end."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import fields

import truenext
from tests.console.conftest import PASSWORD, users_file
from tests.console.here import JSON, Browser, ConsoleHere, console_here
from tests.drawing import each_one_of
from tests.integration.broker_process import BrokerProcess
from truenext import blocking
from truenext.client.core.credentials import NO_CREDENTIALS, Credentials
from truenext.console.app import PageRoute, make_app
from truenext.console.link import Broker, Link, OlderBroker
from truenext.console.logins import IDLE_S, LOGIN_S, LOGINS_MAX, STREAMS_MAX, Attempts, Logins
from truenext.console.serving import ask_whether_users
from truenext.console.views.stages import IN_A_DRAIN
from truenext.console.visit import Visit
from truenext.errors import Refused, TruenextError
from truenext.model.control_answers import ConsumerReport, QueuesReport, StatusReport


def run(broker: BrokerProcess, test: Callable[[ConsoleHere], Awaitable[None]]) -> None:
    async def main() -> None:
        async with console_here(broker.url) as console:
            await test(console)

    asyncio.run(main())


async def stopped(broker: BrokerProcess) -> None:
    await asyncio.to_thread(broker.stop)


async def started(broker: BrokerProcess) -> None:
    await asyncio.to_thread(broker.start, broker.port)


def test_without_users_the_console_goes_on_after_a_restart_of_the_broker(own_broker: BrokerProcess) -> None:
    # C35.9
    async def test(console: ConsoleHere) -> None:
        browser = await console.opened()
        assert (await browser.get("/")).status == 200
        await stopped(own_broker)
        for path in ("/queues", "/queue?name=a", "/action?verb=purge&queue=a"):
            answer = await browser.get(path, JSON)
            assert answer.status == 503 and "does not answer" in answer.json()["error"]
            assert (await browser.get(path)).status == 503
        await started(own_broker)
        assert (await browser.get("/queues")).status == 200
        assert (await browser.get("/")).status == 200

    run(own_broker, test)


def test_broker_that_has_got_users_ends_logins_without_one(own_broker: BrokerProcess, tmp_path: Path) -> None:
    # C35.3
    async def test(console: ConsoleHere) -> None:
        browser = await console.opened()
        assert (await browser.get("/queues")).status == 200
        await stopped(own_broker)
        own_broker.options = ["--users", str(users_file(tmp_path))]
        await started(own_broker)
        assert (await browser.get("/queues", JSON)).status == 401
        assert (await browser.get(f"/open?key={console.console.key}")).status == 403
        assert (await browser.log_in("rita", PASSWORD)).status == 303
        assert (await browser.get("/queues")).status == 200

    run(own_broker, test)


def test_with_users_a_restart_of_the_broker_ends_the_login(tmp_path: Path) -> None:
    # C35.3
    broker = BrokerProcess(tmp_path, ["--users", str(users_file(tmp_path))])
    broker.start()

    async def test(console: ConsoleHere) -> None:
        browser = await console.logged_in("rita", PASSWORD)
        assert (await browser.get("/")).status == 200
        await stopped(broker)
        await started(broker)
        assert (await browser.get("/queues", JSON)).status == 401
        answer = await browser.get("/queues")
        assert answer.status == 303 and answer.header("location").startswith("/login")
        assert (await browser.log_in("rita", PASSWORD)).status == 303
        assert (await browser.get("/queues")).status == 200

    try:
        run(broker, test)
    finally:
        broker.clean_up()


def test_reload_that_takes_a_grant_away_ends_the_login(tmp_path: Path) -> None:
    # C35.3
    file = users_file(tmp_path)
    broker = BrokerProcess(tmp_path, ["--users", str(file)])
    broker.start()

    async def test(console: ConsoleHere) -> None:
        rita, otto = await console.logged_in("rita", PASSWORD), await console.logged_in("otto", PASSWORD)
        assert (await otto.get("/action?verb=purge&queue=a")).status == 404
        file.write_text(file.read_text().replace('manage = [">", "DLQ.>"]', "manage = []"))
        await asyncio.to_thread(reload, broker)
        assert (await otto.get("/queues", JSON)).status == 401
        assert (await rita.get("/queues", JSON)).status == 200
        again = await console.logged_in("otto", PASSWORD)
        assert (await again.get("/action?verb=purge&queue=a")).status == 403

    try:
        run(broker, test)
    finally:
        broker.clean_up()


def reload(broker: BrokerProcess) -> None:
    with blocking.connect(broker.url, user="admin", password=PASSWORD) as connection:
        connection.control_request("reload")


def test_stream_shows_changes_and_ends_with_the_login(tmp_path: Path) -> None:
    # C35.10
    broker = BrokerProcess(tmp_path, ["--users", str(users_file(tmp_path))])
    broker.start()

    async def test(console: ConsoleHere) -> None:
        browser = await console.logged_in("admin", PASSWORD)
        events = stream(browser, "/queues")
        assert "appears" not in await anext(events)
        with blocking.connect(broker.url, user="admin", password=PASSWORD) as connection:
            await asyncio.to_thread(connection.send, "/queue/appears", "a")
        assert "appears" in await anext(events)
        await stopped(broker)
        last = [event async for event in events]
        assert last[-1].startswith("event: login")

    try:
        run(broker, test)
    finally:
        broker.clean_up()


def test_login_has_a_bounded_number_of_streams_and_an_ended_one_frees_its_place(open_broker: BrokerProcess) -> None:
    async def test(console: ConsoleHere) -> None:
        browser = await console.opened()
        headers = {"accept": "text/event-stream"}
        async with AsyncExitStack() as stack:
            for _ in range(STREAMS_MAX):
                messages = await stack.enter_async_context(aclosing(browser.messages("GET", "/queues", headers)))
                assert (await anext(messages))["status"] == 200
                await anext(messages)
            answer = await browser.get("/queues", headers)
            assert (answer.status, answer.text) == (429, "too many pages are open: close some\n")
            await messages.aclose()
            async with aclosing(browser.messages("GET", "/queues", headers)) as again:
                assert (await anext(again))["status"] == 200

    run(open_broker, test)


def test_page_whose_browser_has_gone_is_not_worked_for(open_broker: BrokerProcess) -> None:
    """Fixed: the console went on asking the broker to count dead letters for browsers that had left."""
    # C35.9
    working, ended = asyncio.Event(), asyncio.Event()

    async def load(visit: Visit) -> Any:
        working.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def test(console: ConsoleHere) -> None:
        app = make_app(console.console, [PageRoute("/slow", "queues", "Slow", load)])
        browser = Browser(console.console, app)
        browser.cookies = (await console.opened()).cookies
        leaving = asyncio.create_task(anext(browser.messages("GET", "/slow", JSON)))
        await working.wait()
        leaving.cancel()
        async with asyncio.timeout(3):
            await ended.wait()

    run(open_broker, test)


async def stream(browser: Browser, path: str) -> AsyncIterator[str]:
    """Yield the events of a page's stream."""
    async for message in browser.messages("GET", path, {"accept": "text/html, text/event-stream"}):
        if message["type"] == "http.response.start":
            assert (
                message["status"] == 200
                and (b"content-type", b"text/event-stream; charset=utf-8") in message["headers"]
            )
        elif body := message.get("body"):
            yield body.decode()


@pytest.mark.parametrize("has_users", each_one_of([False, True], ["no-users", "users"]))
def test_console_is_used_during_a_drain(tmp_path: Path, has_users: bool) -> None:
    # C35.12
    broker = BrokerProcess(tmp_path, ["--users", str(users_file(tmp_path))] if has_users else [])
    broker.start()
    login: dict[str, Any] = {"user": "admin", "password": PASSWORD} if has_users else {}

    async def drain(is_on: bool) -> None:
        async with truenext.connect(broker.url, **login) as operator:
            await operator.control_request("drain", {"draining": is_on})

    async def test(console: ConsoleHere) -> None:
        await drain(True)
        browser = await (console.logged_in("admin", PASSWORD) if has_users else console.opened())
        async with asyncio.timeout(10):
            for path in ("/", "/stages", "/queues", "/scheduled"):
                answer = await browser.get(path, JSON)
                assert answer.status == 200, (path, answer.text)
            found = (await browser.page("/"))["attention"]
            assert [each["what"] for each in found] == [
                "The broker is being drained",
                "Processes of stages are not known",
            ]
            again = "; log in again once the drain has ended" if has_users else ""
            assert found[1]["why"] == f"{IN_A_DRAIN}{again}"
            assert (await browser.page("/stages"))["note"] == found[1]["why"]
            async with truenext.connect(broker.url, **login) as operator:
                await operator.control_request("pause", {"queue": "a"})
            page = await browser.page("/queue?name=a")
            assert "being drained" in page["messages"]["note"] and page["row"]["paused"]
            answer = await browser.get("/message?queue=a&priority=4&sequence=1", JSON)
            assert answer.status == 503 and "being drained" in answer.json()["error"]
        await drain(False)
        if has_users:
            browser = await console.logged_in("admin", PASSWORD)
        assert (await browser.page("/queue?name=a"))["messages"]["note"] == ""

    try:
        run(broker, test)
    finally:
        broker.clean_up()


def test_slow_broker_is_answered_with_a_sentence(own_broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    # C35.9
    monkeypatch.setattr("truenext.console.link.ANSWER_S", 0.5)

    async def test(console: ConsoleHere) -> None:
        browser = await console.opened()
        assert (await browser.get("/queues")).status == 200
        with own_broker.asleep():
            answers = await asyncio.gather(*(browser.get("/queues", JSON) for _ in range(30)))
            assert {answer.status for answer in answers} == {504}
            assert "does not answer in time" in answers[0].json()["error"]
            # Nothing else waits for the broker.
            assert (await console.browser().get("/login")).status == 200
        assert (await browser.get("/queues")).status == 200

    run(own_broker, test)


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n"])
def test_peer_that_is_no_broker_is_named_so(greeting: bytes) -> None:
    # C35.1
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_answer_one, args=(listener, greeting))
        thread.start()
        broker = Broker((f"stomp://127.0.0.1:{listener.getsockname()[1]}",), NO_CREDENTIALS)
        with pytest.raises(TruenextError) as caught:
            asyncio.run(ask_whether_users(broker))
        thread.join()
    assert str(caught.value)


def _answer_one(listener: socket.socket, greeting: bytes) -> None:
    sock, _ = listener.accept()
    with sock:
        sock.sendall(greeting)


def test_older_broker_is_named_so(own_broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    # C35.1
    async def main() -> None:
        from truenext.client.tasks.connection import Connection

        request = Connection.control_request

        async def answer(self: Connection, verb: str, *rest: object, **options: object) -> bytes:
            return b"[]" if verb == "queues" else await request(self, verb)

        monkeypatch.setattr(Connection, "control_request", answer)
        with pytest.raises(TruenextError, match="older than this console"):
            await ask_whether_users(Broker((own_broker.url,), NO_CREDENTIALS))

    asyncio.run(main())


def test_broker_that_lacks_an_order_of_queues_is_named_older(open_broker: BrokerProcess) -> None:
    """Fixed: a console before an older broker with users, which it cannot check at its start, showed its refusal."""

    async def main() -> None:
        link = Link(Broker((open_broker.url,), NO_CREDENTIALS), None, None)
        try:
            with pytest.raises(OlderBroker):
                await link.ask("queues", {"order": "of a later version"}, QueuesReport)
            with pytest.raises(Refused):
                await link.ask("queues", {"after": "no cursor"}, QueuesReport)
        finally:
            await link.close()

    asyncio.run(main())


def test_report_of_an_older_broker_without_the_time_of_held_messages_is_decoded() -> None:
    assert {"held_s"} <= {each.name for each in fields(StatusReport) if not each.required}
    assert {"held_s"} <= {each.name for each in fields(ConsumerReport) if not each.required}


def test_password_is_not_kept(users_broker: BrokerProcess) -> None:
    # C35.3
    of_other_tests = [each for each in gc.get_objects() if isinstance(each, Credentials)]

    async def test(console: ConsoleHere) -> None:
        browser = await console.logged_in("rita", PASSWORD)
        assert (await browser.get("/")).status == 200
        gc.collect()
        credentials = [each for each in gc.get_objects() if isinstance(each, Credentials)]
        kept = [each for each in credentials if not any(each is other for other in of_other_tests)]
        assert kept and {(each.user, each.password) for each in kept} == {(None, None)}

    run(users_broker, test)


def test_broker_that_has_lost_its_users_lets_nobody_in(tmp_path: Path) -> None:
    # C35.3
    broker = BrokerProcess(tmp_path, ["--users", str(users_file(tmp_path))])
    broker.start()

    async def test(console: ConsoleHere) -> None:
        await stopped(broker)
        broker.options = []
        await started(broker)
        answer = await console.browser().log_in("rita", "any password")
        assert answer.status == 403 and "no users any more" in answer.text

    try:
        run(broker, test)
    finally:
        broker.clean_up()


# ---- Logins, by a clock of the test ----


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_login_ends_without_use_and_after_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    logins = Logins(clock)
    cookie = logins.open(object())  # type: ignore[arg-type]
    for _ in range(int(LOGIN_S / (IDLE_S - 1))):
        clock.now += IDLE_S - 1
        assert logins.find(cookie) is not None
    clock.now += IDLE_S - 1
    assert logins.find(cookie) is None
    other = logins.open(object())  # type: ignore[arg-type]
    clock.now += IDLE_S + 1
    assert logins.find(other) is None
    assert len(logins.expired()) == 2
    assert logins.find("") is None and logins.find("x") is None


def test_too_many_logins_end_the_one_that_was_not_used_for_longest() -> None:
    clock = Clock()
    logins = Logins(clock)
    cookies = [logins.open(object()) for _ in range(LOGINS_MAX)]  # type: ignore[arg-type]
    assert logins.find(cookies[0]) is not None
    assert logins.expired() == [logins.find(cookies[1])]


def test_attempts_are_bounded_by_address_and_in_all() -> None:
    clock = Clock()
    attempts = Attempts(clock)
    for _ in range(5):
        assert not attempts.are_too_many("a")
        attempts.note("a")
    assert attempts.are_too_many("a") and not attempts.are_too_many("b")
    attempts.forgive("a")
    assert not attempts.are_too_many("a")
    for number in range(16):
        attempts.note(str(number))
    assert attempts.are_too_many("b")
    clock.now += 61
    assert not attempts.are_too_many("a") and not attempts.are_too_many("b")
