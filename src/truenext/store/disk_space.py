"""Disk level of a store, and its reserves for a full disk.

A level is left a little later than it was reached, so that senders are not stopped and started in turns.

A spare segment and the ballast are made while the disk has space. The spare lets the journal go on. The ballast is
deleted when the checkpoint or the history finds no space, so that checkpoints go on and the history can be written.
"""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Condition

from truenext.model.disk_level import DiskLevel
from truenext.store import folder
from truenext.store.checkpoint import TRANSACTION_BYTES_MAX, Checkpoint
from truenext.store.journal import Journal
from truenext.store.store_errors import STORAGE_ERRORS, is_no_space, is_short_write

logger = logging.getLogger(__name__)

LITTLE_FRACTION = 0.9
"""Fraction of a limit from which on the level is LITTLE; at the limit it is NONE."""

LITTLE_RESERVES = 2
"""Number of reserves of free space below which the level is LITTLE; below one reserve it is NONE."""

HYSTERESIS = 0.03
"""Fraction of the limit, or of the required free space, that must be regained in addition before a level is left."""

BALLAST_SEGMENTS = 2
"""Size of the ballast, in segments: more than two transactions of the checkpoint can need."""


def level_of_limit(limit: int, used: int, previous: DiskLevel) -> DiskLevel:
    """Return the level if `used` of at most `limit` bytes are used."""
    fraction = used / limit
    if fraction >= 1 or (previous is DiskLevel.NONE and fraction >= 1 - HYSTERESIS):
        return DiskLevel.NONE
    if fraction >= LITTLE_FRACTION or (previous is not DiskLevel.PLENTY and fraction >= LITTLE_FRACTION - HYSTERESIS):
        return DiskLevel.LITTLE
    return DiskLevel.PLENTY


def level_of_free_space(reserve: int, free: int, previous: DiskLevel) -> DiskLevel:
    """Return the level if `free` bytes are left, of which `reserve` must not be used up."""
    ratio = free / reserve
    if ratio < 1 or (previous is DiskLevel.NONE and ratio < 1 + HYSTERESIS):
        return DiskLevel.NONE
    if ratio < LITTLE_RESERVES or (previous is not DiskLevel.PLENTY and ratio < LITTLE_RESERVES * (1 + HYSTERESIS)):
        return DiskLevel.LITTLE
    return DiskLevel.PLENTY


class DiskSpace:
    """Disk space of a store: what is free, and the reserves."""

    def __init__(
        self, path: Path, journal: Journal, checkpoint: Checkpoint, changed: Condition, *, limit: int | None
    ) -> None:
        """`path` is the data folder; `limit` is the number of bytes that journal and checkpoint may use, None is the
        whole disk. `changed` is notified when the disk is full."""
        self.path = path
        self._journal = journal
        self._checkpoint = checkpoint
        self._changed = changed
        self._limit = limit
        self._limit_level = self._free_level = DiskLevel.PLENTY
        self._ballast = path / "ballast"
        self.level = DiskLevel.PLENTY
        """Level found by the last check."""
        self.bytes: dict[str, int] = {}
        """Bytes from which `level` was found, see `Store.disk_level_bytes`."""
        self.is_full = False
        """True from a write that found no space until spare segment and ballast exist again."""

    def update_level(self) -> None:
        """Find out `level` and `bytes`.
        Raises: lmdb.Error, OSError
        """
        journal = self._journal
        reserve, free = self._reserve(), folder.free_bytes(self.path)
        found = {"free": free, "needed": LITTLE_RESERVES * reserve}
        if self._limit is not None:
            used = journal.size + journal.spare_size + self._checkpoint.size()
            self._limit_level = level_of_limit(self._limit, used, self._limit_level)
            found |= {"used": used, "limit": self._limit}
        self._free_level = level_of_free_space(reserve, free, self._free_level)
        self.bytes = found
        self.level = DiskLevel.FULL if self.is_full else max(self._limit_level, self._free_level)

    @property
    def is_spare_due(self) -> bool:
        # If a spare could not be allocated, the next try waits for the next check.
        return self._journal.needs_spare and not self.is_full and self._has_space_for_spare()

    def allocate_reserves(self) -> None:
        """Allocate a spare segment and the ballast, as far as the disk has space for them."""
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
        """Delete the ballast, because the disk is full, as `error` says. Return False if there is none any more.

        Raises: `error`, if it says anything else
        """
        self.note_disk_full(error)
        try:
            self._ballast.unlink()
        except FileNotFoundError:
            return False
        return True

    def note_disk_full(self, error: Exception) -> None:
        """Note that the disk is full, as `error` says.

        Raises: `error`, if it says anything else
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
        """Return the bytes that must stay free to checkpoint the whole journal, into pages that may be half empty,
        and for one more segment."""
        return 2 * self._journal.size + self._checkpoint.segment_bytes
