"""Tests that a copy of a log goes on after power cuts and kills at any point: a crash may tear each frame that was not
synced, and the log has them all.

    TRUENEXT_CRASHES=100000 TRUENEXT_SEED=7 pytest -s tests/contract/test_copy_crashes.py       a long run: make crash
"""

import os
import random
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.contract.crashing import SEGMENT_BYTES, Held, batch_of, folder_for, random_changes
from tests.contract.disk import LANE, begin_and_apply
from tests.contract.fake_log import FakeLog, LogRows
from tests.contract.simulated_disk import A_FOLDER, Disk, HistorySynced, Operation, Recorder, Walk, quick_folder
from truenext.model.events import chunk_position
from truenext.model.record import message_key
from truenext.store.changes import RareChanges, encode_batch
from truenext.store.embedded import EmbeddedStore

CRASHES = int(os.environ.get("TRUENEXT_CRASHES", "150"))
SEED = int(os.environ.get("TRUENEXT_SEED", "1"))
STATES_AT_OPERATION = 4


class NotedRows(LogRows):
    """Log that tells of each row."""

    def __init__(self, before: LogRows, on_add: Callable[[], None]) -> None:
        super().__init__()
        self.identity, self.rows = before.identity, before.rows[:]
        self._on_add = on_add

    def add(self, payload: bytes, epoch: int) -> None:
        super().add(payload, epoch)
        self._on_add()


@dataclass
class Life:
    disk: Disk
    operations: list[Operation]
    rows: LogRows
    """Log at the end of the life."""
    rows_at: list[int]
    """Number of operations that had happened when each row of this life was appended."""
    models: dict[int, Held]
    """State by number of rows."""

    def rows_after(self, operations: int) -> int:
        """Return the number of rows in the log after so many operations of this life."""
        before = len(self.rows.rows) - len(self.rows_at)
        return before + sum(at <= operations for at in self.rows_at)


def open_copy(folder: Path, rows: LogRows, segments_max: int = 1) -> EmbeddedStore:
    return EmbeddedStore(folder, segment_bytes=SEGMENT_BYTES, segments_max=segments_max, log=FakeLog(rows))


def new_copy(rows: LogRows) -> Disk:
    """Return a disk with a copy of the log that was just made."""
    with tempfile.TemporaryDirectory(dir=quick_folder()) as base:
        folder = Path(base) / "data"
        open_copy(folder, rows).close()
        files = {1: (folder / "lmdb/data.mdb").read_bytes()}
    return Disk(files, {"lmdb": A_FOLDER, "journal": A_FOLDER, "lmdb/data.mdb": 1})


def live(disk: Disk, before: LogRows, model: Held, rng: random.Random, batches: int) -> Life:
    """Recover a copy on this disk, see that it holds what the log says, and give it batches."""
    model = model.copy()
    models = {len(before.rows): model.copy()}
    rows_at: list[int] = []
    with folder_for(disk) as folder:
        recorder = Recorder(disk, folder)

        def on_add() -> None:
            rows_at.append(len(recorder.operations))
            models[len(rows.rows)] = model.copy()

        rows = NotedRows(before, on_add)
        with recorder.recording():
            _run(open_copy(folder, rows, rng.choice([1, 4])), recorder, model, disk, rng, batches)
        recorder.check(folder)
        assert not list(folder.glob("aside-*"))
    return Life(disk, recorder.operations, rows, rows_at, models)


def _run(store: EmbeddedStore, recorder: Recorder, model: Held, disk: Disk, rng: random.Random, batches: int) -> None:
    restored: list[bytes] = []
    last_event = disk.history_chunks

    def sync_history() -> None:
        recorder.note(HistorySynced(last_event))

    store.sync_history = sync_history

    def restore(chunks: object) -> None:
        nonlocal last_event
        for chunk in chunks:  # type: ignore[attr-defined]
            event = chunk_position(chunk)[1]
            if event > last_event:
                last_event = event
                restored.append(chunk)

    store.restore_history = restore
    store.follow_history = lambda chunk: restore([chunk])
    try:
        recovered = store.recover()
        model.restart()
        # What the history has, too, is not told again.
        expected = model.history[disk.history_chunks :]
        assert restored == expected
        told = replace(recovered, history=restored)
        model.check_all(store, told, disk.history_chunks)
        changes = model.changes({}, [], clean_stop=False)
        for number in range(1, batches + 1):
            model.apply(changes)
            begin_and_apply(store, batch_of(number, changes))
            last_event = len(model.history)
            changes = random_changes(model, rng, rng.choice([0, 0.8]))
    finally:
        store.close()


