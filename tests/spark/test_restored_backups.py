"""Test of backups under a query from queue to queue, and of what the query meets at a broker that was restored.

A query of Spark runs in processes of its own. Backups are made at random moments; at some of them the broker is killed,
and the query goes on. Each backup is restored, beside the original, and has the state of its batch. There the query
fails by name, and takes nothing. Once it is abandoned, a query with a new checkpoint completes the work: each message
is in the second queue, once.

    TRUENEXT_QUERY_BACKUPS=20 TRUENEXT_SEED=7 pytest -s tests/spark/test_restored_backups.py

Source of what is expected: docs/spark.md, "Write to queues"; docs/contract.md, C29.2, C29.15, C29.16
"""

import os
import random
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.integration.backup_broker import BackupBroker
from tests.integration.broker_process import BrokerProcess
from tests.integration.restored_backups import restore_and_check
from tests.integration.tapped_broker import read_frames
from tests.spark.queues import QUERY_SECONDS, queues_with_messages, run_to_end, send, url
from tests.spark.source.query_process import QueryProcess
from truenext import blocking
from truenext.model.url import parse_url
from truenext.spark.audit.command import run_audit
from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.sink.admin import list_sinks
from truenext.spark.source.admin import list_queries

COUNT = int(os.environ.get("TRUENEXT_QUERY_BACKUPS", "2"))
PER_QUERY = 4
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)
MESSAGES = 3000
"""Number of messages: two batches of the query."""
RUN_SECONDS = 8.0
"""Approximate time from the first batch to the end, on two cores."""


@pytest.mark.alternates("stories")
@pytest.mark.timeout(300 + 200 * COUNT)
def test_query_is_completed_once_at_a_broker_that_was_restored_from_any_backup(
    spark: SparkSession, tmp_path: Path
) -> None:
    print(f"\nseed {SEED}, {COUNT} backups")
    chance = random.Random(SEED)
    outcomes: Counter[str] = Counter()
    for first in range(0, COUNT, PER_QUERY):
        folder = tmp_path / str(first)
        folder.mkdir()
        broker = BackupBroker(folder)
        try:
            broker.start()
            _make_backups(broker, chance, min(PER_QUERY, COUNT - first), outcomes)
            frames = read_frames(broker.tap)
            restored = []
            for backup in sorted(broker.backups.iterdir()):
                new = folder / f"new-{backup.name}"
                new.mkdir()
                if restore_and_check(backup, new / "data", frames) is None:
                    outcomes["refused"] += 1
                    continue
                shutil.copytree(folder / "checkpoint", new / "checkpoint")
                with BrokerProcess(new).running() as other:
                    outcomes["whole"] += 1
                    _judge_restored(spark, other, new, chance, outcomes)
                restored.append(new / "data")
            if COUNT > PER_QUERY:
                _audit_all(broker, restored)
        finally:
            broker.clean_up()
        print(f"{first + PER_QUERY} backups: {dict(outcomes)}", flush=True)
    assert outcomes["whole"] >= COUNT / 3


def _audit_all(broker: BackupBroker, restored: list[Path]) -> None:
    """Audit the original, which still runs, and the restored brokers in one job."""
    verdicts = run_audit([broker.data, *restored])
    assert len(verdicts) == 1 + len(restored)
    assert all(verdict.has_contract_held for verdict in verdicts), verdicts


def _make_backups(broker: BackupBroker, chance: random.Random, count: int, outcomes: Counter[str]) -> None:
    """Make backups while a query works, which completes its work at the original."""
    send(broker, range(MESSAGES))
    moments = sorted(chance.uniform(0, RUN_SECONDS) for _ in range(count))
    folder = broker.data.parent
    with QueryProcess(folder, "query", url(broker), "orders", str(folder), "local[2]", "bills") as query:
        while broker.queues()["orders"].waiting == MESSAGES:
            assert query.is_running, query.log
            time.sleep(0.05)
        began = time.monotonic()
        for number, moment in enumerate(moments):
            while query.is_running and time.monotonic() < began + moment:
                time.sleep(0.01)
            outcomes["while the query ran"] += query.is_running
            if number and chance.random() < 0.25:
                assert broker.request_backup(rate=1 << 20)["state"] == "running"
                time.sleep(chance.random() / 2)
                broker.kill()
                broker.start(broker.port)
            else:
                done = broker.truenext("backup", "--rate", "64MiB")
                assert done.returncode == 0, done.stderr
        assert query.wait() == 0, query.log
    assert _numbers_in(broker, "bills") == Counter(range(MESSAGES))


def _judge_restored(
    spark: SparkSession, other: BrokerProcess, folder: Path, chance: random.Random, outcomes: Counter[str]
) -> None:
    before = _counts(other)
    with pytest.raises(PySparkException, match=r"made (with|at) a broker whose data has the name"):
        run_to_end(_start_query(spark, other, folder / "checkpoint"))
    assert _counts(other) == before, "nothing is taken"
    with BrokerConnection([parse_url(url(other))]) as connection:
        ids = [each.id for each in list_queries(connection)] + [each.queues.id for each in list_sinks(connection)]
    chance.shuffle(ids)
    for each in ids:
        done = other.output_of("spark", "abandon", each)
        outcomes["rows returned"] += "; 0 rows returned" not in done
        outcomes["rows dropped"] += ", 0 dropped" not in done and "dropped" in done
    run_to_end(_start_query(spark, other, folder / "new-checkpoint"))
    assert _numbers_in(other, "bills") == Counter(range(MESSAGES))
    kept = {name.rpartition(".")[0] for name in queues_with_messages(other)}
    assert kept <= {"", "Spark.source.main", "Spark.sink.main"}


def _counts(broker: BrokerProcess) -> dict[str, int]:
    """Return the number of messages of each queue that has any."""
    counts = {name: each.waiting + each.unacknowledged for name, each in broker.queues().items()}
    return {name: count for name, count in counts.items() if count}


def _start_query(spark: SparkSession, broker: BrokerProcess, checkpoint: Path) -> StreamingQuery:
    rows = spark.readStream.format("truenext").options(url=url(broker), queue="orders", patience=QUERY_SECONDS).load()
    writer = rows.select("body", "headers").writeStream.format("truenext").options(url=url(broker), queue="bills")
    return writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()


def _numbers_in(broker: BrokerProcess, queue: str) -> Counter[int]:
    with blocking.connect(url(broker)) as connection:
        return Counter(int(message.headers["number"]) for message in connection.browse(f"/queue/{queue}"))
