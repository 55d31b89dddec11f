"""Frames of a journal segment: their layout, reading them, and detecting a single wrong bit.

Little-endian:

    checksum    u32     CRC-32 of the rest of the frame, started with the journal's salt
    size        u32     bytes of the payload
    segment     u64     number of the segment
    number      u64     number of the frame; the journal's first frame is 1, counted over all segments
    payload     bytes

No other bytes in a segment have the checksum of a frame: the checksum covers the segment's number, which is never used
again, and the salt, which no sender of a message knows. If you change the layout, increase FORMAT_VERSION in
checkpoint_format.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from truenext.model.checksum import crc32

FLIP_BYTES_MAX = 1024 * 1024
"""Largest size of a frame that is searched for a single wrong bit. At this size the search takes a quarter of a second,
and 1 of 500 torn frames looks as if one bit were wrong."""

SECTOR = 512
"""Number of bytes that a disk writes completely or not at all."""

OLD_BYTES = 64 * 1024
"""Number of bytes after a frame that are searched for old data of a reused file."""

FRAME = struct.Struct("<IIQQ")
CHECKSUM = struct.Struct("<I")
REST = struct.Struct("<IQQ")
SEGMENT_OFFSET = 8


def payload_at(content: memoryview, offset: int, segment: int, number: int, salt: int) -> memoryview | None:
    """Return the payload of frame `number` at `offset`. None if no undamaged frame with this number starts there."""
    if offset + FRAME.size > len(content):
        return None
    checksum, size, in_segment, found = FRAME.unpack_from(content, offset)
    end = offset + FRAME.size + size
    if in_segment != segment or found != number or end > len(content):
        return None
    if crc32(content[offset + CHECKSUM.size : end], salt) != checksum:
        return None
    return content[offset + FRAME.size : end]


def iter_starts(content: bytearray, segment: int, after: int) -> Iterator[tuple[int, int, int]]:
    """Yield each position after `after` where a frame may start: the offset, the size of the payload, and the frame's
    number."""
    needle = struct.pack("<Q", segment)
    at = content.find(needle, after + SEGMENT_OFFSET)
    while at >= 0:
        start = at - SEGMENT_OFFSET
        if start + FRAME.size <= len(content):
            _, size, _, number = FRAME.unpack_from(content, start)
            yield start, size, number
        at = content.find(needle, at + 1)


def may_follow(number: int, last: int, between: int) -> bool:
    """Return whether frame `number` may start `between` bytes after the end of frame `last`, because the frames between
    them fit there. This excludes most false frames, such as old frames of a reused file."""
    return last < number <= last + 1 + between // FRAME.size


def size_for_first_frame(content: memoryview, segment: int, number: int) -> int:
    """Return the minimum size of the segment's file, from the header of its first frame. Return 0 if the first frame is
    not frame `number`.

    The frame's header is in one sector, so a crash never leaves only a part of it.
    """
    if len(content) < FRAME.size:
        return 0
    _, size, in_segment, found = FRAME.unpack_from(content)
    return FRAME.size + int(size) if (in_segment, found) == (segment, number) else 0


def describe_cut(segment: int, size: int, expected: int) -> str:
    """Describe a segment that is too small. A crash does not cut a segment: the file gets its name once all its bytes
    are on the disk."""
    return f"segment {segment:016x} has {size} bytes and was made with {expected}"


def has_flipped_bit(content: memoryview, offset: int, segment: int, number: int, salt: int) -> bool:
    """Return whether frame `number` is at `offset`, with exactly one wrong bit. Such a frame was written completely,
    and damaged later. A crash leaves such a frame only if a sector keeps old content that differs from the new content
    in one bit."""
    payload = offset + FRAME.size
    if payload > len(content):
        return False
    checksum, size, in_segment, found = FRAME.unpack_from(content, offset)
    header_difference = (in_segment ^ segment).bit_count() + (found ^ number).bit_count()
    if header_difference > 1:
        return False

    def difference(size: int) -> int | None:
        """Return the stored checksum XOR the checksum of a payload of `size` bytes. None if the payload would be too
        long."""
        if payload + size > min(len(content), offset + FLIP_BYTES_MAX):
            return None
        rest = crc32(REST.pack(size, segment, number), salt)
        return int(crc32(content[payload : payload + size], rest) ^ checksum)

    wrong = difference(size)
    if header_difference == 1:
        return wrong == 0
    if any(difference(size ^ 1 << bit) == 0 for bit in range(32)):
        return True
    if wrong is None:
        return False
    if wrong.bit_count() == 1:
        return True
    at = find_flipped_bit(wrong, REST.size + size)
    if at is None or at[0] < REST.size:
        return False
    return not _may_be_old(content, offset, payload + size, payload + at[0] - REST.size)


def _may_be_old(content: memoryview, offset: int, end: int, at: int) -> bool:
    """Return whether a crash may have left old content in the sector of byte `at`. The frame reaches from `offset` to
    `end`.

    The frame's first sector, with the segment's number, cannot be old. Other old sectors have zeros, or in a reused
    file any data; then old data also follows the frame.
    """
    sector = at - at % SECTOR
    if sector < offset + FRAME.size:
        return False
    return not any(content[sector : min(end, sector + SECTOR)]) or any(content[end : end + OLD_BYTES])


# A CRC-32 is linear, so that it tells which single bit is wrong, and with which value it started: `zlib.crc32(content,
# begin)` runs a register through the content, byte by byte, and every such step can be undone.

_POLYNOMIAL = 0xEDB88320
_ONES = 0xFFFFFFFF


def _table_entry(byte: int) -> int:
    register = byte
    for _ in range(8):
        register = (register >> 1) ^ (_POLYNOMIAL if register & 1 else 0)
    return register


_TABLE = [_table_entry(byte) for byte in range(256)]
"""Table of CRC-32: by byte, its effect on a register of 0."""

_REVERSE_TABLE = bytearray(256)
"""Reverse of `_TABLE`: by the highest byte of an entry, the index of this entry."""
for _byte, _register in enumerate(_TABLE):
    _REVERSE_TABLE[_register >> 24] = _byte

_ONE_BIT = {_TABLE[1 << bit]: bit for bit in range(8)}


def initial_value(content: bytes | memoryview, checksum: int) -> int:
    """Return the only start value with which the CRC-32 of `content` is `checksum`. Takes a microsecond per byte."""
    register = checksum ^ _ONES
    for byte in reversed(content):
        index = _REVERSE_TABLE[register >> 24]
        register = ((register ^ _TABLE[index]) << 8 & _ONES) | (index ^ byte)
    return register ^ _ONES


def find_flipped_bit(difference: int, size: int) -> tuple[int, int] | None:
    """Return the byte and the bit whose flip changes the checksum of `size` bytes by `difference` (XOR, not 0). None if
    no bit does. Other damage looks like a flipped bit once in 2^29 / `size` cases."""
    register = difference
    for byte in range(size - 1, -1, -1):
        bit = _ONE_BIT.get(register)
        if bit is not None:
            return byte, bit
        index = _REVERSE_TABLE[register >> 24]
        register = ((register ^ _TABLE[index]) << 8 & _ONES) | index
    return None
