"""Test of queries while their processes and the broker are killed: each message has its effect once.

`kill -9` of the driver, of Java, of executors, of Python workers and of the broker, at random, until all messages that
were sent are in Parquet, or in another queue.

    TRUENEXT_KILLS=100 TRUENEXT_SEED=7 pytest -s tests/spark/source/test_kills.py
"""

import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.broker_process import TRUENEXT, BrokerProcess
from tests.spark.killing import Kills
from tests.spark.queues import url, waiting
from tests.spark.source.query_process import QueryProcess, check_each_once, written_rows
from truenext import blocking

KILLS = int(os.environ.get("TRUENEXT_KILLS", "0"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)
MESSAGES = 9_000
"""Messages sent before each kill: six batches."""
QUEUES = ("rows", "more.rows")
READ = "rows,more.>"
"""Option `queue` of the query."""
pytestmark = [
    pytest.mark.skipif(not KILLS, reason="takes minutes: make spark"),
    pytest.mark.timeout(1800 + 300 * KILLS),
]


@pytest.mark.parametrize(
    ("master", "target", "victims"),
    [
        ("local[2]", "", ("driver", "java", "source", "worker", "broker")),
        ("local-cluster[2,1,1024]", "", ("executor", "worker", "broker")),
        ("local[2]", "copies", ("driver", "java", "source", "sink", "worker", "broker")),
        ("local-cluster[2,1,1024]", "copies", ("executor", "sink", "worker", "broker")),
    ],
)
def test_messages_have_their_effect_once_after_random_kills(
    master: str, target: str, victims: tuple[str, ...], tmp_path: Path
) -> None:
    print(f"TRUENEXT_SEED={SEED} TRUENEXT_KILLS={KILLS}")
    dice = random.Random(SEED)
    sent = 0
    broker = BrokerProcess(tmp_path)

    def send() -> None:
        nonlocal sent
        _send(broker, range(sent, sent + MESSAGES), dice)
        sent += MESSAGES

    broker.start()
    try:
        kills = Kills(victims, KILLS, dice)
        kills.run(
            broker,
            start=lambda: _start(broker, tmp_path, master, target),
            add_work=send,
            has_work=lambda: any(waiting(broker, queue) for queue in QUEUES),
        )
        rows = _rows_in(broker, target) if target else written_rows(tmp_path / "rows")
        broker.stop()
    finally:
        broker.clean_up()
    print(master, dict(kills.killed))
    check_each_once(rows, sent)
    audit = [TRUENEXT, "audit", str(broker.data), "--master", "local[2]"]
    assert subprocess.run(audit, capture_output=True, text=True, check=False).returncode == 0


def _send(broker: BrokerProcess, numbers: range, dice: random.Random) -> None:
    with blocking.connect(url(broker)) as connection:
        for number in numbers:
            group = f"group {dice.randrange(20)}" if dice.random() < 0.2 else ""
            connection.send_nowait(
                f"/queue/{dice.choice(QUEUES)}",
                bytes(dice.choice((10, 100, 3000))),
                priority=dice.randrange(10),
                group=group,
                headers={"number": str(number)},
            )
            if number % 1000 == 999:
                connection.flush()


def _rows_in(broker: BrokerProcess, queue: str) -> list[dict[str, Any]]:
    """Return the rows of a queue, as `written_rows` does."""
    with blocking.connect(url(broker)) as connection:
        return [
            {"attempts": message.attempts, "headers": {"number": message.headers["number"]}}
            for message in connection.browse(f"/queue/{queue}")
        ]


def _start(broker: BrokerProcess, folder: Path, master: str, target: str) -> QueryProcess:
    return QueryProcess(folder, "query", url(broker), READ, str(folder), master, target)
