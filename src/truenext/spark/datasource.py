"""Python data source `format("truenext")` with the methods that Spark calls: batch and streaming, source and sink.

Driver and tasks are different processes. The driver keeps one reader for a run of a query. Each task unpickles its own
reader, and calls only `read`. A writer is unpickled for each task and for each commit.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from truenext.clock import monotonic
from truenext.errors import ConfigurationError
from truenext.model.spark_queues import SinkQueues
from truenext.spark.broker.latest import purge
from truenext.spark.broker.patience import Patience
from truenext.spark.history.options import HistoryOptions, is_history
from truenext.spark.history.options import parse_options as parse_history_options
from truenext.spark.sink.draft import WrittenDrafts, write_drafts
from truenext.spark.sink.driver import commit_batch, with_broker
from truenext.spark.sink.options import SinkOptions
from truenext.spark.sink.options import parse_options as parse_sink_options
from truenext.spark.sink.rows import bundles, check_columns, encode_rows
from truenext.spark.source.browse import browse
from truenext.spark.source.columns import apply_options, spark_schema
from truenext.spark.source.driver import SourceDriver
from truenext.spark.source.offset import START, Offset, parse_offset
from truenext.spark.source.options import SourceOptions
from truenext.spark.source.options import parse_options as parse_source_options
from truenext.spark.source.task import TaskPlan, read_task

if TYPE_CHECKING:
    from truenext.spark.history.readers import HistoryReader, HistoryStreamReader

LAG_SECONDS = 10.0
"""Seconds between two requests for the number of waiting messages."""


class TruenextDataSource(DataSource):
    """Queues and histories of truenext brokers, as a data source of Spark. docs/spark.md describes the options. An
    invalid option raises ConfigurationError."""

    @classmethod
    def name(cls) -> str:
        return "truenext"

    def schema(self) -> StructType:
        if is_history(self.options):
            history: StructType = _history_readers().history_schema()
            return history
        return spark_schema(parse_source_options(self.options))

    def reader(self, schema: StructType) -> BrowsingReader | HistoryReader:
        if is_history(self.options):
            reader: HistoryReader = _history_readers().HistoryReader(self._history_options(schema))
            return reader
        return BrowsingReader(self._source_options(schema))

    def streamReader(self, schema: StructType) -> QueueStreamReader | HistoryStreamReader:
        if is_history(self.options):
            reader: HistoryStreamReader = _history_readers().HistoryStreamReader(self._history_options(schema))
            return reader
        return QueueStreamReader(self._source_options(schema))

    def _source_options(self, schema: StructType) -> SourceOptions:
        options = parse_source_options(self.options)
        _check_schema(schema, spark_schema(options))
        return options

    def _history_options(self, schema: StructType) -> HistoryOptions:
        _check_schema(schema, _history_readers().history_schema())
        return parse_history_options(self.options)

    def writer(self, schema: StructType, overwrite: bool) -> QueueWriter:
        options = self._sink_options(schema, overwrite, is_streaming=False)
        # Without txnAppId each write is independent.
        return QueueWriter(options, SinkQueues(options.space, options.app or secrets.token_hex(8)))

    def streamWriter(self, schema: StructType, overwrite: bool) -> QueueStreamWriter:
        return QueueStreamWriter(self._sink_options(schema, overwrite, is_streaming=True))

    def _sink_options(self, schema: StructType, overwrite: bool, *, is_streaming: bool) -> SinkOptions:
        if overwrite:
            raise ConfigurationError("a queue can only be appended to: use mode append, or output mode append")
        options = parse_sink_options(self.options, is_streaming=is_streaming)
        check_columns(schema, options)
        return options


def _history_readers() -> Any:
    """Import what reads a history. It needs numpy, which executors of queries from queue to queue need not have."""
    from truenext.spark.history import readers

    return readers


def _check_schema(given: StructType, fixed: StructType) -> None:
    """Raises: ConfigurationError if these are not the columns"""
    if given.names != fixed.names:
        raise ConfigurationError("the columns are fixed: leave .schema(...) out, and select the columns that you need")


class BrowsingReader(DataSourceReader):
    """Reader for `spark.read`. The reader returns the waiting messages, which stay in the queue."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        # Each queue has one order.
        return [InputPartition(destination) for destination in self._options.destinations]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        options = self._options
        with options.connect() as broker:
            for batch in browse(broker, options, partition.value):
                yield apply_options(batch, options)


class PlannedTask(InputPartition):
    def __init__(self, plan: TaskPlan) -> None:
        super().__init__(plan.partition)
        self.plan = plan


class QueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader for `spark.readStream`. It takes each waiting message once."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._driver: SourceDriver | None = None
        self._rows_left: int | None = None
        """With the trigger AvailableNow: number of messages that waited at the start and do not belong to a batch
        yet."""
        self._planned: Offset | None = None
        """With the trigger AvailableNow: end of the last batch that this run has planned."""
        self._is_available_now = False
        self._lag: int | None = None
        self._lag_known_until = 0.0

    def initialOffset(self) -> dict[str, Any]:
        return START

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.rows_max)

    def prepareForTriggerAvailableNow(self) -> None:
        self._is_available_now = True

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        driver = self._source_driver()
        if self._is_available_now and self._rows_left is None:
            self._rows_left = driver.waiting_count()
        if self._planned is not None and start == self._planned.as_dict():
            # A batch may have fewer rows than planned: its bytes are limited, too, and other consumers take messages.
            self._rows_left = max(0, (self._rows_left or 0) - driver.rows_read(self._planned))
        self._planned = None
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        if self._rows_left is not None and rows is not None:
            rows = min(rows, self._rows_left)
        end = driver.next_end(parse_offset(start), rows, waits=not self._is_available_now)
        if end is None:
            return start
        if self._is_available_now:
            self._planned = end
        return end.as_dict()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return how many messages wait, and how long the next one has waited. Spark shows this as the query's
        progress."""
        driver, now = self._source_driver(), monotonic()
        if now >= self._lag_known_until:
            self._lag = driver.waiting_count_now()
            self._lag_known_until = now + LAG_SECONDS
        found = {"waiting": self._lag, "waitedMs": driver.waited_ms}
        return {name: value for name, value in found.items() if value is not None} or None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        offset = parse_offset(end)
        if offset is None or start == end:
            return []
        self._source_driver().check_not_cleared(offset)
        return [
            PlannedTask(TaskPlan(options=self._options, end=offset, partition=partition))
            for partition in range(offset.partitions)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, PlannedTask)
        plan, options = partition.plan, partition.plan.options
        context = TaskContext.get()
        if context is not None:
            plan = plan.with_query(
                context.getLocalProperty("sql.streaming.queryId") or "",
                context.getLocalProperty("streaming.sql.batchId") or "",
            )
        for batch in read_task(plan, options.connect, Patience(options.patience_s)):
            yield apply_options(batch, options)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing, because Spark does not call this after the last batch of a run. The next `latestOffset` clears
        the batch."""

    def stop(self) -> None:
        if self._driver is not None:
            self._driver.close()

    def _source_driver(self) -> SourceDriver:
        if self._driver is None:
            self._driver = SourceDriver(self._options, self._options.connect)
        return self._driver


class QueueStreamWriter(DataSourceStreamArrowWriter):
    """Writer for `writeStream`. It publishes the rows of each batch once."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty("sql.streaming.queryId") or ""
        batch = int(context.getLocalProperty("streaming.sql.batchId") or 0)
        return _write(self._options, SinkQueues(self._options.space, query), batch, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        written = [each for each in messages if isinstance(each, WrittenDrafts)]
        if written:
            _commit(self._options, SinkQueues(self._options.space, written[0].id), batchId, written)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing. Spark also calls this method after a failed `commit`; rows that are decided must then still be
        published."""


class QueueWriter(DataSourceArrowWriter):
    """Writer for a batch write. It publishes the rows once, or once for each txnVersion."""

    def __init__(self, options: SinkOptions, queues: SinkQueues) -> None:
        self._options = options
        self._queues = queues

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _write(self._options, self._queues, self._options.version, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        options, queues = self._options, self._queues
        written = [each for each in messages if isinstance(each, WrittenDrafts)]
        _commit(options, queues, options.version, written)
        if options.app is None:
            # No later write has this id.
            purge_decisions = partial(purge, queue=queues.decisions)
            with_broker(purge_decisions, options.connect, Patience(options.patience_s))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing. Spark also calls this method after a failed `commit`; rows that are decided must then still be
        published."""


def _write(options: SinkOptions, queues: SinkQueues, batch: int, batches: Iterator[pa.RecordBatch]) -> WrittenDrafts:
    context = TaskContext.get()
    partition = 0 if context is None else context.partitionId()
    made = bundles(chain.from_iterable(encode_rows(each, options.destination) for each in batches))
    return write_drafts(made, queues, batch, partition, options.connect, Patience(options.patience_s))


def _commit(options: SinkOptions, queues: SinkQueues, batch: int, written: list[WrittenDrafts]) -> None:
    drafts = tuple(draft for each in written for draft in each.drafts)
    commit_batch(queues, batch, drafts, options.connect, Patience(options.patience_s))
