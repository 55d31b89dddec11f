"""Disk level log: logs when producers must wait or are refused for lack of disk space, and when the shortage ends."""

import logging

from truenext.model.disk_level import DiskLevel
from truenext.store.store import Store

logger = logging.getLogger(__name__)


class DiskLevelLog:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._logged = DiskLevel.PLENTY
        """Worst disk level logged since the level last was PLENTY."""

    def update(self) -> None:
        """Log the disk level if the level is worse than the last logged one, or is PLENTY again."""
        level = self._store.disk_level
        if level == self._logged or DiskLevel.PLENTY < level < self._logged:
            return
        self._logged = level
        sizes: dict[str, object] = {f"{name}_bytes": size for name, size in self._store.disk_level_bytes.items()}
        short = {"disk_level": level.name.lower()} | sizes
        if level is DiskLevel.PLENTY:
            logger.warning("disk has free space for messages again: producers continue", extra=sizes)
        elif level is DiskLevel.LITTLE:
            logger.warning("disk is almost full: connections that only send wait, or are refused", extra=short)
        elif level is DiskLevel.NONE:
            logger.warning(
                "disk is full: sends are refused, except in transactions that free as much as they send",
                extra=short,
            )
        else:
            logger.warning("disk is full, a write has failed: all sends are refused", extra=short)
