"""Tests of the store under concurrent load, with much data, and on a full disk."""

import errno
import gc
import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import pytest

from tests.contract.disk import LANE, NEXT_QUEUE, Disk, key, put, sequences
from tests.contract.fake_log import FakeLog, LogRows
from tests.contract.test_embedded_store import journal_files, until
from tests.drawing import one_of
from tests.integration.held_disk import used_bytes
from truenext.errors import StoreError
from truenext.model.batch import Batch, Mark, ProducerState
from truenext.model.disk_level import DiskLevel
from truenext.model.record import lane_key, message_key, sequence_of, timer_key
from truenext.store import checkpointer, disk_space, folder, journal
from truenext.store.changes import Changes, RareChanges
from truenext.store.checkpoint import Checkpoint
from truenext.store.checkpoint_format import DATABASES_MAX
from truenext.store.checkpointer import Checkpointer
from truenext.store.embedded import EmbeddedStore
from truenext.store.journal import Journal
from truenext.store.memory import MemoryStore
from truenext.store.overlay import Overlay
from truenext.store.spans import LaneSpans
from truenext.store.store import Page, Store

# Batches beside moves


class Interrupted(list[LaneSpans]):
    """The chunks of a lane, of which the first one has moved before the second one is looked at."""

    def __init__(self, chunks: list[LaneSpans], move: Callable[[], None]) -> None:
        super().__init__(chunks)
        self._move = move

    def __iter__(self) -> Iterator[LaneSpans]:
        for chunk in super().__iter__():
            yield chunk
            self._move()


def test_a_message_is_found_in_the_journal_while_an_older_segment_moves_into_the_checkpoint() -> None:
    """The batch that removed it was refused, for the store was taken to be damaged, and the broker stopped."""
    overlay = Overlay()
    for segment in (1, 2):
        overlay.apply_changes(Changes([(key(segment), 10)], [], [], [], None), segment, 0)
    lane = overlay._lanes[LANE]
    lane.chunks = Interrupted(lane.chunks, lambda: overlay.drop_indexes(1))
    assert overlay.is_transient(key(2)) is False
    assert overlay.is_transient(key(1)) is None


# Pages beside batches and moves


ReadPage = Callable[[Store], Page]


def all_of_the_lane(store: Store) -> Page:
    return store.read_page(LANE, 0, 100)


def one_by_one(store: Store) -> Page:
    return store.read_messages([key(n) for n in range(100)])


class HeldPage:
    """A page that stands still in its first read of the journal until it may go on."""

    def __init__(self, disk: Disk, read_page: ReadPage, monkeypatch: pytest.MonkeyPatch) -> None:
        self._disk = disk
        self._read_page = read_page
        self._is_reading, self._may_continue = threading.Event(), threading.Event()
        self._pages: list[Page] = []
        self._thread = threading.Thread(target=self._read)
        read_run = Journal._read_run

        def held(journal: Journal, *rest: Any) -> Iterator[bytes]:
            if threading.current_thread() is self._thread:
                self._is_reading.set()
                assert self._may_continue.wait(10)
            return read_run(journal, *rest)

        monkeypatch.setattr(Journal, "_read_run", held)
        self._thread.start()
        assert self._is_reading.wait(10)

    def _read(self) -> None:
        self._pages.append(self._read_page(self._disk.store))

    def end(self) -> Page:
        self._may_continue.set()
        self._thread.join()
        return self._pages[0]


@pytest.mark.parametrize("read_page", [all_of_the_lane, one_by_one])
def test_a_segment_is_kept_until_the_pages_that_began_before_have_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_page: ReadPage
) -> None:
    disk = Disk("checkpointing", tmp_path)
    disk.apply(puts=put(1, 2, 3, 4))
    (first,) = journal_files(tmp_path)
    page = HeldPage(disk, read_page, monkeypatch)
    disk.apply(puts=put(5, 6, 7, 8))
    until(lambda: bool(disk.store._checkpointer._blocking_views))  # type: ignore[attr-defined]
    assert first.exists()
    assert sequences(disk.store) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert first.exists()
    found = page.end()
    assert [(sequence_of(m.key), m.record) for m in found.messages] == [(n, b"record %d" % n) for n in (1, 2, 3, 4)]
    assert (found.as_of, found.is_end) == (1, True)
    until(lambda: not first.exists())
    disk.store.close()


