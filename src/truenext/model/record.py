"""Stored messages, byte by byte: keys, records and timers.

Key, big-endian, so that bytes sort in the order of docs/contract.md within a queue:

    queue number   u32
    rank           u8     9 - priority, see order.py
    sequence       u64

Record, little-endian. If you change it, increase RECORD_VERSION:

    checksum       u32    CRC-32 of the key and of everything after the checksum
    version        u8
    flags          u8     1: persistent, 4: the producer has sent no content-length
    header length  u32
    expires        u64    milliseconds since the epoch, 0 is never
    arrived        u64    milliseconds since the epoch
    header         bytes
    body           bytes  to the end

A dead letter whose headers do not name its redrive queue has version 3, and one more line before its header:

    redrive queue  bytes  name of a queue, escaped as header lines are, and a line feed; the header length counts this
                          line, too

A message in OpenWire form (openwire_message.py) has version 4, and always this line before its header. Its body has
that form. A truenext that does not know the form refuses the record.

A message in several queues may be stored once, as a content. This is a record like any other; its key has queue 0, rank
0, and the content's number. Each queue then has a reference under the key of its own copy. The reference is persistent
if the content is:

    checksum       u32    as above
    version        u8
    flags          u8     2: a reference, 1: persistent
    unused         u32
    unused         u64
    unused         u64
    content        u64    number of the content

Timer, big-endian, so that bytes sort by time. At its time the block of the lane is checked for messages that are due:

    due            u64    milliseconds since the epoch
    lane key       5 bytes
    block          u64    sequence >> BLOCK_BITS

Timer of a scheduled send, big-endian. Its first bit is set, so that timers of scheduled sends sort after all other
timers, by time and number:

    due            u64    milliseconds since the epoch, and the first bit
    number         u64    number of the scheduled send
    lane key       5 bytes
"""

import struct
from collections.abc import Callable

from truenext.model.checksum import crc32
from truenext.model.header_lines import escape, group_of, unescape
from truenext.model.message import OPENWIRE_FORM, SentMessage
from truenext.model.openwire_message import group_of_message, growth_of
from truenext.model.order import PRIORITY_MAX

RECORD_VERSION = 2
_WITH_REDRIVE_QUEUE = 3
_OPENWIRE = 4
_VERSIONS = (RECORD_VERSION, _WITH_REDRIVE_QUEUE, _OPENWIRE)

_KEY = struct.Struct(">IBQ")
_LANE = struct.Struct(">IB")
_SEQUENCE = struct.Struct(">Q")
_LANE_AND_SEQUENCE = struct.Struct(f">{_LANE.size}sQ")
_TIMER = struct.Struct(">Q5sQ")
_SCHEDULED_TIMER = struct.Struct(">QQ5s")
_SCHEDULED_BIT = 1 << 63
_NUMBER = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_FIELDS = struct.Struct("<BBIQQ")
_HEADER_AT = _CHECKSUM.size + _FIELDS.size
_PERSISTENT = 1
_REFERENCE = 2
_TEXT = 4
_REFERENCE_FIELDS = _FIELDS.pack(RECORD_VERSION, _PERSISTENT | _REFERENCE, 0, 0, 0)
_TRANSIENT_REFERENCE_FIELDS = _FIELDS.pack(RECORD_VERSION, _REFERENCE, 0, 0, 0)
_REFERENCE_STARTS = (_REFERENCE_FIELDS, _TRANSIENT_REFERENCE_FIELDS)

LANE_KEY_SIZE = _LANE.size
"""Bytes of the key of a lane. Each message key begins with the key of its lane."""

MESSAGE_KEY_SIZE = _KEY.size

RECORD_OVERHEAD_BYTES = _HEADER_AT
"""Bytes of a record without header and body, and without the line of a redrive queue."""

REFERENCE_SIZE = _HEADER_AT + _NUMBER.size

CONTENTS_LANE_KEY = _LANE.pack(0, 0)
"""Key of the lane of contents, which belongs to no queue. The number of references to a content is stored as the
attempts of the content's mark."""

TIMER_SIZE = _TIMER.size

BLOCK_BITS = 10
"""A block is 2 ** BLOCK_BITS sequences, 1024. Messages of a block that are due at the same time share a timer; a page
or two has all of them."""


SCHEDULED_TIMERS = _SCHEDULED_TIMER.pack(_SCHEDULED_BIT, 0, bytes(5))
"""Key that sorts after all other timers, and before the timers of scheduled sends."""


class DamagedRecord(ValueError):
    """Error for a damaged record: its bytes differ from those that were written."""


def lane_key(queue: int, rank: int) -> bytes:
    """Return the key of a lane. The keys of its messages begin with these bytes."""
    return _LANE.pack(queue, rank)


def split_lane_key(key: bytes) -> tuple[int, int]:
    """Return the queue number and the rank in the key of a lane."""
    queue, rank = _LANE.unpack(key)
    return queue, rank


def message_key(lane: bytes, sequence: int) -> bytes:
    return lane + _SEQUENCE.pack(sequence)


def sequence_of(key: bytes) -> int:
    sequence: int = _SEQUENCE.unpack_from(key, LANE_KEY_SIZE)[0]
    return sequence


split_message_key: Callable[[bytes], tuple[bytes, int]] = _LANE_AND_SEQUENCE.unpack
"""Return the key of the lane and the sequence in a message key."""


