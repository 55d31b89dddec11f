"""Troubles that tests of source and sink share: a queue of numbered messages, a full broker, a cluster."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.broker_process import BrokerProcess, dying_with_us
from tests.integration.raw_client import UnexpectedError
from tests.spark.queues import queues_with_messages, url
from tests.spark.source.query_process import QueryProcess
from truenext import blocking
from truenext.spark.java import find_java

PATIENCE_SECONDS = 240

FLUSH_BYTES = 3_000_000
"""Bytes of bodies that wait for their confirmation."""


def send(broker: BrokerProcess, numbers: range, size: int) -> None:
    with blocking.connect(url(broker)) as connection:
        for number in numbers:
            connection.send_nowait("/queue/orders", bytes(size), headers={"number": str(number)})
            if number % max(1, min(1000, FLUSH_BYTES // max(1, size))) == 0:
                connection.flush()


def await_that(holds: Callable[[], object], query: QueryProcess) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert query.is_running, query.log
        assert time.monotonic() < deadline, query.log
        time.sleep(0.05)


def bundle_queues(broker: BrokerProcess) -> list[str]:
    """Return the queues with bundles, `Spark.source.SPACE.ID.PARTITION`."""
    return [name for name in queues_with_messages(broker) if name.count(".") == 4]


def fill(broker: BrokerProcess, queue: str, size: int) -> int:
    """Send numbered messages until the broker refuses one for lack of space, and return how many wait."""
    client = broker.connect()
    # A client that only sends would wait for room.
    client.subscribe("nothing")
    with pytest.raises(UnexpectedError, match="as full as it may be"):
        for number in range(10_000_000):
            client.send(queue, bytes(size), persistent=True, headers={"number": str(number)}, confirmed=True)
    client.close()
    return broker.queues()[queue].waiting


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """Run a cluster of two hosts, as Spark begins no speculative attempt on the host of the first one."""
    folder = folder / "cluster"
    folder.mkdir()
    home = Path(os.environ["SPARK_HOME"])
    environment = os.environ | {
        "JAVA_HOME": str(find_java()),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_WORKER_DIR": str(folder),
        "SPARK_DAEMON_MEMORY": "512m",
    }
    started: list[subprocess.Popen[bytes]] = []

    def run(*arguments: str) -> Path:
        log = folder / f"{len(started)}.log"
        command = dying_with_us([str(home / "bin" / "spark-class"), *arguments])
        with log.open("wb") as file:
            started.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))
        return log

    try:
        log = run("org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        master = _said(log, "Starting Spark master at ")
        for host in ("127.0.0.2", "127.0.0.3"):
            options = ("--host", host, "--webui-port", "0", "--cores", "1", "--memory", "1g")
            log = run("org.apache.spark.deploy.worker.Worker", *options, master)
            _said(log, "Successfully registered with master ")
        yield master
    finally:
        for process in started:
            process.kill()
            process.wait()


def _said(log: Path, words: str) -> str:
    """Wait until a log has these words, and return the word after them."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while words not in (text := log.read_text()):
        assert time.monotonic() < deadline, text
        time.sleep(0.1)
    return text.partition(words)[2].split()[0]