@pytest.mark.parametrize("read_page", [all_of_the_lane, one_by_one])
def test_page_shows_the_moment_of_its_start_while_batches_are_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_page: ReadPage
) -> None:
    """Messages of the checkpoint (1 to 4) and of the journal (5 to 8)."""
    disk = Disk("checkpointing", tmp_path)
    disk.apply(puts=put(1, 3), transient_puts=put(2, 4), marks={key(1): (1, 1), key(2): (2, 2)})
    disk.apply(puts=put(*range(20, 29), lane=NEXT_QUEUE))
    until(lambda: len(journal_files(tmp_path)) == 1)
    disk.apply(removes=[key(3)])
    # The newest segment never moves, so that these are read from the journal.
    disk.apply(puts=put(5, 7), transient_puts=put(6, 8), marks={key(5): (5, 5)})
    # A batch may have to wait for a move, and that for the page.
    monkeypatch.setattr(Checkpointer, "_is_lagging", lambda _: False)
    page = HeldPage(disk, read_page, monkeypatch)
    disk.apply(
        removes=[key(1), key(5)],
        transient_removes=[key(4), key(8)],
        marks={key(2): (9, 9), key(6): (9, 9)},
        unmarks=[key(1), key(5)],
    )
    disk.apply(puts=put(9))
    found = page.end()
    assert [(sequence_of(m.key), m.mark.attempts) for m in found.messages] == [(1, 1), (2, 2), (4, 0)] + [
        (n, {5: 5}.get(n, 0)) for n in (5, 6, 7, 8)
    ]
    assert found.as_of == 4
    now = read_page(disk.store)
    assert [(sequence_of(m.key), m.mark.attempts) for m in now.messages] == [(2, 9), (6, 9), (7, 0), (9, 0)]
    disk.store.close()


@pytest.mark.parametrize("limit", [1, 2, 3, 100, None])
def test_pages_leave_nothing_out_while_everything_moves(tmp_path: Path, limit: int | None) -> None:
    """One thread reads the lane from end to end again and again, or the messages that there may be; messages are put
    behind and removed in front."""
    disk = Disk("checkpointing", tmp_path)
    disk.apply(puts=put(*range(1, 21)))
    put_up_to, removed_up_to = 20, 0
    failures: list[str] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            expected_up_to = put_up_to
            after, found = 0, []
            if limit is None:
                keys = [key(n) for n in range(removed_up_to + 1, expected_up_to + 1)]
                found = [sequence_of(message.key) for message in disk.store.read_messages(keys).messages]
            while limit is not None and (page := disk.store.read_page(LANE, after, limit).messages):
                found += [sequence_of(message.key) for message in page]
                after = found[-1]
            expected = range(removed_up_to + 1, expected_up_to + 1)
            if found != sorted(set(found)) or not set(expected) <= set(found):
                failures.append(f"{expected}: {found}")

    thread = threading.Thread(target=read)
    thread.start()
    for n in range(21, 400):
        disk.apply(puts=put(n) if n % 3 else {}, transient_puts={} if n % 3 else put(n))
        put_up_to = n
        old = removed_up_to = n - 20
        is_transient = old > 20 and old % 3 == 0
        disk.apply(removes=[] if is_transient else [key(old)], transient_removes=[key(old)] if is_transient else [])
    is_over.set()
    thread.join()
    assert failures == []
    disk.store.close()


# Generations of transients


def stored_transients(path: Path) -> tuple[list[bytes], list[bytes]]:
    """Return the keys of transients and of their marks, of all generations."""
    with lmdb.open(str(path / "lmdb"), max_dbs=DATABASES_MAX) as env, env.begin() as txn:
        transients, marks = (
            [*txn.cursor(env.open_db(name, txn=txn)).iternext(values=False)]
            for name in (b"transients", b"transient marks")
        )
        return transients, marks


def checkpointed_transients(path: Path, count: int) -> Disk:
    """A store with some transients in its checkpoint, the first one marked, and a run that has begun."""
    disk = Disk("checkpointing", path)
    disk.apply(clean_stop=False)
    disk.apply(transient_puts=put(*range(1, count + 1)), marks={key(1): (7, 7)})
    disk.apply(puts=put(*range(100, 110), lane=NEXT_QUEUE))
    until(lambda: len(journal_files(path)) == 1)
    return disk


def test_an_unclean_start_drops_transients_without_touching_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = checkpointed_transients(tmp_path, 9)
    monkeypatch.setattr(Checkpointer, "_clean_up", lambda _: None)
    for _ in range(3):
        assert disk.crash().counts == {NEXT_QUEUE: 10}
        assert sequences(disk.store) == []
    disk.store.close()
    transients, marks = stored_transients(tmp_path)
    assert (len(transients), len(marks)) == (9, 1)


