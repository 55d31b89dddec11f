"""Rows of the cuts of a plan, computed by Spark: what `sections.py` computes in memory, for one queue.

messages that are carried ──by message──▶ Lifetime ─────────┬──▶ rows of each section, before its events
subscriptions, held messages ──by consumer──▶ Subscription ─┤
starts, gaps, pauses ───────────────────────────────────────┘

All three begin with the rows of a saved cut, if the history does.

Only messages that a cut or a start has are followed (`outstanding` in after_end.py), and dispatches to consumers are
counted only where they matter: for consumers that pull, and after a gap. Untouched messages (untouched.py) are counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from operator import attrgetter, itemgetter
from typing import Any

import msgspec
import pyarrow as pa
from msgspec import structs
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from truenext.model.events import PULLING
from truenext.spark.audit.broker_numbers import NUMBER_BITS
from truenext.spark.audit.cut import WHOLE, ConsumerRow, CutCode, MessageRow, QueueRow, SectionRow
from truenext.spark.audit.lifetime import MESSAGE_CODES, Lifetime, is_continued
from truenext.spark.audit.model import NEVER, ConsumerFlags, EventCode, TimelineRow
from truenext.spark.audit.section_plan import SectionPlan
from truenext.spark.audit.sections import CERTAIN, RESETS, Subscription, is_known, ordered, recovered
from truenext.spark.audit.timeline import CODES, encoded_rows, kinds, message_rows
from truenext.spark.audit.untouched import QueueCuts
from truenext.spark.caching import cache_rows

CUT_SCHEMA = pa.schema(
    {
        "queue": pa.string(),
        **dict.fromkeys(("section", "event", "code", "sequence", "consumer", "number"), pa.int64()),
        "payload": pa.binary(),
    }
)
"""Columns of a cut's rows. `code` is a CutCode; `event` is before the first event of the section, so that the rows
come before all events of the section."""

_COUNTS = pa.schema({"queue": pa.string(), **dict.fromkeys(("point", "certain", "uncertain"), pa.int64())})
_CONSUMER_KINDS = ("subscribed", "unsubscribed", "window", "requested")
_HELD = -1
"""In place of an event's code: a message is held at a cut."""
_KNOWN = -2
"""In place of an event's code: a message or a consumer is in the saved cut before the history."""

Recoveries = Mapping[str, Sequence[tuple[TimelineRow, TimelineRow]]]
"""Starts of each queue that continue a run of the history, each with the row that shows or hides its recovery."""
Counts = Mapping[tuple[str, int], tuple[int, int]]
"""Numbers of messages before an event of a queue: those that are there, and those that may be there."""

encode = msgspec.msgpack.encode


@dataclass(frozen=True)
class SavedQueues:
    """Saved cut of the queues that a plan cuts, before their history."""

    after: int
    """Last event before the history."""
    reset: TimelineRow
    """Last start or gap before the history."""
    queues: Mapping[str, SectionRow]
    """State of each queue."""
    consumers: Mapping[tuple[str, int], Sequence[ConsumerRow]]
    """Consumers by queue and number, in order."""
    messages: DataFrame
    """`queue`, `sequence` and `payload`, a MessageRow."""
    untouched: Mapping[str, int]
    """Number of further messages of each queue, which the whole history leaves untouched. `messages` has the first of
    each priority and group."""
    cached: DataFrame
    """Cached table of `messages`."""


