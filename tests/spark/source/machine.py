"""A state machine that makes Spark's calls of a source in Spark's order, while processes and the broker die at random,
and the check of what comes out.

All but the broker runs in one thread. A step of another process happens within a process's own call, between two of its
frames, so an example draws which of several attempts continues at which point of another one.

Source: the order of calls is that of MicroBatchExecution in Spark 4.2.
"""

from __future__ import annotations

import json
import pickle
import time
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

from tests.integration.broker_process import BrokerProcess
from tests.integration.raw_client import RawClient
from tests.spark.breakable_connection import BreakableConnection
from truenext.spark import datasource
from truenext.spark.broker import connection
from truenext.spark.broker.patience import Patience
from truenext.spark.datasource import PlannedTask, QueueStreamReader, TruenextDataSource
from truenext.spark.source import bundle, driver, task
from truenext.spark.source.options import SourceOptions, parse_options
from truenext.spark.source.task import Superseded
from truenext.testing import BlockingBroker

ATTEMPTS_MAX = 3
"""Concurrent attempts of one task."""
RETURN_SECONDS = 30.0
"""Time after which a broker has noticed that a frozen connection is dead."""
IDLE_ROUNDS_MAX = 200
CONNECTIONS_MAX = 3000
"""Connections of an example that show an endless loop; examples have 200 at most."""
"""Until a query that nothing disturbs has read all there is."""


class Disagreement(AssertionError):
    """The source has not done what it promises."""


class Killed(BaseException):
    """The process was killed, and does not continue."""


class Here(Protocol):
    """A broker that can be killed and started again."""

    @property
    def url(self) -> str: ...

    def crash(self) -> None:
        """Kill the broker, and start it again."""


class BrokerOfProcess:
    """Process of `truenext serve`, killed by kill -9."""

    def __init__(self, process: BrokerProcess) -> None:
        self._process = process
        self.url = f"stomp://127.0.0.1:{process.port}"

    def crash(self) -> None:
        port = self._process.port
        self._process.kill()
        self._process.start(port)


class Act(Enum):
    """Event that may happen between two frames of a process."""

    DIE = auto()
    """The process dies, and its unwritten bytes are lost."""
    DIE_IN_WRITING = auto()
    """The process dies when a part of its bytes is written."""
    DIE_UNSEEN = auto()
    """The process dies, and the broker notices it by missing heart-beats only."""
    CUT = auto()
    """The connection is cut from outside."""
    CUT_BEHIND = auto()
    """The connection is cut once the broker has carried out what was written."""
    CRASH = auto()
    """The broker crashes."""
    LOSE_COMMIT = auto()
    """The next COMMIT loses its connection, before or after it is carried out."""
    OTHERS = auto()
    """Other attempts continue."""
    SEND = auto()
    FILL_DISK = auto()


ACTS_WITH_PROCESS = [Act.DIE, Act.DIE_IN_WRITING, Act.CUT, Act.CRASH, *[Act.OTHERS] * 3, Act.SEND]
"""Events with a broker in a process of its own, which does not support the others."""


@dataclass
class Sent:
    id: str
    queue: str
    priority: int
    is_persistent: bool
    group: str | None
    colour: str
    body: bytes
    extras: dict[str, str]
    crashes_before: int


@dataclass(eq=False, kw_only=True)
class Process:
    """A driver, or the attempt of a task."""

    name: str
    connections: list[Connection] = field(default_factory=list)

    def die(self) -> None:
        for each in self.connections:
            each.shut()


@dataclass(eq=False, kw_only=True)
class Attempt(Process):
    planned: PlannedTask
    rows: Generator[Any, None, None]
    seen: list[Row] = field(default_factory=list)
    is_over: bool = False
    """True if the attempt is over, whatever the reason."""
    has_ended: bool = False
    """True if the attempt has given all rows."""
    disturbances: int = -1
    """Number of disturbances when the attempt started to take; -1 if it was not alone, or not the first."""

    @property
    def key(self) -> TaskKey:
        end = self.planned.plan.end
        return TaskKey(end.id, end.batch, self.planned.plan.partition)


