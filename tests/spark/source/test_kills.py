"""Does each message come once, whatever is killed?

`kill -9` of the driver, of Java, of Python workers and of the broker, at random, until all that was sent is in Parquet.

    TRUENEXT_KILLS=100 TRUENEXT_SEED=7 pytest -s tests/spark/source/test_kills.py
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.integration.broker_process import TRUENEXT, BrokerProcess
from truenext import blocking

KILLS = int(os.environ.get("TRUENEXT_KILLS", "0"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)
MESSAGES = 2_000 * KILLS
RUN_SECONDS = 180
VICTIMS = ("driver", "java", "worker", "broker")


@pytest.mark.skipif(not KILLS, reason="takes minutes: make spark")
@pytest.mark.timeout(600 + 120 * KILLS)
def test_each_message_is_in_one_batch_whatever_is_killed(tmp_path: Path) -> None:
    print(f"TRUENEXT_SEED={SEED} TRUENEXT_KILLS={KILLS}")
    dice = random.Random(SEED)
    broker = BrokerProcess(tmp_path)
    broker.start()
    killed: Counter[str] = Counter()
    try:
        _send(broker, dice)
        while sum(killed.values()) < KILLS or _waiting(broker):
            query = _start(broker, tmp_path)
            try:
                if sum(killed.values()) < KILLS:
                    killed[_kill_one(broker, query, dice)] += 1
                query.wait(RUN_SECONDS)
            finally:
                _end(query)
        # The last batch may be written and not committed.
        last = _start(broker, tmp_path)
        assert last.wait(RUN_SECONDS) == 0
        _end(last)
        broker.stop()
    finally:
        broker.clean_up()
    print(dict(killed))
    rows = pq.read_table(_files(tmp_path), columns=["sequence", "attempts", "headers"]).to_pylist()
    numbers = Counter(dict(row["headers"])["number"] for row in rows)
    assert [number for number, count in numbers.items() if count > 1] == []
    assert len(numbers) == MESSAGES
    assert {row["attempts"] for row in rows} == {0}
    audit = [TRUENEXT, "audit", str(broker.data), "--master", "local[2]"]
    assert subprocess.run(audit, capture_output=True, text=True, check=False).returncode == 0


def _send(broker: BrokerProcess, dice: random.Random) -> None:
    with blocking.connect(f"stomp://127.0.0.1:{broker.port}") as connection:
        for number in range(MESSAGES):
            group = f"group {dice.randrange(20)}" if dice.random() < 0.2 else ""
            connection.send_nowait(
                "/queue/rows",
                bytes(dice.choice((10, 100, 3000))),
                priority=dice.randrange(10),
                group=group,
                headers={"number": str(number)},
            )
            if number % 1000 == 999:
                connection.flush()


def _waiting(broker: BrokerProcess) -> int:
    """Messages that no bundle has."""
    if not broker.is_running:
        broker.start_on_same_port()
    with blocking.connect(f"stomp://127.0.0.1:{broker.port}") as connection:
        return sum(1 for _ in connection.browse("/queue/rows"))


def _start(broker: BrokerProcess, folder: Path) -> subprocess.Popen[bytes]:
    if not broker.is_running:
        broker.start_on_same_port()
    command = [
        sys.executable,
        "-m",
        "tests.spark.source.query",
        f"stomp://127.0.0.1:{broker.port}",
        "rows",
        str(folder),
    ]
    with (folder / "query.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def _kill_one(broker: BrokerProcess, query: subprocess.Popen[bytes], dice: random.Random) -> str:
    """Kill something of a running query, once it has begun to take messages; what it was."""
    before = _journal_bytes(broker)
    deadline = time.monotonic() + RUN_SECONDS
    while query.poll() is None and _journal_bytes(broker) == before and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(dice.expovariate(1.0))
    victim = dice.choice(VICTIMS)
    if victim == "broker":
        broker.kill()
        time.sleep(dice.random())
        broker.start(broker.port)
    elif victim == "driver":
        query.kill()
    else:
        found = _processes(query, "java" if victim == "java" else "pyspark.daemon")
        if not found:
            return "nothing"
        os.kill(dice.choice(found), signal.SIGKILL)
    return victim


def _journal_bytes(broker: BrokerProcess) -> int:
    """Grows with each bundle."""
    return sum(file.stat().st_size for file in (broker.data / "journal").glob("*") if file.exists())


def _processes(query: subprocess.Popen[bytes], word: str) -> list[int]:
    """Of the query's session, those with this word in their command."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
        except OSError:
            continue
        if session == query.pid and word.encode() in command:
            found.append(int(folder.name))
    return found


def _end(query: subprocess.Popen[bytes]) -> None:
    for number in _processes(query, ""):
        try:
            os.kill(number, signal.SIGKILL)
        except ProcessLookupError:
            continue
    query.wait()


def _files(folder: Path) -> list[str]:
    """What Spark's own log of the folder says is in it: what a killed task has written is not."""
    logs = (folder / "rows" / "_spark_metadata").glob("[0-9]*")
    lines = [line for log in logs for line in log.read_text().splitlines()[1:]]
    return sorted({json.loads(line)["path"].removeprefix("file://") for line in lines})
