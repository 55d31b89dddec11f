"""Simulated disk: all states that it may be in after the power went.

A store runs on a real folder, and its file operations are recorded one by one: by `Recorder`, or by recorded_calls.c.
From the record the disk is built as it may look if the power goes at any operation: unsynced data are there or not, in
any order, sector by sector; so are names, and the size of a file that grew.

    Write       is in the system's memory once it is noted, and on the disk once a `Durable` names it
    Name        the same: names change as a whole, and are durable once their folder is synced
    Commit      one of LMDB: the same, as a whole or not at all; recorded_calls.c sees its writes instead
    the rest    says what the store has promised until then
"""

import fcntl
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import pytest

SECTOR = 512
"""Bytes that a disk writes as a whole."""

PAGE = 4096
"""Bytes that a system takes from a process as a whole."""

BITS_MAX = 8
"""Number of undecided operations up to which all their combinations are states; of more there is a sample."""

GROWTH_WEIGHT = 8
"""Factor by which more states are tried while a file is about to grow: such moments are rare."""

SLOW_COMMITS, SLOW_SECONDS = 0.1, 0.001
"""Share of LMDB's commits that take as long as on a disk, so that batches come in between."""

FOLDERS = ("journal", "lmdb")
"""Folders of a data folder whose files count. Nothing depends on the files of the others."""

A_FOLDER = 0
"""The number of a name that is none of a file."""


class Write(NamedTuple):
    file: int
    offset: int
    content: bytes


class Name(NamedTuple):
    """Assignment of names, relative to the data folder, to files from now on; None is no file."""

    names: dict[str, int | None]


class Durable(NamedTuple):
    """Operations, by index, that are on the disk."""

    operations: frozenset[int]


class Lost(NamedTuple):
    """No sync that comes later writes these operations: one has failed, and the system tells only once."""

    operations: frozenset[int]


class Commit(NamedTuple):
    """The file is this from now on."""

    file: int
    content: bytes


class Started(NamedTuple):
    pass


class Confirmed(NamedTuple):
    pass


class HistorySynced(NamedTuple):
    """Number of chunks in the history's own files, which are synced."""

    chunks: int


Operation = Write | Name | Durable | Lost | Commit | Started | Confirmed | HistorySynced


