"""What is sent in one COMMIT of the broker, as it is kept in the outbox of a database until it has been sent.

    unit       [1, [message, ...]] in MessagePack
    together   [2, [[when it was written, unit], ...]]: units that were written apart, and have one number
    message    destination, body, id, priority, persistent, when its flow ends, its time to live

Nothing of it depends on the code that wrote it: an older process may send what a newer one has written, and the other
way round. Source: docs/stages-outbox.md
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import msgspec

from truenext.errors import TruenextError

T = TypeVar("T")

VERSION: Final = 1
"""Of units. What is neither this nor 2 says something that this code does not know."""
UNIT_PREFIX: Final = b"\x92\x01"
"""With which a unit begins: an array of two, and the version."""
COMBINED_PREFIX: Final = b"\x92\x02\xdd"
"""The same; and an array, whose length follows in 4 bytes."""
PART_PREFIX: Final = b"\x92\xcf"
"""An array of two, and a number, which follows in 8 bytes."""
COMBINED_UNITS_MAX: Final = 1000
"""Units that become one, at most."""
TTL_MIN_S: Final = 0.001
EXPIRED_MS: Final = 1
"""What expires then nobody gets."""


class EncodedMessage(msgspec.Struct, frozen=True, array_like=True):
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


class OutboxUnit(NamedTuple):
    """All that one transaction of a stage sends, or one initiation."""

    messages: Sequence[EncodedMessage]
    is_interactive: bool

    def encode(self) -> bytes:
        return _ENCODER.encode(_EncodedUnit(VERSION, list(self.messages)))


class InitiationKey(NamedTuple):
    """Under which a program begins flows once, however often it says so."""

    id: str
    """Of the service and what the caller calls it: 32 hexadecimal digits."""
    content: str
    """Of what is begun under it: 32 hexadecimal digits."""


class UnreadableUnit(TruenextError):
    """What the outbox has is no unit, or one of a newer version."""


class _EncodedUnit(msgspec.Struct, frozen=True, array_like=True):
    version: int
    messages: list[EncodedMessage]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_EncodedUnit)
_PARTS_DECODER = msgspec.msgpack.Decoder(tuple[int, list[tuple[int, msgspec.Raw]]])


def combine_units(units: Iterable[tuple[int, bytes]]) -> bytes:
    """Units that were written apart as one: milliseconds since the epoch of each, and its bytes, in order."""
    parts = [b"".join((PART_PREFIX, written_ms.to_bytes(8), unit)) for written_ms, unit in units]
    return b"".join((COMBINED_PREFIX, len(parts).to_bytes(4), *parts))


def count_parts(data: bytes) -> int:
    """Units that this one was put together of; 1 if it was written as one."""
    at = len(COMBINED_PREFIX)
    return int.from_bytes(data[at : at + 4]) if data.startswith(COMBINED_PREFIX) else 1


def split_unit(data: bytes) -> list[tuple[int, bytes]]:
    """The units that this one was put together of, and when each was written; nothing if it was written as one.

    Raises: UnreadableUnit
    """
    if not data.startswith(COMBINED_PREFIX):
        return []
    return [(written_ms, bytes(unit)) for written_ms, unit in _decode(_PARTS_DECODER, data)[1]]


def decode_unit(data: bytes, age_ms: int) -> list[EncodedMessage]:
    """What is to be sent of a unit whose first part was written so long ago. Of a time to live that counts from then on
    the rest; what has nothing left is sent as expired: the broker removes it, and counts it.

    Raises: UnreadableUnit
    """
    if not data.startswith(COMBINED_PREFIX):
        return _adjust_ttls(_messages_of(data), age_ms)
    parts = split_unit(data)
    first_ms = min((written_ms for written_ms, _ in parts), default=0)
    return [
        message
        for written_ms, part in parts
        for message in _adjust_ttls(_messages_of(part), age_ms - (written_ms - first_ms))
    ]


def _messages_of(data: bytes) -> list[EncodedMessage]:
    """Of a unit that was written as one. Raises: UnreadableUnit"""
    unit = _decode(_DECODER, data)
    if unit.version != VERSION:
        raise UnreadableUnit(f"it is of version {unit.version} of units, and this knows {VERSION}: update")
    return unit.messages


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    """Raises: UnreadableUnit"""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UnreadableUnit(f"these bytes are no unit of an outbox: {error}") from error


def _adjust_ttls(messages: list[EncodedMessage], age_ms: int) -> list[EncodedMessage]:
    return [each if each.ttl_s is None else _adjust_ttl(each, each.ttl_s - age_ms / 1000) for each in messages]


def _adjust_ttl(message: EncodedMessage, left_s: float) -> EncodedMessage:
    if left_s < TTL_MIN_S:
        return msgspec.structs.replace(message, ttl_s=None, expires_ms=EXPIRED_MS)
    return msgspec.structs.replace(message, ttl_s=left_s)


# ---- The numbers under which all that a stage sends is sent once, whoever sends it and however often ----
#
# A producer is a name under which COMMITs are numbered, 1, 2, 3 (docs/contract.md, L5). A process owns several: each
# has one unit under way, and is free again when the broker has answered for that one.


@dataclass(slots=True, eq=False)
class OutboxProducer:
    name: str
    owner: str
    """The run of the process that may use it."""
    last_number: int
    """The last one that was used."""

    @property
    def next_commit(self) -> CommitNumber:
        return CommitNumber(self, self.last_number + 1)


class CommitNumber(NamedTuple):
    """Of one unit."""

    producer: OutboxProducer
    number: int
