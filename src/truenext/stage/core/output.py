"""What is to be sent, and done, when all that was said has been committed."""

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
    """A message that is to be sent."""

    destination: str
    envelope: Envelope
    expires_ms: int = 0
    """When its flow ends, in milliseconds since the epoch by the broker's clock; 0 is never."""
    ttl_s: float | None = None
    """The same, of a flow that begins with it: so long after the broker has accepted it."""

    def encode(self, carrier: Mapping[str, str]) -> EncodedMessage:
        """As it is sent. Raises: FlowError if it is too large"""
        body, flow = self._body(carrier), self.envelope.flow
        priority = PRIORITY_INTERACTIVE if flow.interactive else PRIORITY
        id, expires_ms = self.envelope.id, self.expires_ms
        return EncodedMessage(self.destination, body, id, priority, flow.persistent, expires_ms, self.ttl_s)

    def _body(self, carrier: Mapping[str, str]) -> bytes:
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
        return body


class Output:
    """All of one transaction: of a message that is handled, by one stage or by several directly one after the other, or
    of one initiation."""

    __slots__ = ("_ids", "_seed", "after_commit", "is_closed", "outgoing", "sender")

    def __init__(self, seed: str, sender: str) -> None:
        """From `seed` the ids of what is sent are made: the id of the message that is handled, and the queue of its
        stage, so that they are the same whenever that handles it again; or something new."""
        self._seed = seed
        self._ids = 0
        self.sender = sender
        """The service and, behind a blank, the queue of the stage."""
        self.outgoing: list[OutputMessage] = []
        self.is_closed = False
        """The stage has returned, or the block of the initiation has ended."""
        self.after_commit: list[Callable[[], object]] = []

    def new_id(self) -> str:
        """Raises: FlowError if all is said"""
        if self.is_closed:
            raise FlowError("it is too late to send anything: what was said before has been sent")
        self._ids += 1
        return child_id(self._seed, self._ids)


def checked_attachments(attachments: Mapping[str, bytes] | None) -> dict[str, bytes]:
    """Raises: FlowError if they are not bytes by names"""
    if not isinstance(attachments, Mapping | None):
        raise FlowError(f"attachments are bytes, by names, not {type(attachments).__name__}")
    checked = dict(attachments or {})
    for name, value in checked.items():
        if not (isinstance(name, str) and isinstance(value, bytes)):
            raise FlowError(f"attachment {name!r} is {type(value).__name__}: attachments are bytes, by names")
    return checked
