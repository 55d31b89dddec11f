"""A history as a source of Spark, with the methods that Spark calls. Driver and tasks are different processes.

An offset is the number of the event behind a batch. So a batch that is repeated has the same rows: no number of an
event is used twice, and none is added between two others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from truenext.errors import ConfigurationError
from truenext.history.table import SCHEMA
from truenext.model.events import GAP_EVENTS
from truenext.spark.history.options import HistoryOptions
from truenext.spark.history.places import Extent, History, check_kept, read_events

OFFSET_VERSION = 1
START: dict[str, Any] = {"v": OFFSET_VERSION, "event": 0}
"""Offset before the first batch. This is a constant, because Spark asks for the first offset more than once."""


def history_schema() -> StructType:
    return from_arrow_schema(SCHEMA)


class _Share(InputPartition):
    """Events from `start` to before `end`."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__((start, end))
        self.start = start
        self.end = end


class HistoryReader(DataSourceReader):
    """Reader for `spark.read`: all events that the history has."""

    def __init__(self, options: HistoryOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        with closing(self._options.open()) as history:
            extent = history.extent()
            return _shares(history, extent.first, extent.next)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from _read(self._options, partition)


class HistoryStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader for `spark.readStream`: each event once, in batches."""

    def __init__(self, options: HistoryOptions) -> None:
        self._options = options
        self._history = options.open()
        self._next: int | None = None
        """With the trigger AvailableNow: number of the first event that is not read."""
        self._is_available_now = False
        self._known: Extent | None = None

    def initialOffset(self) -> dict[str, Any]:
        return START

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.rows_max)

    def prepareForTriggerAvailableNow(self) -> None:
        self._is_available_now = True

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        extent = self._known = self._history.extent()
        _check(start, extent)
        if self._is_available_now:
            self._next = extent.next if self._next is None else self._next
            extent = extent._replace(next=self._next)
        event, began = int(start["event"]), int(start.get("began", extent.first))
        end = extent.next
        if isinstance(limit, ReadMaxRows):
            end = min(end, self._first_from(max(event, extent.first), extent) + limit.max_rows)
        if not extent.first or end <= max(event, extent.first):
            return start
        return {"v": OFFSET_VERSION, "store": extent.store, "began": began, "event": end}

    def _first_from(self, event: int, extent: Extent) -> int:
        """Return the number of the first event from `event` on, without the numbers that a crash leaves out: a batch
        has few rows at a time, and would have none for long."""
        if extent.next - event <= GAP_EVENTS:
            return event
        piece = self._history.piece(event - 1)
        if piece.events is None:
            return event
        return max(event, int(piece.events["event"][0].as_py()))

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return how far the history goes. Spark shows this as the query's progress."""
        return None if self._known is None else {"event": self._known.next}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        if start == end:
            return []
        extent = self._history.extent()
        _check(end, extent)
        event = int(start["event"]) or int(end["began"])
        if self._options.fails_on_loss:
            check_kept(event, int(end["event"]), extent.first)
        return _shares(self._history, event, int(end["event"]))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from _read(self._options, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: reading changes nothing."""

    def stop(self) -> None:
        self._history.close()


def _check(offset: dict[str, Any], extent: Extent) -> None:
    """Check that an offset is one of this history.

    Raises: ConfigurationError if it is not
    """
    if offset.get("v") != OFFSET_VERSION:
        raise ConfigurationError(
            f"the checkpoint has offsets of version {offset.get('v')!r}, and this truenext reads version "
            f"{OFFSET_VERSION} of a history: run the query with the truenext that wrote it, or with a new checkpoint"
        )
    if offset.get("store", extent.store) != extent.store:
        raise ConfigurationError(
            f"the query has read the history of the broker whose data has the name {offset['store']}, and this is that "
            f"of {extent.store}: correct url or path, or use a new checkpoint, as for a broker that was restored"
        )
    # A crash takes back fewer events than that from a folder, and its next run begins behind them.
    if extent.next and int(offset["event"]) > extent.next + (0 if extent.store else GAP_EVENTS):
        raise ConfigurationError(
            f"the query has read up to event {int(offset['event']) - 1:,}, and the history ends with "
            f"{extent.next - 1:,}: it is an older copy, or another one. Use a new checkpoint"
        )


def _shares(history: History, start: int, end: int) -> list[_Share]:
    return [_Share(*each) for each in history.shares(start, end)] if start < end else []


def _read(options: HistoryOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    assert isinstance(partition, _Share)
    with closing(options.open()) as history:
        yield from read_events(history, partition.start, partition.end, fails_on_loss=options.fails_on_loss)
