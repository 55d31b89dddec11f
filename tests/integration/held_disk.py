"""Broker whose disk a test can hold and break, to see what happens while a commit is in flight.

It is `truenext serve`, controlled by files. No batch is written while FOLDER/hold exists, and writing fails while
FOLDER/break exists. Pages read from the store do not reach the broker while FOLDER/hold-pages exists. FOLDER/room says
how much space is left, if it exists. The history finds no space while FOLDER/full exists, which is deleted once the
ballast is given up. The journal's segments are small, so that messages move into the checkpoint during each test.

If FOLDER/limit exists when the broker starts, it is the limit of messages on disk in bytes; if FOLDER/size exists, the
disk seems to have that many bytes, and nothing but the data folder on it. Then segments have 1 MiB.
"""

import errno
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from unittest import mock

from truenext.broker import write_time
from truenext.cli import serve
from truenext.cli.main import main as truenext
from truenext.errors import StoreError
from truenext.model.batch import Batch
from truenext.model.disk_level import DiskLevel
from truenext.model.limits import PAGE_BYTES
from truenext.store import folder as store_folder
from truenext.store.embedded import EmbeddedStore
from truenext.store.log import Log
from truenext.store.store import Page

SEGMENT_BYTES_OF_SMALL_DISK = 1024 * 1024
SEGMENTS_MAX = 2


class HeldStore(EmbeddedStore):
    folder: Path
    """Folder of the files that control the store."""

    def __init__(self, path: Path, *, disk_limit: int | None, log: Log | None) -> None:
        limit = self.folder / "limit"
        is_small = limit.exists() or (self.folder / "size").exists()
        super().__init__(
            path,
            disk_limit=int(limit.read_text()) if limit.exists() else disk_limit,
            segment_bytes=SEGMENT_BYTES_OF_SMALL_DISK if is_small else 64 * 1024,
            log=log,
            segments_max=SEGMENTS_MAX,
        )

    def apply(self, batch: Batch) -> None:
        while (self.folder / "hold").exists():
            time.sleep(0.0005)
        if (self.folder / "break").exists():
            raise StoreError("cannot write to the store: the disk was broken by a test")
        super().apply(batch)

    def read_page(self, lane: bytes, after_sequence: int, limit: int, size_max: int = PAGE_BYTES) -> Page:
        page = super().read_page(lane, after_sequence, limit, size_max)
        while (self.folder / "hold-pages").exists():
            time.sleep(0.0005)
        return page

    def delete_ballast(self, error: OSError) -> None:
        super().delete_ballast(error)
        (self.folder / "full").unlink(missing_ok=True)

    @property
    def disk_level(self) -> DiskLevel:
        file = self.folder / "room"
        return DiskLevel[file.read_text()] if file.exists() else super().disk_level


def _write(file: int, content: bytes) -> int:
    """Write to the history; the broker uses `os.write` for nothing else."""
    if (HeldStore.folder / "full").exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return _system_write(file, content)


_system_write = os.write


def _free_bytes(path: Path) -> int:
    size = HeldStore.folder / "size"
    if not size.exists():
        return _system_free_bytes(path)
    return max(0, int(size.read_text()) - used_bytes(path))


_system_free_bytes = store_folder.free_bytes


def used_bytes(data: Path) -> int:
    """Return the bytes that a data folder takes on disk; files may be deleted meanwhile."""
    used = 0
    for path in data.rglob("*"):
        with suppress(FileNotFoundError):
            used += path.stat().st_blocks * 512
    return used


def main(arguments: Sequence[str]) -> None:
    """Run `truenext` with a held store. The arguments are the folder of its files and a command line."""
    folder, *command = arguments
    HeldStore.folder = Path(folder)
    # Nothing is written by the event loop: it has to go on while the disk is held.
    with (
        mock.patch.object(serve, "EmbeddedStore", HeldStore),
        mock.patch.object(os, "write", _write),
        mock.patch.object(store_folder, "free_bytes", _free_bytes),
        mock.patch.object(write_time, "INLINE_SMALL_WRITE_SECONDS_MAX", -1),
    ):
        truenext(command)
