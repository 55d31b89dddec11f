"""Tests of failing flows in processes that are killed: each flow ends once, as a reply, a handled failure, or one dead
letter with one report. Tests of each reason of which an asker is told. Source: docs/stages.md, "Failures of requests"

TRUENEXT_FLOW_KILLS=40 TRUENEXT_KILLED_FLOWS=2000 pytest tests/stages/test_failing_flows.py        longer
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import truenext
from tests.drawing import one_of
from tests.integration.broker_process import BrokerProcess
from tests.stages.ended_messages import await_waiting, count_waiting, facts_of_queues
from tests.stages.service_process import ServiceProcess
from tests.stages.services.failing import KINDS, LEAF, Ended, Job
from truenext.clock import monotonic
from truenext.stage import FlowFailed, Service

SERVICE = "tests.stages.services.failing:app"
FLOWS = int(os.environ.get("TRUENEXT_KILLED_FLOWS", "160"))
KILLS = int(os.environ.get("TRUENEXT_FLOW_KILLS", "3"))
PATIENCE_S = 100 + FLOWS / 10
AT_ONCE_S = 5.0
"""Seconds within which an asker is told on a busy machine."""
PATHS: Mapping[str, list[str]] = {
    "ok": ["leaf", "middle", "outer"],
    "middle": ["middle handled", "middle", "outer"],
    "outer": ["outer handled", "outer"],
}
LAST_HANDLER = "failing.outer.stage.on_failure"
REPLIES, REPORTS = "tester.replies", "tester.reports"


def first_message(number: int) -> bytes:
    """Return the first message of a flow as a foreign program writes it, with durable queues for reply and report."""
    body = {
        "version": 2,
        "id": f"f{number}",
        "flow": {"id": f"f{number}", "trace": f"t{number}", "startedMs": 1, "startedBy": "tester"},
        "kind": "request",
        "sender": "tester",
        "message": {"number": number, "kind": KINDS[number % len(KINDS)]},
        "waiting": [{"to": f"/queue/{REPLIES}", "report": f"/queue/{REPORTS}"}],
    }
    return json.dumps(body).encode()


async def run_until_ended(broker: BrokerProcess, folder: Path, victims: str) -> dict[str, list[truenext.Content]]:
    """Start the flows, and kill what `victims` says several times while they run. Return what is left in each queue."""
    url = f"stomp://127.0.0.1:{broker.port}"
    service = ServiceProcess(folder, SERVICE, url)
    try:
        async with truenext.connect(url) as connection, asyncio.timeout(PATIENCE_S):
            async with connection.session(transacted=True) as session:
                for number in range(FLOWS):
                    await session.send(
                        "/queue/failing.outer",
                        first_message(number),
                        report_to=f"/queue/{REPORTS}",
                        report_id=f"f{number}",
                    )
                await session.commit()
            await asyncio.to_thread(service.await_lines, "failing runs")
            # Counted in flows, and not in seconds: each kill then comes while flows run.
            for ended in sorted(random.sample(range(FLOWS * 3 // 4), k=KILLS)):
                victim = random.choice(["broker", "stage"]) if victims == "both" else victims
                while await count_waiting(connection, REPLIES, REPORTS) < ended:
                    await asyncio.sleep(0.01)
                if victim == "stage":
                    service.kill()
                    service = ServiceProcess(folder, SERVICE, url)
                    await asyncio.to_thread(service.await_lines, "failing runs")
                else:
                    broker.kill()
                    broker.start(broker.port)
            await await_waiting(connection, FLOWS, REPLIES, REPORTS)
            queues = await facts_of_queues(connection)
            while any(
                each["unacknowledged"] or (each["waiting"] and each["name"].startswith("failing.")) for each in queues
            ):
                await asyncio.sleep(0.05)
                queues = await facts_of_queues(connection)
            names = [each["name"] for each in queues if each["waiting"]]
            return {name: [each async for each in connection.browse(f"/queue/{name}")] for name in names}
    finally:
        service.kill()


@pytest.mark.timeout(60 + PATIENCE_S)
@one_of("victims", ["broker", "stage", "both"], ids=["broker", "stage", "both"])
def test_each_flow_ends_once_although_processes_are_killed(broker: BrokerProcess, tmp_path: Path, victims: str) -> None:
    left = asyncio.run(run_until_ended(broker, tmp_path, victims))
    assert left.keys() == {REPLIES, REPORTS, f"DLQ.{LAST_HANDLER}"}
    replies = [json.loads(each.body)["message"] for each in left[REPLIES]]
    expected = {number: PATHS.get(KINDS[number % len(KINDS)]) for number in range(FLOWS)}
    assert Counter(each["number"] for each in replies) == Counter(n for n, path in expected.items() if path)
    assert all(each["path"] == expected[each["number"]] for each in replies)
    given_up = Counter(f"f{n}" for n, path in expected.items() if not path)
    reports, letters = left[REPORTS], left[f"DLQ.{LAST_HANDLER}"]
    assert Counter(each.correlation_id for each in reports) == given_up
    assert Counter(json.loads(each.body)["flow"]["id"] for each in letters) == given_up
    for each in (*reports, *letters):
        assert each.headers["truenext-original-destination"] == f"/queue/{LEAF}"
        number = each.correlation_id if each.body == b"" else json.loads(each.body)["flow"]["id"]
        assert f"Reject: number {number[1:]}\n" in each.first_cause
    assert all(each.body == b"" for each in reports)


# ---- Reasons ----


async def told(asking: asyncio.Task[Any]) -> FlowFailed:
    started = monotonic()
    with pytest.raises(FlowFailed) as caught:
        await asking
    assert monotonic() - started < AT_ONCE_S
    return caught.value


def asker(broker: BrokerProcess) -> tuple[Service, Any]:
    app = Service("asker", broker=f"stomp://127.0.0.1:{broker.port}")
    return app, app.remote("failing.outer", Job, Ended)


def test_asker_is_told_of_a_message_that_has_killed_its_process(broker: BrokerProcess, tmp_path: Path) -> None:
    async def main() -> None:
        app, outer = asker(broker)
        url = f"stomp://127.0.0.1:{broker.port}"
        environment = {"LEAF_ATTEMPTS": "1"}
        async with app.connected(), asyncio.timeout(PATIENCE_S):
            first = ServiceProcess(tmp_path, SERVICE, url, environment=environment)
            asking = asyncio.create_task(app.ask(outer, Job(1, "kills"), trace="t", timeout=PATIENCE_S))
            await asyncio.to_thread(first.wait)
            assert not asking.done()
            # In this thread: what it starts dies with the one that started it.
            second = ServiceProcess(tmp_path, SERVICE, url, environment=environment)
            try:
                await asyncio.to_thread(second.await_lines, "failing runs")
                failed = await told(asking)
            finally:
                second.kill()
        assert failed.stage == LEAF
        assert failed.last_cause.startswith("NoAttemptsLeft: 1 of 1 allowed attempts have failed")

    asyncio.run(main())


def policy_file(folder: Path, text: str) -> Path:
    file = folder / "truenext.toml"
    file.write_text(f"[policy]\n{text}\n")
    return file


def test_asker_is_told_when_a_changed_policy_gives_up_the_message(tmp_path: Path) -> None:
    file = policy_file(tmp_path, "attempts_max = 7")
    broker = BrokerProcess(tmp_path, ["--config", str(file)])
    broker.start()

    async def main() -> None:
        app, outer = asker(broker)
        url = f"stomp://127.0.0.1:{broker.port}"
        async with app.connected(), truenext.connect(url) as connection, asyncio.timeout(PATIENCE_S):
            asking = asyncio.create_task(app.ask(outer, Job(1, "ok"), trace="t", timeout=PATIENCE_S))
            consumer = await connection.consumer("/queue/failing.outer")
            for delay in (0.001, 3600):
                message = await consumer.receive(timeout=PATIENCE_S)
                assert message is not None
                await message.nack(delay=delay, cause="not yet")
            policy_file(tmp_path, "attempts_max = 2")
            await connection.control_request("reload")
            failed = await told(asking)
        assert (failed.stage, failed.attempts, failed.last_cause) == ("failing.outer", 2, "not yet")

    try:
        asyncio.run(main())
        broker.stop()
    finally:
        broker.clean_up()


def test_asker_is_told_of_a_message_that_expires_to_a_dead_letter(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, policy={"expired": "dead-letter"})
    broker.start()

    async def main() -> None:
        app, outer = asker(broker)
        async with app.connected(), asyncio.timeout(PATIENCE_S):
            asking = asyncio.create_task(app.ask(outer, Job(1, "ok"), trace="t", timeout=PATIENCE_S, ttl=0.5))
            failed = await told(asking)
        assert (failed.stage, failed.attempts, failed.last_cause) == ("failing.outer", 0, "")
        assert "expired" in failed.reason and failed.reason in str(failed)

    try:
        asyncio.run(main())
        broker.stop()
    finally:
        broker.clean_up()