@pytest.mark.parametrize("transactions", range(7))
def test_cleaning_may_be_interrupted_anywhere_and_goes_on_after_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transactions: int
) -> None:
    monkeypatch.setattr(checkpointer, "TRANSACTION_KEYS_MAX", 2)
    disk = checkpointed_transients(tmp_path, 9)
    remaining = transactions
    clean = Checkpointer._clean_up

    def limited(one: Checkpointer) -> None:
        nonlocal remaining
        if remaining:
            remaining -= 1
            clean(one)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "_clean_up", limited)
        disk.crash()
        until(lambda: not remaining)
        # Those of this generation are there, and stay.
        disk.apply(transient_puts=put(*range(200, 210)), marks={key(200): (8, 8)})
        disk.apply(puts=put(*range(110, 120), lane=NEXT_QUEUE))
        until(lambda: len(journal_files(tmp_path)) == 1)
        assert sequences(disk.store) == list(range(200, 210))
        disk.store.close()
        transients, _ = stored_transients(tmp_path)
        assert len(transients) == 10 + max(0, min(9, 10 - 2 * transactions))
    assert disk.open().counts == {NEXT_QUEUE: 20}
    assert disk.crash().counts == {NEXT_QUEUE: 20}
    until(lambda: not disk.store._checkpointer._needs_cleanup)  # type: ignore[attr-defined]
    disk.store.close()
    assert stored_transients(tmp_path) == ([], [])


def test_cleanup_leaves_transients_kept_by_a_clean_stop(tmp_path: Path) -> None:
    disk = checkpointed_transients(tmp_path, 5)
    disk.crash()
    disk.apply(transient_puts=put(10, 11))
    disk.apply(puts=put(*range(110, 120), lane=NEXT_QUEUE))
    assert disk.stop().counts == {LANE: 2, NEXT_QUEUE: 20}
    until(lambda: not disk.store._checkpointer._needs_cleanup)  # type: ignore[attr-defined]
    assert sequences(disk.store) == [10, 11]
    disk.store.close()


# Memory


def changes(**some: Any) -> Changes:
    rest = RareChanges(**{name: value for name, value in some.items() if name in RareChanges.__struct_fields__})
    return Changes(some.get("puts", []), [], some.get("removes", []), [], rest)


def numbers(n: int, *, resolved: int = 0) -> ProducerState:
    first = n + 10**12
    return ProducerState(first, first, True, first + 1, resolved=tuple([first + 10**6 * m for m in range(resolved)]))


@pytest.mark.parametrize(
    "make",
    [
        lambda n: {"puts": [(key(n), 100)]},
        lambda n: {"puts": [(message_key(lane_key(n, 5), n), 100)]},
        lambda n: {"removes": [key(n)]},
        lambda n: {"marks": {key(n): Mark(n + 1000, n + 1000, n + 10**12, was_lost=True)}},
        lambda n: {"producers": {f"producer {n}": numbers(n)}},
        lambda n: {"producers": {"ä" * 200 + f"{n}€": numbers(n)}},
        lambda n: {"producers": {f"producer {n}": numbers(n, resolved=100)}},
        lambda n: {"queues": {n + 1000: f"queue {n}"}},
        lambda n: {"forgotten_producers": [f"producer {n}"]},
        lambda n: {"timers": [timer_key(n, LANE, 0)]},
        lambda n: {"cleared_timers": [timer_key(n, LANE, 0)]},
    ],
    ids=[
        *("puts", "puts in lanes of their own", "removes", "marks", "producers", "long names", "resolved numbers"),
        *("queues", "forgotten", "timers", "cleared timers"),
    ],
)
@one_of("count", [2000, 3000, 5500], ids=["2000", "3000", "5500"])
def test_a_segment_costs_no_more_memory_than_is_counted(make: Callable[[int], dict[str, Any]], count: int) -> None:
    overlay = Overlay()
    gc.collect()
    tracemalloc.start()
    try:
        for n in range(1, count + 1):
            overlay.apply_changes(changes(**make(n)), 1, n * 200)
        overlay.indexes[0].sorted_timers = sorted(overlay.indexes[0].timers)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert overlay.indexes[0].records == count
    assert used <= overlay.indexes[0].memory + 20_000


