"""Results of a sweep: those of the sections of a queue are joined as if it had been audited whole.

rows of sections ──┬── end ───────▶ idle times that last over cuts, first dispatches before each section
                   ├── position ──▶ positions of messages that earlier sections have counted
                   └── saved ─────▶ the next cut, with these positions and idle times
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, groupby
from typing import NamedTuple

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from truenext.spark.audit.cut import CutCode, IdleEdges, IdleTime, MessageRow, SectionRow, join_idle_times
from truenext.spark.audit.cut_rows import CutHistory
from truenext.spark.audit.model import NEVER, Finding
from truenext.spark.audit.section_sweep import SECTION_SCHEMA, Stop
from truenext.spark.audit.sweep import table_rows
from truenext.spark.caching import cache_rows

_POSITIONS = ("arrival", "delivery")


class Swept(NamedTuple):
    """Result of a sweep over whole queues."""

    rows: DataFrame
    """Rows `message`, `finding` and `depth`, with the columns of SWEEP_SCHEMA."""
    saved: DataFrame
    """Rows `saved`, with those of SECTION_SCHEMA, if the history goes on."""
    cached: tuple[DataFrame, ...]


def uncut(rows: DataFrame) -> Swept:
    """Return the result of a sweep that has cut no queue."""
    rows = cache_rows(rows)
    is_saved = F.col("row") == "saved"
    return Swept(rows.where(~is_saved), rows.where(is_saved), (rows,))


def join_sections(rows: DataFrame, history: CutHistory, stuck_limit: int, stop: Stop | None = None) -> Swept:
    """Return the rows of all sections, which are cached, as those of one sweep over whole queues."""
    spark, plan = rows.sparkSession, history.plan
    ends = {end["section"]: end for end in rows.where(F.col("row") == "end").collect()}
    bases: list[int] = []
    found: list[tuple[str, Finding]] = []
    saved: dict[str, tuple[int, IdleTime | None]] = {}
    for queue, some in groupby(range(len(plan.sections)), key=lambda number: plan.sections[number].queue):
        numbers = [*some]
        total = history.dispatches_before(queue)
        for number in numbers:
            bases.append(total)
            total += ends[number]["delivery"]
        findings, idle = join_idle_times([_edges(ends[number].asDict()) for number in numbers], stuck_limit)
        if idle is not None and stop is not None and stop.at - idle.at > stuck_limit:
            findings.append(idle.finding(stop.at, ends[numbers[-1]]["waiting"]))
            idle.at = NEVER
        found += ((queue, each) for each in findings)
        saved[queue] = total, idle
    base_table = pa.table({"section": [*range(len(bases))], "base": bases})
    based = rows.join(F.broadcast(spark.createDataFrame(base_table)), "section", "left").withColumn(
        "delivery",
        F.when(F.col("delivery") > 0, F.col("delivery") + F.coalesce("base", F.lit(0))).otherwise(F.col("delivery")),
    )
    # Positions of the saved cut, which are lower than the numbers of later events.
    based = based.withColumns(
        {name: F.when(F.col(name) >= -history.after, F.abs(name)).otherwise(F.col(name)) for name in _POSITIONS}
    )
    is_far = F.coalesce(F.least(*_POSITIONS) < 0, F.lit(False))
    positions = (
        based.where(F.col("row") == "position")
        .groupBy("sequence")
        .agg(F.max("arrival").alias("true_arrival"), F.max("delivery").alias("true_delivery"))
    )
    known = based.where(F.col("row").isin("message", "finding", "depth", "saved"))
    far = known.where(is_far).join(positions, "sequence", "left")
    far = far.withColumns(
        {name: F.when(F.col(name) < 0, F.col(f"true_{name}")).otherwise(F.col(name)) for name in _POSITIONS}
    )
    # The others, which are most, are not cached again: each table reads them with the join to the small `base_table`.
    far = cache_rows(far.select(*SECTION_SCHEMA.names))
    far.count()
    joined = known.where(~is_far).select(*SECTION_SCHEMA.names).unionByName(far)
    is_saved = F.col("row") == "saved"
    saved_rows = joined.where(is_saved)
    if stop is not None:
        is_cut = F.col("section").isNotNull()
        placed = saved_rows.where(is_cut).mapInArrow(partial(_placed, saved=saved), from_arrow_schema(SECTION_SCHEMA))
        saved_rows = saved_rows.where(~is_cut).unionByName(placed)
    joined = joined.where(~is_saved)
    if found:
        joined = joined.unionByName(spark.createDataFrame(_finding_table(found)), allowMissingColumns=True)
    return Swept(joined, saved_rows, (rows, far))


def _placed(
    batches: Iterable[pa.RecordBatch], saved: Mapping[str, tuple[int, IdleTime | None]]
) -> Iterator[pa.RecordBatch]:
    """Write positions and idle times, which a section does not know, into the payloads of saved rows. `saved` has the
    first dispatches and the idle time of each queue."""
    for batch in batches:
        columns = [batch.column(name).to_pylist() for name in ("queue", "code", "payload", "arrival", "delivery")]
        payloads = []
        for queue, code, payload, arrival, delivery in zip(*columns, strict=True):
            if code == CutCode.SECTION:
                section = msgspec.msgpack.decode(payload, type=SectionRow)
                section.queue.first_dispatches, section.idle = saved[queue]
                payload = msgspec.msgpack.encode(section)
            elif code == CutCode.SAVED:
                message = msgspec.msgpack.decode(payload, type=MessageRow)
                message.arrival, message.delivery = arrival, delivery
                payload = msgspec.msgpack.encode(message)
            payloads.append(payload)
        at = SECTION_SCHEMA.get_field_index("payload")
        yield batch.set_column(at, SECTION_SCHEMA.field(at), pa.array(payloads, pa.binary()))


def _edges(end: dict[str, int]) -> IdleEdges:
    carried_end = None if end["duration"] is None else (end["duration"], end["waiting"])
    begun = None
    if end["event"] is not None:
        begun = IdleTime(end["event"], end["at"], end["sequence"], end["priority"], bool(end["persistent"]))
    return IdleEdges(carried_end, bool(end["held"]), begun)


def _finding_table(found: list[tuple[str, Finding]]) -> pa.Table:
    batches = (
        table_rows("finding", queue, 1, {name: [value] for name, value in msgspec.structs.asdict(each).items()})
        for queue, each in found
    )
    return pa.Table.from_batches([*chain.from_iterable(batches)])
