"""Outbox unit: messages for one COMMIT of the broker, as stored in the outbox of a database until they are sent.

    unit       [1, [message, ...]] in MessagePack
    combined   [2, [[time of writing, unit], ...]]: units that were written separately, under one number
    message    destination, body, id, priority, persistent, expiry of its flow, its time to live

The format does not depend on the code that wrote it: an older process may send units of a newer one, and the other
way round. Source: docs/stages-database.md
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import msgspec

from truenext.errors import TruenextError

T = TypeVar("T")

VERSION: Final = 1
"""Version of a unit; 2 is a combined one. This code cannot read others."""
UNIT_PREFIX: Final = b"\x92\x01"
"""First bytes of a unit: an array of two, and the version."""
COMBINED_PREFIX: Final = b"\x92\x02\xdd"
"""First bytes of a combined unit: an array of two, version 2, and an array, whose length follows in 4 bytes."""
PART_PREFIX: Final = b"\x92\xcf"
"""First bytes of a part of a combined unit: an array of two, and a number, which follows in 8 bytes."""
COMBINED_UNITS_MAX: Final = 1000
"""Units that are combined into one, at most."""
TTL_MIN_S: Final = 0.001
EXPIRED_MS: Final = 1
"""Expiry in the past: the broker delivers such a message to no consumer."""


class EncodedMessage(msgspec.Struct, frozen=True, array_like=True):
    """Message of a flow, encoded for a SEND to the broker and for the outbox."""

    destination: str
    body: bytes
    id: str
    priority: int
    persistent: bool
    expires_ms: int = 0
    """Expiry of the message's flow, in milliseconds since the epoch by the broker's clock; 0 is never."""
    ttl_s: float | None = None
    """Seconds to live of a flow that starts with this message, from when the broker or the outbox has the message."""
    refused: str = ""
    """Reason why the broker refused the message that this one replaces; empty if it replaces none."""


class OutboxUnit(NamedTuple):
    """Messages that one transaction of a stage, or one initiation, sends."""

    messages: Sequence[EncodedMessage]
    is_interactive: bool

    def encode(self) -> bytes:
        return _ENCODER.encode(_EncodedUnit(VERSION, list(self.messages)))


class InitiationKey(NamedTuple):
    """Key under which a program starts flows once, however often it repeats the call."""

    id: str
    """Hash of the service and the program's own key: 32 hexadecimal digits."""
    content: str
    """Hash of the flows that are started: 32 hexadecimal digits."""


class UnreadableUnit(TruenextError):
    """Data in the outbox that is no unit, or one of a newer version."""


class _EncodedUnit(msgspec.Struct, frozen=True, array_like=True):
    version: int
    messages: list[EncodedMessage]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_EncodedUnit)
_PARTS_DECODER = msgspec.msgpack.Decoder(tuple[int, list[tuple[int, msgspec.Raw]]])


def combine_units(units: Iterable[tuple[int, bytes]]) -> bytes:
    """Combine units that were written separately: milliseconds since the epoch of each, and its bytes, in order."""
    parts = [b"".join((PART_PREFIX, written_ms.to_bytes(8), unit)) for written_ms, unit in units]
    return b"".join((COMBINED_PREFIX, len(parts).to_bytes(4), *parts))


def count_parts(data: bytes) -> int:
    """Return how many units were combined into this one; 1 if it is no combined unit."""
    at = len(COMBINED_PREFIX)
    return int.from_bytes(data[at : at + 4]) if data.startswith(COMBINED_PREFIX) else 1


def split_unit(data: bytes) -> list[tuple[int, bytes]]:
    """Return the units that were combined into this one, each with its time; empty if it is no combined unit.

    Raises: UnreadableUnit
    """
    if not data.startswith(COMBINED_PREFIX):
        return []
    return [(written_ms, bytes(unit)) for written_ms, unit in _decode(_PARTS_DECODER, data)[1]]


def decode_unit(data: bytes, age_ms: int) -> list[EncodedMessage]:
    """Return the messages of a unit that was written `age_ms` ago, or whose first part was if it combines several.

    Times to live are reduced by the age. A message with none left is returned as expired: the broker removes and
    counts it.

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
    """Return the messages of a unit that is not combined. Raises: UnreadableUnit"""
    unit = _decode(_DECODER, data)
    if unit.version != VERSION:
        raise UnreadableUnit(f"the unit has version {unit.version}, and this truenext reads {VERSION}: update truenext")
    return unit.messages


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    """Decode the bytes of a unit. Raises: UnreadableUnit"""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UnreadableUnit(f"these bytes are not a unit of an outbox: {error}") from error


def _adjust_ttls(messages: list[EncodedMessage], age_ms: int) -> list[EncodedMessage]:
    return [each if each.ttl_s is None else _adjust_ttl(each, each.ttl_s - age_ms / 1000) for each in messages]


def _adjust_ttl(message: EncodedMessage, left_s: float) -> EncodedMessage:
    if left_s < TTL_MIN_S:
        return msgspec.structs.replace(message, ttl_s=None, expires_ms=EXPIRED_MS)
    return msgspec.structs.replace(message, ttl_s=left_s)


# ---- Numbers under which a unit has its effect once, whichever process sends it and however often ----
#
# A producer is a name under which COMMITs are numbered, 1, 2, 3 (docs/contract.md, C18.5). A process owns several
# producers: each has one unit under way, and is free again when the broker has answered that one.


@dataclass(slots=True, eq=False)
class OutboxProducer:
    name: str
    owner: str
    """Run id of the process that may use the producer."""
    last_number: int
    """Last number that was used for a COMMIT."""

    @property
    def next_commit(self) -> CommitNumber:
        return CommitNumber(self, self.last_number + 1)


class CommitNumber(NamedTuple):
    """Producer and number of the COMMIT of one unit."""

    producer: OutboxProducer
    number: int