@pytest.mark.parametrize("what", ["SEGMENT_RECORDS_MAX", "SEGMENT_MEMORY_MAX"])
def test_a_segment_ends_when_it_holds_or_costs_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(checkpointer, what, {"SEGMENT_RECORDS_MAX": 20, "SEGMENT_MEMORY_MAX": 1400}[what])
    disk = Disk("embedded", tmp_path)
    for n in range(1, 21):
        disk.apply(puts=put(n))
    assert len(journal_files(tmp_path)) == 1
    disk.apply(puts=put(21))
    assert len(journal_files(tmp_path)) == 2
    assert sequences(disk.store) == list(range(1, 22))
    disk.store.close()


def test_a_batch_larger_than_one_write_is_there_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "WRITE_BYTES_MAX", 1000)
    disk = Disk("embedded", tmp_path)
    records = {key(n): os.urandom(n * 37 % 1500) for n in range(1, 100)}
    disk.apply(puts=records)
    disk.apply(puts=put(100))
    disk.crash()
    messages = disk.store.read_page(LANE, 0, 1000).messages
    assert {m.key: m.record for m in messages} == records | put(100)
    disk.store.close()


# Room


def test_marks_of_room_are_left_later_than_they_are_reached() -> None:
    def course(*used: int) -> list[DiskLevel]:
        now, seen = DiskLevel.PLENTY, []
        for one in used:
            now = disk_space.level_of_limit(100, one, now)
            seen.append(now)
        return seen

    plenty, little, none = DiskLevel.PLENTY, DiskLevel.LITTLE, DiskLevel.NONE
    assert course(0, 89, 90, 89, 88, 86) == [plenty, plenty, little, little, little, plenty]
    assert course(99, 100, 98, 96, 120, 10) == [little, none, none, little, none, plenty]


def test_marks_of_free_space_are_left_later_than_they_are_reached() -> None:
    now, seen = DiskLevel.PLENTY, []
    for free in (200, 199, 203, 207, 99, 102, 104, 300):
        now = disk_space.level_of_free_space(100, free, now)
        seen.append(now.name)
    assert seen == ["PLENTY", "LITTLE", "LITTLE", "PLENTY", "NONE", "NONE", "LITTLE", "PLENTY"]


def limited(kind: str, path: Path) -> MemoryStore | EmbeddedStore:
    if kind == "memory":
        return MemoryStore(limit=3_000_000)
    return EmbeddedStore(path, segment_bytes=20_000, segments_max=2, disk_limit=3_000_000)


@pytest.mark.parametrize("kind", ["memory", "embedded"])
def test_room_becomes_little_then_none_and_plenty_again_when_messages_have_gone(tmp_path: Path, kind: str) -> None:
    store = limited(kind, tmp_path)
    store.recover()
    seen, put = [store.disk_level], 0
    while seen[-1] is not DiskLevel.NONE:
        put += 1
        batch = Batch(put)
        batch.puts = {key(put): bytes(1500)}
        store.apply(batch)
        if store.disk_level is not seen[-1]:
            seen.append(store.disk_level)
        assert put < 4000
    assert seen == [DiskLevel.PLENTY, DiskLevel.LITTLE, DiskLevel.NONE]
    for n in range(1, put + 1):
        batch = Batch(put + n)
        batch.removes = [key(n)]
        store.apply(batch)
    until(lambda: store.disk_level is DiskLevel.PLENTY)
    store.close()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_store_at_its_limit_has_space_again_though_the_removals_fill_no_segment(
    tmp_path: Path, is_stopped: bool
) -> None:
    """Fixed: the removals waited for the end of their segment, and senders for them, also after a restart."""

    def opened() -> EmbeddedStore:
        store = EmbeddedStore(tmp_path, segment_bytes=1 << 20, segments_max=2, disk_limit=8 << 20)
        store.recover()
        return store

    def apply(**changes: Any) -> None:
        batch = Batch(next(numbers))
        for name, value in changes.items():
            setattr(batch, name, value)
        store.apply(batch)

    store, numbers, last = opened(), count(1), 0
    while store.disk_level is not DiskLevel.NONE:
        last += 1
        apply(puts={key(last): bytes(50_000)})
    if is_stopped:
        store.close()
        store, numbers = opened(), count(1)
    for number in range(1, last):
        apply(removes=[key(number)])
    until(lambda: store.disk_level is DiskLevel.PLENTY)
    apply(puts={key(last + 1): b"one more"})
    store.close()
    store, numbers = opened(), count(1)
    assert sequences(store) == [last, last + 1]
    apply(removes=[key(last)])
    assert sequences(store) == [last + 1]
    store.close()


