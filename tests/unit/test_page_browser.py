"""Tests of a browser of a part of a queue, without a broker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from truenext.client.core.message import Content
from truenext.client.core.queue_browser import PageOptions, read_page
from truenext.client.core.waiting import Flow
from truenext.errors import Code, Refused
from truenext.wire.stomp.frame import Frame

PAGE = PageOptions("/queue/a", "x = 1", None, 50, 1000, None)


class _Client:
    """Client whose broker never answers."""

    def __init__(self) -> None:
        self.browse_listeners: dict[str, Any] = {}
        self.link = SimpleNamespace(
            require_truenext=lambda feature: None, next_receipt_id="1", write_tracked=lambda data, handler: 1
        )

    def wait_until_up(self, deadline: float, feature: str) -> Flow[Any]:
        yield from ()
        return self.link

    def flush_soon(self) -> None:
        pass


def begin() -> tuple[Any, Any]:
    """Return the flow of a page that waits for messages, and its browser."""
    client = _Client()
    flow = read_page(client, PAGE, 10.0)  # type: ignore[arg-type]
    next(flow)
    (browser,) = client.browse_listeners.values()
    return flow, browser


def end(flow: Any) -> tuple[list[Content], bool]:
    """Let the deadline pass, and return the result of the flow."""
    with pytest.raises(StopIteration) as stopped:
        flow.send(False)
    result: tuple[list[Content], bool] = stopped.value.value
    return result


def test_page_has_what_was_found_until_the_deadline() -> None:
    flow, browser = begin()
    browser.on_message(Frame("MESSAGE", {"destination": "/queue/a", "message-id": "1"}, b"body"))
    contents, is_whole = end(flow)
    assert [each.body for each in contents] == [b"body"] and not is_whole


def test_page_without_a_message_until_the_deadline_is_an_error() -> None:
    flow, _ = begin()
    with pytest.raises(TimeoutError):
        flow.send(False)


def test_page_of_a_refused_connection_is_refused() -> None:
    # C31.8
    flow, browser = begin()
    browser.on_ended(Refused("the broker is being drained", Code.DRAINING))
    with pytest.raises(Refused, match="drained"):
        flow.send(True)


def test_page_with_dropped_messages_is_not_whole_although_its_end_has_come() -> None:
    """Fixed: if one read brought large bodies and the end, the messages dropped between them seemed to be shown."""
    flow, browser = begin()
    for _ in range(3):
        browser.on_message(Frame("MESSAGE", {}, bytes(600)))
    browser.on_message(Frame("MESSAGE", {"browser": "end"}))
    with pytest.raises(StopIteration) as stopped:
        flow.send(True)
    contents, is_whole = stopped.value.value
    assert (len(contents), is_whole) == (2, False)
