"""How does a frame stand in a segment of the journal, and is what stands there one?

Little-endian:

    checksum    u32     CRC-32 of the rest of the frame, begun with the journal's salt
    size        u32     bytes of the payload
    segment     u64     number of the segment
    number      u64     1 for the first frame of the journal, and so on over all segments
    payload     bytes

Nothing else in a segment can pass for a frame: the checksum covers the segment's number, which is never
used again, and the salt, which no sender of a message knows. If you change anything here, increase FORMAT_VERSION in
checkpoint_format.py.
"""

from __future__ import annotations

import struct

from truenext.model.checksum import crc32

FLIP_BYTES_MAX = 1024 * 1024
"""Size of a frame in which a single wrong bit is looked for; that one which tore seems to have one is then as likely as
one in 500, and takes a quarter of a second."""

SECTOR = 512
"""Bytes of a file that are written as a whole or not at all."""

OLD_BYTES = 64 * 1024
"""Bytes behind a frame in which is looked for what an earlier life of the file has left."""

FRAME = struct.Struct("<IIQQ")
CHECKSUM = struct.Struct("<I")
REST = struct.Struct("<IQQ")
SEGMENT_OFFSET = 8


def payload_at(content: memoryview, offset: int, segment: int, number: int, salt: int) -> memoryview | None:
    """The payload of the frame at `offset`, None if there is none."""
    if offset + FRAME.size > len(content):
        return None
    checksum, size, in_segment, found = FRAME.unpack_from(content, offset)
    end = offset + FRAME.size + size
    if in_segment != segment or found != number or end > len(content):
        return None
    if crc32(content[offset + CHECKSUM.size : end], salt) != checksum:
        return None
    return content[offset + FRAME.size : end]


def may_follow(number: int, last: int, between: int) -> bool:
    """A frame of this number may begin `between` bytes behind the end of frame `last`: the missing ones fit in
    between. Of what only looks like a frame, as numbers in an old batch of a file that is used again, hardly any may.
    """
    return last < number <= last + 1 + between // FRAME.size


def size_for_first_frame(content: memoryview, segment: int, number: int) -> int:
    """Bytes that the file of this segment was made with, for its first frame to have place; 0 if that is not this one.

    What says so stands in one sector, so that no crash leaves a part of it.
    """
    if len(content) < FRAME.size:
        return 0
    _, size, in_segment, found = FRAME.unpack_from(content)
    return FRAME.size + int(size) if (in_segment, found) == (segment, number) else 0


def describe_cut(segment: int, size: int, expected: int) -> str:
    """In words. A crash does not leave that: a segment gets its name when all of it is on the disk."""
    return f"segment {segment:016x} has {size} bytes and was made with {expected}"


def has_flipped_bit(content: memoryview, offset: int, segment: int, number: int, salt: int) -> bool:
    """The frame at `offset` is this one but for a single bit. So it was written as a whole, and then damaged: a crash
    does not leave that, but for one that leaves the old content of a sector that differs from the new one by that bit.
    """
    payload = offset + FRAME.size
    if payload > len(content):
        return False
    checksum, size, in_segment, found = FRAME.unpack_from(content, offset)
    header_difference = (in_segment ^ segment).bit_count() + (found ^ number).bit_count()
    if header_difference > 1:
        return False

    def difference(size: int) -> int | None:
        """Between its checksum and that of a payload of `size` bytes, None if so much is not there."""
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
    """A crash may have left the sector with byte `at` of the frame from `offset` to `end` as it was before.

    Not the one that says of which segment the frame is. Others were zeros, or, where a file is used again, anything;
    then there is more of that behind the frame.
    """
    sector = at - at % SECTOR
    if sector < offset + FRAME.size:
        return False
    return not any(content[sector : min(end, sector + SECTOR)]) or any(content[end : end + OLD_BYTES])


# What a CRC-32 tells besides right and wrong, as it is linear: whether one bit is wrong, and what it was begun with.
#
# `zlib.crc32(content, begin)` runs a register through the content, byte by byte, and every such step can be undone.

_POLYNOMIAL = 0xEDB88320
_ONES = 0xFFFFFFFF


def _table_entry(byte: int) -> int:
    register = byte
    for _ in range(8):
        register = (register >> 1) ^ (_POLYNOMIAL if register & 1 else 0)
    return register


_TABLE = [_table_entry(byte) for byte in range(256)]
"""What a byte does to an empty register."""

_REVERSE_TABLE = bytearray(256)
"""Highest byte of such a step to the byte that made it."""
for _byte, _register in enumerate(_TABLE):
    _REVERSE_TABLE[_register >> 24] = _byte

_ONE_BIT = {_TABLE[1 << bit]: bit for bit in range(8)}


def initial_value(content: bytes | memoryview, checksum: int) -> int:
    """The number that `crc32(content, number)` gives `checksum` for; there is exactly one. A microsecond a byte."""
    register = checksum ^ _ONES
    for byte in reversed(content):
        index = _REVERSE_TABLE[register >> 24]
        register = ((register ^ _TABLE[index]) << 8 & _ONES) | (index ^ byte)
    return register ^ _ONES


def find_flipped_bit(difference: int, size: int) -> tuple[int, int] | None:
    """Byte and bit that make the checksum of `size` bytes wrong by `difference` (exclusive or, not 0), None if no bit
    does. Other damage passes for that once in 2^29 / `size` times.
    """
    register = difference
    for byte in range(size - 1, -1, -1):
        bit = _ONE_BIT.get(register)
        if bit is not None:
            return byte, bit
        index = _REVERSE_TABLE[register >> 24]
        register = ((register ^ _TABLE[index]) << 8 & _ONES) | index
    return None
