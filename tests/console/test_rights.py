"""Tests that each page shows each user what docs/security.md grants, and no more; and that no other action is done."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.console.conftest import PASSWORD, users_file
from tests.console.here import JSON, Browser, ConsoleHere, console_here
from tests.drawing import each_one_of
from tests.integration.broker_process import BrokerProcess
from truenext import blocking
from truenext.console import shared
from truenext.console.app import PAGES
from truenext.console.rights import Rights
from truenext.console.views.stages import dismiss
from truenext.console.visit import NotAllowed, Visit
from truenext.flows.events import ExecutionStarted, FileOpened, StageEvent
from truenext.history.stage_files import FORMAT, stage_file
from truenext.model.control_answers import UserReport

SECRET, ORDERS, DEAD = "secret.in", "orders.new", "DLQ.orders.new"
BUNDLE = "Spark.source.main.1a2b3c.0"
MARKS = {
    "name of another queue": SECRET,
    "body of another queue": "body-of-secret",
    "body of orders": "body-of-orders",
    "cause of a dead letter": "cause-of-orders",
    "address of a client": "client-of-another-user",
    "failed login": "login failed",
    "flow": "trace-of-a-flow",
}
"""Texts that only some users may see, by what they stand for."""

EVERYWHERE = {"name of another queue", "address of a client", "flow", "state of the broker"}
SEEN: dict[str, set[str]] = {
    "nobody": set(),
    "clerk": {"body of orders"},
    "mover": {"body of orders"},
    "monitor": EVERYWHERE,
    "rita": EVERYWHERE | {"body of another queue", "body of orders", "cause of a dead letter"},
    "otto": EVERYWHERE | {"body of another queue", "body of orders", "cause of a dead letter"},
    "admin": {*MARKS, "state of the broker"},
}
"""What each user of tests/console/conftest.py sees."""

PROCESS = "019a3c5e7f20a1b2c3d4"
EVENTS: list[StageEvent] = [
    FileOpened(PROCESS, 0, 1_790_000_000_000_000, format=FORMAT, service="shop", instance="shop a 1"),
    ExecutionStarted(
        PROCESS,
        1,
        1_790_000_000_000_000,
        stage="order",
        message="m1",
        flow="f1",
        trace="trace-of-a-flow",
        sender="web",
        attempt=1,
        deliveries=1,
    ),
]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Broker with messages that not all users may see."""
    folder = tmp_path_factory.mktemp("rights")
    broker = BrokerProcess(folder, ["--users", str(users_file(folder))])
    broker.start()
    client_id = "admin.client-of-another-user"
    with blocking.connect(broker.url, user="admin", password=PASSWORD, client_id=client_id) as connection:
        for queue, body in ((SECRET, "body-of-secret"), (ORDERS, "body-of-orders"), (ORDERS, "rejected"), (BUNDLE, "")):
            connection.send(f"/queue/{queue}", body)
        with connection.consumer(f"/queue/{ORDERS}", ack="individual") as orders:
            first, second = orders.receive(timeout=10), orders.receive(timeout=10)
            assert first is not None and second is not None
            second.reject(cause="cause-of-orders")
            first.release()
        # Its address and client id are shown to those that may see connections.
        with connection.consumer(f"/queue/{SECRET}", selector="no = 'one'"):
            yield broker
    broker.clean_up()


def paths() -> list[str]:
    """Return addresses of all pages, with and without parameters."""
    parameters = {
        "/queue": [f"?name={name}" for name in (SECRET, ORDERS, DEAD, BUNDLE, "gone")],
        "/queues": ["", "?name=secret", "?order=name", "?name=%3E"],
        "/message": [f"?queue={name}&sequence={number}" for name in (SECRET, ORDERS, DEAD) for number in range(1, 6)],
        "/dead-letters": ["", f"?queue={DEAD}", f"?queue={SECRET}"],
        "/action": [
            *(f"?verb={verb}&queue={name}" for verb in ("purge", "redrive") for name in (SECRET, ORDERS, DEAD, BUNDLE)),
            f"?verb=move&queue={ORDERS}&to=archive",
            f"?verb=unschedule&queue={ORDERS}",
            "?verb=close&connection=x",
        ],
        "/flow": ["?trace=trace-of-a-flow", "?trace=f1"],
        "/flows": [f"?order={order}" for order in ("last", "unended", "failed", "given-up", "slowest")],
        "/settings": ["", f"?queue={SECRET}", f"?queue={ORDERS}"],
        "/scheduled": ["", f"?to=/queue/{SECRET}"],
    }
    pages = [page.path + query for page in PAGES for query in parameters.get(page.path, [""])]
    return [*pages, *(each.replace("/message", "/body", 1) for each in pages if each.startswith("/message"))]


