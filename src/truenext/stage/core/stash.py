"""A flow that waits outside of the broker: the bytes of `Flow.stash`, and what goes on from them."""

from __future__ import annotations

import msgspec

from truenext.stage.core.envelope import VERSION, Envelope, VersionedEnvelope, describe_remedy, find_version
from truenext.stage.core.errors import FlowError


class StashedFlow(msgspec.Struct, frozen=True, rename="camel"):
    stage: str
    """The queue of the stage from which it goes on."""
    expires_ms: int
    envelope: Envelope


class VersionedStashedFlow(msgspec.Struct, frozen=True):
    """What a stashed flow of any version has."""

    envelope: VersionedEnvelope


_DECODER = msgspec.json.Decoder(StashedFlow)
_VERSION_DECODER = msgspec.json.Decoder(VersionedStashedFlow)


def encode_stashed_flow(stashed: StashedFlow) -> bytes:
    return msgspec.json.encode(stashed)


def decode_stashed_flow(data: bytes) -> StashedFlow:
    """Raises: FlowError"""
    try:
        stashed = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        _check_version(find_version(lambda: _VERSION_DECODER.decode(data).envelope))
        raise FlowError(f"these bytes are not what a stage has stashed: {error}") from error
    _check_version(stashed.envelope.version)
    return stashed


def _check_version(found: int) -> None:
    """Raises: FlowError"""
    if found != VERSION:
        remedy = describe_remedy(found, "stashed")
        raise FlowError(f"it was stashed by version {found} of stages, and {remedy}")