class TaskKey(NamedTuple):
    query: str
    batch: int
    partition: int


Row = dict[str, Any]


class Connection(BreakableConnection):
    """A connection to which the machine may do something before any call."""

    def __init__(self, machine: Machine, addresses: Any, credentials: Any) -> None:
        self._machine = machine
        self.owner = machine.stack[-1]
        self._calls_left = -1
        machine.connections_made += 1
        if machine.connections_made > CONNECTIONS_MAX:
            raise Disagreement(f"{self.owner.name} connects again and again")
        super().__init__(addresses, credentials)
        self.owner.connections.append(self)
        self._calls_left = machine.draw_calls()

    def post(self, command: str, headers: Any, body: bytes = b"") -> None:
        self._tick()
        super().post(command, headers, body)

    def start_call(self, command: str, headers: Any, body: bytes = b"") -> Any:
        self._tick()
        return super().start_call(command, headers, body)

    def wait(self, answer: Any) -> Any:
        self._tick()
        return super().wait(answer)

    def next_message(self, subscription: str | tuple[str, ...], seconds: float) -> Any:
        self._tick()
        return super().next_message(subscription, seconds)

    def _tick(self) -> None:
        if self._calls_left > 0:
            self._calls_left -= 1
            if not self._calls_left and self._machine.is_faulty:
                self._calls_left = self._machine.draw_calls()
                self._machine.act(self)


