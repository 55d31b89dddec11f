"""Drawn schedules of a shop: the possible steps, how they are drawn, and how they are executed.

All faults end with the last step, and everything must settle. Then the oracle says what must be in the database and in
the queues.
"""

from __future__ import annotations

import asyncio
import gc
import secrets
import sqlite3
import warnings
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import pytest
from sqlalchemy.exc import SQLAlchemyError

from tests.stages.ended_messages import settles_messages
from tests.stages.outbox import oracle
from tests.stages.outbox.oracle import Oracle, Seen, Started
from tests.stages.outbox.processes import AtCommit, AtStatement, Process
from tests.stages.outbox.shop import ATTEMPTS, BROKEN, QUEUES, SENT_BY_PROGRAM, TABLES, Order, Part, Runs, Shop
from tests.stages.outbox.virtual_time import VirtualTime, run_in
from truenext.client.tasks.connection import connect
from truenext.errors import ClosedError, ConnectionLost, InDoubt, Refused, RolledBack
from truenext.flows.envelope import decode_envelope
from truenext.stage import FlowError
from truenext.stage.core.initiation import Initiation
from truenext.stage.core.output import Output
from truenext.stage.sql.errors import CommitInDoubt, DatabaseUnavailable
from truenext.store.memory import MemoryStore
from truenext.testing.local import LocalBroker, broker

CHECK_INTERVAL_S = 0.25
SETTLED_S = 240.0
"""Longest time to settle after the last fault: the longest pauses are half a minute."""
LONG_S = 1200.0
"""Longest time of a whole example. Most of it is the time of examples that do not settle."""
START_TIMEOUT_S = 5.0
FROZEN_S = 2.0
DEAD_S = 16.0
"""A silent process counts as dead after this time."""
STILL = 3
RETENTION_S = 8 * 86400.0

Fault = Literal["drop", "lose before", "lose after", "crash", "freeze", "lose all", "kill", "kill all"]
Others = Literal["database", "broker"]
"""Part that is replaced, by an older copy or by an empty one."""
How = Literal["over the broker", "committed", "rolled back", "by a foreign program"]
SqlFault = Literal["statement", "before", "after", "killed before", "killed after"]
T = TypeVar("T")
POINTS = ["received", "run", "checked", "sent", "SQL committed", "committed"]
COMMIT_GAP = [("SQL committed", "order.place"), ("SQL committed", "part.pack")]
RELAY = [("relay sends", "outbox"), ("relay sent", "outbox")]


class StartFlows(NamedTuple):
    """A program initiates orders, all or none."""

    how: How
    """A foreign program sends each message several times, with the same id."""
    key: int | None
    is_other: bool
    """True for other contents under a key that was used."""
    orders: tuple[tuple[int, tuple[int, ...]], ...]
    """Failures of each order's stage, and of the stage of each of its parts."""
    is_interactive: bool
    process: int
    delay_s: float = 0
    """Delay of the orders and of their parts."""


class At(NamedTuple):
    """A fault when a message has reached a point of its way, or the relay one of its own."""

    point: str
    queue: str
    passed: int
    """Number of messages that pass the point before."""
    fault: Fault


class AtSql(NamedTuple):
    """A fault of SQL that a process executes."""

    what: SqlFault
    remaining: int
    process: int


class Do(NamedTuple):
    fault: Fault | Literal["restart", "thaw", "settle"]
    process: int


class Wait(NamedTuple):
    seconds: float


class Stop(NamedTuple):
    """A process stops in order, and starts again."""

    process: int


class Redrive(NamedTuple):
    after_retention: bool
    is_mended: bool


class Backup(NamedTuple):
    is_settled: bool


class Restore(NamedTuple):
    """The database is restored from the backup."""


class OtherBroker(NamedTuple):
    """An empty broker replaces the broker."""

    is_settled: bool


Step = StartFlows | At | AtSql | Do | Wait | Stop | Redrive | Backup | Restore | OtherBroker


class Schedule(NamedTuple):
    processes: int
    concurrency: int
    steps: list[Step]


# ---- How it is drawn ----

FAULTS: list[Fault] = ["drop", "lose before", "lose before", "lose after", "crash", "freeze", "kill", "kill all"]
ON_THE_WAY: list[Fault] = [*FAULTS, "lose all", "lose all", "kill", "lose before"]


