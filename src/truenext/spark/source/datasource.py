"""What Spark calls: `format("truenext")` as a Python data source, batch and streaming.

Driver and tasks are different processes. The driver has one reader for the whole run of a query; each task unpickles
one of its own, and uses nothing of it but `read`.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from truenext.clock import monotonic
from truenext.errors import ConfigurationError
from truenext.spark.source.browse import browse
from truenext.spark.source.columns import apply_options, spark_schema
from truenext.spark.source.connection import BrokerConnection
from truenext.spark.source.driver import SourceDriver
from truenext.spark.source.offset import START, parse_offset
from truenext.spark.source.options import SourceOptions, parse_options
from truenext.spark.source.patience import Patience
from truenext.spark.source.task import TaskPlan, read_task

LAG_SECONDS = 10.0
"""Between two questions of what waits."""


class TruenextDataSource(DataSource):
    """Queues of a truenext broker. Options: see docs/spark.md."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        """Raises: ConfigurationError that names the option"""
        super().__init__(options)
        self._options = parse_options(options)

    @classmethod
    def name(cls) -> str:
        return "truenext"

    def schema(self) -> StructType:
        return spark_schema(self._options)

    def reader(self, schema: StructType) -> BrowsingReader:
        _check_schema(schema, self._options)
        return BrowsingReader(self._options)

    def streamReader(self, schema: StructType) -> QueueStreamReader:
        _check_schema(schema, self._options)
        return QueueStreamReader(self._options)


def _check_schema(schema: StructType, options: SourceOptions) -> None:
    if schema.names != spark_schema(options).names:
        raise ConfigurationError("the columns are given: leave .schema(...) out, and select what you need")


class BrowsingReader(DataSourceReader):
    """Shows what waits, and takes nothing."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        # One, as a queue has one order.
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        options = self._options
        with BrokerConnection(options.addresses) as broker:
            for batch in browse(broker, options):
                yield apply_options(batch, options)


class PlannedTask(InputPartition):
    def __init__(self, plan: TaskPlan) -> None:
        super().__init__(plan.partition)
        self.plan = plan


class QueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Takes what waits, each message once."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._driver: SourceDriver | None = None
        self._rows_left: int | None = None
        """Of AvailableNow: what waited at its start and was not asked for yet."""
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
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        if self._rows_left is not None and rows is not None:
            rows = min(rows, self._rows_left)
        end = driver.next_end(parse_offset(start), rows, waits=not self._is_available_now)
        if end is None:
            return start
        if self._rows_left is not None:
            self._rows_left -= end.rows
        return end.as_dict()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """What waits, in the progress of the query."""
        now = monotonic()
        if now >= self._lag_known_until:
            self._lag = self._source_driver().waiting_count_now()
            self._lag_known_until = now + LAG_SECONDS
        return None if self._lag is None else {"waiting": self._lag}

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
        connect = partial(BrokerConnection, options.addresses)
        for batch in read_task(plan, connect, Patience(options.patience_s)):
            yield apply_options(batch, options)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: Spark does not call this after the last batch of a run. The next `latestOffset` clears."""

    def stop(self) -> None:
        if self._driver is not None:
            self._driver.close()

    def _source_driver(self) -> SourceDriver:
        if self._driver is None:
            self._driver = SourceDriver(self._options, partial(BrokerConnection, self._options.addresses))
        return self._driver
