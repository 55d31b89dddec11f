"""Templates: with a payload in each text of a page, its HTML has the elements and attributes that it has with a plain
word, and each address is one of the console's."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from tests.console.payloads import PAYLOADS
from tests.console.samples import OVERVIEW, SAMPLES
from truenext.console.pages.overview import Chart
from truenext.console.rendering import TYPES, Renderer

_RENDERER = Renderer()
_DECIDING = {
    *("Act.name", "Action.verb", "Attention.level", "Body.form", "Body.forms", "Chart.unit", "Figure.level"),
    *("Figure.unit", "FlowPage.drawing", "FlowPage.state", "FlowRow.state", "Flows.order", "Flows.orders"),
    *("ProcessRow.state", "Progress.state", "Progress.verb", "QueueRow.kind", "QueueRow.level", "Queues.order"),
    *("Queues.orders", "ServiceRow.level"),
}
"""Fields that the console itself sets, to one of a few words. A drawing is escaped where it is made."""
_LINKS = {
    *("back", "close", "dead_letters", "download", "example", "first", "flow", "go_on", "link", "messages", "next"),
    *("origin_link", "post", "queue_link"),
}
"""Fields with an address of the console, which `truenext.console.pages.links` makes."""
_ADDRESSES = {"href", "src", "action", "formaction", "hx-get", "hx-sse:connect"}
_OWN_ADDRESS = re.compile(r"/(?![/\\])|#[\w-]+$")
_FORBIDDEN = re.compile(r"on\w+|style|hx-on.*|hx-vals|hx-headers|srcdoc")
WORD = "word"


class Outline(HTMLParser):
    """Elements of a page with the names of their attributes, and its addresses without parameters."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(name for name, _ in attrs)))
        self.addresses += [(value or "").partition("?")[0] for name, value in attrs if name in _ADDRESSES]

    def handle_endtag(self, tag: str) -> None:
        self.elements.append((f"/{tag}", ()))

    def handle_comment(self, data: str) -> None:
        self.elements.append(("comment", ()))

    def handle_data(self, data: str) -> None:
        self.text += data


def with_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a page with each text changed, except links and what the console sets itself."""
    if isinstance(value, str):
        return value if value.startswith("/") else change(value)
    if isinstance(value, list):
        return [with_text(each, change) for each in value]
    if isinstance(value, tuple):
        return tuple(with_text(each, change) for each in value)
    if isinstance(value, dict):
        # Names of a dict must stay different.
        return {
            f"{with_text(name, change)} {number}" if isinstance(name, str) else name: with_text(each, change)
            for number, (name, each) in enumerate(value.items())
        }
    if isinstance(value, msgspec.Struct):
        changes = {
            each.name: with_text(getattr(value, each.name), change)
            for each in msgspec.structs.fields(value)
            if f"{type(value).__name__}.{each.name}" not in _DECIDING
            and not (each.name in _LINKS and isinstance(getattr(value, each.name), str))
        }
        return msgspec.structs.replace(value, **changes)
    return value


def render(template: str, page: Any, word: str) -> list[str]:
    context = {
        "page": page,
        "title": word,
        "here": "/queues?name=word",
        "user": word,
        "is_logged_in": True,
        "token": "t",
        "may": None,
        "nav": [("/", "Overview"), ("/queues", "Queues")],
        "broker": {"name": word, "reachable": False},
        "version": "0",
        "at": 1_790_000_000_000,
    }
    return [_RENDERER.page(template, context), _RENDERER.live(template, context)]


@pytest.mark.parametrize("template", SAMPLES)
def test_texts_of_a_page_are_never_elements_attributes_or_addresses(template: str) -> None:
    plain = [Outline(html) for html in render(template, with_text(SAMPLES[template], lambda _: WORD), WORD)]
    # Some texts hold several payloads, so that a page is rendered a few times, not a hundred.
    for start in range(0, len(PAYLOADS), 20):
        word = " ".join(PAYLOADS[start : start + 20])
        pages = render(template, with_text(SAMPLES[template], lambda _, word=word: word), word)  # type: ignore[misc]
        for html, expected in zip(pages, plain, strict=True):
            found = Outline(html)
            assert found.elements == expected.elements
            assert found.addresses == expected.addresses
            assert "{{7*7}}" in found.text or "{{7*7}}" not in word or not html


@pytest.mark.parametrize("template", SAMPLES)
def test_pages_have_no_script_or_style_of_their_own_and_only_own_addresses(template: str) -> None:
    for html in render(template, SAMPLES[template], "anna"):
        outline = Outline(html)
        assert not [name for _, names in outline.elements for name in names if _FORBIDDEN.fullmatch(name)]
        assert all(_OWN_ADDRESS.match(each) for each in outline.addresses)
        assert not re.search(r"<script(?![^>]* src=)", html)
        assert "<style" not in html


@pytest.mark.parametrize("template", SAMPLES)
def test_fields_and_buttons_of_a_page_have_names(template: str) -> None:
    html = render(template, SAMPLES[template], "anna")[0]
    unlabelled = re.sub(r"<label.*?</label>", "", html, flags=re.DOTALL)
    fields = re.findall(r"<(?:input|select|textarea)[^>]*>", unlabelled)
    assert [each for each in fields if 'type="hidden"' not in each and "aria-label=" not in each] == []
    assert re.findall(r"<button[^>]*>\s*</button>", html) == []
    for table in re.findall(r"<table.*?</table>", html, flags=re.DOTALL):
        assert "<caption" in table
        assert "scope=" in table


def test_a_first_page_with_an_hour_of_charts_weighs_less_than_200_kib() -> None:
    overview = msgspec.structs.replace(OVERVIEW, charts=[_rounded(each) for each in OVERVIEW.charts])
    files = [path for path in _RENDERER.static.files.values() if path.suffix in TYPES]
    page = len(render("overview", overview, "anna")[0].encode())
    assert page + sum(path.stat().st_size for path in files) < 200 * 1024


def _rounded(chart: Chart) -> Chart:
    """Return a chart with values of four digits, as the console makes them."""
    series = {
        name: [None if each is None else float(f"{each:.4g}") for each in values]
        for name, values in chart.series.items()
    }
    return msgspec.structs.replace(chart, series=series)


def test_chart_has_its_lines_in_the_order_of_its_legend() -> None:
    """Fixed: the names were sorted, so that the colours of the lines were those of other names."""
    chart = Chart("Waiting", "messages", [1, 2], {"waiting": [1, 2], "held": [3, 4]})
    html = render("overview", msgspec.structs.replace(OVERVIEW, charts=[chart]), WORD)[0]
    lines = re.search(r'data-chart="(.*?)"', html)
    assert lines is not None
    assert lines[1].index("waiting") < lines[1].index("held")
