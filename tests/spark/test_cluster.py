"""Tests of the audit where Spark's workers are processes of their own.

A session cannot change its master, so each master has a process to itself.
"""

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from tests.contract.test_history import busy, write
from tests.integration.broker_process import TRUENEXT, BrokerProcess
from tests.spark.policies import serve, three_classes
from tests.spark.standalone_cluster import Cluster, await_line, make_driver_environment
from tests.tls_broker import Certificates, TlsBroker, tls_broker
from truenext import blocking
from truenext.history.files import chunks_of_file, count_events, history_files
from truenext.spark.schema import EVENTS

pytestmark = [
    pytest.mark.timeout(5400),
    pytest.mark.skipif(not os.environ.get("TRUENEXT_KILLS"), reason="starts Spark several times: make cluster"),
]


@pytest.mark.parametrize("master", ["local[*]", "local-cluster[2,1,1024]"])
def test_findings_are_the_same_with_every_master(master: str, spark: SparkSession, tmp_path: Path) -> None:
    """One broker has a wrong history in Parquet, the other a right one in its own format."""
    history, wrong = serve(three_classes, 5)
    rows = [tuple(each[name] for name in EVENTS.names) for each in history]
    spark.createDataFrame(rows, EVENTS).write.parquet(str(tmp_path / "wrong" / "events"))
    (tmp_path / "right").mkdir()
    write(tmp_path / "right", busy(random.Random(5))).close()
    out = tmp_path / "out"
    ran = subprocess.run(
        [sys.executable, "-m", "truenext.spark.audit", tmp_path, "--master", master, "--out", out],
        capture_output=True,
        text=True,
        timeout=SUBMITTED_SECONDS,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    for kind, count in wrong.items():
        words = "higher priority" if kind == "inversion" else "same priority"
        assert any(line.startswith(f"- {count:,} dispatches") and words in line for line in ran.stdout.splitlines())
    assert "The contract was broken at 1 of 2 brokers." in ran.stdout
    found = pq.read_table(out / "violations").to_pylist()
    assert len(found) == sum(wrong.values())
    assert {row["broker"] for row in found} == {"wrong"}


MESSAGES = 20_000
SUBMITTED_SECONDS = 1800
"""Longest time of a submitted program. A loaded machine takes half an hour for what takes a minute on an idle one."""


def test_cluster_judges_two_brokers_while_one_works_and_a_worker_is_killed(tmp_path: Path) -> None:
    environment = make_driver_environment(tmp_path / "environment")
    stopped, working = (BrokerProcess(make(tmp_path / name)) for name in ("stopped", "working"))
    with stopped.running():
        work(stopped, MESSAGES)
    with working.running(), at_work(working):
        before = recorded(working.data)
        log = tmp_path / "log"
        with (
            Cluster(make(tmp_path / "cluster"), environment, workers=2) as cluster,
            cluster.submitted(
                cluster.audit, str(stopped.data), str(working.data), "--out", str(tmp_path / "out"), log=log
            ) as audit,
        ):
            await_line(log, "runs and gaps", SUBMITTED_SECONDS)
            assert all(cluster.executor_files(worker) for worker in range(2))
            cluster.kill(cluster.workers[0])
            audit.wait(SUBMITTED_SECONDS)
        output = log.read_text(errors="replace")
        assert audit.returncode == 0, output
        after = recorded(working.data)
    assert "The contract held at all 2 brokers." in output
    events = {
        name: int(count.replace(",", ""))
        for name, count in re.findall(r"^(\w+)/data \([0-9a-f]{8}\): The contract held: ([\d,]+) events", output, re.M)
    }
    assert events["stopped"] == recorded(stopped.data)
    assert before <= events["working"] <= after
    latency = pq.read_table(tmp_path / "out" / "latency").to_pylist()
    counts = {row["broker"]: row["count"] for row in latency if row["measure"] == "visible to dispatched"}
    assert len(counts) == 2
    assert MESSAGES in counts.values()


PROGRAM = Path(__file__).with_name("there_and_back.py")
WORD = "word"
LOGIN = 'password_file = "word"'
COPIED = 3_000
"""Ten batches of each query."""
USERS = """
[user.shop]
password_file = "word"
send = ["orders"]
take = ["receipts"]

[user.pipe]
{login}
take = ["{taken}", "Spark.*.main.>"]
send = ["{sent}", "Spark.*.main.>"]
browse = ["Spark.*.main.>"]
manage = ["Spark.*.main.>"]
"""
"""The query's user has the grants that docs/security.md names, and no more."""


def test_cluster_copies_each_message_once_between_brokers_with_tls_while_a_worker_and_a_broker_are_killed(
    tmp_path: Path,
) -> None:
    environment = make_driver_environment(tmp_path / "environment")
    certificates = Certificates(tmp_path / "certificates")
    with (
        guarded(tmp_path / "first", certificates, USERS.format(login=LOGIN, taken="orders", sent="receipts")) as first,
        guarded(
            tmp_path / "second",
            certificates,
            USERS.format(login='certificates = ["DNS:client.example"]', taken="bills", sent="bills"),
        ) as second,
    ):
        login = partial(blocking.connect, first.url, user="shop", password=WORD, ca=certificates.ca)
        with login() as shop:
            for number in range(COPIED):
                shop.send_nowait("/queue/orders", str(number), priority=number % 10)
        log = tmp_path / "log"
        checkpoints = tmp_path / "checkpoints"
        of_first = {"url": first.url, "user": "pipe", "passwordFile": str(tmp_path / "first" / "word")}
        of_second = {"url": second.url, "certificate": str(certificates.client)}
        options = [json.dumps({**each, "ca": str(certificates.ca)}) for each in (of_first, of_second)]
        with (
            Cluster(make(tmp_path / "cluster"), environment, workers=2) as cluster,
            cluster.submitted(cluster.copy_in(PROGRAM), str(checkpoints), *options, log=log) as queries,
        ):
            await_batch(checkpoints / "there", 2, queries, log)
            assert all(cluster.executor_files(worker) for worker in range(2))
            cluster.kill(cluster.workers[0])
            await_batch(checkpoints / "back", 2, queries, log)
            second.kill()
            second.start()
            queries.wait(SUBMITTED_SECONDS)
        assert queries.returncode == 0, log.read_text(errors="replace")
        with login() as shop:
            assert sorted(received(shop, "/queue/receipts", COPIED)) == [*range(COPIED)]
        first.stop()
        second.stop()
    audit = [TRUENEXT, "audit", str(tmp_path / "first" / "data"), str(tmp_path / "second" / "data")]
    told = subprocess.run(
        [*audit, "--master", "local[2]"], capture_output=True, text=True, timeout=SUBMITTED_SECONDS, check=False
    )
    assert "The contract held at all 2 brokers." in told.stdout, told.stdout + told.stderr


@contextmanager
def guarded(folder: Path, certificates: Certificates, users: str) -> Iterator[TlsBroker]:
    """Run a broker that keeps its data below `folder`, for these users alone."""
    file, password = make(folder) / "users.toml", folder / "word"
    file.write_text(users)
    password.write_text(WORD)
    for each in (file, password):
        each.chmod(0o600)
    options = ["--data", str(folder / "data"), "--users", str(file), *certificates.broker_options("asked")]
    with tls_broker(folder, *options) as running:
        yield running


def await_batch(checkpoint: Path, number: int, program: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a query that a program runs has done its batch of this number."""
    deadline = time.monotonic() + SUBMITTED_SECONDS
    while not (checkpoint / "commits" / str(number)).exists():
        assert program.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.05)


def received(connection: blocking.Connection, queue: str, count: int) -> list[int]:
    """Take the numbers in a queue: `count`, and any that are there besides."""
    numbers: list[int] = []
    with connection.consumer(queue) as consumer:
        while messages := consumer.receive_many(1000, 1 if len(numbers) >= count else 60):
            for message in messages:
                message.ack()
                numbers.append(int(message.text))
    return numbers


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def work(broker: BrokerProcess, messages: int) -> None:
    """Send messages to a queue, and receive them."""
    with blocking.connect(broker.url) as connection, connection.consumer("/queue/orders") as consumer:
        connection.send_many("/queue/orders", [b"an order"] * messages)
        received = 0
        while received < messages:
            for message in consumer.receive_many(1000, 60):
                message.ack()
                received += 1


@contextmanager
def at_work(broker: BrokerProcess) -> Iterator[None]:
    """Send messages and receive them until the block ends, and once before it begins."""
    work(broker, 1000)
    is_over = Event()

    def work_on() -> None:
        while not is_over.wait(0.5):
            work(broker, 200)

    thread = Thread(target=work_on)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def recorded(data: Path) -> int:
    """Return the number of the last event in the history of a broker's first run."""
    last = history_files(data / "history")[-1]
    *_, chunk = chunks_of_file(last)
    return chunk.first_event + count_events(chunk) - 1
