"""Tests that a query that reads and writes queues goes on during a drain, though its tasks open connections."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.spark.queues import url
from tests.spark.sink.small_write import commit, draft
from tests.spark.source.small_query import SmallQuery, connect, send
from truenext import blocking
from truenext.testing import BlockingBroker


def test_query_from_queue_to_queue_empties_its_queue_during_a_drain(
    here: BlockingBroker, new_query: Callable[..., SmallQuery]
) -> None:
    # C31.3, C31.4
    query = new_query(patience="60")
    reader = query.reader()
    assert query.plan(reader) == []
    send(here, *"abcdefg")
    with connect(here) as operator:
        report = operator.ask("drain", {"draining": True})
        assert (report["draining"], report["waiting"]) == (True, 7)
        rows = query.run_batch(reader)
        assert rows == [*"abcdefg"]
        commit(here, 0, draft(here, 0, *rows, patience_s=60), patience_s=60)
        assert query.plan(reader) == []
        report = operator.ask("drain")
        assert [(each["queue"], each["waiting"]) for each in report["queues"]] == [("out", 7)]
        assert operator.ask("purge", {"queue": "out"})["moved"] == 7
        report = operator.ask("drain")
        assert (report["drained"], report["kept"]) == (True, 2)


AHEAD_MAX = 50
"""Number of orders without a bill at which the producer pauses."""


class Shop:
    """Producer of numbered orders, and consumer of their bills, each in a thread of its own."""

    def __init__(self, broker_url: str) -> None:
        self._url = broker_url
        self._is_over = threading.Event()
        self.sent = 0
        self.bills: Counter[str] = Counter()
        self._threads = [threading.Thread(target=each) for each in (self._produce, self._consume)]

    @contextmanager
    def open(self) -> Iterator[None]:
        for each in self._threads:
            each.start()
        try:
            yield
        finally:
            self._is_over.set()
            for each in self._threads:
                each.join(PATIENCE_SECONDS)

    def _produce(self) -> None:
        with blocking.connect(self._url) as connection:
            while not self._is_over.wait(0.005):
                if self.sent - len(self.bills) > AHEAD_MAX:
                    continue
                connection.send("/queue/orders", f"{self.sent}", timeout=PATIENCE_SECONDS)
                self.sent += 1

    def _consume(self) -> None:
        with blocking.connect(self._url) as connection, connection.consumer("/queue/bills") as consumer:
            while not self._is_over.is_set():
                if (bill := consumer.receive(0.1)) is not None:
                    self.bills[bill.text] += 1
                    bill.ack()

    def await_bills(self, count: int, query: StreamingQuery) -> None:
        deadline = time.monotonic() + 2 * PATIENCE_SECONDS
        while len(self.bills) < count:
            assert query.isActive and time.monotonic() < deadline, (len(self.bills), query.exception())
            time.sleep(0.01)


@pytest.mark.alternates("restarts of queries")
def test_running_query_of_spark_goes_on_during_a_drain_and_after_it(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    # C31.2 to C31.4
    rows = spark.readStream.format("truenext").options(url=url(broker), queue="orders").load()
    bills = rows.selectExpr("'bills' AS queue", "body").writeStream.format("truenext").option("url", url(broker))
    query = bills.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    shop = Shop(url(broker))
    try:
        with shop.open():
            shop.await_bills(20, query)
            done = broker.output_of("drain", "--timeout", "40s")
            assert done == "Nothing is left to wait for. There are still: 2 kept by queries of Spark.\n"
            sent = shop.sent
            shop.await_bills(sent, query)
            time.sleep(0.3)
            assert shop.sent == sent, "the producer waits"
            broker.output_of("drain", "--undo")
            shop.await_bills(sent + 20, query)
    finally:
        query.stop()
    assert set(shop.bills.values()) == {1}
