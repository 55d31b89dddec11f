"""Stashed flow, which waits outside of the broker: the bytes that `Flow.stash` returns."""

from __future__ import annotations

import msgspec

from truenext.flows.envelope import VERSION, Envelope, VersionedEnvelope, describe_remedy, find_version
from truenext.stage.core.errors import FlowError


class StashedFlow(msgspec.Struct, frozen=True, rename="camel"):
    stage: str
    """Queue of the stage that called `Flow.stash`. The unstashed flow continues as if from this stage."""
    expires_ms: int
    envelope: Envelope


class VersionedStashedFlow(msgspec.Struct, frozen=True):
    """Part of a stashed flow from which the version can be read, even if the rest cannot be decoded."""

    envelope: VersionedEnvelope


_STASH_DECODER = msgspec.json.Decoder(StashedFlow)
_STASH_VERSION_DECODER = msgspec.json.Decoder(VersionedStashedFlow)


def decode_stashed_flow(data: bytes) -> StashedFlow:
    """Decode bytes that `Flow.stash` returned. Raises: FlowError if the bytes are not from `Flow.stash`, or of another
    version"""
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