def test_a_store_that_opens_beyond_its_limit_says_so_at_once(tmp_path: Path) -> None:
    disk = Disk("embedded", tmp_path)
    disk.apply(puts=put(1))
    disk.store.close()
    store = EmbeddedStore(tmp_path, segment_bytes=1 << 20, disk_limit=1 << 20)
    store.recover()
    assert store.disk_level is DiskLevel.NONE
    store.close()


def test_disk_level_follows_the_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer, "CHECK_INTERVAL_S", 0.01)
    disk = Disk("embedded", tmp_path)
    disk.apply(puts=put(1))
    for free_segments, expected in (
        (100, DiskLevel.PLENTY),
        (5, DiskLevel.LITTLE),
        (2, DiskLevel.NONE),
        (100, DiskLevel.PLENTY),
    ):
        free = SimpleNamespace(f_bavail=free_segments, f_frsize=1 << 20)
        monkeypatch.setattr(os, "statvfs", lambda _, free=free: free)
        until(lambda expected=expected: disk.store.disk_level is expected)  # type: ignore[misc]
    disk.store.close()


class SmallDisk:
    """A store on a disk of its own, which has `size` bytes. Its level is found all the time."""

    segment_bytes = 1 << 18

    def __init__(
        self,
        path: Path,
        monkeypatch: pytest.MonkeyPatch,
        size: int,
        *,
        limit: int | None = None,
        rows: LogRows | None = None,
    ) -> None:
        """`rows` are those of a log, of which the folder is a copy; None for none."""
        self._path, self._limit, self._rows = path, limit, rows
        self._last = 0
        monkeypatch.setattr(checkpointer, "CHECK_INTERVAL_S", 0.01)
        monkeypatch.setattr(folder, "free_bytes", lambda _: max(0, size - used_bytes(path)))
        self.open()

    def open(self) -> None:
        self._batches = count(1)
        log = None if self._rows is None else FakeLog(self._rows)
        self.store = EmbeddedStore(self._path, segment_bytes=self.segment_bytes, disk_limit=self._limit, log=log)
        self.store.recover()

    @property
    def level(self) -> DiskLevel:
        return self.store.disk_level

    @property
    def segments(self) -> list[int]:
        return self.store._journal.segments

    def put(self, number: int, size: int = 10_000) -> list[bytes]:
        """Put messages in one batch, and return their keys."""
        keys = [key(n) for n in range(self._last + 1, self._last + number + 1)]
        self._last += number
        batch = Batch(next(self._batches))
        batch.puts = {one: bytes(size) for one in keys}
        self.store.apply(batch)
        return keys

    def remove(self, keys: list[bytes]) -> None:
        batch = Batch(next(self._batches))
        batch.removes = keys
        self.store.apply(batch)

    def fill(self) -> list[bytes]:
        """Put messages until space is short, and return their keys."""
        keys: list[bytes] = []
        while self.level is DiskLevel.PLENTY:
            # A spare segment is more than lies between the levels LITTLE and NONE of a small limit.
            until(lambda: not self.store._journal.needs_spare)
            keys += self.put(1)
            self.store.disk_space.update_level()
            assert len(keys) < 1000
        return keys


@pytest.mark.parametrize("limit", [None, 2_500_000], ids=["disk", "limit"])
@pytest.mark.parametrize("old", [[1], [10_000] * 28], ids=["one small message", "more than a segment"])
@one_of("has_log", [False, True], ids=["no log", "log"])
def test_space_of_messages_that_are_gone_is_free_again_while_older_ones_wait(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: int | None,
    old: list[int],
    has_log: bool,
) -> None:
    # C24.19
    rows = LogRows() if has_log else None
    disk = SmallDisk(tmp_path, monkeypatch, 1 << 30 if limit else 9_000_000, limit=limit, rows=rows)
    waiting = [one for size in old for one in disk.put(1, size)]
    gone = disk.fill()
    assert len(disk.segments) > 3
    disk.remove(gone)
    until(lambda: disk.level is DiskLevel.PLENTY)
    for _ in range(2):
        assert disk.store.read_page(LANE, 0, 100).messages == disk.store.read_messages(waiting).messages
        assert sequences(disk.store) == list(map(sequence_of, waiting))
        disk.store.close()
        disk.open()
    disk.store.close()


def test_segments_that_a_backup_keeps_are_not_moved_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SmallDisk(tmp_path, monkeypatch, 9_000_000)
    disk.put(1)
    gone = disk.fill()
    segments = disk.segments
    disk.store._journal.hold(segments[0], segments[-1])
    disk.remove(gone)
    time.sleep(0.2)
    assert disk.segments[0] == segments[0] and disk.store._checkpoint.counts() == {}
    disk.store._journal.release()
    until(lambda: disk.level is DiskLevel.PLENTY)
    disk.store.close()


