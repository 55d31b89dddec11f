"""The data folder: made for its owner, held by one broker at a time."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from truenext.errors import StoreInUseError

if TYPE_CHECKING:
    from pathlib import Path


def make(path: Path) -> None:
    """Make the folder and what leads to it, durably. Raises: OSError"""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in (path, *(folder.parent for folder in missing)):
        sync_folder(folder)


def lock(path: Path) -> int:
    """An open file; the folder is ours until it is closed, by whatever end of the process.

    Raises: StoreInUseError if another process holds it, OSError
    """
    file = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(file, 20, 0).decode(errors="replace").strip() or "unknown"
            raise StoreInUseError(
                f"data folder {path} is in use by the broker of process {holder}: stop it, or use another folder"
            ) from error
        os.truncate(file, 0)
        os.pwrite(file, b"%d\n" % os.getpid(), 0)
    except BaseException:
        os.close(file)
        raise
    return file


def sync_folder(path: Path) -> None:
    """Make what the folder lists durable: a synced file in an unsynced folder is lost in a power cut.

    Raises: OSError
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
