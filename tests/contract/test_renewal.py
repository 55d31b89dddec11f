"""Tests of the renewal of a data folder: a new identity, and all else as before, whenever a crash comes (C29.10)."""

import random
from pathlib import Path

import pytest

from tests.contract.crashing import Held, batch_of, folder_for, live, open_store, recover
from tests.contract.disk import Disk, put, sequences
from tests.contract.simulated_disk import Disk as SimulatedDisk
from tests.contract.simulated_disk import Recorder, Walk
from truenext.errors import ConfigurationError, StoreError, StoreInUseError
from truenext.store.checkpoint import Checkpoint
from truenext.store.renewal import renew


def identity_of(folder: Path) -> str:
    checkpoint = Checkpoint(folder / "lmdb", may_be_new=False)
    try:
        return checkpoint.read()[0].identity
    finally:
        checkpoint.close()


def folder_after_a_crash(rng: random.Random) -> tuple[SimulatedDisk, list[Held]]:
    """Return a disk after a crash in the middle of a run, which an atomic snapshot would be, too."""
    life, _ = live(SimulatedDisk(), [Held()], rng, 20)
    walk, may_hold = life.at(rng.randint(len(life.operations) // 2, len(life.operations)))
    return rng.choice([*walk.states(rng, 2), walk.killed(rng)]), may_hold


@pytest.mark.parametrize("seed", range(4))
def test_power_cut_during_a_renewal_leaves_the_old_identity_or_the_new_one(seed: int) -> None:
    rng = random.Random(seed)
    disk, may_hold = folder_after_a_crash(rng)
    with folder_for(disk) as folder:
        before = identity_of(folder)
    with folder_for(disk) as folder:
        recorder = Recorder(disk, folder)
        with recorder.recording():
            renewed = renew(folder)
        recorder.check(folder)
    found = set()
    for count in range(len(recorder.operations) + 1):
        walk = Walk(disk)
        for operation in recorder.operations[:count]:
            walk.do(operation)
        for state in (*walk.states(rng, 2), walk.killed(rng)):
            with folder_for(state) as folder:
                found.add(identity_of(folder))
                if count == len(recorder.operations):
                    assert identity_of(folder) == renewed
                store = open_store(folder)
                model = recover(store, may_hold, state)
                # The broker goes on where the copy ended.
                store.apply(batch_of(1, model.changes({}, [], clean_stop=False)))
                store.close()
    assert found == {before, renewed}


def test_renewal_keeps_transient_messages_of_a_clean_stop(embedded_disk: Disk) -> None:
    before = embedded_disk.crash().identity
    embedded_disk.apply(puts=put(1), transient_puts=put(2), queues={1: "orders"}, clean_stop=True)
    embedded_disk.store.close()
    identity = renew(embedded_disk.folder)
    assert identity != before
    assert embedded_disk.open().identity == identity
    assert sequences(embedded_disk.store) == [1, 2]


def test_copy_of_a_log_is_not_renewed(tmp_path: Path) -> None:
    copy = Disk("copy", tmp_path / "data")
    copy.store.close()
    with pytest.raises(ConfigurationError, match="has the identity of that log: make it an ordinary folder"):
        renew(copy.folder)
    assert copy.open().identity == copy.log_rows.identity
    copy.store.close()


def test_folder_in_use_is_not_renewed(embedded_disk: Disk) -> None:
    with pytest.raises(StoreInUseError):
        renew(embedded_disk.folder)


def test_folder_without_a_store_is_not_renewed_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a data folder of a broker"):
        renew(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folder_without_its_checkpoint_is_not_renewed(embedded_disk: Disk) -> None:
    embedded_disk.apply(puts=put(1))
    embedded_disk.store.close()
    (embedded_disk.folder / "lmdb/data.mdb").unlink()
    with pytest.raises(StoreError, match=r"lmdb/data\.mdb is missing, but the journal exists"):
        renew(embedded_disk.folder)
    assert not (embedded_disk.folder / "lmdb/data.mdb").exists()