def test_segments_whose_messages_wait_stay_while_space_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(tmp_path, monkeypatch, 1 << 30, limit=2_500_000)
    waiting = disk.fill()
    before = disk.segments
    for _ in range(20):
        disk.store.disk_space.update_level()
        time.sleep(0.01)
    assert disk.level is DiskLevel.LITTLE
    assert (disk.segments, disk.store._checkpoint.counts()) == (before, {})
    disk.remove(waiting)
    disk.store.close()


def test_store_in_which_messages_stay_here_and_there_uses_its_disk_and_has_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint's file never shrinks. If it took all of the disk, producers would wait for ever."""
    # C24.19
    size = 6_500_000
    disk = SmallDisk(tmp_path, monkeypatch, size)

    def is_plenty() -> bool:
        disk.store.disk_space.update_level()
        deadline = time.monotonic() + 0.3
        while disk.level is not DiskLevel.PLENTY and time.monotonic() < deadline:
            time.sleep(0.005)
        return disk.level is DiskLevel.PLENTY

    # Again, in the pages that are unused then.
    for _ in range(2):
        waiting: list[bytes] = []
        while is_plenty():
            sent = disk.put(100, 1000)
            disk.remove(sent[10:])
            waiting += sent[:10]
        assert len(waiting) * 1000 > size / 5
        for first in range(0, len(waiting), 500):
            disk.remove(waiting[first : first + 500])
        until(lambda: disk.level is DiskLevel.PLENTY)
    disk.store.close()


def test_checkpoint_has_no_more_room_than_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SmallDisk(tmp_path, monkeypatch, 1 << 30)
    while len(disk.segments) < checkpointer.SEGMENTS_MAX:
        disk.put(1)
    assert disk.store.disk_space.room_for_checkpoint() > 1 << 26
    monkeypatch.setattr(folder, "free_bytes", lambda _: 1000)
    assert disk.store.disk_space.room_for_checkpoint() == 1000
    disk.store.close()


# A full disk


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def raise_no_space(*_: object) -> None:
    raise no_space()


NO_SPACE: list[Callable[[], Exception]] = [
    no_space,
    lambda: lmdb.DiskError("mdb_txn_commit: No space left on device"),
    # What LMDB says when a part of its write had room.
    lambda: lmdb.Error("mdb_txn_commit: Input/output error"),
]


