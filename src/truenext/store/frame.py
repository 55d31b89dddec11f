"""Frames of a journal segment: their layout, reading them, and detecting a single wrong bit.

Little-endian:

    checksum    u32     CRC-32 of the rest of the frame, started with the journal's salt
    size        u32     bytes of the payload
    segment     u64     number of the segment
    number      u64     1 for the first frame of the journal, counted over all segments
    payload     bytes

Nothing else in a segment can pass for a frame: the checksum covers the segment's number, which is never used again,
and the salt, which no sender of a message knows. If you change the layout, increase FORMAT_VERSION in
checkpoint_format.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from truenext.model.checksum import crc32

FLIP_BYTES_MAX = 1024 * 1024
"""Size of the largest frame that is searched for a single wrong bit. At this size a torn frame seems to have one in
1 of 500 cases, and the search takes a quarter of a second."""

SECTOR = 512
"""Bytes that a disk writes as a whole or not at all."""

OLD_BYTES = 64 * 1024
"""Bytes after a frame that are searched for data of an earlier use of the file."""

FRAME = struct.Struct("<IIQQ")
CHECKSUM = struct.Struct("<I")
REST = struct.Struct("<IQQ")
SEGMENT_OFFSET = 8


def payload_at(content: memoryview, offset: int, segment: int, number: int, salt: int) -> memoryview | None:
    """Return the payload of the frame `number` at `offset`, None if there is no good frame with this number."""
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
    """Yield offset, size of the payload, and number of each place after `after` that may be the start of a frame."""
    needle = struct.pack("<Q", segment)
    at = content.find(needle, after + SEGMENT_OFFSET)
    while at >= 0:
        start = at - SEGMENT_OFFSET
        if start + FRAME.size <= len(content):
            _, size, _, number = FRAME.unpack_from(content, start)
            yield start, size, number
        at = content.find(needle, at + 1)


def may_follow(number: int, last: int, between: int) -> bool:
    """Return whether a frame of this number may start `between` bytes after the end of frame `last`, with space for
    the missing frames. This excludes most false frames, such as numbers in an old batch of a reused file."""
    return last < number <= last + 1 + between // FRAME.size


def size_for_first_frame(content: memoryview, segment: int, number: int) -> int:
    """Return the minimum size of this segment's file, made to hold its first frame; 0 if that is another frame.

    The header is in one sector, so that no crash leaves a part of it.
    """
    if len(content) < FRAME.size:
        return 0
    _, size, in_segment, found = FRAME.unpack_from(content)
    return FRAME.size + int(size) if (in_segment, found) == (segment, number) else 0


def describe_cut(segment: int, size: int, expected: int) -> str:
    """Describe a segment that is too small. No crash causes it: a segment gets its name once it is all on the disk."""
    return f"segment {segment:016x} has {size} bytes and was made with {expected}"


def has_flipped_bit(content: memoryview, offset: int, segment: int, number: int, salt: int) -> bool:
    """Return whether the frame at `offset` is `number` but for a single bit. Such a frame was written as a whole and
    damaged later. A crash causes it only by leaving old content of a sector that differs from the new in that bit."""
    payload = offset + FRAME.size
    if payload > len(content):
        return False
    checksum, size, in_segment, found = FRAME.unpack_from(content, offset)
    header_difference = (in_segment ^ segment).bit_count() + (found ^ number).bit_count()
    if header_difference > 1:
        return False

    def difference(size: int) -> int | None:
        """Return the XOR of the stored checksum and that of a payload of `size` bytes; None if that is too long."""
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
    """Return whether a crash may have left the sector of byte `at` as before; the frame is from `offset` to `end`.

    Not the sector that names the frame's segment. Other sectors were zeros, or, in a reused file, anything; then
    more old data follows the frame.
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
"""Table of CRC-32: effect of each byte on an empty register."""

_REVERSE_TABLE = bytearray(256)
"""Byte whose value in `_TABLE` has a certain highest byte, by that highest byte."""
for _byte, _register in enumerate(_TABLE):
    _REVERSE_TABLE[_register >> 24] = _byte

_ONE_BIT = {_TABLE[1 << bit]: bit for bit in range(8)}


def initial_value(content: bytes | memoryview, checksum: int) -> int:
    """Return the only number for which `crc32(content, number)` is `checksum`. Takes a microsecond per byte."""
    register = checksum ^ _ONES
    for byte in reversed(content):
        index = _REVERSE_TABLE[register >> 24]
        register = ((register ^ _TABLE[index]) << 8 & _ONES) | (index ^ byte)
    return register ^ _ONES


def find_flipped_bit(difference: int, size: int) -> tuple[int, int] | None:
    """Return byte and bit that change the checksum of `size` bytes by `difference` (XOR, not 0), None if no bit
    does. Other damage passes for a flipped bit once in 2^29 / `size` times."""
    register = difference
    for byte in range(size - 1, -1, -1):
        bit = _ONE_BIT.get(register)
        if bit is not None:
            return byte, bit
        index = _REVERSE_TABLE[register >> 24]
        register = ((register ^ _TABLE[index]) << 8 & _ONES) | index
    return None
