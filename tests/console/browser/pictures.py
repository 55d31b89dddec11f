"""Pictures for docs/console.md: `python -m tests.console.browser.pictures docs/images`.

They show a shop that is in trouble: a service of which one process was killed, orders that no stage takes, and dead
letters of some causes. It takes two minutes, so that charts have something to show.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tests.console.browser.conftest import Window
from tests.console.browser.shop import UNKNOWN, Order
from tests.console.browser.world import World, reject_all, send_all, world

SECONDS = 100
WIDTH = 1120


def make_trouble(shop: World, page: Page) -> None:
    with shop.connect() as connection:
        send_all(connection, [("archive.nightly", "{}")] * 812)
        reject_all(connection, "payments", ["CardDeclined: 4000"] * 37 + ["TimeoutError: bank.example"] * 12)
        services = [shop.start_service() for _ in range(3)]
        end = time.monotonic() + SECONDS
        number = 0
        while time.monotonic() < end:
            orders = [Order(number + each, "Ada") for each in range(20)] + [
                Order(number + 20),
                Order(number + 21, UNKNOWN),
            ]
            shop.order(*((f"order {order.number}", order) for order in orders))
            number += len(orders)
            if len(services) == 3 and time.monotonic() > end - 25:
                services.pop().kill()
            # The pages stay live meanwhile.
            page.wait_for_timeout(400)


def take_pictures(shop: World, to: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--force-color-profile=srgb"]
        )
        window = Window(browser.new_context(viewport={"width": WIDTH, "height": 720}), shop.address)
        window.log_in("admin")
        make_trouble(shop, window.page)
        for name, path in (
            ("overview", "/"),
            ("dead-letters", "/dead-letters?queue=DLQ.payments"),
            ("redrive", "/action?verb=redrive&queue=DLQ.payments"),
            ("queues", "/queues"),
            ("stages", "/stages"),
        ):
            window.open(path)
            window.page.wait_for_timeout(2500)
            window.page.screenshot(path=to / f"console-{name}.png")
        window.open("/flows")
        window.page.locator("tbody tr").filter(has_text="StockAway").get_by_role("link").first.click()
        window.page.locator(".flow").wait_for()
        window.page.screenshot(path=to / "console-flow.png")
        dark = Window(browser.new_context(viewport={"width": 390, "height": 700}, color_scheme="dark"), shop.address)
        dark.log_in("reader")
        dark.page.wait_for_timeout(3000)
        dark.page.screenshot(path=to / "console-narrow.png")
        browser.close()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, world(Path(name)) as made:
        take_pictures(made, folder)