def states(life: Life, at: int, rng: random.Random) -> list[Disk]:
    walk = Walk(life.disk)
    for operation in life.operations[:at]:
        walk.do(operation)
    return [*walk.states(rng, STATES_AT_OPERATION), walk.killed(rng)]


@pytest.mark.alternates("disks that fail")
@pytest.mark.timeout(300 + CRASHES // 20)
def test_copy_after_a_crash_at_any_operation_holds_what_the_log_says() -> None:
    print(f"TRUENEXT_SEED={SEED}")
    tried = life_number = 0
    while tried < CRASHES:
        rng = random.Random(f"{SEED} {life_number}")
        life_number += 1
        rows = LogRows()
        life = live(new_copy(rows), rows, Held(), rng, 25)
        for at in rng.sample(range(len(life.operations) + 1), min(len(life.operations), 15)):
            number = life.rows_after(at)
            for disk in states(life, at, rng):
                tried += 1
                again = live(disk, life.rows.until(number), life.models[number], rng, rng.choice([0, 1, 4]))
                last_at = rng.choice([rng.randint(0, len(again.operations)), len(again.operations)])
                last = rng.choice(states(again, last_at, rng))
                number_again = again.rows_after(last_at)
                live(last, again.rows.until(number_again), again.models[number_again], rng, 1)


def test_copy_that_is_older_than_the_log_catches_up() -> None:
    for life_number in range(6):
        rng = random.Random(f"{SEED} {life_number}")
        rows = LogRows()
        life = live(new_copy(rows), rows, Held(), rng, 25)
        for at in rng.sample(range(len(life.operations)), 3):
            disk = rng.choice(states(life, at, rng))
            number = rng.randint(life.rows_after(at), len(life.rows.rows))
            live(disk, life.rows.until(number), life.models[number], rng, 3)


class PowerCut(Exception):
    pass


def cut_power() -> bool:
    raise PowerCut


def add_row(rows: LogRows, rare: RareChanges | None = None, **changes: object) -> None:
    rows.add(b"".join(encode_batch(batch_of(1, changes), rare)), 1)


def follow(disk: Disk, rows: LogRows, segments_max: int) -> list[Operation]:
    """Let a copy that stands by follow all rows. Return what this does to the disk."""
    with folder_for(disk) as folder:
        recorder = Recorder(disk, folder)
        log = FakeLog(rows)
        log.looks.append(cut_power)
        with recorder.recording():
            store = EmbeddedStore(folder, segment_bytes=SEGMENT_BYTES, segments_max=segments_max, log=log)
            with closing(store), pytest.raises(PowerCut):
                store.recover()
    return recorder.operations


def synced(disk: Disk, operations: list[Operation]) -> Disk:
    """Return the disk if the power goes after these operations, and only what was synced is on it."""
    walk = Walk(disk)
    for operation in operations:
        walk.do(operation)
    return walk.synced()


def test_copy_that_lost_the_row_that_removes_a_dropped_transient_follows_the_row_again() -> None:
    """After a power cut behind the drop in the checkpoint, the next start looked there for the removed message, and
    called the folder damaged.
    """
    rows = LogRows()
    disk = new_copy(rows)
    key, *others = (message_key(LANE, sequence) for sequence in range(1, 5))
    add_row(rows, transient_puts={key: bytes(2000)})
    add_row(rows, puts={others[0]: bytes(2000)})
    disk = synced(disk, follow(disk, rows, segments_max=1))
    add_row(rows, transient_removes=[key])
    for other in others[1:]:
        add_row(rows, puts={other: bytes(2000)})
    add_row(rows, RareChanges(drops_transients=True))
    for at in range(len(operations := follow(disk, rows, segments_max=9)) + 1):
        follow(synced(disk, operations[:at]), rows, segments_max=1)