class FullDisk:
    """The checkpoint finds no space as long as `is_full` says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception]) -> None:
        self.is_full: Callable[[], bool] = lambda: True
        self.refused = 0
        monkeypatch.setattr(checkpointer, "CHECK_INTERVAL_S", 0.01)
        statvfs = os.statvfs
        monkeypatch.setattr(
            os, "statvfs", lambda path: SimpleNamespace(f_bavail=9, f_frsize=1) if self.is_full() else statvfs(path)
        )
        for name in ("delete_messages", "put_messages", "finish_checkpoint", "save_journal_end", "drop_transients"):
            monkeypatch.setattr(Checkpoint, name, self._failing(getattr(Checkpoint, name), error))

    def _failing(self, action: Callable[..., None], error: Callable[[], Exception]) -> Callable[..., None]:
        def call(*args: Any, **named: Any) -> None:
            if self.is_full():
                self.refused += 1
                raise error()
            action(*args, **named)

        return call


@pytest.mark.parametrize("error", NO_SPACE)
def test_a_full_disk_stops_no_acknowledgement_and_all_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception], caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk("checkpointing", tmp_path)
    until((tmp_path / "ballast").exists)
    full = FullDisk(monkeypatch, error)
    disk.apply(puts=put(*range(1, 9)), marks={key(8): (1, 1)})
    disk.apply(puts=put(*range(9, 17)))
    until(lambda: full.refused > 2)
    assert not (tmp_path / "ballast").exists()
    assert disk.store.disk_level is DiskLevel.FULL
    for n in range(1, 8):
        disk.apply(removes=[key(n)], history=bytes(100))
    assert sequences(disk.store) == list(range(8, 17))
    assert len(journal_files(tmp_path)) > 1 + checkpointer.LAG_SEGMENTS_MAX
    full.is_full = lambda: False
    until(lambda: disk.store.disk_level is DiskLevel.PLENTY and len(journal_files(tmp_path)) == 1)
    assert (tmp_path / "ballast").stat().st_size == disk_space.BALLAST_SEGMENTS * 200
    assert [record.message for record in caplog.records] == [
        "the disk is full: sends are refused until there is free space",
        "the disk has free space again",
    ]
    assert {vars(record)["folder"] for record in caplog.records} == {str(tmp_path)}
    assert disk.crash().counts == {LANE: 9}
    assert [(sequence_of(m.key), m.mark.attempts) for m in disk.store.read_page(LANE, 0, 2).messages] == [
        (8, 1),
        (9, 0),
    ]
    disk.store.close()


def test_a_move_that_finds_no_space_succeeds_with_that_of_the_ballast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk("checkpointing", tmp_path)
    until((tmp_path / "ballast").exists)
    full = FullDisk(monkeypatch, no_space)
    full.is_full = (tmp_path / "ballast").exists
    # Not within this test, but at once.
    monkeypatch.setattr(checkpointer, "CHECK_INTERVAL_S", 60)
    monkeypatch.setattr(folder, "reserve", raise_no_space)
    disk.apply(puts=put(*range(1, 9)))
    disk.apply(puts=put(*range(9, 17)))
    until(lambda: len(journal_files(tmp_path)) == 1)
    assert full.refused == 1
    assert disk.store.disk_level is DiskLevel.FULL
    assert disk.crash().counts == {LANE: 16}
    disk.store.close()


def test_a_store_can_be_closed_while_a_move_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk("checkpointing", tmp_path)
    with monkeypatch.context() as patch:
        full = FullDisk(patch, no_space)
        disk.apply(puts=put(*range(1, 9)))
        disk.apply(puts=put(*range(9, 17)))
        until(lambda: full.refused > 2)
        disk.store.close()
    assert disk.open().counts == {LANE: 16}
    disk.store.close()


def test_a_run_ends_and_begins_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records of start and end outside the journal have to wait, too."""
    disk = Disk("embedded", tmp_path)
    disk.apply(puts=put(1), clean_stop=False)
    until((tmp_path / "ballast").exists)
    with monkeypatch.context() as patch:
        full = FullDisk(patch, no_space)
        assert disk.stop().counts == {LANE: 1}
        disk.apply(removes=[key(1)], clean_stop=False)
        assert full.refused >= 4
    assert disk.stop().clean_stop
    store = disk.store
    assert isinstance(store, EmbeddedStore)
    assert store._checkpoint.read()[1].durable_frame == store._journal.last_frame_number == 4
    store.close()


def test_a_clean_stop_is_written_down_with_the_space_of_the_ballast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk("embedded", tmp_path)
    until((tmp_path / "ballast").exists)
    full = FullDisk(monkeypatch, no_space)
    full.is_full = (tmp_path / "ballast").exists
    monkeypatch.setattr(folder, "reserve", raise_no_space)
    disk.apply(puts=put(1), clean_stop=True)
    assert full.refused == 1
    store = disk.store
    assert isinstance(store, EmbeddedStore)
    assert store._checkpoint.read()[1].durable_frame == 1
    store.close()


def test_an_unclean_stop_is_recovered_from_with_the_space_of_the_ballast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk("embedded", tmp_path)
    disk.apply(puts=put(1), transient_puts=put(2), clean_stop=False)
    until((tmp_path / "ballast").exists)
    full = FullDisk(monkeypatch, no_space)
    full.is_full = (tmp_path / "ballast").exists
    monkeypatch.setattr(folder, "reserve", raise_no_space)
    assert disk.crash().counts == {LANE: 1}
    assert full.refused == 1
    assert disk.store.disk_level is DiskLevel.FULL
    disk.store.close()


def test_a_segment_that_finds_the_disk_full_is_made_in_the_space_of_the_ballast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ballast = tmp_path / "ballast"
    allocate = folder.allocate
    store = EmbeddedStore(tmp_path, segment_bytes=200)
    store.recover()
    until(ballast.exists)

    def full(path: Path, size: int) -> None:
        if ballast.exists():
            raise no_space()
        allocate(path, size)

    monkeypatch.setattr(journal, "allocate", full)
    monkeypatch.setattr(folder, "reserve", raise_no_space)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=9, f_frsize=1))
    for number in range(1, 10):
        batch = Batch(number)
        batch.puts = put(2 * number, 2 * number + 1)
        store.apply(batch)
    assert not ballast.exists()
    assert store.disk_level is DiskLevel.FULL
    assert sequences(store) == list(range(2, 20))
    store.close()


