"""Test of flows under keys while broker, stages and askers are killed: each key has one flow and one answer. Source:
docs/stages-database.md, "Kept replies" """

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import truenext
from tests.drawing import one_of
from tests.integration.broker_process import BrokerProcess, dying_with_us
from tests.stages.service_process import ServiceProcess
from tests.stages.services.failing import KINDS
from tests.stages.test_failing_flows import LAST_HANDLER, PATHS
from truenext.stage.sql import apply_schema

SERVICE = "tests.stages.services.failing:app"
KEYS = 48
ASKERS = 2
KILLS = 4
PATIENCE_S = 150
ROOT = Path(__file__).parents[2]


class Asker:
    """Process that asks under all keys. Its output is that of all processes that were started in its place."""

    def __init__(self, folder: Path, name: str, url: str, database: str) -> None:
        self._out = folder / f"{name}.out"
        self._command = [sys.executable, "-m", "tests.stages.services.asking", url, database, str(KEYS)]
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


def run_until_answered(broker: BrokerProcess, folder: Path, database: str, victims: list[str]) -> list[Asker]:
    url = broker.url
    environment = {"FAILING_DATABASE": database}
    service = ServiceProcess(folder, SERVICE, url, environment=environment)
    askers = [Asker(folder, f"asker-{number}", url, database) for number in range(ASKERS)]
    try:
        service.await_lines("failing runs")
        for victim in random.choices(victims, k=KILLS):
            time.sleep(random.uniform(0.1, 0.8))
            if victim == "broker":
                broker.kill()
                broker.start(broker.port)
            elif victim == "stage":
                service.kill()
                service = ServiceProcess(folder, SERVICE, url, environment=environment)
                service.await_lines("failing runs")
            else:
                asker = random.choice(askers)
                asker.kill()
                asker.start()
        deadline = time.monotonic() + PATIENCE_S
        for asker in askers:
            assert asker.process.wait(max(deadline - time.monotonic(), 1)) == 0
        return askers
    finally:
        service.kill()
        for asker in askers:
            asker.kill()


async def dead_letters(url: str) -> Counter[int]:
    async with truenext.connect(url) as connection:
        queue = f"/queue/DLQ.{LAST_HANDLER}"
        bodies = [json.loads(each.body) async for each in connection.browse(queue)]
    return Counter(each["waiting"][-1]["state"]["number"] for each in bodies)


@one_of("victims", [["broker"], ["stage"], ["broker", "stage", "asker"]], ids=["broker", "stage", "all"])
def test_each_key_has_one_flow_and_one_answer_although_processes_are_killed(
    broker: BrokerProcess, tmp_path: Path, database: str, victims: list[str]
) -> None:
    apply_schema(database)
    askers = run_until_answered(broker, tmp_path, database, victims)
    expected: dict[int, object] = {
        number: PATHS.get(KINDS[number % len(KINDS)], f"Reject: number {number}") for number in range(KEYS)
    }
    answers = [(number, str(answer)) for asker in askers for number, answer in asker.answers]
    assert {number for number, _ in answers} == expected.keys()
    assert set(answers) == {(number, str(answer)) for number, answer in expected.items()}
    given_up = asyncio.run(dead_letters(broker.url))
    assert given_up == Counter(number for number, answer in expected.items() if isinstance(answer, str))
