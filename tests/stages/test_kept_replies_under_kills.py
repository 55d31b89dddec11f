"""Test of flows under keys while broker, stages, askers and `stages cron` are killed: each key has one flow and one
answer, no flow begins early, and each due time has one occurrence of the cron flow, also if two schedules send it.
Source: docs/stages-database.md, "Kept replies"; docs/stages.md, "Later" and "By cron"

TRUENEXT_FLOW_KILLS=40 TRUENEXT_KILLED_FLOWS=2000 pytest -s tests/stages/test_kept_replies_under_kills.py        longer
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

import truenext
from tests.drawing import one_of
from tests.integration.broker_process import TRUENEXT, BrokerProcess, dying_with_us
from tests.integration.forked import Forked, completed
from tests.stages.service_process import ServiceProcess
from tests.stages.services.failing import KINDS, Tick
from tests.stages.test_failing_flows import LAST_HANDLER, PATHS
from truenext import blocking
from truenext.cli.stages.cron import list_present
from truenext.flows.message_ids import occurrence_id
from truenext.stage import Service
from truenext.stage.sql import apply_schema

SERVICE = "tests.stages.services.failing:app"
KEYS = int(os.environ.get("TRUENEXT_KILLED_FLOWS", "48"))
ASKERS = 2
KILLS = int(os.environ.get("TRUENEXT_FLOW_KILLS", "4"))
PATIENCE_S = 150 + KEYS / 4
AUDIT_S = 900.0
"""Seconds that Spark may take on a busy machine."""
CRONS = ("* * * * *", "0-59 * * * *")
"""Two declarations of the same times: each change sends one schedule and cancels another one."""
START_S = 2.0 + KEYS / 500
"""Seconds in which the askers load their modules, and all occurrences are sent. Then they begin, so that no flow is due
before it is asked for."""
ROOT = Path(__file__).parents[2]


class Asker:
    """Process that asks under all keys. Its output is that of all processes that were started in its place."""

    def __init__(self, folder: Path, name: str, url: str, database: str, start: float, events: Path) -> None:
        self._out = folder / f"{name}.out"
        module = "tests.stages.services.asking"
        self._command = [sys.executable, "-m", module, url, database, str(KEYS), str(start), str(events)]
        self.start()

    def start(self) -> None:
        with self._out.open("ab") as out:
            self.process = subprocess.Popen(dying_with_us(self._command), cwd=ROOT, stdout=out)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def answers(self) -> list[tuple[int, object]]:
        # The last line of a killed process may be incomplete.
        lines = self._out.read_text().splitlines() if self._out.exists() else []
        return [(number, answer) for number, answer in map(json.loads, (each for each in lines if each.endswith("]")))]


class Crons:
    """Cron flow of the service: its changes by a command that is killed, and due times with two occurrences each."""

    def __init__(self, folder: Path, url: str, environment: dict[str, str]) -> None:
        self._log = folder / "cron.log"
        self._url = url
        self._environment = environment
        self._changes = 0
        self._command = ["stages", "cron", SERVICE, "--apply", "--url", url]
        done = completed(*self._command, folder=ROOT, environment=environment | {"FAILING_CRON": CRONS[0]})
        assert done.returncode == 0, done.stderr

    def change(self) -> None:
        """Begin to apply the other declaration, and kill the command once the broker has something of it. At least one
        schedule must be left."""
        self._changes += 1
        settings = self._environment | {"FAILING_CRON": CRONS[self._changes % 2]}
        with blocking.connect(self._url) as connection:
            before = list_present(connection, OVERLAPPING)
            process = Forked(self._command, stdout=self._log, stderr=self._log, folder=ROOT, environment=settings)
            while process.poll() is None and list_present(connection, OVERLAPPING) == before:
                pass
            process.kill()
            process.wait()
            assert list_present(connection, OVERLAPPING), "no schedule is left"

    def send_overlapping(self, start: float) -> set[str]:
        """Send two occurrences for each of many due times, as two schedules that overlap. Return the expected ids."""
        flow = OVERLAPPING.crons["tick"]
        due_ms = [int((start + number / 20) * 1000) for number in range(KEYS)]
        # All at once: an occurrence that is sent too late is due when it is sent.
        with blocking.connect(self._url) as connection, connection.session(transacted=True) as session:
            for each in due_ms * 2:
                session.send(f"/queue/{flow.endpoint}", flow.body, headers={"AMQ_SCHEDULED_TIME": str(each)})
            session.commit()
        assert time.time() < start
        return {occurrence_id(flow.id, each) for each in due_ms}


def _overlapping() -> Service:
    app = Service("failing")
    app.cron("tick", CRONS[0], app.remote("failing.tick", Tick), Tick())
    return app


OVERLAPPING = _overlapping()


def run_until_answered(
    broker: BrokerProcess, folder: Path, database: str, victims: list[str], events: Path
) -> tuple[list[Asker], set[str]]:
    """Ask under all keys, and kill victims meanwhile. Return the askers when all are answered, and the ids of
    occurrences of the cron flow that were sent twice."""
    url = broker.url
    environment = {"FAILING_DATABASE": database}

    def new_service() -> ServiceProcess:
        return ServiceProcess(folder, SERVICE, url, "--events", str(events), environment=environment)

    # The relay of one sends what the other has written when it is killed.
    services = [new_service() for _ in range(2)]
    askers: list[Asker] = []
    kills: Counter[str] = Counter()
    try:
        for service in services:
            service.await_lines("failing runs")
        crons = Crons(folder, url, environment)
        start = time.time() + START_S
        askers += [Asker(folder, f"asker-{number}", url, database, start, events) for number in range(ASKERS)]
        occurrences = crons.send_overlapping(start)
        time.sleep(max(start - time.time(), 0))
        drawn = random.sample(victims, counts=[ceil(KILLS / len(victims))] * len(victims), k=KILLS)
        # Counted in answers, and not in seconds: each kill then comes while flows run.
        for victim, answered in zip(drawn, sorted(random.sample(range(KEYS * 3 // 4), k=KILLS)), strict=True):
            await_answers(askers, answered)
            # Otherwise the kill would always come just after a reply was kept.
            time.sleep(random.uniform(0, 0.3))
            kills[victim] += 1
            if victim == "broker":
                broker.kill()
                broker.start(broker.port)
            elif victim == "stage":
                which = random.randrange(len(services))
                services[which].kill()
                services[which] = new_service()
                services[which].await_lines("failing runs")
            elif victim == "cron":
                # A kill between the steps of a change needs some tries.
                for _ in range(5):
                    crons.change()
            else:
                asker = random.choice(askers)
                asker.kill()
                asker.start()
        done = [each for each in askers if each.process.poll() is not None]
        print(f"{dict(kills)}, and {len(done)} of {ASKERS} askers had all answers before the last one")
        deadline = time.monotonic() + PATIENCE_S
        for asker in askers:
            assert asker.process.wait(max(deadline - time.monotonic(), 1)) == 0
        await_end(broker, sum(KINDS[number % len(KINDS)] not in PATHS for number in range(KEYS)))
        for service in services:
            service.await_lines("failing runs")
            assert service.stop() == 0, service.log
        return askers, occurrences
    finally:
        for service in services:
            service.kill()
        for asker in askers:
            asker.kill()


def await_answers(askers: list[Asker], count: int) -> None:
    """Wait until so many keys have an answer."""
    deadline = time.monotonic() + PATIENCE_S
    while len({number for asker in askers for number, _ in asker.answers}) < count:
        assert time.monotonic() < deadline, f"fewer than {count} keys have an answer"
        time.sleep(0.02)


def await_end(broker: BrokerProcess, letters: int) -> None:
    """Wait until no stage has a message, and only cron flows are scheduled, so that only so many dead letters are left.
    The letters are counted, because a message that an open transaction has acknowledged is in no other figure."""
    deadline = time.monotonic() + PATIENCE_S
    while not _is_over(broker.control_request("queues"), letters):
        assert time.monotonic() < deadline, broker.queues()
        time.sleep(0.1)


def _is_over(queues: list[dict[str, Any]], letters: int) -> bool:
    dead = sum(each["waiting"] for each in queues if each["name"] == f"DLQ.{LAST_HANDLER}")
    return dead >= letters and not any(
        each["waiting"] + each["unacknowledged"] or each["scheduled"] > len(CRONS)
        for each in queues
        if not each["name"].startswith("DLQ.")
    )


def check_crons(broker: BrokerProcess, database: str, overlapping: set[str]) -> None:
    """Check that the last declaration is what is left, and that each minute, and each due time that two schedules had,
    had one occurrence."""
    for cron in random.sample(CRONS, k=2):
        for options in (["--apply"], []):
            command = ["stages", "cron", SERVICE, *options, "--url", broker.url]
            done = completed(*command, folder=ROOT, environment={"FAILING_DATABASE": database, "FAILING_CRON": cron})
            assert done.returncode == 0, (done.stdout, done.stderr)
    with blocking.connect(broker.url) as connection:
        answer = json.loads(connection.control_request("scheduled", {"queue": "failing.tick"}))
    assert len(answer["sends"]) == 1
    engine = create_engine(database)
    with engine.connect() as connection:
        ids = list(connection.execute(text("SELECT id FROM ticks")).scalars())
    engine.dispose()
    assert overlapping <= set(ids)
    assert len(set(ids)) == len(ids)
    # An id begins with the due time: when a message is processed says little while thousands wait.
    minutes = sorted(int(id[:12], 16) / 60_000 for id in ids if id not in overlapping)
    print(f"{len(minutes)} occurrences of the cron flow")
    assert minutes == [minutes[0] + number for number in range(len(minutes))]


def stop_and_audit(broker: BrokerProcess, events: Path) -> None:
    """Stop the broker. In the long form let the audit judge history and events, where Spark is installed."""
    broker.stop()
    if "TRUENEXT_FLOW_KILLS" not in os.environ or importlib.util.find_spec("pyspark") is None:
        return
    command = [sys.executable, TRUENEXT, "audit", str(broker.data), "--stages", str(events)]
    done = subprocess.run(
        dying_with_us(command), cwd=ROOT, capture_output=True, text=True, timeout=AUDIT_S, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


async def dead_letters(url: str) -> Counter[int]:
    async with truenext.connect(url) as connection:
        queue = f"/queue/DLQ.{LAST_HANDLER}"
        bodies = [json.loads(each.body) async for each in connection.browse(queue)]
    return Counter(each["waiting"][-1]["state"]["number"] for each in bodies)


ALL = ["broker", "stage", "asker", "cron"]


@pytest.mark.alternates("kills of a service")
@pytest.mark.timeout(AUDIT_S + 3 * PATIENCE_S)
@one_of("victims", [["broker"], ["stage"], ALL], ids=["broker", "stage", "all"])
def test_each_key_has_one_flow_and_one_answer_although_processes_are_killed(
    broker: BrokerProcess, tmp_path: Path, database: str, victims: list[str]
) -> None:
    apply_schema(database)
    engine = create_engine(database)
    with engine.begin() as connection:
        # No primary key: a repetition would show.
        connection.execute(text("CREATE TABLE ticks (id TEXT)"))
    engine.dispose()
    events = tmp_path / "events"
    askers, overlapping = run_until_answered(broker, tmp_path, database, victims, events)
    expected: dict[int, object] = {
        number: PATHS.get(KINDS[number % len(KINDS)], f"Reject: number {number}") for number in range(KEYS)
    }
    answers = [(number, str(answer)) for asker in askers for number, answer in asker.answers]
    assert {number for number, _ in answers} == expected.keys()
    assert set(answers) == {(number, str(answer)) for number, answer in expected.items()}
    given_up = asyncio.run(dead_letters(broker.url))
    assert given_up == Counter(number for number, answer in expected.items() if isinstance(answer, str))
    check_crons(broker, database, overlapping)
    stop_and_audit(broker, events)
