"""A flow that waits outside of the broker: the bytes of `Flow.stash`, and what goes on from them."""

from __future__ import annotations

import msgspec

from truenext.stage.core.envelope import VERSION, Envelope
from truenext.stage.core.errors import FlowError


class Stash(msgspec.Struct, frozen=True, rename="camel"):
    stage: str
    """The queue of the stage from which it goes on."""
    expires_ms: int
    envelope: Envelope


_DECODER = msgspec.json.Decoder(Stash)


def encode_stash(stash: Stash) -> bytes:
    return msgspec.json.encode(stash)


def decode_stash(data: bytes) -> Stash:
    """Raises: FlowError"""
    try:
        stash = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FlowError(f"these bytes are not what a stage has stashed: {error}") from error
    if stash.envelope.version != VERSION:
        raise FlowError(f"it was stashed by version {stash.envelope.version} of stages, and this is {VERSION}: update")
    return stash
