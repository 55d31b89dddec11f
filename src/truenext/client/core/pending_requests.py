"""Requests to the broker and to other clients, and the replies, for which each connection has a temporary queue.

When the connection is lost, pending requests to other clients fail: their replies can no longer arrive.
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
    """Highest number of a SEND of the producer."""
    commits: int
    outcome: str | None = None
    """Outcome of the COMMIT that the request names."""


class SubscriptionStatus(msgspec.Struct):
    id: str
    held: int
    """Number of messages that the subscription holds."""
    idle: str
    """Reason why no message is dispatched."""


class ConnectionStatus(msgspec.Struct):
    """State of this connection at the broker. Source: docs/reference/control.md, `connection`"""

    subscriptions: list[SubscriptionStatus]


def encode_control_request(verb: str, arguments: object) -> tuple[bytes, bytes]:
    """Encode head and body of a control request. Raises: ValueError if a header cannot hold the verb"""
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
        """Pending requests by correlation id."""
        self._numbers = count(1)
        self._subscribed_link: Link | None = None

    @property
    def is_empty(self) -> bool:
        return not self._pending

    def send_control_request(
        self, link: Link, verb: str, arguments: object, reply_type: type[T], on_reply: Callable[[T], None]
    ) -> None:
        """Send a control request of the client itself, and decode the answer. If the connection is lost, the request
        is forgotten; if it is refused, the connection ends."""
        head, body = encode_control_request(verb, arguments)
        self.send_request(
            link,
            head,
            body,
            lambda frame: on_reply(msgspec.json.decode(frame.body, type=reply_type)),
            _raise_connection_lost,
        )

    def forget_request(self, correlation: str) -> None:
        """Forget a request for which its caller no longer waits."""
        self._pending.pop(correlation, None)

    def send_request(
        self,
        link: Link,
        head: bytes,
        body: bytes,
        on_reply: Callable[[Frame], None],
        on_failure: Callable[[Exception], None],
    ) -> str:
        """Send a request. Returns its correlation id."""
        if self._subscribed_link is not link:
            self._subscribed_link = link
            link.write(frames.encode_frame("SUBSCRIBE", {"id": _SUBSCRIPTION, "destination": REPLIES, "ack": "auto"}))
        correlation = str(next(self._numbers))
        request = self._pending[correlation] = _PendingRequest(on_reply, on_failure)
        lines = f"reply-to:{REPLIES}\ncorrelation-id:{correlation}\ncontent-length:{len(body)}\n\n".encode()
        link.write_tracked(b"".join((head, lines, body, b"\0")), request)
        return correlation

    def on_message(self, frame: Frame) -> bool:
        """Handle a MESSAGE; return whether it is a reply, pending or not."""
        if frame.headers.get("subscription") != _SUBSCRIPTION:
            return False
        request = self._pending.pop(frame.headers.get("correlation-id", ""), None)
        if request is not None:
            request.on_reply(frame)
        return True

    def on_connection_lost(self, error: Exception) -> None:
        """Fail the pending requests of callers."""
        requests, self._pending = self._pending, {}
        for request in requests.values():
            if request.on_failure is not _raise_connection_lost:
                request.on_failure(error)


def _raise_connection_lost(error: Exception) -> None:
    raise ConnectionLost(f"the broker refused a control request: {error}") from error
