"""Is each row published once, with no attempt, when a query or its broker is in trouble? With a real Spark.

TRUENEXT_KILLS=1 pytest -s tests/spark/sink/test_trouble.py
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.integration.broker_process import BrokerProcess
from tests.integration.log_broker import delete_folder
from tests.spark.queues import queues_with_messages, run_to_end, url, waiting
from tests.spark.sink.held_query import Hold, start_query
from tests.spark.sink.shifted_broker import ShiftedBroker
from tests.spark.source.query_process import QueryProcess, check_each_once
from tests.spark.trouble import PATIENCE_SECONDS, await_that, cluster, fill, send
from truenext import blocking
from truenext.model.disk_level import DiskLevel
from truenext.store.renewal import renew

pytestmark = [
    pytest.mark.skipif(not os.environ.get("TRUENEXT_KILLS"), reason="takes minutes: make spark"),
    pytest.mark.timeout(1200),
]

COMMANDS = {
    "sink": "pyspark.sql.worker.python_streaming_sink_runner",
    "java": "org.apache.spark.deploy.SparkSubmit",
    "all": "",
}
"""Words in the command of the processes that can be stopped."""

NOT_STARTED = "Python worker failed to connect back"
"""Error of Spark for a Python process that needed more than 10 seconds to start."""


def run(spark: SparkSession, broker: BrokerProcess, folder: Path, target: str = "bills") -> None:
    """Run the query of `running` to its end, in the suite's session: it begins sooner there."""
    rows = spark.readStream.format("truenext").options(url=url(broker), queue="orders", maxRowsPerTrigger=1000)
    writer = rows.load().select("body", "headers").writeStream.format("truenext").options(url=url(broker), queue=target)
    writer = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)
    while not has_run(writer.start()):
        pass


def has_run(query: StreamingQuery) -> bool:
    """Await the end of a query; False if Spark has not waited for a Python process."""
    try:
        run_to_end(query)
    except PySparkException as error:
        if NOT_STARTED not in str(error):
            raise
        return False
    return True


def run_files(spark: SparkSession, broker: BrokerProcess, folder: Path, number: int) -> None:
    """Run a query from files to the queue `lines` to its end, after adding a file with this number."""
    (folder / "lines").mkdir(exist_ok=True)
    (folder / "lines" / f"{number}.txt").write_text(f"{number}\n")
    lines = spark.readStream.text(str(folder / "lines")).selectExpr("value AS body", "map('number', value) AS headers")
    writer = lines.writeStream.format("truenext").options(url=url(broker), queue="lines")
    writer = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)
    while not has_run(writer.start()):
        pass


def running(broker: BrokerProcess, folder: Path, point: str, batch: int) -> QueryProcess:
    """Start the query in a process of its own, to be held."""
    return QueryProcess(folder, "held_query", point, str(batch), url(broker), str(folder), package="tests.spark.sink")


def await_held(folder: Path, query: QueryProcess) -> None:
    await_that((folder / "held").exists, query)


@contextmanager
def held(
    spark: SparkSession, broker: BrokerProcess, folder: Path, point: str, batch: int = 0, **options: Any
) -> Iterator[StreamingQuery]:
    """Start the query in the suite's session, and yield it when it is held."""
    query = start_query(spark, Hold(point, batch, str(folder)), url(broker), **options)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (folder / "held").exists():
            if NOT_STARTED in str(query.exception()):
                query = start_query(spark, Hold(point, batch, str(folder)), url(broker), **options)
            assert query.isActive, query.exception()
            assert time.monotonic() < deadline, query.status
            time.sleep(0.05)
        yield query
    finally:
        query.stop()


def kill_held_driver(folder: Path, query: StreamingQuery) -> None:
    """Kill the driver's process that commits."""
    os.kill(int((folder / "held").read_text()), signal.SIGKILL)
    with pytest.raises(PySparkException):
        run_to_end(query)


def go_on(folder: Path) -> None:
    (folder / "go").touch()


def check_published_once(broker: BrokerProcess, count: int, *queues: str) -> None:
    """Assert that rows numbered from 0 are all in each of these queues, once, and without an attempt."""
    for queue in queues or ("bills",):
        with blocking.connect(url(broker)) as connection:
            rows = [
                {"attempts": message.attempts, "headers": {"number": message.headers["number"]}}
                for message in connection.browse(f"/queue/{queue}")
            ]
        check_each_once(rows, count)


