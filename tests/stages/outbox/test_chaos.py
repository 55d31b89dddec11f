"""Test of exactly-once processing while processes, the broker and connections of the database die at random.

TRUENEXT_CHAOS_S=600 TRUENEXT_SEED=7 pytest -s tests/stages/outbox/test_chaos.py        longer, and the same once more
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random, SystemRandom

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from tests.drawing import one_of
from tests.integration.broker_process import BrokerProcess
from tests.stages.postgres import PostgresServer
from tests.stages.service_process import ServiceProcess
from tests.stages.services.job import Job
from truenext import blocking
from truenext.errors import ConnectionLost
from truenext.stage import Service
from truenext.stage.sql import apply_schema

SERVICE = "tests.stages.services.chaos:app"
CHAOS_S = float(os.environ.get("TRUENEXT_CHAOS_S", "6"))
PATIENCE_S = 120.0
STARTED_MIN = 50
"""Smallest number of orders that are begun: a busy machine takes longer."""
PROCESSES = 2
TABLES = ("ordered", "placed", "noted", "shipped")
END_CONNECTIONS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid() AND random() < 0.5"
)


class Web:
    """A program that initiates orders in its own transactions, from a thread, whatever fails around it."""

    def __init__(self, url: str, random: Random) -> None:
        self._engine = create_engine(url)
        self._app = Service("chaos", database=url, exactly_once=True)
        self._place = self._app.remote("order.place", Job)
        self._random = random
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self.started = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._engine.dispose()

    def _work(self) -> None:
        while not self._is_over.wait(self._random.uniform(0, 0.02)):
            key = f"{self.started}" if self._random.random() < 0.5 else None
            # Who runs his handler again after an error says a key.
            for _ in range(1 if key is None else 2):
                try:
                    self._order(self.started, key)
                except DBAPIError:
                    # Whether it was committed, only the table knows.
                    continue
            self.started += 1

    def _order(self, number: int, key: str | None) -> None:
        with Session(self._engine) as session:
            is_there = session.execute(text("SELECT 1 FROM ordered WHERE number = :number"), {"number": number}).first()
            if is_there is None:
                session.execute(text("INSERT INTO ordered VALUES (:number)"), {"number": number})
            elif key is None:
                return
            with self._app.initiate(session, key=key) as initiation:
                initiation.send(self._place, Job(number), trace=f"order {number}", interactive=number % 3 == 0)
            if self._random.random() < 0.2:
                session.rollback()
            else:
                session.commit()


class Chaos:
    def __init__(self, broker: BrokerProcess, folder: Path, url: str, random: Random) -> None:
        self._broker = broker
        self._folder = folder
        self._url = url
        self._random = random
        self._services = [self._start() for _ in range(PROCESSES)]
        self.done: Counter[str] = Counter()

    def _start(self) -> ServiceProcess:
        at = f"stomp://127.0.0.1:{self._broker.port}"
        return ServiceProcess(self._folder, SERVICE, at, environment={"CHAOS_DATABASE": self._url})

    def one(self, engine: Engine) -> None:
        kinds = ["service", "service", "broker", "still"]
        if engine.dialect.name == "postgresql":
            kinds.append("connections")
        kind = self._random.choice(kinds)
        self.done[kind] += 1
        which = self._random.randrange(PROCESSES)
        if kind == "service":
            self._services[which].kill()
            self._services[which] = self._start()
        elif kind == "broker":
            self._broker.kill()
            self._broker.start(self._broker.port)
        elif kind == "still":
            # For longer than a process counts as alive, now and then.
            self._services[which].signal(signal.SIGSTOP)
            time.sleep(self._random.choice([0.5, 1, 17]) if CHAOS_S > 60 else 0.5)
            self._services[which].signal(signal.SIGCONT)
        else:
            with engine.connect() as connection:
                connection.execute(text(END_CONNECTIONS))

    def stop(self) -> None:
        for each in self._services:
            each.await_lines("chaos runs")
            assert each.stop() == 0, each.log

    def end(self) -> None:
        for each in self._services:
            each.kill()


@pytest.fixture
def random() -> Random:
    seed = int(os.environ.get("TRUENEXT_SEED") or SystemRandom().randrange(2**32))
    print(f"TRUENEXT_SEED={seed} TRUENEXT_CHAOS_S={CHAOS_S:g}")
    return Random(seed)


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path, which: str) -> Iterator[str]:
    if which == "sqlite":
        (tmp_path / "chaos.db").touch()
        yield f"sqlite:///{tmp_path / 'chaos.db'}"
        return
    server: PostgresServer = request.getfixturevalue("own_postgres")
    with server.database() as name:
        yield server.url(name)


@pytest.mark.alternates("kills of a service")
@pytest.mark.timeout(60 + CHAOS_S + 2 * PATIENCE_S)
@one_of("which", ["sqlite", "postgresql"], ["sqlite", "postgresql"])
def test_exactly_once_survives_random_deaths_of_processes_broker_and_database(
    broker: BrokerProcess, tmp_path: Path, url: str, random: Random, which: str
) -> None:
    apply_schema(url)
    engine = create_engine(url)
    with engine.begin() as connection:
        for table in TABLES:
            connection.execute(text(f"CREATE TABLE {table} (number INTEGER)"))
    web, chaos = Web(url, random), Chaos(broker, tmp_path, url, Random(random.random()))
    try:
        web.start()
        until = time.monotonic() + CHAOS_S
        while time.monotonic() < until or web.started < STARTED_MIN:
            time.sleep(random.uniform(0.3, 2))
            chaos.one(engine)
        web.stop()
        until = time.monotonic() + PATIENCE_S
        while not is_over(broker, engine):
            assert time.monotonic() < until, state(broker, engine)
            time.sleep(0.2)
        chaos.stop()
        ordered, placed, noted, shipped = (rows(engine, table) for table in TABLES)
        print(f"{len(ordered)} orders; {dict(chaos.done)}; noted twice: {noted.total() - len(noted)}")
        assert len(ordered) > 20
        assert set(ordered.values()) == {1}
        assert placed == ordered
        assert shipped == ordered
        assert set(noted) == set(ordered)
        assert reported(broker) == ordered
    finally:
        web.stop()
        chaos.end()
        engine.dispose()


def rows(engine: Engine, table: str) -> Counter[int]:
    with engine.connect() as connection:
        return Counter(connection.execute(text(f"SELECT number FROM {table}")).scalars())


def reported(broker: BrokerProcess) -> Counter[int]:
    with blocking.connect(f"stomp://127.0.0.1:{broker.port}") as connection:
        return Counter(json.loads(each.body)["message"]["number"] for each in connection.browse("/queue/told"))


def state(broker: BrokerProcess, engine: Engine) -> tuple[int, int, int]:
    """Return the number of units in the outbox, of messages that stages have or are to get, and of orders that were not
    told of: the message of such an order may be in an open transaction, and is then in neither of the other figures."""
    with engine.connect() as connection:
        remaining: int = connection.execute(text("SELECT count(*) FROM truenext_outbox")).scalar_one()
        ordered: int = connection.execute(text("SELECT count(*) FROM ordered")).scalar_one()
    queues = broker.queues()
    assert not [name for name in queues if name.startswith("DLQ.")], queues
    waiting = sum(each.waiting + each.unacknowledged for name, each in queues.items() if name.startswith("order."))
    return remaining, waiting, max(ordered - queues["told"].waiting, 0) if "told" in queues else ordered


def is_over(broker: BrokerProcess, engine: Engine) -> bool:
    try:
        return not any(state(broker, engine))
    except (ConnectionLost, OSError, DBAPIError):
        return False
