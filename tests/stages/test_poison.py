"""Test of messages that never succeed, among many others, in two processes. Source: docs/stages.md, "Failures and
outages" """

import asyncio
import json
import os
from collections import Counter
from pathlib import Path

import truenext
from tests.integration.broker_process import BrokerProcess
from tests.stages.ended_messages import await_waiting, count_waiting
from tests.stages.service_process import ServiceProcess
from tests.stages.services.job import Job
from tests.stages.services.poisoned import EACH, app, work

MESSAGES = int(os.environ.get("TRUENEXT_FLOWS", "400"))


def test_poison_messages_get_exactly_their_attempts_and_others_one(broker: BrokerProcess, tmp_path: Path) -> None:
    url = f"stomp://127.0.0.1:{broker.port}"
    runs = tmp_path / "runs"

    async def main() -> list[truenext.Content]:
        app.broker = (url,)
        async with app.connected(), app.initiate() as initiation:
            for number in range(MESSAGES):
                initiation.send(work, Job(number), trace=f"job {number}")
        environment = {"RUNS": str(runs)}
        service = "tests.stages.services.poisoned:app"
        processes = [ServiceProcess(tmp_path, service, url, environment=environment) for _ in range(2)]
        try:
            async with truenext.connect(url) as connection, asyncio.timeout(60):
                await await_waiting(connection, MESSAGES, "poisoned.done", "DLQ.poisoned.work")
                letters = [each async for each in connection.browse("/queue/DLQ.poisoned.work")]
                assert await count_waiting(connection, "poisoned.done") == MESSAGES - MESSAGES // EACH
            assert [process.stop() for process in processes] == [0, 0]
            return letters
        finally:
            for process in processes:
                process.kill()

    letters = asyncio.run(main())
    poison = set(range(0, MESSAGES, EACH))
    assert {json.loads(each.body)["message"]["number"] for each in letters} == poison
    assert len(letters) == len(poison)
    for letter in letters:
        assert letter.headers["truenext-original-attempts"] == "3"
        assert "ValueError: poison" in letter.headers["truenext-original-last-cause"]
    expected = Counter({number: 3 if number in poison else 1 for number in range(MESSAGES)})
    assert Counter(map(int, runs.read_text().split())) == expected