@dataclass(frozen=True)
class CutHistory:
    """History of the queues that a plan cuts."""

    plan: SectionPlan
    events: DataFrame
    commits: DataFrame
    proofs: DataFrame
    marks: Sequence[TimelineRow]
    """Starts, gaps, and the ends of the brokers' histories, in order; of whole histories with the rows that
    `with_beginnings` adds."""
    saved: SavedQueues | None = None
    """Cut with which the history begins; None if it is whole."""
    ends: DataFrame | None = None
    """Codes of ends before the saved cut, which has no ended messages (`after_ends`). None if there are none."""

    @property
    def after(self) -> int:
        """Last event before the history; 0 if it is whole."""
        return 0 if self.saved is None else self.saved.after

    def beginning(self, queue: str) -> SectionRow:
        """Return the state of the queue before the history."""
        return WHOLE if self.saved is None else self.saved.queues[queue]

    def unrecovered(self) -> dict[str, QueueRow]:
        """Return the state of each queue that, at the saved cut, had not recovered from its last start."""
        queues = {queue: self.beginning(queue).queue for queue in self.plan.totals}
        return {queue: row for queue, row in queues.items() if row.expected is not None}

    def dispatches_before(self, queue: str) -> int:
        """Return the number of first dispatches before the history."""
        return self.beginning(queue).queue.first_dispatches

    def marks_of(self, queue: str) -> list[TimelineRow]:
        """Return the marks of the queue's broker."""
        return [each for each in self.marks if each.event >> NUMBER_BITS == self.plan.brokers[queue]]

    def resets_before(self) -> list[TimelineRow]:
        """Return the last start or gap before the history, if a dispatch may still tell something since."""
        if self.saved is None or all(each.queue.knows_exclusive for each in self.saved.queues.values()):
            return []
        return [self.saved.reset]

    def resets_of(self, queue: str) -> list[TimelineRow]:
        return [each for each in self.marks_of(queue) if each.code in RESETS]


def with_beginnings(marks: Sequence[TimelineRow], limits: Sequence[tuple[int, int]]) -> list[TimelineRow]:
    """Add a gap before each broker's history that begins in the middle of a run: what was before is not known, either.
    `limits` are the first and the last event of each broker, by its own numbers."""
    known = {each.event for each in marks}
    firsts = (first + (number << NUMBER_BITS) for number, (first, _) in enumerate(limits))
    gaps = (TimelineRow(first - 1, 0, EventCode.GAP, number=first - 1) for first in firsts if first not in known)
    return sorted([*marks, *gaps], key=attrgetter("event"))


def cut_rows(history: CutHistory, carried: DataFrame) -> tuple[DataFrame, DataFrame, list[DataFrame]]:
    """Return the rows of all cuts, and those of messages that are LEFT, both with CUT_SCHEMA, and the tables cached for
    them. `carried` has the `sequence` of each message that a cut or a start has."""
    events, plan = history.events, history.plan
    if history.saved is not None:
        carried = carried.unionByName(history.saved.messages.select("sequence"))
    of_messages = events.where(F.col("kind").isin(*kinds(MESSAGE_CODES))).join(carried, "sequence", "left_semi")
    if history.ends is not None:
        of_messages = of_messages.join(history.ends, "event", "left")
    rows = (
        message_rows(of_messages, history.commits, history.proofs)
        .transform(_with_saved, history.saved)
        .repartition("sequence")
        .sortWithinPartitions("sequence", "queue", "event")
    )
    marks = _marks(history)
    recoveries = _recoveries(history)
    counts: Counts = {}
    if any(recoveries.values()):
        rows = cache_rows(rows)
        marks, counts = _with_losses(rows, marks, recoveries, _known_counts(history))
    follow = partial(_message_states, marks=marks, cuts=plan.cuts())
    states = cache_rows(rows.mapInArrow(follow, from_arrow_schema(CUT_SCHEMA)))
    is_left = F.col("code") == int(CutCode.LEFT)
    cuts = states.where(~is_left)
    consumers = _consumer_rows(history, cuts)
    starts = events.sparkSession.createDataFrame(_section_rows(history, recoveries, counts))
    cached = [rows, states] if history.saved is None else [rows, states, history.saved.cached]
    return cuts.unionByName(consumers).unionByName(starts), states.where(is_left), cached


def _with_saved(rows: DataFrame, saved: SavedQueues | None) -> DataFrame:
    """Add the messages of a saved cut to rows of events, and the column `payload`."""
    rows = rows.withColumn("payload", F.lit(None).cast("binary"))
    if saved is None:
        return rows
    nothing = {name: F.lit(None).cast(kind) for name, kind in rows.drop("queue", "sequence", "payload").dtypes}
    at = {"event": F.lit(saved.after), "code": F.lit(_KNOWN).cast("tinyint")}
    return rows.unionByName(saved.messages.withColumns(nothing | at))


# ---- Marks, starts, and what they must find ----


