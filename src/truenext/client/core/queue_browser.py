"""Browser of a queue or a durable subscription. Its connection is used for nothing else.

The broker does not limit how many messages it sends to a browser. So the client stops reading the socket while enough
messages are buffered.
"""

from __future__ import annotations

from collections import deque

from truenext.client.core import frames
from truenext.client.core.client import Client
from truenext.client.core.link import AnswerHandler
from truenext.client.core.message import Content, make_content
from truenext.client.core.waiting import Flow, Signal, Wait
from truenext.errors import ConnectionLost, Refused
from truenext.wire.stomp.frame import Frame

UNREAD_MESSAGES_MAX = 1000
"""Number of buffered messages above which the client stops reading the socket."""


class QueueBrowser(AnswerHandler):
    """Browser that passes the messages of a queue to the program one by one. The messages stay in the queue."""

    def __init__(self, client: Client, destination: str, selector: str | None) -> None:
        self._client = client
        self._headers = {"id": "browse", "destination": destination, "browser": "true", "ack": "auto"}
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
            client.browse_listener = self
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
            is_refused = isinstance(error, Refused)
            self._error = (
                error if is_refused else ConnectionLost(f"the connection was lost while messages were shown: {error}")
            )
        self._signal.set()
