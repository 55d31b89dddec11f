"""Events of messages after their end, such as a dispatch of an acknowledged message, with the code of that end.

Spark finds the messages that have such events by one aggregate over each message, and a right history has none.
`Lifetime` then follows only these messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import groupby
from operator import attrgetter, itemgetter, or_

import msgspec
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from truenext.spark.audit.cut import MessageRow
from truenext.spark.audit.lifetime import AFTER_END_CODES, ENDS, MESSAGE_CODES, Lifetime
from truenext.spark.audit.model import EventCode, StartFlag, TimelineRow
from truenext.spark.audit.section_plan import SectionPlan
from truenext.spark.audit.timeline import CODES, kinds
from truenext.spark.caching import cache_rows

ROWS_PER_BATCH = 10_000
"""Number of rows that are handed to Spark at once, so that they take little memory."""


@dataclass(frozen=True)
class Before:
    """History before the events that are audited, for an audit that goes on from a cut."""

    events: DataFrame
    """Events before the cut, as far as they have not been deleted."""
    kept: DataFrame
    """Messages that exist at the cut (`SavedAudit.kept`)."""
    starts: Sequence[TimelineRow]


def after_ends(
    events: DataFrame, found: DataFrame, starts: Sequence[TimelineRow], before: Before | None = None
) -> DataFrame | None:
    """Return `event` and `end_code` for each event of a message after its end, for those events that are judged by it.
    None if there are none. `found` are the messages from `outstanding`, `starts` the starts of runs."""
    used = cache_rows(found.where("is_used or is_unknown").select("sequence", "is_unknown"))
    # Not isEmpty, which looks at one partition after the other.
    counts = used.groupBy("is_unknown").count().collect()
    if not counts:
        used.unpersist()
        return None
    own = _events_of(events, used)
    if before is not None:
        own = own.unionByName(_events_of(before.kept, used), allowMissingColumns=True)
        starts = [*before.starts, *starts]
        if any(row["is_unknown"] for row in counts):
            # Rare: all of the earlier history is searched for these messages.
            own = own.unionByName(_events_of(before.events, used.where("is_unknown")), allowMissingColumns=True)
            events = before.events.unionByName(events)
    else:
        own = own.withColumn("payload", F.lit(None).cast("binary"))
    own = cache_rows(own)
    marks: defaultdict[str, list[TimelineRow]] = defaultdict(list)
    queues = own.select("queue").distinct()
    for queue, event in _ended(events).join(F.broadcast(queues), "queue").collect():
        marks[queue].append(TimelineRow(event, 0, EventCode.ENDED))
    follow = partial(_follow, starts=starts, ended=dict(marks))
    found_codes = cache_rows(
        own.select(
            *("queue", "sequence", "event"),
            _code().alias("code"),
            F.coalesce("priority", F.lit(0)).cast("bigint").alias("number"),
            F.coalesce("persistent", F.lit(False)).alias("persistent"),
            "payload",
        )
        .repartition("sequence")
        .sortWithinPartitions("sequence", "queue", "event")
        .mapInArrow(follow, "event bigint, end_code bigint")
    )
    # Now Spark knows its size: it broadcasts a small table, but not one of millions of duplicates.
    found_codes.count()
    own.unpersist()
    used.unpersist()
    return found_codes


def _events_of(events: DataFrame, messages: DataFrame) -> DataFrame:
    return events.where(F.col("kind").isin(*kinds(MESSAGE_CODES))).join(messages.select("sequence"), "sequence")


def outstanding(
    events: DataFrame,
    starts: Sequence[TimelineRow],
    plan: SectionPlan | None = None,
    before: Before | None = None,
) -> DataFrame:
    """Return the messages that need more than the audit of their queue: `sequence`; `is_used` if an event of the
    message may come after its end; `is_unknown` if the end may be before the cut; `is_carried` if a cut may have the
    message, or a start in a queue that is cut. No sequence is used twice, so messages are grouped by nothing else."""
    kind, event = F.col("kind"), F.col("event")
    crashes = [start.event for start in starts if not start.number & StartFlag.CLEAN]
    ended = _ended(events)
    has_ended = ended.count() > 0
    codes = AFTER_END_CODES | ENDS
    if crashes or has_ended or plan is not None or before is not None:
        # Only marks and cuts ask since when a message exists. A return does not begin its life.
        codes = codes | {EventCode.ACCEPTED}
    # Numbers and booleans alone are aggregated: for others Spark would sort all events.
    columns = {
        "first": F.min(event),
        "last": F.max(event),
        "ended": F.min(F.when(kind.isin(*kinds(ENDS)), event)),
        "judged": F.max(F.when(kind.isin(*kinds(AFTER_END_CODES - {EventCode.REPORTED})), event)),
        "reports": F.count_if(kind == "reported"),
        "is_no_dead_letter": F.bool_or(kind.isin(*kinds(ENDS - {EventCode.DEAD_LETTERED}))),
        "persistent": F.bool_or("persistent"),
        "first_section": F.min("section"),
        "last_section": F.max("section"),
    }
    of_messages = events.where(kind.isin(*kinds(codes)))
    if before is not None:
        of_messages = of_messages.unionByName(before.kept, allowMissingColumns=True)
        columns |= {"is_known": F.bool_or(kind == "accepted"), "is_expiring": F.bool_or("is_expiring")}
    if plan is None:
        of_messages = of_messages.withColumn("section", F.lit(None).cast("bigint"))
    else:
        of_messages = plan.with_sections(of_messages)
    # Columns that no flag needs are not computed.
    if has_ended:
        ends = ended.groupBy("queue").agg(F.collect_list("event").alias("queue_ends"))
        lives = of_messages.groupBy("queue", "sequence").agg(*_named(columns))
        lives = lives.join(F.broadcast(ends), "queue", "left")
    else:
        lives = of_messages.groupBy("sequence").agg(*_named(columns))
    flags = {
        "is_used": _is_used(crashes, has_ended=has_ended, goes_on=before is not None),
        "is_unknown": F.lit(False) if before is None else _is_judged() & ~F.coalesce("is_known", F.lit(False)),
        "is_carried": F.lit(False) if plan is None else _is_carried(starts),
    }
    flagged = lives.select("sequence", *(F.coalesce(flag, F.lit(False)).alias(name) for name, flag in flags.items()))
    return flagged.where("is_used or is_unknown or is_carried")


def _is_judged() -> Column:
    return F.col("judged").isNotNull() | (F.col("reports") > 0)


def _is_used(crashes: Sequence[int], *, has_ended: bool, goes_on: bool) -> Column:
    is_wrong_report = (F.col("reports") > 1) | ((F.col("reports") == 1) & F.col("is_no_dead_letter"))
    conditions = [F.col("judged") > F.col("ended"), is_wrong_report]
    if crashes:
        conditions.append(~F.col("persistent") & _is_in_life(F.lit(crashes)))
    if has_ended:
        conditions.append(_is_in_life(F.col("queue_ends")))
    if goes_on:
        conditions.append(F.col("is_expiring") & _is_judged())
    return reduce(or_, (F.coalesce(each, F.lit(False)) for each in conditions))


def _is_carried(starts: Sequence[TimelineRow]) -> Column:
    is_over = F.col("ended").isNotNull() & (F.col("first_section") == F.col("last_section"))
    recovering = [start.event for start in starts if start.number & StartFlag.CONTINUED]
    if recovering:
        is_over &= ~_is_in_life(F.lit(recovering))
    return F.col("first_section").isNotNull() & ~is_over


def _named(columns: Mapping[str, Column]) -> list[Column]:
    return [column.alias(name) for name, column in columns.items()]


def _ended(events: DataFrame) -> DataFrame:
    return events.where("kind = 'ended'").select("queue", "event")


def _is_in_life(events: Column) -> Column:
    """Return whether one of the events is between the first event of a message and its last one."""
    return F.exists(events, lambda each: (each > F.col("first")) & (each < F.col("last")))


def _code() -> Column:
    """Return the code of a message's event. How a return delays the message is of no matter here."""
    code = F.lit(None)
    for kind in kinds(MESSAGE_CODES):
        code = F.when(F.col("kind") == kind, F.lit(int(CODES[kind]))).otherwise(code)
    return code.cast("bigint")


