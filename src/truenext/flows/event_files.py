"""Files with events of stages, read while services write them. Files begin, grow, and are deleted at any time
(`history/stage_files.py`).

A fault of a folder or a file stops nothing: each is a sentence in `problems`, and all else is read.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence, Set
from heapq import heapify, heappop, heappush
from pathlib import Path

import msgspec

from truenext.flows.events import CLOSED, OPENED, EventLine, decode_lines
from truenext.history.stage_files import FORMAT, SUFFIX

CHUNK_BYTES = 128 * 1024
"""Bytes that are read of one file before another one has its turn."""
LINE_BYTES_MAX = 64 * 1024
"""Largest size of one event. A longer line is not one."""
PROBLEMS_MAX = 20
"""Largest number of files whose problems are told."""
_INCOMPLETE_S = 10.0
"""Seconds after the last growth of a file from which on an incomplete last line is a problem."""


def list_files(folder: Path) -> tuple[list[os.DirEntry[str]], str]:
    """Return the files with events in a folder, and a sentence if the folder cannot be read, or has none, else ""."""
    try:
        with os.scandir(folder) as entries:
            files = [entry for entry in entries if entry.name.endswith(SUFFIX)]
    except FileNotFoundError:
        return [], f"the events folder {folder} does not exist: name the DIR of a service's stages run --events DIR"
    except OSError as error:
        return [], unreadable(folder, error)
    if not files:
        return [], f"no events of stages in {folder}: a service writes them with truenext stages run --events DIR"
    return files, ""


class FileStart(msgspec.Struct):
    """First line of a file with events: its event `opened`. Other lines have no format."""

    kind: str = ""
    format: int = 0
    at: int = 0


def read_start(path: Path) -> FileStart | None:
    """Return the first line of a file; None if it is not written yet. Raises: OSError if the file cannot be read"""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a file")
    with path.open("rb", buffering=0) as file:
        line, end, _ = file.read(LINE_BYTES_MAX).partition(b"\n")
    if not end and len(line) < LINE_BYTES_MAX:
        return None
    try:
        return msgspec.json.decode(line, type=FileStart)
    except (msgspec.MsgspecError, ValueError):
        return FileStart()


def problem_of_start(path: str | Path, start: FileStart) -> str:
    """Return a sentence if a file that begins so cannot be read: its format is not that of this truenext; else ""."""
    if start.kind != OPENED:
        return f"{path} does not begin as a file of events, and is left out: was it cut or overwritten?"
    if start.format == FORMAT:
        return ""
    remedy = "update truenext" if start.format > FORMAT else "use the version that wrote it"
    return f"{path} has events of format {start.format}, and this truenext reads {FORMAT}: {remedy}"


def unreadable(path: str | Path, error: OSError) -> str:
    remedy = ": use the user of the service" if isinstance(error, PermissionError) else ""
    return f"{path} cannot be read: {error.strerror or error}{remedy}"


def incomplete(path: str | Path) -> str:
    return f"{path} ends in the middle of an event, which is left out: was its process killed?"


def no_events(path: str | Path, count: int) -> str:
    what = "a line that is" if count == 1 else f"{count:,} lines that are"
    return f"{path} has {what} not an event, and left out: was the file cut or overwritten?"


def process_of(name: str) -> str:
    """Return the id of the process that has written the file of this name."""
    return name.rpartition("-")[0]


def escape_paths(text: str) -> str:
    """Return a text in which bytes of paths that are not UTF-8 are escaped, so that it can be encoded."""
    return text.encode(errors="backslashreplace").decode()


class EventFiles:
    """Files with events in some folders, each read once, and up to its end. Files of several processes are read
    together, in the order of their times as far as possible."""

    def __init__(self, folders: Sequence[Path], *, first_bytes_max: int) -> None:
        """Of the files that are there at first, only the newest are read, at most `first_bytes_max` bytes and one
        file."""
        self._folders = tuple(dict.fromkeys(folder.absolute() for folder in folders))
        self._first_bytes_max = first_bytes_max
        self._files: dict[str, _EventFile] = {}
        """Files that may grow, by name. A file that is in two folders is read once."""
        self._finished: set[str] = set()
        """Names of files that are read, or skipped."""
        self._folder_problems: list[str] = []
        self._file_problems: dict[str, str] = {}
        self._last_numbers: dict[str, int] = {}
        """Number of the last event that was read, by process."""
        self._lost_counts: dict[str, int] = {}
        self._is_first = True
        self.skipped_bytes = 0
        """Bytes of older files that were there at first, and are not read."""

    @property
    def problems(self) -> list[str]:
        """Sentences about folders and files that cannot be read, or not completely."""
        return [escape_paths(each) for each in (*self._folder_problems, *self._file_problems.values())]

    def read(self, bytes_max: int) -> Iterator[list[EventLine]]:
        """Look for new files and new events, and yield the events of about `bytes_max` bytes. Less means that all is
        read."""
        self._find_files()
        # Each process's files in their order, the first one last, whatever its clock did meanwhile.
        unread: dict[str, list[str]] = {}
        for name in sorted(self._files, reverse=True):
            if self._files[name].measure():
                unread.setdefault(process_of(name), []).append(name)
        turns = [(self._files[names[-1]].at, process) for process, names in unread.items()]
        heapify(turns)
        while turns and bytes_max > 0:
            process = heappop(turns)[1]
            names = unread[process]
            file = self._files[names[-1]]
            before = file.offset
            events = self._read_chunk(names[-1], file)
            bytes_max -= file.offset - before
            if not file.is_unread:
                names.pop()
            if names:
                heappush(turns, (self._files[names[-1]].at, process))
            yield events
        self._finish_files()

    def _find_files(self) -> None:
        self._folder_problems = []
        found: dict[str, os.DirEntry[str]] = {}
        for folder in self._folders:
            entries, problem = list_files(folder)
            if problem:
                self._folder_problems.append(problem)
            for entry in entries:
                found.setdefault(entry.name, entry)
        self._forget_all_but(found.keys())
        new = [entry for name, entry in found.items() if name not in self._files and name not in self._finished]
        if self._is_first:
            new = self._newest(new)
        self._is_first = self._is_first and not found
        for entry in new:
            self._open(entry)

    def _forget_all_but(self, names: Set[str]) -> None:
        """Forget files that are deleted, and processes without a file."""
        for name in self._files.keys() - names:
            del self._files[name]
        self._finished &= names
        processes = {process_of(name) for name in names}
        for known in (self._file_problems, self._last_numbers, self._lost_counts):
            for name in known.keys() - names - processes:
                del known[name]

    def _newest(self, entries: list[os.DirEntry[str]]) -> list[os.DirEntry[str]]:
        """Return the entries that are read at first, and mark the others as finished."""
        stats = sorted(
            ((found.st_mtime, entry.name, found.st_size, entry) for entry, found in _with_stats(entries)), reverse=True
        )
        newest: list[os.DirEntry[str]] = []
        total = 0
        for _, name, size, entry in stats:
            if newest and total + size > self._first_bytes_max:
                self._finished.add(name)
                self.skipped_bytes += size
                continue
            total += size
            newest.append(entry)
        return newest

    def _open(self, entry: os.DirEntry[str]) -> None:
        try:
            first = read_start(Path(entry.path))
        except FileNotFoundError:
            return
        except OSError as error:
            self._skip(entry.name, unreadable(entry.path, error))
            return
        if first is None:
            # The service has not written it yet.
            return
        if problem := problem_of_start(entry.path, first):
            self._skip(entry.name, problem)
            return
        self._files[entry.name] = _EventFile(Path(entry.path), first.at)

    def _skip(self, name: str, problem: str) -> None:
        self._finished.add(name)
        self._tell(name, problem)

    def _tell(self, name: str, problem: str) -> None:
        if name in self._file_problems or len(self._file_problems) < PROBLEMS_MAX:
            self._file_problems[name] = problem

    def _read_chunk(self, name: str, file: _EventFile) -> list[EventLine]:
        """Return the next events of a file."""
        try:
            lines, skipped = file.read_lines()
        except OSError as error:
            # Files may be deleted at any time. This one is looked for again at the next read.
            file.size = file.offset
            if not isinstance(error, FileNotFoundError):
                self._tell(name, unreadable(file.path, error))
            return []
        decoded = decode_lines(lines)
        events = [each for each in decoded if each is not None]
        file.bad_lines += len(decoded) - len(events) + skipped
        if lines and self._file_problems.get(name) == incomplete(file.path):
            # The rest has come.
            del self._file_problems[name]
        if file.bad_lines:
            self._tell(name, no_events(file.path, file.bad_lines))
        if events:
            file.at = max(file.at, events[-1].at)
            file.is_closed = events[-1].kind == CLOSED
            self._count_lost(events)
        return events

    def _count_lost(self, events: list[EventLine]) -> None:
        """Note numbers that are missing among a process's events: its disk was full, or too slow."""
        for event in events:
            if not event.number:
                # Each file begins with it.
                continue
            last = self._last_numbers.get(event.process, event.number - 1)
            self._last_numbers[event.process] = max(event.number, last)
            if event.number > last + 1:
                lost = self._lost_counts[event.process] = (
                    self._lost_counts.get(event.process, 0) + event.number - last - 1
                )
                what = "an event is" if lost == 1 else f"{lost:,} events are"
                self._tell(event.process, f"{what} missing of process {event.process}: flows may lack executions")

    def _finish_files(self) -> None:
        """Forget files that cannot grow: their process has ended, or has begun another one."""
        last = {process_of(name): name for name in sorted(self._files)}
        now = time.time()
        for name, file in list(self._files.items()):
            is_read = file.size == file.offset
            if file.was_cut:
                self._tell(name, f"{file.path} became shorter while it was read: its events may be incomplete")
            elif not is_read and not file.has_line and now - file.changed > _INCOMPLETE_S:
                self._tell(name, incomplete(file.path))
            if (is_read or not file.has_line) and (file.is_closed or last[process_of(name)] != name):
                del self._files[name]
                self._finished.add(name)


