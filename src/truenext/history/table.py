"""History as an Arrow table, made from the broker's history files. schema.py describes the columns.

This file needs numpy and pyarrow (`pip install 'truenext[spark]'`). A broker works without them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from truenext.history import schema
from truenext.history.files import EventBlock, HistoryChunk, blocks_of
from truenext.model.events import BROKER, COLUMNS, NO_WINDOW, PERSISTENT_FLAG, REASONS, SUBSCRIPTION_MODES, EventKind

_ARROW_TYPES = {
    "bigint": pa.int64(),
    "int": pa.int32(),
    "tinyint": pa.int8(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}
SCHEMA = pa.schema(
    [
        pa.field(column.name, _ARROW_TYPES[column.type], nullable=column.name not in schema.REQUIRED)
        for column in schema.COLUMNS
    ]
)

_KINDS = [kind.label for kind in EventKind]
_SUBSCRIBED = (EventKind.SUBSCRIBED, EventKind.SUBSCRIBED_EXCLUSIVE)
_CONSUMER_KINDS = (*_SUBSCRIBED, EventKind.UNSUBSCRIBED, EventKind.WINDOW, EventKind.REQUESTED)
"""Kinds of events whose blocks have the number of the consumer in `other`."""
_WITH_CAUSE = (EventKind.RETURNED, EventKind.DEAD_LETTERED, EventKind.HANDLED)
_NUMPY: dict[str, np.dtype[Any]] = {
    "Q": np.dtype("<u8"),
    "I": np.dtype("<u4"),
    "B": np.dtype("u1"),
    "b": np.dtype("i1"),
}
_Array = np.ndarray[Any, Any]


def with_all_columns(table: pa.Table) -> pa.Table:
    """Return the events of a Parquet file with the columns of SCHEMA. Those that an earlier version lacks are null."""
    columns = [
        table[field.name].cast(field.type) if field.name in table.column_names else pa.nulls(len(table), field.type)
        for field in SCHEMA
    ]
    return pa.table(columns, schema=SCHEMA)


def arrow_table_of(chunks: Iterable[HistoryChunk]) -> pa.Table:
    """Return a table with one row for each event, in order. `chunks` are all chunks of one file: a file has the names
    of its queues."""
    names: dict[int, str] = {}
    blocks: list[EventBlock] = []
    first_events: list[int] = []
    runs: list[int] = []
    causes = _CauseTexts()
    for chunk in chunks:
        causes.start_chunk()
        event = chunk.first_event
        for block in blocks_of(chunk):
            if block.kind == EventKind.NAME:
                names[block.queue] = bytes(block.columns).decode()
                continue
            if block.kind == EventKind.CAUSE:
                causes.add(block.queue, bytes(block.columns).decode())
                continue
            blocks.append(block)
            causes.by_block.append(causes.at(block.other) if block.kind in _WITH_CAUSE else 0)
            first_events.append(event)
            runs.append(chunk.run)
            event += block.events

    counts = np.array([block.events for block in blocks], dtype=np.int64)
    starts = np.cumsum(counts) - counts
    total = int(counts.sum())

    def repeat(values: list[int], dtype: str = "i8") -> _Array:
        """Return a column that has, for each event, the value of the event's block."""
        repeated: _Array = np.repeat(np.array(values, dtype=dtype), counts)
        return repeated

    kind = repeat([block.kind for block in blocks], "u1")
    other = repeat([block.other for block in blocks])
    code = repeat([block.code for block in blocks], "u1")
    own = _own_columns(blocks, starts, total)
    is_kind = {one: kind == one for one in EventKind}
    accepted = is_kind[EventKind.ACCEPTED] | is_kind[EventKind.ACCEPTED_OF_GROUP]

    broker = int(names.pop(BROKER, "0"), 16)
    names_of = _NumberedNames(names)
    stores = [block.queue if block.kind == EventKind.RUN_STARTED else broker for block in blocks]
    stores_of = _NumberedNames({store: f"{store:08x}" for store in stores if store})
    queue = repeat([block.queue for block in blocks])
    columns = {
        "event": np.arange(total) - np.repeat(starts, counts) + repeat(first_events),
        "run": repeat(runs, "i4"),
        "at": pa.array(repeat([block.at for block in blocks])).cast(pa.timestamp("us", tz="UTC")),
        "kind": pa.DictionaryArray.from_arrays(pa.array(kind, pa.uint8()), _KINDS),
        "queue": names_of(queue, ~is_kind[EventKind.RUN_STARTED]),
        "sequence": _where(own["sequence"], _has_column(is_kind, "sequence"), pa.int64()),
        "priority": _where(
            np.where(accepted, own["flags"] % PERSISTENT_FLAG, own["priority"]),
            accepted | _has_column(is_kind, "priority"),
            pa.int8(),
        ),
        "persistent": _where(own["flags"] >= PERSISTENT_FLAG, accepted, pa.bool_()),
        "size": _where(own["size"], accepted, pa.int32()),
        "batch": _where(other, accepted | is_kind[EventKind.COMMITTED], pa.int64()),
        "consumer": _where(
            np.where(_has_column(is_kind, "consumer"), own["consumer"], other),
            _has_column(is_kind, "consumer") | np.logical_or.reduce([is_kind[kind] for kind in _CONSUMER_KINDS]),
            pa.int64(),
        ),
        "deliveries": _where(own["deliveries"], is_kind[EventKind.DISPATCHED], pa.int32()),
        "attempts": _where(own["attempts"], is_kind[EventKind.RETURNED], pa.int32()),
        "reason": _coded(code, REASONS, is_kind[EventKind.RETURNED] | is_kind[EventKind.RUN_STARTED]),
        "mode": _coded(code, SUBSCRIPTION_MODES, np.logical_or.reduce([is_kind[kind] for kind in _SUBSCRIBED])),
        "window": _where(own["window"], _has_column(is_kind, "window") & (own["window"] != NO_WINDOW), pa.int32()),
        "target_queue": names_of(own["target_queue"], _has_column(is_kind, "target_queue")),
        "target_sequence": _where(own["target_sequence"], own["target_sequence"] > 0, pa.int64()),
        "count": _where(
            np.where(is_kind[EventKind.REQUESTED], own["count"], other),
            is_kind[EventKind.RECOVERED] | is_kind[EventKind.REQUESTED],
            pa.int64(),
        ),
        "group": _where(own["group"], is_kind[EventKind.ACCEPTED_OF_GROUP], pa.int64()),
        "cause": causes(repeat(causes.by_block)),
        "epoch": _where(other, is_kind[EventKind.RUN_STARTED] & (other > 0), pa.int64()),
        "store": stores_of(repeat(stores), np.ones(total, dtype=bool)),
    }
    return pa.table([_column(columns[field.name], field.type) for field in SCHEMA], schema=SCHEMA)


