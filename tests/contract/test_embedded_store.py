"""Tests of the store on a disk: folders, locks, crashes, damage, and a full disk."""

import errno
import fcntl
import os
import resource
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import lmdb
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.disk import LANE, NEXT_QUEUE, OTHER_LANE, Disk, embedded, key, put, sequences, timers
from tests.contract.simulated_disk import quick_folder
from tests.contract.test_store import Model, check_restart, draw_batch, share
from truenext.errors import StoreError, StoreInUseError
from truenext.model.batch import Batch, ProducerState
from truenext.model.message import SentMessage
from truenext.model.record import (
    CONTENTS_LANE_KEY,
    DamagedRecord,
    content_key,
    decode_record,
    encode_record,
    encode_reference,
    lane_key,
    sequence_of,
)
from truenext.store import changes, checkpoint, journal
from truenext.store.check import check
from truenext.store.checkpoint import Checkpoint
from truenext.store.checkpoint_format import DATABASES_MAX, FORMAT_VERSION, CheckpointPosition
from truenext.store.checkpointer import LAG_SEGMENTS_MAX, Checkpointer
from truenext.store.checksummed import add_checksum, remove_checksum
from truenext.store.embedded import EmbeddedStore
from truenext.store.export import export
from truenext.store.journal import Journal
from truenext.store.message_tables import Marks


def journal_files(folder: Path) -> list[Path]:
    return sorted((folder / "journal").glob("*.journal"))


def sizes(folder: Path) -> list[int]:
    """Return the sizes of the folder's files, except those that are renamed or deleted meanwhile."""
    found = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            found.append(path.stat().st_size)
    return found


def until(fact: Callable[[], bool]) -> None:
    ready = threading.Event()
    for _ in range(1000):
        if fact():
            return
        ready.wait(0.01)
    raise AssertionError("not within 10 seconds")


# Folders and locks


def test_second_broker_is_refused_and_told_which_process_holds_the_folder(embedded_disk: Disk) -> None:
    with pytest.raises(StoreInUseError) as refusal:
        EmbeddedStore(embedded_disk.folder)
    assert str(embedded_disk.folder) in str(refusal.value)
    assert f"process {os.getpid()}" in str(refusal.value)
    embedded_disk.apply(puts=put(1))
    embedded_disk.crash()
    assert sequences(embedded_disk.store) == [1]


def test_a_refused_broker_leaves_the_pid_of_the_holder(embedded_disk: Disk) -> None:
    for _ in range(2):
        with pytest.raises(StoreInUseError, match=f"process {os.getpid()}"):
            EmbeddedStore(embedded_disk.folder)
    assert (embedded_disk.folder / "lock").read_text() == f"{os.getpid()}\n"


def test_the_pid_of_an_earlier_broker_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("12345678901234567\n")
    EmbeddedStore(tmp_path).close()
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_the_data_folder_is_made_for_its_owner_only(embedded_disk: Disk) -> None:
    embedded_disk.apply(puts=put(1))
    folder = embedded_disk.folder
    for path in (folder, folder / "lmdb", folder / "journal"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in (folder / "lock", folder / "lmdb/data.mdb", *journal_files(folder)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_new_store_syncs_every_folder_that_leads_to_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(str(Path(f"/proc/self/fd/{file}").readlink())))
    EmbeddedStore(tmp_path / "a/b").close()
    assert synced == {str(tmp_path / path) for path in ("", "a", "a/b", "a/b/lmdb", "a/b/journal")}


def test_a_data_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot open the store in .*/file/data: .*Not a directory"):
        EmbeddedStore(tmp_path / "file" / "data")


def test_a_file_that_is_no_store_is_refused_and_the_lock_let_go(tmp_path: Path) -> None:
    (tmp_path / "lmdb").mkdir()
    (tmp_path / "lmdb/data.mdb").write_bytes(b"no store" * 10_000)
    for _ in range(2):
        with pytest.raises(StoreError, match="is damaged: LMDB says MDB_INVALID: File is not an LMDB file") as refusal:
            EmbeddedStore(tmp_path)
        assert not isinstance(refusal.value, StoreInUseError)


def test_a_lock_that_cannot_be_written_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StoreError, match=r"cannot open the store in .*: the disk is full"):
            EmbeddedStore(tmp_path)
    EmbeddedStore(tmp_path).close()


def test_a_store_of_another_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "lmdb"
    with lmdb.open(str(folder), max_dbs=1, lib_version=0) as env, env.begin(write=True) as txn:
        txn.put(b"format", struct.pack(">I", 1), db=env.open_db(b"meta", txn=txn))
    before = (folder / "data.mdb").read_bytes()
    for _ in range(2):
        with pytest.raises(StoreError, match=f"has format 1; this truenext reads format {FORMAT_VERSION}: use the"):
            EmbeddedStore(tmp_path)
    assert (folder / "data.mdb").read_bytes() == before


