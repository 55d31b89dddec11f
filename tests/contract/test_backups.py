"""Tests of backups of a store, and of their restore: chapter 29 of docs/contract.md."""

import errno
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any

import pytest

from tests.contract.backups import BusyStore, back_up, restored, try_backups
from tests.contract.crashing import open_store
from tests.contract.damage import wait_for_checkpoints
from tests.drawing import one_of
from truenext.broker.backups import BackupOptions, BackupReport, Backups
from truenext.broker.config import Configuration
from truenext.broker.settings import BrokerSettings
from truenext.cli.serve import _make_backups
from truenext.errors import ConfigurationError, StoreError, TruenextError
from truenext.store import backup as writing
from truenext.store import folder as store_folder
from truenext.store import held_state
from truenext.store.backup import (
    BackupStopped,
    BackupWriter,
    Pace,
    check_backup_folder,
    incomplete_backups,
    new_backup_folder,
)
from truenext.store.check import check
from truenext.store.embedded import EmbeddedStore
from truenext.store.held_state import HeldState
from truenext.store.journal import Journal, JournalEnd
from truenext.store.manifest import BackupFile, Manifest, encode_manifest, read_manifest
from truenext.store.memory import MemoryStore
from truenext.store.renewal import renew

COUNT = int(os.environ.get("TRUENEXT_BACKUPS", "8"))
FLIPS = int(os.environ.get("TRUENEXT_FLIPS", "40"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)


STORE_BACKUPS = 10
"""Number of backups of one store. A store that has more messages takes longer to copy, so more batches come."""


@pytest.mark.timeout(60 + 6 * COUNT)
def test_backup_under_batches_is_the_state_of_exactly_its_batch(tmp_path: Path) -> None:
    # C29.2, C29.8
    print(f"\nseed {SEED}, {COUNT} backups")
    for first in range(0, COUNT, STORE_BACKUPS):
        folder = tmp_path / str(first)
        folder.mkdir()
        batches = try_backups(folder, SEED + first, min(STORE_BACKUPS, COUNT - first))
        assert batches == sorted(batches)
        assert len(set(batches)) > 1


# ---- Planted faults ----


def journal_is_cut_a_batch_early(patch: pytest.MonkeyPatch) -> None:
    ends: dict[EmbeddedStore, list[JournalEnd]] = {}
    hold = EmbeddedStore._try_to_hold
    finish = EmbeddedStore._finish

    def note(store: EmbeddedStore, *rest: Any) -> None:
        ends.setdefault(store, []).append(store._applied_end)
        finish(store, *rest)

    def hold_early(store: EmbeddedStore, hold_other: Any) -> tuple[HeldState, Any] | None:
        held = hold(store, hold_other)
        if held is not None and ends.get(store) and ends[store][-1].segment == held[0]._end.segment:
            # It still says that it has the last batch.
            held[0]._end = held[0]._end._replace(offset=ends[store][-1].offset)
        return held

    patch.setattr(EmbeddedStore, "_finish", note)
    patch.setattr(EmbeddedStore, "_try_to_hold", hold_early)


def checkpoint_is_of_a_later_moment(patch: pytest.MonkeyPatch) -> None:
    content = HeldState._checkpoint_content

    def later(state: HeldState) -> Iterator[bytes]:
        state._snapshot.abort()
        state._snapshot = state._checkpoint.snapshot()
        return content(state)

    patch.setattr(HeldState, "_checkpoint_content", later)


def journal_is_of_a_later_moment(patch: pytest.MonkeyPatch) -> None:
    files = HeldState.files

    def later(state: HeldState) -> Iterator[tuple[str, Iterator[bytes]]]:
        state._end = state._end._replace(offset=1 << 40)
        return files(state)

    def whole(file: int, used: int) -> Iterator[bytes]:
        return content(file, os.fstat(file).st_size if used else 0)

    content = held_state._segment_content
    patch.setattr(held_state, "_segment_content", whole)
    patch.setattr(HeldState, "files", later)


def segments_are_used_again(patch: pytest.MonkeyPatch) -> None:
    def retire(journal: Journal, path: Path) -> None:
        journal._make_spare(path)

    patch.setattr(Journal, "_retire", retire)


FAULTS = [
    journal_is_cut_a_batch_early,
    checkpoint_is_of_a_later_moment,
    journal_is_of_a_later_moment,
    segments_are_used_again,
]


@one_of("plant", FAULTS, ids=[each.__name__ for each in FAULTS])
def test_fault_in_what_a_backup_copies_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Any) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, StoreError)):
        for attempt in range(20):
            (tmp_path / str(attempt)).mkdir()
            try_backups(tmp_path / str(attempt), SEED + attempt, 10)
    monkeypatch.undo()


