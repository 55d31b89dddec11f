"""Tests of plans and checkpoints that read a queue in unusual ways, in a real Spark: each message has its effect once,
or the query is refused by name."""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from tests.integration.broker_process import BrokerProcess
from tests.spark.queues import QUERY_SECONDS, queues_with_messages, run_to_end, url
from tests.spark.queues import send as send_to
from tests.spark.source.small_query import bodies_in, connect, send
from truenext.spark.admin import abandon, find_source
from truenext.spark.source.admin import list_queries
from truenext.testing import BlockingBroker


def read(spark: SparkSession, url: str, **options: object) -> DataFrame:
    given = {"url": url, "queue": "orders", "body": "string", "headers": "false", "partitions": "1", **options}
    return spark.readStream.format("truenext").options(**{name: str(value) for name, value in given.items()}).load()


def write_to_memory(frame: DataFrame, name: str, folder: Path, *, now: bool = True) -> StreamingQuery:
    writer = frame.writeStream.format("memory").queryName(name).option("checkpointLocation", str(folder / "checkpoint"))
    return (writer.trigger(availableNow=True) if now else writer).start()


def await_that(holds: Callable[[], object], query: StreamingQuery) -> None:
    deadline = time.monotonic() + QUERY_SECONDS
    while not holds():
        assert query.isActive, query.exception()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def bodies_of(spark: SparkSession, table: str) -> list[str]:
    return sorted(row["body"] for row in spark.table(table).select("body").collect())


@pytest.mark.alternates("plans that read twice")
def test_stream_in_union_with_itself_has_each_row_twice_and_reads_it_once(
    spark: SparkSession, here: BlockingBroker, tmp_path: Path
) -> None:
    send(here, *"abcde")
    rows = read(spark, here.url, partitions=2)
    run_to_end(write_to_memory(rows.union(rows), "in_union", tmp_path))
    assert bodies_of(spark, "in_union") == sorted("abcde" * 2)
    assert bodies_in(here) == []


@pytest.mark.alternates("plans that read twice")
def test_join_of_a_stream_with_itself_is_refused_before_its_output_and_abandon_returns_the_rows(
    spark: SparkSession, here: BlockingBroker, tmp_path: Path
) -> None:
    """Spark plans two sources, and each message would be in one of them only."""
    send(here, *"abcde")
    rows = read(spark, here.url)
    joined = rows.join(rows.select("sequence", F.col("body").alias("other")), "sequence")
    output = tmp_path / "rows"
    writer = joined.writeStream.format("json").option("checkpointLocation", str(tmp_path / "checkpoint"))
    with pytest.raises(PySparkException, match=r"the query reads orders with two sources, \w{16} and \w{16}, "):
        run_to_end(writer.trigger(availableNow=True).start(str(output)))
    assert list(output.glob("*.json")) == []
    with connect(here) as broker:
        sources = list_queries(broker)
        assert [each.source for each in sources] == ["orders", "orders"]
        for each in sources:
            list(abandon(broker, find_source(broker, each.id)))
    assert sorted(bodies_in(here)) == list("abcde")


@pytest.mark.alternates("plans")
def test_plans_that_drop_rows_take_their_messages(spark: SparkSession, here: BlockingBroker, tmp_path: Path) -> None:
    """The query has read the rows that its plan drops, as with any source."""
    send(here, *"abcde")
    run_to_end(write_to_memory(read(spark, here.url).where("1 = 0"), "never", tmp_path / "never"))
    assert (bodies_of(spark, "never"), bodies_in(here)) == ([], [])
    send(here, *"abcde")
    first = read(spark, here.url, maxRowsPerTrigger=2).limit(3)
    run_to_end(write_to_memory(first, "first_three", tmp_path / "first"))
    assert (bodies_of(spark, "first_three"), bodies_in(here)) == (list("abc"), [])


