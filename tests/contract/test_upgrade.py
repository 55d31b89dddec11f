"""Tests that a folder of an earlier format becomes one of this format, whole, or stays as it was (C30.1 to C30.5).

The earlier formats are those of made_formats.py.
"""

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import lmdb
import pytest

from tests.contract import made_formats
from tests.contract.backups import restored
from tests.contract.crashing import Tried, crash_everywhere, folder_for, live
from tests.contract.fake_log import FakeLog, LogRows
from tests.contract.made_formats import FIRST_STEP, LAST_STEP, Contents, format_of, make_earlier, read_all
from tests.contract.recorded_runs import needs_compiler, run_recorded
from tests.contract.simulated_disk import Disk, Recorder, Walk, quick_folder
from tests.contract.test_crash_points import CRASHES, SEED
from tests.contract.try_upgrades import disk_of, earlier_disk, used_disk
from truenext.errors import StoreError
from truenext.store import folder as store_folder
from truenext.store.check import check
from truenext.store.checkpoint import Checkpoint
from truenext.store.checkpoint_format import DATABASES_MAX, FORMAT, FORMAT_VERSION, UNFINISHED
from truenext.store.embedded import EmbeddedStore
from truenext.store.manifest import BackupFile, Manifest, encode_manifest
from truenext.store.upgrade import upgrade as module
from truenext.store.upgrade.steps import STEPS

EARLIER = [LAST_STEP.source, FIRST_STEP.source]


@pytest.fixture(autouse=True)
def _read_made_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    made_formats.read_made_formats(monkeypatch)
    # So many transactions that a crash finds each position.
    monkeypatch.setattr(module, "PIECE_ENTRIES", 2)


def upgrade_only(folder: Path) -> None:
    with lmdb.open(str(folder / "lmdb"), max_dbs=DATABASES_MAX, lib_version=0) as env:
        module.upgrade(env, folder)


@contextmanager
def earlier_folder(format_number: int, seed: int = 1) -> Iterator[tuple[Path, Contents]]:
    """Make a folder of an earlier format. Yield it, and the content that it had in this format."""
    with folder_for(used_disk(seed)[0]) as folder:
        before = read_all(folder)
        make_earlier(folder, format_number)
        yield folder, before