async def seen_by(console: ConsoleHere, user: str) -> set[str]:
    """Return which of MARKS any page shows to a user, as HTML or JSON."""
    browser = await console.logged_in(user, PASSWORD)
    found: set[str] = set()
    for path in paths():
        for headers in ({}, JSON):
            answer = await browser.get(path, headers)
            assert answer.status in (200, 303, 400, 403, 404), (path, answer.status, answer.text)
            # A page repeats what it was asked for.
            text = answer.text.replace(f"name={SECRET}", "").replace(path.partition("?")[2], "")
            shown = {what for what, mark in MARKS.items() if mark in text}
            if answer.status != 200:
                shown -= {"name of another queue", "flow"}
            if SECRET in path or "trace=" in path:
                shown -= {"name of another queue", "flow"} if answer.status != 200 else set()
            found |= shown
    overview = await browser.page("/")
    figures = {each["name"]: each["value"] for each in overview["figures"]}
    if overview["broker"]:
        found.add("state of the broker")
    if figures["queues"] > len((await browser.page("/queues"))["rows"]):
        found.add("figures of others")
    return found


@pytest.fixture
def events(tmp_path: Path) -> Path:
    return tmp_path


def run(broker: BrokerProcess, events: Path, user: str) -> set[str]:
    async def main() -> set[str]:
        async with console_here(broker.url, events=[events]) as console:
            await console.console.shared.flows.find("x")
            # A failed login, for those who may see it.
            await console.browser().log_in("admin", "wrong")
            # Another login has filled what all share.
            await seen_by(console, "admin")
            return await seen_by(console, user)

    return asyncio.run(main())


@pytest.mark.parametrize("user", each_one_of([*SEEN], [*SEEN]))
def test_pages_show_each_user_what_it_may_see(broker: BrokerProcess, events: Path, user: str) -> None:
    # C35.3
    write_events(events)
    assert run(broker, events, user) == SEEN[user]


def write_events(folder: Path) -> None:
    """Write the events of one flow, as a process of stages does."""
    lines = b"".join(msgspec.json.encode(event) + b"\n" for event in EVENTS)
    stage_file(folder, PROCESS, 1).write_bytes(lines)


# ---- Planted holes ----


