"""Tests of a crash of one process at each named point of a message's way: which effects happen once, and which twice.

Expected: only the commit gap repeats effects, from SQL's COMMIT to the broker's. With exactly-once processing nothing
is repeated. Source: docs/stages.md, "One transaction"; docs/stages-database.md
"""

import asyncio
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

import truenext
from tests.integration.broker_process import BrokerProcess
from tests.stages.postgres import PostgresServer, own_server
from tests.stages.service_process import ServiceProcess
from tests.stages.services.job import Job
from truenext.stage import Service
from truenext.stage.sql import apply_schema

SERVICE = "tests.stages.services.crashing:app"
IS_WHOLE = "TRUENEXT_STAGES" in os.environ
MESSAGES = 3
PATIENCE_S = 60

MESSAGING = ("received", "run", "committed")
SQL = ("received", "run", "checked", "sent", "SQL committed", "committed")
RELAY = ("relay numbered", "relay sent", "relay deleted")
"""Points of the relay, for flows initiated in a program's own transactions."""
RUNS = {
    # So often SQL of the message is committed at which somebody dies there; everywhere else once.
    ("stage", "SQL committed"): 2,
    ("broker", "sent"): 2,
    ("broker", "SQL committed"): 2,
}


class Case(NamedTuple):
    victim: str
    point: str

    @property
    def runs(self) -> int:
        return RUNS.get(self, 1)


def _cases(victims: Sequence[str], points: Sequence[str], few: Sequence[tuple[str, str]]) -> list[Case]:
    """Return all cases (`make stages`), or the few that `make test` has time for."""
    every = [Case(victim, point) for victim in victims for point in points]
    return every if IS_WHOLE else [case for case in every if case in few]


class _Table:
    """Table in which the stage notes its committed runs."""

    def __init__(self, url: str, connect: Callable[[], sqlite3.Connection | psycopg.Connection[tuple[object, ...]]]):
        self.url = url
        self._connect = connect
        with closing(connect()) as connection:
            connection.execute("CREATE TABLE runs (number INTEGER)")
            connection.commit()

    def runs(self) -> Counter[object]:
        with closing(self._connect()) as connection:
            return Counter(number for (number,) in connection.execute("SELECT number FROM runs").fetchall())


class _Trial:
    def __init__(
        self,
        broker: BrokerProcess,
        folder: Path,
        case: Case,
        database: str | None,
        victim: int,
        *,
        once: bool,
        processes: int = 1,
    ) -> None:
        """At a point of the relay, messages are initiated in transactions of a program. Each of `processes` may be
        the one that dies."""
        self._broker = broker
        self._folder = folder
        self._case = case
        self._database = database
        self._processes = processes
        self._happened = folder / "happened"
        self._environment = {"CRASH_AT": case.point, "CRASH_FILE": str(self._happened), "CRASH_PID": str(victim)}
        if database is not None:
            self._environment["CRASH_DATABASE"] = database
        if once:
            self._environment["CRASH_ONCE"] = "yes"

    def run(self, revive: Callable[[], None]) -> Counter[object]:
        """Return how often each message came out at the end. `revive` restarts the killed part."""
        return asyncio.run(self._run(revive))

    async def _run(self, revive: Callable[[], None]) -> Counter[object]:
        async with truenext.connect(self._url) as connection:
            await self._start_flows()
            processes = [self._start() for _ in range(self._processes)]
            try:
                async with asyncio.timeout(PATIENCE_S):
                    while not self._happened.exists():
                        await asyncio.sleep(0.01)
                    # In this thread: what it starts dies with the one that started it.
                    revive()
                    if self._case.victim == "stage":
                        await self._until_one_has_died(processes)
                        processes.append(self._start())
                    while not await self._is_done(connection):
                        await asyncio.sleep(0.05)
                for process in processes:
                    if not process.has_ended:
                        # Before that it ends as any program does.
                        await asyncio.to_thread(process.await_lines, "crashing runs")
                        assert process.stop() == 0, process.log
            finally:
                for process in processes:
                    process.kill()
            done = [each async for each in connection.browse("/queue/crashing.done")]
        return Counter(json.loads(each.body)["message"]["number"] for each in done)

    async def _start_flows(self) -> None:
        if self._case.point in RELAY:
            await asyncio.to_thread(self._start_in_transactions)
            return
        sender = Service("sender", broker=self._url)
        to = sender.remote("crashing.work", Job)
        async with sender.connected(), sender.initiate() as initiation:
            for number in range(MESSAGES):
                initiation.send(to, Job(number), trace=f"job {number}")

    def _start_in_transactions(self) -> None:
        assert self._database is not None, "it has the outbox"
        app = Service("crashing", exactly_once=True)
        to = app.remote("crashing.work", Job)
        engine = create_engine(self._database)
        for number in range(MESSAGES):
            with Session(engine) as session, session.begin(), app.initiate(session) as initiation:
                initiation.send(to, Job(number), trace=f"job {number}")
        engine.dispose()

    @staticmethod
    async def _until_one_has_died(processes: Sequence[ServiceProcess]) -> None:
        while not any(process.has_ended for process in processes):
            await asyncio.sleep(0.01)

    @property
    def _url(self) -> str:
        return f"stomp://127.0.0.1:{self._broker.port}"

    def _start(self) -> ServiceProcess:
        return ServiceProcess(self._folder, SERVICE, self._url, environment=self._environment)

    async def _is_done(self, connection: truenext.Connection) -> bool:
        try:
            answer = await connection.control_request("queues")
        except truenext.ConnectionLost:
            return False
        queues = {each["name"]: each for each in json.loads(answer)}
        assert "DLQ.crashing.work" not in queues
        work = queues.get("crashing.work", {"waiting": 0, "unacknowledged": 0})
        done = queues.get("crashing.done", {"waiting": 0})
        return bool(work["waiting"] == work["unacknowledged"] == 0 and done["waiting"] >= MESSAGES)


