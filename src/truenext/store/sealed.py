"""A checksum on each small value of the checkpoint: a flipped bit is refused, and not believed.

    checksum    u32     CRC-32 of the database's name, the key and the value, little-endian
    value       bytes   to the end

LMDB has no checksums of its own. Records carry theirs, see record.py.
"""

from __future__ import annotations

import struct
from zlib import crc32

_CHECKSUM = struct.Struct("<I")


class DamagedValue(ValueError):
    """A value that is not what was written."""


def seal(database: bytes, key: bytes, value: bytes) -> bytes:
    """What `unseal` makes `value` of again."""
    return _CHECKSUM.pack(crc32(value, crc32(key, crc32(database)))) + value


def unseal(database: bytes, key: bytes, sealed: bytes) -> bytes:
    """Raises: DamagedValue if it is not what `seal` made for this database and key"""
    value = sealed[_CHECKSUM.size :]
    if len(sealed) < _CHECKSUM.size or _CHECKSUM.unpack_from(sealed)[0] != crc32(value, crc32(key, crc32(database))):
        name = key.decode() if database == b"meta" and key.isascii() else key.hex()
        raise DamagedValue(f"the value of {name} in {database.decode()} is not what was written")
    return value