def write_format(folder: Path, version: int) -> None:
    """Make it a folder of another format: its number, and the name that format 11 had in meta."""
    with lmdb.open(str(folder / "lmdb"), max_dbs=DATABASES_MAX) as env, env.begin(write=True) as txn:
        db = env.open_db(b"meta", txn=txn)
        txn.put(b"format", add_checksum(b"meta", b"format", struct.pack(">I", version)), db=db)
        if version < FORMAT_VERSION:
            number = remove_checksum(b"meta", b"durable frame", txn.pop(b"durable frame", db=db) or b"")
            txn.put(b"written", add_checksum(b"meta", b"written", number), db=db)


@pytest.mark.parametrize("kind", ["embedded", "checkpointing"])
@pytest.mark.parametrize("found", [9, 10, 11, 15])
def test_a_store_of_a_format_that_is_not_read_is_refused_by_its_number_and_left_alone(
    kind: str, found: int, tmp_path: Path
) -> None:
    """C30.5."""
    assert FORMAT_VERSION == 12
    folder = tmp_path / "data"
    disk = Disk(kind, folder)
    disk.apply(puts=put(1), queues={1: "orders"})
    disk.apply(producers={"p": ProducerState(2, 10)})
    disk.store.close()
    write_format(folder, found)
    before = files(folder)
    advice = {
        True: "use the version that wrote it, or a later one",
        False: "use the version that wrote it, or let a broker convert it that reads both (docs/upgrade.md)",
    }[found > FORMAT_VERSION]
    refusal = (
        f"the store in {folder} has format {found}; this truenext reads format 12: {advice}, or name another data "
        "folder"
    )
    for open_folder in (
        lambda: EmbeddedStore(folder),
        lambda: check(folder, lambda _: None, lambda *_: None),
        lambda: export(folder, tmp_path / "new", lambda _: None, lambda *_: None),
    ):
        with pytest.raises(StoreError) as error:
            open_folder()
        assert str(error.value) == refusal
        assert files(folder) == before
    assert not (tmp_path / "new").exists()


def files(folder: Path) -> dict[Path, bytes]:
    """Return the files of the folder, without the lock."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "lock" not in path.name}


def test_a_batch_with_a_field_of_another_format_is_no_batch() -> None:
    """Formats before this one called producers so."""
    rest = msgspec.msgpack.encode({"numbers": {"p": ProducerState(1, 2)}})
    payload = struct.pack("<IIIIII", 0, 0, 0, 0, len(rest), 0) + rest
    with pytest.raises(ValueError, match="not a batch: Object contains unknown field `numbers`"):
        changes.decode_changes(memoryview(payload))


def test_producers_stand_in_a_batch_by_their_name() -> None:
    batch = Batch(1)
    batch.producers = {"p": ProducerState(7, 8, True, 5, 3, True, (2, 4))}
    parts = b"".join(changes.encode_batch(batch, changes.changes_of(batch).rare))
    assert msgspec.msgpack.decode(parts[changes.PUTS_OFFSET :]) == {
        "producers": {"p": [7, 8, True, 5, 3, True, [2, 4]]}
    }


def test_causes_of_a_damaged_folder_are_saved(tmp_path: Path) -> None:
    disk = Disk("checkpointing", tmp_path / "data")
    causes = {key(n): (f"first {n}", f"last {n}" * 50) for n in (1, 2)}
    records = {key(n): encode_record(key(n), SentMessage(4, True, 0, b"", b"body")) for n in range(1, 30)}
    disk.apply(
        puts=records, queues={1: "orders"}, sequence_limit=99, marks=dict.fromkeys(causes, (2, 2)), causes=causes
    )
    disk.apply(redelivered_below=1)
    until(lambda: len(journal_files(tmp_path / "data")) == 1)
    disk.apply(marks={key(2): (3, 3)}, causes={key(2): ("", "the last")})
    disk.store.close()
    export(tmp_path / "data", tmp_path / "new", lambda finding: None, lambda *_: None)
    saved = EmbeddedStore(tmp_path / "new")
    saved.recover()
    assert [m.causes for m in saved.read_page(LANE, 0, 3).messages] == [
        ("first 1", "last 1" * 50),
        ("first 2", "the last"),
        ("", ""),
    ]
    saved.close()


def test_many_long_causes_move_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One transaction of the checkpoint is in private memory until it is written."""
    pieces = []
    put_marks = checkpoint.Checkpoint.put_marks

    def counted(one: checkpoint.Checkpoint, marks: Marks) -> None:
        pieces.append(sum(len(causes.first) + len(causes.last) for _, causes in marks.values()))
        put_marks(one, marks)

    monkeypatch.setattr(checkpoint.Checkpoint, "put_marks", counted)
    disk = Disk("checkpointing", tmp_path)
    many = put(*range(1, 3001))
    disk.apply(puts=many, queues={1: "orders"})
    disk.apply(marks=dict.fromkeys(many, (1, 1)), causes=dict.fromkeys(many, ("f" * 4000, "l" * 4000)))
    disk.apply(puts=put(3001))
    until(lambda: len(journal_files(tmp_path)) == 1)
    assert sum(pieces) == 3000 * 8000 and max(pieces) <= 4 * 1024 * 1024 + 8000
    disk.crash()
    messages = disk.store.read_page(LANE, 0, 5000, 1 << 40).messages
    assert {m.causes for m in messages[:3000]} == {("f" * 4000, "l" * 4000)}
    disk.store.close()