def drawn(random: Random, others: Others | None = None) -> Schedule:
    """Draw a schedule in parts: some faults, then some orders that meet them, then any other steps. Few examples
    replace the database or the broker, and only once: all that follows may be lost, so a replacement hides much."""
    steps: list[Step] = []
    choices: list[Others | None] = [None, None, None, "database", "broker"]
    others = others or random.choice(choices)
    parts = random.randint(1, 5)
    turn = random.randrange(parts)
    for part in range(parts):
        steps += [_trouble(random) for _ in range(random.choice([0, 1, 1, 2, 3]))]
        for _ in range(random.choice([1, 1, 2, 3])):
            steps.append(_start_flows(random))
            if random.random() < 0.5:
                # Rows of what was sent go a moment later.
                steps.append(Wait(random.choice([0.01, 0.03, 0.1])))
        steps += [_whatever(random) for _ in range(random.choice([0, 1, 1, 2]))]
        if part == turn and others == "broker":
            steps.append(OtherBroker(random.random() < 0.5))
        if part == turn and others == "database":
            steps.append(Backup(random.random() < 0.5))
    if others == "database":
        # Somewhere behind.
        index = random.randint(steps.index(next(each for each in steps if isinstance(each, Backup))) + 1, len(steps))
        # The producers of before are taken over when their process counts as dead.
        later_steps: list[Step] = [
            Restore(),
            Wait(random.choice([0.1, DEAD_S, DEAD_S])),
            _start_flows(random),
            _start_flows(random),
        ]
        steps[index:index] = [_start_flows(random), Wait(random.choice([0.1, 3.0])), *later_steps]
    return Schedule(random.choice([1, 2, 2]), random.choice([1, 1, 3, 8]), steps)


def _start_flows(random: Random) -> StartFlows:
    def fails() -> int:
        return random.choice([0] * 8 + [1, 2, BROKEN])

    key = random.choice([None, None, None, 0, 1])
    return StartFlows(
        random.choice(
            ["committed", "committed", "committed", "over the broker", "rolled back", "by a foreign program"]
        ),
        key,
        random.random() < 0.3,
        tuple(
            (fails(), tuple(fails() for _ in range(random.choice([0, 1, 2, 3]))))
            for _ in range(random.choice([1, 1, 2, 3]))
        ),
        # What is begun under a key is the same only if this is the same.
        random.random() < 0.3 if key is None else key == 1,
        random.randrange(2),
        random.choice([0, 0, 0, 0.3, 2.0]) if key is None else (0, 2.0)[key],
    )


def _trouble(random: Random) -> Step:
    kind = random.choice(["at", "at", "at", "SQL", "SQL", "do"])
    if kind == "do":
        return Do(random.choice(FAULTS), random.randrange(2))
    if kind == "SQL":
        whats: list[SqlFault] = ["statement", "before", "after", "after", "killed before", "killed after"]
        return AtSql(random.choice(whats), random.randint(0, 12), random.randrange(2))
    # Most of what may be wrong shows in the commit gap.
    where = random.choice([(random.choice(POINTS), random.choice(QUEUES)), *COMMIT_GAP, *RELAY])
    return At(*where, random.choice([0, 0, 0, 1, 2, 5]), random.choice(ON_THE_WAY))


def _whatever(random: Random) -> Step:
    kind = random.choice(["wait", "wait", "wait", "trouble", "stop", "redrive", "restart", "settle"])
    if kind == "wait":
        return Wait(random.choice([0.01, 0.1, 0.3, 1.0, 3.0, DEAD_S]))
    if kind == "stop":
        return Stop(random.randrange(2))
    if kind == "redrive":
        return Redrive(random.random() < 0.5, random.random() < 0.5)
    if kind == "restart" or kind == "settle":
        return Do("restart" if kind == "restart" else "settle", 0)
    return _trouble(random)


# ---- How it is done ----


class Contradiction(AssertionError):
    """Contents of database and queues that contradict the oracle."""


