"""Pieces of a history, as clients of a broker get them. Each has the events behind an event number, up to a size.

A piece of a `.history` file has the bytes of a small file of this kind: a first chunk with the names of the broker and
of the queues that occur, then the chunks. Events that are in Parquet files only are read by a process of the lowest
priority (parquet_piece.py), as a broker does without numpy and pyarrow; their piece is a stream of Arrow.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

from truenext.errors import HistoryError
from truenext.history.files import (
    HistoryChunk,
    check_file_header,
    chunk_at,
    count_events,
    history_files,
    next_chunk,
    parquet_files,
)
from truenext.model.checksum import crc32
from truenext.model.events import BLOCK, BROKER, CHECKSUM, CHUNK, FILE, STARTS_FILE, EventKind, event_bytes

PIECE_BYTES = 256 * 1024
"""Bytes of chunks with which a piece is complete. A single chunk may have more."""
CURSORS_MAX = 8
"""Number of readers for which the place in a file is remembered; for others the file is read from its beginning."""

_NUMBER = re.compile("[0-9a-f]{16}")
"""Name of a file: the number of its first event."""

# Numbers are faster than members of an enum: a piece may have thousands of blocks.
_NAME, _CAUSE, _RUN_STARTED = int(EventKind.NAME), int(EventKind.CAUSE), int(EventKind.RUN_STARTED)
_WIDTHS = [event_bytes(kind) for kind in EventKind]
_TO_OTHER_QUEUES = frozenset(
    map(int, (EventKind.DEAD_LETTERED, EventKind.MOVED, EventKind.HANDLED, EventKind.REPORTED))
)


class Piece(NamedTuple):
    """Events of a history, without gaps that are not in the history."""

    first: int
    """Number of the first event that the history has; 0 if it has none."""
    end: int
    """Number of the event behind the piece, and of the first of the next piece at least."""
    is_arrow: bool
    content: bytes
    """Bytes of a history file, or a stream of Arrow; empty if there is no later event."""


class _Cursor:
    """Place in a history file, and what the file has named up to there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = FILE.size
        self.names: dict[int, bytes] = {}


ReadParquet = Callable[[Path, str, int, bool], tuple[int, bytes]]
"""Function that reads a piece of the Parquet files in a folder that have a name, from an event on, with causes or
without: `parquet_piece` (parquet_piece.py)."""