class Killed(BaseException):
    pass


def cut_backups(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield backups of one store that are killed at each write, each sync, and the rename of the manifest."""
    (folder / "backups").mkdir()
    busy = BusyStore(folder / "data", random.Random(SEED))
    with closing(busy.store):
        for _ in range(30):
            busy.apply()
        # A move in between would change the number of steps.
        wait_for_checkpoints(busy.store)
        for cut in range(1000):
            remaining = cut
            path = None

            def step(*_: Any) -> None:
                nonlocal remaining
                remaining -= 1
                if remaining < 0:
                    raise Killed

            def stepping(function: Any) -> Any:
                def call(*arguments: Any, **options: Any) -> Any:
                    # The checkpointer uses the same functions.
                    if current_thread() is main_thread():
                        step()
                    return function(*arguments, **options)

                return call

            with monkeypatch.context() as patch:
                patch.setattr(shutil, "rmtree", lambda *_, **__: None)
                patch.setattr(store_folder, "write", stepping(store_folder.write))
                patch.setattr(store_folder, "sync_folder", stepping(store_folder.sync_folder))
                patch.setattr(os, "fdatasync", stepping(os.fdatasync))
                patch.setattr(Path, "rename", stepping(Path.rename))
                with suppress(Killed):
                    path = back_up(busy.store, folder / "backups")
            (made,) = (folder / "backups").iterdir()
            yield made
            shutil.rmtree(made)
            if path is not None:
                return


def check_cut_backups(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = 0
    for number, made in enumerate(cut_backups(folder, monkeypatch)):
        new = folder / f"new {number}"
        if (made / "manifest").exists():
            restored(made, new)
            complete += 1
            continue
        with pytest.raises(ConfigurationError, match="was cut short, and has no manifest"):
            restored(made, new)
        assert not new.exists()
        with pytest.raises(ConfigurationError, match="is a backup"):
            open_store(made)
        assert incomplete_backups(folder / "backups") == [made.name]
    # Killed after the rename, before each of two folders is synced, and not at all. A later one may take a step more.
    assert complete >= 3
    assert number > 10


def test_backup_that_is_cut_anywhere_is_refused_or_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # C29.3
    check_cut_backups(tmp_path, monkeypatch)


def test_manifest_that_is_written_first_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = BackupWriter._write_file

    def early(writer: BackupWriter, name: str, content: Any) -> Any:
        pieces = list(content)
        if name.startswith("lmdb"):
            (writer.path / "manifest-new").rename(writer.path / "manifest")
            (writer.path / "manifest").write_bytes(b"a manifest")
            (writer.path / "manifest-new").touch()
        return write(writer, name, iter(pieces))

    monkeypatch.setattr(BackupWriter, "_write_file", early)
    with pytest.raises((AssertionError, StoreError)):
        check_cut_backups(tmp_path, monkeypatch)


# ---- Damage ----


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    """Backup of a store with some random batches."""
    (tmp_path / "backups").mkdir()
    busy = BusyStore(tmp_path / "data", random.Random(SEED))
    with closing(busy.store):
        for _ in range(40):
            busy.apply()
        return back_up(busy.store, tmp_path / "backups")


def test_each_flipped_bit_of_a_backup_is_named(backup: Path, tmp_path: Path) -> None:
    # C29.7
    rng = random.Random(SEED)
    names = [*(file.name for file in read_manifest(backup).files), "manifest"]
    for number in range(FLIPS):
        name = names[number % len(names)]
        content = bytearray((backup / name).read_bytes())
        bit = rng.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        whole = (backup / name).read_bytes()
        (backup / name).write_bytes(content)
        with pytest.raises(TruenextError) as error:
            restored(backup, tmp_path / "new")
        assert name in str(error.value), f"bit {bit} of {name}: {error.value}"
        assert not (tmp_path / "new").exists()
        (backup / name).write_bytes(whole)
    restored(backup, tmp_path / "new")


def test_file_that_is_missing_or_cut_is_named(backup: Path, tmp_path: Path) -> None:
    for file in read_manifest(backup).files:
        path = backup / file.name
        content = path.read_bytes()
        for changed in (content[:-1], content + b"\0"):
            path.write_bytes(changed)
            with pytest.raises(StoreError, match=f"{file.name} has {len(changed):,} bytes instead of {len(content):,}"):
                restored(backup, tmp_path / "new")
        path.unlink()
        with pytest.raises(StoreError, match=f"{file.name} is missing"):
            restored(backup, tmp_path / "new")
        path.write_bytes(content)
    assert not (tmp_path / "new").exists()


def change_manifest(backup: Path, **changes: Any) -> None:
    manifest = read_manifest(backup)
    fields = {name: getattr(manifest, name) for name in Manifest.__struct_fields__} | changes
    (backup / "manifest").write_bytes(encode_manifest(Manifest(**fields)))


@pytest.mark.parametrize("field", ["version", "format"])
def test_backup_of_a_newer_version_is_refused(backup: Path, tmp_path: Path, field: str) -> None:
    change_manifest(backup, **{field: 99}, truenext="7.0")
    with pytest.raises(ConfigurationError, match=r"was made by truenext 7\.0, which is newer"):
        restored(backup, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["../outside", "journal/../../x", "/etc/passwd", "lock", "history/../../x.history"])
def test_manifest_that_names_a_file_elsewhere_is_refused(backup: Path, tmp_path: Path, name: str) -> None:
    files = read_manifest(backup).files
    change_manifest(backup, files=[BackupFile(name, files[0].size, files[0].sha256)])
    with pytest.raises(StoreError, match="which no backup has"):
        restored(backup, tmp_path / "new")


def test_fifo_or_folder_in_place_of_a_file_is_damage(backup: Path, tmp_path: Path) -> None:
    # C29.7
    for name in (*(file.name for file in read_manifest(backup).files), "manifest"):
        path = backup / name
        content = path.read_bytes()
        path.unlink()
        for make, remove in ((os.mkfifo, os.unlink), (os.mkdir, os.rmdir)):
            make(path)
            with pytest.raises(StoreError, match=f"{name} is no regular file"):
                restored(backup, tmp_path / "new")
            remove(path)
        path.write_bytes(content)
    assert not (tmp_path / "new").exists()


def test_backup_that_another_broker_writes_is_not_named_as_cut_short(tmp_path: Path) -> None:
    # C29.3
    with new_backup_folder(tmp_path) as path:
        assert incomplete_backups(tmp_path) == []
    assert incomplete_backups(tmp_path) == [path.name]


def test_store_that_was_damaged_when_it_was_copied_is_refused(backup: Path, tmp_path: Path) -> None:
    """Its records are no messages, which the check of the store finds."""
    from truenext.store.restore import restore

    with pytest.raises(StoreError, match="was damaged when it was copied"):
        restore(backup, tmp_path / "new", lambda done, total: None, lambda _: None)
    assert not (tmp_path / "new").exists()


# ---- Folders ----


def test_folder_to_restore_into_must_be_new_or_empty(backup: Path, tmp_path: Path) -> None:
    # C29.9
    new = tmp_path / "new"
    new.mkdir()
    (new / "lost+found").mkdir()
    restored(backup, new)
    with pytest.raises(ConfigurationError, match="is not empty"):
        restored(backup, new)
    with pytest.raises(ConfigurationError, match="is inside the backup"):
        restored(backup, backup / "new")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"missing is not there: make this folder"):
        restored(backup, tmp_path / "missing" / "new")
    assert not (tmp_path / "missing").exists()
    with pytest.raises(ConfigurationError, match="is not a folder"):
        restored(backup, tmp_path / "file")
    with pytest.raises(ConfigurationError, match="there is no folder"):
        restored(tmp_path / "nothing", tmp_path / "other")
    with pytest.raises(ConfigurationError, match="it has no manifest; name a folder that `truenext backup` made"):
        restored(new, tmp_path / "other")


def test_restore_onto_a_full_disk_leaves_nothing(backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truenext.store.folder.free_bytes", lambda _: 1000)
    with pytest.raises(ConfigurationError, match="has too little space"):
        restored(backup, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_restore_that_is_killed_leaves_no_folder_for_a_broker(
    backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: Any) -> None:
        raise Killed

    rename = Path.rename
    for number, name in enumerate(("renew", "rename")):
        new = tmp_path / f"new {number}"
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
            patch.setattr(Path, "rmdir", lambda _: None)
            if name == "rename":
                patch.setattr(Path, "rename", lambda path, to: kill() if path.name == "lmdb" else rename(path, to))
            else:
                patch.setattr("truenext.store.restore.renew", kill)
            with pytest.raises(Killed):
                restored(backup, new)
        assert new.exists()
        with pytest.raises((ConfigurationError, StoreError), match="not truenext's: restoring"):
            open_store(new)
        with pytest.raises(ConfigurationError, match="is not empty"):
            restored(backup, new)


def test_backup_is_for_its_owner_alone_and_no_data_folder(backup: Path) -> None:
    # C29.1, C29.3
    for parent, _, files in os.walk(backup):
        assert Path(parent).stat().st_mode & 0o777 == 0o700
        assert all((Path(parent) / name).stat().st_mode & 0o777 == 0o600 for name in files)
    before = sorted(str(path) for path in backup.rglob("*"))
    for use in (open_store, renew, lambda path: check(path, print, lambda *_: None)):
        with pytest.raises(ConfigurationError, match="is a backup: `truenext restore"):
            use(backup)
    assert sorted(str(path) for path in backup.rglob("*")) == before


def test_folder_for_backups_must_be_safe(tmp_path: Path) -> None:
    data, backups = tmp_path / "data", tmp_path / "backups"
    data.mkdir()
    with pytest.raises(ConfigurationError, match="is not there"):
        check_backup_folder(backups, data)
    backups.mkdir(mode=0o755)
    check_backup_folder(backups, data)
    (data / "backups").symlink_to(backups)
    check_backup_folder(data / "backups", data)
    (tmp_path / "link").symlink_to(data)
    with pytest.raises(ConfigurationError, match="is inside the data folder"):
        check_backup_folder(tmp_path / "link", data)
    backups.chmod(0o777)
    with pytest.raises(ConfigurationError, match="other users of this machine can write"):
        check_backup_folder(backups, data)


def test_folder_for_backups_on_a_read_only_disk_says_where_to_allow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = os.statvfs_result((1, 1, 1, 1, 1, 1, 1, 1, os.ST_RDONLY, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: flags)
    (tmp_path / "backups").mkdir(mode=0o700)
    with pytest.raises(ConfigurationError, match=r"is read-only for the broker.*`ReadWritePaths="):
        check_backup_folder(tmp_path / "backups", tmp_path / "data")


def test_foreign_file_in_a_backup_is_named_and_not_restored(backup: Path, tmp_path: Path) -> None:
    (backup / "notes.txt").touch()
    assert restored(backup, tmp_path / "new").foreign == ["notes.txt"]
    assert not list((tmp_path / "new").rglob("notes.txt"))


# ---- Pace, end, space ----


def test_pace_bounds_the_rate_and_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # C29.6
    now = 0.0
    waits = []

    class Clock(Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal now
            assert timeout is not None
            waits.append(timeout)
            now += timeout
            return self.is_set()

    monkeypatch.setattr(writing, "monotonic", lambda: now)
    stop = Clock()
    pace = Pace(1000, stop)
    for _ in range(10):
        pace.wait(100)
    assert now == pytest.approx(1.0)
    now += 5
    pace.wait(100)
    assert waits[-1] == pytest.approx(0.1)
    stop.set()
    with pytest.raises(BackupStopped):
        pace.wait(1)


def test_backup_that_fails_leaves_nothing_and_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "backups").mkdir()
    busy = BusyStore(tmp_path / "data", random.Random(SEED))

    def fail() -> None:
        raise BackupStopped

    with closing(busy.store) as store:
        for _ in range(30):
            busy.apply()
            with pytest.raises(BackupStopped):
                back_up(store, tmp_path / "backups", fail)
        assert list((tmp_path / "backups").iterdir()) == []
        assert store._journal.held_size == 0 and not store._journal._held
        back_up(store, tmp_path / "backups")


def test_segments_of_a_backup_count_as_used(tmp_path: Path) -> None:
    # C29.5
    busy = BusyStore(tmp_path / "data", random.Random(SEED))
    with closing(busy.store) as store:
        for _ in range(10):
            busy.apply()
        with closing(store.hold_state(lambda: None)[0]):
            held = dict(store._journal._held)
            while set(held) & set(store._journal.segments):
                busy.apply()
            assert store._journal.held_size == sum(os.fstat(file).st_size for file in held.values()) > 0
            store.disk_space.update_level()
            assert store.disk_level_bytes["backup"] >= store._journal.held_size
        store.disk_space.update_level()
        assert "backup" not in store.disk_level_bytes
        assert not list((tmp_path / "data/journal").glob("*.kept"))


def test_backup_slows_producers_and_stops_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # C29.5
    busy = BusyStore(tmp_path / "data", random.Random(SEED))
    with closing(busy.store) as store:
        busy.apply()
        space = store.disk_space
        free = 4 * space._reserve()
        monkeypatch.setattr("truenext.store.folder.free_bytes", lambda _: free)
        levels = []
        for here in (0, free // 4, 3 * free // 4, 10 * free, 0):
            space.backup_here = here
            space.update_level()
            levels.append(store.disk_level.name)
        assert levels == ["PLENTY", "PLENTY", "LITTLE", "LITTLE", "PLENTY"]
        assert [space.has_space_for_backup(size) for size in (0, free // 2, free)] == [True, False, False]
        free = space._reserve() // 2
        space.update_level()
        assert store.disk_level.name == "NONE"


def test_growth_and_segments_count_towards_the_limit(tmp_path: Path) -> None:
    # C29.5
    with closing(EmbeddedStore(tmp_path / "data", segment_bytes=3000, disk_limit=1 << 30)) as store:
        store.recover()
        space = store.disk_space
        levels = []
        for growth in (0, 950 << 20, 5 << 30, 0):
            space.backup_growth = growth
            space.update_level()
            levels.append(store.disk_level.name)
        assert levels == ["PLENTY", "LITTLE", "LITTLE", "PLENTY"]


def test_empty_store_can_be_backed_up(tmp_path: Path) -> None:
    (tmp_path / "backups").mkdir()
    with closing(open_store(tmp_path / "data")) as store:
        store.recover()
        made = back_up(store, tmp_path / "backups")
    restored(made, tmp_path / "new")
    with closing(open_store(tmp_path / "new")) as store:
        assert store.recover().counts == {}


def test_backup_onto_a_disk_that_becomes_full_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # C29.9
    (tmp_path / "backups").mkdir()
    with closing(open_store(tmp_path / "data")) as store:
        store.recover()
        write = store_folder.write

        def fill(file: int, content: bytes, offset: int) -> None:
            if current_thread() is main_thread():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(file, content, offset)

        monkeypatch.setattr(store_folder, "write", fill)
        with pytest.raises(StoreError, match="backups is full: free disk space"):
            back_up(store, tmp_path / "backups")
    assert not list((tmp_path / "backups").iterdir())


def report_of(backups: Backups) -> BackupReport:
    """Make a backup, and return the report at its end."""
    backups.start(BackupOptions())
    assert backups._thread is not None
    backups._thread.join()
    return backups.report()


def test_backup_for_which_a_disk_has_too_little_space_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # C29.5, C29.9
    (tmp_path / "backups").mkdir()
    busy = BusyStore(tmp_path / "data", random.Random(SEED))
    with closing(busy.store) as store:
        for _ in range(30):
            busy.apply()
        backups = Backups(store, tmp_path / "data", tmp_path / "backups", refusal="")
        with monkeypatch.context() as patch:
            patch.setattr("truenext.broker.backups.free_bytes", lambda _: 1)
            report = report_of(backups)
            assert report.state == "failed"
            assert "backups has too little space: " in report.error
        with monkeypatch.context() as patch:
            patch.setattr("truenext.store.folder.free_bytes", lambda _: 5000)
            report = report_of(backups)
            assert report.state == "failed"
            assert "is too full for a backup: free disk space" in report.error
        assert (store.disk_space.backup_here, store.disk_space.backup_growth) == (0, 0)
        assert not list((tmp_path / "backups").iterdir())
        report = report_of(backups)
        assert (report.state, report.batch) == ("done", store._journal.last_frame_number)
        assert report.copied == read_manifest(Path(report.folder)).size
        backups.close()


def test_broker_with_a_log_names_the_page_about_its_backups() -> None:
    # C29.9
    settings = BrokerSettings(store="postgresql:///messages", schema="main", data=Path("data"), backup_dir=Path("b"))
    backups = _make_backups(Configuration(broker=settings), MemoryStore())
    with pytest.raises(ConfigurationError, match=r"makes no backups: .* as docs/postgresql\.md says"):
        backups.start(BackupOptions())
