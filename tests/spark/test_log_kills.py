"""Test of a query from queue to queue with messages in PostgreSQL, while what keeps them is killed.

At a random moment the broker, one of its sessions, or PostgreSQL gets a kill -9, in turn; or the active broker does,
and the one that stands by takes over. Before a third of its starts a broker's data folder is taken away. A producer
sends meanwhile. Each message must be copied once, and the history of each folder is audited. A short run has a query
that calls what Spark calls; only a long one has Spark.

    TRUENEXT_QUERY_KILLS=60 TRUENEXT_SEED=7 pytest -s tests/spark/test_log_kills.py
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from bench.brokers import free_port
from tests.contract.postgresql.log_writer import DURABLE
from tests.integration.forked import completed_text
from tests.integration.log_broker import LogBroker, await_server, make_schema
from tests.integration.log_kills import kill_postmaster, kill_session
from tests.integration.working_thread import WorkingThread
from tests.spark.copies import Copy, PlainCopy, SparkCopy
from tests.stages.postgres import PostgresServer, own_server
from truenext import blocking
from truenext.spark.audit.command import run_audit

KILLS = int(os.environ.get("TRUENEXT_QUERY_KILLS", "3"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)

MESSAGES = 600
"""Messages that are sent around each kill: two batches or more."""
SCHEMA = "queries"
PATIENCE_S = 240


class Producer(WorkingThread):
    """Thread that sends numbered messages up to `limit`, whatever ends its connections."""

    def __init__(self, urls: list[str], chance: random.Random) -> None:
        super().__init__()
        self.limit = 0
        self.sent = 0
        """Number of messages that a broker has confirmed."""
        self.is_over = False
        self._urls = urls
        self._chance = chance

    def work(self) -> None:
        with blocking.connect(*self._urls) as connection:
            while not self.is_over or self.sent < self.limit:
                self._send(connection, range(self.sent, min(self.limit, self.sent + 20)))
                time.sleep(0.02)

    def _send(self, connection: blocking.Connection, numbers: range) -> None:
        chance = self._chance
        for number in numbers:
            body, group = bytes(chance.choice((10, 100, 3000))), f"group {number % 20}" if chance.random() < 0.2 else ""
            options: dict[str, Any] = {"group": group, "headers": {"number": str(number)}}
            connection.send_nowait("/queue/orders", body, priority=chance.randrange(10), **options)
        connection.flush()
        self.sent = numbers.stop


class CopyRun:
    """A query, its producer, and a broker, or two, with a log in PostgreSQL."""

    def __init__(self, folder: Path, server: PostgresServer, names: list[str]) -> None:
        self.server = server
        self.chance = random.Random(f"{SEED}-{names}")
        is_small = self.chance.random() < 0.6
        make_schema(server, SCHEMA, is_small=is_small)
        self._brokers = [
            LogBroker(folder / name, server, SCHEMA, ["--member", name], is_small=is_small) for name in names
        ]
        self._ports = {broker: free_port() for broker in self._brokers}
        self.urls = [f"stomp://127.0.0.1:{port}" for port in self._ports.values()]
        self.producer = Producer(self.urls, self.chance)
        self.former: list[Path] = []
        """Data folders that were taken away."""
        self.killed: Counter[str] = Counter()
        self._folder = folder

    @property
    def active(self) -> LogBroker:
        return self._brokers[0]

    @contextmanager
    def running(self, copy: Copy) -> Iterator[None]:
        try:
            self.active.start(self._ports[self.active])
            for heir in self._brokers[1:]:
                heir.begin_start(self._ports[heir])
            self.producer.start()
            self._copy = copy
            copy.start()
            yield
        finally:
            self.producer.is_over = True
            copy.stop()
            for broker in self._brokers:
                broker.clean_up()

    def cycle(self, kill: Kill) -> None:
        """Let producer and query work for some time, kill something, and wait until messages are confirmed again."""
        self.producer.limit += MESSAGES
        time.sleep(self.chance.uniform(0.2, 4))
        # After the kill of a session it recovers for a moment.
        await_server(self.server)
        self.killed[kill.__name__] += 1
        kill(self)
        sent = self.producer.sent
        self._await_that(lambda: self.producer.sent > min(sent, self.producer.limit - 1))

    def start_again(self) -> None:
        """Start the active broker again at its port, which was killed, once PostgreSQL is there."""
        await_server(self.server)
        self._treat_folder(self.active)
        self.active.start(self._ports[self.active])

    def fail_over(self) -> None:
        """Wait until the heir has taken over from the active broker, which was killed, and let that stand by."""
        former, heir = self._brokers
        heir.await_start()
        self._brokers.reverse()
        self._treat_folder(former)
        former.begin_start(self._ports[former])

    def _treat_folder(self, broker: LogBroker) -> None:
        if self.chance.random() < 1 / 3:
            self.former.append(self._folder / f"former-{len(self.former)}")
            broker.data.rename(self.former[-1])

    def finish(self) -> None:
        """Wait until all messages are copied, run the query once more, and check that each copy is there once."""
        self.producer.is_over = True
        self._await_that(lambda: self._waiting("copies") >= self.producer.limit)
        self.producer.join(PATIENCE_S)
        self._copy.restart()
        with blocking.connect(*self.urls) as connection:
            copies = [(int(each.headers["number"]), each.attempts) for each in connection.browse("/queue/copies")]
        assert Counter(copies) == Counter((number, 0) for number in range(self.producer.limit))
        assert self._waiting("orders") == 0
        self.active.stop()
        for heir in self._brokers[1:]:
            # It may stand by, or have taken over.
            heir.await_start()
            heir.stop()
        self.active.check_database()
        for broker in self._brokers:
            done = completed_text("store", "check", broker.data)
            assert done.returncode == 0, done.stdout + done.stderr

    def audit(self) -> None:
        """Audit the history of each folder. One that was made just before its broker was killed may have none yet."""
        folders = [*self.former, *(broker.data for broker in self._brokers)]
        for verdict in run_audit([each for each in folders if any((each / "history").glob("*"))]):
            assert verdict.has_contract_held, verdict

    def _waiting(self, queue: str) -> int:
        facts = self.active.queues().get(queue)
        return facts.waiting if facts else 0

    def _await_that(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert self.producer.error is None, self.producer.error
            self._copy.check()
            assert time.monotonic() < deadline, f"{self.producer.sent} sent, log:\n{self.active.log}"
            time.sleep(0.1)


Kill = Callable[[CopyRun], None]


def kill_broker(run: CopyRun) -> None:
    run.active.kill()
    run.start_again()


def kill_a_session(run: CopyRun) -> None:
    kill_session(run.server, run.chance)
    _kill_broker_in_doubt(run)


def kill_postgresql(run: CopyRun) -> None:
    kill_postmaster(run.server, run.chance)
    _kill_broker_in_doubt(run)


def _kill_broker_in_doubt(run: CopyRun) -> None:
    """In a third of the cases kill the broker, too, which may wait for the answer to an append."""
    if run.chance.random() < 1 / 3:
        time.sleep(run.chance.uniform(0, 0.3))
        run.killed["and the broker"] += 1
        kill_broker(run)


def kill_active(run: CopyRun) -> None:
    run.active.kill()
    run.fail_over()


ONE = (["first"], [kill_broker, kill_a_session, kill_postgresql])
TWO = (["first", "second"], [kill_active])
EACH = pytest.mark.parametrize(("names", "kills"), [ONE, TWO], ids=["one-broker", "failover"])


@pytest.mark.alternates("stories")
@pytest.mark.timeout(600 + 60 * KILLS)
@EACH
def test_messages_are_copied_once_whatever_is_killed(
    names: list[str], kills: list[Kill], spark: SparkSession, tmp_path: Path
) -> None:
    """C27.2, C27.3, C27.7, C27.8, C27.10, C28.6"""
    copy_and_judge(tmp_path, names, kills, PlainCopy)


@pytest.mark.skipif("TRUENEXT_QUERY_KILLS" not in os.environ, reason="takes minutes: make kill-log")
@pytest.mark.timeout(600 + 60 * KILLS)
@EACH
def test_messages_are_copied_once_by_spark_whatever_is_killed(
    names: list[str], kills: list[Kill], spark: SparkSession, tmp_path: Path
) -> None:
    """C27.2, C27.3, C27.7, C27.8, C27.10, C28.6"""
    copy_and_judge(tmp_path, names, kills, lambda urls: SparkCopy(spark, urls, tmp_path / "checkpoint"))


def copy_and_judge(folder: Path, names: list[str], kills: list[Kill], copy_of: Callable[[list[str]], Copy]) -> None:
    print(f"\nTRUENEXT_SEED={SEED} TRUENEXT_QUERY_KILLS={KILLS}", flush=True)
    with own_server(**DURABLE) as server:
        run = CopyRun(folder / "run", server, names)
        copy = copy_of(run.urls)
        with run.running(copy):
            for number in range(KILLS):
                run.cycle(kills[number % len(kills)])
            run.finish()
    found = f"{run.producer.sent} messages in {copy.batches} batches; {len(run.former)} new folders"
    print(f"{dict(run.killed)}; {found}", flush=True)
    run.audit()
