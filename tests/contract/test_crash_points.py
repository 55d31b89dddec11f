"""Does the embedded store keep every confirmed batch, whenever the power goes?

A run of the store is recorded, operation by operation. The power then goes at one of them, and the disk is built as it
may look afterwards: what was not synced is there in part or not at all, sector by sector, and a write that was under
way is torn. The store is opened on that disk, and must hold what was confirmed, with the batch that was under way as a
whole or not at all. LMDB's commits are taken as they are, all or nothing.
"""

import fcntl
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from tests.contract.disk import LANE, NEXT_QUEUE, OTHER_LANE
from tests.contract.test_store import Model
from truenext.batch import Batch, ProducerState
from truenext.record import message_key
from truenext.store.checkpoint import Checkpoint
from truenext.store.embedded import EmbeddedStore

SECTOR = 512
"""What a disk writes as a whole."""
SEGMENT_BYTES = 3000


class Write(NamedTuple):
    file: int
    offset: int
    content: bytes
    is_synced: bool
    """Durable once it returns."""


class Sync(NamedTuple):
    file: int


class Name(NamedTuple):
    """A name in the journal's folder now means this file; None is no file."""

    names: dict[str, int | None]


class SyncNames(NamedTuple):
    pass


class Commit(NamedTuple):
    """LMDB's file is this from now on."""

    content: bytes


class Begun(NamedTuple):
    pass


class Confirmed(NamedTuple):
    pass


Operation = Write | Sync | Name | SyncNames | Commit | Begun | Confirmed


@dataclass
class Remains:
    """What is on a disk that nobody uses."""

    journal: dict[str, bytes] = field(default_factory=dict)
    lmdb: bytes = b""

    def make(self, folder: Path) -> None:
        (folder / "journal").mkdir(parents=True)
        (folder / "lmdb").mkdir()
        for name, content in self.journal.items():
            (folder / "journal" / name).write_bytes(content)
        if self.lmdb:
            (folder / "lmdb/data.mdb").write_bytes(self.lmdb)

    def after(self, operations: list[Operation], count: int, rng: random.Random) -> "Remains":
        """The disk if the power goes when `count` of the operations were done and the next is under way."""
        files = {number: bytearray(content) for number, content in enumerate(self.journal.values())}
        names: dict[str, int | None] = {name: number for number, name in enumerate(self.journal)}
        lmdb = self.lmdb
        unsynced: list[Write] = []
        unsynced_names: list[Name] = []
        for operation in operations[:count]:
            match operation:
                case Write(is_synced=True):
                    write(files, operation)
                case Write():
                    unsynced.append(operation)
                case Sync(file):
                    for one in unsynced:
                        if one.file == file:
                            write(files, one)
                    unsynced = [one for one in unsynced if one.file != file]
                case Name():
                    unsynced_names.append(operation)
                case SyncNames():
                    for change in unsynced_names:
                        names.update(change.names)
                    unsynced_names = []
                case Commit(content):
                    lmdb = content
        if count < len(operations) and isinstance(operations[count], Write):
            unsynced.append(operations[count])  # type: ignore[arg-type]
        for one in unsynced:
            tear(files, one, rng)
        for change in unsynced_names[: rng.randint(0, len(unsynced_names))]:
            names.update(change.names)
        journal = {name: bytes(files.get(file, b"")) for name, file in names.items() if file is not None}
        return Remains(journal, lmdb)


def write(files: dict[int, bytearray], one: Write) -> None:
    content = files.setdefault(one.file, bytearray())
    content.extend(bytes(max(0, one.offset - len(content))))
    content[one.offset : one.offset + len(one.content)] = one.content


