"""Disk level of a store, and its reserves for a full disk.

A level ends only when somewhat more space is free than when the level began. Without this margin, senders would be
stopped and started again and again.

While the disk has space, a spare segment and the ballast are made. With the spare segment the journal can grow even
when the disk is full. The ballast is deleted when the checkpoint or the history finds no space, so that both can be
written.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from threading import Condition

from truenext.model.disk_level import DiskLevel
from truenext.store import folder
from truenext.store.checkpoint import TRANSACTION_BYTES_MAX, Checkpoint
from truenext.store.journal import SPARES_MAX, Journal
from truenext.store.store_errors import STORAGE_ERRORS, is_no_space, is_short_write

logger = logging.getLogger(__name__)

LITTLE_FRACTION = 0.9
"""Used fraction of a limit at which the level becomes LITTLE. At the limit itself the level is NONE."""

LITTLE_RESERVES = 2
"""Free space below which the level is LITTLE, as a multiple of the reserve: the bytes that must stay free. Below one
reserve the level is NONE."""

HYSTERESIS = 0.03
"""Additional fraction, of the limit or of the required free space, that must become free before a level ends."""

COPY_FACTOR = 2
"""Bytes of the checkpoint that one byte of the journal's messages may take: pages may be half empty."""

UNNEEDED_DIVISOR = 8
"""Part of the unneeded space that a segment may take in the checkpoint before it is due. So there is always some left
for a segment with few messages."""

BALLAST_SEGMENTS = 2
"""Size of the ballast, in segments. It is more than two transactions of the checkpoint can need."""


BACKUP_MARGIN_SEGMENTS = 4
"""Free space beyond the reserve that a backup leaves, in segments."""


def level_of_limit(limit: int, used: int, previous: DiskLevel) -> DiskLevel:
    """Return the disk level if `used` bytes are used, and at most `limit` bytes may be used."""
    fraction = used / limit
    if fraction >= 1 or (previous is DiskLevel.NONE and fraction >= 1 - HYSTERESIS):
        return DiskLevel.NONE
    if fraction >= LITTLE_FRACTION or (previous is not DiskLevel.PLENTY and fraction >= LITTLE_FRACTION - HYSTERESIS):
        return DiskLevel.LITTLE
    return DiskLevel.PLENTY


def level_of_free_space(reserve: int, free: int, previous: DiskLevel) -> DiskLevel:
    """Return the disk level if `free` bytes are free, and `reserve` bytes must stay free."""
    ratio = free / reserve
    if ratio < 1 or (previous is DiskLevel.NONE and ratio < 1 + HYSTERESIS):
        return DiskLevel.NONE
    if ratio < LITTLE_RESERVES or (previous is not DiskLevel.PLENTY and ratio < LITTLE_RESERVES * (1 + HYSTERESIS)):
        return DiskLevel.LITTLE
    return DiskLevel.PLENTY


def _with_backup(level: DiskLevel, with_backup: DiskLevel) -> DiskLevel:
    """Return the disk level of a store, which a backup makes LITTLE at most."""
    return max(level, min(with_backup, DiskLevel.LITTLE))