def test_the_environment_does_not_choose_the_format_of_a_new_store(tmp_path: Path) -> None:
    code = "import sys, pathlib, truenext.store.embedded as m; m.EmbeddedStore(pathlib.Path(sys.argv[1])).close()"
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, env={**os.environ, "LMDB_DEFAULT_LIB_VERSION": "1"}, check=True)
    meta_page = (tmp_path / "lmdb/data.mdb").read_bytes()[16:24]
    assert struct.unpack("=II", meta_page) == (0xBEEFC0DE, 1)


def test_a_page_of_a_closed_store_is_a_store_error(embedded_disk: Disk) -> None:
    embedded_disk.store.close()
    with pytest.raises(StoreError, match="cannot read the store"):
        embedded_disk.store.read_page(LANE, 0, 1)


# Durability


def test_journal_writes_are_synced_by_the_write_itself(embedded_disk: Disk) -> None:
    """A killed process loses nothing either way; only a power cut would show a missing sync."""
    embedded_disk.apply(puts=put(1))
    store = embedded_disk.store
    assert isinstance(store, EmbeddedStore)
    assert store._journal._files
    for file in store._journal._files.values():
        assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DSYNC


def test_the_checkpoint_syncs_every_transaction(embedded_disk: Disk) -> None:
    store = embedded_disk.store
    assert isinstance(store, EmbeddedStore)
    flags = store._checkpoint._env.flags()
    assert flags["sync"]
    assert flags["metasync"]
    assert not flags["writemap"]


def test_a_segment_is_allocated_and_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def record_sync(file: int) -> None:
        events.append("sync " + Path(f"/proc/self/fd/{file}").readlink().name)
        fsync(file)

    def record_rename(path: Path, to: Path) -> Path:
        events.append(f"{path.name} becomes {to.name}")
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    (tmp_path / "j").mkdir()
    one = Journal(tmp_path / "j", salt=1, segment_bytes=1000)
    assert list(one.replay(CheckpointPosition(0, 0))) == []
    one.start_segment(10)
    assert events == ["sync new", "new becomes 0000000000000001.journal", "sync j"]
    assert (tmp_path / "j/0000000000000001.journal").read_bytes() == bytes(1000)
    one.close()


KILLED = """
import sys
from pathlib import Path
from truenext.model.batch import Batch
from truenext.model.record import lane_key, message_key
from truenext.store.embedded import EmbeddedStore

store = EmbeddedStore(Path(sys.argv[1]), segment_bytes=int(sys.argv[2]), segments_max=2)
store.recover()
lane = lane_key(1, 5)
number = 0
while True:
    number += 1
    batch = Batch(number)
    batch.clean_stop = False
    batch.puts = {message_key(lane, number): bytes(number)}
    batch.transient_puts = {message_key(lane, 1000000 + number): b""}
    batch.sequence_limit = number + 1
    store.apply(batch)
    print(number, flush=True)
"""


