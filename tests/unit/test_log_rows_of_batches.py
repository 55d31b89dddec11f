"""Tests of which batches of a broker with a log become rows, and with which history."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import pytest

from truenext.broker import committer as committer_module
from truenext.broker.committer import BEAT_CHECK_S, UNLOGGED_BYTES_MAX, Committer
from truenext.broker.write_time import WriteTimeEstimate
from truenext.history.writer import HistoryWriter
from truenext.model.batch import Batch
from truenext.model.events import COLUMNS, GAP_EVENTS, EventKind, event_bytes
from truenext.store.log import BEAT_S
from truenext.store.store import Store


@dataclass
class Written:
    """A store and a history that note what they get, and a clock that stands still."""

    now: float = 1000.0
    rows: list[tuple[int, bytes]] = field(default_factory=list)
    """Number and history of each batch that became a row."""
    history: list[bytes] = field(default_factory=list)

    def begin(self, _: Batch) -> None:
        return None

    def apply(self, batch: Batch) -> None:
        self.rows.append((batch.number, batch.history))

    def append(self, history: bytes) -> None:
        if history:
            self.history.append(history)

    def flush(self) -> None:
        pass


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    written = Written()
    monkeypatch.setattr(committer_module, "monotonic", lambda: written.now)
    return written


def batch(number: int, history: bytes = b"", *, is_empty: bool = False) -> Batch:
    made = Batch(number)
    made.history = history
    if not is_empty:
        made.puts[b"key"] = b"record"
    return made


@contextmanager
def commits(written: Written, *, has_log: bool = True) -> Iterator[tuple[Committer, Callable[[Batch], None]]]:
    """Yield a committer, and a function that commits a batch and returns when its history was written, too."""
    with asyncio.Runner() as runner:
        done: asyncio.Queue[Batch] = asyncio.Queue()
        committer = Committer(
            cast(Store, written),
            cast(HistoryWriter, written),
            runner.get_loop(),
            WriteTimeEstimate(),
            has_log=has_log,
            on_committed=done.put_nowait,
            on_failed=lambda error: pytest.fail(str(error)),
        )

        async def commit(batch: Batch) -> None:
            if not committer.commit(batch):
                await done.get()
            while not committer._is_thread_idle:
                await asyncio.sleep(0.001)

        try:
            yield committer, lambda batch: runner.run(commit(batch))
        finally:
            committer.close()


def test_history_of_a_batch_without_a_row_waits_for_the_next_row(written: Written) -> None:
    """A folder's own files have no event that no row has."""
    with commits(written) as (_, commit):
        commit(batch(1, b"a"))
        commit(batch(2, b"b", is_empty=True))
        commit(batch(3, b"c", is_empty=True))
        assert written.history == [b"a"]
        commit(batch(4, b"d"))
    assert written.rows == [(1, b"a"), (4, b"bcd")]
    assert written.history == [b"a", b"bcd"]


def test_history_of_a_batch_without_changes_is_written_at_once_without_a_log(written: Written) -> None:
    with commits(written, has_log=False) as (_, commit):
        commit(batch(1, b"a"))
        commit(batch(2, b"b", is_empty=True))
    assert written.rows == [(1, b"a")]
    assert written.history == [b"a", b"b"]


def test_empty_batch_becomes_a_row_once_a_beat_is_due(written: Written) -> None:
    with commits(written) as (committer, commit):
        commit(batch(1))
        written.now += BEAT_S - BEAT_CHECK_S - 0.01
        due = [committer.is_row_due]
        commit(batch(2, is_empty=True))
        written.now += 0.02
        due.append(committer.is_row_due)
        commit(batch(3, is_empty=True))
        assert [*due, committer.is_row_due] == [False, True, False]
    assert written.rows == [(1, b""), (3, b"")]


def test_broker_without_a_log_writes_no_empty_batch(written: Written) -> None:
    with commits(written, has_log=False) as (committer, commit):
        commit(batch(1))
        written.now += 60
        assert not committer.is_row_due
        commit(batch(2, is_empty=True))
    assert written.rows == [(1, b"")]


def test_much_history_becomes_a_row_before_a_beat_is_due(written: Written) -> None:
    half = bytes(UNLOGGED_BYTES_MAX // 2)
    with commits(written) as (_, commit):
        commit(batch(1))
        for number in range(2, 5):
            commit(batch(number, half, is_empty=True))
    assert [(number, len(history)) for number, history in written.rows] == [(1, 0), (3, UNLOGGED_BYTES_MAX)]


def test_events_between_two_rows_are_fewer_than_the_numbers_left_out_after_a_crash() -> None:
    smallest = min(event_bytes(kind) for kind in EventKind if COLUMNS[kind])
    assert 2 * UNLOGGED_BYTES_MAX // smallest < GAP_EVENTS


def test_each_batch_becomes_a_row_while_the_broker_stops(written: Written) -> None:
    with commits(written) as (committer, commit):
        commit(batch(1))
        committer.log_each_batch()
        commit(batch(2, b"a", is_empty=True))
        commit(batch(3, b"b", is_empty=True))
    assert written.rows == [(1, b""), (2, b"a"), (3, b"b")]
    assert written.history == [b"a", b"b"]
