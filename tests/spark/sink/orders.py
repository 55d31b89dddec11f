"""All orders in which two processes of a sink write to the broker, with at most two switches between them.

A process stops before each write to the broker. When the other one continues, it may be killed, or lose its connection
once the broker has carried out its next write. A process that waits for the other one lets it continue.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from itertools import product
from typing import NamedTuple

import pytest

from tests.spark.sink.oracle import Attempt, Disagreement, Oracle
from tests.spark.sink.processes import QUERY, Connection, Process, World
from tests.spark.sink.small_write import bundles_of
from truenext.errors import ConnectionLost
from truenext.model.spark_queues import SinkQueues
from truenext.model.url import parse_url
from truenext.spark.broker.patience import Patience
from truenext.spark.datasource import QueueStreamWriter
from truenext.spark.sink import admin
from truenext.spark.sink.draft import WrittenDrafts, write_drafts
from truenext.spark.sink.driver import OutdatedBatch
from truenext.spark.sink.options import parse_options
from truenext.testing import BlockingBroker


class End(Enum):
    """End of a process's turn, when the other one continues."""

    LEFT = auto()
    KILLED = auto()
    CUT = auto()
    """The broker carries out the process's next write, and its connection is lost."""


class Turn(NamedTuple):
    process: int
    writes: int
    end: End


Order = tuple[Turn, ...]
"""Turns of an order. Afterwards the first process runs to its end, and then the other one."""

_Rows = dict[int, int]
"""Number of rows of each partition; every two are a bundle."""

_FIRST: _Rows = {0: 3}
_SECOND: _Rows = {0: 1, 1: 2}
_CLOSE = -1


class Scenario(NamedTuple):
    name: str
    before: tuple[int, ...]
    """Batches published before."""
    programs: tuple[tuple[int, ...], tuple[int, ...]]
    """Batches that each process commits; _CLOSE closes the sink."""
    rows: tuple[_Rows, _Rows] = (_FIRST, _SECOND)


SCENARIOS = [
    Scenario("the first batch twice", (), ((0,), (0,))),
    Scenario("a later batch twice", (0,), ((1,), (1,))),
    Scenario("one batch behind", (), ((0,), (0, 1))),
    # For the second the batch before had no rows.
    Scenario("two first batches", (), ((0,), (1,))),
    Scenario("two later batches", (0,), ((1,), (2,))),
    Scenario("an old batch without rows", (0, 1), ((2,), (0,)), (_FIRST, {})),
    Scenario("a query that is closed", (0,), ((1,), (_CLOSE,))),
    Scenario("a query that is closed at its first batch", (), ((0,), (_CLOSE,))),
]


_ENDS = [
    (End.LEFT, End.LEFT),
    (End.KILLED, End.LEFT),
    (End.LEFT, End.KILLED),
    (End.CUT, End.LEFT),
    (End.LEFT, End.CUT),
]


def orders(writes: tuple[int, int]) -> Iterator[Order]:
    """Yield all orders of two processes with these numbers of writes."""
    for first in (0, 1):
        second = 1 - first
        for before, between in product(range(1, writes[first] + 1), range(1, writes[second] + 1)):
            for one, other in _ENDS:
                yield Turn(first, before, one), Turn(second, between, other)
            for last in range(1, writes[first] - before + 1):
                yield (
                    Turn(first, before, End.LEFT),
                    Turn(second, between, End.LEFT),
                    Turn(first, last, End.KILLED),
                )


@dataclass
class _Drafted:
    messages: list[WrittenDrafts] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)


class Orders(World):
    """Processes of a scenario that write in one order."""

    def __init__(self, scenario: Scenario, here: BlockingBroker, patch: pytest.MonkeyPatch, steps: list[str]) -> None:
        super().__init__(here, patch, steps)
        self.oracle = Oracle(here, SinkQueues("main", QUERY))
        self._scenario = scenario
        self._connect = partial(Connection, self, [parse_url(here.url)])
        self._attempt_count = 0

    def run(self, order: Order) -> tuple[int, int]:
        """Return how often each process has written.

        Raises: Disagreement
        """
        for batch in self._scenario.before:
            self._commit("the run before", batch, self._draft(batch, _FIRST))
        processes = [self._start(number) for number in (0, 1)]
        writes = [0, 0]
        try:
            for turn in order:
                process = processes[turn.process]
                for _ in range(turn.writes):
                    self._go(process)
                self.note(process.name, turn.writes, turn.end.name)
                if process.is_over:
                    continue
                if turn.end is End.KILLED:
                    self.kill(process)
                elif turn.end is End.CUT:
                    self.lose_connection(process, is_carried_out=True)
            for number in dict.fromkeys([*(turn.process for turn in order), 0, 1]):
                while not processes[number].is_over:
                    self._go(processes[number])
                    writes[number] += 1
            self._check()
        finally:
            self.kill_all()
        return writes[0], writes[1]

    def _check(self) -> None:
        """Start the query again, and check the end."""
        batch = max(max(each) for each in self._scenario.programs)
        if self.oracle.was_close_tried:
            self._close()
        for each in (batch, batch + 1):
            # A repeated batch has other rows, and in another partition.
            if self._commit("the last run", each, self._draft(each, {2: 1})) is self.oracle.was_close_tried:
                raise Disagreement("the last run fails, or the sink is not closed")
        self.oracle.check_end()

    def _go(self, process: Process) -> None:
        """Let a process run; a sleeping one waits for the other."""
        while not process.is_over and process.wake_at > self.now:
            others = [each for each in self.processes if each is not process and each.wake_at <= self.now]
            if not others:
                break
            self.go(others[0])
        if not process.is_over:
            self.go(process)

    def _start(self, number: int) -> Process:
        name = f"process {number}"
        rows = self._scenario.rows[number]
        batches = self._scenario.programs[number]
        first = _Drafted() if batches[0] == _CLOSE else self._draft(batches[0], rows)

        def run() -> None:
            drafted = first
            for each in batches:
                if each == _CLOSE:
                    self._close()
                    continue
                if each != batches[0]:
                    drafted = self._draft(each, rows)
                if not self._commit(name, each, drafted):
                    return

        return self.start(Process(name, run))

    def _draft(self, batch: int, rows: _Rows) -> _Drafted:
        """Write drafts as tasks do, without a stop."""
        process, self.current = self.current, None
        drafted = _Drafted()
        for partition, count in (rows or {0: 0}).items():
            self._attempt_count += 1
            attempt = Attempt(self._attempt_count, batch, partition, [("out",)] * count)
            made = bundles_of(*(row.body for row in attempt.rows))
            queues = self.oracle.queues
            drafted.messages.append(write_drafts(made, queues, batch, partition, self._connect, Patience(0)))
            drafted.attempts.append(attempt)
        self.current = process
        return drafted

    def _commit(self, name: str, batch: int, drafted: _Drafted) -> bool:
        """Commit a batch; False if it is too late."""
        call = self.oracle.begin(f"commit({batch}) of {name}", batch, drafted.attempts)
        writer = QueueStreamWriter(parse_options({"url": self.here.url}, is_streaming=True))
        try:
            writer.commit([*drafted.messages], batch)
        except OutdatedBatch:
            self.oracle.on_outdated(call)
            return False
        self.oracle.on_return(call)
        self.note(call.name, "returns")
        return True

    def _close(self) -> None:
        """Close the sink, as an operator who repeats it after a lost connection."""
        self.oracle.was_close_tried = True
        while self.oracle.published_batch is None:
            with suppress(ConnectionLost), self._connect() as broker:
                self.oracle.on_closed(admin.close_sink(broker, self.oracle.queues))