@pytest.mark.parametrize("segment_bytes", [500, 1 << 20])
@pytest.mark.parametrize("least", [1, 30, 200])
def test_applied_batches_survive_kill_9(tmp_path: Path, segment_bytes: int, least: int) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(segment_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < least:
            pass
        process.send_signal(signal.SIGKILL)
        applied = [least, *map(int, process.stdout.read().split())][-1]
    store = EmbeddedStore(tmp_path)
    recovered = store.recover()
    messages = store.read_page(LANE, 0, 10_000).messages
    store.close()
    # The batch under way at the kill may be there as well, but only as a whole.
    assert applied <= len(messages) <= applied + 1
    assert [sequence_of(m.key) for m in messages] == list(range(1, len(messages) + 1))
    assert [len(m.record) for m in messages] == list(range(1, len(messages) + 1))
    assert recovered.counts == {LANE: len(messages)}
    assert recovered.sequence_limit == len(messages) + 1
    assert not recovered.clean_stop


def test_a_new_store_that_a_crash_left_half_made_is_made_anew(tmp_path: Path) -> None:
    """LMDB refuses a file that was cut short."""
    (tmp_path / "lmdb").mkdir()
    (tmp_path / "lmdb/new").write_bytes(bytes(5000))
    disk = Disk("embedded", tmp_path)
    disk.apply(puts=put(1))
    assert disk.crash().counts == {LANE: 1}
    assert {path.name for path in (tmp_path / "lmdb").iterdir()} == {"data.mdb", "lock.mdb"}
    disk.store.close()


def test_the_last_batch_is_written_again_when_the_store_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write may have failed, or have been under way at a kill: the batch is visible, but not durable."""
    disk = Disk("embedded", tmp_path)
    disk.apply(puts=put(1))
    disk.apply(puts=put(2))
    disk.store.close()
    (path,) = journal_files(tmp_path)
    start, end = frames(tmp_path)[-1]
    written = []

    def note(file: int, content: bytes, offset: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DSYNC:
            written.append((bytes(content), offset))
        return pwrite(file, content, offset)

    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", note)
    disk.open()
    assert written == [(path.read_bytes()[start:end], start)]
    disk.store.close()


# The journal's segments


def test_consumed_messages_never_reach_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: object, **__: object) -> None:
        raise AssertionError("a message was moved")

    monkeypatch.setattr(Checkpoint, "put_messages", unexpected)
    store = EmbeddedStore(tmp_path, segment_bytes=200)
    store.recover()
    for n in range(1, 200):
        batch = Batch(n)
        batch.puts = put(n + 1)
        batch.removes = [key(n)] if n > 1 else []
        store.apply(batch)
    until(lambda: len(journal_files(tmp_path)) <= 2)
    assert sequences(store) == [200]
    store.close()


def test_segments_are_used_again_and_few_are_kept(tmp_path: Path) -> None:
    disk = Disk("checkpointing", tmp_path)
    for n in range(1, 300):
        disk.apply(puts=put(n), removes=[key(n - 1)] if n > 1 else [])
    until(lambda: len(journal_files(tmp_path)) <= 2)
    assert len(list((tmp_path / "journal").iterdir())) <= 2 + journal.SPARES_MAX
    assert journal_files(tmp_path)[-1].name > "0000000000000020"
    disk.store.close()


def test_old_message_pins_no_segment(tmp_path: Path) -> None:
    disk = Disk("checkpointing", tmp_path)
    disk.apply(puts=put(1))
    for n in range(2, 100):
        disk.apply(puts=put(n), removes=[key(n - 1)] if n > 2 else [])
    until(lambda: len(journal_files(tmp_path)) <= 2)
    assert sequences(disk.store) == [1, 99]
    disk.crash()
    assert sequences(disk.store) == [1, 99]
    disk.store.close()


def test_no_mark_outlives_its_message_in_the_checkpoint(tmp_path: Path) -> None:
    disk = Disk("checkpointing", tmp_path)
    disk.apply(puts=put(*range(1, 10)), marks={key(3): (1, 1)})
    for n in range(10, 40):
        # Marked while it is moved or after, and gone at once or later.
        disk.apply(puts=put(n), marks={key(n): (1, n), key(n - 9): (2, n)})
        disk.apply(removes=[key(n - 9)], unmarks=[key(n - 9)])
    disk.apply(removes=[key(n) for n in range(31, 40)], unmarks=[key(n) for n in range(31, 40)])
    disk.apply(puts=put(100))
    disk.apply(puts=put(101))
    until(lambda: len(journal_files(tmp_path)) == 1)
    disk.store.close()
    with lmdb.open(str(tmp_path / "lmdb"), max_dbs=DATABASES_MAX) as env, env.begin() as txn:
        assert [*txn.cursor(env.open_db(b"marks", txn=txn)).iternext(values=False)] == []
        assert {*txn.cursor(env.open_db(b"messages", txn=txn)).iternext(values=False)} <= {key(100)}


def test_a_batch_larger_than_a_segment_gets_one_of_its_own_size(tmp_path: Path) -> None:
    disk = Disk("checkpointing", tmp_path)
    disk.apply(puts={key(1): bytes(50_000)})
    disk.apply(puts=put(2))
    disk.crash()
    assert [len(m.record) for m in disk.store.read_page(LANE, 0, 9).messages] == [50_000, 8]
    for n in range(3, 30):
        disk.apply(puts=put(n))
    until(lambda: all(size < 1000 for size in sizes(tmp_path / "journal")))
    disk.store.close()


def test_batches_wait_when_the_journal_is_too_far_ahead_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_continue = threading.Event()
    finish = Checkpoint.finish_checkpoint

    def held(self: Checkpoint, *rest: Any) -> None:
        assert may_continue.wait(10)
        finish(self, *rest)

    monkeypatch.setattr(Checkpoint, "finish_checkpoint", held)
    disk = Disk("checkpointing", tmp_path)

    def apply_many() -> None:
        for n in range(1, 101):
            disk.apply(puts=put(n))

    thread = threading.Thread(target=apply_many)
    thread.start()
    until(lambda: len(journal_files(tmp_path)) == 1 + LAG_SEGMENTS_MAX)
    thread.join(0.05)
    assert thread.is_alive()
    assert len(journal_files(tmp_path)) == 1 + LAG_SEGMENTS_MAX
    assert len(sequences(disk.store)) == disk.number - 1
    may_continue.set()
    thread.join()
    assert sequences(disk.store) == list(range(1, 101))
    disk.store.close()


def test_a_crash_drops_transients_for_good_although_the_journal_still_has_them(embedded_disk: Disk) -> None:
    embedded_disk.apply(clean_stop=False)
    embedded_disk.apply(puts=put(1), transient_puts=put(2))
    embedded_disk.crash()
    embedded_disk.apply(transient_puts=put(3))
    assert embedded_disk.stop().counts == {LANE: 2}
    assert sequences(embedded_disk.store) == [1, 3]


def test_checkpointing_waits_for_the_first_batch_which_shows_that_the_history_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the history in what moves would be nowhere: `recover` has only just returned it."""
    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "_is_checkpoint_due", lambda _: False)
        disk = Disk("checkpointing", tmp_path)
        disk.apply(puts=put(1), history=b"first")
        disk.apply(puts=put(*range(2, 20)))
        disk.store.close()
    store = embedded("checkpointing", tmp_path)
    synced: list[int] = []
    store.sync_history = lambda: synced.append(1)
    assert store.recover().history == [b"first"]
    assert len(journal_files(tmp_path)) == 2
    assert not store._checkpointer._is_checkpoint_due()
    assert not synced
    store.apply(Batch(1))
    until(lambda: len(journal_files(tmp_path)) == 1)
    assert synced
    store.close()


