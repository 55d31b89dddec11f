"""What travels from stage to stage: the body of a message between stages. Source: docs/stages-wire.md

All of a flow is in its message, so no process has to remember it: what is said, the state of the stage that gets it,
and, for each endpoint that waits for a reply, where to and its state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from truenext.errors import RemoteProtocolError
from truenext.model.destination import DestinationKind, parse_address
from truenext.stage.core.codec import EMPTY
from truenext.stage.core.errors import FlowError, NotDecoded

VERSION = 2
"""Messages of another version are rejected, lower ones too."""


class FlowContext(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """What is the same for each message of a flow."""

    id: str
    """That of its first message."""
    trace: str
    """What people call it, by whoever began it; `parent|child` if a stage did."""
    started_ms: int
    """Milliseconds since the epoch, by the clock of whoever began it."""
    started_by: str
    """The service, and the stage if it was one."""
    interactive: bool = False
    """Somebody waits: priority 9 instead of 4."""
    persistent: bool = True
    properties: dict[str, Any] = {}
    """What its stages have set for all that come after them."""


class ReplyTo(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """An endpoint, or whoever has begun the flow, that waits for a reply."""

    to: str
    """The destination of the reply, such as /queue/order.place.stage.reserve: one queue, or one topic."""
    state: msgspec.Raw = EMPTY
    """What comes with the reply."""


class Envelope(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    version: int
    id: str
    """Of this message; the same however often it is delivered, dead-lettered or moved."""
    flow: FlowContext
    kind: str
    """request, reply, next, goto, send or publish."""
    sender: str
    """The service and, behind a blank, the queue of the stage that sent it."""
    message: msgspec.Raw
    parent: str = ""
    """The id of the message whose stage sent it; empty if none did."""
    state: msgspec.Raw = EMPTY
    """Of the stage that gets it."""
    waiting: list[ReplyTo] = []
    """Who waits for a reply, the outermost first."""
    calls: int = 1
    """Number of this message among those of its flow that followed one another, without replies; a reply has that of
    the message to which it replies."""
    attachments: dict[str, bytes] = {}
    carrier: dict[str, str] = {}
    """For tracing, such as traceparent."""


class VersionedEnvelope(msgspec.Struct, frozen=True):
    """What an envelope of any version has."""

    version: int
    flow: msgspec.Raw
    kind: str


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Envelope)
_VERSION_DECODER = msgspec.json.Decoder(VersionedEnvelope)


def encode_envelope(envelope: Envelope) -> bytes:
    return _ENCODER.encode(envelope)


def decode_envelope(body: bytes) -> Envelope:
    """Raises: NotDecoded"""
    try:
        envelope = _DECODER.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        _check_version(find_version(lambda: _VERSION_DECODER.decode(body)))
        raise NotDecoded(f"it is no message of stages: {error}") from error
    _check_version(envelope.version)
    if not envelope.id:
        # Who remembers it would take all that have none for one.
        raise NotDecoded("it is no message of stages: its id is empty")
    for each in envelope.waiting:
        if not _is_single_destination(each.to):
            # A sender says where one reply goes. It is not to have this service send to several, or wherever it may.
            raise NotDecoded(f"its reply would go to {each.to[:100]!r}, which is not one queue or one topic")
    return envelope


def find_version(decode: Callable[[], VersionedEnvelope]) -> int:
    """Return the version of an envelope that cannot be decoded; VERSION if it has none: something else is wrong."""
    try:
        return decode().version
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return VERSION


def describe_remedy(found: int, wrote: str) -> str:
    """Return which version is read, and what to do about `found`, which another truenext `wrote`."""
    remedy = "update truenext" if found > VERSION else f"use the version that {wrote} it"
    return f"this truenext reads version {VERSION}: {remedy}"


def _check_version(found: int) -> None:
    """Raises: NotDecoded"""
    if found != VERSION:
        remedy = describe_remedy(found, "sent")
        raise NotDecoded(f"it is of version {found} of messages of stages, and {remedy}")


def _is_single_destination(address: str) -> bool:
    """A queue or a topic, and not several, nor one that belongs to a connection."""
    if not address.startswith(("/queue/", "/topic/")):
        return False
    try:
        return parse_address(address, "").kind in (DestinationKind.QUEUE, DestinationKind.TOPIC)
    except RemoteProtocolError:
        return False


# ---- A flow that waits outside of the broker: the bytes of `Flow.stash`, and what goes on from them ----


class StashedFlow(msgspec.Struct, frozen=True, rename="camel"):
    stage: str
    """The queue of the stage from which it goes on."""
    expires_ms: int
    envelope: Envelope


class VersionedStashedFlow(msgspec.Struct, frozen=True):
    """What a stashed flow of any version has."""

    envelope: VersionedEnvelope


_STASH_DECODER = msgspec.json.Decoder(StashedFlow)
_STASH_VERSION_DECODER = msgspec.json.Decoder(VersionedStashedFlow)


def encode_stashed_flow(stashed: StashedFlow) -> bytes:
    return msgspec.json.encode(stashed)


def decode_stashed_flow(data: bytes) -> StashedFlow:
    """Raises: FlowError"""
    try:
        stashed = _STASH_DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        _check_stash_version(find_version(lambda: _STASH_VERSION_DECODER.decode(data).envelope))
        raise FlowError(f"these bytes are not what a stage has stashed: {error}") from error
    _check_stash_version(stashed.envelope.version)
    return stashed


def _check_stash_version(found: int) -> None:
    """Raises: FlowError"""
    if found != VERSION:
        remedy = describe_remedy(found, "stashed")
        raise FlowError(f"it was stashed by version {found} of stages, and {remedy}")
