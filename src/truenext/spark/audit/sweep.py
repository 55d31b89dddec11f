"""Sweep: passes the events of a partition to the audits of its queues, and returns their results as rows."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema

from truenext.spark.audit.model import AuditedMessage, ConsumerFlags, EventCode, Finding
from truenext.spark.audit.queue_audit import QueueAudit

SWEEP_SCHEMA = pa.schema(
    {
        **dict.fromkeys(("row", "queue", "kind", "detail"), pa.string()),
        "persistent": pa.bool_(),
        **dict.fromkeys(
            (
                *("event", "at", "sequence", "priority", "consumer", "overtaken_sequence", "overtaken_priority"),
                *("count", "duration", "arrival", "delivery", "wait", "hold", "deliveries", "attempts"),
                *("waiting", "held"),
            ),
            pa.int64(),
        ),
    }
)
"""Schema of the sweep's rows. Column `row` has the kind of row: `message` (one for each message; `kind` is its
`end_reason`), `finding` (a violation of the contract), or `depth` (numbers of waiting and held messages at an event).
Times are in microseconds."""

FLUSH_ROWS = 50_000
"""Number of rows that are gathered before Spark gets them."""


def sweep(timeline: DataFrame, stuck_seconds: float) -> DataFrame:
    """Audit a `timeline`, and return the rows, which have `SWEEP_SCHEMA`."""
    # mapInArrow keeps partitions whole: one call gets all events of a queue, in order.
    sweep_all = partial(sweep_batches, stuck_limit=int(stuck_seconds * 1e6))
    return timeline.mapInArrow(sweep_all, from_arrow_schema(SWEEP_SCHEMA))


def sweep_batches(batches: Iterable[pa.RecordBatch], stuck_limit: int) -> Iterator[pa.RecordBatch]:
    # Nothing here makes cycles, and the garbage collector would scan all waiting messages again and again.
    gc.disable()
    try:
        yield from _sweep(batches, stuck_limit)
    finally:
        gc.enable()


def _sweep(batches: Iterable[pa.RecordBatch], stuck_limit: int) -> Iterator[pa.RecordBatch]:
    accounts: dict[str, QueueAudit] = {}
    for batch in batches:
        names = batch.column(0).dictionary_encode()
        batch_accounts = []
        for name in names.dictionary.to_pylist():
            if name not in accounts:
                accounts[name] = QueueAudit(stuck_limit)
            batch_accounts.append(accounts[name])
        indices = names.indices.to_numpy(zero_copy_only=False).tolist()
        rest = [column.to_numpy(zero_copy_only=False).tolist() for column in batch.columns[1:]]
        process([batch_accounts[index] for index in indices], rest)
        for name in names.dictionary.to_pylist():
            if len(accounts[name].finished) + len(accounts[name].findings) > FLUSH_ROWS:
                yield from flush(name, accounts[name])
    for name, account in accounts.items():
        yield from flush(name, account)
        yield from depth_rows(name, account)


def process(accounts: list[QueueAudit], columns: list[list[Any]]) -> None:
    """Pass events to the audits. There is one call for each event, and no lookup by kind, because most of an audit's
    time is spent here."""
    accepted, dispatched, acknowledged = map(int, (EventCode.ACCEPTED, EventCode.DISPATCHED, EventCode.ACKNOWLEDGED))
    started, returned, recovered = map(int, (EventCode.STARTED, EventCode.RETURNED, EventCode.RECOVERED))
    last_of_events = int(EventCode.REPORTED)
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
            account.on_dispatched(event, at, sequence, consumer, number)
        elif code == acknowledged:
            account.end_message(event, at, sequence, EventCode.ACKNOWLEDGED, number)
        elif code == started:
            account.on_started(event, at, sequence, consumer, number)
        elif code == returned:
            account.on_returned(event, at, sequence, number, detail_code)
        else:
            _process_rare(account, (event, at, code, sequence, consumer, number, visible_at, detail_code))
            if code > last_of_events:
                continue
        account.tick += 1
        if not account.tick & account.mask:
            account.mark_depth(event, at)


def _process_rare(account: QueueAudit, rare: tuple[int, ...]) -> None:
    event, at, code, sequence, consumer, number, visible_at, detail_code = rare
    match code:
        case EventCode.EXPIRED | EventCode.DEAD_LETTERED | EventCode.HANDLED | EventCode.MOVED | EventCode.REMOVED:
            account.end_message(event, at, sequence, EventCode(code), number, has_cause=bool(detail_code))
        case EventCode.REPORTED:
            account.on_reported(event, at, sequence, number)
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


def depth_rows(queue: str, account: QueueAudit) -> Iterator[pa.RecordBatch]:
    names = ("event", "at", "waiting", "held")
    points = {column: [point[at] for point in account.depth_points] for at, column in enumerate(names, 1)}
    yield from table_rows("depth", queue, len(account.depth_points), points)


def flush(queue: str, account: QueueAudit) -> Iterator[pa.RecordBatch]:
    """Yield the rows of ended messages and findings that have come since the last flush."""
    finished, account.finished = account.finished, []
    findings, account.findings = account.findings, []
    of_rows: tuple[tuple[str, dict[str, str], list[Any]], ...] = (
        ("message", MESSAGE_COLUMNS, finished),
        ("finding", _FINDING, findings),
    )
    for row, attributes, things in of_rows:
        for start in range(0, len(things), FLUSH_ROWS):
            some = things[start : start + FLUSH_ROWS]
            columns = {column: list(map(attrgetter(name), some)) for column, name in attributes.items()}
            yield from table_rows(row, queue, len(some), columns)


MESSAGE_COLUMNS = {
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
"""Attribute of AuditedMessage in each column of a row `message`."""
_FINDING = {name: name for name in Finding.__struct_fields__}


def table_rows(row: str, queue: str, length: int, columns: dict[str, list[Any]]) -> Iterator[pa.RecordBatch]:
    """Yield one batch of `length` rows, or nothing if there are none. Columns that are not given are null."""
    if length:
        nulls = {field.name: pa.nulls(length, field.type) for field in SWEEP_SCHEMA}
        names = {"row": pa.repeat(row, length), "queue": pa.repeat(queue, length)}
        yield pa.RecordBatch.from_pydict(nulls | names | columns, SWEEP_SCHEMA)