# Crashes in the middle of a move


def or_block(action: Callable[..., None]) -> Callable[..., None]:
    def call(checkpointer: Checkpointer, *args: int) -> None:
        try:
            action(checkpointer, *args)
        except Stopped:
            with checkpointer._changed:
                checkpointer._changed.wait_for(lambda: checkpointer._is_closing)

    return call


class Stopped(Exception):
    pass


@pytest.mark.alternates("disks that fail")
@mock.patch.object(Checkpointer, "_checkpoint_segment", or_block(Checkpointer._checkpoint_segment))
@mock.patch.object(Checkpointer, "_clean_up", or_block(Checkpointer._clean_up))
@mock.patch.object(Checkpointer, "_is_lagging", lambda _: False)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_move_may_be_interrupted_anywhere(data: st.DataObject) -> None:
    """The crash comes before or after any of the checkpoint's transactions, between two random histories."""
    folder = Path(tempfile.mkdtemp(dir=quick_folder()))
    model = Model()
    disk = Disk("checkpointing", folder / "data")
    try:
        for _ in range(data.draw(st.integers(1, 4), label="crashes")):
            store = disk.store
            assert isinstance(store, EmbeddedStore)
            interrupt(store, data.draw(st.integers(0, 8), label="calls before the crash"), data)
            for _ in range(data.draw(st.integers(1, 5), label="batches")):
                draw_batch(data, disk, model)
                model.check(disk.store, limit=3)
            recovered = disk.crash()
            check_restart(data, disk, model, recovered)
    finally:
        disk.store.close()
        shutil.rmtree(folder)


def interrupt(store: EmbeddedStore, calls: int, data: st.DataObject) -> None:
    """The checkpoint stands still from the given call on; the journal goes on, as far as it may."""
    is_after = data.draw(st.booleans(), label="after the call")
    count = 0

    def counted(action: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count > calls and not is_after:
                raise Stopped
            result = action(*args, **kwargs)
            if count > calls:
                raise Stopped
            return result

        return call

    checkpoint: Any = store._checkpoint
    for name in ("delete_messages", "put_messages", "finish_checkpoint", "delete_old_transients"):
        setattr(checkpoint, name, counted(getattr(checkpoint, name)))


# Damage


def frames(folder: Path) -> list[tuple[int, int]]:
    """Return the start and the end of each frame of the only segment."""
    (path,) = journal_files(folder)
    content = path.read_bytes()
    found = []
    at = 0
    while size := struct.unpack_from("<I", content, at + 4)[0]:
        found.append((at, at + 24 + size))
        at += 24 + size
    return found


def test_a_torn_last_frame_is_cut_wherever_it_tears(tmp_path: Path) -> None:
    disk = Disk("embedded", tmp_path / "data")
    disk.apply(puts=put(1), queues={1: "orders"})
    disk.apply(puts=put(2))
    disk.store.close()
    start, end = frames(tmp_path / "data")[-1]
    (path,) = journal_files(tmp_path / "data")
    whole = path.read_bytes()
    for cut in range(start, end):
        for rest in (bytes(end - cut), b"\xff" * (end - cut))[cut % 2 :][:1]:
            torn = whole[:cut] + rest + whole[end:]
            if torn == whole:
                continue
            path.write_bytes(torn)
            disk.open()
            assert sequences(disk.store) == [1]
            assert path.read_bytes()[start:].strip(b"\0") == b""
            disk.apply(puts=put(3))
            disk.crash()
            assert sequences(disk.store) == [1, 3]
            disk.store.close()


def test_a_damaged_frame_with_a_good_one_behind_it_stops_the_broker(tmp_path: Path) -> None:
    disk = Disk("embedded", tmp_path / "data")
    for n in (1, 2, 3):
        disk.apply(puts=put(n))
    disk.store.close()
    (path,) = journal_files(tmp_path / "data")
    whole = path.read_bytes()
    start, end = frames(tmp_path / "data")[1]
    for at in range(start, end):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(StoreError, match=r"journal in .* is damaged: frame 2 at byte .* is unreadable"):
            disk.open()
    path.write_bytes(whole)
    disk.open()
    assert sequences(disk.store) == [1, 2, 3]
    disk.store.close()


def test_a_missing_or_emptied_segment_stops_the_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpointer, "_is_checkpoint_due", lambda _: False)
    monkeypatch.setattr(Checkpointer, "_is_lagging", lambda _: False)
    disk = Disk("checkpointing", tmp_path)
    for n in range(1, 10):
        disk.apply(puts=put(n))
    disk.store.close()
    _, second, *_ = journal_files(tmp_path)
    whole = second.read_bytes()
    second.write_bytes(bytes(len(whole)))
    with pytest.raises(StoreError, match=r"is damaged: frame \d+ at byte 0 of segment 0*3 is unreadable"):
        disk.open()
    second.unlink()
    with pytest.raises(StoreError, match=r"is damaged: segment 0*2 is missing"):
        disk.open()
    second.write_bytes(whole)
    disk.open()
    assert sequences(disk.store) == list(range(1, 10))
    disk.store.close()