class PieceReader:
    """Reader of one history folder, which may still grow. One thread at a time may use it."""

    def __init__(self, folder: Path, read_parquet: ReadParquet | None = None) -> None:
        """`read_parquet` reads Parquet files in this process; None leaves that to another one."""
        self._folder = folder
        self._read_parquet = read_parquet or self._read_parquet_elsewhere
        self._first = 0
        """First event at the last look at all files: there may be thousands, and a piece is read often."""
        self._tail: tuple[_Cursor, int] | None = None
        """Place of the end of the newest file, and the number that followed there."""
        self._cursors: dict[int, _Cursor] = {}
        """Places of earlier pieces, by the event behind the piece. The latest is the last."""
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, after: int, *, with_causes: bool) -> Piece:
        """Return the first events behind the event `after`. Without `with_causes` each cause is an empty text.

        Raises: HistoryError if a file has another version; OSError if a file cannot be read
        """
        event = after + 1
        cursor = self._cursors.pop(event, None)
        while True:
            paths = self._history_paths()
            if cursor is not None and first_event(cursor.path) in paths:
                number, numbers = first_event(cursor.path), sorted(paths)
            else:
                # Also if the broker has just exported the file of the cursor.
                cursor, numbers = None, self.first_events()
                if not numbers:
                    return Piece(0, event, False, b"")
                number = numbers[max(bisect_right(numbers, event) - 1, 0)]
            if number in paths:
                cursor = cursor or _Cursor(paths[number])
                try:
                    piece = _PieceMaker(cursor, event, with_causes=with_causes).make()
                except FileNotFoundError:
                    # Exported since it was listed.
                    cursor = None
                    continue
                if piece is not None or number == numbers[-1]:
                    end, content = piece or (event, b"")
                    self._remember(end, cursor)
                    return Piece(self._first, end, False, content)
            else:
                end, content = self._read_parquet(self._folder, f"{number:016x}", event, with_causes)
                if content:
                    return Piece(self._first, end, True, content)
            later = bisect_right(numbers, number)
            if later == len(numbers):
                return Piece(self._first, event, False, b"")
            # Listed before the file was read to its end, so that the end is complete.
            event = max(event, numbers[later])
            # Parquet files without later events may have been deleted, and others: then the next look at all files
            # says so.
            is_sure = number in paths and numbers[later] in paths
            cursor = _Cursor(paths[numbers[later]]) if is_sure else None

    def close(self) -> None:
        """End the process that reads Parquet files. Any thread may call this."""
        process = self._process
        if process is not None:
            process.kill()

    def _remember(self, end: int, cursor: _Cursor) -> None:
        self._cursors[end] = cursor
        if len(self._cursors) > CURSORS_MAX:
            del self._cursors[next(iter(self._cursors))]

    def _read_parquet_elsewhere(self, folder: Path, stem: str, event: int, with_causes: bool) -> tuple[int, bytes]:
        command = [sys.executable, "-m", "truenext.history.parquet_piece", str(folder), stem, str(event)]
        command.append("causes" if with_causes else "")
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        ) as self._process:
            content, errors = self._process.communicate()
        if self._process.returncode:
            reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise HistoryError(f"events from {event:,} on cannot be read from Parquet files: {reason}")
        end, _, content = content.partition(b"\n")
        return int(end), content

    def first_events(self) -> list[int]:
        """Return the number of the first event of each file, in order. A file has no event of a later file."""
        # In this order: a file that becomes Parquet meanwhile is in one of the two lists at least.
        paths = self._history_paths()
        parquet = _numbered(parquet_files(self._folder))
        numbers = sorted({*paths, *parquet})
        self._first = numbers[0] if numbers else 0
        return numbers

    def _history_paths(self) -> dict[int, Path]:
        return _numbered(history_files(self._folder))

    def next_event(self) -> int:
        """Return the number that follows the last event of the history files; 0 if there are none, or only damaged
        ones.

        Raises: HistoryError if the newest file has another version; OSError if it cannot be read
        """
        for _, path in sorted(self._history_paths().items(), reverse=True):
            cursor, number = self._tail if self._tail and self._tail[0].path == path else (_Cursor(path), 0)
            with _File(path) as file:
                last = deque(file.chunks(cursor), maxlen=1)
            if last:
                number = last[0].first_event + count_events(last[0])
            if number:
                self._tail = cursor, number
                return number
        return 0


def _numbered(paths: Iterable[Path]) -> dict[int, Path]:
    """Return files by the numbers of their first events. Files with other names are left out, such as a copy that an
    operator has put beside them."""
    return {first_event(path): path for path in paths if _NUMBER.fullmatch(path.stem)}


def first_event(path: Path) -> int:
    """Return the number of the first event of a history file, or of the Parquet files that were made of it."""
    return int(path.stem, 16)