class _EventFile:
    """One file: its position, and what was found in it."""

    __slots__ = ("at", "bad_lines", "changed", "has_line", "is_closed", "offset", "path", "size", "was_cut")

    def __init__(self, path: Path, at: int) -> None:
        self.path = path
        self.at = at
        """Time of the last event that was read, at first of the first event."""
        self.offset = 0
        self.size = 0
        self.changed = 0.0
        self.has_line = True
        """False if no complete line follows `offset`."""
        self.is_closed = False
        """True if the last event says that the process has shut down."""
        self.bad_lines = 0
        self.was_cut = False

    @property
    def is_unread(self) -> bool:
        """True if there may be a complete line after `offset`."""
        return self.has_line and self.size > self.offset

    def measure(self) -> bool:
        """Look at the size of the file, and return whether it is unread. A file that is gone keeps its size."""
        try:
            now = self.path.stat()
        except OSError:
            return self.is_unread
        if now.st_size < self.offset:
            self.was_cut = True
            self.offset = now.st_size
        self.has_line = self.has_line or now.st_size != self.size
        self.size, self.changed = now.st_size, now.st_mtime
        return self.is_unread

    def read_lines(self) -> tuple[bytes, int]:
        """Return the next whole lines, and the number of lines that are too long and skipped. Raises: OSError"""
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            chunk = file.read(CHUNK_BYTES)
        end = chunk.rfind(b"\n") + 1
        if end:
            self.offset += end
            return chunk[:end], 0
        if len(chunk) >= LINE_BYTES_MAX:
            # The rest of the line is no event either, and is left out with it.
            self.offset += len(chunk)
            return b"", 1
        self.has_line = False
        self.size = max(self.size, self.offset + len(chunk))
        return b"", 0


def _with_stats(entries: list[os.DirEntry[str]]) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    for entry in entries:
        try:
            yield entry, entry.stat()
        except OSError:
            continue
