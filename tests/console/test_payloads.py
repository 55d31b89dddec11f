"""Tests that pages of a real broker stay whole, whatever names, headers, bodies, causes and traces it has, and that
each page leads to the next one by links that keep these texts."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

import msgspec

from tests.console.here import JSON, Browser, console_here
from tests.console.payloads import PAYLOADS
from tests.console.test_rights import EVENTS, PROCESS
from tests.console.test_templates import Outline
from tests.integration.broker_process import BrokerProcess
from truenext import blocking
from truenext.errors import TruenextError
from truenext.flows.events import ExecutionStarted
from truenext.history.stage_files import stage_file
from truenext.model.destination import parse_queue_name

CHOSEN = 8
"""Number of payloads that one run tries. The templates are tested with all of them."""


def is_queue_name(text: str) -> bool:
    try:
        parse_queue_name(text)
    except TruenextError:
        return False
    return not re.search(r"[*>]", text)


async def check_html(browser: Browser, path: str) -> str:
    """Check that a page has no element or attribute that a text has brought, and return it."""
    answer = await browser.get(path)
    assert answer.status == 200, (path, answer.text)
    outline = Outline(answer.text)
    assert outline.elements[-1] == ("/html", ())
    for tag, names in outline.elements:
        # Only the drawing of a flow has one.
        assert tag != "svg" or path.startswith("/flow?"), path
        assert tag not in ("iframe", "object", "style", "base", "img", "comment", "template"), path
        assert not [name for name in names if name.startswith("on") or name in ("style", "srcdoc")], path
    assert not re.search(r"<script(?![^>]* src=\"/static/)", answer.text)
    assert "alert(1)" not in " ".join(outline.addresses)
    return outline.text


def test_pages_keep_what_messages_say_and_stay_whole(open_broker: BrokerProcess) -> None:
    # C35.6
    payloads = random.sample([each for each in PAYLOADS if each.strip()], CHOSEN)

    async def main() -> None:
        async with console_here(open_broker.url) as console:
            browser = await console.opened()
            for number, payload in enumerate(payloads):
                name = payload if is_queue_name(payload) else f"payload.{number}"
                await asyncio.to_thread(fill, open_broker, name, payload)
                await check_message(browser, name, payload)
                await check_dead_letters(browser, f"DLQ.{name}")
            for path in ("/queues", "/", "/dead-letters", "/security", "/connections", "/spark", "/settings"):
                await check_html(browser, path)

    asyncio.run(main())


def fill(broker: BrokerProcess, queue: str, payload: str) -> None:
    headers = {"x-payload": payload, "content-type": payload}
    with blocking.connect(broker.url, client_id=payload[:50]) as connection:
        for _ in range(2):
            connection.send(f"/queue/{queue}", payload, headers=headers, correlation_id=payload)
        with connection.consumer(f"/queue/{queue}", ack="individual") as consumer:
            message = consumer.receive(timeout=10)
            assert message is not None
            message.reject(cause=payload)


async def check_message(browser: Browser, queue: str, payload: str) -> None:
    rows = (await browser.page("/queues?order=name&name=" + quoted(queue)))["rows"]
    link = next(row["link"] for row in rows if row["name"] == queue)
    page = await browser.page(link)
    assert page["row"]["name"] == queue
    await check_html(browser, link)
    message = page["messages"]["rows"][0]["link"]
    shown = await browser.page(message)
    assert dict(shown["headers"])["x-payload"] == payload
    for form in ("text", "json", "hex"):
        await check_html(browser, f"{message}&form={form}")
    body = await browser.get(shown["download"])
    assert body.body == payload.encode()
    assert body.header("content-type") == "application/octet-stream"
    assert re.fullmatch(r'attachment; filename="message-\d+\.bin"', body.header("content-disposition"))
    assert "sandbox" in body.header("content-security-policy")
    for act in shown["acts"]:
        await check_html(browser, act["link"])


async def check_dead_letters(browser: Browser, queue: str) -> None:
    path = "/dead-letters?queue=" + quoted(queue)
    groups = (await browser.page(path))["groups"]
    await check_html(browser, path)
    assert len(groups) == 1
    for act in groups[0]["acts"]:
        asked = await browser.page(act["link"])
        assert asked["count"] == 1 or asked["needs_target"]
    assert (await browser.page(groups[0]["example"]))["reason"] == "rejected"


def quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="")


def test_flows_keep_their_traces_and_stay_whole(open_broker: BrokerProcess, tmp_path: Path) -> None:
    # C35.6
    payloads = random.sample([each for each in PAYLOADS if 0 < len(each) <= 200 and each.isprintable()], CHOSEN)
    started = EVENTS[1]
    assert isinstance(started, ExecutionStarted)
    events = [
        msgspec.structs.replace(started, number=number, flow=f"f{number}", trace=each, stage=each, sender=each)
        for number, each in enumerate(payloads, 1)
    ]
    file = stage_file(tmp_path, PROCESS, 1)
    file.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in (EVENTS[0], *events)))

    async def main() -> None:
        async with console_here(open_broker.url, events=[tmp_path]) as console:
            browser = await console.opened()
            while len((await browser.page("/flows?order=last"))["rows"]) < CHOSEN:
                await asyncio.sleep(0.05)
            await check_html(browser, "/flows?order=last")
            for row in (await browser.page("/flows?order=last"))["rows"]:
                assert (await browser.page(row["link"]))["trace"] == row["trace"]
                assert row["trace"] in await check_html(browser, row["link"])

    asyncio.run(main())


def test_faults_of_events_are_told_and_the_rest_is_shown(open_broker: BrokerProcess, tmp_path: Path) -> None:
    # C35.1
    lines = [msgspec.json.encode(each) + b"\n" for each in EVENTS]
    stage_file(tmp_path, PROCESS, 1).write_bytes(b"".join(lines))
    newer = msgspec.json.encode(msgspec.structs.replace(EVENTS[0], format=99, process="019a3c5e7f20a1b2c3d5")) + b"\n"
    stage_file(tmp_path, "019a3c5e7f20a1b2c3d5", 1).write_bytes(newer)

    async def main() -> None:
        async with console_here(open_broker.url, events=[tmp_path, tmp_path / "missing"]) as console:
            browser = await console.opened()
            while not (page := await browser.page("/flows?order=last"))["rows"]:
                await asyncio.sleep(0.05)
            assert "format 99" in page["note"] and "does not exist" in page["note"]
            assert (await browser.get("/flow?trace=trace-of-a-flow")).status == 200
            assert (await browser.get("/flow?trace=another", JSON)).status == 404

    asyncio.run(main())