def test_a_checkpoint_without_its_journal_stops_the_broker(tmp_path: Path) -> None:
    """Restoring only one of the two would otherwise bring back an old state of the store."""
    disk = Disk("checkpointing", tmp_path)
    for n in range(1, 10):
        disk.apply(puts=put(n))
    until(lambda: len(journal_files(tmp_path)) == 1)
    disk.store.close()
    (newest,) = journal_files(tmp_path)
    newest.rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=f"is damaged: segment {newest.stem} is missing"):
        disk.open()
    (tmp_path / "elsewhere").rename(newest)
    disk.open()
    assert sequences(disk.store) == list(range(1, 10))
    disk.store.close()


def test_a_journal_without_its_checkpoint_stops_the_broker_and_is_left_alone(tmp_path: Path) -> None:
    disk = Disk("embedded", tmp_path)
    disk.apply(puts=put(1))
    disk.store.close()
    (tmp_path / "lmdb/data.mdb").rename(tmp_path / "elsewhere")
    for _ in range(2):
        with pytest.raises(StoreError, match=r"lmdb/data\.mdb is missing, but the journal exists"):
            disk.open()
    (tmp_path / "elsewhere").rename(tmp_path / "lmdb/data.mdb")
    disk.open()
    assert sequences(disk.store) == [1]
    disk.store.close()


def test_a_frame_of_another_segment_or_another_store_never_passes(tmp_path: Path) -> None:
    """Recycled segments hold such frames; so may the body of a message by an attacker who knows the format."""
    disk = Disk("embedded", tmp_path / "data")
    other = Disk("embedded", tmp_path / "other")
    for one in (disk, other):
        one.apply(puts=put(1))
        one.apply(puts=put(2))
        one.store.close()
    start, end = frames(tmp_path / "other")[1]
    foreign = journal_files(tmp_path / "other")[0].read_bytes()[start:end]
    (path,) = journal_files(tmp_path / "data")
    mine = path.read_bytes()
    for forged in (foreign, mine[start : start + 8] + struct.pack("<Q", 2) + mine[start + 16 : end]):
        path.write_bytes(mine[:start] + forged + bytes(len(mine) - start - len(forged)))
        disk.open()
        assert sequences(disk.store) == [1]
        disk.store.close()