def _try(
    broker: BrokerProcess,
    folder: Path,
    case: Case,
    table: _Table | None,
    postgres: PostgresServer | None = None,
    *,
    once: bool = False,
    processes: int = 1,
) -> None:
    victim = os.getpid()
    revive: Callable[[], None] = lambda: None  # noqa: E731
    if case.victim == "stage":
        victim = 0
    elif case.victim == "broker":
        victim, revive = broker.pid, broker.start_on_same_port
    else:
        assert postgres is not None
        victim, revive = postgres.pid, postgres.start_again
    if once and table is not None:
        apply_schema(table.url)
    done = _Trial(
        broker, folder, case, None if table is None else table.url, victim, once=once, processes=processes
    ).run(revive)
    assert done == Counter(range(MESSAGES)), "each message is handled, and what it says is there once"
    if table is not None:
        runs = table.runs()
        assert sum(runs.values()) == MESSAGES - 1 + (1 if once else case.runs)
        assert len(runs) == MESSAGES


@pytest.mark.parametrize("case", _cases(("stage", "broker"), MESSAGING, (("stage", "run"),)), ids="-".join)
def test_messaging_without_sql_survives_a_crash_at_every_point(
    broker: BrokerProcess, tmp_path: Path, case: Case
) -> None:
    _try(broker, tmp_path, case, None)


@pytest.mark.parametrize("case", _cases(("stage", "broker"), SQL, (("stage", "SQL committed"),)), ids="-".join)
def test_best_effort_on_sqlite_repeats_only_the_commit_gap_after_a_crash_at_every_point(
    broker: BrokerProcess, tmp_path: Path, case: Case
) -> None:
    file = tmp_path / "shop.db"
    _try(broker, tmp_path, case, _Table(f"sqlite:///{file}", lambda: sqlite3.connect(file)))


FEW = (("broker", "checked"), ("broker", "SQL committed"), ("database", "sent"))


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[PostgresServer]:
    """A server for all cases of this file, one after the other: they restart it."""
    with own_server() as server:
        yield server


@pytest.mark.parametrize("case", _cases(("stage", "broker", "database"), SQL, FEW), ids="-".join)
def test_best_effort_on_postgresql_repeats_only_the_commit_gap_after_a_crash_at_every_point(
    broker: BrokerProcess, own_postgres: PostgresServer, tmp_path: Path, case: Case
) -> None:
    with own_postgres.database() as name:
        table = _Table(own_postgres.url(name), lambda: own_postgres.connect(name))
        _try(broker, tmp_path, case, table, own_postgres)


@pytest.mark.parametrize("case", _cases(("stage", "broker"), SQL, (("stage", "SQL committed"),)), ids="-".join)
def test_exactly_once_on_sqlite_survives_a_crash_at_every_point(
    broker: BrokerProcess, tmp_path: Path, case: Case
) -> None:
    file = tmp_path / "shop.db"
    _try(broker, tmp_path, case, _Table(f"sqlite:///{file}", lambda: sqlite3.connect(file)), once=True)


@pytest.mark.parametrize("case", _cases(("stage", "broker", "database"), SQL, FEW), ids="-".join)
def test_exactly_once_on_postgresql_survives_a_crash_at_every_point(
    broker: BrokerProcess, own_postgres: PostgresServer, tmp_path: Path, case: Case
) -> None:
    with own_postgres.database() as name:
        table = _Table(own_postgres.url(name), lambda: own_postgres.connect(name))
        _try(broker, tmp_path, case, table, own_postgres, once=True)


ONE_OR_TWO = pytest.mark.parametrize("processes", [1, 2] if IS_WHOLE else [2])


@ONE_OR_TWO
@pytest.mark.parametrize("case", _cases(("stage", "broker"), RELAY, (("stage", "relay sent"),)), ids="-".join)
def test_initiations_on_sqlite_are_sent_once_after_a_crash_at_every_point_of_the_relay(
    broker: BrokerProcess, tmp_path: Path, case: Case, processes: int
) -> None:
    file = tmp_path / "shop.db"
    table = _Table(f"sqlite:///{file}", lambda: sqlite3.connect(file))
    _try(broker, tmp_path, case, table, once=True, processes=processes)


FEW_OF_RELAY = (("stage", "relay numbered"), ("database", "relay sent"))


@pytest.mark.alternates("kills of a service")
@ONE_OR_TWO
@pytest.mark.parametrize("case", _cases(("stage", "broker", "database"), RELAY, FEW_OF_RELAY), ids="-".join)
def test_initiations_on_postgresql_are_sent_once_after_a_crash_at_every_point_of_the_relay(
    broker: BrokerProcess, own_postgres: PostgresServer, tmp_path: Path, case: Case, processes: int
) -> None:
    with own_postgres.database() as name:
        table = _Table(own_postgres.url(name), lambda: own_postgres.connect(name))
        _try(broker, tmp_path, case, table, own_postgres, once=True, processes=processes)


def test_a_message_that_is_done_is_no_dead_letter_though_its_attempts_are_used_up(
    broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRASH_ATTEMPTS", "1")
    file = tmp_path / "shop.db"
    table = _Table(f"sqlite:///{file}", lambda: sqlite3.connect(file))
    _try(broker, tmp_path, Case("stage", "SQL committed"), table, once=True)
