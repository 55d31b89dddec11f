"""Test of exactly-once processing while processes, the broker and connections of the database die at random.

TRUENEXT_CHAOS_S=600 TRUENEXT_SEED=7 pytest -s tests/stages/outbox/test_chaos.py        longer, and the same once more
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random, SystemRandom

import pytest
from sqlalchemy import Engine, text

from tests.drawing import one_of
from tests.integration.broker_process import BrokerProcess
from tests.stages.outbox.chaos import TABLES, Web, create_tables, is_over, reported, rows, start_service, state
from tests.stages.postgres import PostgresServer
from tests.stages.service_process import ServiceProcess

CHAOS_S = float(os.environ.get("TRUENEXT_CHAOS_S", "6"))
PATIENCE_S = 120.0
STARTED_MIN = 50
"""Smallest number of orders that are begun: a busy machine takes longer."""
PROCESSES = 2
END_CONNECTIONS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid() AND random() < 0.5"
)


class Chaos:
    def __init__(self, broker: BrokerProcess, folder: Path, url: str, random: Random) -> None:
        self._broker = broker
        self._folder = folder
        self._url = url
        self._random = random
        self._services = [self._start() for _ in range(PROCESSES)]
        self.done: Counter[str] = Counter()

    def _start(self) -> ServiceProcess:
        return start_service(self._folder, f"stomp://127.0.0.1:{self._broker.port}", self._url)

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
    engine = create_tables(url)
    web, chaos = Web(url, random), Chaos(broker, tmp_path, url, Random(random.random()))
    try:
        web.start()
        until = time.monotonic() + CHAOS_S
        while time.monotonic() < until or web.started < STARTED_MIN:
            time.sleep(random.uniform(0.3, 2))
            chaos.one(engine)
        web.stop()
        until = time.monotonic() + PATIENCE_S
        while not (is_over(broker, engine) and rows(engine, "ordered").keys() == reported(broker).keys()):
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
