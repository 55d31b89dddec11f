"""A state machine that makes Spark's calls of a sink in Spark's order, while processes and the broker die at random.

A run of the query takes the first batch that is not in the commit log: tasks draft its rows, which are others each
time, and the driver commits them. Drivers, tasks and operators of earlier runs may still exist and continue.

Source: the order of calls is that of MicroBatchExecution and WriteToDataSourceV2Exec in Spark 4.2.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from random import Random

import pyarrow as pa
import pytest
from pyspark.sql.datasource import WriterCommitMessage

from tests.spark.sink.oracle import PARTITIONS_MAX, Attempt, Disagreement, Oracle
from tests.spark.sink.processes import QUERY, Connection, Process, World
from truenext.errors import TruenextError
from truenext.model.spark_queues import SinkQueues
from truenext.model.url import parse_url
from truenext.spark.datasource import QueueStreamWriter
from truenext.spark.sink import admin, rows
from truenext.spark.sink.driver import OutdatedBatch
from truenext.spark.sink.options import parse_options
from truenext.spark.sink.publish import HeldByAnother
from truenext.testing import BlockingBroker

FAILURES_MAX = 4
"""Failures of one task that end the run."""
ATTEMPTS_MAX = 3
"""Concurrent attempts of one task."""
STEPS_MAX = 50_000
UNSEEN_SECONDS = 60.0
"""Time after which the broker has noticed that a connection is dead."""


class Act(Enum):
    """Event that may happen to a process, or to its broker."""

    DIE = auto()
    """The process dies, and its unwritten bytes are lost."""
    DIE_IN_WRITING = auto()
    """The process dies when a part of its bytes is written."""
    DIE_UNSEEN = auto()
    """The process dies, and the broker notices it by missing heart-beats only."""
    PAUSE = auto()
    """The process is stopped, and the broker may miss its heart-beats."""
    CUT = auto()
    """The connection is cut from outside."""
    CUT_BEHIND = auto()
    """The connection is cut once the broker has carried out what was written."""
    CRASH = auto()
    """The broker crashes."""
    LOSE_COMMIT = auto()
    """The next COMMIT loses its connection, before or after it is carried out."""
    FILL_DISK = auto()


@dataclass(eq=False)
class Task:
    """Task of one run; it may have several attempts."""

    partition: int
    rows: int
    attempts: list[Process] = field(default_factory=list)
    message: WriterCommitMessage | None = None
    authorised: Attempt | None = None
    """Attempt whose message counts."""
    failures: int = 0

    @property
    def is_running(self) -> bool:
        return self.message is None and any(not each.is_over for each in self.attempts)


class _TaskFailed(Exception):
    """The task failed too often, so the run ends."""


_DESTINATIONS = [("out",), ("out",), ("other",), ("out", "other")]


class Machine(World):
    def __init__(self, random: Random, here: BlockingBroker, patch: pytest.MonkeyPatch, steps: list[str]) -> None:
        super().__init__(here, patch, steps)
        self.random = random
        self.oracle = Oracle(here, SinkQueues("main", QUERY))
        self._connect = partial(Connection, self, [parse_url(here.url)])
        self._is_faulty = True
        self._is_disk_full = False
        self._has_lost_commits = False
        """True once the loss of a COMMIT was ordered: it may happen at any time."""
        self._log = 0
        """Batches in the commit log."""
        self._attempt_count = 0
        self._driver_count = 0
        self._calls = 0
        """Running calls that may decide or publish, those of operators included."""
        self._call_count = 0
        """Number of such calls so far."""
        self._doomed: list[Process] = []
        """Processes to be killed."""
        self._steps_left = STEPS_MAX
        # ---- Of the example ----
        self._fault_rate = random.choice([0.0, 0.03, 0.1, 0.3, 0.5])
        self._race_rate = random.choice([0.0, 0.05, 0.3])
        """Probability that a task has several attempts at once."""
        self._zombie_rate = random.choice([0.1, 0.5, 0.9])
        """Probability that a process that Spark does not need any more continues."""
        self._operator_rate = random.choice([0.0, 0.0, 0.01, 0.05])
        self._patience_s = random.choice(["0", "600", "600"])
        self._bundle_rows = random.choice([1, 2, 3])
        patch.setattr(rows, "BUNDLE_ROWS", self._bundle_rows)

    # ---- An example ----

    def run(self) -> None:
        """Raises: Disagreement"""
        try:
            for _ in range(self.random.randint(1, 6)):
                self._live()
                if self.oracle.published_batch is not None:
                    break
            self._settle()
            self._run_to_the_end()
            self.oracle.check_end()
        finally:
            self._is_faulty = False
            self.kill_all()

    def _live(self) -> None:
        """Run the query, until it ends or the next run is started."""
        random = self.random
        batch = self._log
        if random.random() < 0.1:
            # An old checkpoint.
            batch = random.randint(0, batch)
        driver = self._start_driver(batch, random.randint(1, 3))
        while not driver.is_over:
            self._step()
            if random.random() < 0.1 * self._zombie_rate:
                self.note(driver.name, "is left alone")
                break
        if random.random() < 0.1:
            self._operate()
        for _ in range(random.choice([0, 0, 5, 20])):
            if self.processes:
                self._step()

    def _settle(self) -> None:
        """End all faults and all processes, and check."""
        self.note("settles")
        self._is_faulty = False
        self._patience_s = "600"
        self._free_disk()
        for each in self.processes:
            self._wake(each)
        for each in list(self.processes):
            if self.random.random() < 0.5 and each in self.processes:
                self.kill(each)
        while self.processes:
            self._step()
        self.pass_time(UNSEEN_SECONDS)
        self.has_frozen = False
        self.oracle.check_attempts()

    def _run_to_the_end(self) -> None:
        self.note("the last run")
        last = self._start_driver(self._log, 2, has_rows=True)
        self._finish(last)
        if isinstance(last.error, OutdatedBatch) and self.oracle.was_close_tried:
            # One that was killed may have closed it.
            closing = self._start_operator(self._close)
            self._finish(closing)
            if closing.error is not None:
                raise Disagreement("the last operator fails") from closing.error
        elif last.error is not None:
            raise Disagreement("the last run fails") from last.error

    def _finish(self, process: Process) -> None:
        while not process.is_over:
            self._step()

    # ---- Who goes on ----

    def _step(self) -> None:
        random = self.random
        self._steps_left -= 1
        if not self._steps_left:
            raise Disagreement("it goes on for ever")
        for each in self._doomed:
            if not each.is_over:
                self.kill(each)
        self._doomed.clear()
        if not self.processes:
            return
        if self._is_faulty and random.random() < self._operator_rate:
            self._operate()
        if self._is_disk_full and random.random() < 0.1:
            self._free_disk()
        for each in self.processes:
            if each.is_paused and random.random() < 0.05:
                self._wake(each)
        process = self._choose()
        for _ in range(random.choice([1, 1, 2, 5, 10])):
            if process.is_over or not process.has_work:
                return
            self.go(process)
        if self._is_faulty and not process.is_over and random.random() < self._fault_rate:
            self._act(process)

    def _choose(self) -> Process:
        ready = [each for each in self.processes if each.has_work]
        if not ready:
            # A paused driver waits for tasks, or is all there is.
            self._free_disk()
            paused = [each for each in self.processes if each.is_paused]
            assert paused, "somebody has something to do"
            self._wake(self.random.choice(paused))
            return self._choose()
        awake = [each for each in ready if each.wake_at <= self.now]
        if awake and self.random.random() < 0.9:
            return self.random.choice(awake)
        return min(ready, key=lambda process: process.wake_at)

    def _act(self, process: Process) -> None:
        act = self.random.choice([*Act, Act.CUT_BEHIND, Act.CUT_BEHIND])
        self.note(act.name, "at", process.name)
        if act is Act.PAUSE:
            process.is_paused = True
            self.freeze(process)
        elif act in (Act.CUT, Act.CUT_BEHIND):
            self.lose_connection(process, is_carried_out=act is Act.CUT_BEHIND)
        elif act is Act.CRASH:
            self.here.crash()
            self.has_frozen = False
            self.disturbances += 1
        elif act is Act.LOSE_COMMIT:
            self.here.lose_commit(self.random.choice(["before", "after"]), required=False)
            self._has_lost_commits = True
        elif act is Act.FILL_DISK:
            self.here.fill_disk()
            self._is_disk_full = True
            self.disturbances += 1
        else:
            if act is not Act.DIE:
                share = self.random.choice([1.0, self.random.random()]) if act is Act.DIE_IN_WRITING else 1.0
                for each in process.connections:
                    each.write_some(share)
            if act is Act.DIE_UNSEEN:
                self.quiesce()
                self.freeze(process)
            self.kill(process)

    def _wake(self, process: Process) -> None:
        if process.is_paused:
            self.note(process.name, "is woken")
            process.is_paused = False
            self.thaw(process)

    def _free_disk(self) -> None:
        self.here.free_disk()
        self._is_disk_full = False

    # ---- The driver ----

    def _start_driver(self, batch: int, batches: int, *, has_rows: bool = False) -> Process:
        self._driver_count += 1
        tasks: list[Task] = []

        def drive() -> None:
            try:
                for each in range(batch, batch + batches):
                    tasks[:] = self._draw_tasks(has_rows=has_rows)
                    self._run_batch(driver, each, tasks)
            except (_TaskFailed, TruenextError) as error:
                self.note(driver.name, "fails:", repr(error))
                driver.error = error
            finally:
                for task in tasks:
                    self._leave(task)

        driver = self.start(Process(f"driver {self._driver_count}", drive))
        self.note(driver.name, "starts with batch", batch)
        return driver

    def _draw_tasks(self, *, has_rows: bool) -> list[Task]:
        random = self.random
        rows_max = random.choice([0, 1, 2, 4, 4, 4]) * self._bundle_rows
        tasks = [Task(each, random.randint(0, rows_max)) for each in range(random.randint(1, PARTITIONS_MAX))]
        tasks[0].rows += has_rows
        return tasks

    def _run_batch(self, driver: Process, batch: int, tasks: list[Task]) -> None:
        """Raises: _TaskFailed, TruenextError"""
        writer = self._writer()
        try:
            for task in tasks:
                for _ in range(ATTEMPTS_MAX):
                    self._start_attempt(task, batch)
                    if self.random.random() >= self._race_rate:
                        break
            while left := [each for each in tasks if each.message is None]:
                self.await_until(lambda left=left: any(not each.is_running for each in left))  # type: ignore[misc]
                for task in left:
                    if not task.is_running:
                        self._go_on_with_task(task, batch)
            self._commit(driver, writer, batch, tasks)
        except (_TaskFailed, TruenextError):
            writer.abort([each.message for each in tasks], batch)
            raise
        self.pause()
        self._log = max(self._log, batch + 1)

    def _go_on_with_task(self, task: Task, batch: int) -> None:
        """Raises: _TaskFailed"""
        if task.message is not None:
            self._leave(task)
        elif task.failures < FAILURES_MAX:
            task.failures += 1
            self._start_attempt(task, batch)
        else:
            raise _TaskFailed

    def _commit(self, driver: Process, writer: QueueStreamWriter, batch: int, tasks: list[Task]) -> None:
        """Raises: TruenextError"""
        attempts = [each.authorised for each in tasks if each.authorised]
        call = self.oracle.begin(f"commit({batch}) of {driver.name}", batch, attempts)
        messages = [pickle.loads(pickle.dumps(each.message)) for each in tasks]
        self.note(call.name, messages)
        with self._calling():
            is_calm = self._calls == 1 and not self.has_frozen and not self._has_lost_commits
            before = self._call_count, self.disturbances
            try:
                writer.commit(messages, batch)
            except OutdatedBatch:
                self.oracle.on_outdated(call)
                raise
            except HeldByAnother:
                self._check_not_alone(driver)
                raise
            call.is_calm = is_calm and before == (self._call_count, self.disturbances)
            self.oracle.on_return(call)
        self.note(call.name, "returns")

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Count a call of a driver or an operator that may decide or publish."""
        self._calls += 1
        self._call_count += 1
        try:
            yield
        finally:
            self._calls -= 1

    def _check_not_alone(self, process: Process) -> None:
        if self.processes == [process]:
            raise Disagreement(f"{process.name} waits for another process, and there is none")

    def _writer(self) -> QueueStreamWriter:
        options = {"url": self.here.url, "patience": self._patience_s}
        return QueueStreamWriter(parse_options(options, is_streaming=True))

    # ---- Tasks ----

    def _start_attempt(self, task: Task, batch: int) -> None:
        destinations = [self.random.choice(_DESTINATIONS) for _ in range(task.rows)]
        self._attempt_count += 1
        attempt = Attempt(self._attempt_count, batch, task.partition, destinations)

        def write() -> None:
            # Spark unpickles a writer for each task.
            try:
                message = self._writer().write(self._batches(attempt))
            except TruenextError as error:
                self.note(process.name, "fails:", repr(error))
                return
            if task.message is None:
                task.message, task.authorised = message, attempt

        process = self.start(Process(f"task {batch}.{task.partition}, attempt {attempt.number}", write, attempt))
        task.attempts.append(process)

    def _batches(self, attempt: Attempt) -> Iterator[pa.RecordBatch]:
        rows = list(zip(attempt.rows, attempt.destinations, strict=True))
        while rows:
            count = self.random.choice([1, 3, 10])
            now, rows = rows[:count], rows[count:]
            queues = [",".join(f"/queue/{queue}" for queue in destinations) for _, destinations in now]
            yield pa.RecordBatch.from_pydict({"body": [row.body for row, _ in now], "queue": queues})
            self.pause()

    def _leave(self, task: Task) -> None:
        """Have the attempts of a task killed that Spark does not need any more; some continue as zombies."""
        for each in task.attempts:
            if not each.is_over and (not self._is_faulty or self.random.random() >= self._zombie_rate):
                self._doomed.append(each)

    # ---- Operators ----

    def _operate(self) -> None:
        self._start_operator(self._close if self.random.random() < 0.2 else self._publish)

    def _start_operator(self, action: Callable[[], object]) -> Process:
        def operate() -> None:
            try:
                with self._calling():
                    action()
            except TruenextError as error:
                self.note(operator.name, "fails:", repr(error))
                operator.error = error
                if isinstance(error, HeldByAnother):
                    self._check_not_alone(operator)

        operator = self.start(Process(f"operator, {action.__name__.strip('_')}", operate))
        return operator

    def _publish(self) -> None:
        with self._connect() as broker:
            batch = admin.publish_decision(broker, self.oracle.queues)
        self.oracle.on_published(batch)

    def _close(self) -> None:
        self.oracle.was_close_tried = True
        with self._connect() as broker:
            batch = admin.close_sink(broker, self.oracle.queues)
        self.note("closed after", batch)
        self.oracle.on_closed(batch)