def _marks(history: CutHistory) -> dict[str, list[TimelineRow]]:
    """Return by queue what applies to all messages."""
    own = history.events.where(F.col("kind").isin("ended", "drained")).select("queue", "event", "kind").collect()
    marks = {queue: history.resets_of(queue) for queue in history.plan.totals}
    for queue, event, kind in own:
        marks[queue].append(TimelineRow(event, 0, CODES[kind]))
    return {queue: sorted(some, key=attrgetter("event")) for queue, some in marks.items()}


def _recoveries(history: CutHistory) -> Recoveries:
    open_starts = _open_starts(history)
    if not any(map(is_continued, history.marks)) and not open_starts:
        return {}
    recovered_event = F.when(F.col("kind") == "recovered", F.col("event"))
    firsts = (
        history.events.where(F.col("kind").isin(*CODES))
        .groupBy("queue", "run")
        .agg(
            F.min("event").alias("event"),
            F.min(recovered_event).alias("recovered"),
            F.min_by(F.col("count"), recovered_event).alias("count"),
        )
    )
    own = {queue: [*open_starts.get(queue, ()), *history.marks_of(queue)] for queue in history.plan.totals}
    for queue, _, event, recovered_at, count in firsts.collect():
        is_recovered = event == recovered_at
        code = EventCode.RECOVERED if is_recovered else EventCode.ACCEPTED
        own[queue].append(TimelineRow(event, 0, code, number=count if is_recovered else 0))
    for rows in own.values():
        rows.sort(key=attrgetter("event"))
    return {queue: [each for each in pairwise(rows) if is_continued(each[0])] for queue, rows in own.items()}


def _open_starts(history: CutHistory) -> dict[str, list[TimelineRow]]:
    """Return the start before the history of each queue that had not recovered from it at the saved cut."""
    return {
        queue: [TimelineRow(row.start_event, 0, EventCode.RUN_STARTED, number=row.start_flags)]
        for queue, row in history.unrecovered().items()
    }


def _known_counts(history: CutHistory) -> Counts:
    """Return what the starts before the history must find."""
    expected = {(queue, row.start_event + 1): row.expected for queue, row in history.unrecovered().items()}
    return {point: counts for point, counts in expected.items() if counts is not None}


def _with_losses(
    rows: DataFrame, marks: Mapping[str, Sequence[TimelineRow]], recoveries: Recoveries, known: Counts
) -> tuple[dict[str, list[TimelineRow]], Counts]:
    """Add a mark for each start that has recovered fewer messages than are certain. Return with them what each start
    must find. `known` has that of starts before the history. See `sections.py`: it is counted until nothing changes."""
    points = {queue: [start.event + 1 for start, _ in some] for queue, some in recoveries.items()}
    lost: dict[str, list[TimelineRow]] = {}
    while True:
        with_lost = {queue: ordered(some, lost.get(queue, ())) for queue, some in marks.items()}
        counts = {**_count(rows, with_lost, points), **known}
        found = {
            queue: [
                TimelineRow(row.event, row.at, EventCode.NOT_RECOVERED)
                for start, row in some
                if is_known(start, row) and recovered(row) < counts.get((queue, start.event + 1), (0, 0))[0]
            ]
            for queue, some in recoveries.items()
        }
        if found == lost or not any([*found.values(), *lost.values()]):
            return with_lost, counts
        lost = found


def _count(rows: DataFrame, marks: Mapping[str, Sequence[TimelineRow]], points: Mapping[str, Sequence[int]]) -> Counts:
    count = partial(_count_states, marks=marks, points=points)
    sums = rows.mapInArrow(count, from_arrow_schema(_COUNTS)).groupBy("queue", "point").sum("certain", "uncertain")
    return {(queue, point): (certain, uncertain) for queue, point, certain, uncertain in sums.collect()}


# ---- Messages, in Spark's workers ----


def _count_states(
    batches: Iterable[pa.RecordBatch],
    marks: Mapping[str, Sequence[TimelineRow]],
    points: Mapping[str, Sequence[int]],
) -> Iterator[pa.RecordBatch]:
    certain: Counter[tuple[str, int]] = Counter()
    uncertain: Counter[tuple[str, int]] = Counter()
    for queue, lifetime, rows in _messages(batches):
        for point, message in lifetime.states(rows, marks[queue], points[queue]):
            (certain if message.state in CERTAIN else uncertain)[queue, point] += 1
    keys = certain.keys() | uncertain.keys()
    yield _batch([(*key, certain[key], uncertain[key]) for key in keys], _COUNTS)