def test_a_history_that_finds_the_disk_full_gets_the_space_of_the_ballast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is not taken back before there is room for messages."""
    monkeypatch.setattr(checkpointer, "CHECK_INTERVAL_S", 0.01)
    disk = Disk("embedded", tmp_path)
    store = disk.store
    assert isinstance(store, EmbeddedStore)
    disk.apply(puts=put(1))
    ballast = tmp_path / "ballast"
    until(ballast.exists)
    checks = 0

    def statvfs(_: object) -> SimpleNamespace:
        nonlocal checks
        checks += 1
        return SimpleNamespace(f_bavail=1 if ballast.exists() else 1 + disk_space.BALLAST_SEGMENTS, f_frsize=1 << 20)

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", statvfs)
        store.delete_ballast(no_space())
        assert store.disk_level is DiskLevel.FULL
        until(lambda: checks > 10)
        assert not ballast.exists()
        disk.apply(removes=[key(1)])
        # Given up already.
        store.delete_ballast(no_space())
    until(lambda: store.disk_level is DiskLevel.PLENTY)
    assert ballast.exists()
    with pytest.raises(OSError, match="Input/output error"):
        store.delete_ballast(OSError(errno.EIO, os.strerror(errno.EIO)))
    assert ballast.exists()
    store.close()


def test_a_store_that_opens_on_a_nearly_full_disk_leaves_its_last_space_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To try for the ballast took the last bytes from the history for a moment, which then ended the broker."""
    monkeypatch.setattr(checkpointer, "CHECK_INTERVAL_S", 0.01)
    checks = 0

    def statvfs(_: object) -> SimpleNamespace:
        nonlocal checks
        checks += 1
        return SimpleNamespace(f_bavail=1, f_frsize=1 << 20)

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", statvfs)
        disk = Disk("embedded", tmp_path)
        disk.apply(puts=put(1))
        until(lambda: checks > 10)
        assert not (tmp_path / "ballast").exists()
        assert not list(tmp_path.glob("journal/spare-*"))
        assert disk.store.disk_level is DiskLevel.NONE
    until(lambda: disk.store.disk_level is DiskLevel.PLENTY)
    until((tmp_path / "ballast").exists)
    assert list(tmp_path.glob("journal/spare-*"))
    disk.store.close()


def test_a_run_that_cannot_be_written_down_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has free space, and LMDB reports an I/O error."""
    disk = Disk("embedded", tmp_path)
    FullDisk(monkeypatch, NO_SPACE[-1])
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1 << 20, f_frsize=4096))
    with pytest.raises(StoreError, match="Input/output error; check the disk"):
        disk.apply(puts=put(1), clean_stop=False)
    with pytest.raises(StoreError, match="batch 1 could not be written"):
        disk.apply(puts=put(2))
    disk.store.close()


def test_a_broken_disk_is_not_taken_for_a_full_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has free space, and LMDB reports an I/O error."""
    disk = Disk("checkpointing", tmp_path)
    full = FullDisk(monkeypatch, NO_SPACE[-1])
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1 << 20, f_frsize=4096))
    disk.apply(puts=put(*range(1, 9)))
    with pytest.raises(StoreError, match="Input/output error; check the disk"):
        for n in range(9, 100):
            disk.apply(puts=put(n))
    assert full.refused == 1
    disk.store.close()


def test_a_spare_that_finds_no_space_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpointer, "CHECK_INTERVAL_S", 0.01)
    attempts = 0

    def failing(*_: object) -> None:
        nonlocal attempts
        attempts += 1
        raise no_space()

    disk = Disk("embedded", tmp_path)
    # The second one stays: a segment of which nothing is left would become a spare.
    disk.apply(puts={key(1): bytes(300_000), key(4): bytes(300_000)})
    until((tmp_path / "journal/spare-0").exists)
    with monkeypatch.context() as patch:
        patch.setattr(journal, "allocate", failing)
        disk.apply(puts={key(2): bytes(600_000)})
        until(lambda: attempts > 2)
        assert disk.store.disk_level is DiskLevel.FULL
        disk.apply(removes=[key(1)])
        with pytest.raises(StoreError, match="the disk is full; free disk space"):
            disk.apply(puts={key(3): bytes(600_000)})
    disk.crash()
    assert sequences(disk.store) == [2, 4]
    until(lambda: disk.store.disk_level is DiskLevel.PLENTY and not disk.store._journal.needs_spare)  # type: ignore[attr-defined]
    assert [record.message for record in caplog.records].count(
        "the disk is full: sends are refused until there is free space"
    ) == 1
    disk.store.close()
