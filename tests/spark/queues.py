"""Functions that send to a broker's queues and read them, and its history, for tests of Spark."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.integration.broker_process import BrokerProcess
from truenext import blocking
from truenext.spark.history_files import find_histories, read_files

QUERY_SECONDS = 120


@contextmanager
def serving(folder: Path) -> Iterator[BrokerProcess]:
    broker = BrokerProcess(folder)
    broker.start()
    try:
        yield broker
        broker.stop()
    finally:
        broker.clean_up()


def url(broker: BrokerProcess) -> str:
    return f"stomp://127.0.0.1:{broker.port}"


def send(broker: BrokerProcess, numbers: range, **options: Any) -> None:
    with blocking.connect(url(broker)) as connection:
        for number in numbers:
            headers = {"number": str(number)}
            connection.send_nowait("/queue/orders", str(number), priority=number % 10, headers=headers, **options)


def waiting(broker: BrokerProcess, queue: str) -> int:
    with blocking.connect(url(broker)) as connection:
        return sum(1 for _ in connection.browse(f"/queue/{queue}"))


def queues_with_messages(broker: BrokerProcess) -> list[str]:
    with blocking.connect(url(broker)) as connection:
        return [each["name"] for each in json.loads(connection.control_request("queues")) if each["waiting"]]


def run_to_end(query: StreamingQuery) -> None:
    assert query.awaitTermination(QUERY_SECONDS)


def read_events(spark: SparkSession, folder: Path) -> DataFrame:
    """Return the events of the only history in a folder."""
    (files,) = find_histories(spark, folder)
    return read_files(spark, files)[0]
