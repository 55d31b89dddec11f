"""Tests of what an operator does in the console: first what would happen, then the work, its progress and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.console.here import Browser, ConsoleHere, console_here
from tests.integration.broker_process import BrokerProcess
from truenext import blocking
from truenext.blocking import Connection
from truenext.console.work import Totals

CAUSES = ("ValueError: one", "ValueError: two", "")


@pytest.fixture
def connection(open_broker: BrokerProcess) -> Iterator[Connection]:
    with blocking.connect(open_broker.url) as connection:
        yield connection


def run(broker: BrokerProcess, test: Callable[[ConsoleHere, Browser], Awaitable[None]]) -> None:
    async def main() -> None:
        async with console_here(broker.url) as console:
            await test(console, await console.opened())

    asyncio.run(main())


def reject(connection: Connection, queue: str, count: int) -> None:
    """Fill the dead-letter queue of `queue` with `count` messages for each of CAUSES."""
    connection.send_many(f"/queue/{queue}", [str(number) for number in range(count * len(CAUSES))])
    with connection.consumer(f"/queue/{queue}", ack="individual") as consumer:
        for number in range(count * len(CAUSES)):
            message = consumer.receive(timeout=10)
            assert message is not None
            message.reject(cause=CAUSES[number % len(CAUSES)])
    # Its receipt comes when all that was sent before is durable.
    connection.send("/queue/other", "")


async def finished(browser: Browser, begun: Any) -> Any:
    """Return the progress of a work once it is over."""
    assert begun.status == 303, begun.text
    path = begun.header("location")
    assert urlsplit(path).path == "/progress"
    while (progress := await browser.page(path))["state"] in ("running", "stopping"):
        await asyncio.sleep(0.02)
    return progress


async def waiting(browser: Browser, queue: str) -> int:
    answer = await browser.get(f"/queue?name={queue}", {"accept": "application/json"})
    return answer.json()["row"]["waiting"] if answer.status == 200 else 0


def test_one_group_is_redriven_and_its_end_is_seen(open_broker: BrokerProcess, connection: Connection) -> None:
    # C35.7
    reject(connection, "group", 20)

    async def test(console: ConsoleHere, browser: Browser) -> None:
        page = await browser.page("/dead-letters?queue=DLQ.group")
        assert {group["cause"]: group["count"] for group in page["groups"]} == dict.fromkeys(CAUSES, 20)
        assert not page["is_part"] and page["others"] == 0
        group = next(each for each in page["groups"] if each["cause"] == CAUSES[0])
        link = next(act["link"] for act in group["acts"] if act["name"] == "redrive")
        asked = await browser.page(link)
        assert asked["count"] == 20 and asked["to"] == {"group": 20} and not asked["is_part"]
        assert await waiting(browser, "group") == 0, "nothing has happened yet"
        progress = await finished(browser, await browser.act(asked["post"], **dict(asked["fields"])))
        assert (progress["state"], progress["count"], progress["total"]) == ("done", 20, 20)
        assert progress["to"] == {"group": 20}
        assert (await waiting(browser, "group"), await waiting(browser, "DLQ.group")) == (20, 40)
        assert (await browser.page("/queue?name=group"))["dead_letters"].endswith("=DLQ.group")
        # The group without a cause is a group, too.
        without = next(each for each in page["groups"] if each["cause"] == "")
        asked = await browser.page(next(act["link"] for act in without["acts"] if act["name"] == "purge"))
        assert asked["count"] == 20

    run(open_broker, test)


def test_groups_are_read_on_from_where_the_page_has_ended(
    open_broker: BrokerProcess, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed: each time the page began at the first message again, and took ten times as long."""
    for name in ("READ_S", "READ_ON_S"):
        # The package has a function of this name.
        monkeypatch.setattr(import_module("truenext.console.views.dead_letters"), name, 0.0)
    connection.send_many("/queue/DLQ.parts", [str(number) for number in range(1200)])

    async def test(console: ConsoleHere, browser: Browser) -> None:
        text = (await browser.get("/dead-letters?queue=DLQ.parts")).text
        page = await browser.page("/dead-letters?queue=DLQ.parts")
        counts = [page["read"]]
        assert f"{counts[0]} messages of 1,200 read so far" in text
        while page["is_part"]:
            page = await browser.page(page["go_on"])
            counts.append(page["read"])
            assert sum(group["count"] for group in page["groups"]) == page["read"] and page["total"] == 1200
        # The last piece may only find the end.
        assert len(counts) > 2 and counts[:-1] == sorted(set(counts[:-1])) and counts[-1] == 1200

    run(open_broker, test)


