"""Tests of freed segments that a copy of a log keeps, to give rows back to a log that has lost them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from tests.contract.disk import Disk, key, put, sequences
from truenext.errors import StoreError
from truenext.model.disk_level import DiskLevel
from truenext.store.copying import detach
from truenext.store.embedded import EmbeddedStore
from truenext.store.journal import KEPT_MAX, Journal


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Disk]:
    """A copy with tiny segments, of which all but the newest are freed."""
    disk = Disk("checkpointing copy", tmp_path / "data")
    for sequence in range(1, 30):
        disk.apply(puts=put(sequence), removes=[key(sequence - 1)] if sequence > 1 else [])
    yield disk
    disk.store.close()


def journal_of(disk: Disk) -> Journal:
    assert isinstance(disk.store, EmbeddedStore)
    return disk.store._journal


def stop_checkpointer(disk: Disk) -> None:
    """Let no further segment be freed meanwhile."""
    assert isinstance(disk.store, EmbeddedStore)
    disk.store._checkpointer.close()


def kept_files(disk: Disk) -> list[Path]:
    return sorted((disk.folder / "journal").glob("*.kept"))


def check_frames(disk: Disk) -> int:
    """Check that all frames that the folder says to have are those of the log. Return the number of the oldest."""
    journal = journal_of(disk)
    stop_checkpointer(disk)
    rows = [payload for payload, _, _ in disk.log_rows.rows]
    oldest = journal.oldest_frame
    for number in range(oldest - 1, len(rows) + 1):
        assert list(journal.frames_after(number)) == rows[number:]
    return oldest


def test_freed_segments_are_kept_and_give_the_frames_back(copy: Disk) -> None:
    copy.stop()
    assert len(kept_files(copy)) == KEPT_MAX
    oldest = check_frames(copy)
    assert 1 < oldest < len(copy.log_rows.rows) - KEPT_MAX
    with pytest.raises(StoreError, match=f"frame {oldest - 1} is missing"):
        list(journal_of(copy).frames_after(oldest - 2))
    assert sequences(copy.store) == [29]


def test_frames_are_all_there_while_a_segment_is_freed(tmp_path: Path) -> None:
    disk = Disk("copy", tmp_path / "data")
    journal = journal_of(disk)
    disk.apply(puts=put(1))
    stop_checkpointer(disk)
    journal.start_segment(1)
    oldest = journal.oldest_frame
    freeing = Thread(target=journal.free, args=(journal.segments[0],))
    with journal._spares_lock:
        freeing.start()
        freeing.join(0.05)
        starts = [first for first, _, _ in journal._starts()]
    freeing.join()
    assert starts[0] == journal.oldest_frame == oldest
    disk.store.close()


def test_frames_of_a_journal_that_frees_nothing_are_all_there(tmp_path: Path) -> None:
    disk = Disk("copy", tmp_path / "data")
    assert check_frames(disk) == 1
    disk.apply(puts=put(1))
    assert check_frames(disk) == 1
    disk.store.close()


def test_kept_segment_that_is_damaged_gives_no_wrong_frame(copy: Disk) -> None:
    copy.stop()
    path = kept_files(copy)[3]
    content = bytearray(path.read_bytes())
    content[content.index(b"record")] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match="missing or unreadable"):
        check_frames(copy)


def test_kept_segments_before_a_gap_are_deleted_at_the_start(copy: Disk) -> None:
    copy.stop()
    copy.store.close()
    *_, gap, _, _ = kept_files(copy)
    gap.unlink()
    copy.open()
    assert check_frames(copy) > 1
    assert len(list(kept_files(copy))) < KEPT_MAX
    assert all(path > gap for path in kept_files(copy))


def test_kept_segments_are_deleted_when_the_disk_has_little_space(copy: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    copy.stop()
    assert isinstance(copy.store, EmbeddedStore)
    monkeypatch.setattr("truenext.store.folder.free_bytes", lambda path: 0)
    copy.store._disk_space.update_level()
    assert kept_files(copy) == []
    assert copy.store.disk_level is not DiskLevel.PLENTY
    assert check_frames(copy) > 1


def test_detached_folder_keeps_no_segment(copy: Disk) -> None:
    copy.stop()
    copy.store.close()
    detach(copy.folder)
    store = EmbeddedStore(copy.folder)
    store.recover()
    assert kept_files(copy) == []
    store.close()
