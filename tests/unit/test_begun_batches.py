"""Tests of batches that the event loop begins, and of those that it leaves to the thread."""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import cast
from unittest import mock

import pytest

from truenext.broker import committer as committer_module
from truenext.broker.committer import Committer
from truenext.broker.write_time import WriteTimeEstimate
from truenext.cli.loops import new_event_loop
from truenext.errors import StoreError, TruenextError
from truenext.history.writer import HistoryWriter
from truenext.model.batch import Batch
from truenext.store.store import Progress, Store

PATIENCE_S = 5.0


class Answering:
    """Store with a log, whose answers a test gives."""

    def __init__(self) -> None:
        self.ours, self._theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.is_refusing = False
        """True while no batch can be begun."""
        self.progress = Progress.APPLIED
        self.is_sent = True
        self.advance_count = 0
        self.on_advance: Callable[[], object] = self.receive
        self.error: Exception | None = None
        self.begun: list[int] = []
        self.waited: list[tuple[int, bool]] = []
        """Batches that were applied by a call that may wait, and whether the socket was watched then."""
        self.may_apply = threading.Event()
        self.may_apply.set()
        self.is_watched: Callable[[], bool] = lambda: False

    @property
    def socket(self) -> int:
        return self.ours.fileno()

    def begin(self, batch: Batch) -> "Answering | None":
        if self.is_refusing:
            return None
        self.begun.append(batch.number)
        return self

    def advance(self) -> Progress:
        self.advance_count += 1
        self.on_advance()
        if self.error is not None:
            raise self.error
        return self.progress

    def apply(self, batch: Batch) -> None:
        self.waited.append((batch.number, self.is_watched()))
        assert self.may_apply.wait(PATIENCE_S)

    def receive(self) -> None:
        self.ours.recv(100)

    def answer(self) -> None:
        self._theirs.send(b"x")

    def fill(self) -> None:
        """Let the socket take no more."""
        self.is_sent = False
        self.progress = Progress.WAITING
        self.on_advance = lambda: None
        with suppress(BlockingIOError):
            while True:
                self.ours.send(bytes(1 << 16))

    def drain(self) -> None:
        self._theirs.setblocking(False)
        with suppress(BlockingIOError):
            while self._theirs.recv(1 << 16):
                pass

    def close(self) -> None:
        self.ours.close()
        self._theirs.close()


class Run:
    """Committer, with what it has said."""

    def __init__(self) -> None:
        self.store = Answering()
        self.committed: asyncio.Queue[int] = asyncio.Queue()
        self.failures: list[TruenextError] = []
        self.history = mock.Mock(spec=HistoryWriter)
        loop = asyncio.get_running_loop()
        self.committer = Committer(
            cast(Store, self.store),
            self.history,
            loop,
            WriteTimeEstimate(),
            has_log=True,
            on_committed=lambda batch: self.committed.put_nowait(batch.number),
            on_failed=self.failures.append,
        )
        self.store.is_watched = self.is_watched

    def is_watched(self) -> bool:
        return self.committer._socket >= 0 or self.committer._is_sending

    def commit(self, number: int) -> None:
        made = Batch(number)
        made.puts[b"key"] = b"record"
        made.history = b"%d" % number
        assert not self.committer.commit(made)
        assert self.committer.is_busy

    async def next_committed(self) -> int:
        return await asyncio.wait_for(self.committed.get(), PATIENCE_S)

    async def commit_by_answer(self, number: int) -> None:
        self.commit(number)
        self.store.answer()
        assert await self.next_committed() == number

    def close(self) -> None:
        self.committer.close()
        self.store.close()


def run(
    test: Callable[[Run], Awaitable[None]], new_loop: Callable[[], asyncio.AbstractEventLoop] = new_event_loop
) -> None:
    async def run_and_close() -> None:
        one = Run()
        try:
            async with asyncio.timeout(2 * PATIENCE_S):
                await test(one)
        finally:
            one.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run_and_close())


async def pass_time(seconds: float = 0.02) -> None:
    await asyncio.sleep(seconds)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer_module, "ANSWER_SECONDS_MAX", PATIENCE_S)


def test_begun_batch_is_committed_by_its_answer_without_the_thread() -> None:
    async def test(one: Run) -> None:
        for number in (1, 2):
            one.commit(number)
            await pass_time()
            assert one.committed.empty()
            one.store.answer()
            assert await one.next_committed() == number
            assert not one.committer.is_busy
        assert one.store.waited == []
        assert [call.args for call in one.history.append.call_args_list] == [(b"1",), (b"2",)]

    run(test)


def test_begun_batch_takes_the_history_of_batches_without_a_row_along() -> None:
    async def test(one: Run) -> None:
        await one.commit_by_answer(1)
        alone = Batch(2)
        alone.history = b"2"
        assert one.committer.commit(alone) or await one.next_committed() == 2
        await one.commit_by_answer(3)
        assert one.store.begun == [1, 3] and one.store.waited == []
        assert [call.args for call in one.history.append.call_args_list] == [(b"1",), (b"23",)]

    run(test)


def test_answer_that_is_not_complete_is_waited_for() -> None:
    async def test(one: Run) -> None:
        one.store.progress = Progress.WAITING
        one.commit(1)
        one.store.answer()
        await pass_time()
        assert one.committed.empty() and one.committer.is_busy
        one.store.progress = Progress.APPLIED
        one.store.answer()
        assert await one.next_committed() == 1

    run(test)


