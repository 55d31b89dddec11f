"""Tests of messages that end their process: they become dead letters, and no other message does. Source:
docs/stages.md, "Failures and outages" """

import asyncio
import json
from pathlib import Path

import truenext
from tests.integration.broker_process import BrokerProcess
from tests.stages.ended_messages import count_waiting
from tests.stages.service_process import ServiceProcess
from tests.stages.services import ending
from tests.stages.services.job import Job as DoneJob
from tests.stages.services.killing import ATTEMPTS, Job, app, work

MESSAGES = 1000
PATIENCE_S = 100


async def _run_until_done(broker: BrokerProcess, folder: Path) -> int:
    """Restart the service whenever it dies, as an orchestrator does; return the number of starts."""
    url = f"stomp://127.0.0.1:{broker.port}"
    async with truenext.connect(url) as connection:
        app.broker = (url,)
        async with app.connected(), app.initiate() as initiation:
            for number in range(MESSAGES):
                initiation.send(work, Job(number, kills=number == MESSAGES // 3), trace=f"job {number}")
        started = 0
        process = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    if process is None or process.has_ended:
                        process = ServiceProcess(folder, "tests.stages.services.killing:app", url)
                        started += 1
                    await asyncio.sleep(0.1)
                    ended = await count_waiting(connection, "killing.done", "DLQ.killing.work")
                    if ended >= MESSAGES and not process.has_ended:
                        return started
        finally:
            if process is not None:
                process.kill()


async def _receive_all(broker: BrokerProcess, queue: str) -> list[truenext.Content]:
    async with truenext.connect(f"stomp://127.0.0.1:{broker.port}") as connection:
        return [each async for each in connection.browse(f"/queue/{queue}")]


def test_message_that_kills_its_process_is_the_only_dead_letter_of_a_thousand(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    started = asyncio.run(_run_until_done(broker, tmp_path))
    assert started == ATTEMPTS + 1
    letters = asyncio.run(_receive_all(broker, "DLQ.killing.work"))
    assert [json.loads(each.body)["message"]["number"] for each in letters] == [MESSAGES // 3]
    done = [json.loads(each.body)["message"]["number"] for each in asyncio.run(_receive_all(broker, "killing.done"))]
    assert sorted(done) == [number for number in range(MESSAGES) if number != MESSAGES // 3]


def test_a_message_whose_stage_leaves_a_task_that_ends_the_process_is_a_dead_letter(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    """Fixed: the process ended in order and released the message without an attempt, which then ended the next
    process, for ever."""
    url = f"stomp://127.0.0.1:{broker.port}"

    async def send() -> None:
        ending.app.broker = (url,)
        async with ending.app.connected():
            await ending.app.send(ending.work, DoneJob(1), trace="t")

    asyncio.run(send())
    for _ in range(2):
        process = ServiceProcess(tmp_path, "tests.stages.services.ending:app", url)
        assert process.wait() == 1
        assert "a task that a stage started and did not await has raised this" in process.log
    process = ServiceProcess(tmp_path, "tests.stages.services.ending:app", url)
    broker.await_facts("DLQ.ending.work", waiting=1, unacknowledged=0)
    assert process.stop() == 0
