"""Questions, to the broker and to others, and the replies: a temporary queue of the connection, and who waits for what.

What is asked of others and not answered when the connection is lost is told so: the reply has nowhere to go any more.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TypeVar

import msgspec

from truenext.client.core import frames
from truenext.client.core.link import Link
from truenext.errors import ConnectionLost, Refused
from truenext.wire.stomp.frame import Frame

REPLIES = "/temp-queue/replies"
_SUBSCRIPTION = "replies"


T = TypeVar("T")


class ProducerStatus(msgspec.Struct):
    """What the broker knows of a producer. Source: docs/stomp.md, /control/producer"""

    sends: int
    """The highest number of its SENDs."""
    commits: int
    outcome: str | None = None
    """What became of the COMMIT that was asked for."""


class SubscriptionStatus(msgspec.Struct):
    id: str
    held: int
    """Messages that it holds."""
    idle: str
    """Why nothing comes."""


class ConnectionStatus(msgspec.Struct):
    """What the broker knows of this connection. Source: docs/stomp.md, /control/connection"""

    subscriptions: list[SubscriptionStatus]


def encode_control_request(verb: str, arguments: object) -> tuple[bytes, bytes]:
    """Head and body of a question to the broker. Raises: ValueError if no frame can say so"""
    headers = {"destination": f"/control/{verb}"}
    frames.check_headers(headers)
    return frames.encode_head("SEND", headers), b"" if arguments is None else msgspec.json.encode(arguments)


class _PendingRequest:
    __slots__ = ("on_failure", "on_reply")

    def __init__(self, on_reply: Callable[[Frame], None], on_failure: Callable[[Exception], None]) -> None:
        self.on_reply = on_reply
        self.on_failure = on_failure

    # As link.AnswerHandler, of the SEND that asks.

    def on_confirmed(self, frame: Frame) -> None:
        pass

    def on_refused(self, error: Refused) -> None:
        self.on_failure(error)

    def on_connection_lost(self) -> None:
        pass


class PendingRequests:
    def __init__(self) -> None:
        self._pending: dict[str, _PendingRequest] = {}
        """By correlation id."""
        self._numbers = count(1)
        self._subscribed_link: Link | None = None

    @property
    def is_empty(self) -> bool:
        """Nobody waits for a reply."""
        return not self._pending

    def send_control_request(
        self, link: Link, verb: str, arguments: object, reply_type: type[T], on_reply: Callable[[T], None]
    ) -> None:
        """Ask the broker something that this client has to know, whose answer has this shape. A connection that is lost
        forgets the question."""
        head, body = encode_control_request(verb, arguments)
        self.send_request(
            link,
            head,
            body,
            lambda frame: on_reply(msgspec.json.decode(frame.body, type=reply_type)),
            _raise_connection_lost,
        )

    def forget_request(self, correlation: str) -> None:
        """Nobody waits any more."""
        self._pending.pop(correlation, None)

    def send_request(
        self,
        link: Link,
        head: bytes,
        body: bytes,
        on_reply: Callable[[Frame], None],
        on_failure: Callable[[Exception], None],
    ) -> str:
        """Returns the name of the question."""
        if self._subscribed_link is not link:
            self._subscribed_link = link
            link.write(frames.encode_frame("SUBSCRIBE", {"id": _SUBSCRIPTION, "destination": REPLIES, "ack": "auto"}))
        correlation = str(next(self._numbers))
        request = self._pending[correlation] = _PendingRequest(on_reply, on_failure)
        lines = f"reply-to:{REPLIES}\ncorrelation-id:{correlation}\ncontent-length:{len(body)}\n\n".encode()
        link.write_tracked(b"".join((head, lines, body, b"\0")), request)
        return correlation

    def on_message(self, frame: Frame) -> bool:
        """Whether it is a reply, wanted or not."""
        if frame.headers.get("subscription") != _SUBSCRIPTION:
            return False
        request = self._pending.pop(frame.headers.get("correlation-id", ""), None)
        if request is not None:
            request.on_reply(frame)
        return True

    def on_connection_lost(self, error: Exception) -> None:
        """The connection has gone."""
        requests, self._pending = self._pending, {}
        for request in requests.values():
            if request.on_failure is not _raise_connection_lost:
                request.on_failure(error)


def _raise_connection_lost(error: Exception) -> None:
    raise ConnectionLost(f"the broker refused a question: {error}") from error
