"""Requests to the broker and to other clients. Replies arrive at a temporary queue of the connection.

The temporary queue ends with the connection. So pending requests to other clients fail when the connection is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TypeVar

import msgspec

from truenext.client.core import frames
from truenext.client.core.link import AnswerHandler, Link
from truenext.errors import ConnectionLost, Refused
from truenext.wire.stomp.frame import Frame

REPLIES = "/temp-queue/replies"
_SUBSCRIPTION = "replies"


T = TypeVar("T")


class ProducerStatus(msgspec.Struct):
    """State of a producer at the broker. Source: docs/reference/control.md, `producer`"""

    sends: int
    """Highest number of this producer's sends."""
    commits: int
    outcome: str | None = None
    """Outcome of the COMMIT whose number was in the request."""


class SubscriptionStatus(msgspec.Struct):
    id: str
    held: int
    """Number of messages that the subscription holds."""
    idle: str
    """Reason why the broker dispatches no message to the subscription; empty if the broker could dispatch one."""


class ConnectionStatus(msgspec.Struct):
    """State of this connection at the broker. Source: docs/reference/control.md, `connection`"""

    subscriptions: list[SubscriptionStatus]


def encode_control_request(verb: str, arguments: object) -> tuple[bytes, bytes]:
    """Encode the head and the body of a control request. Raises: ValueError if `verb` does not fit into a header"""
    headers = {"destination": f"/control/{verb}"}
    frames.check_headers(headers)
    return frames.encode_head("SEND", headers), b"" if arguments is None else msgspec.json.encode(arguments)


class _PendingRequest(AnswerHandler, msgspec.Struct, eq=False):
    on_reply: Callable[[Frame], None]
    on_failure: Callable[[Exception], None]

    def on_refused(self, error: Refused) -> None:
        self.on_failure(error)


class PendingRequests:
    def __init__(self) -> None:
        self._pending: dict[str, _PendingRequest] = {}
        self._numbers = count(1)
        self._subscribed_link: Link | None = None

    @property
    def is_empty(self) -> bool:
        return not self._pending

    def send_control_request(
        self, link: Link, verb: str, arguments: object, reply_type: type[T], on_reply: Callable[[T], None]
    ) -> None:
        """Send a control request that the client itself needs; `on_reply` gets the decoded answer.

        If the connection is lost, `on_reply` is not called. If the broker refuses the request, the connection ends.
        """
        head, body = encode_control_request(verb, arguments)
        self.send_request(
            link,
            head,
            body,
            lambda frame: on_reply(msgspec.json.decode(frame.body, type=reply_type)),
            _raise_connection_lost,
        )

    def forget_request(self, correlation: str) -> None:
        """Drop a request, because its caller has stopped waiting."""
        self._pending.pop(correlation, None)

    def send_request(
        self,
        link: Link,
        head: bytes,
        body: bytes,
        on_reply: Callable[[Frame], None],
        on_failure: Callable[[Exception], None],
    ) -> str:
        """Send a request, and return its correlation id. `on_reply` gets the reply, `on_failure` an error."""
        if self._subscribed_link is not link:
            self._subscribed_link = link
            link.write(frames.encode_frame("SUBSCRIBE", {"id": _SUBSCRIPTION, "destination": REPLIES, "ack": "auto"}))
        correlation = str(next(self._numbers))
        request = self._pending[correlation] = _PendingRequest(on_reply, on_failure)
        lines = f"reply-to:{REPLIES}\ncorrelation-id:{correlation}\ncontent-length:{len(body)}\n\n".encode()
        link.write_tracked(b"".join((head, lines, body, b"\0")), request)
        return correlation

    def on_message(self, frame: Frame) -> None:
        """Handle a MESSAGE that no subscription of the program gets. It may be a reply to a request that was
        dropped."""
        if frame.headers.get("subscription") == _SUBSCRIPTION:
            request = self._pending.pop(frame.headers.get("correlation-id", ""), None)
            if request is not None:
                request.on_reply(frame)

    def on_connection_lost(self, error: Exception) -> None:
        """Fail all requests whose callers wait for a reply."""
        requests, self._pending = self._pending, {}
        for request in requests.values():
            if request.on_failure is not _raise_connection_lost:
                request.on_failure(error)


def _raise_connection_lost(error: Exception) -> None:
    raise ConnectionLost(f"the broker refused a control request: {error}") from error