class Machine:
    def __init__(self, random: Random, here: Here, patch: pytest.MonkeyPatch, steps: list[str], name: str) -> None:
        """`name` must differ from the names of all other examples of this broker."""
        self.random = random
        self.here = here
        self.steps = steps
        self.is_faulty = False
        self.stack: list[Process] = []
        self.attempts: list[Attempt] = []
        """Attempts that are not over."""
        self.connections_made = 0
        self._name = name
        self._port = int(here.url.rpartition(":")[2])
        # ---- Of the example ----
        has_several = random.random() < 0.4
        self._queues = [f"{name}.a", f"{name}.b.c"] if has_several else [name]
        several = [f"{name}.>", f"{name}.>", f"{name}.b.c,{name}.a", f"{name}.a, {name}.b.>"]
        self._queue = random.choice(several) if has_several else name
        self._selector = random.choice([None, None, "colour = 'red'"])
        self._has_groups = random.random() < 0.4
        self._has_transients = random.random() < 0.4
        self._fault_rate = random.choice([0.0, 0.3, 0.6, 0.9])
        self._race_rate = random.choice([0.1, 0.1, 0.5])
        """Probability that a task has several attempts at once."""
        self._acts = ACTS_WITH_PROCESS if not isinstance(here, BlockingBroker) else [*Act, *[Act.OTHERS] * 4]
        self._rival: RawClient | None = None
        # ---- What Spark keeps ----
        self._offsets: list[dict[str, Any]] = []
        """The offset log."""
        self._commits = 0
        """Batches in the commit log."""
        self._sink: dict[int, list[Row]] = {}
        # ---- The oracle ----
        self._sent: dict[str, Sent] = {}
        self._rows: dict[TaskKey, list[Row]] = {}
        """Rows of each task, as far as any attempt has given them."""
        self._complete: set[TaskKey] = set()
        self._taken: dict[int, TaskKey] = {}
        """Task that has taken each message, by sequence."""
        self._cleared = 0
        """Highest batch that the source was told is done."""
        self._crashes = 0
        self._started: set[TaskKey] = set()
        """Tasks of which an attempt has started. An attempt that dies may have taken rows that only later ones give."""
        self._disturbances = 0
        """Number of events after which a message may be ready that belongs before messages already taken."""
        self._has_unseen_dead = False
        self._patch(patch)

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        random = self.random
        rows, size = random.choice([1, 2, 3, 5]), random.choice([1, 40, 1 << 20])
        for module in (bundle, task):
            patch.setattr(module, "BUNDLE_ROWS", rows)
            patch.setattr(module, "BUNDLE_BYTES", size)
        patch.setattr(bundle, "SEVERAL_BYTES_MAX", random.choice([1, 1000, 1 << 20]))
        patch.setattr(task, "_AHEAD_FIRST", random.choice([1, 2, 4, 256]))
        patch.setattr(driver, "READY_SECONDS", 0.01)
        patch.setattr(driver, "RETURN_SECONDS", 1.0)
        patch.setattr(driver, "time", SimpleNamespace(sleep=self._await_return, time=time.time))
        patch.setattr(driver, "Patience", partial(Patience, sleep=self._sleep))
        patch.setattr(datasource, "Patience", partial(Patience, sleep=self._sleep))
        patch.setattr("truenext.spark.broker.options.BrokerConnection", partial(Connection, self))
        patch.setattr(connection, "CONNECT_SECONDS", 60.0)

    # ---- An example ----

    def run(self) -> None:
        """Raises: Disagreement"""
        try:
            self._send_some()
            for _ in range(self.random.randint(1, 4)):
                self.is_faulty = self.random.random() < 0.9
                self._live(batches_max=self.random.randint(1, 4))
                self._between_lives()
            self._settle()
            self._live(batches_max=IDLE_ROUNDS_MAX, until_idle=True)
            self._check()
        finally:
            self.is_faulty = False
            self._leave_nothing()

    def _between_lives(self) -> None:
        self.is_faulty = True
        for _ in range(self.random.choice([0, 0, 1, 3])):
            self._others_go_on()
        if self.random.random() < 0.2:
            self._send_some()
        if self.random.random() < 0.1:
            self._crash()
        elif self.random.random() < 0.05 and isinstance(self.here, BlockingBroker) and not self.attempts:
            self._note("clean restart")
            self._end_rival()
            self.here.restart()
            self._disturbances += 1

    def _settle(self) -> None:
        """End all faults and all attempts."""
        self.is_faulty = False
        self._note("settles")
        self._end_rival()
        self._await_return()
        for attempt in list(self.attempts):
            while not attempt.is_over:
                self._step(attempt)
        self._quiesce()

    def _leave_nothing(self) -> None:
        self._end_rival()
        for attempt in list(self.attempts):
            self._kill(attempt)

    def _note(self, *words: object) -> None:
        self.steps.append("  " * len(self.stack) + " ".join(map(str, words)))

    # ---- The driver ----

    def _live(self, batches_max: int, *, until_idle: bool = False) -> None:
        """Run the query, until its driver is stopped or killed."""
        options = self._draw_options()
        self._note("driver", options)
        process = Process(name="driver")
        self.stack.append(process)
        source = TruenextDataSource(options)
        reader = source.streamReader(source.schema())
        assert isinstance(reader, QueueStreamReader)
        try:
            self._run_query(reader, parse_options(options), batches_max, until_idle)
            reader.stop()
            self._note("stopped")
        except Killed:
            self._note("driver dies")
            process.die()
            self._disturb()
        finally:
            self.stack.pop()
        for attempt in list(self.attempts):
            self._leave(attempt)

    def _run_query(self, reader: QueueStreamReader, options: SourceOptions, batches_max: int, until_idle: bool) -> None:
        is_available_now = not until_idle and self.random.random() < 0.2
        if is_available_now:
            reader.prepareForTriggerAvailableNow()
        limit: ReadLimit = reader.getDefaultReadLimit()
        if not until_idle and self.random.random() < 0.1:
            limit = ReadAllAvailable()
        self._may_die()
        if self._commits < len(self._offsets):
            before = self._offsets[-2] if len(self._offsets) > 1 else reader.initialOffset()
            self._run_batch(reader, options, before, self._offsets[-1])
        for _ in range(batches_max):
            start = self._offsets[-1] if self._offsets else reader.initialOffset()
            self._cleared = max(self._cleared, start["batch"])
            end = _as_json(reader.latestOffset(_as_json(start), limit))
            if self.random.random() < 0.1:
                reader.reportLatestOffset()
            self._may_die()
            if end == start and self._offsets:
                self._note("nothing is ready")
                if until_idle:
                    if self._unread():
                        # A loaded machine is slower than the driver waits.
                        continue
                    return
                if is_available_now:
                    break
                self._meanwhile()
                # Spark has batches without data, too.
                if self.random.random() < 0.7:
                    continue
            self._offsets.append(end)
            self._note("offset", len(self._offsets) - 1, end)
            self._may_die()
            if len(self._offsets) > 1:
                reader.commit(_as_json(self._offsets[-2]))
            self._run_batch(reader, options, start, end)
            self._meanwhile()
        if until_idle:
            raise Disagreement(f"after {batches_max} batches the query has not read all")

    def _run_batch(
        self, reader: QueueStreamReader, options: SourceOptions, start: dict[str, Any], end: dict[str, Any]
    ) -> None:
        number = len(self._offsets) - 1
        if not number:
            assert reader.initialOffset() == reader.initialOffset()
        planned = [pickle.loads(pickle.dumps(each)) for each in reader.partitions(_as_json(start), _as_json(end))]
        self._may_die()
        if self.is_faulty and self.random.random() < 0.15:
            # The first action of foreachBatch, take(1).
            self._note("first action")
            for each in planned:
                attempt = self._start(each)
                self._step(attempt)
                if attempt in self.attempts:
                    self._leave(attempt)
                if attempt.seen:
                    break
        rows = self._run_tasks(reader, planned)
        self._may_die()
        known = self._sink.setdefault(number, rows)
        if known != rows:
            raise Disagreement(f"repeated batch {number} has other rows: {rows}, and not {known}")
        self._note("output", number, len(rows))
        self._may_die()
        self._commits = number + 1

    def _run_tasks(self, reader: QueueStreamReader, planned: list[PlannedTask]) -> list[Row]:
        rows: dict[int, list[Row]] = {}
        attempts: dict[int, list[Attempt]] = {each.plan.partition: [] for each in planned}
        while left := [each for each in planned if each.plan.partition not in rows]:
            self._may_die(0.3)
            each = self.random.choice(left)
            partition = each.plan.partition
            own = attempts[partition] = [one for one in attempts[partition] if not one.is_over]
            if not own or (self.is_faulty and len(own) < ATTEMPTS_MAX and self.random.random() < self._race_rate):
                own.append(self._start(each))
            attempt = self.random.choice(own)
            for _ in range(self.random.choice([1, 1, 3, 100])):
                if attempt.is_over:
                    break
                self._step(attempt)
            if attempt.has_ended:
                rows[partition] = attempt.seen
                for one in own:
                    if not one.is_over:
                        self._leave(one)
            elif not attempt.is_over and self.is_faulty and self.random.random() < 0.05:
                self._kill(attempt)
        return [row for partition in sorted(rows) for row in rows[partition]]

    def _meanwhile(self) -> None:
        if not self.is_faulty:
            return
        if self.random.random() < 0.4:
            self._send_some()
        if self.random.random() < 0.2:
            self._others_go_on()
        if self.random.random() < 0.1:
            self._end_rival() if self._rival else self._begin_rival()

    def _may_die(self, weight: float = 1.0) -> None:
        if self.is_faulty and self.random.random() < 0.05 * weight:
            raise Killed

    def _draw_options(self) -> dict[str, str]:
        random = self.random
        options = {"url": self.here.url, "queue": self._queue, "patience": "600"}
        if self._selector is not None:
            options["selector"] = self._selector
        options["partitions"] = random.choice("11234")
        options["maxRowsPerTrigger"] = random.choice(["1", "2", "3", "7", "20", "1000"])
        if random.random() < 0.3:
            options["maxBytesPerTrigger"] = random.choice(["1", "50", "200"])
        if self._selector is None and random.random() < 0.2:
            options["minRowsPerTrigger"] = random.choice(["1", options["maxRowsPerTrigger"]])
            options["maxTriggerDelay"] = random.choice(["0", "20ms"])
        options["body"] = random.choice(["binary", "string"])
        options["headers"] = random.choice(["true", "false"])
        return options

    # ---- Tasks ----

    def _start(self, planned: PlannedTask) -> Attempt:
        # Spark has the reader pickled, too: a task uses nothing of it.
        rows = QueueStreamReader(planned.plan.options).read(planned)
        assert isinstance(rows, Generator)
        name = f"task {planned.plan.end.batch}.{planned.plan.partition}"
        attempt = Attempt(name=name, planned=planned, rows=rows)
        key = attempt.key
        if key not in self._started:
            self._started.add(key)
            attempt.disturbances = self._disturbances
        else:
            for each in self.attempts:
                if each.key == key:
                    each.disturbances = -1
        self.attempts.append(attempt)
        return attempt

    def _step(self, attempt: Attempt) -> None:
        """Let an attempt give some rows, or end."""
        self._note(attempt.name, "goes on")
        self.stack.append(attempt)
        try:
            batch = next(attempt.rows)
        except StopIteration:
            self._on_end(attempt)
        except Killed:
            self._note("dies")
            attempt.die()
            self._over(attempt)
            self._disturb()
        except Superseded as error:
            if attempt.key.batch > self._cleared:
                raise Disagreement(f"{attempt.name} fails, and its batch is not done") from error
            self._note("superseded")
            self._over(attempt)
            self._disturb()
        else:
            self._on_rows(attempt, batch.to_pylist())
        finally:
            self.stack.pop()

    def _leave(self, attempt: Attempt) -> None:
        """Leave alone, kill or close an attempt that Spark does not need any more."""
        if attempt.is_over:
            return
        how = self.random.random()
        if how < 0.2 + self._race_rate and self.is_faulty:
            self._note(attempt.name, "is left alone")
        elif how < 0.85:
            self._kill(attempt)
        else:
            self._close(attempt)

    def _close(self, attempt: Attempt) -> None:
        """Close an attempt's rows, like a generator that is not used any more."""
        self._note(attempt.name, "is closed")
        is_faulty, self.is_faulty = self.is_faulty, False
        attempt.rows.close()
        self.is_faulty = is_faulty
        self._over(attempt)
        self._disturb()

    def _kill(self, attempt: Attempt) -> None:
        self._note(attempt.name, "is killed")
        attempt.die()
        self._close(attempt)

    def _over(self, attempt: Attempt) -> None:
        attempt.is_over = True
        if attempt in self.attempts:
            self.attempts.remove(attempt)

    # ---- What happens ----

    def draw_calls(self) -> int:
        """Draw the number of calls until something happens to a connection; -1 is never."""
        if not self.is_faulty or self.random.random() >= self._fault_rate:
            return -1
        return self.random.choice([self.random.randint(1, 8), self.random.randint(5, 16), self.random.randint(1, 40)])

    def act(self, connection: Connection) -> None:
        """Raises: Killed"""
        act = self.random.choice(self._acts)
        self._note(act.name, "at", connection.owner.name)
        if act is Act.OTHERS:
            if isinstance(connection.owner, Attempt) and self.random.random() < 0.5:
                self._overtake(connection.owner)
            else:
                self._others_go_on()
        elif act is Act.SEND:
            self._send_some()
        elif act is Act.CRASH:
            self._crash()
        elif act is Act.CUT:
            connection.cut()
            self._disturb()
        elif act is Act.CUT_BEHIND:
            connection.write_some(1.0)
            self._quiesce()
            connection.cut()
            self._disturb()
        elif act is Act.LOSE_COMMIT:
            assert isinstance(self.here, BlockingBroker)
            self.here.lose_commit(self.random.choice(["before", "after"]), required=False)
            self._disturbances += 1
        elif act is Act.FILL_DISK:
            assert isinstance(self.here, BlockingBroker)
            self.here.fill_disk()
            self._disturbances += 1
        else:
            if act is Act.DIE_IN_WRITING:
                connection.write_some(self.random.choice([1.0, self.random.random()]))
            elif act is Act.DIE_UNSEEN:
                self._freeze(connection)
            # Before anything that leaves by the exception says DISCONNECT.
            connection.owner.die()
            raise Killed

    def _freeze(self, connection: Connection) -> None:
        assert isinstance(self.here, BlockingBroker)
        connection.write_some(1.0)
        with suppress(LookupError):
            self.here.freeze(connection.session_id)
            self._has_unseen_dead = True

    def _overtake(self, attempt: Attempt) -> None:
        """Let another attempt of the same task continue, maybe to its end."""
        own = [each for each in self.attempts if each.key == attempt.key and each not in self.stack]
        count = sum(each.key == attempt.key for each in self.attempts)
        if count < ATTEMPTS_MAX and attempt.key.batch > self._cleared:
            own.append(self._start(attempt.planned))
        if own:
            other = self.random.choice(own)
            for _ in range(self.random.choice([1, 2, 100])):
                if other.is_over:
                    break
                self._step(other)

    def _others_go_on(self) -> None:
        for _ in range(self.random.choice([1, 1, 2, 5])):
            if resting := [each for each in self.attempts if each not in self.stack]:
                self._step(self.random.choice(resting))

    def _crash(self) -> None:
        self._note("broker crashes")
        self.here.crash()
        self._crashes += 1
        self._has_unseen_dead = False
        self._disturbances += 1
        rival, self._rival = self._rival, None
        if rival is not None:
            rival.close()

    def _disturb(self) -> None:
        """Count the end of a process that may have held messages."""
        self._quiesce()
        self._disturbances += 1

    def _quiesce(self) -> None:
        if isinstance(self.here, BlockingBroker):
            self.here.queue("nothing")

    def _await_return(self, seconds: float = RETURN_SECONDS) -> None:
        """Let messages of dead connections return."""
        if self._has_unseen_dead:
            assert isinstance(self.here, BlockingBroker)
            self._note("missing heart-beats are noticed")
            self.here.advance(seconds=RETURN_SECONDS)
            self._has_unseen_dead = False
            self._disturbances += 1
        self._free_disk()

    def _sleep(self, seconds: float) -> None:
        """Sleep in place of a patient process."""
        self._free_disk()
        time.sleep(0.001)

    def _free_disk(self) -> None:
        if isinstance(self.here, BlockingBroker):
            self.here.free_disk()

    def _send_some(self) -> None:
        """Send some messages, and wait for their receipts."""
        self._free_disk()
        random = self.random
        producer = RawClient(self._port)
        try:
            producer.send_connect("1.2", "0,0")
            for _ in range(random.choice([1, 3, 10, 30])):
                sent = self._draw_message()
                headers = {"correlation-id": sent.id, "colour": sent.colour, **sent.extras}
                if sent.group is not None:
                    headers["JMSXGroupID"] = sent.group
                producer.send(
                    sent.queue,
                    sent.body,
                    persistent=sent.is_persistent,
                    priority=sent.priority,
                    headers=headers,
                )
                self._sent[sent.id] = sent
            producer.begin("all of them")
            producer.abort("all of them")
            producer.disconnect()
        finally:
            producer.close()
        self._disturbances += 1
        self._note(len(self._sent), "sent")

    def _draw_message(self) -> Sent:
        random = self.random
        number = f"{self._name}-{len(self._sent)}"
        return Sent(
            id=number,
            queue=random.choice(self._queues),
            priority=random.choice([4, 4, 4, 0, 9]),
            is_persistent=not self._has_transients or random.random() < 0.7,
            group=random.choice([None, "g", "h", "i"]) if self._has_groups else None,
            colour=random.choice(["red", "red", "blue"]),
            body=random.choice([number.encode(), b"", b"\xff\xfe" + number.encode(), number.encode() * 5]),
            extras={"reply-to": "/queue/replies"} if random.random() < 0.2 else {},
            crashes_before=self._crashes,
        )

    def _begin_rival(self) -> None:
        """Start another consumer, which keeps its messages for a while."""
        self._note("a rival comes")
        self._rival = RawClient(self._port)
        self._rival.send_connect("1.2", "0,0")
        self._rival.subscribe(self._queue.partition(",")[0], prefetch=2)

    def _end_rival(self) -> None:
        rival, self._rival = self._rival, None
        if rival is not None:
            self._note("the rival gives back")
            rival.disconnect()
            self._disturbances += 1

    # ---- The oracle ----

    def _on_rows(self, attempt: Attempt, rows: list[Row]) -> None:
        for row in rows:
            self._check_row(attempt, row)
        known = self._rows.setdefault(attempt.key, [])
        # Options may take them away.
        attempt.seen += [{name: row[name] for name in row if name not in ("body", "error", "headers")} for row in rows]
        common = min(len(known), len(attempt.seen))
        if attempt.seen[:common] != known[:common]:
            raise Disagreement(f"{attempt.name} gives {attempt.seen}, and another attempt gave {known}")
        new = attempt.seen[common:]
        if new and attempt.key in self._complete:
            raise Disagreement(f"{attempt.name} gives {new} behind what was all of it")
        known += new
        for row in new:
            key = self._taken.setdefault(row["sequence"], attempt.key)
            if key != attempt.key:
                raise Disagreement(f"{attempt.name} gives {row}, and so did {key}")

    def _on_end(self, attempt: Attempt) -> None:
        self._note("ends", len(attempt.seen))
        known = self._rows.setdefault(attempt.key, [])
        if attempt.seen != known:
            raise Disagreement(f"{attempt.name} ends with {attempt.seen}, and another attempt gave {known}")
        self._complete.add(attempt.key)
        attempt.has_ended = True
        self._over(attempt)
        # What has a limit of bytes returns what it has read ahead. A group that is free again is earlier than what
        # was taken meanwhile.
        if (
            attempt.disturbances == self._disturbances
            and attempt.planned.plan.end.bytes > 1000
            and not (self._has_groups and attempt.planned.plan.end.partitions > 1)
        ):
            # Several queues of one option have no mutual order.
            for queue in self._queues if "," in self._queue else [""]:
                rows = [row for row in attempt.seen if row["queue"].startswith(queue)]
                keys = [(9 - row["priority"], row["sequence"]) for row in rows]
                if keys != sorted(keys):
                    raise Disagreement(f"{attempt.name} was alone, and gives {attempt.seen}: not in order")
        if attempt.planned.plan.end.bytes <= 1000:
            self._disturb()

    def _check_row(self, attempt: Attempt, row: Row) -> None:
        sent = self._sent.get(row["correlation_id"])
        if sent is None:
            raise Disagreement(f"nobody has sent {row}")
        options = attempt.planned.plan.options
        if ("headers" in row) != options.has_headers or ("error" in row) != options.has_text_body:
            raise Disagreement(f"{row} has not the columns of {options}")
        expected: Row = {
            "queue": sent.queue,
            "priority": sent.priority,
            "persistent": sent.is_persistent,
            "group": sent.group,
            "reply_to": sent.extras.get("reply-to"),
            "content_type": None,
            "attempts": 0,
            "expires": None,
        }
        if options.has_headers:
            expected["headers"] = [("colour", sent.colour)]
        if options.has_text_body:
            is_text = not sent.body.startswith(b"\xff")
            expected["body"] = sent.body.decode() if is_text else None
            if (row["error"] is None) != is_text:
                raise Disagreement(f"{row} has the wrong error")
        else:
            expected["body"] = sent.body
        for name, value in expected.items():
            if row[name] != value:
                raise Disagreement(f"{row} has not {name} {value!r}")
        if self._selector is not None and sent.colour != "red":
            raise Disagreement(f"{row} is not wanted")

    def _check(self) -> None:
        """Check all rows, once the query has read everything."""
        counts = Counter(row["correlation_id"] for rows in self._sink.values() for row in rows)
        left = Counter(each["correlation-id"] for each in self._left())
        for sent in self._sent.values():
            is_wanted = self._selector is None or sent.colour == "red"
            count = (counts if is_wanted else left)[sent.id]
            may_be_lost = not sent.is_persistent and sent.crashes_before < self._crashes
            if count + left[sent.id] * is_wanted != 1 and not (may_be_lost and not count):
                raise Disagreement(f"{sent} is {counts[sent.id]} times in the sink, and {left[sent.id]} in its queue")
            if is_wanted and left[sent.id]:
                raise Disagreement(f"{sent} was not read")
        self._check_groups()
        batches = {each["batch"]: each for each in self._offsets if each["batch"]}
        if sorted(batches) != list(range(1, len(batches) + 1)):
            raise Disagreement(f"batches have the numbers {sorted(batches)}")
        if not batches:
            return
        last = batches[len(batches)]
        own = f"Spark.source.{last['space']}.{last['id']}"
        for queue in (*self._queues, own, *(f"{own}.{partition}" for partition in range(4))):
            if rest := self._waiting(f"DLQ.{queue}"):
                raise Disagreement(f"dead letters of {queue}: {rest}")
            if queue.startswith(f"{own}.") and (rest := self._waiting(queue)):
                raise Disagreement(f"bundles are not cleared: {rest}")
        marks = self._waiting(own)
        if len(marks) != 1 or marks[0]["truenext-attempts"] != "0":
            raise Disagreement(f"the marks are {marks}")

    def _check_groups(self) -> None:
        """Check that messages of a group with one priority keep their order from batch to batch."""
        last: dict[tuple[str, str, int], int] = {}
        for number in sorted(self._sink):
            now: dict[tuple[str, str, int], list[int]] = {}
            for row in self._sink[number]:
                if row["group"] is not None:
                    now.setdefault((row["queue"], row["group"], row["priority"]), []).append(row["sequence"])
            for key, sequences in now.items():
                if min(sequences) < last.get(key, 0):
                    raise Disagreement(f"batch {number} has message {min(sequences)} of {key} after {last[key]}")
                last[key] = max(sequences)

    def _left(self) -> list[dict[str, str]]:
        return [each for name in self._queues for each in self._waiting(name)]

    def _unread(self) -> list[dict[str, str]]:
        return [each for each in self._left() if self._selector is None or each["colour"] == "red"]

    def _waiting(self, queue: str) -> list[dict[str, str]]:
        """Return the headers of the waiting messages of a queue."""
        browser = RawClient(self._port)
        try:
            browser.send_connect("1.2", "0,0")
            browser.send_frame("SUBSCRIBE", {"id": "b", "destination": f"/queue/{queue}", "browser": "true"})
            found = []
            while (frame := browser.message()).headers.get("browser") != "end":
                found.append(frame.headers)
            browser.disconnect()
        finally:
            browser.close()
        return found


def _as_json(offset: dict[str, Any]) -> dict[str, Any]:
    """Return the offset as Spark passes it on."""
    made: dict[str, Any] = json.loads(json.dumps(offset))
    return made
