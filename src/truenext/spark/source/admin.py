"""Operator commands for queries with bundles in the broker: list, close, return rows, reject a row.

Each step of a command is one transaction. So after an interrupted command every row is still stored exactly once, and
the command can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from truenext.errors import TruenextError
from truenext.flows.envelope import FailureOptions, failures_of
from truenext.model.failure_headers import ON_FAILURE, REPORT_ID, REPORT_TO
from truenext.model.spark_queues import (
    CLOSED_BATCH,
    SOURCE_PREFIX,
    QueryStatus,
    bundle_headers,
    mark_queue,
    parse_bundle_head,
    parse_bundle_origin,
    queues_by_query,
)
from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.source.bundle import decode_bundle, encode_bundle
from truenext.spark.source.mark import close_mark, read_mark, replace_mark
from truenext.spark.source.offset import task_producer
from truenext.spark.source.options import PARTITIONS_MAX
from truenext.wire.stomp.frame import Frame

REJECTED_BY_HAND = "rejected by truenext spark reject"
_NUMBER_MAX = (1 << 63) - 1
"""Highest number of a producer. After its use, every COMMIT of the query counts as a repeat."""


def list_queries(broker: BrokerConnection, space: str | None = None, *, with_rows: bool = True) -> list[QueryStatus]:
    """Return all queries that the broker knows, sorted by space and id. If `space` is given, return only queries in
    this space.

    Without `with_rows` only the first bundle of each task is read, so that the numbers of rows and bytes are too low.

    Raises: Refused if the broker refuses a request; ConnectionLost if the connection is lost
    """
    queries = [
        QueryStatus(*key, bundle_queues=names)
        for key, names in queues_by_query(broker.ask("queues"), SOURCE_PREFIX).items()
        if space in (None, key[0])
    ]
    for status in queries:
        status.add_mark(read_mark(broker, mark_queue(status.space, status.id), allow_closed=True))
        for name in status.bundle_queues:
            for frame in broker.browse(f"/queue/{name}", None if with_rows else "spark_bundle = 0"):
                status.add_bundle(frame.headers)
    return queries


def close_source(broker: BrokerConnection, status: QueryStatus) -> list[str]:
    """Prevent the query from taking more messages, and return the names of the queues with its bundles. The call may be
    repeated.

    Raises: Refused if the broker refuses a request; ConnectionLost if the connection is lost
    """
    name = mark_queue(status.space, status.id)
    close_mark(broker, name, status.id)
    for partition in range(PARTITIONS_MAX):
        # After this, a COMMIT of a task is a repeat, and the task fails. The transaction has something persistent, so
        # that the number survives a crash of the broker.
        replace_mark(broker, name, CLOSED_BATCH, task_producer(status.id, partition), _NUMBER_MAX)
    # Includes bundles written until then.
    return [
        queue["name"] for queue in broker.ask("queues") if queue["name"].startswith(f"{name}.") and queue["waiting"]
    ]


def outputs_of(broker: BrokerConnection, bundle_queues: list[str]) -> set[str]:
    """Return Spark's ids of the queries that are named in these bundles.

    Raises: Refused if the broker refuses a request; ConnectionLost if the connection is lost
    """
    return {
        frame.headers["spark_query"]
        for name in bundle_queues
        for frame in broker.browse(f"/queue/{name}")
        if frame.headers.get("spark_query")
    }


def return_rows(
    broker: BrokerConnection, bundle_queues: list[str], published: Mapping[str, int]
) -> Iterator[tuple[int, int]]:
    """Send the rows of bundles to their queues again, as new arrivals. Rows of published batches are dropped.
    `published` has the last published batch of each query, by Spark's id of the query.

    Yields the numbers of returned and of dropped rows, after each transaction.

    Raises: Refused if the broker refuses a request; ConnectionLost if the connection is lost
    """
    for queue in bundle_queues:
        for frame in _take(broker, queue):
            headers = frame.headers
            rows = decode_bundle(frame.body).to_pylist()
            frames: list[tuple[str, dict[str, str], bytes]] = [("ACK", {"id": headers["ack"]}, b"")]
            batch = headers.get("spark_query_batch") or ""
            is_published = batch.isdecimal() and int(batch) <= published.get(headers.get("spark_query", ""), -1)
            if not is_published:
                frames += [("SEND", _send_headers(row), row["body"]) for row in rows]
            _commit(broker, frames)
            yield (0, len(rows)) if is_published else (len(rows), 0)


def reject(broker: BrokerConnection, status: QueryStatus, sequence: int) -> str:
    """Remove one row from its bundle, and reject it in its queue, as a consumer would: it becomes a dead letter, or
    goes to the queue that handles its failure. Return the name of its queue.

    Raises: TruenextError if no bundle has the row; Refused, ConnectionLost if a step fails
    """
    for queue in status.bundle_queues:
        for frame in _take(broker, queue):
            batch = decode_bundle(frame.body)
            sequences = batch.column("sequence").to_pylist()
            if sequence not in sequences:
                continue
            index = sequences.index(sequence)
            row = batch.slice(index, 1).to_pylist()[0]
            remaining = pa.Table.from_batches([batch.slice(0, index), batch.slice(index + 1)]).combine_chunks()
            rest = remaining.to_batches()[0] if remaining.num_rows else batch.slice(0, 0)
            head = parse_bundle_head(frame.headers)
            head = head._replace(rows=head.rows - 1, bytes=head.bytes - len(row["body"]))
            headers = bundle_headers(head, parse_bundle_origin(frame.headers))
            rejected = {"truenext-reject": "true", "truenext-cause": REJECTED_BY_HAND}
            _commit(
                broker,
                [
                    ("ACK", {"id": frame.headers["ack"]}, b""),
                    ("SEND", {"destination": f"/queue/{queue}", "persistent": "true", **headers}, encode_bundle(rest)),
                    ("SEND", _send_headers(row) | rejected, row["body"]),
                ],
            )
            return str(row["queue"])
    raise TruenextError(f"no bundle of query {status.id} has message {sequence}")


def _send_headers(row: dict[str, Any]) -> dict[str, str]:
    headers = dict(row["headers"]) | {"destination": f"/queue/{row['queue']}", "priority": str(row["priority"])}
    if row["persistent"]:
        headers["persistent"] = "true"
    for name, header in (
        ("group", "JMSXGroupID"),
        ("correlation_id", "correlation-id"),
        ("reply_to", "reply-to"),
        ("content_type", "content-type"),
    ):
        if row[name] is not None:
            headers[header] = row[name]
    if row["expires"] is not None:
        headers["expires"] = str(round(row["expires"].timestamp() * 1000))
    return headers | _failure_headers(failures_of(row["queue"], row["body"]))


def _failure_headers(told: FailureOptions) -> dict[str, str]:
    """Return the headers that name the destinations told of a failure. A bundle leaves them out, and they follow from
    the body."""
    headers = {REPORT_TO: told.report_to, REPORT_ID: told.report_id, ON_FAILURE: " ".join(told.on_failure)}
    return {name: value for name, value in headers.items() if value}


def _commit(broker: BrokerConnection, frames: list[tuple[str, dict[str, str], bytes]]) -> None:
    transaction = {"transaction": "step"}
    broker.post("BEGIN", {**transaction, "truenext-count-attempts": "nacked"})
    for command, headers, body in frames:
        broker.post(command, headers | transaction, body)
    broker.call("COMMIT", transaction)


def _take(broker: BrokerConnection, queue: str) -> Iterator[Frame]:
    """Yield the bundles of a queue one at a time, until none is ready. At the end, bundles that the caller has not
    acknowledged return to the queue."""
    broker.subscribe_to_pull("take", f"/queue/{queue}", "client-individual")
    try:
        while True:
            broker.pull("take", 1)
            frame = broker.answer("take")
            if "truenext-unused" in frame.headers:
                return
            yield frame
    finally:
        broker.post("UNSUBSCRIBE", {"id": "take"})
