"""Envelope: the body of a message between stages. Source: docs/protocol.md

A message carries all of its flow, so no process has to remember the flow: the message itself, the state of the stage
that receives it, and for each endpoint that waits for a reply its destination and its state.
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
"""Version of envelopes; messages of other versions are rejected, lower ones too."""


class FlowContext(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """Context of a flow, which each of its messages carries."""

    id: str
    """Id of the flow: that of its first message."""
    trace: str
    """Name of the flow for people, chosen when it is started; `parent|child` if a stage starts it."""
    started_ms: int
    """Start of the flow in milliseconds since the epoch, by the clock of the process that started it."""
    started_by: str
    """Service that started the flow and, after a blank, the queue of the stage, if a stage did."""
    interactive: bool = False
    """A caller waits for the flow: priority 9 instead of 4."""
    persistent: bool = True
    properties: dict[str, Any] = {}
    """Values that are set at the start or by a stage, for all later stages."""


class ReplyTo(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """Endpoint or starter of the flow that waits for a reply."""

    to: str
    """Destination of the reply, such as /queue/order.place.stage.reserve: one queue, or one topic."""
    state: msgspec.Raw = EMPTY
    """State that the reply brings back."""


class Envelope(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    version: int
    id: str
    """Id of this message; the same however often it is delivered, dead-lettered or moved."""
    flow: FlowContext
    kind: str
    """Kind of the message: request, reply, next, goto, send or publish."""
    sender: str
    """Service and, after a blank, queue of the stage that sent the message."""
    message: msgspec.Raw
    parent: str = ""
    """Id of the message whose stage sent this one; empty if no stage did."""
    state: msgspec.Raw = EMPTY
    """State of the stage that receives the message."""
    waiting: list[ReplyTo] = []
    """Destinations that wait for a reply, the outermost first."""
    calls: int = 1
    """Length of the chain of messages from the start of the flow to this one, this one included. A reply does not
    count: it has the number of the message whose stage sent it."""
    attachments: dict[str, bytes] = {}
    carrier: dict[str, str] = {}
    """Headers for tracing, such as traceparent."""


class VersionedEnvelope(msgspec.Struct, frozen=True):
    """Fields that an envelope of any version has, to find out the version of one that cannot be decoded."""

    version: int
    flow: msgspec.Raw
    kind: str


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Envelope)
_VERSION_DECODER = msgspec.json.Decoder(VersionedEnvelope)


def encode_envelope(envelope: Envelope) -> bytes:
    return _ENCODER.encode(envelope)


def decode_envelope(body: bytes) -> Envelope:
    """Decode the body of a message, and check its version, id and reply addresses. Raises: NotDecoded"""
    try:
        envelope = _DECODER.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        _check_version(find_version(lambda: _VERSION_DECODER.decode(body)))
        raise NotDecoded(f"the body is not a message of stages: {error}") from error
    _check_version(envelope.version)
    if not envelope.id:
        # The inbox would take all messages without an id for the same one.
        raise NotDecoded("the body is not a message of stages: the field id of its envelope is empty")
    for each in envelope.waiting:
        if not _is_single_destination(each.to):
            # A sender may name one queue or topic for the reply, not any destination to which this service may send.
            raise NotDecoded(f"the reply address {each.to[:100]!r} is not a single queue or topic")
    return envelope


def find_version(decode: Callable[[], VersionedEnvelope]) -> int:
    """Return the version of an envelope that cannot be decoded; VERSION if it has none."""
    try:
        return decode().version
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return VERSION


def describe_remedy(found: int, wrote: str) -> str:
    """Return which version can be read, and what to do; `wrote` is the verb for the other truenext, such as "sent"."""
    remedy = "update truenext" if found > VERSION else f"use the version that {wrote} it"
    return f"this truenext reads version {VERSION}: {remedy}"


def _check_version(found: int) -> None:
    if found != VERSION:
        remedy = describe_remedy(found, "sent")
        raise NotDecoded(f"the body has version {found} of messages of stages, and {remedy}")


def _is_single_destination(address: str) -> bool:
    """Return whether the address is one queue or topic: not several, and none that belongs to a connection."""
    if not address.startswith(("/queue/", "/topic/")):
        return False
    try:
        return parse_address(address, "").kind in (DestinationKind.QUEUE, DestinationKind.TOPIC)
    except RemoteProtocolError:
        return False


# ---- Stashed flows, which wait outside of the broker: the bytes of `Flow.stash` ----


class StashedFlow(msgspec.Struct, frozen=True, rename="camel"):
    stage: str
    """Queue of the stage that called `Flow.stash`; the flow continues as from there."""
    expires_ms: int
    envelope: Envelope


class VersionedStashedFlow(msgspec.Struct, frozen=True):
    """Fields that a stashed flow of any version has, to find out the version of one that cannot be decoded."""

    envelope: VersionedEnvelope


_STASH_DECODER = msgspec.json.Decoder(StashedFlow)
_STASH_VERSION_DECODER = msgspec.json.Decoder(VersionedStashedFlow)


def decode_stashed_flow(data: bytes) -> StashedFlow:
    """Decode the bytes of `Flow.stash`. Raises: FlowError if they are no stash, or one of another version"""
    try:
        stashed = _STASH_DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        _check_stash_version(find_version(lambda: _STASH_VERSION_DECODER.decode(data).envelope))
        raise FlowError(f"these bytes are not the stash of a stage: {error}") from error
    _check_stash_version(stashed.envelope.version)
    return stashed


def _check_stash_version(found: int) -> None:
    if found != VERSION:
        remedy = describe_remedy(found, "stashed")
        raise FlowError(f"the stash has version {found}, and {remedy}")
