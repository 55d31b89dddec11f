"""What waits in a queue, for `spark.read`: nothing is taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from truenext.errors import ConnectionLost
from truenext.spark.source.bundle import BUNDLE_BYTES, BUNDLE_ROWS, record_batch, row_of
from truenext.spark.source.connection import ANSWER_SECONDS, BrokerConnection
from truenext.spark.source.options import SourceOptions


def browse(broker: BrokerConnection, options: SourceOptions) -> Iterator[pa.RecordBatch]:
    """Yield what waits, in the queue's order.

    Raises: Refused, ConnectionLost
    """
    headers = {"id": "browse", "destination": options.destination, "browser": "true", "ack": "auto"}
    if options.selector is not None:
        headers["selector"] = options.selector
    broker.post("SUBSCRIBE", headers)
    rows: list[tuple[Any, ...]] = []
    size = 0
    while (frame := broker.next_message("browse", ANSWER_SECONDS)) is not None:
        if frame.headers.get("browser") == "end":
            if rows:
                yield record_batch(rows)
            return
        rows.append(row_of(frame))
        size += len(frame.body)
        if size >= BUNDLE_BYTES or len(rows) >= BUNDLE_ROWS:
            yield record_batch(rows)
            rows, size = [], 0
    raise ConnectionLost(f"the broker does not show {options.destination} within {ANSWER_SECONDS:g} seconds")
