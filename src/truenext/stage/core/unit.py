"""What is sent in one COMMIT of the broker, as it is kept in the outbox of a database until it has been sent.

    unit      [version, [message, ...]] in MessagePack
    message   destination, body, id, priority, persistent, when its flow ends, its time to live

Nothing of it depends on the code that wrote it: an older process may send what a newer one has written, and the other
way round. Source: docs/stages-outbox.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from truenext.errors import TruenextError

VERSION: Final = 1
"""Of units. One that is higher says something that this code does not know."""


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """A message as it is sent."""

    destination: str
    body: bytes
    id: str
    priority: int
    persistent: bool
    expires_ms: int = 0
    """When its flow ends, in milliseconds since the epoch by the broker's clock; 0 is never."""
    ttl_s: float | None = None
    """The same, of a flow that begins with it: so long after the broker has accepted it."""
    refused: str = ""
    """Why the broker has not taken it as what it was."""


class Unit(NamedTuple):
    """All that one transaction of a stage sends, or one initiation."""

    messages: Sequence[Finished]
    is_interactive: bool

    def encode(self) -> bytes:
        return _ENCODER.encode(_Encoded(VERSION, list(self.messages)))


class Key(NamedTuple):
    """Under which a program begins flows once, however often it says so."""

    id: str
    """Of the service and what the caller calls it: 32 hexadecimal digits."""
    content: str
    """Of what is begun under it: 32 hexadecimal digits."""


class UnreadableUnit(TruenextError):
    """What the outbox has is no unit, or one of a newer version."""


class _Encoded(msgspec.Struct, frozen=True, array_like=True):
    version: int
    messages: list[Finished]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Encoded)


def decode_unit(data: bytes) -> list[Finished]:
    """Raises: UnreadableUnit"""
    try:
        unit = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UnreadableUnit(f"these bytes are no unit of an outbox: {error}") from error
    if unit.version != VERSION:
        raise UnreadableUnit(f"it is of version {unit.version} of units, and this knows {VERSION}: update")
    return unit.messages
