"""Sweep over sections: audits the sections of queues that are cut, each from its cut.

rows of cuts and events ──▶ one QueueAudit for each section ──▶ rows of the sweep, and the end of each section

A section counts deliveries anew, and does not know where a message of an earlier one arrived. So each section also says
what it had counted, and the positions of the messages that it leaves to the next ones (section_results.py).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from truenext.spark.audit.cut import (
    WHOLE,
    ConsumerRow,
    CutCode,
    IdleTime,
    MessageRow,
    QueueCut,
    QueueRow,
    SectionRow,
    depth_mask,
)
from truenext.spark.audit.model import NEVER, MessageState, TimelineRow
from truenext.spark.audit.queue_audit import QueueAudit
from truenext.spark.audit.section_plan import SectionPlan
from truenext.spark.audit.sweep import FLUSH_ROWS, SWEEP_SCHEMA, depth_rows, flush, process, table_rows
from truenext.spark.audit.timeline import COLUMNS, partitions

encode = msgspec.msgpack.encode

SECTION_SCHEMA = pa.schema(
    [
        *SWEEP_SCHEMA,
        *(pa.field(name, pa.int64()) for name in ("section", "code", "number")),
        pa.field("payload", pa.binary()),
        pa.field("group", pa.int64()),
        pa.field("can_be_untouched", pa.bool_()),
    ]
)
"""Schema of the rows of sections: `section` is null for queues that are not cut. Three more kinds of rows: `end` has
the idle times at the edges of a section, and its first dispatches in `delivery`; `position` has the positions that a
section has counted of a message which it leaves to later ones; `saved` is a row of the cut at the end of the history,
with a CutCode in `code`, and 1 in `number` for a message that is expiring, and for a queue whose untouched messages are
in doubt. `can_be_untouched` is true for a saved message that can be; if it waits, it has a `priority` and a `group`."""


class Stop(NamedTuple):
    """Place where the history ends, for now or for good."""

    event: int
    """First event that the history does not have."""
    at: int
    """Time of the last event, in microseconds."""


def sweep_sections(
    rows: DataFrame,
    cuts: DataFrame | None,
    plan: SectionPlan | None,
    stuck_limit: int,
    *,
    fresh: SectionRow = WHOLE,
    stop: Stop | None = None,
) -> DataFrame:
    """Audit the `rows` of all queues, of those in `plan` by section, and return rows with SECTION_SCHEMA. `fresh` is
    the beginning of queues without rows in `cuts`. With `stop` the rows have the cut there."""
    number = partitions(rows)
    # Sections go to the tasks in turn, as a hash would give some tasks several.
    task = F.coalesce(F.col("section"), F.pmod(F.hash("queue"), F.lit(number)))
    sectioned = rows.withColumn("section", F.lit(None).cast("bigint")) if plan is None else plan.with_sections(rows)
    audit = partial(sweep_batches, stuck_limit=stuck_limit, fresh=fresh, stop=stop)
    if cuts is None:
        sectioned = sectioned.withColumn("payload", F.lit(None).cast("binary"))
    else:
        sectioned = sectioned.unionByName(cuts, allowMissingColumns=True)
    return (
        sectioned.select(*COLUMNS, "section", "payload")
        .withColumn("task", F.pmod(task, F.lit(number)).cast("int"))
        .repartitionById(number, F.col("task"))
        .drop("task")
        .sortWithinPartitions("event")
        .mapInArrow(audit, from_arrow_schema(SECTION_SCHEMA))
    )


def left_rows(left: DataFrame, ends: Mapping[str, Stop], *, is_saved: bool) -> DataFrame:
    """Return the last rows, with SECTION_SCHEMA, of messages that are LEFT: rows `saved` if `is_saved`, else `message`.
    `ends` has the end of the history by queue."""
    finish = partial(_finish_left, ends=ends, is_saved=is_saved)
    return left.mapInArrow(finish, from_arrow_schema(SECTION_SCHEMA))


# ---- In Spark's workers ----


def sweep_batches(
    batches: Iterable[pa.RecordBatch], stuck_limit: int, fresh: SectionRow = WHOLE, stop: Stop | None = None
) -> Iterator[pa.RecordBatch]:
    # See sweep.py.
    gc.disable()
    try:
        yield from _sweep(batches, partial(_SectionAudit, stuck_limit=stuck_limit, fresh=fresh, stop=stop))
    finally:
        gc.enable()


def _sweep(
    batches: Iterable[pa.RecordBatch], start: Callable[[tuple[str, int]], _SectionAudit]
) -> Iterator[pa.RecordBatch]:
    running: dict[tuple[str, int], _SectionAudit] = {}
    for batch in batches:
        keys, indices = _keys(batch)
        audits = [running.setdefault(key, start(key)) for key in keys]
        is_cut = np.asarray(batch.column("payload").is_valid())
        if is_cut.any():
            cut_rows = batch.filter(pa.array(is_cut))
            names = ("code", "sequence", "number", "payload")
            columns = [cut_rows.column(name).to_pylist() for name in names]
            for index, *row in zip(indices[is_cut].tolist(), *columns, strict=True):
                audits[index].add(*row)
            batch, indices = batch.filter(pa.array(~is_cut)), indices[~is_cut]
        if batch.num_rows:
            used = {index: audits[index] for index in np.unique(indices).tolist()}
            queue_audits = {index: each.audit for index, each in used.items()}
            columns = [batch.column(name).to_numpy(zero_copy_only=False).tolist() for name in TimelineRow._fields]
            process([queue_audits[index] for index in indices.tolist()], columns)
            last = columns[0][-1]
            for each in used.values():
                yield from each.flush(at_least=FLUSH_ROWS)
            for key in [key for key, each in running.items() if each.end <= last]:
                yield from running.pop(key).finish()
    for each in running.values():
        yield from each.finish()


def _finish_left(
    batches: Iterable[pa.RecordBatch], ends: Mapping[str, Stop], is_saved: bool
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        keys, indices = _keys(batch)
        # The audit of a message that is LEFT has nothing but its state at the end.
        audits = [_SectionAudit(key, 0, SectionRow(ends[key[0]].event, QueueRow(), NEVER, 0), None) for key in keys]
        for index, payload in zip(indices.tolist(), batch.column("payload").to_pylist(), strict=True):
            audits[index].add(CutCode.MESSAGE, -1, -1, payload)
        for each in audits:
            yield from each.finish_left(ends[each.queue], is_saved=is_saved)


def _keys(batch: pa.RecordBatch) -> tuple[list[tuple[str, int]], np.ndarray]:
    """Return the queues and sections of a batch, -1 for none, and which of them each row has."""
    queues = batch.column("queue").dictionary_encode()
    sections = batch.column("section").fill_null(-1).to_numpy(zero_copy_only=False)
    names = queues.dictionary.to_pylist()
    numbers, indices = np.unique(
        (sections + 1) * len(names) + queues.indices.to_numpy(zero_copy_only=False), return_inverse=True
    )
    return [(names[each % len(names)], each // len(names) - 1) for each in numbers.tolist()], indices


class _SectionAudit:
    """Audit of a section, or of a whole queue that is not cut."""

    def __init__(self, key: tuple[str, int], stuck_limit: int, fresh: SectionRow, stop: Stop | None) -> None:
        self.queue, section = key
        self.section = None if section < 0 else section
        self.stuck_limit = stuck_limit
        self.start = self.fresh = fresh
        self.has_gap_dispatch = False
        self.consumers: list[ConsumerRow] = []
        self.messages: list[MessageRow] = []
        self.holders: dict[int, int] = {}
        self.untouched = 0
        self._stop = stop
        self._audit: QueueAudit | None = None

    @property
    def end(self) -> int:
        return self.start.end

    def add(self, code: int, sequence: int, number: int, payload: bytes) -> None:
        match code:
            case CutCode.SECTION:
                self.start = msgspec.msgpack.decode(payload, type=SectionRow)
            case CutCode.CONSUMER:
                self.consumers.append(msgspec.msgpack.decode(payload, type=ConsumerRow))
            case CutCode.MESSAGE | CutCode.SAVED:
                message = msgspec.msgpack.decode(payload, type=MessageRow)
                self.messages.append(message)
                if code == CutCode.SAVED:
                    self.holders[sequence] = message.subscription
            case CutCode.HOLDER:
                self.holders[sequence] = number
            case CutCode.GAP_DISPATCH:
                self.has_gap_dispatch = True
            case CutCode.UNTOUCHED:
                self.untouched += number

    @property
    def audit(self) -> QueueAudit:
        if self._audit is None:
            self._audit = self._begin()
        return self._audit

    def _begin(self) -> QueueAudit:
        for each in self.messages:
            each.subscription = self.holders.get(each.sequence, 0)
        # As in QueueAudit.save: this order decides which of several messages a finding names.
        self.messages.sort(key=lambda each: each.sequence)
        self.consumers.sort(key=lambda each: each.since)
        queue = msgspec.structs.replace(self.start.queue)
        queue.knows_exclusive |= self.has_gap_dispatch
        queue.refresh_start(self.fresh.queue)
        cut = QueueCut(self.start.first, queue, self.consumers, self.messages, self.start.idle, self.untouched)
        audit = QueueAudit.begin(cut, self.stuck_limit)
        self.messages, self.consumers = [], []
        return audit

    def flush(self, at_least: int = 0) -> Iterator[pa.RecordBatch]:
        audit = self.audit
        if len(audit.finished) + len(audit.findings) >= at_least:
            yield from map(self._extended, flush(self.queue, audit))

    def _extended(self, rows: pa.RecordBatch, **more: Sequence[object]) -> pa.RecordBatch:
        """Return rows of the sweep with SECTION_SCHEMA."""
        columns = {"section": [self.section] * rows.num_rows, **more}
        nulls = [None] * rows.num_rows
        arrays = [pa.array(columns.get(each.name, nulls), each.type) for each in [*SECTION_SCHEMA][rows.num_columns :]]
        return pa.RecordBatch.from_arrays([*rows.columns, *arrays], schema=SECTION_SCHEMA)

    def finish(self) -> Iterator[pa.RecordBatch]:
        audit = self.audit
        stop = self._stop if self.end == NEVER else None
        if stop is not None:
            audit.stop(*stop)
        if self.section is not None:
            mask = depth_mask(self.start.total)
            audit.depth_points = [point for point in audit.depth_points if not point[0] & mask]
        yield from self.flush()
        yield from map(self._extended, depth_rows(self.queue, audit))
        if self.section is not None:
            yield from map(self._extended, chain(self._end_row(), self._position_rows()))
        if stop is not None:
            cut = audit.save(stop.event)
            yield from chain(self._saved_section(cut), self._saved_messages(cut))

    def finish_left(self, end: Stop, *, is_saved: bool) -> Iterator[pa.RecordBatch]:
        """Yield the rows of messages that are LEFT: the audit has no others, and begins at the end of the history."""
        if is_saved:
            yield from self._saved_messages(self.audit.save(end.event))
        else:
            self.audit.finish(*end)
            yield from self.flush()

    def _end_row(self) -> Iterator[pa.RecordBatch]:
        edges = self.audit.edges
        until, waiting = edges.carried_end if edges.carried_end is not None else (None, self.audit.waiting)
        row: dict[str, object] = {"delivery": self.audit.first_dispatches, "duration": until, "waiting": waiting}
        row["held"] = int(edges.is_carried)
        if edges.begun is not None:
            names = {"is_persistent": "persistent"}
            row |= {names.get(name, name): getattr(edges.begun, name) for name in IdleTime.__struct_fields__}
        yield from table_rows("end", self.queue, 1, {name: [value] for name, value in row.items()})

    def _position_rows(self) -> Iterator[pa.RecordBatch]:
        left = [
            (each.sequence, max(each.arrival, 0), max(each.delivery, 0))
            for each in chain(self.audit.messages.values(), self.audit.expiring.values())
            if each.arrival > 0 or each.delivery > 0
        ]
        for start in range(0, len(left), FLUSH_ROWS):
            some = left[start : start + FLUSH_ROWS]
            names = ("sequence", "arrival", "delivery")
            columns = dict(zip(names, map(list, zip(*some, strict=True)), strict=True))
            yield from table_rows("position", self.queue, len(some), columns)

    def _saved_section(self, cut: QueueCut) -> Iterator[pa.RecordBatch]:
        section = SectionRow(cut.event, cut.queue, NEVER, 0, cut.idle)
        coded = [(CutCode.SECTION, section), *((CutCode.CONSUMER, each) for each in cut.consumers)]
        in_doubt = int(self.audit.untouched_in_doubt > 0)
        yield self._saved(len(coded), {}, {"number": [in_doubt, *(0 for _ in coded[1:])]}, coded=coded)

    def _saved_messages(self, cut: QueueCut) -> Iterator[pa.RecordBatch]:
        for start in range(0, len(cut.messages), FLUSH_ROWS):
            some = cut.messages[start : start + FLUSH_ROWS]
            untouched = [each.can_be_untouched(cut.event) for each in some]
            lanes = [
                (each.priority, each.group) if can_be and each.state is MessageState.WAITING else (None, None)
                for each, can_be in zip(some, untouched, strict=True)
            ]
            columns: dict[str, list[Any]] = {
                "sequence": [each.sequence for each in some],
                "persistent": [each.is_persistent for each in some],
                "priority": [priority for priority, _ in lanes],
                "arrival": [each.arrival for each in some],
                "delivery": [each.delivery for each in some],
            }
            more: dict[str, Sequence[object]] = {
                "number": [int(each.is_expiring) for each in some],
                "group": [group for _, group in lanes],
                "can_be_untouched": untouched,
            }
            yield self._saved(len(some), columns, more, coded=[(CutCode.SAVED, each) for each in some])

    def _saved(
        self,
        length: int,
        columns: dict[str, list[Any]],
        more: Mapping[str, Sequence[object]],
        *,
        coded: Sequence[tuple[CutCode, msgspec.Struct]],
    ) -> pa.RecordBatch:
        """Return rows with values for columns of SWEEP_SCHEMA, and `more` of SECTION_SCHEMA."""
        (rows,) = table_rows("saved", self.queue, length, columns)
        codes, payloads = [int(code) for code, _ in coded], [encode(row) for _, row in coded]
        return self._extended(rows, code=codes, payload=payloads, **more)
