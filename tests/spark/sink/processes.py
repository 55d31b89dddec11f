"""Processes of a sink without Spark, in one thread: drivers, tasks and operators.

Each is a greenlet, which stops before each write to the broker and in each sleep. So a test decides which of them
continues, and which is killed, cut or frozen meanwhile. The test also sets the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
from greenlet import getcurrent, greenlet

from tests.spark.breakable_connection import BreakableConnection
from tests.spark.sink.oracle import Attempt, Disagreement
from truenext.client.core.credentials import NO_CREDENTIALS, Credentials
from truenext.model.url import Address
from truenext.spark import datasource
from truenext.spark.broker import patience
from truenext.spark.broker.patience import Patience
from truenext.spark.sink import draft, publish
from truenext.testing import BlockingBroker

QUERY = "query"
LOOK_SECONDS = 4.0
"""Time between two checks of messages held by another process. In the product it is shorter, which takes more
checks."""
CONNECTIONS_MAX = 2000
"""Connections of an example that show an endless loop; examples have 200 at most."""


class Killed(BaseException):
    """The process was killed, and does not continue."""


class Process:
    """A driver, the attempt of a task, or an operator."""

    def __init__(self, name: str, body: Callable[[], object], attempt: Attempt | None = None) -> None:
        self.name = name
        self.attempt = attempt
        """Attempt that the process writes, if it is a task."""
        self.connections: list[Connection] = []
        self.wake_at = 0.0
        """Time at which the process has slept enough."""
        self.is_paused = False
        """True if the system has stopped the process, until it wakes it."""
        self.is_dead = False
        """True if the process was killed."""
        self.awaits: Callable[[], bool] | None = None
        """Condition before which the process has nothing to do."""
        self.error: Exception | None = None
        """Error with which the process has failed."""
        self.greenlet = greenlet(self._run)
        self._body = body

    def _run(self) -> None:
        with suppress(Killed):
            self._body()

    @property
    def is_over(self) -> bool:
        return self.greenlet.dead or self.is_dead

    @property
    def has_work(self) -> bool:
        return not self.is_paused and (self.awaits is None or self.awaits())


class Connection(BreakableConnection):
    """Connection that lets other processes continue before each write."""

    def __init__(self, world: World, addresses: Sequence[Address], credentials: Credentials = NO_CREDENTIALS) -> None:
        self._world = world
        self._is_up = False
        world.connections_made += 1
        if world.connections_made > CONNECTIONS_MAX:
            raise Disagreement("something connects again and again")
        super().__init__(addresses, credentials)
        self._is_up = True
        if world.current is not None:
            world.current.connections.append(self)

    def flush(self) -> None:
        if self._is_up and self._link.out_chunks:
            self._world.pause()
        super().flush()

    def lose_answers(self) -> None:
        """Discard the answers that the broker has sent."""
        with suppress(OSError):
            self._socket.settimeout(0.0)
            while self._socket.recv(1 << 16):
                pass


class World:
    """Processes of a sink, their broker, and their time."""

    def __init__(self, here: BlockingBroker, patch: pytest.MonkeyPatch, steps: list[str]) -> None:
        self.here = here
        self.steps = steps
        """Events so far, for a reader."""
        self.now = 0.0
        self.processes: list[Process] = []
        """Processes that are not over."""
        self.current: Process | None = None
        """Process that runs; None between two steps."""
        self.disturbances = 0
        """Number of events after which bundles may arrive out of order."""
        self.has_frozen = False
        """True if the broker has not noticed yet that a connection is dead."""
        self.connections_made = 0
        self._main = getcurrent()
        self._names = count()
        self._patch(patch)

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(publish, "time", SimpleNamespace(sleep=self.sleep))
        patch.setattr(publish, "_LOOK_SECONDS", LOOK_SECONDS)
        patch.setattr(patience, "monotonic", lambda: self.now)
        patch.setattr(patience, "random", SimpleNamespace(random=lambda: 0.5))
        patch.setattr(draft, "secrets", SimpleNamespace(token_hex=lambda _: f"{next(self._names):012x}"))
        patch.setattr(datasource, "Patience", partial(Patience, sleep=self.sleep))
        patch.setattr("truenext.spark.broker.options.BrokerConnection", partial(Connection, self))
        patch.setattr(datasource, "TaskContext", SimpleNamespace(get=self._task_context))

    def note(self, *words: object) -> None:
        self.steps.append(" ".join(map(str, words)))

    # ---- From within a process ----

    def pause(self) -> None:
        """Stop the current process, and let others continue."""
        process = self.current
        if process is not None and not process.is_dead:
            self._main.switch()

    def sleep(self, seconds: float) -> None:
        if self.current is None:
            self.pass_time(seconds)
        else:
            self.current.wake_at = self.now + seconds
            self.pause()

    def await_until(self, awaited: Callable[[], bool]) -> None:
        assert self.current is not None, "it is in a process"
        process = self.current
        process.awaits = awaited
        self.pause()
        process.awaits = None

    def _task_context(self) -> SimpleNamespace | None:
        attempt = self.current.attempt if self.current else None
        if attempt is None:
            return None
        properties = {"sql.streaming.queryId": QUERY, "streaming.sql.batchId": str(attempt.batch)}
        return SimpleNamespace(getLocalProperty=properties.get, partitionId=lambda: attempt.partition)

    # ---- From outside ----

    def start(self, process: Process) -> Process:
        # Where it stops, the test goes on, also if another process has started it.
        process.greenlet.parent = self._main
        self.processes.append(process)
        return process

    def go(self, process: Process) -> None:
        """Let a process run until it stops the next time. Time passes until it has slept enough."""
        self.pass_time(process.wake_at - self.now)
        before, self.current = self.current, process
        try:
            process.greenlet.switch()
        finally:
            self.current = before
        if process.is_over and process in self.processes:
            self.processes.remove(process)

    def kill(self, process: Process) -> None:
        """Kill a process; its unwritten bytes are lost."""
        self.note(process.name, "is killed")
        process.is_dead = True
        for each in process.connections:
            each.shut()
        before, self.current = self.current, process
        try:
            if process.greenlet:
                process.greenlet.throw(Killed)
        finally:
            self.current = before
        if process in self.processes:
            self.processes.remove(process)
        self.disturb()

    def freeze(self, process: Process) -> None:
        """Hang a process's connections: the broker receives nothing, and does not notice that for a while."""
        self.disturbances += 1
        for each in process.connections:
            with suppress(LookupError):
                self.here.freeze(each.session_id)
                self.has_frozen = True

    def thaw(self, process: Process) -> None:
        for each in process.connections:
            with suppress(LookupError):
                self.here.thaw(each.session_id)
        self.disturb()

    def lose_connection(self, process: Process, *, is_carried_out: bool) -> None:
        """Lose the connection: the broker may have carried out the process's writes, but the answers are lost."""
        for each in process.connections:
            if is_carried_out:
                each.write_some(1.0)
                self.quiesce()
                each.lose_answers()
            each.cut()
        self.disturb()

    def disturb(self) -> None:
        self.quiesce()
        self.disturbances += 1

    def quiesce(self) -> None:
        """Wait until the broker has carried out all that was sent."""
        self.here.queue("nothing")

    def pass_time(self, seconds: float) -> None:
        if seconds <= 0:
            return
        self.now += seconds
        if self.has_frozen:
            self.here.advance(seconds=seconds)
            self.disturbances += 1

    def kill_all(self) -> None:
        for each in list(self.processes):
            self.kill(each)
