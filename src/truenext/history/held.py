"""Held history: the events up to one moment, in files that still grow, are exported and deleted meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from truenext.history.files import history_files, parquet_files

COPY_BYTES = 256 * 1024


class HeldHistory:
    """History of one folder, as it was when the object was made."""

    def __init__(self, folder: Path) -> None:
        """Raises: OSError if the folder cannot be read"""
        self._folder = folder
        self._paths = history_files(folder)
        self._newest = os.open(self._paths[-1], os.O_RDONLY | os.O_CLOEXEC) if self._paths else -1
        self._newest_size = os.fstat(self._newest).st_size if self._paths else 0

    def size(self) -> int:
        """Return the bytes of the files that are there."""
        parquet = [path for path, _ in self._parquet_files()]
        return sum(path.stat().st_size for path in [*self._paths, *parquet] if path.exists())

    def files(self) -> Iterator[tuple[str, Iterator[bytes]]]:
        """Yield name and content of each file of `history/`. Read each content to its end before the next one.

        Files that were deleted meanwhile for their age or the size of the history are left out.
        """
        copied = set()
        # The newest first: it is the only one that is held, and needs little.
        if self._paths:
            yield f"history/{self._paths[-1].name}", _content(self._newest, self._newest_size)
        for path in self._paths[:-1]:
            file = _open(path)
            if file >= 0:
                copied.add(path.stem)
                yield f"history/{path.name}", _content_and_close(file)
        # Afterwards: a file above that was missing is among these, unless it was deleted for good.
        for path, name in self._parquet_files():
            file = -1 if path.stem in copied else _open(path)
            if file >= 0:
                yield f"history/{name}", _content_and_close(file)

    def close(self) -> None:
        if self._newest >= 0:
            os.close(self._newest)
        self._newest = -1

    def _parquet_files(self) -> Iterator[tuple[Path, str]]:
        """Yield path, and name in the folder, of the Parquet files with events before those of the newest file."""
        before = self._paths[-1].stem if self._paths else ""
        for path in parquet_files(self._folder):
            if path.stem < before:
                yield path, str(path.relative_to(self._folder))


def _open(path: Path) -> int:
    """Open a file; -1 if it is not there any more."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1


def _content(file: int, size: int) -> Iterator[bytes]:
    for offset in range(0, size, COPY_BYTES):
        yield os.pread(file, min(COPY_BYTES, size - offset), offset)


def _content_and_close(file: int) -> Iterator[bytes]:
    try:
        yield from _content(file, os.fstat(file).st_size)
    finally:
        os.close(file)
