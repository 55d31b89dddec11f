"""Checksums of the checkpoint's small values. A value with a flipped bit is rejected.

    checksum    u32     CRC-32 of the database's name, the key and the value, little-endian
    value       bytes   to the end

LMDB itself has no checksums. Records have their own, see record.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import lmdb

from truenext.model.checksum import crc32
from truenext.store.store_errors import damage_error

_CHECKSUM = struct.Struct("<I")


class DamagedValue(ValueError):
    """Value whose checksum is wrong."""


def add_checksum(database: bytes, key: bytes, value: bytes) -> bytes:
    """Return the stored form of `value`: a checksum and the value. `remove_checksum` is the reverse."""
    return _CHECKSUM.pack(crc32(value, crc32(key, crc32(database)))) + value


def remove_checksum(database: bytes, key: bytes, stored: bytes) -> bytes:
    """Check the checksum, and return the value. Raises: DamagedValue if the checksum is wrong for this database and
    key"""
    value = stored[_CHECKSUM.size :]
    if len(stored) < _CHECKSUM.size or _CHECKSUM.unpack_from(stored)[0] != crc32(value, crc32(key, crc32(database))):
        name = key.decode() if database == b"meta" and key.isascii() else key.hex()
        raise DamagedValue(f"the value of {name} in {database.decode()} is not what was written")
    return value


class ChecksummedDatabase:
    """Database of small values, each with a checksum. All reading methods raise StoreError for a damaged value."""

    def __init__(self, db: lmdb._Database, name: bytes, data: Path) -> None:
        self._db = db
        self._name = name
        self._data = data

    def get(self, txn: lmdb.Transaction[bytes], key: bytes) -> bytes | None:
        stored = txn.get(key, db=self._db)
        return None if stored is None else self._remove_checksum(key, stored)

    def need(self, txn: lmdb.Transaction[bytes], key: bytes) -> bytes:
        value = self.get(txn, key)
        if value is None:
            raise damage_error("checkpoint", f"{key.decode()} is missing in {self._name.decode()}", self._data)
        return value

    def items(self, txn: lmdb.Transaction[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Yield all keys and values, in order.

        Raises: StoreError if a value is damaged; at the end also if one is missing
        """
        count = 0
        last = b""
        for key, stored in txn.cursor(self._db):
            if key <= last:
                raise damage_error("checkpoint", f"{key.hex()} in {self._name.decode()} is out of order", self._data)
            last = key
            yield key, self._remove_checksum(key, stored)
            count += 1
        expected = txn.stat(self._db)["entries"]
        if count != expected:
            raise damage_error(
                "checkpoint", f"{self._name.decode()} should have {expected} values, and has {count}", self._data
            )

    def put(self, txn: lmdb.Transaction[bytes], key: bytes, value: bytes) -> None:
        txn.put(key, add_checksum(self._name, key, value), db=self._db)

    def delete(self, txn: lmdb.Transaction[bytes], key: bytes) -> None:
        txn.delete(key, db=self._db)

    def clear(self, txn: lmdb.Transaction[bytes]) -> None:
        txn.drop(self._db, delete=False)

    def iter_from(self, txn: lmdb.Transaction[bytes], key: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield all keys from `key` on, with their values, in order."""
        cursor = txn.cursor(self._db)
        if cursor.set_range(key):
            for found, stored in cursor:
                yield found, self._remove_checksum(found, stored)

    def cursor(self, txn: lmdb.Transaction[bytes]) -> lmdb.Cursor[bytes]:
        return txn.cursor(self._db)

    def _remove_checksum(self, key: bytes, stored: bytes) -> bytes:
        try:
            return remove_checksum(self._name, key, stored)
        except DamagedValue as error:
            raise damage_error("checkpoint", str(error), self._data) from error
