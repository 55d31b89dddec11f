"""Reading of the files of a history folder, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from truenext.errors import HistoryError
from truenext.model.checksum import crc32
from truenext.model.events import BLOCK, CHECKSUM, CHUNK, FILE, HISTORY_VERSION, MAGIC, EventKind, event_bytes

SUFFIX = ".history"

SEARCH_BYTES_MAX = 1 << 32
"""Bytes, repetitions included, whose checksum is computed to find a good chunk after a damaged one."""

_RUN_AT = 8
"""Offset of the run in a chunk."""


class HistoryChunk(NamedTuple):
    run: int
    flags: int
    first_event: int
    blocks: memoryview
    end: int
    """Offset of the chunk's end in the bytes read."""


class EventBlock(NamedTuple):
    kind: int
    code: int
    events: int
    queue: int
    other: int
    at: int
    columns: memoryview


def history_files(folder: Path) -> list[Path]:
    """Return the files, oldest first; the last may still grow. Empty if there is no such folder.
    Raises: OSError
    """
    try:
        # A glob would silently skip a folder that cannot be read.
        return sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIX))
    except FileNotFoundError:
        return []


def file_path(folder: Path, first_event: int) -> Path:
    return folder / f"{first_event:016x}{SUFFIX}"


def chunks_of_file(path: Path) -> Iterator[HistoryChunk]:
    """Yield the whole chunks of a file. Bytes between them are damaged; bytes after them were cut off by a crash.

    Raises: HistoryError if it is no history of this truenext, OSError
    """
    data = path.read_bytes()
    content = memoryview(data)
    if len(content) < FILE.size:
        return
    magic, version, _ = FILE.unpack_from(content)
    if magic != MAGIC:
        raise HistoryError(f"{path} is not a history file")
    if version != HISTORY_VERSION:
        raise HistoryError(
            f"{path} has history version {version}; this truenext reads {HISTORY_VERSION}: "
            "use the truenext that wrote it"
        )
    at: int | None = FILE.size
    while at is not None and at < len(content):
        chunk = chunk_at(content, at)
        if chunk is None:
            at = next_chunk(data, at)
        else:
            yield chunk
            at = chunk.end


def chunk_at(content: memoryview, at: int) -> HistoryChunk | None:
    """Return the chunk that starts at `at`, None if there is no whole one."""
    if at + CHUNK.size > len(content):
        return None
    checksum, size, run, flags, first_event = CHUNK.unpack_from(content, at)
    end = at + CHUNK.size + size
    if end > len(content) or crc32(content[at + CHECKSUM.size : end]) != checksum:
        return None
    return HistoryChunk(run, flags, first_event, content[at + CHUNK.size : end], end)


def next_chunk(content: bytes, at: int) -> int | None:
    """Return the offset of the first whole chunk after `at`, of the run of this file, which is `content`; or None."""
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
        at = columns_at + (other if kind in (EventKind.NAME, EventKind.CAUSE) else count * event_bytes(kind))
        yield EventBlock(kind, code, count, queue, other, time, chunk.blocks[columns_at:at])


def count_events(chunk: HistoryChunk) -> int:
    return sum(block.events for block in blocks_of(chunk))