def _message_states(
    batches: Iterable[pa.RecordBatch],
    marks: Mapping[str, Sequence[TimelineRow]],
    cuts: Mapping[str, Mapping[int, int]],
) -> Iterator[pa.RecordBatch]:
    queues = {queue: QueueCuts([*some], marks[queue]) for queue, some in cuts.items()}
    found: list[tuple[Any, ...]] = []

    def add(code: CutCode, queue: str, position: int, message: MessageRow) -> None:
        cut = queues[queue].cuts[position]
        row = structs.replace(message, arrival=-message.arrival, delivery=-message.delivery)
        # The subscription is 0 unless the message is held.
        of_message = (row.sequence, row.consumer, row.subscription, encode(row))
        found.append((queue, cuts[queue][cut], cut - 1, int(code), *of_message))

    for queue, lifetime, rows in _messages(batches):
        of_queue = queues[queue]
        own = of_queue.sections(row.event for row in rows)
        is_left = False
        for positions, message in lifetime.stretches(rows, of_queue.marks, of_queue.cuts):
            known, is_left = of_queue.take(positions, message, own)
            for position in known:
                add(CutCode.MESSAGE, queue, position, message)
        if is_left and lifetime.row is not None:
            add(CutCode.LEFT, queue, len(of_queue.cuts) - 1, lifetime.row)
        if len(found) >= BATCH_ROWS:
            yield _batch(found, CUT_SCHEMA)
            found = []
    for queue, of_queue in queues.items():
        for cut, count in of_queue.untouched():
            found.append((queue, cuts[queue][cut], cut - 1, int(CutCode.UNTOUCHED), -1, -1, count, b""))
    yield _batch(found, CUT_SCHEMA)


BATCH_ROWS = 50_000
"""Number of rows that are gathered before Spark gets them."""


def _messages(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, Lifetime, list[TimelineRow]]]:
    """Yield the queue of each message, its lifetime and the events that follow."""
    rows = ((queue, TimelineRow(*row), payload) for queue, *row, payload in _tuples(batches))
    for (queue, sequence), group in groupby(rows, key=lambda each: (each[0], each[1].sequence)):
        (_, first, payload), *others = group
        of_events = [row for _, row, _ in others]
        if payload is None:
            yield queue, Lifetime(sequence), [first, *of_events]
        else:
            saved = msgspec.msgpack.decode(payload, type=MessageRow)
            yield queue, Lifetime(sequence, saved, first.event), of_events