def files(folder: Path) -> dict[Path, bytes]:
    """Return the files of the folder, without the locks."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "lock" not in path.name}


# What an upgrade does


@pytest.mark.parametrize("format_number", EARLIER)
def test_folder_of_an_earlier_format_gets_the_content_of_this_format(format_number: int) -> None:
    """C30.2."""
    with earlier_folder(format_number) as (folder, before):
        assert all(before[name] for name in (b"marks", b"producers", b"timers", b"messages", b"transients"))
        assert read_all(folder) != before
        upgrade_only(folder)
        assert read_all(folder) == before


@pytest.mark.parametrize("format_number", EARLIER)
def test_backup_of_an_earlier_format_is_restored_in_this_format(format_number: int, tmp_path: Path) -> None:
    """C30.2."""
    with earlier_folder(format_number) as (folder, before):
        backed_up = [path for path in files(folder) if path.name != "lock.mdb" and path.parent != folder]
        described = [
            BackupFile(str(path.relative_to(folder)), path.stat().st_size, sha256(path.read_bytes()).hexdigest())
            for path in backed_up
            if not path.name.startswith("spare-")
        ]
        manifest = Manifest(
            truenext="0",
            format=format_number,
            identity=before[b"meta"][b"identity"].decode(),
            batch=1,
            made="now",
            history=False,
            users=False,
            files=described,
        )
        (folder / "manifest").write_bytes(encode_manifest(manifest))
        identity = restored(folder, tmp_path / "new").identity.encode()
    found = read_all(tmp_path / "new")
    assert found.pop(b"meta")[b"identity"] == identity
    before.pop(b"meta")
    assert found == before


def test_folder_of_this_format_is_not_changed() -> None:
    with earlier_folder(LAST_STEP.source) as (folder, _):
        upgrade_only(folder)
        before = files(folder)
        upgrade_only(folder)
        assert files(folder) == before


@pytest.mark.parametrize("format_number", EARLIER)
def test_store_goes_on_with_a_folder_of_an_earlier_format(format_number: int) -> None:
    """C30.2: also with batches of that format, which are only in the journal."""
    for seed in (1, 2):
        disk, may_hold = earlier_disk(seed, format_number)
        life, _ = live(disk, may_hold, random.Random(seed), 5)
        assert len(life.models) == 6


def test_transactions_of_an_upgrade_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[list[tuple[bytes, tuple[bytes, bytes]]]] = []
    write = module._StepRun._write

    def noted(one: module._StepRun, txn: Any, conversion: Any, piece: Any) -> None:
        pieces.append(piece)
        write(one, txn, conversion, piece)

    monkeypatch.setattr(module._StepRun, "_write", noted)
    monkeypatch.setattr(module, "PIECE_ENTRIES", 3)
    monkeypatch.setattr(module, "PIECE_BYTES", 80)
    with earlier_folder(FIRST_STEP.source) as (folder, before):
        upgrade_only(folder)
        assert read_all(folder) == before
    assert {len(piece) for piece in pieces} == {1, 2, 3}
    assert all(len(piece) == 1 or sum(map(module._size, piece)) <= 80 for piece in pieces)


def test_log_says_when_an_upgrade_begins_how_far_it_is_and_when_it_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PROGRESS_INTERVAL_S", 0)
    with earlier_folder(LAST_STEP.source) as (folder, before):
        upgrade_only(folder)
    total = len(before[b"marks"]) + len(before[b"transient marks"])
    records = [vars(record) for record in caplog.records]
    assert all(record["levelname"] == "WARNING" for record in records)
    begin, *progress, end = records
    assert (begin["before"], begin["after"], begin["folder"]) == (11, 12, str(folder))
    assert {each["total"] for each in progress} == {total}
    assert [each["done"] for each in progress] == sorted(each["done"] for each in progress)
    assert progress[-1]["done"] == total
    assert end["message"] == "the data folder was converted to another format"


# Crashes


def states_after_cuts(format_number: int) -> Counter[str]:
    """Cut an upgrade at every write, and let it go on. Return the number of disks by their states.

    Raises: AssertionError if a disk has neither folder
    """
    with earlier_folder(format_number) as (folder, after):
        before = read_all(folder)
        disk = disk_of(folder, Disk())
        recorder = Recorder(disk, folder)
        with recorder.recording():
            upgrade_only(folder)
        recorder.check(folder)
    walk, rng = Walk(disk), random.Random(1)
    found: Counter[str] = Counter()
    for operation in [None, *recorder.operations]:
        if operation is not None:
            walk.do(operation)
        found.update(cut_state(one, before, after) for one in walk.states(rng, 4))
    return found


@pytest.mark.parametrize("format_number", EARLIER)
def test_upgrade_that_is_cut_at_every_write_ends_as_one_folder_or_the_other(format_number: int) -> None:
    """C30.3: the earlier format is whole, or the upgrade goes on to this one."""
    found = states_after_cuts(format_number)
    assert found["before"] >= 1
    assert found["between"] > 5
    assert found["after"] >= 1


def the_folder_is_not_marked(patch: pytest.MonkeyPatch) -> None:
    begin = module._StepRun.begin

    def unmarked(one: module._StepRun) -> None:
        begin(one)
        with one._env.begin(write=True) as txn:
            one._meta.put(txn, b"format", FORMAT.pack(one._step.source))

    patch.setattr(module._StepRun, "begin", unmarked)


def the_format_is_set_at_the_beginning(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "UNFINISHED", 0)


def the_position_moves_after_the_entries(patch: pytest.MonkeyPatch) -> None:
    put, convert_piece = module._StepRun._put_position, module._StepRun._convert_piece

    def convert_first(one: module._StepRun) -> module.Position | None:
        late: list[module.Position] = []
        with pytest.MonkeyPatch.context() as own:
            own.setattr(one, "_put_position", lambda _, position: late.append(position), raising=False)
            convert_piece(one)
        for position in late:
            with one._env.begin(write=True) as txn:
                put(one, txn, position)
        return late[0] if late else None

    patch.setattr(module._StepRun, "_convert_piece", convert_first)


@pytest.mark.drawn
@pytest.mark.parametrize(
    "plant", [the_folder_is_not_marked, the_format_is_set_at_the_beginning, the_position_moves_after_the_entries]
)
def test_a_cut_upgrade_shows_that(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with tempfile.TemporaryDirectory(dir=quick_folder()) as folder:
        # A disk that has neither folder is kept; here it is meant to.
        monkeypatch.setenv("TMPDIR", folder)
        with pytest.raises((AssertionError, StoreError)):
            states_after_cuts(LAST_STEP.source)


def cut_state(disk: Disk, before: Contents, after: Contents) -> str:
    """Go on with an upgrade on a disk as a crash has left it. Return the state in which it was."""
    with folder_for(disk) as folder:
        found = read_all(folder)
        if format_of(folder) == before_format(before):
            assert found == before
        upgrade_only(folder)
        assert read_all(folder) == after
        if found == before:
            return "before"
        return "after" if found == after else "between"


def before_format(before: Contents) -> int:
    return int.from_bytes(before[b"meta"][b"format"])


@pytest.mark.alternates("crashes of a store that upgrades")
@pytest.mark.parametrize("format_number", EARLIER)
def test_confirmed_batches_survive_power_cuts_during_and_after_an_upgrade(format_number: int) -> None:
    """C30.3."""
    tried = Tried()
    seed = 0
    while tried.states < CRASHES // 3:
        rng = random.Random(f"{SEED} {seed}")
        disk, may_hold = earlier_disk(seed, format_number)
        life, _ = live(disk, may_hold, rng, 4)
        crash_everywhere(life, rng, tried, at_most=4, share=0.3, states_max=CRASHES // 3)
        seed += 1


@needs_compiler
@pytest.mark.alternates("crashes of a store that upgrades")
@pytest.mark.timeout(300 + CRASHES // 20)
def test_confirmed_batches_survive_power_cuts_within_lmdb_during_an_upgrade() -> None:
    """C30.3."""
    done = run_recorded("try_upgrades", CRASHES // 3, SEED)
    assert done.returncode == 0, done.stderr
    tried, unfinished = map(int, done.stdout.split())
    assert tried >= CRASHES // 3
    assert unfinished > tried // 10


def test_upgrade_that_finds_the_disk_full_goes_on_at_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    put_position, count = module._StepRun._put_position, 0

    def full(one: module._StepRun, txn: Any, position: module.Position) -> None:
        nonlocal count
        count += 1
        if count == 4:
            raise lmdb.DiskError("mdb_put: No space left on device")
        put_position(one, txn, position)

    with earlier_folder(FIRST_STEP.source) as (folder, before):
        with monkeypatch.context() as patch:
            patch.setattr(module._StepRun, "_put_position", full)
            with pytest.raises(StoreError, match=r"cannot open the store in .*: the disk is full; free disk space"):
                EmbeddedStore(folder)
        assert format_of(folder) == FIRST_STEP.target | UNFINISHED
        with pytest.raises(StoreError, match="was interrupted: start a broker of the version that has begun it"):
            check(folder, lambda _: None, lambda *_: None)
        with pytest.raises(StoreError, match="to format 11 was interrupted"):
            Checkpoint(folder / "lmdb")
        upgrade_only(folder)
        assert read_all(folder) == before


# Refusals, which change nothing


@pytest.mark.parametrize("format_number", EARLIER)
def test_upgrade_without_space_is_refused_and_changes_nothing(
    format_number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C30.4."""
    monkeypatch.setattr(store_folder, "free_bytes", lambda _: 1 << 20)
    with earlier_folder(format_number) as (folder, _):
        before = files(folder)
        refusal = rf"has format {format_number}, and must be converted to format 12: this needs .* are free\. Nothing"
        with pytest.raises(StoreError, match=refusal):
            EmbeddedStore(folder)
        assert files(folder) == before


