"""Newest origin of a log that a broker's data folder has followed, in the folder's file `origin`.

A former primary that comes back has an earlier timeline, and only a folder can know that. The file stays if the rest of
the folder is set aside: what the folder has seen is still true.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from truenext.store.folder import sync_folder
from truenext.store.postgresql.standing_by import Origin

logger = logging.getLogger(__name__)


def read_origin(folder: Path, identity: str) -> Origin | None:
    """Return the origin that the folder knows of the log with this identity; None if it knows none."""
    try:
        known, system, timeline = (folder / "origin").read_text().split()
    except (OSError, ValueError):
        return None
    return Origin(int(system), int(timeline)) if known == identity else None


def write_origin(folder: Path, identity: str, origin: Origin) -> None:
    """Write the origin, durably. A disk that is full or fails is no reason to end the broker."""
    new = folder / "origin-new"
    try:
        with new.open("w") as file:
            file.write(f"{identity} {origin.system} {origin.timeline}\n")
            file.flush()
            os.fsync(file.fileno())
        new.rename(folder / "origin")
        sync_folder(folder)
    except OSError as error:
        logger.warning("cannot note the timeline of the database", extra={"folder": str(folder), "reason": str(error)})
