"""What the broker can be asked about itself: SEND to /control/VERB with a reply-to, JSON in and out."""

from collections.abc import Callable
from typing import Any

import msgspec

from truenext import envelope
from truenext.commands import Control, Send
from truenext.engine.engine import Engine
from truenext.errors import RemoteProtocolError
from truenext.message import Message
from truenext.order import PRIORITY_MAX

REPLY_LIFETIME_MS = 60_000
"""Milliseconds an answer waits for whoever asked."""


def ask(engine: Engine, verb: str) -> bytes:
    """The answer to a question, as JSON.

    Raises: RemoteProtocolError if the question is not one of VERBS.
    """
    question = VERBS.get(verb)
    if question is None:
        raise RemoteProtocolError(f"there is no control verb {verb!r}; there are: {', '.join(sorted(VERBS))}")
    return msgspec.json.encode(question(engine))


def reply(question: Control, body: bytes, now_ms: int) -> Send:
    """The message that carries an answer to whoever asked."""
    headers = {"destination": question.reply_to.address, "content-type": "application/json"}
    if question.correlation is not None:
        headers["correlation-id"] = question.correlation
    headers["content-length"] = str(len(body))
    return Send(
        question.reply_to,
        Message(
            priority=PRIORITY_MAX,
            persistent=False,
            expires_ms=now_ms + REPLY_LIFETIME_MS,
            header=envelope.write_header(headers),
            body=body,
        ),
    )


def _queues(engine: Engine) -> list[dict[str, Any]]:
    return [
        {
            "name": queue.name,
            "waiting": queue.waiting(),
            "unacknowledged": queue.unacknowledged(),
            "consumers": len(queue.consumers),
        }
        for queue in sorted(engine.queues(), key=lambda queue: queue.name)
        if not queue.is_temporary
    ]


VERBS: dict[str, Callable[[Engine], Any]] = {"queues": _queues}
