"""Tests of a worker that stalls between SQL's COMMIT and the broker's, beyond every lease and heart-beat, and then
continues.

Another process handles its message meanwhile. Expected: under best-effort 1PC the SQL effects happen twice, with
exactly-once processing once. The tests take as long as a lost heart-beat, so only `make stages` runs them.
"""

import asyncio
import json
import os
import signal
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

import truenext
from tests.integration.broker_process import BrokerProcess
from tests.stages.postgres import PostgresServer
from tests.stages.service_process import ServiceProcess
from tests.stages.services.job import Job
from truenext.stage import Service
from truenext.stage.sql import apply_schema

SERVICE = "tests.stages.services.crashing:app"
PATIENCE_S = 120
MESSAGES = 3

pytestmark = pytest.mark.skipif("TRUENEXT_STAGES" not in os.environ, reason="half a minute each: make stages")


class _Database:
    def __init__(self, url: str, file: Path | None, postgres: PostgresServer | None, name: str) -> None:
        self.url = url
        self._file = file
        self._postgres = postgres
        self._name = name

    def execute(self, statement: str) -> list[tuple[object, ...]]:
        if self._file is not None:
            with closing(sqlite3.connect(self._file)) as connection:
                found = connection.execute(statement).fetchall()
                connection.commit()
                return found
        assert self._postgres is not None
        with self._postgres.connect(self._name) as other:
            cursor = other.execute(statement)
            return cursor.fetchall() if cursor.description else []


@pytest.fixture(params=["sqlite", "postgresql"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> _Database:
    if request.param == "sqlite":
        file = tmp_path / "shop.db"
        made = _Database(f"sqlite:///{file}", file, None, "")
    else:
        postgres: PostgresServer = request.getfixturevalue("postgres")
        name: str = request.getfixturevalue("postgres_database")
        made = _Database(postgres.url(name), None, postgres, name)
    made.execute("CREATE TABLE runs (number INTEGER)")
    return made


async def _try(broker: BrokerProcess, folder: Path, database: _Database, *, once: bool) -> tuple[int, int]:
    """Return how often the message of the stalled process was processed, and how often its message was sent."""
    url = f"stomp://127.0.0.1:{broker.port}"
    happened = folder / "happened"
    environment = {
        "CRASH_AT": "SQL committed",
        "CRASH_FILE": str(happened),
        "CRASH_STANDS": "yes",
        "CRASH_DATABASE": database.url,
    }
    if once:
        environment["CRASH_ONCE"] = "yes"
    first = ServiceProcess(folder, SERVICE, url, environment=environment)
    second = None
    try:
        async with truenext.connect(url) as connection, asyncio.timeout(PATIENCE_S):
            sender = Service("sender", broker=url)
            to = sender.remote("crashing.work", Job)
            async with sender.connected(), sender.initiate() as initiation:
                for number in range(MESSAGES):
                    initiation.send(to, Job(number), trace=f"job {number}")
            while not happened.exists():
                await asyncio.sleep(0.05)
            second = ServiceProcess(folder, SERVICE, url, environment=environment)

            async def until_done() -> None:
                while True:
                    queues = {each["name"]: each for each in json.loads(await connection.control_request("queues"))}
                    work, done = queues["crashing.work"], queues.get("crashing.done", {"waiting": 0})
                    if work["waiting"] == work["unacknowledged"] == 0 and done["waiting"] >= MESSAGES:
                        return
                    await asyncio.sleep(0.2)

            await until_done()
            first.signal(signal.SIGCONT)
            await asyncio.sleep(5)
            await until_done()
            done = [each async for each in connection.browse("/queue/crashing.done")]
        assert second.stop() == 0, second.log
        assert first.stop() == 0, first.log
    finally:
        first.kill()
        if second is not None:
            second.kill()
    sent = Counter(json.loads(each.body)["message"]["number"] for each in done)
    runs = Counter(int(str(number)) for (number,) in database.execute("SELECT number FROM runs"))
    assert sent.keys() == runs.keys() == set(range(MESSAGES))
    return max(runs.values()), max(sent.values())


def test_message_of_a_stalled_worker_is_processed_twice_and_sent_once_under_best_effort(
    broker: BrokerProcess, tmp_path: Path, shop: _Database
) -> None:
    assert asyncio.run(_try(broker, tmp_path, shop, once=False)) == (2, 1)


def test_message_of_a_stalled_worker_is_processed_and_sent_once_with_exactly_once(
    broker: BrokerProcess, tmp_path: Path, shop: _Database
) -> None:
    apply_schema(shop.url)
    assert asyncio.run(_try(broker, tmp_path, shop, once=True)) == (1, 1)
