"""Tests that every timer comes when it is due, and once, with few timers in memory."""

import random
from collections import deque

import pytest

from truenext.engine.memory import timers as module
from truenext.engine.memory.timers import TimerRead, Timers, TimersResult
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.event_log import NoEventLog
from truenext.model.batch import Batch
from truenext.model.record import lane_key, split_timer, timer_key
from truenext.store.memory import MemoryStore

LANE = lane_key(1, 5)


class Shell:
    """Timers, a store, and everything between them one step at a time."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.store.recover()
        self.pages: deque[tuple[TimerRead, TimersResult]] = deque()
        self.start_run()

    def start_run(self) -> None:
        self.commit_state = CommitState(NoEventLog())
        self.timers = Timers(self.commit_state)
        self.in_flight: Batch | None = None

    def write(self) -> None:
        if self.in_flight is not None:
            self.commit_state.set_committed(self.in_flight)
            self.timers.on_committed()
        self.in_flight = self.commit_state.close_batch()
        self.store.apply(self.in_flight)

    def read(self) -> None:
        read = self.timers.next_read()
        if read is not None:
            page = self.store.read_timers(read.after, read.limit)
            self.pages.append((read, TimersResult(page.timers, page.as_of, page.is_end)))

    def close_batch(self) -> None:
        if self.pages:
            self.timers.on_page_read(*self.pages.popleft())

    def all_due(self, now_ms: int) -> list[bytes]:
        """Taken and cleared, with all reading that it needs."""
        self.commit_state.now_ms = now_ms
        found = []
        while True:
            while (due := self.timers.pop_due()) is not None:
                self.timers.clear_unless_set_again(due)
                found.append(due)
            self.read()
            if not self.pages:
                return found
            self.close_batch()


@pytest.mark.parametrize("seed", range(200))
def test_timers_come_in_order_and_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMERS_MAX", 6)
    monkeypatch.setattr(module, "PAGE_SIZE", 3)
    rng = random.Random(seed)
    shell, expected = Shell(), set[bytes]()
    for _ in range(200):
        action = rng.random()
        if action < 0.5:
            one = timer_key(shell.commit_state.now_ms + rng.randrange(30), LANE, rng.randrange(3) << 10)
            shell.timers.set(one)
            expected.add(one)
        elif action < 0.6:
            shell.write()
        elif action < 0.7:
            shell.read()
        elif action < 0.8:
            shell.close_batch()
        elif action < 0.97:
            shell.commit_state.now_ms += rng.randrange(4)
            due = sorted(one for one in expected if split_timer(one)[0] <= shell.commit_state.now_ms)
            found, early = [], []
            while (popped := shell.timers.pop_due()) is not None:
                found.append(popped)
                if rng.random() < 0.2:
                    early.append(popped)
                else:
                    shell.timers.clear_unless_set_again(popped)
            # Some may have to be read first.
            assert found == due[: len(found)]
            expected.difference_update(found)
            # Meanwhile others are set, and some of those in memory leave it.
            for ahead_ms in rng.sample(range(30), rng.randrange(8)):
                later = timer_key(shell.commit_state.now_ms + ahead_ms, LANE, 0)
                shell.timers.set(later)
                expected.add(later)
            for one in early:
                shell.timers.put_back(one)
                expected.add(one)
        else:
            # The broker ends, and what was not durable with it.
            now_ms = shell.commit_state.now_ms
            shell.start_run()
            shell.commit_state.now_ms = now_ms
            shell.pages.clear()
            shell.store.recover()
            expected = set(shell.store.read_timers(b"", 10**6).timers)
    assert sorted(shell.all_due(shell.commit_state.now_ms + 100)) == sorted(expected)
    shell.write()
    assert shell.store.read_timers(b"", 10).timers == []


def test_timer_put_back_comes_again_although_it_leaves_memory_before_it_is_durable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fixed: the timer was lost until a restart, and the expired message stayed as long."""
    monkeypatch.setattr(module, "TIMERS_MAX", 2)
    shell = Shell()
    shell.read()
    shell.close_batch()
    shell.commit_state.now_ms = 10
    first, second, early = (timer_key(due_ms, LANE, 0) for due_ms in (1, 2, 3))
    shell.timers.set(early)
    assert shell.timers.pop_due() == early
    shell.timers.put_back(early)
    shell.timers.set(first)
    shell.timers.set(second)
    assert early not in shell.timers.in_memory
    assert [shell.timers.pop_due(), shell.timers.pop_due()] == [first, None]
    shell.read()
    shell.close_batch()
    assert shell.timers.in_memory == [second, early]


def test_number_of_timers_in_memory_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell()
    shell.read()
    shell.close_batch()
    for number in range(20_000):
        shell.timers.set(timer_key(number * 7919 % 20_000, LANE, 0))
        if number % 500 == 0:
            shell.write()
        assert len(shell.timers.in_memory) <= module.TIMERS_MAX
        assert len(shell.timers._unstored_batches) <= 1000
    shell.write()
    assert [split_timer(one)[0] for one in shell.all_due(20_000)] == list(range(20_000))


def test_timer_that_is_set_already_is_not_written_again() -> None:
    shell = Shell()
    shell.read()
    shell.close_batch()
    one = timer_key(5, LANE, 0)
    shell.timers.set(one)
    shell.write()
    shell.write()
    shell.timers.set(one)
    assert not shell.commit_state.batch.timers


def test_timer_set_again_while_it_is_handled_is_not_cleared() -> None:
    shell = Shell()
    shell.read()
    shell.close_batch()
    one = timer_key(5, LANE, 0)
    shell.timers.set(one)
    shell.write()
    shell.commit_state.now_ms = 5
    assert shell.timers.pop_due() == one
    shell.timers.set(one)
    shell.timers.clear_unless_set_again(one)
    shell.write()
    assert shell.store.read_timers(b"", 10).timers == [one]
    assert shell.timers.pop_due() == one
