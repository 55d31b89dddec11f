"""Pages at three widths, light and dark: nothing is cut off, and all text can be read. They are samples, without a
broker. TRUENEXT_PICTURES=DIR keeps their pictures, to be looked at."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
import uvicorn

from tests.console.browser.conftest import Window
from tests.console.samples import SAMPLE_PAGES, sample_console
from truenext.console.app import make_app
from truenext.console.serving import Listen, public_address

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.alternates("the console in a browser"), pytest.mark.timeout(300)]

PATHS = [
    *("/", "/queues", "/queue?name=orders.new", "/message?queue=a&sequence=1&priority=4", "/dead-letters"),
    *("/action", "/progress", "/stages", "/flows", "/flow", "/scheduled", "/durable", "/connections", "/spark"),
    *("/security", "/settings"),
]
CONTRAST_MIN = 4.5
"""Least contrast of text. Source: W3C, "Web Content Accessibility Guidelines" 2.2, 1.4.3"""
_FIND_FAINT_TEXT = """
() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([red, green, blue]) => {
    const part = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    return 0.2126 * part(red) + 0.7152 * part(green) + 0.0722 * part(blue);
  };
  const background = (element) => {
    for (; element; element = element.parentElement) {
      const colour = parse(getComputedStyle(element).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const is_shown = element.checkVisibility() && !element.closest("script, .hidden, noscript");
    if (!is_shown || !walker.currentNode.data.trim()) continue;
    const [one, other] = [light(parse(getComputedStyle(element).color)), light(background(element))];
    const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (contrast < LEAST) faint.push(`${contrast.toFixed(1)}: ${walker.currentNode.data.trim().slice(0, 40)}`);
  }
  return faint;
}
""".replace("LEAST", str(CONTRAST_MIN))


@pytest.fixture(scope="module")
def samples() -> Iterator[tuple[str, str]]:
    """Address of a console that shows samples, and of the page that opens it."""
    loop = asyncio.new_event_loop()
    config = uvicorn.Config(_without_app, port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=loop.run_until_complete, args=(_serve(server, config),))
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    console = sample_console(public_address(Listen("http", "127.0.0.1", port), []))
    server.config.loaded_app = make_app(console, SAMPLE_PAGES)
    yield f"http://127.0.0.1:{port}", f"/open?key={console.key}"
    server.should_exit = True
    server.force_exit = True
    thread.join()
    loop.close()


async def _without_app(scope: Any, receive: Any, send: Any) -> None:
    """Take the place of the console until its port is known."""


async def _serve(server: uvicorn.Server, config: uvicorn.Config) -> None:
    await server.serve()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1280])
def test_pages_fit_their_window_and_their_text_is_legible(
    browser: Browser, samples: tuple[str, str], width: int, scheme: Literal["light", "dark"]
) -> None:
    address, opening = samples
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    window = Window(context, address)
    window.open(opening)
    for path in PATHS:
        window.open(path)
        assert window.page.evaluate("document.documentElement.scrollWidth") <= width, path
        assert window.page.evaluate(_FIND_FAINT_TEXT) == [], path
        if folder := os.environ.get("TRUENEXT_PICTURES"):
            window.page.wait_for_timeout(300)
            name = path.partition("?")[0].strip("/") or "overview"
            window.page.screenshot(path=Path(folder) / f"{name}-{width}-{scheme}.png", full_page=True)
    assert window.faults == []
    context.close()
