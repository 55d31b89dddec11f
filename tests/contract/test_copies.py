"""Tests of data folders that are copies of a log: which folder goes on, which is set aside and made anew."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contract.crashing import chunk
from tests.contract.disk import LANE, Disk, key, put, sequences
from tests.contract.fake_log import FakeLog, FakeSnapshot, LogRows
from truenext.errors import ConfigurationError, StoreError, StoreFencedError, StoreInUseError
from truenext.store import embedded
from truenext.store.check import check
from truenext.store.checkpoint import Checkpoint
from truenext.store.checkpoint_format import COPY_FORMAT, FORMAT, OLD_COPY_FORMAT
from truenext.store.copying import become_copy, copy_position, detach, first_position
from truenext.store.embedded import BEGUN_BYTES_MAX, BEGUN_CHANGES_MAX, EmbeddedStore
from truenext.store.log import BEAT_S, EMPTY_PAYLOAD, KeptMessage, LogPosition


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Disk]:
    with new_copy(tmp_path) as disk:
        yield disk


@contextmanager
def new_copy(folder: Path) -> Iterator[Disk]:
    disk = Disk("copy", folder / "data")
    disk.apply(puts=put(1, 2), queues={1: "orders"})
    yield disk
    disk.store.close()


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("lock", "lock.mdb")
    }


def kept_aside(folder: Path) -> list[Path]:
    return list(folder.glob("aside-*"))


def reopen(copy: Disk) -> None:
    copy.store.close()
    copy.open()


def test_folder_that_is_too_old_is_made_anew(copy: Disk, tmp_path: Path) -> None:
    copy.store.close()
    shutil.copytree(copy.folder, tmp_path / "old")
    copy.open()
    copy.apply(puts=put(3), removes=[key(1)])
    copy.log_rows.compact()
    copy.store.close()
    shutil.rmtree(copy.folder)
    (tmp_path / "old").rename(copy.folder)
    copy.open()
    assert sequences(copy.store) == [2, 3]
    (aside,) = kept_aside(copy.folder)
    assert (aside / "lmdb/data.mdb").exists()


def take_over(rows: LogRows) -> None:
    FakeLog(rows).take_over(LogPosition(rows.last_number, rows.digest(rows.last_number)))


def replace_last_row(copy: Disk) -> None:
    """Let the database lose a row, and another broker append one since."""
    copy.log_rows.rows.pop()
    take_over(copy.log_rows)


def test_folder_with_another_last_row_is_made_anew(copy: Disk) -> None:
    replace_last_row(copy)
    reopen(copy)
    assert sequences(copy.store) == []
    assert len(kept_aside(copy.folder)) == 1


@pytest.mark.parametrize(("common", "since"), [(2, 5), (3, 5), (5, 5), (3, 1)])
def test_folder_that_went_another_way_says_which_rows_it_alone_has(
    copy: Disk, common: int, since: int, caplog: pytest.LogCaptureFixture
) -> None:
    """C28.17"""
    for sequence in range(3, 7):
        copy.apply(puts=put(sequence))
    copy.store.close()
    del copy.log_rows.rows[common:]
    for _ in range(since):
        take_over(copy.log_rows)
    copy.open()
    (record,) = [record for record in caplog.records if hasattr(record, "reason")]
    assert record.reason == (f"it went another way than the database, and it alone has the rows {common + 1} to 6")


def test_copy_of_the_format_without_takeovers_is_opened(copy: Disk) -> None:
    copy.store.close()
    set_format(copy.folder, OLD_COPY_FORMAT)
    copy.open()
    assert sequences(copy.store) == [1, 2]
    copy.store.close()
    set_format(copy.folder, OLD_COPY_FORMAT)
    assert check(copy.folder, lambda _: None, lambda *_: None).is_copy
    set_format(copy.folder, COPY_FORMAT + 1)
    with pytest.raises(StoreError, match=f"has format {COPY_FORMAT + 1}; this truenext reads"):
        copy.open()


def set_format(folder: Path, number: int) -> None:
    checkpoint = Checkpoint(folder / "lmdb", is_copy=True)
    with closing(checkpoint), checkpoint._env.begin(write=True) as txn:
        checkpoint._meta.put(txn, b"format", FORMAT.pack(number))


def test_folder_ahead_of_the_log_follows_from_its_own_end(copy: Disk) -> None:
    """The log puts its rows back when it is taken over."""
    lost = copy.log_rows.rows.pop()
    copy.store.close()
    log = FakeLog(copy.log_rows)
    positions: list[int] = []

    def put_back(position: LogPosition) -> bool:
        positions.append(position.number)
        assert list(log.frames.frames_after(1)) == [lost[0]]
        copy.log_rows.rows.append(lost)
        return FakeLog.take_over(log, position)

    log.take_over = put_back  # type: ignore[method-assign]
    store = EmbeddedStore(copy.folder, log=log)
    store.recover()
    assert positions == [2]
    assert sequences(store) == [1, 2]
    assert not kept_aside(copy.folder)
    store.close()


def test_broker_that_stands_by_follows_the_rows_of_the_active_one(copy: Disk, tmp_path: Path) -> None:
    log = FakeLog(copy.log_rows)
    standby = EmbeddedStore(tmp_path / "standby", log=log)
    followed: list[bytes] = []
    flushed: list[int] = []
    standby.follow_history = followed.append
    standby.flush_history = lambda: flushed.append(len(followed))

    def look() -> bool:
        copy.apply(puts=put(copy.number + 3), history=chunk(copy.number))
        return True

    log.looks = [look, look, look]
    standby.recover()
    assert sequences(standby) == [1, 2, 4, 5, 6]
    assert len(followed) == 3
    assert flushed == [1, 2, 3]
    with pytest.raises(StoreFencedError):
        copy.apply(puts=put(9))
    standby.close()


def test_takeover_of_a_row_that_is_no_longer_the_last_goes_on_standing_by(copy: Disk, tmp_path: Path) -> None:
    log = FakeLog(copy.log_rows)
    standby = EmbeddedStore(tmp_path / "standby", log=log)
    found = iter([False, True])

    def take_over_late(position: LogPosition) -> bool:
        if next(found):
            return FakeLog.take_over(log, position)
        copy.apply(puts=put(3))
        return False

    log.take_over = take_over_late  # type: ignore[method-assign]
    standby.recover()
    assert sequences(standby) == [1, 2, 3]
    standby.close()


def test_too_old_content_keeps_all_histories_and_the_newest_messages(copy: Disk, tmp_path: Path) -> None:
    copy.store.close()
    shutil.copytree(copy.folder, tmp_path / "old")
    replaced = copy.folder / "aside-other"
    replaced.mkdir()
    for _ in range(3):
        copy.open()
        copy.apply(puts=put(copy.log_rows.last_number + 9))
        copy.log_rows.compact()
        copy.store.close()
        for name in ("lmdb", "journal"):
            shutil.rmtree(copy.folder / name)
            shutil.copytree(tmp_path / "old" / name, copy.folder / name)
        (copy.folder / "history").mkdir()
    copy.open()
    assert len(list(copy.folder.glob("aside-*/lmdb"))) == 1
    # They tell of what no other folder may have.
    assert len(list(copy.folder.glob("aside-*/history"))) == 3
    assert replaced.exists()


def test_copy_of_another_log_is_refused_and_left_alone(copy: Disk) -> None:
    own = copy.log_rows
    copy.store.close()
    before = files(copy.folder)
    copy.log_rows = LogRows()
    with pytest.raises(
        ConfigurationError, match=r"is a copy of another log .*: name the store and the schema of that log"
    ):
        copy.open()
    assert files(copy.folder) == before
    # No takeover row.
    assert copy.log_rows.rows == []
    copy.log_rows = own
    copy.open()
    assert sequences(copy.store) == [1, 2]


def test_folder_of_an_earlier_identity_is_made_anew(copy: Disk) -> None:
    """C28.13"""
    rows = copy.log_rows
    rows.earlier[rows.identity], rows.identity = rows.last_number, "89abcdef"
    reopen(copy)
    assert copy.store.recover().identity == "89abcdef"
    assert sequences(copy.store) == [1, 2]
    assert len(kept_aside(copy.folder)) == 1


def test_damaged_checkpoint_is_made_anew(copy: Disk) -> None:
    copy.store.close()
    path = copy.folder / "lmdb/data.mdb"
    path.write_bytes(b"x" * path.stat().st_size)
    copy.open()
    assert sequences(copy.store) == [1, 2]
    assert len(kept_aside(copy.folder)) == 1


@pytest.mark.parametrize("content", [b"", b"x" * (1 << 20)], ids=["empty", "damaged"])
def test_damaged_journal_is_fetched_from_the_log(copy: Disk, content: bytes) -> None:
    copy.store.close()
    (segment,) = (copy.folder / "journal").glob("*.journal")
    segment.write_bytes(content)
    copy.open()
    assert sequences(copy.store) == [1, 2]
    copy.apply(puts=put(3))
    reopen(copy)
    assert sequences(copy.store) == [1, 2, 3]
    assert not kept_aside(copy.folder)


@pytest.mark.parametrize("moved", range(3))
def test_interrupted_move_of_an_old_content_is_finished_by_the_next_start(
    copy: Disk, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    (copy.folder / "history").mkdir()
    replace_last_row(copy)
    copy.store.close()
    rename = Path.rename
    names: list[str] = []

    def interrupted(path: Path, target: Path) -> Path:
        if path.parent == copy.folder:
            if len(names) == moved:
                raise OSError("killed")
            names.append(path.name)
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(StoreError, match="killed"):
            copy.open()
    copy.open()
    assert sequences(copy.store) == []
    # A history of other rows would go on with wrong numbers.
    assert not (copy.folder / "history").exists()


def test_ordinary_folder_is_no_copy_and_is_left_alone(tmp_path: Path) -> None:
    disk = Disk("embedded", tmp_path / "data")
    disk.apply(puts=put(1))
    disk.store.close()
    before = files(disk.folder)
    with pytest.raises(ConfigurationError, match="has messages of its own"):
        EmbeddedStore(disk.folder, log=FakeLog(LogRows()))
    assert files(disk.folder) == before


def test_copy_without_its_log_is_refused_and_left_alone(copy: Disk) -> None:
    copy.store.close()
    before = files(copy.folder)
    with pytest.raises(ConfigurationError, match="is a copy of a log in a database"):
        EmbeddedStore(copy.folder)
    assert files(copy.folder) == before


def test_interrupted_seed_leaves_a_folder_that_is_made_again(copy: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    copy.apply()
    copy.log_rows.compact()
    copy.store.close()
    shutil.rmtree(copy.folder)
    messages = FakeSnapshot.messages

    def interrupted(snapshot: FakeSnapshot) -> Iterator[KeptMessage]:
        yield next(messages(snapshot))
        raise StoreError("the database is gone")

    with monkeypatch.context() as patch:
        patch.setattr(FakeSnapshot, "messages", interrupted)
        with pytest.raises(StoreError, match="the database is gone"):
            copy.open()
    assert (copy.folder / "seed").exists()
    assert not (copy.folder / "lmdb").exists()
    copy.open()
    assert sequences(copy.store) == [1, 2]
    assert not (copy.folder / "seed").exists()


def test_batch_that_the_log_did_not_get_is_not_in_the_folder(copy: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """C27.1"""

    def fail(*_: object) -> bool:
        raise StoreError("the database is gone")

    monkeypatch.setattr(FakeLog, "append", fail)
    with pytest.raises(StoreError, match="the database is gone"):
        copy.store.apply(copy.batch(puts=put(3)))
    copy.store.close()
    assert copy_position(copy.folder)[1].number == copy.log_rows.last_number


def test_folder_made_from_the_log_has_attempts_and_causes(copy: Disk) -> None:
    """C27.3"""
    copy.apply(marks={key(1): (2, 1), key(2): (3, 0)}, causes={key(2): ("first", "last")})
    copy.apply(puts=put(3))
    copy.log_rows.compact()
    copy.check_new_copy()


def test_row_that_may_stand_here_only_is_confirmed_with_an_empty_row_behind_it(copy: Disk) -> None:
    copy.log_rows.doubts = 2
    copy.apply(puts=put(3))
    assert [payload == EMPTY_PAYLOAD for payload, _, _ in copy.log_rows.rows[-3:]] == [False, True, True]
    assert sequences(copy.store) == [1, 2, 3]
    reopen(copy)
    assert sequences(copy.store) == [1, 2, 3]


def test_row_in_doubt_that_fills_a_segment_stays_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = FakeLog.append

    def slow(log: FakeLog, number: int, before: bytes, digest: bytes, parts: list[bytes]) -> bool:
        # Meanwhile the checkpointer frees what it may.
        time.sleep(0.02)
        return append(log, number, before, digest, parts)

    monkeypatch.setattr(FakeLog, "append", slow)
    disk = Disk("checkpointing copy", tmp_path / "data")
    disk.log_rows.doubts = 2
    # The batch has a segment of its own, which has no space for the empty frames behind it.
    disk.apply(puts={key(1): b"x" * 5000})
    for sequence in (2, 3):
        disk.apply(puts=put(sequence))
    assert sequences(disk.store) == [1, 2, 3]
    reopen(disk)
    assert sequences(disk.store) == [1, 2, 3]
    disk.store.close()


def test_row_in_doubt_is_not_shown_before_the_row_behind_it(copy: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[int], int]] = []
    append = FakeLog.append

    def observed(log: FakeLog, number: int, before: bytes, digest: bytes, parts: list[bytes]) -> bool:
        page = copy.store.read_page(LANE, 0, 10)
        seen.append((sequences(copy.store), page.as_of))
        return append(log, number, before, digest, parts)

    monkeypatch.setattr(FakeLog, "append", observed)
    copy.log_rows.doubts = 1
    copy.apply(puts=put(3))
    # The row is begun and not confirmed, then it is found; then the row behind it is appended.
    assert seen == [([1, 2], 1)] * 3


def may_begin(copy: Disk, **changes: Any) -> bool:
    return copy.store.begin(copy.batch(**({"puts": put(3)} | changes))) is not None


def test_batch_that_may_have_to_wait_is_not_begun(copy: Disk) -> None:
    store = copy.store
    assert isinstance(store, EmbeddedStore)
    rows = copy.log_rows.rows[:]
    assert not may_begin(copy, size=BEGUN_BYTES_MAX + 1), "large"
    assert not may_begin(copy, puts=put(*range(3, BEGUN_CHANGES_MAX + 4))), "many changes"
    assert not may_begin(copy, puts={key(3): bytes(1 << 20)}), "another segment"
    assert not may_begin(copy, removes=[key(3)], puts={}), "perhaps in the checkpoint"
    assert not may_begin(copy, puts=put(1)), "to be refused"
    assert not may_begin(copy, dereferenced=[key(1)]), "a mark in the checkpoint"
    store._checkpointer.failure = StoreError("the disk is full")
    assert not may_begin(copy), "to be refused"
    store._checkpointer.failure = None
    assert copy.log_rows.rows == rows
    assert may_begin(copy)
    reopen(copy)
    copy.store.close()
    assert not may_begin(copy, puts=put(4)), "closed"
    assert len(copy.log_rows.rows) == len(rows) + 2, "one begun, one of a takeover"


def test_fenced_broker_writes_nothing_more_anywhere(copy: Disk) -> None:
    take_over(copy.log_rows)
    rows = copy.log_rows.rows[:]
    with pytest.raises(StoreFencedError):
        copy.apply(puts=put(3))
    assert sequences(copy.store) == [1, 2]
    with pytest.raises(StoreError, match="could not be written"):
        copy.apply(puts=put(4))
    assert copy.log_rows.rows == rows
    reopen(copy)
    assert sequences(copy.store) == [1, 2]


@pytest.mark.parametrize(("seconds", "rows"), [(BEAT_S - 0.01, 0), (BEAT_S + 0.01, 1)])
def test_long_recovery_after_a_takeover_ends_with_a_row(
    copy: Disk, seconds: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another broker would take over if none came for too long."""
    copy.stop()
    copy.store.close()
    now = [0.0]
    monkeypatch.setattr(embedded, "monotonic", lambda: now[0])
    count = EmbeddedStore._counts

    def count_slowly(store: EmbeddedStore) -> dict[bytes, int]:
        now[0] += seconds
        return count(store)

    monkeypatch.setattr(EmbeddedStore, "_counts", count_slowly)
    number = copy.log_rows.last_number
    copy.open()
    assert [row[0] for row in copy.log_rows.rows[number + 1 :]] == rows * [EMPTY_PAYLOAD]
    copy.apply(puts=put(3))
    assert sequences(copy.store) == [1, 2, 3]