@dataclass
class Disk:
    """Contents of a disk, and the operations that a running system has only in memory."""

    files: dict[int, bytes] = field(default_factory=dict)
    names: dict[str, int | None] = field(default_factory=dict)
    in_memory: list[Operation] = field(default_factory=list)
    """Operations not on the disk yet, but visible to a process that opens the files: after a kill without a power
    cut."""
    history_chunks: int = 0
    """Number of chunks that are durable in the history's own files."""
    across_growth: bool = False
    """True if a file was about to grow when the power went."""

    def shown(self) -> "Disk":
        """Return the disk as a process that opens the files sees it."""
        shown = Disk(dict(self.files), dict(self.names), history_chunks=self.history_chunks)
        for one in self.in_memory:
            apply(shown, one)
        return shown

    def contents(self) -> dict[str, bytes | None]:
        """Return the contents by name; None is a folder. Files in a folder without a name are lost with it."""
        return {
            name: None if file == A_FOLDER else self.files.get(file, b"")
            for name, file in sorted(self.names.items())
            if file is not None and ("/" not in name or self.names.get(name.partition("/")[0]) is not None)
        }

    def make(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        for name, content in self.shown().contents().items():
            if content is None:
                (folder / name).mkdir()
            else:
                (folder / name).write_bytes(content)

    def digest(self) -> bytes:
        whole = blake2b(digest_size=12)
        for name, content in self.contents().items():
            whole.update(b"%s %d " % (name.encode(), -1 if content is None else len(content)))
            whole.update(content or b"")
        return whole.digest()


def apply(disk: Disk, operation: Operation) -> None:
    match operation:
        case Write(file, offset, content):
            before = disk.files.get(file, b"")
            before += bytes(max(0, offset - len(before)))
            disk.files[file] = before[:offset] + content + before[offset + len(content) :]
        case Name(names):
            disk.names.update(names)
        case Commit(file, content):
            disk.files[file] = content
        case HistorySynced(chunks):
            disk.history_chunks = max(chunks, disk.history_chunks)


class Walk:
    """The disk while one operation after the other is done to it."""

    def __init__(self, disk: Disk) -> None:
        self._disk = Disk(dict(disk.files), dict(disk.names), history_chunks=disk.history_chunks)
        self._window: list[tuple[int, Operation]] = []
        """Operations from the first one on that is not durable."""
        self._durable: set[int] = set()
        self._lost: set[int] = set()
        self._count = 0
        for operation in disk.in_memory:
            self.do(operation)

    def do(self, operation: Operation) -> None:
        match operation:
            case Write() | Name() | Commit():
                self._window.append((self._count, operation))
            case Durable(operations):
                self._durable |= operations
                while self._window and self._window[0][0] in self._durable:
                    apply(self._disk, self._window.pop(0)[1])
            case Lost(operations):
                self._lost |= operations
            case _:
                apply(self._disk, operation)
        self._count += 1

    def is_writing(self) -> bool:
        """The last operation is a write or a commit, which has not returned."""
        return (
            bool(self._window) and self._window[-1][0] == self._count - 1 and not isinstance(self._window[-1][1], Name)
        )

    def synced(self) -> Disk:
        """The power goes, and what was not synced is lost."""
        return self._after(set())

    def killed(self, rng: random.Random) -> Disk:
        """The broker is killed, and nothing else happens; a write that was under way may lack its last pages."""
        disk = self._copy()
        if not self._window:
            return disk
        indices = [index for index, _ in self._window]
        disk.in_memory = [one for _, one in self._window]
        last = disk.in_memory[-1]
        if self.is_writing() and isinstance(last, Write):
            end = last.offset + len(last.content)
            stop = rng.choice([end, end, last.offset, *range((last.offset // PAGE + 1) * PAGE, end, PAGE)])
            disk.in_memory[-1] = last._replace(content=last.content[: stop - last.offset])
        for kind, which in ((Durable, self._durable), (Lost, self._lost)):
            disk.in_memory.append(kind(frozenset(n for n, index in enumerate(indices) if index in which)))
        return disk

    def states(self, rng: random.Random, at_most: int) -> Iterator[Disk]:
        """Yield the states the disk may have if the power goes now; all, or a sample of them."""
        waiting = [(index, one) for index, one in self._window if index not in self._durable]
        writes = [(index, one) for index, one in waiting if isinstance(one, Write)]
        bits: list[tuple[int, int]] = [(index, WHOLE) for index, one in waiting if not isinstance(one, Write)]
        bits += [(index, WHOLE) for index, _ in writes[:-1]]
        bits += [(index, sector) for index, one in writes[-1:] for sector in range(len(sectors(one)))]
        growing = self._growing() if writes else []
        bits += [(index, SIZE) for index in growing]
        if growing:
            at_most *= GROWTH_WEIGHT
        if len(bits) <= BITS_MAX and 1 << len(bits) <= at_most:
            chosen = [{bit for n, bit in enumerate(bits) if number >> n & 1} for number in range(1 << len(bits))]
        else:
            chosen = [draw(writes, bits, rng) for _ in range(min(at_most, 1 << len(bits)))]
        for one in chosen:
            disk = self._after(one)
            disk.across_growth = bool(growing)
            yield disk

    def _growing(self) -> list[int]:
        """Writes that are not durable and reach beyond what their files have on the disk."""
        durable = self._after(set())
        return [
            index
            for index, one in self._window
            if index not in self._durable
            and isinstance(one, Write)
            and one.offset + len(one.content) > len(durable.files.get(one.file, b""))
        ]

    def _after(self, chosen: set[tuple[int, int]]) -> Disk:
        """Return the disk with the durable operations and the chosen ones of the others."""
        disk = self._copy()
        missing: set[str | int | None] = set()
        for index, one in self._window:
            if index in self._durable:
                apply(disk, one)
            elif isinstance(one, Write):
                if (index, SIZE) in chosen:
                    apply(disk, Write(one.file, one.offset + len(one.content), b""))
                for number, (start, end) in enumerate(sectors(one)):
                    if (index, WHOLE) in chosen or (index, number) in chosen:
                        apply(disk, Write(one.file, start, one.content[start - one.offset : end - one.offset]))
            elif isinstance(one, Name):
                # A name that depends on another is not there without that.
                touched: set[str | int | None] = {*one.names, *one.names.values()} - {None, A_FOLDER}
                if (index, WHOLE) in chosen and missing.isdisjoint(touched):
                    apply(disk, one)
                else:
                    missing |= touched
            elif (index, WHOLE) in chosen:
                apply(disk, one)
        return disk

    def _copy(self) -> Disk:
        disk = copy(self._disk)
        disk.files, disk.names, disk.in_memory = dict(disk.files), dict(disk.names), []
        return disk


WHOLE, SIZE = -1, -2


def sectors(write: Write) -> list[tuple[int, int]]:
    """Return the start and the end in the file of each sector of the write."""
    end = write.offset + len(write.content)
    edges = [write.offset, *range((write.offset // SECTOR + 1) * SECTOR, end, SECTOR), end]
    return list(pairwise(edges)) if write.content else []


def draw(writes: list[tuple[int, Write]], bits: list[tuple[int, int]], rng: random.Random) -> set[tuple[int, int]]:
    """Draw a subset of the bits: mostly nearly all or nearly none, and any of the writes torn."""
    share = rng.choice([0.1, 0.5, 0.5, 0.9])
    chosen = {bit for bit in bits if rng.random() < share}
    if writes and rng.random() < 0.5:
        index, one = rng.choice(writes)
        chosen -= {bit for bit in chosen if bit[0] == index}
        count = len(sectors(one))
        first = rng.randint(0, count)
        torn = rng.choice([range(first), range(first, count), [n for n in range(count) if rng.random() < 0.5]])
        chosen |= {(index, sector) for sector in torn}
    return chosen


# ---- Writing down what a store does ----


class NotModelled(AssertionError):
    """The store did something with its files that this disk does not model."""


class Failure(NamedTuple):
    """Calls that fail, and the share of the first one's write that is done all the same."""

    call: int
    """The first of them; 0 is the first call that changes anything."""
    lasts: int
    """Number of calls that fail."""
    error: int
    """errno"""
    share: float
    """Share of the bytes of a write that is written."""

    def hits(self, call: int) -> bool:
        return self.call <= call < self.call + self.lasts


class Log:
    """Operations on a disk, in the order in which they happened."""

    def __init__(self, disk: Disk) -> None:
        """`disk` is the disk before the first operation."""
        self.operations: list[Operation] = []
        self._disk = disk
        shown = disk.shown()
        self._files = {name: file for name, file in shown.names.items() if file is not None}
        self._next_file = 1 + max([A_FOLDER, *shown.files, *self._files.values()])
        self._not_durable: dict[int, int | str] = {}
        """Index of each operation to its file, or the folder of its name; lost ones are left out."""
        self.lock = threading.RLock()
        for index, one in enumerate(disk.in_memory):
            self._keep_account(index, one)

    def note(self, operation: Operation) -> int:
        """Record the operation; return its index, counted from the first one in memory."""
        with self.lock:
            self.operations.append(operation)
            index = len(self._disk.in_memory) + len(self.operations) - 1
            self._keep_account(index, operation)
            return index

    def write(self, name: str, offset: int, content: bytes) -> int:
        return self.note(Write(self._files[name], offset, content))

    def durable(self, *operations: int) -> None:
        self.note(Durable(frozenset(operations)))

    def lost(self, *operations: int) -> None:
        self.note(Lost(frozenset(operations)))

    def durable_file(self, file: int) -> None:
        """Record that all writes to the file are durable."""
        with self.lock:
            self.durable(*(index for index, one in self._not_durable.items() if one == file))

    def to_sync(self, name: str) -> set[int]:
        """Return the operations that a sync of this file or folder, which begins now, makes durable."""
        what = name if name in ("", *FOLDERS) else self._files[name]
        return {index for index, one in self._not_durable.items() if one == what}

    def sync_failed(self, name: str, operations: set[int]) -> None:
        """Record a failed sync. That of a folder loses nothing: a file system keeps its own unwritten data, or
        stops."""
        if name not in ("", *FOLDERS):
            self.lost(*operations)

    def create(self, name: str) -> int:
        with self.lock:
            self._files[name] = self._next_file
            self._next_file += 1
            return self.note(Name({name: self._files[name]}))

    def make_folder(self, name: str) -> None:
        self.note(Name({name: A_FOLDER}))

    def rename(self, old: str, new: str) -> None:
        with self.lock:
            self._files[new] = self._files.pop(old)
            self.note(Name({old: None, new: self._files[new]}))

    def unlink(self, name: str) -> None:
        with self.lock:
            del self._files[name]
            self.note(Name({name: None}))

    def _keep_account(self, index: int, operation: Operation) -> None:
        match operation:
            case Write(file) | Commit(file):
                self._not_durable[index] = file
            case Name(names):
                (self._not_durable[index],) = {one.rpartition("/")[0] for one in names}
            case Durable(operations) | Lost(operations):
                for one in operations:
                    self._not_durable.pop(one, None)

    def check(self, folder: Path) -> None:
        """Compare the recorded operations with the files in `folder`. Raises: AssertionError"""
        everything = Disk(dict(self._disk.files), dict(self._disk.names))
        for operation in [*self._disk.in_memory, *self.operations]:
            apply(everything, operation)
        there = {
            str(path.relative_to(folder)): path.read_bytes()
            for one in FOLDERS
            for path in (folder / one).glob("*")
            if path.name != "lock.mdb"
        }
        noted = {name: content for name, content in everything.contents().items() if content is not None}
        assert noted.keys() == there.keys()
        assert [name for name, content in there.items() if noted[name] != content] == []


class Recorder(Log):
    """Writes down what a store of this process does to its files, and makes one of its calls fail."""

    def __init__(self, disk: Disk, folder: Path, failure: Failure | None = None) -> None:
        super().__init__(disk)
        self.calls: list[str] = []
        """Names of the calls that could fail."""
        self.has_failed = False
        self._folder = folder
        self._failure = failure

    @contextmanager
    def recording(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("open", "pwrite", "posix_fallocate", "fsync", "rename", "unlink", "mkdir"):
                patch.setattr(os, name, getattr(self, f"_{name}")(getattr(os, name)))
            patch.setattr(os, "fdatasync", self._fsync(os.fdatasync))
            for name in ("ftruncate", "link", "pwritev", "replace", "rmdir", "write"):
                patch.setattr(os, name, self._not_modelled(name, getattr(os, name)))
            patch.setattr(lmdb, "open", self._open_lmdb(lmdb.open))
            yield

    # What the store calls instead. A call that fails has done nothing, but for a part of a write.

    def _open(self, call: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            if not flags & (os.O_CREAT | os.O_TRUNC) or not self._is_in_folder(path):
                return call(path, flags, *rest, **named)
            name = self._name(path)
            with self.lock:
                self._may_fail("open")
                file = call(path, flags, *rest, **named)
                if name is not None and (flags & os.O_TRUNC or name not in self._files):
                    self.create(name)
                return file

        return opened

    def _pwrite(self, call: Callable[..., int]) -> Callable[..., int]:
        def written(file: int, content: bytes, offset: int) -> int:
            path = path_of(file)
            if not self._is_in_folder(path):
                return call(file, content, offset)
            name = self._name(path)
            with self.lock:
                try:
                    self._may_fail("pwrite")
                except OSError:
                    assert self._failure is not None
                    part = content[: int(len(content) * self._failure.share)]
                    if part:
                        call(file, part, offset)
                    if part and name is not None:
                        self.lost(self.write(name, offset, part))
                    raise
                index = self.write(name, offset, bytes(content)) if name is not None else -1
            done = call(file, content, offset)
            if name is not None and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DSYNC:
                self.durable(index)
            return done

        return written

    def _posix_fallocate(self, call: Callable[..., None]) -> Callable[..., None]:
        """Allow the call only outside of FOLDERS; the files in them are written, never allocated so."""
        not_modelled = self._not_modelled("posix_fallocate", call)

        def allocate(file: int, offset: int, size: int) -> None:
            if self._is_in_folder(path_of(file)):
                with self.lock:
                    self._may_fail("posix_fallocate")
            not_modelled(file, offset, size)

        return allocate

    def _fsync(self, call: Callable[..., None]) -> Callable[..., None]:
        def synced(file: int) -> None:
            path = path_of(file)
            if not self._is_in_folder(path):
                call(file)
                return
            name = self._name(path)
            with self.lock:
                started = self.to_sync(name) if name is not None else set()
                try:
                    self._may_fail("fsync")
                except OSError:
                    if name is not None:
                        self.sync_failed(name, started)
                    raise
            call(file)
            self.durable(*started)

        return synced

    def _rename(self, call: Callable[..., None]) -> Callable[..., None]:
        def renamed(old: Any, new: Any) -> None:
            before, after = self._name(old), self._name(new)
            with self.lock:
                if self._is_in_folder(old):
                    self._may_fail("rename")
                call(old, new)
                if before is not None and after is not None:
                    self.rename(before, after)

        return renamed

    def _unlink(self, call: Callable[..., None]) -> Callable[..., None]:
        def unlinked(path: Any) -> None:
            name = self._name(path)
            with self.lock:
                if self._is_in_folder(path) and Path(path).exists():
                    self._may_fail("unlink")
                call(path)
                if name is not None:
                    self.unlink(name)

        return unlinked

    def _mkdir(self, call: Callable[..., None]) -> Callable[..., None]:
        def made(path: Any, *rest: Any, **named: Any) -> None:
            call(path, *rest, **named)
            name = self._name(path)
            if name is not None:
                self.make_folder(name)

        return made

    def _not_modelled(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def not_modelled(what: Any, *rest: Any, **named: Any) -> Any:
            path = path_of(what) if isinstance(what, int) else Path(what)
            if self._name(path) is not None:
                raise NotModelled(f"{name} of {path}")
            return call(what, *rest, **named)

        return not_modelled

    def _open_lmdb(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: str, *, subdir: bool = True, **named: Any) -> Any:
            file = Path(path) / "data.mdb" if subdir else Path(path)
            name = self._name(file)
            assert name is not None
            env = call(path, subdir=subdir, **named)
            if name not in self._files:
                self.durable(self.create(name))
                self.durable(self.note(Commit(self._files[name], file.read_bytes())))
            return _Environment(env, self, file, self._files[name])

        return opened

    def _name(self, path: Any) -> str | None:
        """Return the path relative to the data folder; None for paths that do not count."""
        if not self._is_in_folder(path):
            return None
        name = "" if Path(path) == self._folder else str(Path(path).relative_to(self._folder))
        return name if name in ("", *FOLDERS) or name.partition("/")[0] in FOLDERS else None

    def _is_in_folder(self, path: Any) -> bool:
        return Path(path).is_relative_to(self._folder)

    def _may_fail(self, name: str) -> None:
        """Raises: OSError"""
        with self.lock:
            self.calls.append(name)
            if self._failure is not None and self._failure.hits(len(self.calls) - 1):
                self.has_failed = True
                raise OSError(self._failure.error, os.strerror(self._failure.error))


class _Environment:
    """Environment of LMDB whose commits are recorded."""

    def __init__(self, env: Any, recorder: Recorder, path: Path, file: int) -> None:
        self._env = env
        self._recorder = recorder
        self._path = path
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._env.close()

    def begin(self, *, write: bool = False) -> Any:
        return self._writing() if write else self._env.begin()

    def sync(self, force: bool) -> None:
        self._env.sync(force)
        self._recorder.durable_file(self._file)

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        txn = self._env.begin(write=True)
        try:
            yield txn
        except BaseException:
            txn.abort()
            raise
        if random.random() < SLOW_COMMITS:
            time.sleep(SLOW_SECONDS)
        with self._recorder.lock:
            before = self._env.info()["last_txnid"]
            txn.commit()
            # One without changes syncs nothing.
            if self._env.info()["last_txnid"] == before:
                return
            self._recorder.note(Commit(self._file, self._path.read_bytes()))
        self._recorder.durable_file(self._file)


def path_of(file: int) -> Path:
    return Path(f"/proc/self/fd/{file}").readlink()


def quick_folder() -> str | None:
    """Return the folder where files are fastest, for `dir` of tempfile; TMPDIR chooses another. The disk is
    simulated."""
    return os.environ.get("TMPDIR") or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
