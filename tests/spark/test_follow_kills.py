"""Test of `truenext audit --follow` while it and the broker are killed: each finding is told once.

`kill -9` of the command, of its processes and of a broker with planted faults, at random moments, under load; then an
audit without cuts of the same folder.

    TRUENEXT_FOLLOW_KILLS=20 TRUENEXT_SEED=7 pytest -s tests/spark/test_follow_kills.py
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from tests.integration.broker_process import TRUENEXT
from tests.integration.raw_client import RawClient
from tests.spark.faulty_broker import FaultyBroker
from tests.spark.killing import kill
from tests.spark.queues import url
from tests.spark.source.query_process import QueryProcess
from tests.spark.test_follow import check_reported, found_in, reported
from truenext.spark.history.options import parse_options

KILLS = int(os.environ.get("TRUENEXT_FOLLOW_KILLS", "0"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)
VICTIMS = ("broker", "driver", "java", "source", "worker")
CONNECTION_LOST = (OSError, EOFError)
CATCH_UP_SECONDS = 1800
UNCOMPILED = "spark.sql.codegen.wholeStage false\nspark.sql.codegen.factoryMode NO_CODEGEN\n"
"""Settings of Spark: a command that is killed after seconds has compiled for nothing."""
pytestmark = [
    pytest.mark.skipif(not KILLS, reason="takes minutes: make follow"),
    pytest.mark.timeout(3600 + 300 * KILLS),
]


class Load:
    """Producers and consumers of a broker, which connect again whatever ends their connection."""

    def __init__(self, broker: FaultyBroker) -> None:
        self._broker = broker
        self._is_over = threading.Event()
        self.sent = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        works = [(self._produce, "orders"), (self._produce, "bills")]
        works += [(self._consume, queue) for queue in ("orders", "orders", "bills")]
        threads = [threading.Thread(target=self._work, args=work) for work in works]
        for each in threads:
            each.start()
        try:
            yield
        finally:
            self._is_over.set()
            for each in threads:
                each.join()

    def _work(self, work: object, queue: str) -> None:
        assert callable(work)
        while not self._is_over.is_set():
            try:
                with closing(RawClient(self._broker.port)) as client:
                    client.send_connect("1.2", "0,0")
                    work(client, queue)
            except CONNECTION_LOST:
                time.sleep(0.05)

    def _produce(self, client: RawClient, queue: str) -> None:
        while not self._is_over.is_set():
            for _ in range(random.randrange(1, 15)):
                client.send(queue, b"body", persistent=random.random() < 0.6, priority=random.randrange(10))
                self.sent += 1
            client.send(queue, b"", persistent=True, confirmed=True)
            time.sleep(random.uniform(0.0, 1.0))

    def _consume(self, client: RawClient, queue: str) -> None:
        client.subscribe(queue, prefetch=random.choice((1, 3, 10)))
        until = time.monotonic() + random.uniform(0.5, 5.0)
        while time.monotonic() < until and not self._is_over.is_set():
            try:
                message = client.message(0.2)
            except TimeoutError:
                continue
            if random.random() < 0.03:
                client.nack(message)
            else:
                client.ack(message)
            time.sleep(random.uniform(0.0, 0.06))
        if random.random() < 0.5:
            client.crash()


def test_findings_are_told_once_after_kills_of_the_command_and_of_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = Path(os.environ["SPARK_CONF_DIR"]) / "spark-defaults.conf"
    (tmp_path / conf.name).write_text(conf.read_text() + UNCOMPILED)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    print(f"TRUENEXT_SEED={SEED} TRUENEXT_FOLLOW_KILLS={KILLS}")
    dice = random.Random(SEED)
    broker = FaultyBroker(tmp_path)
    load = Load(broker)
    log = ""
    with ExitStack() as stack:
        stack.callback(broker.clean_up)
        broker.start()
        with load.running():
            log += kill_often(broker, tmp_path, stack, dice)
        last = stack.enter_context(started(broker, tmp_path))
        await_end_of_history(broker, tmp_path, last)
        last.send_signal(signal.SIGINT)
        assert last.wait() == 1, last.log
        log += last.log
        sent = reported(broker)
        broker.stop()
    print(f"{load.sent:,} messages, {judged(tmp_path):,} events")
    check_reported(sent, tmp_path / "out")
    check_against_whole_audit(broker, tmp_path)
    lines = re.findall(r"^finding: .*$", log, re.MULTILINE)
    assert len(lines) == len(set(lines))
    assert "The contract was broken" in last.log


def kill_often(broker: FaultyBroker, folder: Path, stack: ExitStack, dice: random.Random) -> str:
    """Kill the command `KILLS` times: its driver in each of its runs, and often another process before, or the broker.
    Every second run has judged a micro-batch before. Return the output of all runs."""
    killed: Counter[str] = Counter()
    log = ""
    for number in range(KILLS):
        # What a killed command leaves behind, such as its Java, ends by itself, beside the next command.
        query = stack.enter_context(started(broker, folder))
        victim = VICTIMS[number % len(VICTIMS)]
        if number % 2:
            await_next_state(folder, query)
        assert kill(victim, broker, query, dice), query.log
        killed[victim] += 1
        if victim != "driver":
            time.sleep(dice.uniform(0.0, 10.0))
            killed["driver"] += query.is_running
            query.kill_driver()
        assert query.wait() != 0
        log += query.log
        print(f"{victim} is killed; judged up to event {judged(folder):,}", flush=True)
    print(dict(killed))
    return log


def started(broker: FaultyBroker, folder: Path) -> QueryProcess:
    places = ["--state", str(folder / "state"), "--out", str(folder / "out"), "--report-to", "findings"]
    command = ["audit", "--follow", "--url", url(broker), "--master", "local[2]", *places]
    return QueryProcess(folder, "__main__", *command, package="truenext")


def judged(folder: Path) -> int:
    """Return the number of the last event that was judged; 0 if none was."""
    try:
        return int(json.loads((folder / "state" / "state.json").read_bytes())["last_event"])
    except FileNotFoundError:
        return 0


def await_next_state(folder: Path, query: QueryProcess) -> None:
    """Wait until the command has judged a micro-batch."""
    before = judged(folder)
    while judged(folder) == before:
        assert query.is_running, query.log
        time.sleep(0.1)


def await_end_of_history(broker: FaultyBroker, folder: Path, query: QueryProcess) -> None:
    """Wait until all events are judged."""
    deadline = time.monotonic() + CATCH_UP_SECONDS
    with closing(parse_options({"kind": "history", "url": url(broker)}).open()) as history:
        while judged(folder) + 1 < history.extent().next:
            assert query.is_running, query.log
            assert time.monotonic() < deadline, f"judged up to {judged(folder)}: {query.log}"
            time.sleep(1.0)


def check_against_whole_audit(broker: FaultyBroker, folder: Path) -> None:
    """Check that an audit of the whole history has the same findings."""
    whole = folder / "whole"
    command = [TRUENEXT, "audit", str(broker.data), "--master", "local[2]", "--out", str(whole)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    print(done.stdout)
    assert done.returncode == 1, done.stdout + done.stderr
    told, expected = Counter(found_in(folder / "out")), Counter(found_in(whole, "{}/*.parquet"))
    print(Counter(kind for kind, *_ in told.elements()))
    assert told == expected, (told - expected, expected - told)