def test_rest_of_a_batch_is_sent_once_the_socket_takes_it() -> None:
    async def test(one: Run) -> None:
        one.store.fill()
        one.commit(1)
        await pass_time()
        assert one.store.advance_count == 0
        one.store.drain()
        while one.store.advance_count < 3:
            await pass_time(0.001)
        one.store.is_sent = True
        await pass_time()
        count = one.store.advance_count
        await pass_time()
        assert one.store.advance_count == count, "the socket stays writable"
        assert one.committed.empty() and one.committer.is_busy
        one.store.progress, one.store.on_advance = Progress.APPLIED, one.store.receive
        one.store.answer()
        assert await one.next_committed() == 1
        assert one.store.waited == []

    run(test)


def test_batch_is_advanced_by_what_the_server_sends_while_the_socket_takes_nothing() -> None:
    async def test(one: Run) -> None:
        one.store.fill()
        one.commit(1)
        await pass_time()
        one.store.progress = Progress.IN_DOUBT
        one.store.answer()
        assert await one.next_committed() == 1
        assert one.store.waited == [(1, False)]

    run(test)


@pytest.mark.parametrize("new_loop", [new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_connection_that_is_closed_while_a_batch_is_sent_is_left_to_the_thread(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """asyncio's loop cannot change what it watches of a closed socket; uvloop ends the process if it watches one."""

    async def test(one: Run) -> None:
        one.store.fill()
        one.store.progress, one.store.on_advance = Progress.IN_DOUBT, one.store.ours.close
        one.commit(1)
        one.store.drain()
        assert await one.next_committed() == 1
        assert one.store.waited == [(1, False)]

    run(test, new_loop)


def test_batch_that_is_not_sent_in_time_is_left_to_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer_module, "ANSWER_SECONDS_MAX", 0.02)

    async def test(one: Run) -> None:
        one.store.fill()
        one.commit(1)
        assert await one.next_committed() == 1
        assert one.store.waited == [(1, False)]
        one.store.drain()
        await pass_time()
        assert one.store.advance_count == 0

    run(test)


def test_batch_that_cannot_be_begun_is_written_by_the_thread() -> None:
    async def test(one: Run) -> None:
        await one.commit_by_answer(1)
        one.store.is_refusing = True
        one.commit(2)
        assert await one.next_committed() == 2
        assert one.store.waited == [(2, False)]

    run(test)


def test_batch_in_doubt_is_left_to_the_thread() -> None:
    async def test(one: Run) -> None:
        one.store.progress = Progress.IN_DOUBT
        one.commit(1)
        one.store.answer()
        assert await one.next_committed() == 1
        assert one.store.begun == [1]
        # The thread may close the connection.
        assert one.store.waited == [(1, False)]
        while not one.committer._is_thread_idle:
            await pass_time(0.001)
        one.history.append.assert_called_once()

    run(test)


def test_batch_without_an_answer_is_left_to_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer_module, "ANSWER_SECONDS_MAX", 0.02)

    async def test(one: Run) -> None:
        one.commit(1)
        assert await one.next_committed() == 1
        assert one.store.waited == [(1, False)]

    run(test)


def test_no_batch_is_begun_while_the_thread_has_another() -> None:
    """The thread writes its history when the batch is committed already."""

    async def test(one: Run) -> None:
        may_go_on = threading.Event()
        one.history.append.side_effect = lambda chunk: chunk != b"1" or may_go_on.wait(PATIENCE_S)
        one.store.is_refusing = True
        one.commit(1)
        assert await one.next_committed() == 1
        one.store.is_refusing = False
        one.commit(2)
        assert one.store.begun == []
        may_go_on.set()
        assert await one.next_committed() == 2

    run(test)


@pytest.mark.parametrize("error", [StoreError("the disk is full"), ValueError("a fault")])
def test_failed_batch_fails_the_committer(error: Exception) -> None:
    async def test(one: Run) -> None:
        one.store.error = error
        one.commit(1)
        one.store.answer()
        await pass_time()
        (failure,) = one.failures
        assert str(error) in str(failure)
        assert one.committed.empty() and one.store.waited == []

    run(test)


def test_failed_history_of_a_begun_batch_fails_the_committer() -> None:
    async def test(one: Run) -> None:
        one.history.append.side_effect = StoreError("the disk is full")
        one.commit(1)
        one.store.answer()
        await pass_time()
        assert len(one.failures) == 1 and one.committed.empty()

    run(test)


def test_connection_that_ends_between_two_batches_does_not_wake_the_loop_again_and_again() -> None:
    async def test(one: Run) -> None:
        await one.commit_by_answer(1)
        assert one.is_watched()
        one.store.answer()
        await pass_time()
        assert not one.is_watched()
        one.commit(2)
        assert await one.next_committed() == 2

    run(test)


def test_close_leaves_a_begun_batch_to_the_thread_and_waits_for_it() -> None:
    async def test(one: Run) -> None:
        one.commit(1)
        one.committer.close()
        assert one.store.waited == [(1, False)]
        assert not one.committer._thread.is_alive()
        assert await one.next_committed() == 1

    run(test)
