"""Fixtures of the browser's tests: a real browser, and windows in it that note everything which a page must not do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.console.browser.world import PASSWORD, World, world

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Dialog, Page, Route

_CHROMIUM = os.environ.get("TRUENEXT_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or ""
_NOTE_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", (event) => {
  console.error(`content security policy: ${event.violatedDirective} ${event.blockedURI} ${event.sample}`);
});
"""
PATIENCE_MS = 30_000


# While it runs, this thread has a running event loop, so that tests of other modules could not start one.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, without a window."""
    reason = "the console is tried in a browser where playwright is installed (truenext[browser]), and chromium"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    if not _CHROMIUM:
        pytest.skip(reason)
    # Chromium has no sandbox for root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=_CHROMIUM, args=arguments)
        yield launched
        launched.close()


class Window:
    """Window of a browser that shows the console to one user."""

    def __init__(self, context: BrowserContext, address: str) -> None:
        self.address = address
        self.context = context
        self.faults: list[str] = []
        """What a page must not do: ask in a dialog, request something elsewhere, violate its policy, log an error."""
        context.set_default_timeout(PATIENCE_MS)
        context.add_init_script(_NOTE_VIOLATIONS)
        context.route("**/*", self._let_own_requests_pass)
        self.page: Page = context.new_page()
        self.page.on("dialog", self._note_dialog)
        self.page.on("console", self._note_log)
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        context.on("page", lambda page: self.faults.append(f"another window: {page.url}"))

    def log_in(self, user: str) -> None:
        self.page.goto(self.address)
        self.page.get_by_label("User").fill(user)
        self.page.get_by_label("Password").fill(PASSWORD)
        self.page.get_by_role("button", name="Log in").click()
        self.page.get_by_role("heading", name="What wants attention").wait_for()

    def open(self, path: str) -> None:
        self.page.goto(f"{self.address}{path}")

    def _let_own_requests_pass(self, route: Route) -> None:
        if f"{route.request.url}/".startswith(f"{self.address}/"):
            route.continue_()
        else:
            self.faults.append(f"request to {route.request.url}")
            route.abort()

    def _note_dialog(self, dialog: Dialog) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _note_log(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.faults.append(f"{message.text} at {urlsplit(message.location.get('url', '')).path}")


OpenWindow = Callable[..., Window]


@pytest.fixture(scope="module")
def shared_world(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("console")) as made:
        yield made


@pytest.fixture
def open_window(browser: Browser, shared_world: World) -> Iterator[OpenWindow]:
    """Function that opens a window on the console for a user. At the end no page may have had a fault."""
    windows: list[Window] = []

    def open_for(user: str, at: World = shared_world, **options: Any) -> Window:
        window = Window(browser.new_context(**options), at.address)
        windows.append(window)
        window.log_in(user)
        return window

    try:
        yield open_for
        assert [fault for each in windows for fault in each.faults] == []
    finally:
        for each in windows:
            each.context.close()
