"""Outbox unit: messages for one COMMIT of the broker, which the outbox in the database stores until they are sent.

    unit       [1, [message, ...]] in MessagePack; [3, [message, ...]] if a message has a delay
    combined   [2, [[time of writing, unit], ...]]: units of several transactions, to be sent in one COMMIT
    message    destination, body, id, priority, persistent, expiry of its flow, its time to live, refusal, its delay,
               where its failure is reported, with which id, which queues handle it

The format is the same in all versions of truenext, so that an older process can send the units of a newer one, and a
newer process those of an older one. A unit with delays has a version of its own, since a truenext that knows no delays
would send its messages at once. Source: docs/stages-database.md
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import msgspec

from truenext.errors import TruenextError

T = TypeVar("T")

VERSION: Final = 1
"""Version of a unit without delays that is not combined; combined units have version 2."""
DELAYED_VERSION: Final = 3
"""Version of a unit with delays that is not combined. This code reads units of versions 1 to 3."""
_READABLE_VERSIONS: Final = (VERSION, DELAYED_VERSION)
UNIT_PREFIXES: Final = (b"\x92\x01", b"\x92\x03")
"""First bytes of a unit that is not combined: an array of two items, and the version."""
COMBINED_PREFIX: Final = b"\x92\x02\xdd"
"""First bytes of a combined unit: an array of two items, version 2, and an array. The length of the array follows in 4
bytes."""
PART_PREFIX: Final = b"\x92\xcf"
"""First bytes of each part of a combined unit: an array of two items, and a number, which follows in 8 bytes."""
COMBINED_UNITS_MAX: Final = 1000
"""Largest number of units that are combined into one."""
TTL_MIN_S: Final = 0.001
EXPIRED_MS: Final = 1
"""Expiry time in the past. The broker delivers a message with this expiry time to no consumer."""


class Delay(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Time until a message is due."""

    ms: int
    """Delay in milliseconds, which begins when the broker or the outbox has the message. If the program has named a
    time, the delay is computed from `at_ms`."""
    at_ms: int = 0
    """Due time in milliseconds since the epoch by the broker's clock, if the program has named a time; else 0."""


class EncodedMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Message of a flow, encoded for a SEND to the broker, and for the outbox."""

    destination: str
    body: bytes
    id: str
    priority: int
    persistent: bool
    expires_ms: int = 0
    """Expiry time of the message's flow, in milliseconds since the epoch by the broker's clock; 0 if the flow never
    expires."""
    ttl_s: float | None = None
    """Time to live in seconds, if the message starts a flow that expires. The time begins when the broker or the outbox
    has the message; with a delay, when the message is due."""
    refused: str = ""
    """Reason why the broker refused another message, if this message replaces that one; otherwise empty."""
    delay: Delay | None = None
    report_to: str = ""
    """Queue or topic that gets a report if the message becomes a dead letter; empty without reports."""
    report_id: str = ""
    """Correlation id of the report; empty without reports."""
    on_failure: tuple[str, ...] = ()
    """Queues that handle a failure of the message, the first one first."""

    @property
    def is_plain(self) -> bool:
        """True if the message has no refusal, expiry, time to live, delay, report or failure handlers."""
        return not (
            self.refused
            or self.expires_ms
            or self.ttl_s is not None
            or self.delay is not None
            or self.report_to
            or self.on_failure
        )


class OutboxUnit(NamedTuple):
    """Messages that one transaction of a stage, or one initiation, sends."""

    messages: Sequence[EncodedMessage]
    is_interactive: bool

    def encode(self) -> bytes:
        version = VERSION
        # A loop: `any` with a generator takes 0.5 us more, for each unit.
        for each in self.messages:
            if each.delay is not None:
                version = DELAYED_VERSION
        return _ENCODER.encode(_EncodedUnit(version, list(self.messages)))


class KeptFlow(NamedTuple):
    """Flow whose reply is kept under the key of its initiation."""

    flow: str
    endpoint: str


class InitiationKey(NamedTuple):
    """Key of an initiation: all calls with one key start the flows only once."""

    id: str
    """Hash of the service's name and the program's key, as 32 hexadecimal digits."""
    content: str
    """Hash of the flows, as 32 hexadecimal digits."""
    kept: KeptFlow | None = None
    delay_ms: int = 0
    """Milliseconds until the last flow of this initiation is due. The outbox keeps this key for another 7 days after
    that."""


class UnreadableUnit(TruenextError):
    """Bytes in the outbox that are not a unit, or a unit of a newer version."""


class _EncodedUnit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    version: int
    messages: list[EncodedMessage]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_EncodedUnit)
_COMBINED_DECODER = msgspec.msgpack.Decoder(tuple[int, list[tuple[int, _EncodedUnit]]])
_PARTS_DECODER = msgspec.msgpack.Decoder(tuple[int, list[tuple[int, msgspec.Raw]]])


def combine_units(units: Iterable[tuple[int, bytes]]) -> bytes:
    """Combine units into one. `units` has the time of writing of each unit, in milliseconds since the epoch, and its
    bytes."""
    parts = [b"".join((PART_PREFIX, written_ms.to_bytes(8), unit)) for written_ms, unit in units]
    return b"".join((COMBINED_PREFIX, len(parts).to_bytes(4), *parts))


def count_parts(data: bytes) -> int:
    """Return the number of units in a combined unit; 1 for a unit that is not combined."""
    at = len(COMBINED_PREFIX)
    return int.from_bytes(data[at : at + 4]) if data.startswith(COMBINED_PREFIX) else 1


def split_unit(data: bytes) -> list[tuple[int, bytes]]:
    """Return the units in a combined unit, each with its time of writing in milliseconds since the epoch; empty for a
    unit that is not combined.

    Raises: UnreadableUnit
    """
    if not data.startswith(COMBINED_PREFIX):
        return []
    return [(written_ms, bytes(unit)) for written_ms, unit in _decode(_PARTS_DECODER, data)[1]]


def decode_unit(data: bytes, age_ms: int) -> list[EncodedMessage]:
    """Return the messages of a unit. `age_ms` is the time since the unit was written; for a combined unit, since its
    first part was written.

    The delay of each message is reduced by its age. If nothing is left of it, the time to live is reduced by the rest
    of the age. A message with no time to live left is returned as expired, so that the broker removes and counts it.

    Raises: UnreadableUnit
    """
    if data.startswith(COMBINED_PREFIX):
        _, parts = _decode(_COMBINED_DECODER, data)
        first_ms = min((written_ms for written_ms, _ in parts), default=0)
    else:
        parts, first_ms = [(0, _decode(_DECODER, data))], 0
    messages = []
    for written_ms, unit in parts:
        if unit.version not in _READABLE_VERSIONS:
            raise UnreadableUnit(
                f"the unit has version {unit.version}, and this truenext reads {VERSION} and {DELAYED_VERSION}: update "
                "truenext"
            )
        for message in unit.messages:
            if message.ttl_s is None and message.delay is None:
                messages.append(message)
            else:
                messages.append(_adjust_time(message, age_ms - (written_ms - first_ms)))
    return messages


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    """Decode the bytes of a unit. Raises: UnreadableUnit"""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UnreadableUnit(f"these bytes are not a unit of an outbox: {error}") from error


def _adjust_time(message: EncodedMessage, age_ms: int) -> EncodedMessage:
    delay = message.delay
    if delay is not None:
        left = Delay(max(delay.ms - age_ms, 0), delay.at_ms)
        # A message with a due time keeps it: the clocks of the database and of the broker may differ.
        message = msgspec.structs.replace(message, delay=left if left.ms or left.at_ms else None)
        if left.ms:
            return message
        age_ms -= delay.ms
    if message.ttl_s is None:
        return message
    left_s = message.ttl_s - age_ms / 1000
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
    """Run id of the process that owns the producer. Only this process may use it."""
    last_number: int
    """Number of the producer's last COMMIT."""

    @property
    def next_commit(self) -> CommitNumber:
        return CommitNumber(self, self.last_number + 1)


class CommitNumber(NamedTuple):
    """Producer and number of a COMMIT, which sends one unit."""

    producer: OutboxProducer
    number: int
