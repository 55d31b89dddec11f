"""Tests of which batches the event loop writes itself, by the measured speed of the disk."""

import asyncio
import threading
from typing import cast

import pytest

from truenext.broker import committer as committer_module
from truenext.broker.committer import Committer
from truenext.broker.write_time import WriteTimeEstimate
from truenext.history.writer import HistoryWriter
from truenext.model.batch import Batch
from truenext.store.store import Store

SMALL, LARGE = 10_000, 300_000


def test_a_small_batch_is_written_at_once_until_the_disk_is_known() -> None:
    assert WriteTimeEstimate().is_quick(SMALL)


def test_a_batch_of_two_hundred_messages_is_written_at_once_on_a_quick_disk() -> None:
    pace = WriteTimeEstimate()
    for _ in range(100):
        assert pace.is_quick(LARGE)
        pace.add_write(LARGE, 0.001, is_inline=True)


def test_large_batch_is_not_quick_even_on_a_quick_disk() -> None:
    assert not WriteTimeEstimate().is_quick(8 << 20)


def test_only_small_batches_are_quick_on_a_disk_that_is_slow_for_each_byte() -> None:
    pace = WriteTimeEstimate()
    for _ in range(50):
        pace.add_write(LARGE, 0.004, is_inline=False)
        pace.add_write(SMALL, 0.0001, is_inline=True)
    assert pace.is_quick(SMALL)
    assert not pace.is_quick(LARGE)


def test_small_batch_is_not_quick_on_a_disk_that_is_slow_for_each_write() -> None:
    pace = WriteTimeEstimate()
    for _ in range(50):
        pace.add_write(SMALL, 0.0012, is_inline=False)
    assert not pace.is_quick(SMALL)


def test_a_disk_that_was_slow_once_is_as_quick_as_its_next_quick_write() -> None:
    pace = WriteTimeEstimate()
    pace.add_write(SMALL, 1.0, is_inline=True)
    assert not pace.is_quick(SMALL)
    pace.add_write(LARGE, 0.5, is_inline=False)
    assert not pace.is_quick(SMALL)
    pace.add_write(LARGE, 0.001, is_inline=False)
    assert pace.is_quick(SMALL) and pace.is_quick(LARGE)


def test_a_large_batch_that_took_the_thread_its_time_says_nothing_of_small_ones() -> None:
    pace = WriteTimeEstimate()
    pace.add_write(8 << 20, 0.03, is_inline=False)
    assert pace.is_quick(SMALL)


class DiskThatTurnsSlow:
    """A store whose writes take as long as it is told, by a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds = 0.0001
        self.writers: list[int] = []
        """Threads, one for each batch."""

    def apply(self, _: Batch) -> None:
        self.now += self.seconds
        self.writers.append(threading.get_ident())


def fail(error: Exception) -> None:
    raise error


def batch(number: int, size: int = SMALL) -> Batch:
    made = Batch(number)
    made.puts[b"key"] = b"record"
    made.size = size
    return made


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_after_one_slow_write_the_thread_has_them_until_the_disk_is_quick_again(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    disk = DiskThatTurnsSlow()
    monkeypatch.setattr(committer_module, "monotonic", lambda: disk.now)

    async def run() -> list[bool]:
        """Return, for each of nine batches, whether the event loop wrote it."""
        loop = asyncio.get_running_loop()
        done: asyncio.Queue[Batch] = asyncio.Queue()
        committer = Committer(
            cast(Store, disk), None, loop, WriteTimeEstimate(), on_committed=done.put_nowait, on_failed=fail
        )
        for number, seconds in enumerate([0.0001, 0.0001, 0.0021, 0.01, 0.01, 0.0001, 0.0001, 0.0001, 0.0001], 1):
            disk.seconds = seconds
            while not committer._is_thread_idle:
                await asyncio.sleep(0.001)
            if not committer.commit(batch(number, size)):
                await done.get()
        committer.close()
        return [writer == threading.get_ident() for writer in disk.writers]

    is_at_once = asyncio.run(run())
    # The third is the one that nobody could foresee; the sixth shows that the disk is quick again.
    assert is_at_once == [True, True, True, False, False, False, True, True, True]


class HistoryOfSlowThread:
    """A history whose first two chunks are appended so slowly that the event loop commits the next batch meanwhile."""

    def __init__(self) -> None:
        self.appended: list[bytes] = []
        self.is_next_committed = [threading.Event(), threading.Event()]

    def append(self, chunk: bytes) -> None:
        if chunk == b"1":
            self.appended.append(chunk)
            self.is_next_committed[0].wait(5)
        else:
            if chunk == b"2":
                self.is_next_committed[1].wait(5)
            self.appended.append(chunk)

    def flush(self) -> None:
        pass


class SlowForTheFirst(WriteTimeEstimate):
    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def is_quick(self, size: int) -> bool:
        self._count += 1
        return self._count > 1


def test_history_of_a_batch_stays_behind_that_of_the_batch_before_on_a_slow_thread() -> None:
    """The thread said that it was idle after it had got the second batch. So the event loop wrote the third one."""
    history = HistoryOfSlowThread()

    async def run() -> None:
        done: asyncio.Queue[Batch] = asyncio.Queue()
        committer = Committer(
            cast(Store, DiskThatTurnsSlow()),
            cast(HistoryWriter, history),
            asyncio.get_running_loop(),
            SlowForTheFirst(),
            on_committed=done.put_nowait,
            on_failed=fail,
        )
        for number in (1, 2, 3):
            made = batch(number)
            made.history = b"%d" % number
            is_durable = committer.commit(made)
            if number > 1:
                history.is_next_committed[number - 2].set()
            if not is_durable:
                await done.get()
        committer.close()

    asyncio.run(run())
    assert history.appended == [b"1", b"2", b"3"]
