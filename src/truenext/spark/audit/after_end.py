"""Events of messages after their end, such as a dispatch of an acknowledged message, with the code of that end.

Spark finds the messages that have such events by one aggregate over each message, and a right history has none.
`Lifetime` then follows only these messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from truenext.spark.audit.lifetime import AFTER_END_CODES, ENDS, MESSAGE_CODES, Lifetime
from truenext.spark.audit.model import EventCode, StartFlag, TimelineRow
from truenext.spark.audit.timeline import CODES

ROWS_PER_BATCH = 10_000
"""Number of rows that are handed to Spark at once, so that they take little memory."""
_KEY = ("queue", "sequence")


def after_ends(events: DataFrame, starts: Sequence[TimelineRow]) -> DataFrame | None:
    """Return `event` and `end_code` for each event of a message after its end, for those events that are judged by it.
    None if there are none. `starts` are the starts of runs."""
    of_messages = events.where(F.col("kind").isin(*_kinds(MESSAGE_CODES)))
    ended = events.where("kind = 'ended'").select("queue", "event")
    found = _used_after_end(of_messages, ended, starts).persist()
    # Not isEmpty, which looks at one partition after the other.
    if not found.count():
        found.unpersist()
        return None
    queues = found.select("queue").distinct()
    marks: defaultdict[str, list[TimelineRow]] = defaultdict(list)
    for queue, event in ended.join(F.broadcast(queues), "queue").collect():
        marks[queue].append(TimelineRow(event, 0, EventCode.ENDED))
    follow = partial(_follow, starts=starts, ended=dict(marks))
    ends = (
        of_messages.join(found, [*_KEY])
        .select(
            *_KEY,
            "event",
            _code().alias("code"),
            F.coalesce("priority", F.lit(0)).cast("bigint").alias("number"),
            F.coalesce("persistent", F.lit(False)).alias("persistent"),
        )
        .repartition(*_KEY)
        .sortWithinPartitions(*_KEY, "event")
        .mapInArrow(follow, "event bigint, end_code bigint")
        .persist()
    )
    # Now Spark knows its size: it broadcasts a small table, but not one of millions of duplicates.
    ends.count()
    found.unpersist()
    return ends


def _used_after_end(of_messages: DataFrame, ended: DataFrame, starts: Sequence[TimelineRow]) -> DataFrame:
    """Return `queue` and `sequence` of the messages that may have an event after their end. Numbers and booleans alone
    are aggregated: for others Spark would sort all events."""
    kind, event = F.col("kind"), F.col("event")
    judged = _kinds(AFTER_END_CODES - {EventCode.REPORTED})
    lives = of_messages.groupBy(*_KEY).agg(
        F.min(event).alias("first"),
        F.max(F.when(kind.isin(*_kinds(AFTER_END_CODES)), event)).alias("last"),
        F.min(F.when(kind.isin(*_kinds(ENDS)), event)).alias("ended"),
        F.max(F.when(kind.isin(*judged), event)).alias("judged"),
        F.count_if(kind == "reported").alias("reports"),
        F.bool_or(kind.isin(*_kinds(ENDS - {EventCode.DEAD_LETTERED}))).alias("is_no_dead_letter"),
        F.bool_or("persistent").alias("persistent"),
    )
    crashes = [start.event for start in starts if not start.number & StartFlag.CLEAN]
    is_wrong_report = (F.col("reports") > 1) | ((F.col("reports") == 1) & F.col("is_no_dead_letter"))
    candidates = (F.col("judged") > F.col("ended")) | is_wrong_report
    if crashes:
        candidates |= ~F.col("persistent") & _is_in_life(F.lit(crashes))
    if ended.count():
        ends = ended.groupBy("queue").agg(F.collect_list("event").alias("queue_ends"))
        lives = lives.join(F.broadcast(ends), "queue", "left")
        candidates |= F.coalesce(_is_in_life(F.col("queue_ends")), F.lit(False))
    return lives.where(candidates).select(*_KEY)


def _is_in_life(events: Column) -> Column:
    """Return whether one of the events is between the first event of a message and its last one that is judged."""
    return F.exists(events, lambda each: (each > F.col("first")) & (each < F.col("last")))


def _code() -> Column:
    """Return the code of a message's event. How a return delays the message is of no matter here."""
    code = F.lit(None)
    for kind in _kinds(MESSAGE_CODES):
        code = F.when(F.col("kind") == kind, F.lit(int(CODES[kind]))).otherwise(code)
    return code.cast("bigint")


def _kinds(codes: Iterable[EventCode]) -> list[str]:
    return sorted(kind for kind, code in CODES.items() if code in codes)


def _follow(
    batches: Iterable[pa.RecordBatch], starts: Sequence[TimelineRow], ended: Mapping[str, Sequence[TimelineRow]]
) -> Iterator[pa.RecordBatch]:
    rows = ((each["queue"], _timeline_row(each)) for batch in batches for each in batch.to_pylist())
    found: list[tuple[int, int]] = []
    for (queue, sequence), group in groupby(rows, key=lambda each: (each[0], each[1].sequence)):
        marks = sorted((*starts, *ended.get(queue, ())), key=attrgetter("event"))
        found += Lifetime(sequence).end_codes([row for _, row in group], marks)
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
