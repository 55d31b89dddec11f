"""A flow that waits outside of the broker: the bytes of `Flow.stash`, and what goes on from them."""

from __future__ import annotations

import msgspec

from truenext.stage.core.envelope import VERSION, Envelope, VersionedEnvelope, describe_remedy, find_version
from truenext.stage.core.errors import FlowError


class Stash(msgspec.Struct, frozen=True, rename="camel"):
    stage: str
    """The queue of the stage from which it goes on."""
    expires_ms: int
    envelope: Envelope


class VersionedStash(msgspec.Struct, frozen=True):
    """What a stash of any version has."""

    envelope: VersionedEnvelope


_DECODER = msgspec.json.Decoder(Stash)
_VERSION_DECODER = msgspec.json.Decoder(VersionedStash)


def encode_stash(stash: Stash) -> bytes:
    return msgspec.json.encode(stash)


def decode_stash(data: bytes) -> Stash:
    """Raises: FlowError"""
    try:
        stash = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        _check_version(find_version(lambda: _VERSION_DECODER.decode(data).envelope))
        raise FlowError(f"these bytes are not what a stage has stashed: {error}") from error
    _check_version(stash.envelope.version)
    return stash


def _check_version(found: int) -> None:
    """Raises: FlowError"""
    if found != VERSION:
        remedy = describe_remedy(found, "stashed")
        raise FlowError(f"it was stashed by version {found} of stages, and {remedy}")
