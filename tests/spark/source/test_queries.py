"""Tests of queries of Spark that read queues, after docs/spark.md: short ones, in the suite's session, with a real
broker."""

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from tests.integration.broker_process import BrokerProcess
from tests.spark.queues import QUERY_SECONDS, queues_with_messages, run_to_end, send, url, waiting
from truenext import blocking


def stream(spark: SparkSession, broker: BrokerProcess, **options: object) -> DataFrame:
    reader = spark.readStream.format("truenext").option("url", url(broker)).option("queue", "orders")
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return reader.load()


def test_a_batch_read_shows_what_waits_in_order_with_all_columns_and_takes_nothing(
    spark: SparkSession, broker: BrokerProcess
) -> None:
    with blocking.connect(url(broker)) as connection:
        connection.send("/queue/orders", b"\xff", priority=1)
        connection.send(
            "/queue/orders",
            "text",
            priority=8,
            persistent=False,
            group="g",
            correlation_id="c",
            reply_to="/queue/answers",
            content_type="text/plain",
            ttl=1000.0,
            headers={"colour": "red"},
        )
    reader = spark.read.format("truenext").option("url", url(broker)).option("queue", "orders")
    first, last = reader.load().collect()
    now = datetime.now(UTC).replace(tzinfo=None)
    assert abs((first["timestamp"] - now).total_seconds()) < 60
    assert 900 < (first["expires"] - now).total_seconds() < 1100
    wanted: dict[str, Any] = {
        "queue": "orders",
        "sequence": 2,
        "priority": 8,
        "persistent": False,
        "group": "g",
        "correlation_id": "c",
        "reply_to": "/queue/answers",
        "content_type": "text/plain",
        "attempts": 0,
        "headers": {"colour": "red"},
        "body": b"text",
    }
    assert {name: first[name] for name in wanted} == wanted
    assert (last["sequence"], last["group"], last["expires"], last["body"]) == (1, None, None, b"\xff")
    texts = reader.option("body", "string").option("headers", "false").option("selector", "JMSPriority < 5").load()
    (row,) = texts.collect()
    assert (row["body"], row["error"]) == (None, "the body is not UTF-8: invalid start byte at byte 0")
    assert "headers" not in texts.columns
    assert waiting(broker, "orders") == 2


@pytest.mark.alternates("restarts of queries")
def test_a_stream_takes_each_message_once_over_restarts_of_the_query_and_of_the_broker(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    for round_ in range(3):
        send(broker, range(40 * round_, 40 * (round_ + 1)))
        rows = stream(spark, broker, maxRowsPerTrigger=25, partitions=round_ + 1)
        writer = rows.writeStream.format("parquet").option("path", str(tmp_path / "rows"))
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        run_to_end(query)
        assert waiting(broker, "orders") == 0
        if round_ == 1:
            broker.kill()
            broker.start(broker.port)
    found = spark.read.parquet(str(tmp_path / "rows")).collect()
    assert Counter(int(row["headers"]["number"]) for row in found) == Counter(range(120))
    assert {row["attempts"] for row in found} == {0}
    # With what it has read cleared.
    assert [name.count(".") for name in queues_with_messages(broker)] == [3]


@pytest.mark.alternates("queries of a source")
def test_two_actions_of_one_batch_see_the_same_rows(spark: SparkSession, broker: BrokerProcess, tmp_path: Path) -> None:
    send(broker, range(60))
    seen: list[tuple[set[int], list[int]]] = []

    def process(batch: DataFrame, _number: int) -> None:
        first = {row["sequence"] for row in batch.take(1)}
        seen.append((first, [row["sequence"] for row in batch.collect()]))

    rows = stream(spark, broker, maxRowsPerTrigger=20, partitions=1)
    writer = rows.writeStream.foreachBatch(process).option("checkpointLocation", str(tmp_path / "checkpoint"))
    run_to_end(writer.trigger(availableNow=True).start())
    assert all(first <= set(all_rows) for first, all_rows in seen)
    in_order = [sequence for _, all_rows in seen for sequence in all_rows]
    assert in_order == sorted(range(1, 61), key=lambda sequence: (9 - (sequence - 1) % 10, sequence))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue": "/topic/news"}, r"Consumer\.NAME\.VirtualTopic\.news"),
        ({"partitions": "65"}, "partitions is '65', and must be a whole number, 1 to 64"),
        ({"users": "x"}, "option users is unknown"),
        ({"password": "x"}, "option password: Spark shows options in its plans of queries"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(
    spark: SparkSession, broker: BrokerProcess, options: dict[str, str], message: str
) -> None:
    with pytest.raises(PySparkException, match=message):
        stream(spark, broker, **options)


@pytest.mark.alternates("queries of a source")
def test_a_checkpoint_of_another_queue_ends_the_query_by_name(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    send(broker, range(10))
    for queue in ("orders", "others"):
        with blocking.connect(url(broker)) as connection:
            connection.send("/queue/others", "x")
        rows = stream(spark, broker, queue=queue)
        writer = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        if queue == "orders":
            run_to_end(query)
        else:
            with pytest.raises(PySparkException, match="the checkpoint belongs to the queue orders"):
                query.awaitTermination(QUERY_SECONDS)
    assert waiting(broker, "others") == 2
