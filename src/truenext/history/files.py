"""Reading of history files, chunk by chunk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from truenext.errors import HistoryError
from truenext.model.checksum import crc32
from truenext.model.events import (
    BLOCK,
    CHECKSUM,
    CHUNK,
    FILE,
    HISTORY_VERSION,
    MAGIC,
    OLDEST_HISTORY_VERSION,
    columns_size,
)

SUFFIX = ".history"
PARQUET_SUFFIX = ".parquet"

EVENTS_FOLDER = "events"
"""Name of the folder with the Parquet files, inside the history's folder."""

SEARCH_BYTES_MAX = 1 << 32
"""Maximum number of bytes whose checksum is computed in the search for the next good chunk after a damaged chunk. Bytes
that are read twice count twice."""

_RUN_AT = 8
"""Offset of the run's number in a chunk."""


class HistoryChunk(NamedTuple):
    run: int
    flags: int
    first_event: int
    blocks: memoryview
    end: int
    """Offset of the byte after the chunk, in the bytes that were read."""


class EventBlock(NamedTuple):
    kind: int
    code: int
    events: int
    queue: int
    other: int
    at: int
    columns: memoryview


def history_files(folder: Path) -> list[Path]:
    """Return the paths of the history files in a folder, oldest first. The last file may still grow. The list is empty
    if there is no such folder.

    Raises: OSError if the folder cannot be read
    """
    return _files(folder, SUFFIX)


def parquet_files(folder: Path, name: str = "") -> list[Path]:
    """Return the Parquet files of a history, by day: all, or those that were made of the history file `name`, which is
    without its suffix.

    Raises: OSError if a folder cannot be read
    """
    days = (day for day in sorted((folder / EVENTS_FOLDER).glob("date=*")) if day.is_dir())
    found = (path for day in days for path in _files(day, PARQUET_SUFFIX))
    return [path for path in found if not name or path.stem == name]


def _files(folder: Path, suffix: str) -> list[Path]:
    """Return the files in a folder, in order. A link that leads to no file is left out."""
    try:
        # A glob would silently skip a folder that cannot be read.
        with os.scandir(folder) as entries:
            return sorted(folder / each.name for each in entries if each.name.endswith(suffix) and _is_file(each))
    except FileNotFoundError:
        return []


def _is_file(entry: os.DirEntry[str]) -> bool:
    # A path, other than an entry, takes a loop of links for no file.
    return not entry.is_symlink() or Path(entry.path).is_file()


def file_path(folder: Path, first_event: int) -> Path:
    return folder / f"{first_event:016x}{SUFFIX}"


def chunks_of_file(path: Path) -> Iterator[HistoryChunk]:
    """Yield the undamaged chunks of a file. Bytes between two chunks are damaged. Bytes after the last one are damaged,
    or a chunk that a crash has cut off.

    Raises: HistoryError if the file is no history file, or of another version; OSError if it cannot be read
    """
    yield from chunks_of(path.read_bytes(), path)


def chunks_of(data: bytes, name: Path | str) -> Iterator[HistoryChunk]:
    """Yield the undamaged chunks of the bytes of a file, whose name is used in errors.

    Raises: HistoryError if it is no history file, or of another version
    """
    content = memoryview(data)
    if len(content) < FILE.size:
        return
    check_file_header(content, name)
    at: int | None = FILE.size
    while at is not None and at < len(content):
        chunk = chunk_at(content, at)
        if chunk is None:
            at = next_chunk(data, at)
        else:
            yield chunk
            at = chunk.end


def check_file_header(content: bytes | memoryview, name: Path | str) -> None:
    """Check the header of a history file.

    Raises: HistoryError if it is no history file, or of another version
    """
    magic, version, _ = FILE.unpack_from(content)
    if magic != MAGIC:
        raise HistoryError(f"{name} is not a history file")
    if not OLDEST_HISTORY_VERSION <= version <= HISTORY_VERSION:
        raise HistoryError(
            f"{name} has history version {version}; this truenext reads {OLDEST_HISTORY_VERSION} to {HISTORY_VERSION}: "
            "use the truenext that wrote it"
        )


def chunk_at(content: memoryview, at: int) -> HistoryChunk | None:
    """Return the chunk that starts at the offset `at`; None if no undamaged chunk starts there."""
    if at + CHUNK.size > len(content):
        return None
    checksum, size, run, flags, first_event = CHUNK.unpack_from(content, at)
    end = at + CHUNK.size + size
    if end > len(content) or crc32(content[at + CHECKSUM.size : end]) != checksum:
        return None
    return HistoryChunk(run, flags, first_event, content[at + CHUNK.size : end], end)


def next_chunk(content: bytes, at: int) -> int | None:
    """Return the offset of the first undamaged chunk after the offset `at`; None if there is none. `content` is the
    whole file. Chunks of another run of the broker are ignored."""
    whole = memoryview(content)
    needle = FILE.unpack_from(content)[2].to_bytes(4, "little")
    budget = SEARCH_BYTES_MAX
    found = content.find(needle, at + 1 + _RUN_AT)
    while found >= 0 and budget > 0:
        start = found - _RUN_AT
        if start + CHUNK.size <= len(content):
            if chunk_at(whole, start) is not None:
                return start
            budget -= min(CHUNK.unpack_from(content, start)[1], len(content) - start)
        found = content.find(needle, found + 1)
    return None


def blocks_of(chunk: HistoryChunk) -> Iterator[EventBlock]:
    at = 0
    while at < len(chunk.blocks):
        kind, code, count, queue, other, time = BLOCK.unpack_from(chunk.blocks, at)
        columns_at = at + BLOCK.size
        at = columns_at + columns_size(kind, count, other)
        yield EventBlock(kind, code, count, queue, other, time, chunk.blocks[columns_at:at])


def count_events(chunk: HistoryChunk) -> int:
    return sum(block.events for block in blocks_of(chunk))
