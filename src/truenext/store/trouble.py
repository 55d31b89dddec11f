"""What LMDB and the system say when something fails, as a StoreError that says what failed and what to do."""

from __future__ import annotations

import errno
import struct

import lmdb

from truenext.errors import StoreError

CAUSES = (lmdb.Error, OSError, struct.error, ValueError)
"""What `explained` can explain."""


def explained(attempt: str, error: Exception) -> StoreError:
    """`attempt` completes the sentence "cannot ..."."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, lmdb.MapFullError):
        return StoreError(f"cannot {attempt}: it is as large as its map allows; open it with a larger map")
    if isinstance(error, lmdb.DiskError) or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
        return StoreError(f"cannot {attempt}: the disk is full; make room, then start the broker again")
    if isinstance(error, lmdb.Error | OSError):
        return StoreError(f"cannot {attempt}: {error}; check the disk, then start the broker again")
    return StoreError(f"cannot {attempt}: a value is damaged or does not fit its field ({error})")


def disagreement(batch: int, what: str) -> StoreError:
    return StoreError(f"store and broker disagree: batch {batch} {what}. This is a bug of truenext")
