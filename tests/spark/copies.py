"""Queries that copy the queue `orders` to the queue `copies` until they are stopped: in Spark, and without it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from truenext.model.spark_queues import Draft, SinkQueues
from truenext.model.url import parse_url
from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.broker.patience import Patience
from truenext.spark.datasource import PlannedTask, QueueStreamReader, TruenextDataSource
from truenext.spark.sink.draft import write_drafts
from truenext.spark.sink.driver import commit_batch
from truenext.spark.sink.rows import bundles, encode_rows
from truenext.spark.source.offset import START

ROWS_MAX = 250
COLUMNS = ["body", "priority", "group", "headers"]
PATIENCE_S = 60
SPARK_IS_LATE = "Python worker failed to connect back"
"""Words of the error of a query whose Python process has started too slowly, on a busy machine."""


class Copy(Protocol):
    def start(self) -> None: ...

    def check(self) -> None:
        """Raises: AssertionError if the query has ended by itself"""

    def restart(self) -> None:
        """Stop the query, and let a new run go on until nothing is left to copy."""

    def stop(self) -> None: ...

    @property
    def batches(self) -> int: ...


class SparkCopy:
    """Query in a session of Spark."""

    def __init__(self, spark: SparkSession, urls: Sequence[str], checkpoint: Path) -> None:
        self._spark = spark
        self._where = {"url": ",".join(urls), "patience": str(PATIENCE_S)}
        self._checkpoint = checkpoint
        self._query: StreamingQuery | None = None
        self._trigger: dict[str, Any] = {"processingTime": "0 seconds"}

    def start(self) -> None:
        reader = self._spark.readStream.format("truenext").options(**self._where, queue="orders")
        rows = reader.option("maxRowsPerTrigger", ROWS_MAX).load().select(*COLUMNS).repartition(2)
        writer = rows.writeStream.format("truenext").options(**self._where, queue="copies")
        writer = writer.option("checkpointLocation", str(self._checkpoint))
        self._query = writer.trigger(**self._trigger).start()

    def check(self) -> None:
        assert self._query is not None
        error = self._query.exception()
        if error is not None:
            assert SPARK_IS_LATE in str(error), error
            self.start()

    def restart(self) -> None:
        self.stop()
        self._trigger = {"availableNow": True}
        self.start()
        assert self._query is not None
        while self._query.isActive or self._query.exception() is not None:
            self.check()
            time.sleep(0.1)

    def stop(self) -> None:
        if self._query is not None:
            self._query.stop()

    @property
    def batches(self) -> int:
        return len(list((self._checkpoint / "commits").glob("[0-9]*")))


class PlainCopy:
    """Query in a thread, which calls what Spark calls."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._connect = partial(BrokerConnection, [parse_url(url) for url in urls])
        options = {"url": ",".join(urls), "queue": "orders", "partitions": "2", "patience": str(PATIENCE_S)}
        self._source = TruenextDataSource(options | {"maxRowsPerTrigger": str(ROWS_MAX)})
        self._offsets: list[dict[str, Any]] = [START]
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        assert self._error is None, self._error

    def restart(self) -> None:
        self.stop()
        self.check()
        reader = self._reader()
        self._copy_new(reader)
        reader.stop()

    def stop(self) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(2 * PATIENCE_S)

    @property
    def batches(self) -> int:
        return len(self._offsets) - 1

    def _run(self) -> None:
        try:
            reader = self._reader()
            while not self._is_over.is_set():
                self._copy_new(reader)
                time.sleep(0.05)
            reader.stop()
        except BaseException as error:
            self._error = error

    def _reader(self) -> QueueStreamReader:
        reader = self._source.streamReader(self._source.schema())
        assert isinstance(reader, QueueStreamReader)
        return reader

    def _copy_new(self, reader: QueueStreamReader) -> None:
        """Copy batches until nothing waits. Copy every third batch twice, as after a crash of the query."""
        while (end := reader.latestOffset(self._offsets[-1], reader.getDefaultReadLimit())) != self._offsets[-1]:
            self._offsets.append(end)
            for _ in range(2 if self.batches % 3 == 0 else 1):
                self._copy_batch(reader)

    def _copy_batch(self, reader: QueueStreamReader) -> None:
        """Copy the last batch, as a new attempt if it was copied before."""
        queues, number = SinkQueues("main", "copy"), self.batches - 1
        drafts: tuple[Draft, ...] = ()
        for partition, task in enumerate(reader.partitions(*self._offsets[-2:])):
            assert isinstance(task, PlannedTask)
            rows = (frame for each in reader.read(task) for frame in encode_rows(each.select(COLUMNS), "/queue/copies"))
            written = write_drafts(bundles(rows), queues, number, partition, self._connect, Patience(PATIENCE_S))
            drafts += written.drafts
        commit_batch(queues, number, drafts, self._connect, Patience(PATIENCE_S))