class DiskSpace:
    """Free disk space of a store, its disk level, and its reserves."""

    def __init__(
        self, path: Path, journal: Journal, checkpoint: Checkpoint, changed: Condition, *, limit: int | None
    ) -> None:
        """Watch the data folder `path`. Journal and checkpoint may use `limit` bytes; None means the whole disk.
        `changed` is notified when the disk becomes full."""
        self.path = path
        self._journal = journal
        self._checkpoint = checkpoint
        self._changed = changed
        self._limit = limit
        self._limit_level = self._free_level = DiskLevel.PLENTY
        self._ballast = path / "ballast"
        self.level = DiskLevel.PLENTY
        """Disk level that the last check has found."""
        self.bytes: dict[str, int] = {}
        """Numbers of bytes from which `level` was found. `Store.disk_level_bytes` describes them."""
        self.backup_here = 0
        """Bytes that a backup has still to write on the disk of the data folder."""
        self.backup_growth = 0
        """Bytes by which the checkpoint's file has grown for a backup."""
        self.is_full = False
        """True after a write has found no space, until spare segment and ballast exist again."""

    def update_level(self) -> None:
        """Measure the space, and set `level` and `bytes`. Raises: lmdb.Error, OSError if the space cannot be
        measured"""
        levels = self._limit_level, self._free_level
        self._measure()
        if self.level is not DiskLevel.PLENTY and self._journal.delete_kept():
            self._limit_level, self._free_level = levels
            self._measure()

    def _measure(self) -> None:
        journal = self._journal
        reserve, free = self._reserve(), folder.free_bytes(self.path)
        found = {"free": free, "needed": LITTLE_RESERVES * reserve}
        held = journal.held_size + self.backup_growth
        if self._limit is not None:
            used = journal.size + journal.spare_size + journal.kept_size + self._checkpoint.size()
            level_of_used = partial(level_of_limit, self._limit, previous=self._limit_level)
            self._limit_level = _with_backup(level_of_used(used=used), level_of_used(used=used + held))
            found |= {"used": used, "limit": self._limit}
        level_of_free = partial(level_of_free_space, reserve, previous=self._free_level)
        self._free_level = _with_backup(level_of_free(free=free), level_of_free(free=free - self.backup_here))
        if backup := held + self.backup_here:
            found["backup"] = backup
        self.bytes = found
        self.level = DiskLevel.FULL if self.is_full else max(self._limit_level, self._free_level)

    def room_for_checkpoint(self) -> int:
        """Return the largest number of bytes that the next segment may take in the checkpoint before it is due.

        The checkpoint's file never shrinks: it must not take the space that a store without messages needs for the
        level PLENTY. Unused pages may be too small for a large message, so half of them count, and only as far as there
        is space for new ones. Raises: lmdb.Error, OSError if the space cannot be measured
        """
        free, unused = folder.free_bytes(self.path), self._checkpoint.file_size() - self._checkpoint.size()
        unneeded = self._unneeded(free)
        return min(free, max(unneeded // UNNEEDED_DIVISOR, min(unused, unneeded) // 2))

    def _unneeded(self, free: int) -> int:
        """Return the bytes that would be free without messages, beyond those that the level PLENTY needs then. The
        checkpoint's file has its size. `free` bytes are free."""
        journal, segment = self._journal, self._checkpoint.segment_bytes
        ballast = self._ballast_size()
        reserves = round(LITTLE_RESERVES * (1 + HYSTERESIS) * _reserve(segment, segment))
        files = (1 + SPARES_MAX + BALLAST_SEGMENTS) * segment
        return free + journal.size + journal.spare_size + ballast - files - reserves

    def _ballast_size(self) -> int:
        try:
            return self._ballast.stat().st_size
        except FileNotFoundError:
            return 0

    @property
    def has_backup(self) -> bool:
        """Whether a backup still reads the store, or writes on the disk of the data folder."""
        return self.backup_here > 0 or self._journal.is_held

    def has_space_for_backup(self, size: int) -> bool:
        """Return whether a backup may write `size` bytes on the disk of the data folder, without a level above LITTLE
        by that. Raises: OSError if the space cannot be measured"""
        # The reserve grows with the journal, and others write meanwhile.
        margin = BACKUP_MARGIN_SEGMENTS * self._checkpoint.segment_bytes
        return not self.is_full and folder.free_bytes(self.path) - size >= self._reserve() * (1 + HYSTERESIS) + margin

    @property
    def is_spare_due(self) -> bool:
        # If a spare could not be allocated, the next try waits for the next check.
        return self._journal.needs_spare and not self.is_full and self._has_space_for_spare()

    def allocate_reserves(self) -> None:
        """Allocate a spare segment and the ballast, if the disk has space for them."""
        try:
            # A try that cannot succeed would take the last bytes from other writers meanwhile.
            if self._has_space_for_spare():
                self._journal.allocate_spare()
            size = BALLAST_SEGMENTS * self._checkpoint.segment_bytes
            # In this order: the space of a ballast that was just deleted is not enough.
            if not self._ballast.exists() and folder.free_bytes(self.path) >= size + self._reserve():
                folder.reserve(self._ballast, size)
            if self.is_full and self._ballast.exists() and not self._journal.needs_spare:
                logger.warning("the disk has free space again", extra={"folder": str(self.path)})
                self.is_full = False
        except STORAGE_ERRORS as error:
            self.note_disk_full(error)
        self.update_level()

    def delete_ballast(self, error: Exception) -> bool:
        """Delete the ballast, because `error` says that the disk is full. Return False if there is no ballast any more.

        Raises: `error` itself, if it has another reason
        """
        self.note_disk_full(error)
        try:
            self._ballast.unlink()
        except FileNotFoundError:
            return False
        return True

    def note_disk_full(self, error: Exception) -> None:
        """Record that the disk is full, as `error` says.

        Raises: `error` itself, if it has another reason
        """
        is_short = is_short_write(error) and folder.free_bytes(self.path) < TRANSACTION_BYTES_MAX
        if not (is_no_space(error) or is_short):
            raise error
        if not self.is_full:
            extra = {"folder": str(self.path), "reason": str(error)}
            logger.error("the disk is full: sends are refused until there is free space", extra=extra)
            with self._changed:
                self.is_full = True
                self._changed.notify_all()
        self.update_level()

    def _has_space_for_spare(self) -> bool:
        return folder.free_bytes(self.path) >= 2 * self._checkpoint.segment_bytes

    def _reserve(self) -> int:
        return _reserve(self._journal.size, self._checkpoint.segment_bytes)


def _reserve(journal_size: int, segment_bytes: int) -> int:
    """Return the number of bytes that must stay free. This space suffices to checkpoint the whole journal, and for one
    more segment."""
    return COPY_FACTOR * journal_size + segment_bytes
