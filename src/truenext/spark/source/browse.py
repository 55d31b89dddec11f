"""Browsing of a queue, for `spark.read`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.source.bundle import BUNDLE_BYTES, BUNDLE_ROWS, record_batch, row_of
from truenext.spark.source.options import SourceOptions


def browse(broker: BrokerConnection, options: SourceOptions, destination: str) -> Iterator[pa.RecordBatch]:
    """Yield the waiting messages of one queue, in its order.

    Raises: Refused if the broker refuses to browse; ConnectionLost if the connection is lost
    """
    rows: list[tuple[Any, ...]] = []
    size = 0
    for frame in broker.browse(destination, options.selector):
        rows.append(row_of(frame))
        size += len(frame.body)
        if size >= BUNDLE_BYTES or len(rows) >= BUNDLE_ROWS:
            yield record_batch(rows)
            rows, size = [], 0
    if rows:
        yield record_batch(rows)
