"""Tasks: apply the pure functions of requests and answers to batches of Arrow, in Spark's Python processes."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from truenext.spark.stage_job.answers import Result, make_result
from truenext.spark.stage_job.requests import Request, parse_request

SOURCE_COLUMNS = (
    "sequence bigint, queue string, priority int, persistent boolean, `group` string, correlation_id string, "
    "reply_to string, content_type string, deliveries int, attempts int, accepted_ms bigint, expires_ms bigint, "
    "headers map<string,string>, body binary"
)
"""Columns of a source's rows, as far as a stage needs them."""
REQUEST_COLUMNS = (
    "flow_id string, trace string, message_id string, interactive boolean, state string, properties string, "
    "message string, refused string"
)
"""Columns of `Request`, as Spark declares them."""
RESULT_COLUMNS = (
    "queue string, body binary, priority int, persistent boolean, `group` string, correlation_id string, "
    "reply_to string, content_type string, expires_ms bigint, headers map<string,string>, report_to string, "
    "report_id string, on_failure string, reject string, stage string, sequence bigint, message_id string, "
    "flow_id string, trace string, sender string, parent string, attempt int, deliveries int, accepted_ms bigint, "
    "is_unreadable boolean"
)
"""Columns of `Result`, as Spark declares them."""

_REQUEST_TYPES = tuple(pa.bool_() if name == "interactive" else pa.string() for name in Request._fields)
_OTHER_TYPES = {
    "body": pa.binary(),
    "headers": pa.map_(pa.string(), pa.string()),
    **dict.fromkeys(("priority", "attempt", "deliveries"), pa.int32()),
    **dict.fromkeys(("expires_ms", "sequence", "accepted_ms"), pa.int64()),
    **dict.fromkeys(("persistent", "is_unreadable"), pa.bool_()),
}
_RESULT_TYPES = tuple(_OTHER_TYPES.get(name, pa.string()) for name in Result._fields)


def add_requests(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a source with the columns of `Request`.

    Raises: ConfigurationError if a row is from a queue that no stage has
    """
    for batch in batches:
        read = (batch.column(name).to_pylist() for name in ("queue", "accepted_ms", "body"))
        columns = _columns([parse_request(*each) for each in zip(*read, strict=True)], _REQUEST_TYPES)
        yield pa.RecordBatch.from_arrays([*batch.columns, *columns], [*batch.schema.names, *Request._fields])


def make_results(next_stage: str, job: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the `Result` of each request.

    Raises: BadAnswer if the transform has lost or doubled the column of flows
    """
    for batch in batches:
        results = [make_result(row, next_stage, job) for row in batch.to_pylist()]
        yield pa.RecordBatch.from_arrays(_columns(results, _RESULT_TYPES), list(Result._fields))


def _columns(rows: list[Request] | list[Result], types: tuple[pa.DataType, ...]) -> list[pa.Array]:
    columns = list(zip(*rows, strict=True)) or [()] * len(types)
    return [pa.array(column, type_) for column, type_ in zip(columns, types, strict=True)]
