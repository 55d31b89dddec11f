"""Sweep: passes the events of a partition through the audits of its queues, and returns their results as rows."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import BooleanType, DataType, LongType, StringType, StructField, StructType

from truenext.spark.audit.model import AuditedMessage, ConsumerFlags, EventCode, Finding, RemovedMessages
from truenext.spark.audit.queue_audit import QueueAudit

SWEEP_SCHEMA = StructType(
    [
        StructField("row", StringType()),
        StructField("queue", StringType()),
        StructField("kind", StringType()),
        StructField("event", LongType()),
        StructField("at", LongType()),
        StructField("sequence", LongType()),
        StructField("priority", LongType()),
        StructField("persistent", BooleanType()),
        StructField("consumer", LongType()),
        StructField("overtaken_sequence", LongType()),
        StructField("overtaken_priority", LongType()),
        StructField("count", LongType()),
        StructField("duration", LongType()),
        StructField("detail", StringType()),
        StructField("arrival", LongType()),
        StructField("delivery", LongType()),
        StructField("wait", LongType()),
        StructField("hold", LongType()),
        StructField("deliveries", LongType()),
        StructField("attempts", LongType()),
        StructField("waiting", LongType()),
        StructField("held", LongType()),
    ]
)
"""Three kinds of row, told apart by `row`: `message` (one per message; `kind` is its `end_reason`), `finding`
(violation of the contract), `depth` (messages waiting and held at an event). Times are microseconds."""

TYPES: dict[DataType, pa.DataType] = {BooleanType(): pa.bool_(), LongType(): pa.int64(), StringType(): pa.string()}
FLUSH_ROWS = 50_000
"""Rows gathered before they are passed to Spark."""


def sweep(timeline: DataFrame, stuck_seconds: float) -> DataFrame:
    """Return the rows of `SWEEP_SCHEMA` for a `timeline`."""
    # mapInArrow keeps partitions whole: one call gets all events of a queue, in order.
    return timeline.mapInArrow(partial(sweep_batches, stuck_limit=int(stuck_seconds * 1e6)), SWEEP_SCHEMA)


def sweep_batches(batches: Iterable[pa.RecordBatch], stuck_limit: int) -> Iterator[pa.RecordBatch]:
    # Nothing here makes cycles, and the garbage collector would scan all waiting messages again and again.
    gc.disable()
    try:
        yield from _sweep(batches, stuck_limit)
    finally:
        gc.enable()


def _sweep(batches: Iterable[pa.RecordBatch], stuck_limit: int) -> Iterator[pa.RecordBatch]:
    removed = RemovedMessages()
    accounts: dict[str, QueueAudit] = {}
    for batch in batches:
        names = batch.column(0).dictionary_encode()
        batch_accounts = []
        for name in names.dictionary.to_pylist():
            if name not in accounts:
                accounts[name] = QueueAudit(removed, stuck_limit)
            batch_accounts.append(accounts[name])
        indices = names.indices.to_numpy(zero_copy_only=False).tolist()
        rest = [column.to_numpy(zero_copy_only=False).tolist() for column in batch.columns[1:]]
        _process([batch_accounts[index] for index in indices], rest)
        for name in names.dictionary.to_pylist():
            if len(accounts[name].finished) + len(accounts[name].findings) > FLUSH_ROWS:
                yield from _flush(name, accounts[name])
    for name, account in accounts.items():
        yield from _flush(name, account)
        yield from _table(
            "depth",
            {
                "queue": [name] * len(account.depth_points),
                **_columns(("event", "at", "waiting", "held"), account.depth_points),
            },
        )


def _process(accounts: list[QueueAudit], columns: list[list[Any]]) -> None:
    """Process events, with one call each and no lookup by kind: this loop takes most of an audit's time."""
    accepted, dispatched, started, acknowledged, returned, recovered, last_of_events = map(
        int,
        (
            *(EventCode.ACCEPTED, EventCode.DISPATCHED, EventCode.STARTED, EventCode.ACKNOWLEDGED),
            EventCode.RETURNED,
            EventCode.RECOVERED,
            EventCode.STARTED,
        ),
    )
    for account, event, at, code, sequence, consumer, number, persistent, visible_event, visible_at, detail_code in zip(
        accounts, *columns, strict=True
    ):
        if account.committing:
            account.become_visible(event)
        if account.expected is not None and code != recovered and code <= last_of_events:
            account.resolve_recovered(at)
        if code == accepted:
            message = AuditedMessage(sequence, number, persistent, visible_event, visible_at, detail_code)
            account.on_accepted(event, at, message)
        elif code == dispatched:
            account.on_dispatched(event, at, sequence, consumer)
        elif code == acknowledged:
            account.end_message(event, at, sequence, EventCode.ACKNOWLEDGED)
        elif code == started:
            account.on_started(event, at, sequence, consumer)
        elif code == returned:
            account.on_returned(event, at, sequence, number, detail_code)
        else:
            _process_rare(account, RareEvent(event, at, code, sequence, consumer, number, visible_at, detail_code))
            if code > last_of_events:
                continue
        account.tick += 1
        if not account.tick & account.mask:
            account.mark_depth(event, at)


