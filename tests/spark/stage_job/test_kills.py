"""Test of a stage as a Spark job while its processes and the broker are killed: each flow ends once.

`kill -9` of the driver, of Java, of executors, of Python workers and of the broker, at random, until each flow has its
reply, or its dead letter and its report. The audit of history and events then finds nothing.

    TRUENEXT_KILLS=10 TRUENEXT_SEED=7 pytest -s tests/spark/stage_job/test_kills.py
"""

import os
import random
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.broker_process import TRUENEXT, BrokerProcess
from tests.spark.killing import Kills
from tests.spark.queues import url, waiting
from tests.spark.source.query_process import QueryProcess
from tests.spark.stage_job.messages import QUEUE, request
from truenext import blocking
from truenext.flows.envelope import ReplyTo, decode_envelope, encode_envelope

KILLS = int(os.environ.get("TRUENEXT_KILLS", "0"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)
FLOWS = 1_500
"""Flows that are started before each kill: three batches."""
WAITING = [ReplyTo("/queue/ends", report="/queue/reports")]

pytestmark = [
    pytest.mark.skipif(not KILLS, reason="takes minutes: make stage-job"),
    pytest.mark.timeout(1800 + 300 * KILLS),
]


@pytest.mark.parametrize(
    ("master", "victims"),
    [
        ("local[2]", ("driver", "broker", "java", "worker", "source")),
        ("local-cluster[2,1,1024]", ("executor", "broker", "worker", "driver", "java")),
    ],
)
def test_each_flow_ends_once_after_random_kills(master: str, victims: tuple[str, ...], tmp_path: Path) -> None:
    print(f"TRUENEXT_SEED={SEED} TRUENEXT_KILLS={KILLS}")
    started = 0
    broker = BrokerProcess(tmp_path)

    def start_flows() -> None:
        nonlocal started
        _start_flows(broker, range(started, started + FLOWS))
        started += FLOWS

    broker.start()
    try:
        kills = Kills(victims, KILLS, random.Random(SEED))
        kills.run(
            broker,
            start=lambda: _start(broker, tmp_path, master),
            add_work=start_flows,
            has_work=lambda: waiting(broker, QUEUE) > 0,
        )
        _check_ends(broker, started)
        broker.stop()
    finally:
        broker.clean_up()
    print(master, dict(kills.killed), started, "flows")
    audit = [TRUENEXT, "audit", str(broker.data), "--stages", str(tmp_path / "events"), "--master", "local[2]"]
    told = subprocess.run([*audit, "--out", str(tmp_path / "report")], capture_output=True, text=True, check=False)
    print(told.stdout)
    assert told.returncode == 0, told.stdout
    of_stages = (
        f"Stages: {started:,} runs with {started:,} messages in {started:,} flows. Messages of {started // 3:,} "
    )
    assert f"{of_stages}of these were given up, and 0 are in progress." in told.stdout


def _start_flows(broker: BrokerProcess, numbers: range) -> None:
    with blocking.connect(url(broker)) as connection:
        for number in numbers:
            envelope = request(number, WAITING, interactive=number % 7 == 0)
            connection.send_nowait(
                f"/queue/{QUEUE}", encode_envelope(envelope), priority=envelope.priority, correlation_id=envelope.id
            )
            if number % 500 == 499:
                connection.flush()


def _check_ends(broker: BrokerProcess, count: int) -> None:
    """Assert that each flow has one reply or one dead letter, and each dead letter one report."""
    with blocking.connect(url(broker)) as connection:
        replies = Counter(decode_envelope(each.body).flow.trace for each in connection.browse("/queue/ends"))
        letters = Counter(decode_envelope(each.body).flow.trace for each in connection.browse(f"/queue/DLQ.{QUEUE}"))
        reports = Counter(each.correlation_id for each in connection.browse("/queue/reports"))
    priced = {f"flow {number}" for number in range(count) if number % 3 < 2}
    assert replies == dict.fromkeys(priced, 1)
    assert letters == dict.fromkeys({f"flow {number}" for number in range(count)} - priced, 1)
    assert reports == {request(number).id: 1 for number in range(2, count, 3)}


def _start(broker: BrokerProcess, folder: Path, master: str) -> QueryProcess:
    return QueryProcess(folder, "query", url(broker), str(folder), master, package="tests.spark.stage_job")
