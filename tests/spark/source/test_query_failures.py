"""Tests of queries and brokers in trouble, with a real Spark: each row is in the sink once, without an attempt.

TRUENEXT_KILLS=1 pytest -s tests/spark/source/test_query_failures.py
"""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from tests.integration.broker_process import BrokerProcess
from tests.spark.queues import run_to_end, url, waiting
from tests.spark.source.query_process import QueryProcess, check_each_once, written_rows
from tests.spark.trouble import await_that, bundle_queues, cluster, fill, send

pytestmark = [
    pytest.mark.skipif(not os.environ.get("TRUENEXT_KILLS"), reason="takes minutes: make spark"),
    pytest.mark.timeout(600),
]


def running(trouble: str, broker: BrokerProcess, folder: Path, master: str) -> QueryProcess:
    return QueryProcess(folder, "troubled_query", trouble, url(broker), str(folder), master)


def test_a_task_that_fails_twice_reads_the_same_rows_in_its_third_attempt(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    send(broker, range(4000), 3000)
    with running("failing-twice", broker, tmp_path, "local[2,3]") as query:
        assert query.wait() == 0, query.log
    assert attempts(tmp_path) == {"0-0-0", "0-0-1", "0-0-2", "0-1-0", "0-1-1", "0-1-2"}
    check_each_once(written_rows(tmp_path / "rows"), 4000)


def test_two_speculative_attempts_of_one_task_give_each_row_once(broker: BrokerProcess, tmp_path: Path) -> None:
    send(broker, range(8000), 3000)
    with cluster(tmp_path) as master, running("hanging-first", broker, tmp_path, master) as query:
        assert query.wait() == 0, query.log
    assert {"0-0-0", "0-0-1"} <= attempts(tmp_path)
    check_each_once(written_rows(tmp_path / "rows"), 8000)


def test_a_driver_that_was_stopped_does_no_harm_when_it_goes_on_behind_a_second_run(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    send(broker, range(8000), 3000)
    with running("slow", broker, tmp_path, "local[2]") as old:
        await_that(lambda: len(attempts(tmp_path)) > 2, old)
        time.sleep(1.0)
        old.send_signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        with running("slow", broker, tmp_path, "local[2]") as new:
            assert new.wait() == 0, new.log
        # Longer than the broker waits for heart-beats.
        time.sleep(max(0.0, 30.0 - (time.monotonic() - stopped_at)))
        old.send_signal(signal.SIGCONT)
        status = old.wait()
        print(
            f"the old run ends with {status}:", *(line for line in old.log.splitlines() if "rror: " in line), sep="\n"
        )
    with running("slow", broker, tmp_path, "local[2]") as last:
        assert last.wait() == 0, last.log
    check_each_once(written_rows(tmp_path / "rows"), 8000)
    assert waiting(broker, "orders") == 0
    assert bundle_queues(broker) == []


def attempts(folder: Path) -> set[str]:
    """Return batch, partition and number of each attempt that has got rows."""
    return {file.name for file in (folder / "attempts").glob("*")}


# ---- The broker has no room ----


@pytest.mark.parametrize("size", [100_000, 10])
def test_a_queue_that_fills_the_disk_limit_is_read_to_its_end(size: int, tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, ["--disk-limit", "1GiB"])
    _read_full_queue(broker, size, tmp_path)


def test_a_queue_that_fills_the_disk_is_read_to_its_end(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path)
    broker.data.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(broker.data)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"needs a disk of 1 GiB, and may not mount one: {mounted.stderr.strip()}")
    try:
        _read_full_queue(broker, 100_000, tmp_path)
    finally:
        subprocess.run(["umount", "--lazy", str(broker.data)], check=True)


def _read_full_queue(broker: BrokerProcess, size: int, folder: Path) -> None:
    broker.start()
    try:
        if size < 1000:
            # Few of them: messages of another queue, which stay, take the room.
            count = 20_000
            send(broker, range(count), size)
            fill(broker, "others", 100_000)
        else:
            count = fill(broker, "orders", size)
        print(f"{count} rows of {size} bytes")
        with QueryProcess(folder, "query", url(broker), "orders", str(folder)) as query:
            assert query.wait() == 0, query.log
        assert broker.queues()["orders"].waiting == 0
        check_each_once(written_rows(folder / "rows"), count)
        broker.stop()
    finally:
        broker.clean_up()


# ---- The checkpoint ----


def test_a_checkpoint_that_is_deleted_leaves_rows_that_abandon_returns(broker: BrokerProcess, tmp_path: Path) -> None:
    send(broker, range(3000), 3000)
    with running("slow", broker, tmp_path, "local[2]") as first:
        await_that(lambda: bundle_queues(broker), first)
    shutil.rmtree(tmp_path / "checkpoint")
    with QueryProcess(tmp_path, "query", url(broker), "orders", str(tmp_path)) as second:
        assert second.wait() == 0, second.log
        assert "another query still has rows of this queue" in second.log
    (abandoned,) = {name.split(".")[3] for name in bundle_queues(broker)}
    assert re.search(r"closed; [1-9][\d,]* rows returned, 0 dropped", broker.output_of("spark", "abandon", abandoned))
    with QueryProcess(tmp_path, "query", url(broker), "orders", str(tmp_path)) as third:
        assert third.wait() == 0, third.log
    check_each_once(written_rows(tmp_path / "rows"), 3000)


def test_a_checkpoint_that_is_older_fails_by_name(broker: BrokerProcess, tmp_path: Path) -> None:
    copy = tmp_path / "older"
    for round_ in range(2):
        send(broker, range(3000 * round_, 3000 * (round_ + 1)), 10)
        with QueryProcess(tmp_path, "query", url(broker), "orders", str(tmp_path)) as query:
            assert query.wait() == 0, query.log
        if round_ == 0:
            shutil.copytree(tmp_path / "checkpoint", copy)
    shutil.rmtree(tmp_path / "checkpoint")
    copy.rename(tmp_path / "checkpoint")
    with QueryProcess(tmp_path, "query", url(broker), "orders", str(tmp_path)) as restored:
        assert restored.wait() != 0
        assert "the checkpoint is older than the query's progress" in restored.log
    check_each_once(written_rows(tmp_path / "rows"), 6000)


# ---- foreachBatch that looks at a part of its batch ----


def test_foreach_batch_that_takes_one_row_first_writes_each_row_once(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    send(broker, range(1000), 10_000)

    def process(batch: DataFrame, number: int) -> None:
        assert len(batch.take(1)) == 1
        batch.write.parquet(str(tmp_path / "rows" / str(number)))

    run_to_end(
        stream(spark, broker, 400, 2)
        .foreachBatch(process)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    check_each_once(pq.read_table(tmp_path / "rows").to_pylist(), 1000)


def test_foreach_batch_that_takes_one_row_only_ends_its_batch_and_loses_what_tasks_have_read(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    send(broker, range(100), 10)
    seen: list[int] = []

    def process(batch: DataFrame, _number: int) -> None:
        seen.extend(row["sequence"] for row in batch.take(1))

    run_to_end(
        stream(spark, broker, 20, 2)
        .foreachBatch(process)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    # One of two tasks reads its half of each batch, and gives one row of that. What no task has read stays.
    assert len(set(seen)) == 5
    assert waiting(broker, "orders") == 50
    assert bundle_queues(broker) == []


def stream(spark: SparkSession, broker: BrokerProcess, rows: int, partitions: int) -> DataStreamWriter:
    reader = spark.readStream.format("truenext").option("url", url(broker)).option("queue", "orders")
    frame = reader.option("maxRowsPerTrigger", rows).option("partitions", partitions).load()
    return frame.writeStream.trigger(availableNow=True)