def test_a_body_full_of_suspects_does_not_delay_a_start(tmp_path: Path) -> None:
    disk = Disk("embedded", tmp_path / "data")
    disk.apply(puts=put(1))
    disk.store.close()
    (path,) = journal_files(tmp_path / "data")
    whole = path.read_bytes()
    end = frames(tmp_path / "data")[-1][1]
    suspect = struct.pack("<IIQQ", 0, 500_000, 1, 3)
    path.write_bytes(whole[:end] + suspect * ((len(whole) - end) // 24) + bytes((len(whole) - end) % 24))
    disk.open()
    assert sequences(disk.store) == [1]
    disk.store.close()


SMALL_VALUES = ["meta", "counts", "transient counts", "queues", "producers", "marks", "transient marks", "timers"]


@pytest.mark.parametrize("database", SMALL_VALUES)
def test_a_flipped_bit_in_a_small_value_is_never_believed(tmp_path: Path, database: str) -> None:
    """Nor a value that stands under another key, as after a flipped bit in that."""
    disk = Disk("checkpointing", tmp_path)
    disk.apply(
        queues={1: "orders"},
        producers={"p": ProducerState(7, 8, is_used_once=True)},
        puts=put(1),
        transient_puts=put(2),
        marks={key(1): (1, 2), key(2): (3, 4)},
        timers=timers(7),
        sequence_limit=100,
    )
    disk.apply(puts=put(3, lane=NEXT_QUEUE))
    disk.apply(clean_stop=True)
    until(lambda: len(journal_files(tmp_path)) == 1)
    disk.store.close()
    path = tmp_path / "lmdb"
    whole = (path / "data.mdb").read_bytes()
    with lmdb.open(str(path), max_dbs=DATABASES_MAX, lock=False) as env, env.begin() as txn:
        values = dict(txn.cursor(env.open_db(database.encode(), txn=txn)))
    assert len(values) == {"meta": 12}.get(database, 1)

    def expect_error(name: bytes, damaged: bytes | None) -> None:
        """If this stands under the name; None is nothing."""
        (path / "data.mdb").write_bytes(whole)
        with lmdb.open(str(path), max_dbs=DATABASES_MAX) as env, env.begin(write=True) as txn:
            db = env.open_db(database.encode(), txn=txn)
            if damaged is None:
                txn.delete(name, db=db)
            else:
                txn.put(name, damaged, db=db)
        shown = name.decode() if database == "meta" else name.hex()
        hint = f"`truenext store check {tmp_path}` .*`truenext store export {tmp_path} NEW`"
        with pytest.raises(StoreError, match=f"damaged: .*{shown} .*(in {database}|is missing, but its mark).*{hint}"):
            disk.open()
            disk.store.read_page(LANE, 0, 10)
            disk.store.read_timers(b"", 10)
        disk.store.close()

    for name, value in values.items():
        for at in range(len(value)):
            expect_error(name, value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :])
        expect_error(name, b"cut")
        if database == "meta":
            expect_error(name, None)
        else:
            # For a mark, behind the one message.
            expect_error(name[:-1] + bytes([3 if database.endswith("marks") else name[-1] ^ 1]), value)
    (path / "data.mdb").write_bytes(whole)
    disk.open()
    assert sequences(disk.store) == [1, 2]
    disk.store.close()


# A disk that takes no more


def test_a_full_disk_is_named_and_nothing_of_the_batch_is_there(
    embedded_disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded_disk.apply(puts=put(1))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StoreError, match="the disk is full; free disk space"):
            embedded_disk.apply(puts=put(2), removes=[key(1)])
    with pytest.raises(StoreError, match="refused"):
        embedded_disk.apply(puts=put(3))
    assert sequences(embedded_disk.store) == [1]
    assert embedded_disk.crash().counts == {LANE: 1}


def test_a_disk_that_takes_half_a_segment_fails_the_batch_as_a_whole(tmp_path: Path) -> None:
    disk = Disk("checkpointing", tmp_path / "data")
    disk.apply(puts=put(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    try:
        with pytest.raises(StoreError, match=r"cannot write to the store in .*File too large; check the disk"):
            disk.apply(puts={key(n): bytes(10_000) for n in range(2, 200)}, removes=[key(1)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(StoreError, match="refused"):
        disk.store.apply(Batch(3))
    # A spare may just be made, which is small enough.
    until(lambda: not (tmp_path / "data/journal/new").exists())
    assert disk.crash().counts == {LANE: 1}
    assert sequences(disk.store) == [1]
    disk.store.close()


def test_a_checkpoint_that_cannot_be_written_stops_the_broker(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path, map_size=1 << 18, segment_bytes=100_000, segments_max=1)
    store.recover()
    applied = 0
    with pytest.raises(StoreError, match="as large as its map_size allows") as failure:
        for n in range(1, 1000):
            batch = Batch(n)
            batch.puts = {key(n): bytes(10_000)}
            store.apply(batch)
            applied = n
    assert isinstance(failure.value.__cause__, lmdb.MapFullError)
    assert 10 < applied < 200
    store.close()
    store = EmbeddedStore(tmp_path)
    assert store.recover().counts == {LANE: applied}
    assert sequences(store, limit=10_000) == list(range(1, applied + 1))
    store.close()


# Pages beside batches


def test_a_page_read_in_the_middle_of_a_write_shows_nothing_of_it(
    embedded_disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_done, may_continue = threading.Event(), threading.Event()
    append = Journal.append

    def halting(self: Journal, parts: list[bytes], size: int, digest: bytes) -> tuple[int, int]:
        position = append(self, parts, size, digest)
        half_done.set()
        assert may_continue.wait(10)
        return position

    embedded_disk.apply(puts=put(1, 2), marks={key(2): (1, 1)})
    batch = embedded_disk.batch(removes=[key(1)], puts=put(3, 4, 5, 6), marks={key(2): (2, 2)})
    monkeypatch.setattr(Journal, "append", halting)
    thread = threading.Thread(target=embedded_disk.store.apply, args=(batch,))
    thread.start()
    assert half_done.wait(10)
    page = embedded_disk.store.read_page(LANE, 0, 10)
    may_continue.set()
    thread.join()
    assert [(sequence_of(m.key), m.mark.attempts) for m in page.messages] == [(1, 0), (2, 1)]
    assert page.as_of == 1
    page = embedded_disk.store.read_page(LANE, 0, 10)
    assert [(sequence_of(m.key), m.mark.attempts) for m in page.messages] == [(2, 2), (3, 0), (4, 0), (5, 0), (6, 0)]
    assert page.as_of == 2


@pytest.mark.parametrize("call", ["delete_messages", "put_messages", "finish_checkpoint"])
def test_a_page_read_in_the_middle_of_a_move_shows_every_message_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    moving, may_continue = threading.Event(), threading.Event()
    action: Callable[..., None] = getattr(Checkpoint, call)

    def held(self: Checkpoint, *args: Any, **kwargs: Any) -> None:
        action(self, *args, **kwargs)
        moving.set()
        assert may_continue.wait(10)

    disk = Disk("checkpointing", tmp_path)
    disk.apply(puts=put(1, 2, 3, 4), marks={key(2): (1, 1)})
    for n in range(5, 12):
        disk.apply(puts=put(n))
    until(lambda: len(journal_files(tmp_path)) == 1)
    monkeypatch.setattr(Checkpoint, call, held)
    disk.apply(removes=[key(1), key(9)], marks={key(3): (3, 3)})
    disk.apply(puts=put(*range(12, 20), lane=NEXT_QUEUE))
    disk.apply(puts=put(20))
    assert moving.wait(10)
    disk.apply(removes=[key(4), key(11)])
    messages = disk.store.read_page(LANE, 0, 100).messages
    may_continue.set()
    assert [(sequence_of(m.key), m.mark.attempts, m.record) for m in messages] == [
        (n, {2: 1, 3: 3}.get(n, 0), b"record %d" % n) for n in (2, 3, 5, 6, 7, 8, 10, 20)
    ]
    disk.store.close()


@pytest.mark.parametrize("lane", [LANE, OTHER_LANE])
def test_a_page_that_is_being_read_keeps_the_contents_that_go_or_move_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lane: bytes
) -> None:
    disk = Disk("memory", tmp_path)
    disk.store = store = EmbeddedStore(tmp_path, segment_bytes=2000, segments_max=1)
    store.recover()
    for n in (1, 2, 3):
        disk.apply(**share(n, key(n), key(n, OTHER_LANE)))
    (segment,) = journal_files(tmp_path)
    page = Checkpoint.page

    def late(self: Checkpoint, *args: Any) -> Any:
        """Settle all messages of the page before any of them is read."""
        disk.apply(removes=[key(2), key(2, OTHER_LANE)], dereferenced=[content_key(2)] * 2)
        disk.apply(puts={key(9, NEXT_QUEUE): bytes(2500)})
        disk.apply(puts={key(10, NEXT_QUEUE): bytes(2500)})
        until(lambda: not any(key.startswith(CONTENTS_LANE_KEY) for key, _ in store._overlay.messages()))
        assert segment in journal_files(tmp_path), "the page may need it"
        return page(self, *args)

    monkeypatch.setattr(Checkpoint, "page", late)
    found = disk.store.read_page(lane, 0, 100).messages
    assert [(sequence_of(m.key), m.content) for m in found] == [(n, b"content %d" % n) for n in (1, 2, 3)]
    monkeypatch.undo()
    found = disk.store.read_page(lane, 0, 100).messages
    assert [(sequence_of(m.key), m.content) for m in found] == [(n, b"content %d" % n) for n in (1, 3)]
    disk.store.close()


def test_content_shared_by_many_queues_is_written_once_and_its_space_is_reused(tmp_path: Path) -> None:
    """Through the journal, and through the checkpoint."""
    # C6.13
    disk = Disk("checkpointing", tmp_path)
    lanes = [lane_key(number, 5) for number in range(1, 101)]
    sizes = []
    for n in range(1, 9):
        disk.apply(**share(n, *(key(n, lane) for lane in lanes), record=bytes(1 << 20)))
        disk.apply(puts={key(3 * n, OTHER_LANE): bytes(400)})
        until(lambda: len(journal_files(tmp_path)) == 1)
        for part, half in enumerate((lanes[:50], lanes[50:]), 1):
            disk.apply(removes=[key(n, lane) for lane in half], dereferenced=[content_key(n)] * len(half))
            disk.apply(puts={key(3 * n + part, OTHER_LANE): bytes(400)})
        until(lambda: len(journal_files(tmp_path)) == 1)
        sizes.append((tmp_path / "lmdb" / "data.mdb").stat().st_size)
    assert sizes[0] < 3 << 20
    assert sizes[-1] < 4 << 20
    disk.store.close()


def test_a_message_whose_content_is_missing_comes_without_it(tmp_path: Path) -> None:
    disk = Disk("checkpointing", tmp_path)
    disk.apply(puts={key(1): encode_reference(key(1), 1)})
    (message,) = disk.store.read_page(LANE, 0, 10).messages
    assert message.content == b""
    with pytest.raises(DamagedRecord, match="its content, number 1, is missing"):
        decode_record(message.key, message.record, message.content)
    disk.store.close()


def test_store_opened_with_other_sizes_reads_the_stored_messages(tmp_path: Path) -> None:
    disk = Disk("checkpointing", tmp_path)
    for n in range(1, 30):
        disk.apply(puts=put(n))
    disk.store.close()
    store = embedded("embedded", tmp_path)
    assert store.recover().counts == {LANE: 29}
    assert sequences(store) == list(range(1, 30))
    store.close()


@pytest.mark.parametrize("bit", range(8))
def test_message_read_by_its_key_is_found_or_the_damage_next_to_it_is(tmp_path: Path, bit: int) -> None:
    """A search in keys that are out of order finds nothing, and the caller would believe it."""
    keys = [key(n) for n in range(1, 41)]
    disk = Disk("checkpointing", tmp_path)
    disk.apply(puts={one: b"record %3d" % sequence_of(one) for one in keys})
    disk.apply(puts=put(*range(100, 130)))
    until(lambda: len(journal_files(tmp_path)) == 1)
    assert [each.key for each in disk.store.read_messages([*keys, key(77)]).messages] == keys
    disk.store.close()
    path = tmp_path / "lmdb" / "data.mdb"
    written = key(20) + b"record  20"
    damaged = key(20)[:-1] + bytes([20 ^ 1 << bit]) + b"record  20"
    path.write_bytes(path.read_bytes().replace(written, damaged))
    store = embedded("checkpointing", tmp_path)
    try:
        store.recover()
        for one in keys:
            try:
                there = [each.key for each in store.read_messages([one]).messages]
            except StoreError as error:
                assert "is damaged" in str(error)
                continue
            assert (one, there) == (one, [one])
        with pytest.raises(StoreError, match="is damaged"):
            store.read_messages(keys)
    finally:
        store.close()