def _tuples(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Any, ...]]:
    for batch in batches:
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _batch(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else ([] for _ in schema)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


# ---- Consumers ----


def _consumer_rows(history: CutHistory, states: DataFrame) -> DataFrame:
    """Return the rows of consumers, and of the subscriptions that hold messages."""
    columns = ("queue", "event", "code", "sequence", "consumer", "number", "detail_code")
    own = encoded_rows(history.events.where(F.col("kind").isin(*_CONSUMER_KINDS))).select(*columns)
    held = states.where((F.col("code") == int(CutCode.MESSAGE)) & (F.col("number") > 0)).select(
        "queue",
        F.col("number").alias("event"),
        F.lit(_HELD).alias("code"),
        "sequence",
        "consumer",
        (states["event"] + 1).alias("number"),
        F.lit(0).alias("detail_code"),
    )
    if history.saved is not None and history.saved.consumers:
        keys = [(queue, history.after, _KNOWN, -1, number, 0, 0) for queue, number in history.saved.consumers]
        own = own.unionByName(own.sparkSession.createDataFrame(keys, own.schema))
    dispatches = _dispatches(history, own)
    rows = own.unionByName(held)
    if dispatches is not None:
        rows = rows.unionByName(dispatches)
    follow = partial(
        _follow_consumers,
        resets={queue: [*history.resets_before(), *history.resets_of(queue)] for queue in history.plan.totals},
        cuts=history.plan.cuts(),
        saved={} if history.saved is None else history.saved.consumers,
        after=history.after,
    )
    return (
        rows.select(*columns)
        .repartition("queue", "consumer")
        .sortWithinPartitions("queue", "consumer", "event", "code")
        .mapInArrow(follow, from_arrow_schema(CUT_SCHEMA))
    )


def _dispatches(history: CutHistory, consumers: DataFrame) -> DataFrame | None:
    """Return rows of dispatches to consumers that pull, and of those after a gap. A row stands for all dispatches of a
    section to a consumer between two other events of the consumer; its `detail_code` is how many are left out. None if
    there are none."""
    pulling = (
        history.events.where((F.col("kind") == "subscribed") & F.col("mode").contains(PULLING))
        .select("queue", "consumer", F.lit(True).alias("pulls"))
        .distinct()
    )
    if saved := _pulling(history.saved):
        pulling = pulling.union(pulling.sparkSession.createDataFrame(saved, pulling.schema)).distinct()
    stretches = _stretches_after_gaps([*history.resets_before(), *history.marks])
    if not stretches and not pulling.count():
        return None
    is_after_gap = F.lit(False)
    if stretches:
        begins, ends = map(list, zip(*stretches, strict=True))
        zipped = F.arrays_zip(F.lit(begins).alias("gap"), F.lit(ends).alias("end"))
        is_after_gap = F.exists(zipped, lambda each: F.col("event").between(each["gap"], each["end"]))
    dispatches = (
        history.events.where("kind = 'dispatched'")
        .select("queue", "consumer", "event", F.lit(int(EventCode.DISPATCHED)).alias("code"))
        .join(pulling, ["queue", "consumer"], "left")
        .where(F.coalesce("pulls", F.lit(False)) | is_after_gap)
    )
    before = Window.partitionBy("queue", "consumer").orderBy("event")
    is_other = F.col("code") != int(EventCode.DISPATCHED)
    joined = dispatches.unionByName(consumers.select("queue", "consumer", "event", "code"), allowMissingColumns=True)
    return (
        history.plan.with_sections(joined)
        .withColumn("since", F.last(F.when(is_other, F.col("event")), ignorenulls=True).over(before))
        .where(~is_other & F.col("since").isNotNull())
        .groupBy("queue", "consumer", "since", "section")
        .agg(F.min("event").alias("event"), F.count("*").alias("dispatches"))
        .select(
            "queue",
            "event",
            F.lit(int(EventCode.DISPATCHED)).alias("code"),
            F.lit(-1).alias("sequence"),
            "consumer",
            F.lit(0).alias("number"),
            (F.col("dispatches") - 1).alias("detail_code"),
        )
    )


def _pulling(saved: SavedQueues | None) -> list[tuple[str, int, bool]]:
    consumers = {} if saved is None else saved.consumers
    return [(*key, True) for key, some in consumers.items() if some[-1].flags & ConsumerFlags.PULLS]


def _stretches_after_gaps(marks: Sequence[TimelineRow]) -> list[tuple[int, int]]:
    """Return each gap with the next start or gap, unless that one follows at once, as after a crash."""
    resets = [each for each in marks if each.code in RESETS]
    ends = [each.event for each in resets[1:]] + [NEVER]
    return [
        (each.event, end)
        for each, end in zip(resets, ends, strict=bool(resets))
        if each.code == EventCode.GAP and end > each.number + 1
    ]


def _follow_consumers(
    batches: Iterable[pa.RecordBatch],
    resets: Mapping[str, Sequence[TimelineRow]],
    cuts: Mapping[str, Mapping[int, int]],
    saved: Mapping[tuple[str, int], Sequence[ConsumerRow]],
    after: int,
) -> Iterator[pa.RecordBatch]:
    found: list[tuple[Any, ...]] = []
    for (queue, consumer), group in groupby(_tuples(batches), key=itemgetter(0, 4)):
        rows = [
            TimelineRow(event, 0, code, sequence, consumer, number, detail_code=detail_code)
            for _, event, code, sequence, _, number, detail_code in group
        ]
        known = saved.get((queue, consumer), ())
        found += ((queue, *row) for row in _of_consumer(rows, resets[queue], cuts[queue], known, after))
        if len(found) >= BATCH_ROWS:
            yield _batch(found, CUT_SCHEMA)
            found = []
    yield _batch(found, CUT_SCHEMA)


def _of_consumer(
    rows: Sequence[TimelineRow],
    resets: Sequence[TimelineRow],
    sections: Mapping[int, int],
    known: Sequence[ConsumerRow],
    after: int,
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of one consumer at all cuts, without the queue. `sections` are the sections by first event,
    `known` the consumer's rows in a saved cut behind the event `after`."""
    own = [row for row in rows if row.code >= 0]
    if not own and not known:
        return
    held = [row for row in rows if row.code == _HELD]
    cuts = [*sections]
    end = max([_end_of_consumer(own, resets, after), *(each.number for each in held)])
    subscription = Subscription(own, resets, cuts[: bisect_left(cuts, end + 1)], known, after)
    holders: defaultdict[int, set[int]] = defaultdict(set)
    for each in held:
        # A message of the saved cut has the event of its subscription, others that of their dispatch.
        since = subscription.holder(each.event) if each.event > after else each.event
        if since:
            holders[each.number].add(since)
            key = (sections[each.number], each.number - 1, int(CutCode.HOLDER))
            yield *key, each.sequence, each.consumer, since, b""
    for cut, states in subscription.states.items():
        for state in states:
            if not state.has_ended or state.since in holders[cut]:
                yield sections[cut], cut - 1, int(CutCode.CONSUMER), -1, state.number, 0, encode(state)
        if _has_dispatch_after_gap(subscription.plain_dispatches, resets, cut):
            yield sections[cut], cut - 1, int(CutCode.GAP_DISPATCH), -1, rows[0].consumer, 0, b""


def _end_of_consumer(rows: Sequence[TimelineRow], resets: Sequence[TimelineRow], after: int) -> int:
    """Return the last event before which a cut may have rows of the consumer, unless the consumer holds a message."""
    last = rows[-1].event if rows else after + 1
    if rows and rows[-1].code == EventCode.UNSUBSCRIBED and all(row.code != EventCode.DISPATCHED for row in rows):
        return last
    position = bisect_left(resets, last, key=attrgetter("event"))
    return resets[position].event if position < len(resets) else NEVER


def _has_dispatch_after_gap(dispatches: Sequence[int], resets: Sequence[TimelineRow], cut: int) -> bool:
    reset = last_before(resets, cut)
    if not dispatches or reset is None or reset.code != EventCode.GAP:
        return False
    return bisect_left(dispatches, cut) > bisect_left(dispatches, reset.event)


def last_before(rows: Sequence[TimelineRow], event: int) -> TimelineRow | None:
    position = bisect_left(rows, event, key=attrgetter("event"))
    return rows[position - 1] if position else None


# ---- The queues themselves ----


def _section_rows(history: CutHistory, recoveries: Recoveries, counts: Counts) -> pa.Table:
    plan = history.plan
    resets = {queue: history.resets_of(queue) for queue in plan.totals}
    rows = []
    for number, each in enumerate(plan.sections):
        beginning = history.beginning(each.queue)
        reset = last_before(resets[each.queue], each.first)
        row = QueueRow(beginning.queue.arrivals + each.arrivals, 0, beginning.queue.ticks + each.ticks)
        if reset is None:
            row.knows_consumers, row.knows_exclusive = beginning.queue.knows_consumers, beginning.queue.knows_exclusive
        else:
            row.knows_consumers = row.knows_exclusive = reset.code == EventCode.RUN_STARTED
        if reset is None and not each.paused and not each.resumed:
            row.is_paused = beginning.queue.is_paused
        else:
            row.is_paused = each.paused > max(each.resumed, reset.event if reset is not None else 0)
        for start, until in recoveries.get(each.queue, ()):
            if start.event < each.first <= until.event:
                row.expected = counts.get((each.queue, start.event + 1), (0, 0))
                row.start_flags, row.start_event = start.number, start.event
        following = plan.sections[number + 1] if number + 1 < len(plan.sections) else None
        end = following.first if following is not None and following.queue == each.queue else NEVER
        section = SectionRow(each.first, row, end, beginning.queue.ticks + plan.totals[each.queue])
        if number == 0 or plan.sections[number - 1].queue != each.queue:
            section.idle = beginning.idle
        place = (each.queue, number, each.first - 1)
        rows.append((*place, int(CutCode.SECTION), -1, -1, 0, encode(section)))
        if untouched := 0 if history.saved is None else history.saved.untouched.get(each.queue, 0):
            rows.append((*place, int(CutCode.UNTOUCHED), -1, -1, untouched, b""))
    return pa.Table.from_batches([_batch(rows, CUT_SCHEMA)])
