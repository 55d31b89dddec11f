"""Payloads in all that clients say, in a real browser at a real broker: a dialog, a request elsewhere, a report of the
Content Security Policy, an error in the browser's log, or a text that is not shown as it is, is a fault."""

from __future__ import annotations

import re
from urllib.parse import quote

import pytest

from tests.console.browser.conftest import OpenWindow, Window
from tests.console.browser.shop import Order
from tests.console.browser.world import World, send_all
from tests.console.payloads import PAYLOADS
from truenext.errors import TruenextError
from truenext.model.destination import durable_key, parse_queue_name

pytestmark = [pytest.mark.drawn, pytest.mark.timeout(600)]
PARTS = 8


def _shown(text: str) -> str:
    """Return a text without white space, which HTML folds, and characters that are not shown."""
    return re.sub(r"\s|\u200b|\ufeff", "", text)


def _queue_name(number: int, payload: str) -> str:
    name = re.sub(r"[*>?,]", "", payload).strip(". ")[:150]
    try:
        parse_queue_name(name)
    except TruenextError:
        return f"payload.{number}"
    return name


def _client_id(number: int, payload: str) -> str:
    text = f"shop.{re.sub(r'[*>,]', '', payload)}"[:100]
    try:
        durable_key(text, "all")
    except TruenextError:
        return f"shop.{number}"
    return text


def _fail_message(shared_world: World, number: int, payload: str) -> tuple[str, str]:
    """Put the payload into all that a message has, make it a dead letter, and return queue and client id."""
    queue, client_id = _queue_name(number, payload), _client_id(number, payload)
    headers = {"x-payload": payload, "content-type": payload, "correlation-id": payload}
    with shared_world.connect(client_id) as connection:
        send_all(connection, [(queue, payload), (queue, payload)], headers=headers)
        connection.consumer("/topic/payloads", durable=f"all {number}").close()
        with connection.consumer(f"/queue/{queue}", ack="individual") as consumer:
            message = consumer.receive(60)
            assert message is not None
            message.reject(cause=payload)
    return queue, client_id


def _check(window: Window, path: str, *texts: str) -> None:
    window.open(path)
    found = _shown(window.page.locator("main").text_content() or "")
    for each in texts:
        assert _shown(each) in found, (path, each)


def _find_in_pages(window: Window, text: str, link: str) -> None:
    """Follow the link to the next page until the text is shown; without the link, fail."""
    while _shown(text) not in _shown(window.page.locator("main").text_content() or ""):
        window.page.get_by_role("link", name=link).click(timeout=5000)


@pytest.mark.parametrize("part", range(PARTS))
def test_payloads_are_shown_as_text_and_do_nothing(shared_world: World, open_window: OpenWindow, part: int) -> None:
    payloads = list(enumerate(PAYLOADS))[part::PARTS]
    window = open_window("admin")
    service = shared_world.start_service()
    shared_world.order(*((payload[:100], Order(number)) for number, payload in payloads if payload.isprintable()))
    for number, payload in payloads:
        queue, client_id = _fail_message(shared_world, number, payload)
        _check(window, f"/queue?name={quote(queue, safe='')}", queue)
        dead_letters = f"/dead-letters?queue={quote(f'DLQ.{queue}', safe='')}"
        _check(window, dead_letters, queue, payload.partition("\n")[0][:50])
        window.page.get_by_role("link", name="An example").first.click()
        message = _shown(window.page.locator("main").text_content() or "")
        assert _shown(payload) in message
        assert window.page.locator("main h1").inner_text().startswith("Message")
        window.page.locator("nav.pages").get_by_role("link", name="Subscriptions").click()
        _find_in_pages(window, client_id, "Next subscriptions")
    for path in ("/", "/queues", "/flows", "/stages", "/connections", "/durable", "/security"):
        _check(window, path)
    for each in window.page.request.get(f"{window.address}/flows", headers={"accept": "application/json"}).json()[
        "rows"
    ]:
        _check(window, each["link"], each["trace"])
    service.stop()


def test_payloads_as_the_name_of_a_user_that_logs_in_do_nothing(shared_world: World, open_window: OpenWindow) -> None:
    window = open_window("admin")
    for payload in PAYLOADS[::20]:
        stranger = window.context.new_page()
        window.faults = [each for each in window.faults if not each.startswith("another window")]
        stranger.goto(f"{window.address}/login")
        stranger.get_by_label("User").fill(payload)
        stranger.get_by_label("Password").fill(payload)
        stranger.get_by_role("button", name="Log in").click()
        stranger.get_by_role("alert").wait_for()
        assert stranger.get_by_label("User").input_value() == payload
        stranger.close()
    _check(window, "/security")
    window.faults = [each for each in window.faults if "status of 4" not in each]