def test_dead_letter_queue_of_a_policy_is_one(tmp_path: Path) -> None:
    """Fixed: only queues DLQ. + anything were shown as dead-letter queues, and could be re-driven."""
    broker = BrokerProcess(tmp_path, policy={"dead_letters": "failed"})
    broker.start()

    async def test(console: ConsoleHere, browser: Browser) -> None:
        failed = await browser.page("/queue?name=failed")
        assert (failed["row"]["kind"], failed["row"]["why"]) == ("dead letters", "")
        assert [act["name"] for act in failed["acts"]] == ["pause", "redrive", "move", "purge"]
        assert (await browser.page("/queue?name=orders"))["dead_letters"] == failed["dead_letters"]
        page = await browser.page("/dead-letters")
        assert (page["queue"], len(page["groups"])) == ("failed", len(CAUSES))
        message = await browser.page(page["groups"][0]["example"])
        assert [act["name"] for act in message["acts"]] == ["redrive", "move", "purge"]
        figures = {each["name"]: each["value"] for each in (await browser.page("/"))["figures"]}
        assert figures["dead letters"] == len(CAUSES)

    try:
        with blocking.connect(broker.url) as connection:
            reject(connection, "orders", 1)
            connection.send("/queue/orders", "x")
        broker.await_facts("failed", waiting=len(CAUSES))
        run(broker, test)
    finally:
        broker.clean_up()


def test_messages_that_cannot_go_back_are_told_with_what_helps(
    open_broker: BrokerProcess, connection: Connection
) -> None:
    """Fixed: dead letters without an original queue were said to be held by consumers."""
    connection.send("/queue/DLQ.unnamed", "a")

    async def test(console: ConsoleHere, browser: Browser) -> None:
        asked = await browser.page("/action?verb=redrive&queue=DLQ.unnamed")
        why = "held by consumers, still being committed, or with an unknown original queue"
        assert asked["sentences"] == [
            "Nothing would happen: no message can be taken.",
            f"1 message would stay: {why} (`truenext move` moves those to a queue).",
        ]
        assert asked["post"] == ""

    run(open_broker, test)