def errors_in(log: str) -> list[str]:
    return sorted({line[:300] for line in log.splitlines() if line.startswith("truenext.") or "CONCURRENT" in line})


# ---- A driver that was stopped ----


@pytest.mark.parametrize(
    ("point", "batch", "stopped"),
    [
        ("decide", 0, "sink"),
        ("decide", 1, "sink"),
        ("publish", 1, "sink"),
        ("decide", 1, "java"),
        ("publish", 0, "all"),
    ],
)
def test_driver_that_is_replaced_while_it_is_stopped_publishes_nothing_twice(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path, point: str, batch: int, stopped: str
) -> None:
    send(broker, range(3000), 3000)
    with running(broker, tmp_path, point, batch) as old:
        await_held(tmp_path, old)
        processes = old.processes(COMMANDS[stopped])
        assert processes
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        go_on(tmp_path)
        begun = time.monotonic()
        run(spark, broker, tmp_path)
        print(f"the new run takes {time.monotonic() - begun:.1f} s")
        check_published_once(broker, 3000)
        for process in processes:
            os.kill(process, signal.SIGCONT)
        assert old.wait() != 0, old.log
        print("the old run ends:", *errors_in(old.log), sep="\n")
    run(spark, broker, tmp_path)
    check_published_once(broker, 3000)
    assert waiting(broker, "orders") == 0


# ---- The broker has no room ----

LIMIT_BYTES = 96 << 20


@contextmanager
def held_broker(folder: Path) -> Iterator[BrokerProcess]:
    """Run a broker whose disk the test fills and frees."""
    broker = BrokerProcess(folder, can_hold_disk=True)
    broker.start()
    try:
        yield broker
        broker.stop()
    finally:
        broker.clean_up()


def set_limit(folder: Path, limit: int) -> None:
    """Set the disk limit of a held broker from its next start on; `truenext serve` allows 1 GiB at least."""
    (folder / "limit").write_text(str(limit))


ROOM_CASES = pytest.mark.parametrize(
    ("point", "target", "size"),
    [
        ("draft", "bills", 3000),
        # Each further copy needs room when it is published.
        ("decide", "bills,copies", 500),
    ],
)


@ROOM_CASES
def test_query_that_finds_no_room_waits_and_publishes_each_row_once(
    spark: SparkSession, tmp_path: Path, point: str, target: str, size: int
) -> None:
    with held_broker(tmp_path) as broker:
        send(broker, range(2000), size)
        with held(spark, broker, tmp_path, point, target=target) as query:
            broker.set_disk_level(DiskLevel.NONE)
            go_on(tmp_path)
            time.sleep(10.0)
            assert query.isActive, query.exception()
            assert waiting(broker, target.split(",")[0]) == 0
            broker.set_disk_level(DiskLevel.PLENTY)
            run_to_end(query)
        check_published_once(broker, 2000, *target.split(","))


@ROOM_CASES
def test_query_that_finds_no_room_until_patience_ends_fails_by_name_and_goes_on_with_a_higher_limit(
    spark: SparkSession, tmp_path: Path, point: str, target: str, size: int
) -> None:
    set_limit(tmp_path, LIMIT_BYTES)
    with held_broker(tmp_path) as broker:
        send(broker, range(2000), size)
        with held(spark, broker, tmp_path, point, target=target, patience_s=3) as query:
            fill(broker, "others", 100_000)
            go_on(tmp_path)
            with pytest.raises(PySparkException, match=r"(?s)as full as it may be.*has tried for 3 s \(option p"):
                run_to_end(query)
        assert waiting(broker, target.split(",")[0]) == 0
        broker.stop()
        set_limit(tmp_path, 4 * LIMIT_BYTES)
        broker.start(broker.port)
        run(spark, broker, tmp_path, target)
        check_published_once(broker, 2000, *target.split(","))


@pytest.mark.parametrize(
    ("count", "size"), [(1000, 0), (4, 3_000_000)], ids=["empty bodies", "rows larger than a bundle"]
)
def test_batch_whose_drafts_are_in_a_full_broker_is_published_without_further_room(
    spark: SparkSession, tmp_path: Path, count: int, size: int
) -> None:
    with held_broker(tmp_path) as broker:
        send(broker, range(count), size)
        with held(spark, broker, tmp_path, "decide") as query:
            broker.set_disk_level(DiskLevel.NONE)
            go_on(tmp_path)
            run_to_end(query)
        assert broker.status()["disk_level"] == "none"
        check_published_once(broker, count)