def test_history_of_rows_that_the_folder_lacks_is_restored_in_order(copy: Disk) -> None:
    copy.apply(history=b"one", puts=put(3))
    copy.store.close()
    (segment,) = (copy.folder / "journal").glob("*.journal")
    segment.unlink()
    store = EmbeddedStore(copy.folder, log=FakeLog(copy.log_rows))
    restored: list[bytes] = []
    store.follow_history = restored.append
    assert store.recover().history == []
    store.close()
    assert restored == [b"one"]


def test_detached_copy_is_an_ordinary_folder_with_another_identity(copy: Disk) -> None:
    before = copy.log_rows.identity
    copy.stop()
    copy.store.close()
    identity = detach(copy.folder)
    assert identity != before
    store = EmbeddedStore(copy.folder)
    recovered = store.recover()
    assert recovered.identity == identity
    assert sequences(store) == [1, 2]
    store.close()
    with pytest.raises(ConfigurationError, match="nothing to detach: `truenext serve --data "):
        detach(copy.folder)


def test_folder_without_a_store_is_not_detached_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a data folder of a broker"):
        detach(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_detached_copy_has_nothing_behind_a_torn_frame(copy: Disk) -> None:
    copy.apply(puts=put(3))
    copy.store.close()
    (segment,) = (copy.folder / "journal").glob("*.journal")
    content = bytearray(segment.read_bytes())
    at = content.find(b"record 1")
    content[at] ^= 1
    segment.write_bytes(content)
    detach(copy.folder)
    store = EmbeddedStore(copy.folder)
    store.recover()
    assert sequences(store) == []
    store.close()


@pytest.mark.parametrize("kind", ["copy", "embedded"])
def test_check_of_a_torn_folder_tells_whether_it_is_a_copy(kind: str, tmp_path: Path) -> None:
    disk = Disk(kind, tmp_path / "data")
    disk.apply(puts=put(1, 2))
    disk.apply(puts=put(3))
    disk.store.close()
    (segment,) = (disk.folder / "journal").glob("*.journal")
    content = bytearray(segment.read_bytes())
    content[content.find(b"record 1")] ^= 1
    segment.write_bytes(content)
    summary = check(disk.folder, lambda _: None, lambda *_: None)
    assert summary.damage_count
    assert summary.is_copy is (kind == "copy")


def test_history_that_knows_more_than_a_detached_copy_is_set_aside(copy: Disk) -> None:
    copy.apply(history=chunk(1))
    copy.apply(puts=put(3), history=chunk(2))
    copy.store.close()
    (copy.folder / "history").mkdir()
    (segment,) = (copy.folder / "journal").glob("*.journal")
    content = bytearray(segment.read_bytes())
    # A power cut has torn the last frame, and not the history.
    content[content.find(b"record 3")] ^= 1
    segment.write_bytes(content)
    detach(copy.folder, (1, 2))
    assert not (copy.folder / "history").exists()
    (aside,) = kept_aside(copy.folder)
    assert (aside / "history").is_dir()


def test_folder_in_use_is_not_detached(copy: Disk) -> None:
    with pytest.raises(StoreInUseError):
        detach(copy.folder)


def test_ordinary_folder_becomes_the_first_copy_of_a_log(tmp_path: Path) -> None:
    disk = Disk("embedded", tmp_path / "data")
    disk.apply(puts=put(1, 2), queues={1: "orders"})
    disk.stop()
    disk.store.close()
    first = b"d" * 16
    position = first_position(disk.folder, first)
    assert isinstance(position, LogPosition)
    become_copy(disk.folder, first)
    rows = LogRows()
    rows.first = position
    log = FakeLog(rows)
    log.identity = identity_of(disk.folder)
    store = EmbeddedStore(disk.folder, log=log)
    assert store.recover().identity == log.identity
    assert sequences(store) == [1, 2]
    store.close()
    assert not kept_aside(disk.folder)


def identity_of(folder: Path) -> str:
    checkpoint = Checkpoint(folder / "lmdb", is_copy=True)
    try:
        return checkpoint.read()[0].identity
    finally:
        checkpoint.close()
