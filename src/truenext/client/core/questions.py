"""Questions, to the broker and to others, and the replies: a temporary queue of the connection, and who waits for what.

What is asked of others and not answered when the connection is lost is told so: the reply has nowhere to go any more.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, TypeVar

import msgspec

from truenext.client.core import frames
from truenext.errors import ConnectionLost, Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from truenext.client.core.link import Link
    from truenext.wire.stomp.frame import Frame

REPLIES = "/temp-queue/replies"
_SUBSCRIPTION = "replies"


T = TypeVar("T")


class OfProducer(msgspec.Struct):
    """What the broker knows of a producer. Source: docs/stomp.md, /control/producer"""

    sends: int
    """The highest number of its SENDs."""
    commits: int
    outcome: str | None = None
    """What became of the COMMIT that was asked for."""


class OfSubscription(msgspec.Struct):
    id: str
    held: int
    """Messages that it holds."""
    idle: str
    """Why nothing comes."""


class OfConnection(msgspec.Struct):
    """What the broker knows of this connection. Source: docs/stomp.md, /control/connection"""

    subscriptions: list[OfSubscription]


def worded(verb: str, question: object) -> tuple[bytes, bytes]:
    """Head and body of a question to the broker. Raises: ValueError if no frame can say so"""
    headers = {"destination": f"/control/{verb}"}
    frames.check(headers)
    return frames.head("SEND", headers), b"" if question is None else msgspec.json.encode(question)


class _Question:
    __slots__ = ("answered", "failed")

    def __init__(self, answered: Callable[[Frame], None], failed: Callable[[Exception], None]) -> None:
        self.answered = answered
        self.failed = failed

    # As link.Unanswered, of the SEND that asks.

    def confirmed(self, frame: Frame) -> None:
        pass

    def refused(self, error: Refused) -> None:
        self.failed(error)

    def lost(self) -> None:
        pass


class Questions:
    def __init__(self) -> None:
        self._open: dict[str, _Question] = {}
        """By correlation id."""
        self._numbers = count(1)
        self._subscribed: Link | None = None

    @property
    def are_none(self) -> bool:
        """Nobody waits for a reply."""
        return not self._open

    def ask(self, link: Link, verb: str, question: object, shape: type[T], answered: Callable[[T], None]) -> None:
        """Ask the broker something that this client has to know, whose answer has this shape. A connection that is lost
        forgets the question."""
        head, body = worded(verb, question)
        self.send(link, head, body, lambda frame: answered(msgspec.json.decode(frame.body, type=shape)), _must_answer)

    def forget(self, correlation: str) -> None:
        """Nobody waits any more."""
        self._open.pop(correlation, None)

    def send(
        self,
        link: Link,
        head: bytes,
        body: bytes,
        answered: Callable[[Frame], None],
        failed: Callable[[Exception], None],
    ) -> str:
        """Returns the name of the question."""
        if self._subscribed is not link:
            self._subscribed = link
            link.write(frames.frame("SUBSCRIBE", {"id": _SUBSCRIPTION, "destination": REPLIES, "ack": "auto"}))
        correlation = str(next(self._numbers))
        question = self._open[correlation] = _Question(answered, failed)
        said = f"reply-to:{REPLIES}\ncorrelation-id:{correlation}\ncontent-length:{len(body)}\n\n".encode()
        link.ask(b"".join((head, said, body, b"\0")), question)
        return correlation

    def on_message(self, frame: Frame) -> bool:
        """Whether it is a reply, wanted or not."""
        if frame.headers.get("subscription") != _SUBSCRIPTION:
            return False
        question = self._open.pop(frame.headers.get("correlation-id", ""), None)
        if question is not None:
            question.answered(frame)
        return True

    def lost(self, error: Exception) -> None:
        """The connection has gone."""
        questions, self._open = self._open, {}
        for question in questions.values():
            if question.failed is not _must_answer:
                question.failed(error)


def _must_answer(error: Exception) -> None:
    raise ConnectionLost(f"the broker refused a question: {error}") from error