def _follow(
    batches: Iterable[pa.RecordBatch], starts: Sequence[TimelineRow], ended: Mapping[str, Sequence[TimelineRow]]
) -> Iterator[pa.RecordBatch]:
    rows = (each for batch in batches for each in batch.to_pylist())
    found: list[tuple[int, int]] = []
    for (queue, sequence), group in groupby(rows, key=itemgetter("queue", "sequence")):
        marks = sorted((*starts, *ended.get(queue, ())), key=attrgetter("event"))
        first, *others = group
        if first["payload"] is None:
            found += Lifetime(sequence).end_codes([*map(_timeline_row, (first, *others))], marks)
        elif others:
            message = msgspec.msgpack.decode(first["payload"], type=MessageRow)
            found += Lifetime(sequence, message, first["event"]).end_codes([*map(_timeline_row, others)], marks)
        if len(found) >= ROWS_PER_BATCH:
            yield _batch_of(found)
            found = []
    yield _batch_of(found)


def _batch_of(found: Sequence[tuple[int, int]]) -> pa.RecordBatch:
    columns = [pa.array([each[at] for each in found], pa.int64()) for at in (0, 1)]
    return pa.RecordBatch.from_arrays(columns, ["event", "end_code"])


def _timeline_row(row: Mapping[str, int]) -> TimelineRow:
    return TimelineRow(
        *(row["event"], 0, row["code"], row["sequence"]), number=row["number"], persistent=bool(row["persistent"])
    )