def test_preview_that_has_found_nothing_so_far_says_so(
    open_broker: BrokerProcess, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed: such a preview said that at least 0 messages would move."""
    connection.send("/queue/DLQ.looked-at", "a")

    async def nothing_yet(*_: object) -> tuple[Totals, bool]:
        return Totals(), False

    monkeypatch.setattr("truenext.console.views.acting.preview", nothing_yet)

    async def test(console: ConsoleHere, browser: Browser) -> None:
        path = "/action?verb=redrive&queue=DLQ.looked-at"
        assert "found so far" in (await browser.page(path))["sentences"][0]
        text = (await browser.get(path)).text
        assert "at least 0" not in text and "or more" not in text

    run(open_broker, test)


def test_chosen_messages_are_moved_and_others_stay(open_broker: BrokerProcess, connection: Connection) -> None:
    connection.send_many("/queue/chosen", [str(number) for number in range(10)])

    async def test(console: ConsoleHere, browser: Browser) -> None:
        rows = (await browser.page("/queue?name=chosen"))["messages"]["rows"]
        chosen = "&".join(f"sequence={row['sequence']}" for row in rows[::2])
        first = await browser.page(f"/action?verb=move&queue=chosen&{chosen}")
        assert first["needs_target"] and first["post"] == ""
        asked = await browser.page(f"/action?verb=move&queue=chosen&{chosen}&to=elsewhere")
        assert asked["count"] == 5 and asked["to"] == {"elsewhere": 5}
        fields: dict[str, list[str]] = {}
        for name, value in asked["fields"]:
            fields.setdefault(name, []).append(value)
        progress = await finished(browser, await browser.act("/work", **fields))
        assert progress["count"] == 5
        left = (await browser.page("/queue?name=chosen"))["messages"]["rows"]
        assert [row["beginning"] for row in left] == [row["beginning"] for row in rows[1::2]]

    run(open_broker, test)


def test_purge_needs_the_name_of_the_queue(open_broker: BrokerProcess, connection: Connection) -> None:
    # C35.7
    connection.send_many("/queue/purged", ["a", "b", "c"], headers={"colour": "red"})
    connection.send("/queue/purged", "d")

    async def test(console: ConsoleHere, browser: Browser) -> None:
        asked = await browser.page("/action?verb=purge&queue=purged&selector=colour+%3D+%27red%27")
        assert asked["count"] == 3 and asked["typed_name"] == "purged"
        fields = dict(asked["fields"])
        for typed in ({}, {"typed": ""}, {"typed": "purge"}, {"typed": "PURGED"}):
            answer = await browser.act("/work", **fields, **typed)
            assert answer.status == 303
            again = await browser.page(answer.header("location"))
            assert again == asked | {"error": "Nothing was removed: what was typed is not purged."}
            assert again["error"] in (await browser.get(answer.header("location"))).text
        assert await waiting(browser, "purged") == 4
        progress = await finished(browser, await browser.act("/work", **fields, typed="purged"))
        assert progress["count"] == 3 and await waiting(browser, "purged") == 1

    run(open_broker, test)


def test_redrive_is_stopped_half_way_and_goes_on_later(open_broker: BrokerProcess, connection: Connection) -> None:
    # C35.7
    reject(connection, "long", 700)

    async def test(console: ConsoleHere, browser: Browser) -> None:
        fields = {"verb": "redrive", "queue": "DLQ.long"}
        begun = await browser.act("/work", **fields)
        id = begun.header("location").partition("=")[2]
        assert (await browser.act("/stop", id=id)).status == 303
        progress = await finished(browser, begun)
        assert progress["state"] == "stopped" and 0 < progress["count"] < 2100
        assert await waiting(browser, "long") == progress["count"]
        rest = await finished(browser, await browser.act("/work", **fields))
        assert rest["state"] == "done" and rest["count"] + progress["count"] == 2100
        assert [title for title, _ in rest["others"]] == ["Re-drive DLQ.long: all messages: stopped"]

    run(open_broker, test)


def test_work_of_another_login_is_not_seen(open_broker: BrokerProcess, connection: Connection) -> None:
    connection.send("/queue/own", "a")

    async def test(console: ConsoleHere, browser: Browser) -> None:
        begun = await browser.act("/work", verb="move", queue="own", to="own.2")
        await finished(browser, begun)
        other = await console.opened()
        assert (await other.get(begun.header("location"))).status == 404
        assert (await other.act("/stop", id=begun.header("location").partition("=")[2])).status == 404

    run(open_broker, test)


def test_pause_and_resume(open_broker: BrokerProcess, connection: Connection) -> None:
    connection.send("/queue/paused", "a")

    async def test(console: ConsoleHere, browser: Browser) -> None:
        assert (await browser.act("/pause", queue="paused")).header("location") == "/queue?name=paused"
        page = await browser.page("/queue?name=paused")
        assert page["row"]["paused"] and page["acts"][0]["name"] == "resume"
        await browser.act("/resume", queue="paused")
        assert not (await browser.page("/queue?name=paused"))["row"]["paused"]
        # A pause makes no queue.
        assert (await browser.act("/pause", queue="nowhere")).status == 404

    run(open_broker, test)


def test_scheduled_sends_are_shown_and_cancelled(open_broker: BrokerProcess, connection: Connection) -> None:
    for number in range(3):
        connection.send("/queue/later", f"body {number}", delay=3600 + number)
    connection.send("/topic/later", "to a topic", delay=3600)

    async def test(console: ConsoleHere, browser: Browser) -> None:
        page = await browser.page("/scheduled?to=/queue/later")
        assert [row["beginning"] for row in page["rows"]] == ["body 0", "body 1", "body 2"]
        assert {row["to"] for row in (await browser.page("/scheduled"))["rows"]} >= {"/queue/later", "/topic/later"}
        link = page["rows"][1]["acts"][0]["link"]
        asked = await browser.page(link)
        assert asked["count"] == 1
        progress = await finished(browser, await browser.act("/work", **dict(asked["fields"])))
        assert progress["count"] == 1
        page = await browser.page("/scheduled?to=/queue/later")
        assert [row["beginning"] for row in page["rows"]] == ["body 0", "body 2"]
        topic = await browser.page("/scheduled?to=/topic/later")
        asked = await browser.page(topic["acts"][0]["link"])
        assert asked["count"] == 1

    run(open_broker, test)


def test_connection_is_closed(open_broker: BrokerProcess) -> None:
    async def test(console: ConsoleHere, browser: Browser) -> None:
        client = open_broker.connect(headers={"client-id": "to-be-closed"})
        rows = (await browser.page("/connections"))["rows"]
        row = next(each for each in rows if each["client_id"] == "to-be-closed")
        asked = await browser.page(row["close"])
        assert asked["post"] == "/close"
        assert (await browser.act("/close", **dict(asked["fields"]))).status == 303
        assert client.error().headers["truenext-code"] == "closed"
        assert "to-be-closed" not in str(await browser.page("/connections"))

    run(open_broker, test)


SENSELESS = [
    ("verb=eat&queue=a", 400, "no action"),
    ("verb=purge", 400, "lacks the parameter"),
    ("queue=a", 400, "lacks the parameter"),
    ("verb=purge&queue=nowhere", 404, "nowhere"),
    ("verb=purge&queue=senseless&selector=a+b+c", 400, "selector"),
    ("verb=move&queue=senseless&to=senseless", 400, "same queue"),
    ("verb=move&queue=senseless&to=/topic/a", 400, "/topic/a"),
    ("verb=move&queue=senseless&to=a%0Ab", 400, "queue"),
    ("verb=redrive&queue=senseless&sequence=one", 400, "number"),
    ("verb=unschedule", 400, "destination"),
]
"""Parameters of an action, and the status and a part of the answer."""


def test_senseless_action_is_answered_with_a_sentence(open_broker: BrokerProcess, connection: Connection) -> None:
    connection.send("/queue/senseless", "a")

    async def test(console: ConsoleHere, browser: Browser) -> None:
        for query, status, part in SENSELESS:
            answer = await browser.get(f"/action?{query}", {"accept": "application/json"})
            assert answer.status == status and part in answer.json()["error"], (query, answer.text)

    run(open_broker, test)
