"""Output of one transaction: messages to send, and functions to call after the commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from truenext.model.limits import BODY_BYTES_MAX
from truenext.stage.core.envelope import Envelope, encode_envelope
from truenext.stage.core.errors import FlowError
from truenext.stage.core.names import child_id
from truenext.stage.core.outbox_unit import EncodedMessage

PRIORITY: Final = 4
PRIORITY_INTERACTIVE: Final = 9


class OutputMessage(msgspec.Struct, frozen=True):
    """Message that a stage or an initiation sends, before it is encoded."""

    destination: str
    envelope: Envelope
    expires_ms: int = 0
    """Expiry of the message's flow, in milliseconds since the epoch by the broker's clock; 0 is never."""
    ttl_s: float | None = None
    """Seconds to live of a flow that starts with this message, from when the broker or the outbox has the message."""

    def encode(self, carrier: Mapping[str, str]) -> EncodedMessage:
        """Return the message as it is sent. Raises: FlowError if it is too large"""
        envelope = msgspec.structs.replace(self.envelope, carrier=dict(carrier)) if carrier else self.envelope
        try:
            body = encode_envelope(envelope)
        except (TypeError, ValueError) as error:
            raise FlowError(f"a property of the flow cannot be JSON: {error}") from error
        if len(body) > BODY_BYTES_MAX:
            raise FlowError(
                f"the message to {self.destination} has {len(body)} bytes with all that its flow carries: "
                f"at most {BODY_BYTES_MAX}"
            )
        id, flow, expires_ms = envelope.id, envelope.flow, self.expires_ms
        priority = PRIORITY_INTERACTIVE if flow.interactive else PRIORITY
        return EncodedMessage(self.destination, body, id, priority, flow.persistent, expires_ms, self.ttl_s)


class Output:
    """Output of one transaction: of one message, handled by one stage or by several in direct succession, or of one
    initiation."""

    __slots__ = ("_ids", "_seed", "after_commit", "is_closed", "outgoing", "sender")

    def __init__(self, seed: str, sender: str) -> None:
        """The ids of sent messages are derived from `seed`. In a stage it is made of the id of its message and its
        queue, so that the ids are the same whenever the stage handles the message again."""
        self._seed = seed
        self._ids = 0
        self.sender = sender
        """Service and, after a blank, queue of the stage."""
        self.outgoing: list[OutputMessage] = []
        self.is_closed = False
        """True once the stage has returned, or the block of the initiation has ended."""
        self.after_commit: list[Callable[[], object]] = []

    def new_id(self) -> str:
        """Return the id of the next message. Raises: FlowError if the output is closed"""
        if self.is_closed:
            raise FlowError(
                f"it is too late to send: the messages of {self.sender} have been sent already. Send before the stage "
                "returns, or before the block of initiate ends"
            )
        self._ids += 1
        return child_id(self._seed, self._ids)


def checked_attachments(attachments: Mapping[str, bytes] | None) -> dict[str, bytes]:
    """Return a checked copy. Raises: FlowError if attachments are not bytes by names"""
    if not isinstance(attachments, Mapping | None):
        raise FlowError(f"attachments is a mapping of names to bytes, not {type(attachments).__name__}")
    checked = dict(attachments or {})
    for name, value in checked.items():
        if not (isinstance(name, str) and isinstance(value, bytes)):
            raise FlowError(f"attachment {name!r} is {type(value).__name__}, and must be bytes")
    return checked