# ---- The broker was restored from an older copy ----


def copy_data(broker: BrokerProcess, copy: Path) -> None:
    broker.stop()
    shutil.copytree(broker.data, copy)
    broker.start(broker.port)


def restore_data(broker: BrokerProcess, copy: Path, *, is_renewed: bool = False) -> None:
    """Go on with the copy. With `is_renewed` its folder gets a new identity, as by `truenext restore`."""
    broker.stop()
    delete_folder(broker.data)
    copy.rename(broker.data)
    if is_renewed:
        renew(broker.data)
    broker.start(broker.port)


def abandon_source(broker: BrokerProcess) -> str:
    """Abandon the only query that reads, and return what the command says."""
    names = [name.split(".") for name in queues_with_messages(broker) if name.startswith("Spark.source.")]
    (source,) = {words[3] for words in names}
    return broker.output_of("spark", "abandon", source)


def numbers_in(broker: BrokerProcess, queue: str) -> list[int]:
    with blocking.connect(url(broker)) as connection:
        return [int(message.headers["number"]) for message in connection.browse(f"/queue/{queue}")]


def test_query_whose_broker_has_lost_one_batch_since_its_copy_publishes_that_again(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    send(broker, range(1000), 10)
    run(spark, broker, tmp_path)
    send(broker, range(1000, 2000), 10)
    copy_data(broker, tmp_path / "copy")
    run(spark, broker, tmp_path)
    restore_data(broker, tmp_path / "copy")
    assert len(numbers_in(broker, "bills")) == 1000
    run(spark, broker, tmp_path)
    check_published_once(broker, 2000)


def test_query_whose_broker_has_lost_two_batches_since_its_copy_fails_by_name(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    send(broker, range(1000), 10)
    run(spark, broker, tmp_path)
    send(broker, range(1000, 3000), 10)
    copy_data(broker, tmp_path / "copy")
    run(spark, broker, tmp_path)
    restore_data(broker, tmp_path / "copy")
    with pytest.raises(PySparkException, match="the broker restored from an older copy"):
        run(spark, broker, tmp_path)
    check_published_once(broker, 1000)
    assert waiting(broker, "orders") == 2000
    abandon_source(broker)
    shutil.rmtree(tmp_path / "checkpoint")
    run(spark, broker, tmp_path)
    check_published_once(broker, 3000)


def test_query_fails_by_name_at_a_restored_broker_and_each_message_has_its_effect_once_after_abandon(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    send(broker, range(1000), 10)
    run(spark, broker, tmp_path)
    send(broker, range(1000, 2000), 10)
    copy_data(broker, tmp_path / "copy")
    run(spark, broker, tmp_path)
    restore_data(broker, tmp_path / "copy", is_renewed=True)
    with pytest.raises(PySparkException, match="the checkpoint was made with a broker whose data has the name"):
        run(spark, broker, tmp_path)
    check_published_once(broker, 1000)
    abandon_source(broker)
    shutil.rmtree(tmp_path / "checkpoint")
    run(spark, broker, tmp_path)
    check_published_once(broker, 2000)


@pytest.mark.parametrize("is_abandoned", [True, False])
def test_batch_that_was_under_way_when_the_broker_was_copied_is_published_only_after_abandon(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path, is_abandoned: bool
) -> None:
    send(broker, range(2000), 10)
    with held(spark, broker, tmp_path, "decide", 1) as query:
        kill_held_driver(tmp_path, query)
    copy_data(broker, tmp_path / "copy")
    run(spark, broker, tmp_path)
    check_published_once(broker, 2000)
    restore_data(broker, tmp_path / "copy")
    if is_abandoned:
        assert "1,000 rows returned, 0 dropped" in abandon_source(broker)
        shutil.rmtree(tmp_path / "checkpoint")
    run(spark, broker, tmp_path)
    # The checkpoint says that the second batch is done. So its rows are cleared, as docs/spark.md says.
    check_published_once(broker, 2000 if is_abandoned else 1000)


def test_query_that_reads_files_leaves_out_the_batches_that_its_restored_broker_has_lost(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    for batch in range(4):
        run_files(spark, broker, tmp_path, batch)
        if batch == 0:
            copy_data(broker, tmp_path / "copy")
        if batch == 2:
            restore_data(broker, tmp_path / "copy")
    assert numbers_in(broker, "lines") == [0, 3]


def test_query_that_reads_files_fails_by_name_at_a_restored_broker(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    run_files(spark, broker, tmp_path, 0)
    copy_data(broker, tmp_path / "copy")
    run_files(spark, broker, tmp_path, 1)
    restore_data(broker, tmp_path / "copy", is_renewed=True)
    with pytest.raises(PySparkException, match="the last decision of this query was made at a broker whose data has"):
        run_files(spark, broker, tmp_path, 2)
    assert numbers_in(broker, "lines") == [0]


# ---- The broker has forgotten the numbers of producers ----

DAY_S = 24 * 3600


def known_producers(broker: BrokerProcess) -> set[bool]:
    """Return whether the broker knows the producers of sinks."""
    found = set()
    with blocking.connect(url(broker)) as connection:
        for name in queues_with_messages(broker):
            words = name.split(".")
            if words[:2] == ["Spark", "sink"]:
                arguments = {"producer": f"spark/{words[2]}/{words[3]}"}
                found.add(json.loads(connection.control_request("producer", arguments))["known"])
    return found


@contextmanager
def shifted_broker(folder: Path) -> Iterator[ShiftedBroker]:
    broker = ShiftedBroker(folder)
    broker.start()
    try:
        yield broker
        broker.stop()
    finally:
        broker.clean_up()


def pass_eight_days(broker: ShiftedBroker) -> None:
    assert known_producers(broker) == {True}
    broker.stop()
    broker.ahead_s += 8 * DAY_S
    broker.start(broker.port)
    assert known_producers(broker) == {False}


@pytest.mark.parametrize("batch", [0, 1])
def test_decision_that_was_not_published_for_eight_days_is_published_once(
    spark: SparkSession, tmp_path: Path, batch: int
) -> None:
    with shifted_broker(tmp_path) as broker:
        send(broker, range(2000), 3000)
        with held(spark, broker, tmp_path, "publish", batch) as query:
            kill_held_driver(tmp_path, query)
        assert 1000 * batch < waiting(broker, "bills") < 1000 * (batch + 1)
        pass_eight_days(broker)
        run(spark, broker, tmp_path)
        check_published_once(broker, 2000)


@pytest.mark.parametrize("batches", [1, 2])
def test_batch_that_is_repeated_after_eight_days_is_not_published_again(
    spark: SparkSession, tmp_path: Path, batches: int
) -> None:
    with shifted_broker(tmp_path) as broker:
        for batch in range(batches):
            run_files(spark, broker, tmp_path, batch)
        # As if the driver had been killed before it noted the last batch.
        for each in (tmp_path / "checkpoint" / "commits").glob(f"*{batches - 1}*"):
            each.unlink()
        pass_eight_days(broker)
        run_files(spark, broker, tmp_path, batches)
        assert numbers_in(broker, "lines") == [*range(batches + 1)]


# ---- Two attempts of one task ----


def test_two_speculative_attempts_of_one_task_publish_each_row_once(broker: BrokerProcess, tmp_path: Path) -> None:
    send(broker, range(4000), 3000)
    with cluster(tmp_path) as master:
        arguments = ("hanging-first", url(broker), str(tmp_path), master, "bills")
        with QueryProcess(tmp_path, "troubled_query", *arguments) as query:
            assert query.wait() == 0, query.log
    assert {"0-0-0", "0-0-1"} <= {file.name for file in (tmp_path / "attempts").iterdir()}
    check_published_once(broker, 4000)


# ---- The checkpoint is lost ----


@pytest.mark.parametrize("point", ["draft", "decide", "publish"])
def test_query_that_is_killed_and_loses_its_checkpoint_has_each_effect_once_after_abandon(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path, point: str
) -> None:
    send(broker, range(3000), 3000)
    with running(broker, tmp_path, point, 1) as query:
        await_held(tmp_path, query)
        query.send_signal(signal.SIGKILL)
    shutil.rmtree(tmp_path / "checkpoint")
    said = abandon_source(broker)
    returned, dropped = (1000, 0) if point != "publish" else (0, 1000)
    assert f"closed; {returned:,} rows returned, {dropped:,} dropped" in said
    run(spark, broker, tmp_path)
    check_published_once(broker, 3000)
