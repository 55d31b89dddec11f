"""Browsers of a queue or a durable subscription.

`QueueBrowser` has a connection of its own: the broker does not limit how many messages it sends, so the client stops
reading the socket while enough messages are buffered. `read_page` reads a few messages on a connection that is used for
other things, too.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from truenext.client.core import frames
from truenext.client.core.client import Client
from truenext.client.core.link import AnswerHandler
from truenext.client.core.message import Content, make_content
from truenext.client.core.waiting import Flow, Signal, Wait
from truenext.errors import ConnectionLost, Refused
from truenext.wire.stomp.frame import Frame

_BROWSE = "browse"
"""Id of the subscription that has a connection of its own."""

PAGE_BODIES_MAX = 8 * 1024 * 1024
"""Bytes of bodies with which a page ends, unless the caller says otherwise."""
UNREAD_MESSAGES_MAX = 1000
"""Number of buffered messages above which the client stops reading the socket."""


class QueueBrowser(AnswerHandler):
    """Browser that passes the messages of a queue to the program one by one. The messages stay in the queue."""

    def __init__(self, client: Client, destination: str, selector: str | None) -> None:
        self._client = client
        self._headers = {"id": _BROWSE, "destination": destination, "browser": "true", "ack": "auto"}
        if selector is not None:
            self._headers["selector"] = selector
        frames.check_headers(self._headers)
        self._frames: deque[Frame] = deque()
        self._is_subscribed = False
        self._is_complete = False
        self._error: Exception | None = None
        self._signal = Signal()

    def next_message(self) -> Flow[Content | None]:
        """Return the next message, or None after the last.

        Raises: Refused if the broker refuses to browse; ConnectionLost if the connection ends before the last message
        """
        client = self._client
        if not self._is_subscribed:
            self._is_subscribed = True
            link = yield from client.wait_until_up(None, "browse")
            client.browse_listeners[_BROWSE] = self
            self._headers["receipt"] = link.next_receipt_id
            link.write_tracked(frames.encode_frame("SUBSCRIBE", self._headers), self)
            client.flush_soon()
        while not self._frames:
            if self._error is not None:
                raise self._error
            if self._is_complete:
                return None
            self._signal = Signal()
            yield Wait(self._signal)
        content = make_content(self._frames.popleft())
        client.is_read_buffer_full = len(self._frames) > UNREAD_MESSAGES_MAX
        return content

    def on_message(self, frame: Frame) -> None:
        if frame.headers.get("browser") == "end":
            self._is_complete = True
        else:
            self._frames.append(frame)
            self._client.is_read_buffer_full = len(self._frames) > UNREAD_MESSAGES_MAX
        self._signal.set()

    def on_refused(self, error: Refused) -> None:
        self._error = error
        self._signal.set()

    def on_ended(self, error: Exception) -> None:
        """Handle the end of the connection. The program gets ConnectionLost if messages are missing."""
        if not self._is_complete:
            self._error = _end_error(error)
        self._signal.set()


def _end_error(error: Exception) -> Exception:
    if isinstance(error, Refused):
        return error
    return ConnectionLost(f"the connection was lost while messages were shown: {error}")


class PageBrowser(AnswerHandler):
    """Browser of a part of a queue. It ends early once the bodies are large together."""

    def __init__(self, bytes_max: int, body_max: int | None) -> None:
        self._bytes_max = bytes_max
        self._body_max = body_max
        self._size = 0
        self._contents: list[Content] = []
        self._error: Exception | None = None
        self._is_complete = False
        self._has_dropped = False
        """True if messages came after those whose bodies were large together, as one read may bring all of them."""
        self.signal = Signal()

    @property
    def has_found(self) -> bool:
        return bool(self._contents)

    @property
    def is_refused(self) -> bool:
        return isinstance(self._error, Refused)

    def result(self) -> tuple[list[Content], bool]:
        """Return the messages, and whether these are all that the browser asked for. Raises: the browser's error"""
        if self._error is not None:
            raise self._error
        return self._contents, self._is_complete and not self._has_dropped

    def on_message(self, frame: Frame) -> None:
        if frame.headers.get("browser") == "end":
            self._is_complete = True
            self.signal.set()
        elif self._size < self._bytes_max:
            frame.body = frame.body[: self._body_max]
            self._size += len(frame.body)
            self._contents.append(make_content(frame))
            if self._size >= self._bytes_max:
                self.signal.set()
        else:
            self._has_dropped = True

    def on_refused(self, error: Refused) -> None:
        self._error = error
        self.signal.set()

    def on_ended(self, error: Exception) -> None:
        if not self._is_complete:
            self._error = _end_error(error)
            self.signal.set()


class PageOptions(NamedTuple):
    destination: str
    selector: str | None
    after: tuple[int, int] | None
    """Priority and sequence of the message after which the page begins; None begins with the first message."""
    count_max: int
    bytes_max: int
    """Bytes of bodies with which the page ends."""
    body_max: int | None
    """Bytes of each body that are kept; None keeps all."""

    def headers(self) -> dict[str, str]:
        headers = {
            "destination": self.destination,
            "browser": "true",
            "ack": "auto",
            "truenext-count": str(self.count_max),
        }
        if self.selector is not None:
            headers["selector"] = self.selector
        if self.after is not None:
            headers["truenext-after"] = "{},{}".format(*self.after)
        frames.check_headers(headers)
        return headers


def read_page(client: Client, page: PageOptions, deadline: float) -> Flow[tuple[list[Content], bool]]:
    """Read some messages of a queue. Return them, and whether they are not fewer because of `bytes_max` or `deadline`.

    Raises: Refused if the broker refuses to browse; ConnectionLost if the connection ends; TimeoutError if there is no
    message until the deadline
    """
    headers = page.headers()
    link = yield from client.wait_until_up(deadline, "browse")
    link.require_truenext("browse_page")
    id = f"{_BROWSE}-{link.next_receipt_id}"
    browser = PageBrowser(page.bytes_max, page.body_max)
    client.browse_listeners[id] = browser
    try:
        link.write_tracked(
            frames.encode_frame("SUBSCRIBE", headers | {"id": id, "receipt": link.next_receipt_id}), browser
        )
        client.flush_soon()
        if not (yield Wait(browser.signal, deadline)) and not browser.has_found:
            raise TimeoutError(f"{page.destination} was not shown in time")
    finally:
        del client.browse_listeners[id]
        if link is client.link and not browser.is_refused:
            link.write_tracked(frames.encode_frame("UNSUBSCRIBE", {"id": id}), AnswerHandler())
            client.flush_soon()
    return browser.result()