@pytest.mark.parametrize("format_number", EARLIER)
def test_damaged_value_is_refused_before_anything_is_changed(format_number: int) -> None:
    """C30.4."""
    database = b"marks" if format_number == LAST_STEP.source else b"producers"
    with earlier_folder(format_number) as (folder, _):
        with lmdb.open(str(folder / "lmdb"), max_dbs=20) as env, env.begin(write=True) as txn:
            db = env.open_db(database, txn=txn)
            key, stored = max(txn.cursor(db))
            txn.put(key, stored[:-1] + bytes([stored[-1] ^ 1]), db=db)
        before = files(folder)
        with pytest.raises(StoreError, match=rf"is damaged: {key.hex()} in {database.decode()} cannot be converted"):
            EmbeddedStore(folder)
        assert files(folder) == before


def test_copy_of_a_log_of_an_earlier_format_is_refused(tmp_path: Path) -> None:
    """C30.6."""
    with earlier_folder(LAST_STEP.source) as (folder, _):
        before = files(folder)
        with pytest.raises(StoreError, match="has format 11; this truenext reads format 14"):
            EmbeddedStore(folder, log=FakeLog(LogRows()))
        assert files(folder) == before


def test_steps_lead_from_the_two_formats_before_to_this_one() -> None:
    """C30.1."""
    assert len(STEPS) <= 2
    targets = [step.source for step in STEPS[1:]] + [FORMAT_VERSION]
    assert [step.target for step in STEPS] == targets[-len(STEPS) :] if STEPS else True