class RareEvent(NamedTuple):
    event: int
    at: int
    code: int
    sequence: int
    consumer: int
    number: int
    visible_at: int
    detail_code: int


def _process_rare(account: QueueAudit, rare: RareEvent) -> None:
    event, at, code, sequence, consumer, number, visible_at, detail_code = rare
    match code:
        case EventCode.EXPIRED | EventCode.DEAD_LETTERED | EventCode.MOVED | EventCode.REMOVED:
            account.end_message(event, at, sequence, EventCode(code), has_cause=bool(detail_code))
        case EventCode.PAUSED | EventCode.RESUMED:
            account.on_paused(event, at, is_paused=code == EventCode.PAUSED)
        case EventCode.SUBSCRIBED:
            account.on_subscribed(event, at, consumer, number, ConsumerFlags(detail_code), sequence)
        case EventCode.WINDOW:
            account.on_window_changed(event, at, consumer, number)
        case EventCode.REQUESTED:
            account.on_requested(event, at, consumer, number)
        case EventCode.UNSUBSCRIBED:
            account.on_unsubscribed(event, at, consumer)
        case EventCode.RECOVERED:
            account.on_recovered(event, at, number)
        case EventCode.DRAINED:
            account.on_drained(event, at)
        case EventCode.DELAYED | EventCode.BLOCKING:
            account.on_delayed(event, at, sequence, number, detail_code, is_blocking=code == EventCode.BLOCKING)
        case EventCode.ENDED:
            account.on_queue_ended(event, at)
        case EventCode.RUN_STARTED:
            account.on_run_started(event, at, number, visible_at)
        case EventCode.GAP:
            account.on_gap(event)
        case EventCode.FINISHED:
            account.finish(event, at)


def _flush(queue: str, account: QueueAudit) -> Iterator[pa.RecordBatch]:
    """Yield the ended messages and the findings since the last flush."""
    finished, account.finished = account.finished, []
    findings, account.findings = account.findings, []
    for start in range(0, len(finished), FLUSH_ROWS):
        some = finished[start : start + FLUSH_ROWS]
        yield from _table(
            "message",
            {
                "queue": [queue] * len(some),
                **_attributes(_MESSAGE, some),
            },
        )
    for start in range(0, len(findings), FLUSH_ROWS):
        several = findings[start : start + FLUSH_ROWS]
        yield from _table("finding", {"queue": [queue] * len(several), **_attributes(_FINDING, several)})


_MESSAGE = {
    "kind": "end_reason",
    "wait": "wait",
    "hold": "hold",
    "sequence": "sequence",
    "priority": "priority",
    "persistent": "is_persistent",
    "arrival": "arrival",
    "delivery": "delivery",
    "deliveries": "deliveries",
    "attempts": "attempts",
}
_FINDING = {
    name: name
    for name in (
        "kind",
        "event",
        "at",
        "sequence",
        "priority",
        "persistent",
        "consumer",
        "overtaken_sequence",
        "overtaken_priority",
        "count",
        "duration",
        "detail",
    )
}


def _attributes(names: dict[str, str], things: list[AuditedMessage] | list[Finding]) -> dict[str, list[Any]]:
    return {column: list(map(attrgetter(name), things)) for column, name in names.items()}


def _columns(names: tuple[str, ...], rows: Sequence[tuple[int, ...]]) -> dict[str, list[Any]]:
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}


def _table(row: str, columns: dict[str, list[Any]]) -> Iterator[pa.RecordBatch]:
    length = len(columns["queue"])
    if not length:
        return
    arrays = []
    for field in SWEEP_SCHEMA.fields:
        kind = TYPES[field.dataType]
        if field.name == "row":
            arrays.append(pa.repeat(pa.scalar(row, kind), length))
        elif field.name in columns:
            arrays.append(pa.array(columns[field.name], kind))
        else:
            arrays.append(pa.nulls(length, kind))
    yield pa.RecordBatch.from_arrays(arrays, names=SWEEP_SCHEMA.names)
