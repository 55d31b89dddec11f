"""What a CRC-32 tells besides right and wrong, as it is linear: whether one bit is wrong, and what it was begun with.

`zlib.crc32(content, begin)` runs a register through the content, byte by byte, and every such step can be undone.
"""

from __future__ import annotations

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