def _own_columns(blocks: list[EventBlock], starts: _Array, total: int) -> dict[str, _Array]:
    """Return the columns in COLUMNS by name, each with a value for every event: 0 if the event's kind lacks the
    column."""
    columns = {name: np.zeros(total, _NUMPY[type_]) for kind in EventKind for name, type_ in COLUMNS[kind]}
    for block, start in zip(blocks, starts.tolist(), strict=True):
        at = 0
        for name, type_ in COLUMNS[EventKind(block.kind)]:
            dtype = _NUMPY[type_]
            columns[name][start : start + block.events] = np.frombuffer(block.columns, dtype, block.events, at)
            at += block.events * dtype.itemsize
    return columns


class _NumberedNames:
    """Map from numbers, such as those of queues, to their names. 0, and a number without a name, become null."""

    def __init__(self, names: dict[int, str]) -> None:
        self._numbers = np.array(sorted(names), dtype="i8")
        self._names = pa.array([names[number] for number in sorted(names)], pa.string())

    def __call__(self, numbers: _Array, valid: _Array) -> pa.Array:
        at = np.searchsorted(self._numbers, numbers)
        known = np.zeros(len(numbers), dtype=bool)
        inside = at < len(self._numbers)
        known[inside] = self._numbers[at[inside]] == numbers[inside]
        return pa.DictionaryArray.from_arrays(pa.array(at, pa.int64(), mask=~(known & valid)), self._names)


class _CauseTexts:
    """Texts of causes. Each chunk numbers its causes from 1 on; 0 is no cause."""

    def __init__(self) -> None:
        self._texts = [""]
        self._chunk_indices: dict[int, int] = {}
        self.by_block: list[int] = []
        """Index in `_texts` of the cause of each block; 0 is no cause."""

    def start_chunk(self) -> None:
        self._chunk_indices = {0: 0}

    def add(self, number: int, text: str) -> None:
        self._chunk_indices[number] = len(self._texts)
        self._texts.append(text)

    def at(self, number: int) -> int:
        return self._chunk_indices[number]

    def __call__(self, at: _Array) -> pa.Array:
        return pa.DictionaryArray.from_arrays(
            pa.array(at, pa.int64(), mask=at == 0), pa.array(self._texts, pa.string())
        )


def _has_column(is_kind: dict[EventKind, _Array], column: str) -> _Array:
    found: _Array = np.logical_or.reduce([is_kind[kind] for kind in EventKind if column in dict(COLUMNS[kind])])
    return found


def _where(values: _Array, valid: _Array, type_: pa.DataType) -> pa.Array:
    return pa.array(values, mask=~valid).cast(type_)


def _coded(codes: _Array, labels: tuple[str, ...], valid: _Array) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.uint8(), mask=~valid), list(labels))


def _column(values: Any, type_: pa.DataType) -> pa.Array:
    return pa.array(values).cast(type_) if isinstance(values, np.ndarray) else values.cast(type_)