def tear(files: dict[int, bytearray], one: Write, rng: random.Random) -> None:
    """Some sectors of the write are on the disk, and others are not."""
    ends = [*range((one.offset // SECTOR + 1) * SECTOR, one.offset + len(one.content), SECTOR)]
    edges = [one.offset, *ends, one.offset + len(one.content)]
    sectors = list(pairwise(edges))
    written = rng.choice(
        [
            [],
            sectors,
            sectors[: rng.randint(0, len(sectors))],
            sectors[rng.randint(0, len(sectors)) :],
            [sector for sector in sectors if rng.random() < 0.5],
        ]
    )
    for begin, end in written:
        write(files, Write(one.file, begin, one.content[begin - one.offset : end - one.offset], is_synced=True))


class Recorder:
    """Writes down what a store does to its folder, in the order in which it happens."""

    def __init__(self, disk: Remains, folder: Path) -> None:
        self.operations: list[Operation] = []
        self._folder = folder
        self._names = {name: number for number, name in enumerate(disk.journal)}
        self._files = len(self._names)
        self._lock = threading.RLock()

    def note(self, operation: Operation) -> None:
        with self._lock:
            self.operations.append(operation)

    @contextmanager
    def recording(self) -> Iterator[None]:
        journal = self._folder / "journal"
        open_, pwrite, rename, unlink = os.open, os.pwrite, os.rename, os.unlink

        def path_of(file: int) -> Path:
            return Path(f"/proc/self/fd/{file}").readlink()

        def name_of(file: int) -> str | None:
            path = path_of(file)
            return path.name if path.parent == journal else None

        def is_synced_by_writing(file: int) -> bool:
            return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DSYNC)

        def opened(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            with self._lock:
                file = open_(path, flags, *rest, **named)
                if flags & os.O_TRUNC and Path(path).parent == journal:
                    self._names[Path(path).name] = self._files
                    self.note(Name({Path(path).name: self._files}))
                    self._files += 1
                return file

        def written(file: int, content: bytes, offset: int) -> int:
            with self._lock:
                name = name_of(file)
                if name is not None:
                    self.note(Write(self._names[name], offset, content, is_synced=is_synced_by_writing(file)))
                return pwrite(file, content, offset)

        def synced(file: int) -> None:
            with self._lock:
                name = name_of(file)
                if name is not None:
                    self.note(Sync(self._names[name]))
                elif path_of(file) == journal:
                    self.note(SyncNames())

        def renamed(old: Any, new: Any) -> None:
            with self._lock:
                rename(old, new)
                if Path(old).parent != journal:
                    return
                file = self._names.pop(Path(old).name)
                self._names[Path(new).name] = file
                self.note(Name({Path(old).name: None, Path(new).name: file}))

        def unlinked(path: Any) -> None:
            with self._lock:
                unlink(path)
                if Path(path).parent != journal:
                    return
                del self._names[Path(path).name]
                self.note(Name({Path(path).name: None}))

        def committing(action: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **named: Any) -> Any:
                result = action(*args, **named)
                self.note(Commit((self._folder / "lmdb/data.mdb").read_bytes()))
                return result

            return call

        with ExitStack() as patches:
            for name, action in {
                "os.open": opened,
                "os.pwrite": written,
                "os.fsync": synced,
                "os.rename": renamed,
                "os.unlink": unlinked,
            }.items():
                patches.enter_context(mock.patch(name, action))
            for name in ("delete", "put", "finish", "drop_transients", "clean"):
                patches.enter_context(mock.patch.object(Checkpoint, name, committing(getattr(Checkpoint, name))))
            yield


class Life(NamedTuple):
    """One run of a store: what it did to the disk, and what it may be found to hold after each batch."""

    disk: Remains
    operations: list[Operation]
    found: list[Model]
    """What the disk may have held before."""
    models: list[Model]
    """What it held once it was recovered, and after each batch."""

    def end(self, count: int, rng: random.Random) -> tuple[Remains, list[Model]]:
        """The disk if the power goes after `count` operations, and what it may hold."""
        done = self.operations[:count]
        disk = self.disk.after(self.operations, count, rng)
        begun, confirmed = (sum(isinstance(one, kind) for one in done) for kind in (Begun, Confirmed))
        return disk, self.models[confirmed - 1 : begun] if confirmed else self.found


def live(disk: Remains, may_hold: list[Model], folder: Path, batches: int, rng: random.Random) -> Life:
    """Open the store on this disk, see that it holds what it must, and give it some batches."""
    disk.make(folder)
    recorder = Recorder(disk, folder)
    with recorder.recording():
        store = EmbeddedStore(folder, segment_bytes=SEGMENT_BYTES, segments_max=1)
        try:
            if not disk.lmdb:
                recorder.note(Commit((folder / "lmdb/data.mdb").read_bytes()))
            recorder.note(Begun())
            model = deepcopy(recover(store, may_hold))
            recorder.note(Confirmed())
            models = [deepcopy(model)]
            changes: dict[str, Any] = model.changes({}, [], clean_stop=False)
            for number in range(1, batches + 1):
                batch = Batch(number)
                for name, value in changes.items():
                    setattr(batch, name, value)
                model.apply(changes)
                models.append(deepcopy(model))
                recorder.note(Begun())
                store.apply(batch)
                recorder.note(Confirmed())
                changes = random_changes(model, rng)
                if rng.random() < 0.1:
                    model.check(store, limit=3)
        finally:
            store.close()
    shutil.rmtree(folder)
    return Life(disk, recorder.operations, may_hold, models)


def recover(store: EmbeddedStore, may_hold: list[Model]) -> Model:
    """The one of the models that the store holds."""
    recovered = store.recover()
    differences = []
    for model in may_hold:
        model = deepcopy(model)
        model.restart()
        try:
            model.check_recovered(recovered)
            model.check(store, limit=100)
        except AssertionError as difference:
            differences.append(difference)
        else:
            return model
    raise differences[0]


def random_record(rng: random.Random) -> bytes:
    """Zeros, as they are in a segment that was never used, or what is no zero."""
    size = rng.choice([5, 300, 1500])
    return rng.choice([bytes(size), rng.randbytes(size)])


def random_changes(model: Model, rng: random.Random) -> dict[str, Any]:
    lanes = (LANE, OTHER_LANE, NEXT_QUEUE)
    first = len(model.used) + 1
    new = {
        message_key(rng.choice(lanes), first + n): (
            random_record(rng),
            rng.random() < 0.6,
        )
        for n in range(rng.randint(0, 3))
    }
    held = sorted(model.messages)
    gone = rng.sample(held, min(len(held), rng.randint(0, 4)))
    left = sorted((model.messages.keys() | new) - set(gone))
    return model.changes(
        new,
        gone,
        marks={key: (rng.randint(1, 7), rng.randint(1, 9)) for key in rng.sample(left, min(len(left), 2))},
        queues={len(model.queues) + 1: "name"} if rng.random() < 0.2 else {},
        producers={rng.choice("abc"): ProducerState(rng.randint(0, 99), rng.randint(0, 3))}
        if rng.random() < 0.3
        else {},
        forgotten_producers=[rng.choice("abc")] if rng.random() < 0.1 else [],
        sequence_limit=first + 100 if rng.random() < 0.3 else 0,
        # Also in the middle: a later batch does not care, and a crash behind it finds the transients.
        clean_stop=rng.choice([None, None, None, True, False]),
    )


def test_whenever_the_power_goes_every_confirmed_batch_is_there(tmp_path: Path) -> None:
    rng = random.Random(1)
    life = live(Remains(), [Model()], tmp_path / "life", 25, rng)
    for count in range(1 + first_commit(life.operations), len(life.operations) + 1):
        disk, may_hold = life.end(count, rng)
        live(disk, may_hold, tmp_path / str(count), 1, rng)


@pytest.mark.parametrize("seed", range(12))
def test_however_often_the_power_goes_in_recoveries_too_every_confirmed_batch_is_there(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    disk, may_hold = Remains(), [Model()]
    for number in range(12):
        life = live(disk, may_hold, tmp_path / str(number), rng.choice([0, 1, 3, 15]), rng)
        disk, may_hold = life.end(rng.randint(1 + first_commit(life.operations), len(life.operations)), rng)


def first_commit(operations: list[Operation]) -> int:
    """Before that there is no store yet."""
    return next((n for n, one in enumerate(operations) if isinstance(one, Commit)), 0)
