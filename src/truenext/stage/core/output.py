"""Output of one transaction: the messages to send, and the functions to call after the commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from truenext.flows.envelope import Envelope, encode_envelope, failure_options
from truenext.flows.message_ids import child_id
from truenext.model.limits import BODY_BYTES_MAX
from truenext.stage.core.errors import FlowError
from truenext.stage.core.outbox_unit import Delay, EncodedMessage


class OutputMessage(msgspec.Struct, frozen=True):
    """Message of a stage or an initiation, before it is encoded."""

    destination: str
    envelope: Envelope
    expires_ms: int = 0
    """Expiry time of the message's flow, in milliseconds since the epoch by the broker's clock; 0 if the flow never
    expires."""
    ttl_s: float | None = None
    """Time to live in seconds, if the message starts a flow that expires. The time begins when the broker or the outbox
    has the message; with a delay, when the message is due."""
    delay: Delay | None = None

    def encode(self, carrier: Mapping[str, str]) -> EncodedMessage:
        """Return the encoded message, with `carrier` in its envelope. Raises: FlowError if the message is too large"""
        envelope = msgspec.structs.replace(self.envelope, carrier=dict(carrier)) if carrier else self.envelope
        try:
            body = encode_envelope(envelope)
        except (TypeError, ValueError) as error:
            raise FlowError(f"a property of the flow cannot be encoded as JSON: {error}") from error
        if len(body) > BODY_BYTES_MAX:
            raise FlowError(
                f"the message to {self.destination} has {len(body)} bytes, more than {BODY_BYTES_MAX}; the properties "
                f"of its flow and the states of waiting stages count: send or keep less"
            )
        id, flow, expires_ms = envelope.id, envelope.flow, self.expires_ms
        ttl_s, delay, priority = self.ttl_s, self.delay, envelope.priority
        encoded = EncodedMessage(self.destination, body, id, priority, flow.persistent, expires_ms, ttl_s, delay=delay)
        for each in envelope.waiting:
            if each.failure or each.report:
                told = failure_options(envelope, self.destination)
                return msgspec.structs.replace(encoded, **told._asdict())
        return encoded


class Output:
    """Output of one transaction: of an initiation, or of the stages that process one message (several stages with
    `next_direct`)."""

    __slots__ = ("_ids", "_seed", "after_commit", "is_closed", "outgoing", "sender")

    def __init__(self, seed: str, sender: str) -> None:
        """Create an empty output. The ids of its messages are derived from `seed`. A stage's seed is made of the id of
        its message and of its queue, so each run of the stage with the same message makes the same ids."""
        self._seed = seed
        self._ids = 0
        self.sender = sender
        """Service that sends. For a stage, a blank and the stage's queue follow."""
        self.outgoing: list[OutputMessage] = []
        self.is_closed = False
        """True once the stage has returned, or the block of the initiation has ended."""
        self.after_commit: list[Callable[[], object]] = []

    def new_id(self) -> str:
        """Return the id for the next message. Raises: FlowError if the output is closed"""
        if self.is_closed:
            raise FlowError(
                f"it is too late to send: the messages of {self.sender} have been sent already. Send before the stage "
                "returns, or before the block of initiate ends"
            )
        self._ids += 1
        return child_id(self._seed, self._ids)


def checked_attachments(attachments: Mapping[str, bytes] | None) -> dict[str, bytes]:
    """Return a copy of the attachments. Raises: FlowError if a name is not a text, or a value is not bytes"""
    if not isinstance(attachments, Mapping | None):
        raise FlowError(f"attachments must be a mapping of names to bytes, not {type(attachments).__name__}")
    checked = dict(attachments or {})
    for name, value in checked.items():
        if not (isinstance(name, str) and isinstance(value, bytes)):
            raise FlowError(f"attachment {name!r} is {type(value).__name__}, and must be bytes")
    return checked