class _Machine:
    def __init__(self, folder: Path, schedule: Schedule, virtual: VirtualTime, here: LocalBroker) -> None:
        self._virtual = virtual
        self._schedule = schedule
        self._broker = here
        self._file = folder / "shop.db"
        self._copy = folder / "backup.db"
        self._runs = Runs()
        self._oracle = Oracle()
        self._processes: list[Process] = []
        self._faults_at: list[At] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._orders = 0
        self._kills = 0
        self._keys: dict[int, list[Order]] = {}
        """Orders initiated under each key, as far as known."""
        self._generation = 0
        self._safe: set[str] = set()
        """Orders that the backup has completely and for good."""
        self._before: list[oracle.Part] = []
        """Messages to the hall at earlier brokers."""
        self._notes: list[str] = []
        self._done: dict[type, Callable[[Any], Awaitable[None]]] = {
            StartFlows: self._start_flows,
            At: self._at,
            AtSql: self._at_sql,
            Do: self._do,
            Wait: self._wait,
            Stop: self._stop,
            Redrive: self._redrive,
            Backup: self._backup,
            Restore: self._restore,
            OtherBroker: self._other_broker,
        }

    async def run(self) -> None:
        beating = asyncio.create_task(self._beat())
        try:
            await self._run()
        finally:
            beating.cancel()

    async def _beat(self) -> None:
        """Send heart-beats of clients in real time, from a thread."""
        while True:
            await asyncio.sleep(1)
            for each in list(self._broker._broker_run.connections.values()):
                each.count_as_heart_beat()

    async def _run(self) -> None:
        self._make_file()
        for _ in range(self._schedule.processes):
            self._processes.append(await self._started())
        try:
            for step in self._schedule.steps:
                await self._done[type(step)](step)
            await self._settled()
            self._check(await self._seen())
            await self._check_dead_letters()
            # What was given up for a reason that is gone, happens once, too.
            self._runs.is_mended = True
            await self._redrive_all()
            await self._settled()
            seen = await self._seen()
            self._check(seen)
            if seen.dead_orders or seen.dead_parts:
                raise Contradiction(f"given up for no reason: {seen.dead_orders} {seen.dead_parts}")
        finally:
            self._faults_at.clear()
            self._broker.thaw()
            # Some of them start processes.
            await self._end_tasks()
            for each in self._processes:
                await each.stop(timeout=1)

    async def _end_tasks(self) -> None:
        for _ in range(2):
            if self._tasks:
                _, late = await asyncio.wait(set(self._tasks), timeout=SETTLED_S)
                for each in late:
                    each.cancel()

    def _make_file(self) -> None:
        connection = sqlite3.connect(self._file)
        for each in TABLES:
            connection.execute(each)
        connection.commit()
        connection.close()

    def _check(self, seen: Seen) -> None:
        found = self._oracle.contradictions(seen)
        found += [f"{each} came before its delay was over" for each in self._runs.early]
        if found:
            raise Contradiction("\n".join([*found, f"seen: {seen}"]))

    async def _check_dead_letters(self) -> None:
        """Check that each dead letter has its attempts: losses and stalls count none, kills of its process count
        one."""
        letters: list[Order | Part] = [*await self._in("DLQ.order.place", Order)]
        letters += [*await self._in("DLQ.part.pack", Part), *await self._in("DLQ.hall.tell", Part)]
        for each in letters:
            if each.fails + self._kills < ATTEMPTS:
                raise Contradiction(f"given up for no reason: {each}")

    # ---- Processes ----

    async def _started(self) -> Process:
        while True:
            shop = Shop(self._runs, self._schedule.concurrency)
            port = int(self._broker.url.rpartition(":")[2])
            process = Process(shop, f"sqlite:///{self._file}", port, self._virtual, self._reached)
            process.killed = self._on_killed
            try:
                await process.start()
                return process
            except (DatabaseUnavailable, ConnectionLost, ClosedError, Refused, TimeoutError):
                await process.stop(timeout=0)

    def _process(self, number: int) -> Process:
        return self._processes[number % len(self._processes)]

    def _on_killed(self, process: Process) -> None:
        self._kills += 1
        self._background(self._replace(process))

    async def _replace(self, process: Process) -> None:
        """Start another process in place of a killed one."""
        await process.swept_up()
        await self._replace_process(process)

    async def _replace_process(self, old: Process) -> None:
        if old not in self._processes:
            return
        new = await self._started()
        if old in self._processes:
            self._processes[self._processes.index(old)] = new
        else:
            await new.stop()

    def _background(self, doing: Awaitable[None]) -> None:
        async def do() -> None:
            await doing

        task = asyncio.get_running_loop().create_task(do())
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and task.exception() is not None:
                self._notes.append(repr(task.exception()))

        task.add_done_callback(done)

    async def _all_there(self) -> None:
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        if self._notes:
            raise Contradiction(f"a step has failed: {self._notes}")

    # ---- Beginning ----

    async def _start_flows(self, step: StartFlows) -> None:
        if step.how == "over the broker":
            self._background(self._start_over_broker(step, self._new_orders(step)))
            return
        if step.how == "by a foreign program":
            self._background(self._start_by_foreigner(step, self._new_orders(step)))
            return
        if step.key is None:
            self._background(self._start_in_transaction(step, self._new_orders(step)))
            return
        # What is known of a key is known of one call after the other.
        orders = self._keys.get(step.key) or self._new_orders(step)
        is_other = step.is_other and step.key in self._keys
        if is_other:
            orders = self._new_orders(step)
        await self._start_in_transaction(step, orders, is_other=is_other)

    def _new_orders(self, step: StartFlows) -> list[Order]:
        made = []
        for fails, parts in step.orders:
            self._orders += 1
            made.append(Order(f"o{self._orders}", fails, parts, step.delay_s))
        return made

    def _know(self, orders: list[Order], started: Started) -> None:
        for each in orders:
            self._oracle.start(each.id, started)

    async def _start_over_broker(self, step: StartFlows, orders: list[Order]) -> None:
        shop = self._process(step.process).shop
        self._know(orders, Started.PERHAPS)
        self._delay(orders, step)
        try:
            async with shop.app.initiate(timeout=START_TIMEOUT_S) as initiation:
                self._send_orders(initiation, shop, orders, step)
        except RolledBack:
            self._know(orders, Started.NO)
        except (InDoubt, ConnectionLost, ClosedError, TimeoutError):
            pass
        except Exception as error:
            if "is not connected" not in str(error):
                raise
            self._know(orders, Started.NO)
        else:
            self._know(orders, Started.YES)

    async def _start_by_foreigner(self, step: StartFlows, orders: list[Order]) -> None:
        shop = self._process(step.process).shop
        output = Output(secrets.token_hex(16), "elsewhere")
        self._send_orders(Initiation(output, self._virtual.now_ms(), {}), shop, orders, step)
        self._oracle.sent_often.update(each.id for each in orders)
        self._know(orders, Started.PERHAPS)
        with suppress(RolledBack, InDoubt, ConnectionLost, ClosedError, TimeoutError, OSError):
            async with connect(self._broker.url, timeout=START_TIMEOUT_S) as connection:
                async with connection.session(transacted=True) as session:
                    for each in output.outgoing:
                        times = 1 if each.destination.endswith(shop.told.name) else 3
                        for _ in range(times):
                            await session.send(each.destination, each.encode({}).body, timeout=START_TIMEOUT_S)
                    await session.commit(timeout=START_TIMEOUT_S)
                self._know(orders, Started.YES)

    async def _start_in_transaction(self, step: StartFlows, orders: list[Order], *, is_other: bool = False) -> None:
        process = self._process(step.process)
        if process.is_dead or process.shop.app._current_run is None:
            return
        key = None if step.key is None else f"{self._generation}.{step.key}"
        known = None if step.key is None else self._keys.get(step.key)
        work = process.running.new_async_work()
        is_refused = False
        started = Started.NO
        self._know(orders, Started.PERHAPS)
        self._delay(orders, step)
        try:
            async with process.shop.app.initiate(work.session, key=key) as initiation:
                self._send_orders(initiation, process.shop, orders, step)
            if step.how != "rolled back":
                started = Started.PERHAPS
                await work.commit()
                started = Started.YES
        except FlowError:
            is_refused = True
            started = Started.NO
        except CommitInDoubt:
            pass
        except (SQLAlchemyError, DatabaseUnavailable):
            started = Started.NO
        finally:
            await work.rollback()
        if step.key is not None:
            if is_other and known and started is Started.YES:
                raise Contradiction(f"under the key {key} something else was begun")
            if not is_other and known and is_refused:
                raise Contradiction(f"the same was refused under the key {key}")
            if not is_other and started is Started.YES:
                self._keys[step.key] = orders
            elif started is Started.PERHAPS and known is None:
                # One that is in doubt is not said again: nobody here knows what the key stands for.
                self._keys.clear()
                self._generation += 1
        self._know(orders, started)

    def _delay(self, orders: list[Order], step: StartFlows) -> None:
        for each in orders:
            self._runs.delay(each.id, step.delay_s)

    @staticmethod
    def _send_orders(initiation: object, shop: Shop, orders: list[Order], step: StartFlows) -> None:
        for each in orders:
            initiation.send(  # type: ignore[attr-defined]
                shop.place, each, trace=each.id, interactive=step.is_interactive, delay=step.delay_s
            )
            initiation.send(  # type: ignore[attr-defined]
                shop.told, Part(each.id, SENT_BY_PROGRAM, 0), trace=each.id, interactive=step.is_interactive
            )

    # ---- What goes wrong ----

    async def _at(self, step: At) -> None:
        self._faults_at.append(step)

    def _reached(self, process: Process, point: str, queue: str) -> None:
        for index, each in enumerate(self._faults_at):
            if each.point == point and each.queue == queue:
                if each.passed:
                    self._faults_at[index] = each._replace(passed=each.passed - 1)
                    continue
                self._faults_at.pop(index)
                self._inject_fault(each.fault, process)
                return

    def _inject_fault(self, fault: str, process: Process) -> None:
        here = self._broker
        if fault == "drop":
            here.drop()
        elif fault == "lose before":
            here.lose_commit("before", required=False)
        elif fault == "lose after":
            here.lose_commit("after", required=False)
        elif fault == "freeze":
            here.freeze()
            asyncio.get_running_loop().call_later(FROZEN_S, here.thaw)
        elif fault == "lose all":
            # What is on its way stands still for a while, and never comes.
            here.freeze()
            asyncio.get_running_loop().call_later(FROZEN_S, here.drop)
        elif fault == "kill":
            process.kill()
        elif fault == "kill all":
            for each in list(self._processes):
                each.kill()
        elif fault == "crash":
            self._background(here.crash())

    async def _do(self, step: Do) -> None:
        if step.fault == "settle":
            await self._settled()
        elif step.fault == "restart":
            await self._broker.restart()
        else:
            self._inject_fault(step.fault, self._process(step.process))

    async def _at_sql(self, step: AtSql) -> None:
        process = self._process(step.process)
        if step.what == "statement":
            process.at_statement = AtStatement(step.remaining)
        else:
            when = step.what.removeprefix("killed ")
            process.at_commit = AtCommit(step.remaining, when, step.what.startswith("killed"))

    async def _wait(self, step: Wait) -> None:
        await asyncio.sleep(step.seconds)

    async def _stop(self, step: Stop) -> None:
        process = self._process(step.process)
        if not process.is_dead:
            await process.stop()
            await self._replace_process(process)

    # ---- Dead letters ----

    async def _redrive(self, step: Redrive) -> None:
        # What is sent again after the retention is handled again: by a foreign program, or a unit that is still in the
        # outbox, which the relay sends once more to an empty broker.
        if step.after_retention and not self._oracle.sent_often and not self._rows("SELECT 1 FROM truenext_outbox"):
            self._virtual.database_ahead_s += RETENTION_S
            # Delays in the outbox are over, by the clock of the database.
            self._runs.due_ms.clear()
            # By now the keys are forgotten: something else is begun under them.
            self._keys.clear()
            for each in self._processes:
                each.cleans_now()
            await asyncio.sleep(CHECK_INTERVAL_S)
        self._runs.is_mended = self._runs.is_mended or step.is_mended
        await self._redrive_all()

    async def _redrive_all(self) -> None:
        for queue in QUEUES:
            arguments: dict[str, Any] | None = {"queue": f"DLQ.{queue}", "after": [0, 0]}
            while arguments is not None and (response := await self._control_request("redrive", arguments)):
                answer = msgspec.json.decode(response)
                # It is done a piece at a time.
                rest = {"until": answer["until"], "after": answer["next"]}
                arguments = None if answer["next"] is None else {"queue": f"DLQ.{queue}", **rest}

    async def _control_request(self, verb: str, arguments: dict[str, Any] | None = None) -> bytes:
        while True:
            with suppress(ConnectionLost, InDoubt, RolledBack, TimeoutError, OSError):
                async with connect(self._broker.url, timeout=5) as connection:
                    try:
                        return await connection.control_request(verb, arguments, timeout=5)
                    except Refused:
                        # There is no such queue.
                        return b""
            await asyncio.sleep(CHECK_INTERVAL_S)

    # ---- Others in the place of broker and database ----

    async def _stop_all(self) -> None:
        await self._all_there()
        # A process that a fault kills while it stops must not be replaced: the next one would work in the old file.
        processes, self._processes = self._processes, []
        for each in processes:
            await each.stop()
        await self._all_there()

    async def _start_all(self) -> None:
        for _ in range(self._schedule.processes):
            self._processes.append(await self._started())

    async def _backup(self, step: Backup) -> None:
        if step.is_settled:
            await self._settled()
        await self._all_there()
        self._copy.unlink(missing_ok=True)
        there, to = sqlite3.connect(self._file), sqlite3.connect(self._copy)
        there.backup(to)
        there.close()
        to.close()
        self._safe = self._oracle.done(await self._seen()) if step.is_settled else set()

    async def _restore(self, step: Restore) -> None:
        if not self._copy.exists():
            return
        await self._stop_all()
        for each in self._file.parent.glob("shop.db*"):
            each.unlink()
        there, to = sqlite3.connect(self._copy), sqlite3.connect(self._file)
        there.backup(to)
        there.close()
        to.close()
        self._generation += 1
        self._keys.clear()
        self._oracle.something_was_lost(self._oracle.started - self._safe)
        await self._start_all()

    async def _other_broker(self, step: OtherBroker) -> None:
        if step.is_settled:
            await self._settled()
        await self._all_there()
        seen = await self._seen()
        self._before = [*seen.reported]
        if seen.unsent or not step.is_settled:
            self._oracle.something_was_lost(self._oracle.started)
        else:
            self._oracle.something_was_lost(self._oracle.started - self._oracle.done(seen))
        here = self._broker
        async with here._lock:
            here._broker_run.kill()
            here._store = MemoryStore()
            await here._start_again()

    # ---- The end ----

    async def _settled(self) -> None:
        """End all faults, and wait until all work is done.

        Raises: Contradiction if it takes too long
        """
        self._faults_at.clear()
        self._broker.faults.commit_losses.clear()
        for each in self._processes:
            each.at_commit = each.at_statement = None
        await self._all_there()
        loop = asyncio.get_running_loop()
        until = loop.time() + SETTLED_S
        still = 0
        # What stands still goes on by then, or is lost.
        await asyncio.sleep(FROZEN_S)
        while still < STILL:
            await asyncio.sleep(CHECK_INTERVAL_S)
            unfinished = await self._unfinished()
            still = 0 if unfinished else still + 1
            if loop.time() > until:
                raise Contradiction(f"it does not settle: {unfinished}")

    async def _unfinished(self) -> str:
        for each in msgspec.json.decode(await self._control_request("queues")):
            if each["name"] in QUEUES and (each["waiting"] or each["unacknowledged"] or each["scheduled"]):
                return f"{each}"
        if settles_messages(self._broker):
            return "in an open transaction"
        unsent = self._rows("SELECT producer, number FROM truenext_outbox")
        return f"in the outbox: {unsent}" if unsent else ""

    def _rows(self, statement: str) -> list[tuple[object, ...]]:
        connection = sqlite3.connect(self._file)
        try:
            return connection.execute(statement).fetchall()
        finally:
            connection.close()

    async def _seen(self) -> Seen:
        reported = [oracle.Part(each.order, each.run, each.place) for each in await self._in("hall.told", Part)]
        dead = [*await self._in("DLQ.part.pack", Part), *await self._in("DLQ.hall.tell", Part)]
        return Seen(
            orders=[(str(id), int(str(run)), int(str(parts))) for id, run, parts in self._rows("SELECT * FROM orders")],
            parts=[oracle.Part(str(a), int(str(b)), int(str(c))) for a, b, c in self._rows("SELECT * FROM parts")],
            reported=[*self._before, *reported],
            dead_orders=[each.id for each in await self._in("DLQ.order.place", Order)],
            dead_parts=[oracle.Part(each.order, each.run, each.place) for each in dead],
            unsent=len(self._rows("SELECT 1 FROM truenext_outbox")),
        )

    async def _in(self, queue: str, kind: type[T]) -> list[T]:
        while True:
            with suppress(OSError):
                found = await self._broker.queue(queue)
                return [msgspec.json.decode(decode_envelope(each.body).message, type=kind) for each in found.messages]
            await asyncio.sleep(CHECK_INTERVAL_S)


def play(schedule: Schedule, folder: Path) -> None:
    """Raises: Contradiction"""
    virtual = VirtualTime()

    async def main() -> None:
        async with broker() as here:
            try:
                async with asyncio.timeout(LONG_S):
                    await _Machine(folder, schedule, virtual, here).run()
            except TimeoutError as error:
                raise Contradiction("a step does not end") from error

    # A process that is killed closes nothing. What it leaves here goes before the next example.
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        virtual.patch_clocks(patch)
        try:
            run_in(virtual, main())
        finally:
            gc.collect()
