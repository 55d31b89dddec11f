"""How a message stands in the store, byte by byte.

Key, big-endian, so that bytes sort in the order of docs/contract.md within a queue:

    queue number   u32
    rank           u8     9 - priority, see order.py
    sequence       u64

Record, little-endian. If you change it, increase RECORD_VERSION:

    checksum       u32    CRC-32 of the key and of everything after the checksum
    version        u8
    flags          u8     1: persistent
    header length  u32
    expires        u64    milliseconds since the epoch, 0 is never
    arrived        u64    milliseconds since the epoch
    header         bytes
    body           bytes  to the end

Timer, big-endian, so that bytes sort by time; it says that at that time this block of this lane is to be looked at:

    due            u64    milliseconds since the epoch
    lane key       5 bytes
    block          u64    sequence >> BLOCK_BITS

Timer of a scheduled send (engine/schedule.py), big-endian; of these the first bit is set, so that they stand behind all
others, in the order of what they say:

    due            u64    milliseconds since the epoch, and the first bit
    number         u64    of the scheduled send
    lane key       5 bytes
"""

import struct
from zlib import crc32

from truenext.message import Message
from truenext.order import PRIORITY_MAX

RECORD_VERSION = 1

_KEY = struct.Struct(">IBQ")
_LANE = struct.Struct(">IB")
_SEQUENCE = struct.Struct(">Q")
_TIMER = struct.Struct(">Q5sQ")
_DUE_TIMER = struct.Struct(">QQ5s")
_DUE_BIT = 1 << 63
_CHECKSUM = struct.Struct("<I")
_FIELDS = struct.Struct("<BBIQQ")
_HEADER_AT = _CHECKSUM.size + _FIELDS.size
_PERSISTENT = 1

LANE_KEY_SIZE = _LANE.size
"""A message key begins with the key of its lane."""

MESSAGE_KEY_SIZE = _KEY.size

TIMER_SIZE = _TIMER.size

BLOCK_BITS = 10
"""A block is 1024 sequences: so many messages share a timer if they fall due together, and to look at them takes a page
or two."""


DUE_TIMERS = _DUE_TIMER.pack(_DUE_BIT, 0, bytes(5))
"""Before every timer of a scheduled send, and behind all others."""


class DamagedRecord(ValueError):
    """A record that is not what was written."""


def lane_key(queue: int, rank: int) -> bytes:
    """The first bytes of the keys of all messages of one queue and priority."""
    return _LANE.pack(queue, rank)


def split_lane_key(key: bytes) -> tuple[int, int]:
    """Queue number and rank."""
    queue, rank = _LANE.unpack(key)
    return queue, rank


def message_key(lane: bytes, sequence: int) -> bytes:
    return lane + _SEQUENCE.pack(sequence)


def sequence_of(key: bytes) -> int:
    sequence: int = _SEQUENCE.unpack_from(key, LANE_KEY_SIZE)[0]
    return sequence


def timer(due_ms: int, lane: bytes, sequence: int) -> bytes:
    """At `due_ms` the block in which `sequence` stands is to be looked at."""
    return _TIMER.pack(due_ms, lane, sequence >> BLOCK_BITS)


def split_timer(timer: bytes) -> tuple[int, bytes, int]:
    """When it is due, the lane's key, and the first sequence of the block."""
    due_ms, lane, block = _TIMER.unpack(timer)
    return due_ms, lane, block << BLOCK_BITS


def due_timer(due_ms: int, number: int, lane: bytes) -> bytes:
    """At `due_ms` the scheduled send of this number is due."""
    return _DUE_TIMER.pack(due_ms | _DUE_BIT, number, lane)


def split_due_timer(timer: bytes) -> tuple[int, int, bytes]:
    """When it is due, the number, and the lane's key."""
    due, number, lane = _DUE_TIMER.unpack(timer)
    return due ^ _DUE_BIT, number, lane


def encode(key: bytes, message: Message) -> bytes:
    """The record of `message` under `key`."""
    rest = b"%b%b%b" % (
        _FIELDS.pack(
            RECORD_VERSION,
            _PERSISTENT if message.persistent else 0,
            len(message.header),
            message.expires_ms,
            message.arrived_ms,
        ),
        message.header,
        message.body,
    )
    return _CHECKSUM.pack(crc32(rest, crc32(key))) + rest


def decode(key: bytes, record: bytes) -> Message:
    """The message that stands under `key`.

    Raises: DamagedRecord if any bit of key or record is not as written, or a later version wrote it.
    """
    if len(record) < _HEADER_AT:
        raise DamagedRecord(f"record of {len(record)} bytes is cut short")
    if _CHECKSUM.unpack_from(record)[0] != crc32(memoryview(record)[_CHECKSUM.size :], crc32(key)):
        raise DamagedRecord("checksum does not match")
    version, flags, header_length, expires_ms, arrived_ms = _FIELDS.unpack_from(record, _CHECKSUM.size)
    if version != RECORD_VERSION:
        raise DamagedRecord(f"record version {version}; this truenext reads version {RECORD_VERSION}")
    body_at = _HEADER_AT + header_length
    return Message(
        priority=PRIORITY_MAX - _KEY.unpack(key)[1],
        persistent=bool(flags & _PERSISTENT),
        expires_ms=expires_ms,
        header=record[_HEADER_AT:body_at],
        body=record[body_at:],
        arrived_ms=arrived_ms,
    )