def content_key(number: int) -> bytes:
    """Return the key of the content with this number."""
    return CONTENTS_LANE_KEY + _SEQUENCE.pack(number)


def timer_key(due_ms: int, lane: bytes, sequence: int) -> bytes:
    """Return the key of the timer that is due at `due_ms`, for the block of a lane that has this sequence."""
    return _TIMER.pack(due_ms, lane, sequence >> BLOCK_BITS)


def split_timer(timer: bytes) -> tuple[int, bytes, int]:
    """Return the parts of the key of a timer: due time in milliseconds since the epoch, key of the lane, and first
    sequence of the block."""
    due_ms, lane, block = _TIMER.unpack(timer)
    return due_ms, lane, block << BLOCK_BITS


def scheduled_timer_key(due_ms: int, number: int, lane: bytes) -> bytes:
    """Return the key of the timer of the scheduled send with this number, which is due at `due_ms`."""
    return _SCHEDULED_TIMER.pack(due_ms | _SCHEDULED_BIT, number, lane)


def split_scheduled_timer(timer: bytes) -> tuple[int, int, bytes]:
    """Return the parts of the key of a scheduled send's timer: due time in milliseconds since the epoch, number of the
    send, and key of the lane."""
    due, number, lane = _SCHEDULED_TIMER.unpack(timer)
    return due ^ _SCHEDULED_BIT, number, lane


def encode_record(key: bytes, message: SentMessage) -> bytes:
    """Return the record that stores `message` under `key`."""
    version, header = RECORD_VERSION, message.header
    if message.redrive_queue or message.form:
        version = _OPENWIRE if message.form else _WITH_REDRIVE_QUEUE
        header = f"{escape(message.redrive_queue)}\n".encode() + header
    flags = _PERSISTENT if message.persistent else 0
    if message.is_text:
        flags |= _TEXT
    rest = b"%b%b%b" % (
        _FIELDS.pack(
            version,
            flags,
            len(header),
            message.expires_ms,
            message.arrived_ms,
        ),
        header,
        message.body,
    )
    return _CHECKSUM.pack(crc32(rest, crc32(key))) + rest


def encode_reference(key: bytes, content: int, *, persistent: bool = True) -> bytes:
    """Return the record of a copy under `key` that is a reference to the content with this number."""
    rest = (_REFERENCE_FIELDS if persistent else _TRANSIENT_REFERENCE_FIELDS) + _NUMBER.pack(content)
    return _CHECKSUM.pack(crc32(rest, crc32(key))) + rest


def referenced_content_number(record: bytes) -> int:
    """Return the number of the content to which a record refers; 0 if the record is no reference."""
    if len(record) != REFERENCE_SIZE or not record.startswith(_REFERENCE_STARTS, _CHECKSUM.size):
        return 0
    number: int = _NUMBER.unpack_from(record, _HEADER_AT)[0]
    return number


def decode_record(key: bytes, record: bytes, content: bytes = b"") -> SentMessage:
    """Return the message stored under `key`. If the record is a reference, `content` is the record of its content.

    Raises: DamagedRecord if any bit of key, record or content was changed, another version has written the record, or
    the content is missing"""
    verify_record(key, record)
    version, flags, header_length, expires_ms, arrived_ms = _FIELDS.unpack_from(record, _CHECKSUM.size)
    priority = PRIORITY_MAX - _KEY.unpack(key)[1]
    if flags & _REFERENCE:
        return _decode_referenced(priority, referenced_content_number(record), content)
    body_at = _HEADER_AT + header_length
    header = record[_HEADER_AT:body_at]
    redrive_queue = b""
    if version != RECORD_VERSION:
        redrive_queue, _, header = header.partition(b"\n")
    message = SentMessage(
        priority=priority,
        persistent=bool(flags & _PERSISTENT),
        expires_ms=expires_ms,
        header=header,
        body=record[body_at:],
        arrived_ms=arrived_ms,
        group=group_of(header),
        redrive_queue=unescape(redrive_queue.decode()) if redrive_queue else "",
        is_text=flags & _TEXT != 0,
    )
    if version == _OPENWIRE:
        message.form = OPENWIRE_FORM
        message.group = group_of_message(message)
        message.growth = growth_of(message)
    return message


def verify_record(key: bytes, record: bytes) -> None:
    """Verify the checksum and version of a record.

    Raises: DamagedRecord if any bit of key or record was changed, or another version has written the record
    """
    if len(record) < _HEADER_AT:
        raise DamagedRecord(f"record of {len(record)} bytes is cut short")
    if _CHECKSUM.unpack_from(record)[0] != crc32(memoryview(record)[_CHECKSUM.size :], crc32(key)):
        raise DamagedRecord("checksum does not match")
    version = record[_CHECKSUM.size]
    if version not in _VERSIONS:
        raise DamagedRecord(
            f"record version {version}; this truenext reads versions {RECORD_VERSION} to {_VERSIONS[-1]}"
        )


def _decode_referenced(priority: int, number: int, content: bytes) -> SentMessage:
    if not content:
        raise DamagedRecord(f"its content, number {number}, is missing")
    try:
        message = decode_record(content_key(number), content)
    except DamagedRecord as error:
        raise DamagedRecord(f"its content, number {number}, is damaged: {error}") from error
    message.priority = priority
    return message