class _PieceMaker:
    """Maker of one piece of a file."""

    def __init__(self, cursor: _Cursor, event: int, *, with_causes: bool) -> None:
        self._cursor = cursor
        self._event = event
        self._with_causes = with_causes
        self._numbers: set[int] = set()
        """Numbers of the queues that occur."""

    def make(self) -> tuple[int, bytes] | None:
        """Return the event behind the piece, and its bytes; None if the file has no later event.

        Raises: HistoryError if the file has another version; OSError if it cannot be read
        """
        cursor, chunks, size, end = self._cursor, [], 0, 0
        with _File(cursor.path) as file:
            for chunk in file.chunks(cursor):
                content, next_event = self._copy(chunk)
                if next_event > self._event:
                    chunks.append(content)
                    size += len(content)
                    end = next_event
                else:
                    # Queues of earlier chunks.
                    self._numbers.clear()
                if size >= PIECE_BYTES:
                    break
            return (end, file.header + self._names_chunk(chunks[0]) + b"".join(chunks)) if chunks else None

    def _copy(self, chunk: HistoryChunk) -> tuple[bytes, int]:
        """Return a chunk without its names, and without causes that the reader may not see, and the number of the event
        behind the chunk."""
        blocks, names, numbers = chunk.blocks, self._cursor.names, self._numbers
        kept: list[bytes | memoryview] = []
        unpack_block, size_of_block, widths, add_number = BLOCK.unpack_from, BLOCK.size, _WIDTHS, numbers.add
        next_event, start, at, length = chunk.first_event, 0, 0, len(blocks)
        while at < length:
            kind, _, count, queue, other, time = unpack_block(blocks, at)
            columns_at = at + size_of_block
            if kind in (_NAME, _CAUSE):
                end = columns_at + other
                if kind == _NAME:
                    names[queue] = bytes(blocks[columns_at:end])
                    kept.append(blocks[start:at])
                    start = end
                elif not self._with_causes:
                    kept += (blocks[start:at], BLOCK.pack(kind, 0, 0, queue, 0, time))
                    start = end
            else:
                end = columns_at + count * widths[kind]
                if kind != _RUN_STARTED:
                    add_number(queue)
                if kind in _TO_OTHER_QUEUES:
                    numbers.update(_target_queues(blocks[columns_at:end], count))
                next_event += count
            at = end
        kept.append(blocks[start:])
        return _encode_chunk(chunk.run, chunk.flags & ~STARTS_FILE, chunk.first_event, kept), next_event

    def _names_chunk(self, first: bytes) -> bytes:
        """Return a chunk without events that names the queues and the broker, to be put before the chunk `first`."""
        names = self._cursor.names
        blocks = [
            BLOCK.pack(EventKind.NAME, 0, 0, number, len(names[number]), 0) + names[number]
            for number in self._numbers | {BROKER}
            if number in names
        ]
        _, _, run, _, first_event = CHUNK.unpack_from(first)
        return _encode_chunk(run, STARTS_FILE, first_event, blocks)


def _target_queues(columns: memoryview, count: int) -> array[int]:
    """Return the numbers in the column `target_queue`, which is behind `sequence`."""
    found = array("I", columns[8 * count : 12 * count])
    if sys.byteorder == "big":
        found.byteswap()
    return found


def _encode_chunk(run: int, flags: int, first_event: int, blocks: list[bytes | memoryview] | list[bytes]) -> bytes:
    size = sum(map(len, blocks))
    rest = b"".join((CHUNK.pack(0, size, run, flags, first_event)[CHECKSUM.size :], *blocks))
    return CHECKSUM.pack(crc32(rest)) + rest


class _File:
    """Open history file, which may still grow."""

    def __init__(self, path: Path) -> None:
        """Raises: HistoryError if the file has another version; OSError if it cannot be read"""
        self._path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.header = os.pread(self._file, FILE.size, 0)
        self._size = os.fstat(self._file).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def chunks(self, cursor: _Cursor) -> Iterator[HistoryChunk]:
        """Yield the undamaged chunks from the place of the cursor on, which moves behind each chunk. A chunk whose end
        is still missing is none."""
        if len(self.header) == FILE.size:
            check_file_header(self.header, self._path)
        while cursor.offset < self._size:
            content, start, at = self._read(cursor.offset), cursor.offset, 0
            while (chunk := chunk_at(content, at)) is not None:
                at = chunk.end
                cursor.offset = start + at
                yield chunk
            if not at:
                # Not even the first is whole: it is damaged, or not complete yet.
                found = next_chunk(self._path.read_bytes(), cursor.offset)
                if found is None:
                    return
                cursor.offset = found

    def _read(self, offset: int) -> memoryview:
        """Return the bytes from `offset` on, a whole chunk at least if there is one."""
        content = os.pread(self._file, PIECE_BYTES, offset)
        if len(content) >= CHUNK.size:
            size = CHUNK.size + CHUNK.unpack_from(content)[1]
            if PIECE_BYTES < size <= self._size - offset:
                content = os.pread(self._file, size, offset)
        return memoryview(content)