@pytest.mark.alternates("plans")
def test_query_that_is_stopped_while_the_broker_is_away_stops_at_once_and_reads_each_row_once_later(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    send_to(broker, range(10))
    rows = read(spark, url(broker), headers="true")

    def start(*, now: bool) -> StreamingQuery:
        writer = rows.writeStream.format("parquet").option("path", str(tmp_path / "rows"))
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        return (writer.trigger(availableNow=True) if now else writer).start()

    query = start(now=False)
    await_that(lambda: query.lastProgress is not None, query)
    broker.kill()
    query.stop()
    assert not query.isActive
    assert query.exception() is None
    broker.start(broker.port)
    send_to(broker, range(10, 20))
    run_to_end(start(now=True))
    found = [int(row["headers"]["number"]) for row in spark.read.parquet(str(tmp_path / "rows")).collect()]
    assert Counter(found) == Counter(range(20))
    # The mark.
    assert [name.count(".") for name in queues_with_messages(broker)] == [3]


@pytest.mark.alternates("plans that read twice")
def test_second_query_on_a_checkpoint_ends_the_first_and_continues_it(
    spark: SparkSession, here: BlockingBroker, tmp_path: Path
) -> None:
    """In one application. Two applications are in test_query_failures.py."""
    send(here, *"abc")
    folder = tmp_path / "checkpoint"
    seen: list[str] = []

    def note(batch: DataFrame, _number: int) -> None:
        seen.extend(row["body"] for row in batch.collect())

    def start() -> StreamingQuery:
        return read(spark, here.url).writeStream.foreachBatch(note).option("checkpointLocation", str(folder)).start()

    first = start()
    try:
        await_that(lambda: len(seen) == 3 and first.lastProgress is not None, first)
        second = start()
        assert (first.isActive, second.id == first.id) == (False, True)
        send(here, *"de")
        await_that(lambda: len(seen) >= 5, second)
    finally:
        for query in spark.streams.active:
            query.stop()
    assert sorted(seen) == list("abcde")


@pytest.mark.alternates("plans")
def test_groups_of_a_batch_are_together_and_in_order_after_a_repartition(
    spark: SparkSession, here: BlockingBroker, tmp_path: Path
) -> None:
    """The repartition is that of docs/spark.md. Before it, groups span partitions."""
    for number in range(60):
        send(here, str(number), headers={"JMSXGroupID": "abc"[number % 3]} if number % 4 else {})
    partitions: list[dict[str, set[int]]] = []
    found: list[tuple[str, int]] = []

    def process(batch: DataFrame, _number: int) -> None:
        key = F.coalesce("group", F.col("sequence").cast("string"))
        ordered = batch.repartition(2, "queue", key).sortWithinPartitions(F.desc("priority"), "sequence")
        for frame in (batch, ordered):
            places: dict[str, set[int]] = {}
            with_partition = frame.withColumn("partition", F.spark_partition_id())
            for row in with_partition.where("group IS NOT NULL").collect():
                places.setdefault(row["group"], set()).add(row["partition"])
            partitions.append(places)
        found.extend((row["group"], row["sequence"]) for row in ordered.where("group IS NOT NULL").collect())

    rows = read(spark, here.url, maxRowsPerTrigger=30, partitions=3)
    writer = rows.writeStream.foreachBatch(process).option("checkpointLocation", str(tmp_path / "checkpoint"))
    run_to_end(writer.trigger(availableNow=True).start())
    assert max(len(each) for places in partitions[::2] for each in places.values()) > 1
    assert {len(each) for places in partitions[1::2] for each in places.values()} == {1}
    assert len(found) == 45
    for group in "abc":
        own = [sequence for of, sequence in found if of == group]
        assert own == sorted(own)


@pytest.mark.alternates("plans")
def test_sql_reads_and_writes_queues_by_temporary_views_and_a_table_is_refused(
    spark: SparkSession, here: BlockingBroker, tmp_path: Path
) -> None:
    send(here, *"ab")
    orders = f"OPTIONS (url '{here.url}', queue 'orders', body 'string')"
    with pytest.raises(PySparkException, match=r"CREATE TABLE cannot use truenext: .* Use CREATE TEMPORARY VIEW"):
        spark.sql(f"CREATE TABLE orders USING truenext {orders}")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW orders USING truenext {orders}")
    assert [row["body"] for row in spark.sql("SELECT body FROM orders").collect()] == ["a", "b"]
    columns = "body STRING, priority INT"
    bills = f"OPTIONS (url '{here.url}', queue 'bills')"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW bills ({columns}) USING truenext {bills}")
    spark.sql("INSERT INTO bills SELECT upper(body), 7 FROM orders")
    assert sorted(bodies_in(here, "bills")) == ["A", "B"]
    read(spark, here.url).createOrReplaceTempView("arriving")
    run_to_end(write_to_memory(spark.sql("SELECT upper(body) AS body FROM arriving"), "by_sql", tmp_path))
    assert (bodies_of(spark, "by_sql"), bodies_in(here)) == (["A", "B"], [])


def test_query_of_several_queues_reads_each_message_once_and_reports_what_waits(
    spark: SparkSession, here: BlockingBroker, tmp_path: Path
) -> None:
    send(here, *"abc")
    send(here, *"de", queue="returns.eu")
    rows = read(spark, here.url, queue="orders,returns.>", minRowsPerTrigger=2, maxTriggerDelay="1h")
    query = write_to_memory(rows, "several", tmp_path, now=False)
    try:
        await_that(lambda: query.lastProgress is not None, query)
        report = query.recentProgress[0]["sources"][0]["latestOffset"]
        send(here, "f")
        send(here, "g", queue="returns.us")
        await_that(lambda: len(bodies_of(spark, "several")) >= 7, query)
        assert bodies_of(spark, "several") == list("abcdefg")
    finally:
        query.stop()
    assert '"waiting": 5' in str(report)
    assert '"waitedMs": ' in str(report)
