"""Rows about messages, from what a browser is shown. Pure."""

from __future__ import annotations

from truenext.client.core.message import Content
from truenext.console.pages.bodies import beginning, decode_stage_message
from truenext.console.pages.links import message_link
from truenext.console.pages.queues import MessageRow

ENVELOPE_MAX = 64 * 1024
"""Bytes of a body that are kept for a list. Larger ones are not decoded."""


def message_row(queue: str, content: Content) -> MessageRow:
    body, size = content.body, size_of(content)
    envelope = decode_stage_message(body, content.headers.get("truenext-due")) if size <= ENVELOPE_MAX else None
    return MessageRow(
        sequence=content.sequence,
        priority=content.priority,
        link=message_link(queue, content.priority, content.sequence),
        persistent=content.persistent,
        size=size,
        arrived_ms=content.timestamp_ms or None,
        attempts=content.attempts,
        redelivered=content.redelivered,
        group=content.group,
        expires_ms=content.expires_ms or None,
        cause=content.last_cause.strip().partition("\n")[0],
        origin=origin_of(content),
        trace="" if envelope is None else envelope.flow.trace,
        beginning=beginning(body),
    )


def origin_of(content: Content) -> str:
    """Return the queue in which a dead letter failed; "" for other messages."""
    return content.headers.get("truenext-original-destination", "").removeprefix("/queue/")


def size_of(content: Content) -> int:
    """Return the bytes of a body, of which only the beginning may be there."""
    return int(content.headers.get("content-length", len(content.body)))
