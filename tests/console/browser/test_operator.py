"""An operator in front of a real browser: finds what is wrong, reads why, and acts; and users who may only read.

Each run of all tests has one of these, as a browser and its world take seconds to start. `make console` runs all.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from tests.console.browser.conftest import OpenWindow, Window
from tests.console.browser.shop import Order
from tests.console.browser.world import World, fill_queues, reject_all, send_all
from truenext.console.logins import STREAMS_MAX

pytestmark = [pytest.mark.alternates("the console in a browser"), pytest.mark.timeout(300)]

OLD = "nightly.archive"
MANY = 30_000
QUEUES = 10_000


@pytest.fixture(scope="module")
def many_queues(shared_world: World) -> None:
    """Ten thousand queues, of which one has an old message."""
    with shared_world.connect() as connection:
        fill_queues(connection, [OLD])
        time.sleep(2)
        fill_queues(connection, [f"customer.{number:05}.in" for number in range(QUEUES)])


@pytest.fixture(scope="module")
def poison(shared_world: World) -> Iterator[None]:
    """A service of stages that has rejected an order."""
    service = shared_world.start_service()
    shared_world.order(("order o-1", Order(1, "Ada")), ("order o-2", Order(2)))
    with shared_world.connect() as connection, connection.consumer("/queue/DLQ.shop.order", ack="individual") as failed:
        message = failed.receive(60)
        assert message is not None
        message.release()
    yield
    service.stop()


def _counts(window: Window, queue: str) -> int:
    """Return the number of messages that wait in a queue, from the page of the queue."""
    window.open(f"/queue?name={queue}")
    text = window.page.locator(".figures > div", has_text="waiting").first.locator("dd").inner_text()
    return int(text.replace(",", ""))


def _await_end(window: Window) -> str:
    """Wait for the end of the work that the page shows, and return its state. The page follows by itself."""
    state = window.page.locator("#state")
    try:
        state.filter(has_text=re.compile("Done|Stopped|Failed")).wait_for()
    except Exception as error:
        raise AssertionError(window.page.locator("body").inner_text()) from error
    return str(state.inner_text())


@pytest.mark.usefixtures("many_queues")
def test_queue_with_the_oldest_message_is_found_among_ten_thousand(open_window: OpenWindow) -> None:
    page = open_window("reader").page
    page.get_by_role("link", name="Queues", exact=True).first.click()
    # Until its scripts are loaded, a page does not notice what is chosen.
    page.wait_for_url("**/queues")
    page.get_by_label("First").select_option("oldest message")
    first = page.locator("table.queues tbody tr").first
    first.filter(has_text=OLD).wait_for()
    page.wait_for_url("**order=oldest**")
    page.get_by_role("heading", name="Queues").click()
    page.keyboard.press("/")
    page.keyboard.type("0777")
    page.locator("table.queues tbody tr").filter(has_text="customer.00777.in").wait_for()
    page.locator("table.queues tbody tr").filter(has_text=OLD).wait_for(state="detached")
    assert page.locator("table.queues tbody tr").count() == 11
    page.get_by_role("link", name="customer.00777.in").click()
    page.get_by_role("heading", name="customer.00777.in").wait_for()


@pytest.mark.usefixtures("poison")
def test_poison_message_is_read_with_its_cause_and_followed_to_its_flow(open_window: OpenWindow) -> None:
    window = open_window("reader")
    page = window.page
    window.open("/queue?name=DLQ.shop.order")
    page.get_by_role("link", name="Dead letters by cause").click()
    group = page.locator("tbody tr").filter(has_text="order 2 has no customer")
    group.get_by_role("link", name="An example").click()
    page.get_by_text("Failed in shop.order").wait_for()
    assert "order 2 has no customer" in page.locator("pre.cause").inner_text()
    assert '"number": 2' in page.locator("main").inner_text()
    page.get_by_role("link", name="Its flow").click()
    page.get_by_role("heading", name="order o-2").wait_for()
    drawing = page.locator(".flow")
    assert "shop.order" in drawing.inner_text()
    assert "a dead letter" in drawing.inner_text()
    assert page.locator(".flow svg rect").count() > 0


def test_group_of_dead_letters_is_redriven_and_seen_to_end(shared_world: World, open_window: OpenWindow) -> None:
    with shared_world.connect() as connection:
        reject_all(connection, "bills", ["no account"] * 5 + ["account closed"] * 3)
    window = open_window("actor")
    page = window.page
    window.open("/dead-letters?queue=DLQ.bills")
    group = page.locator("tbody tr").filter(has_text="no account")
    assert "5" in group.locator("td.num").inner_text()
    group.get_by_role("link", name="Re-drive").click()
    asked = page.locator(".ask")
    asked.get_by_text("What would happen").wait_for()
    assert "5 messages" in asked.inner_text()
    assert "bills" in asked.locator("table").inner_text()
    assert _counts_of_groups(open_window("reader")) == {"no account": 5, "account closed": 3}
    asked.get_by_role("button", name="Re-drive").click()
    assert _await_end(window) == "Done"
    assert page.locator("#count").inner_text() == "5"
    assert _counts_of_groups(window) == {"account closed": 3}
    assert _counts(window, "bills") == 5


def _counts_of_groups(window: Window) -> dict[str, int]:
    window.open("/dead-letters?queue=DLQ.bills")
    rows = window.page.locator("tbody tr")
    rows.first.wait_for()
    texts = [rows.nth(number).inner_text() for number in range(rows.count())]
    causes = [cause for text in texts for cause in ("no account", "account closed") if cause in text]
    return dict(zip(causes, [int(re.findall(r"\t(\d+)\t", text)[0]) for text in texts], strict=True))


def test_redrive_is_stopped_half_way(shared_world: World, open_window: OpenWindow) -> None:
    with shared_world.connect() as connection:
        send_all(connection, [("expiring", str(number)) for number in range(MANY)], ttl=0.2)
        with connection.consumer("/queue/DLQ.expiring", ack="individual") as expired:
            message = expired.receive(60)
            assert message is not None
            message.release()
    window = open_window("actor")
    page = window.page
    deadline = time.monotonic() + 60
    while _counts(window, "DLQ.expiring") < MANY:
        assert time.monotonic() < deadline
    page.get_by_role("link", name="Re-drive").click()
    page.locator(".ask").get_by_role("button", name="Re-drive").click()
    page.locator("#stop").click()
    assert _await_end(window) == "Stopped"
    moved = int(page.locator("#count").inner_text().replace(",", ""))
    assert moved < MANY
    left = _counts(window, "DLQ.expiring")
    assert left == MANY - moved
    assert _counts(window, "expiring") == moved


def test_purge_asks_for_the_name_and_does_nothing_without_it(shared_world: World, open_window: OpenWindow) -> None:
    with shared_world.connect() as connection:
        fill_queues(connection, ["leftover"] * 3)
    window = open_window("actor")
    page = window.page
    window.open("/queue?name=leftover")
    page.get_by_role("link", name="Purge").click()
    asked = page.locator(".ask")
    assert "3 messages" in asked.inner_text()
    button = asked.get_by_role("button")
    button.click()
    assert asked.is_visible()
    page.get_by_label("Type leftover to go on").fill("leftovers")
    button.click()
    page.get_by_role("alert").wait_for()
    assert page.get_by_label("Type leftover to go on").is_visible(), "it can be typed again"
    assert _counts(window, "leftover") == 3
    page.get_by_role("link", name="Purge").click()
    page.get_by_role("link", name="Cancel").click()
    assert _counts(window, "leftover") == 3
    page.get_by_role("link", name="Purge").click()
    page.get_by_label("Type leftover to go on").fill("leftover")
    asked.get_by_role("button").click()
    assert _await_end(window) == "Done"
    assert _counts(window, "leftover") == 0


def test_process_of_stages_that_is_killed_is_shown_silent_until_an_operator_dismisses_it(
    shared_world: World, open_window: OpenWindow
) -> None:
    # C35.13
    service = shared_world.start_service()
    page = open_window("reader").page
    page.get_by_role("link", name="Stages", exact=True).click()
    process = page.locator("tr[id^='p-']").filter(has_text=str(service.pid))
    process.wait_for()
    service.kill()
    # The page follows by itself.
    process.filter(has_text="silent").wait_for(timeout=60_000)
    page.get_by_role("link", name="Overview").click()
    page.locator(".attention li").filter(has_text="silent").wait_for()
    page.get_by_role("link", name="Stages", exact=True).click()
    assert process.get_by_role("button").count() == 0
    page = open_window("actor").page
    page.get_by_role("link", name="Stages", exact=True).click()
    process = page.locator("tr[id^='p-']").filter(has_text=str(service.pid))
    process.get_by_role("button", name="Dismiss").click()
    process.wait_for(state="detached")


@pytest.mark.usefixtures("poison")
def test_users_who_may_only_read_see_all_and_get_no_button(shared_world: World, open_window: OpenWindow) -> None:
    with shared_world.connect() as connection:
        reject_all(connection, "readable", ["no account"] * 2)
    window = open_window("reader")
    page = window.page
    for path in (
        "/queue?name=DLQ.readable",
        "/dead-letters?queue=DLQ.readable",
        "/dead-letters",
        "/queues",
        "/stages",
        "/flows",
        "/scheduled",
        "/durable",
        "/connections",
        "/spark",
        "/security",
        "/settings",
    ):
        window.open(path)
        assert page.locator("main h1").is_visible(), path
        acts = page.locator("main").get_by_role("link", name=re.compile("Re-drive|Move|Purge|Close…"))
        assert acts.count() == 0, path
        assert page.locator("main form[method=post]").count() == 0, path
        assert page.locator("main input[type=checkbox]").count() == 0, path
    window.open("/action?verb=purge&queue=DLQ.readable")
    page.get_by_role("alert").wait_for()
    assert page.locator("form[method=post]:not([action='/logout'])").count() == 0
    # The browser logs that the answer was 403.
    window.faults.clear()
    assert _counts(window, "DLQ.readable") == 2


def test_pages_are_read_and_forms_sent_without_script(shared_world: World, open_window: OpenWindow) -> None:
    with shared_world.connect() as connection:
        fill_queues(connection, ["plain"] * 3)
    window = open_window("actor", java_script_enabled=False)
    page = window.page
    page.get_by_role("link", name="Queues", exact=True).first.click()
    page.get_by_label("Part of a name").fill("plain")
    page.get_by_role("button", name="Show").click()
    page.get_by_role("link", name="plain", exact=True).click()
    page.locator("tbody input[type=checkbox]").first.check()
    page.get_by_role("button", name="Purge").click()
    asked = page.locator(".ask")
    assert "1 message" in asked.inner_text()
    page.get_by_label("Type plain to go on").fill("plain")
    asked.get_by_role("button").click()
    while page.locator("#state").inner_text() != "Done":
        page.reload()
    assert _counts(window, "plain") == 2


def test_keyboard_alone_reaches_a_queue(shared_world: World, open_window: OpenWindow) -> None:
    with shared_world.connect() as connection:
        fill_queues(connection, ["typed"])
    window = open_window("reader")
    page = window.page
    window.open("/queues?name=typed")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Go to the page"
    page.keyboard.press("Enter")
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "typed":
            break
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="typed").wait_for()


def test_sixth_visible_page_says_that_it_is_not_live_and_pages_can_still_be_opened(
    shared_world: World, open_window: OpenWindow
) -> None:
    window = open_window("reader")
    pages = [window.page, *(window.context.new_page() for _ in range(STREAMS_MAX - 1))]
    for page in pages:
        page.goto(f"{window.address}/queues")
        page.get_by_text("live", exact=True).wait_for()
    sixth = window.context.new_page()
    sixth.goto(f"{window.address}/queues")
    sixth.get_by_text("not live: too many pages are open").wait_for()
    pages.pop().close()
    sixth.goto(f"{window.address}/queues")
    sixth.get_by_text("live", exact=True).wait_for()
    window.faults.clear()
