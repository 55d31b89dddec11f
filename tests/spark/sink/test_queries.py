"""Tests of queries of Spark that write queues, after docs/spark.md: short ones, in the suite's session, with a real
broker."""

from collections import Counter
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from tests.integration.broker_process import BrokerProcess
from tests.spark.queues import queues_with_messages, run_to_end, send, url, waiting
from truenext import blocking


def run_queue_to_queue(spark: SparkSession, broker: BrokerProcess, checkpoint: Path, **options: str) -> None:
    rows = spark.readStream.format("truenext").option("url", url(broker)).option("queue", "orders")
    bills = rows.options(**options).load().selectExpr("'bills' AS queue", "body", "priority", "headers")
    # Spark passes the name to the sink, as an option.
    writer = bills.writeStream.queryName("bills").format("truenext").option("url", url(broker))
    run_to_end(writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start())


def numbers_in(broker: BrokerProcess, queue: str) -> list[int]:
    with blocking.connect(url(broker)) as connection:
        return [int(message.text) for message in connection.browse(f"/queue/{queue}")]


@pytest.mark.alternates("restarts of queries")
def test_messages_go_from_queue_to_queue_once_over_restarts(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    for round_ in range(2):
        send(broker, range(40 * round_, 40 * (round_ + 1)))
        run_queue_to_queue(spark, broker, tmp_path / "checkpoint", maxRowsPerTrigger="25", partitions=str(round_ + 1))
        broker.kill()
        broker.start(broker.port)
    assert Counter(numbers_in(broker, "bills")) == Counter(range(80))
    assert waiting(broker, "orders") == 0
    # The mark of the source, and the decision of the sink.
    kept = [name for name in queues_with_messages(broker) if name != "bills"]
    assert [name.rpartition(".")[0] for name in kept] == ["Spark.sink.main", "Spark.source.main"]


def test_a_batch_that_is_repeated_is_not_published_again(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "lines"
    folder.mkdir()
    for batch in range(2):
        (folder / f"{batch}.txt").write_text("".join(f"{number}\n" for number in range(10 * batch, 10 * batch + 10)))
        for _ in range(2):
            lines = spark.readStream.text(str(folder)).selectExpr("value AS body")
            writer = lines.writeStream.format("truenext").option("url", url(broker)).option("queue", "lines")
            run_to_end(writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start())
            # As if the driver had been killed before it noted the batch.
            for each in (checkpoint / "commits").glob(f"*{batch}*"):
                each.unlink()
    assert Counter(numbers_in(broker, "lines")) == Counter(range(20))


def test_a_batch_write_with_a_version_is_written_once(
    spark: SparkSession, broker: BrokerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    def write(*bodies: str, version: int) -> None:
        rows = spark.createDataFrame([(body,) for body in bodies], "body string")
        writer = rows.write.format("truenext").option("url", url(broker)).option("queue", "nightly")
        writer.option("txnAppId", "report").option("txnVersion", version).mode("append").save()

    write("1", "2", "3", version=1)
    write("1", "2", "4", version=1)
    write("5", version=2)
    with pytest.raises(PySparkException, match="batch 1 is older than batch 2, which is published"):
        write("6", version=1)
    assert sorted(numbers_in(broker, "nightly")) == [1, 2, 3, 5]


def test_a_batch_write_without_a_version_is_written_each_time_and_leaves_nothing(
    spark: SparkSession, broker: BrokerProcess
) -> None:
    rows = spark.range(10).selectExpr("string(id) AS body", "'/queue/a,/queue/b' AS queue")
    for _ in range(2):
        rows.write.format("truenext").option("url", url(broker)).mode("append").save()
    for queue in ("a", "b"):
        assert Counter(numbers_in(broker, queue)) == Counter([*range(10), *range(10)])
    assert queues_with_messages(broker) == ["a", "b"]


@pytest.mark.parametrize(
    ("select", "options", "mode", "message"),
    [
        (["body", "1 AS colour"], {"queue": "q"}, "append", "column colour is unknown"),
        (["body"], {}, "append", "the queue is missing"),
        (["body"], {"queue": "q", "topic": "x"}, "append", "option topic is unknown"),
        (["body"], {"queue": "q"}, "overwrite", "a queue can only be appended to"),
        (["body", "10 AS priority"], {"queue": "q"}, "append", "priority must be 0 to 9, not 10"),
    ],
)
def test_rows_that_are_no_messages_are_refused_and_nothing_is_written(
    spark: SparkSession,
    broker: BrokerProcess,
    select: list[str],
    options: dict[str, str],
    mode: str,
    message: str,
) -> None:
    rows: DataFrame = spark.range(1).selectExpr("string(id) AS body").selectExpr(*select)
    with pytest.raises(PySparkException, match=message):
        rows.write.format("truenext").option("url", url(broker)).options(**options).mode(mode).save()
    assert queues_with_messages(broker) == []