@pytest.mark.drawn
@pytest.mark.parametrize("hole", ["one gathering for all", "flows for all"])
def test_planted_hole_is_seen(broker: BrokerProcess, events: Path, hole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_events(events)
    if hole == "one gathering for all":
        monkeypatch.setattr(shared, "scope_of", lambda rights: shared.EVERYTHING)
    else:
        monkeypatch.setattr(Visit, "may_see_flows", True)
    assert run(broker, events, "clerk") != SEEN["clerk"]


# ---- Actions ----

ACTS: dict[str, tuple[str, dict[str, object]]] = {
    "pause": ("/pause", {"queue": ORDERS}),
    "resume": ("/resume", {"queue": ORDERS}),
    "purge": ("/work", {"verb": "purge", "queue": ORDERS, "typed": ORDERS, "selector": "no = 'one'"}),
    "move": ("/work", {"verb": "move", "queue": ORDERS, "to": "archive", "sequence": 10**9}),
    "move elsewhere": ("/work", {"verb": "move", "queue": ORDERS, "to": "elsewhere", "sequence": 10**9}),
    "redrive": ("/work", {"verb": "redrive", "queue": DEAD, "sequence": 10**9}),
    "unschedule": ("/work", {"verb": "unschedule", "queue": ORDERS, "sequence": 10**9}),
    "close": ("/close", {"connection": "x-1"}),
    "dismiss": ("/dismiss", {"run": "x-1"}),
}
MAY: dict[str, set[str]] = {
    "nobody": set(),
    "clerk": set(),
    "monitor": set(),
    "rita": set(),
    "mover": {"pause", "resume", "purge", "move", "unschedule"},
    "otto": {"pause", "resume", "purge", "move", "move elsewhere", "redrive", "unschedule", "dismiss"},
    "admin": set(ACTS),
}


@pytest.mark.parametrize("user", each_one_of([*MAY], [*MAY]))
def test_actions_are_done_only_with_their_right(broker: BrokerProcess, user: str) -> None:
    # C35.7, C35.13
    async def main() -> None:
        async with console_here(broker.url) as console:
            browser = await console.logged_in(user, PASSWORD)
            done = set()
            for name, (path, fields) in ACTS.items():
                answer = await browser.act(path, **fields)
                # A connection or process that is not there is one for those who may close or dismiss it.
                is_found = answer.status != 404
                assert answer.status in (303, 403, 404) and (is_found or name in ("close", "dismiss")), answer.text
                if answer.status != 403:
                    done.add(name)
            assert done == MAY[user]
            await check_buttons(browser, user)

    asyncio.run(main())


@pytest.mark.parametrize(
    "grant", [{"send": ["/topic/truenext.stages"], "manage": ["/queue/>"]}, {"manage": ["/queue/>"]}]
)
def test_dismissal_of_a_process_is_logged_with_its_user(grant: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "truenext.console")
    rights = Rights(UserReport("otto", **grant))
    shared = SimpleNamespace(stages=SimpleNamespace(dismiss=lambda run: run == "x-1"))
    visit = Visit(cast(Any, shared), cast(Any, None), rights, {"run": ["x-1"]}, 0, lambda login: True)
    if "send" in grant:
        asyncio.run(dismiss(visit))
        (record,) = caplog.records
        assert (record.__dict__["user"], record.__dict__["run"]) == ("otto", "x-1")
    else:
        with pytest.raises(NotAllowed, match="manage on '>' and send on /topic/"):
            asyncio.run(dismiss(visit))
        assert not caplog.records


async def check_buttons(browser: Browser, user: str) -> None:
    """Check that pages have buttons for what the user may do, and for nothing else."""
    may = MAY[user]
    pages: list[tuple[str, set[str]]] = [
        (f"/queue?name={ORDERS}", {"pause", "move", "purge"} & may),
        (f"/queue?name={DEAD}", {"pause", "move", "purge", "redrive"} if "redrive" in may else set()),
        (f"/queue?name={BUNDLE}", set()),
    ]
    for path, expected in pages:
        answer = await browser.get(path, JSON)
        if answer.status == 404:
            assert not expected
            continue
        acts: Any = answer.json()["acts"]
        assert {act["name"] for act in acts} == expected, path
        html = (await browser.get(path)).text
        assert ('action="/pause"' in html) is ("pause" in expected), path


def test_queues_of_spark_are_left_alone_even_by_an_administrator(broker: BrokerProcess) -> None:
    # C35.8
    async def main() -> None:
        async with console_here(broker.url) as console:
            browser = await console.logged_in("admin", PASSWORD)
            for verb in ("purge", "move", "redrive"):
                fields = {"verb": verb, "queue": BUNDLE, "to": "a", "typed": BUNDLE}
                assert (await browser.act("/work", **fields)).status == 403
                assert (await browser.get(f"/action?verb={verb}&queue={BUNDLE}&to=a")).status == 403
            into = {"verb": "move", "queue": ORDERS, "to": BUNDLE}
            assert (await browser.act("/work", **into)).status == 403
            page = await browser.page(f"/queue?name={BUNDLE}")
            assert page["acts"] == [] and page["spark_command"] == "truenext spark abandon 1a2b3c"

    asyncio.run(main())


def test_rights_of_a_report_are_those_of_its_grants() -> None:
    assert Rights(None).may_act("orders") and not Rights(None).may_act(BUNDLE)
