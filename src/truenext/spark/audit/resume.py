"""Saved cut in Spark: what an audit that goes on needs of the events before, without reading them.

saved rows ──┬──▶ untouched messages: counted, and saved again as they are
             ├──▶ rows of queues that are cut again (SavedQueues) ───▶ cut_rows.py
             ├──▶ rows of cuts for the sweep ◀── commits since, for messages that were not durable yet
             ├──▶ messages that exist, and which of them are expiring ──▶ events after an end
             └──▶ messages of open batches, as events `accepted` ───────▶ commits and proofs
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from truenext.errors import HistoryError
from truenext.spark.audit.cut import ConsumerRow, CutCode, MessageRow, QueueRow, SectionRow
from truenext.spark.audit.cut_rows import CUT_SCHEMA, SavedQueues, with_beginnings
from truenext.spark.audit.model import NEVER, EventCode, MessageState, StartFlag, TimelineRow
from truenext.spark.audit.runs import BLOCK_BITS
from truenext.spark.audit.sections import RESETS
from truenext.spark.audit.state import AuditState, StateFolder
from truenext.spark.audit.timeline import with_visibility
from truenext.spark.audit.untouched import Since, since
from truenext.spark.caching import cache_rows
from truenext.spark.output import write_table
from truenext.spark.paths import path_to_read

SAVED_COLUMNS = (
    *("queue", "code", "sequence", "number", "persistent", "payload"),
    *("can_be_untouched", "priority", "group", "run", "batch"),
)
"""Columns of the rows of a saved cut. `code` is a CutCode. `number` is 1 if a message is expiring. If it can be
untouched and waits, it has `priority` and `group`. `run` and `batch` belong to a message that was not durable yet. Else
columns are null."""


@dataclass(frozen=True)
class SavedAudit:
    state: AuditState
    cut: DataFrame
    """Rows of the cut after the last event of `state`, with SAVED_COLUMNS."""

    def save(self, folder: StateFolder) -> None:
        """Write the state, and its cut before."""
        write_table(self.cut, folder.cut_folder(self.state.next_event))
        folder.write(self.state)

    def has_new_events(self, events: DataFrame) -> bool:
        """Return whether the `events` of a history have later ones than this state.

        Raises: HistoryError if the history does not go on from the state
        """
        state = self.state
        # Files before this event are not read.
        last = events.where(F.col("event") >= state.last_event).agg(
            F.max("event"),
            F.min(F.when(F.col("event") > state.last_event, F.col("run"))),
            F.max(F.when(F.col("event") == state.last_event, F.unix_micros("at"))),
        )
        last_event, run, at = last.collect()[0]
        is_other = (run is not None and run < state.run) or (at is not None and at != state.last_at)
        if last_event is None or is_other:
            raise HistoryError(
                f"the history does not go on from event {state.last_event:,}, where the state ends: it is another "
                "broker's, or an older copy; name the folder of that broker, or an empty folder for the state"
            )
        return bool(last_event > state.last_event)

    def divided(
        self, events: DataFrame, marks: Sequence[TimelineRow], cut_queues: Iterable[str] = ()
    ) -> tuple[SavedAudit, UntouchedMessages | None]:
        """Divide the cut into what an audit of the `events` since needs, and untouched messages. `marks` are the starts
        and gaps among the events, in order. With a start, messages of `cut_queues` are needed: the sections before it
        and behind it find them in other states."""
        happened = since(marks, is_recovered=self.state.is_recovered)
        if happened is None:
            return self, None
        touched = events.where("sequence is not null").select("sequence", F.lit(True).alias("is_touched")).distinct()
        touched = cache_rows(touched)
        # Now Spark knows its size: see after_ends.
        touched.count()
        changed = events.where(F.col("kind").isin("ended", "drained")).select("queue", F.lit(True).alias("is_changed"))
        can_be_untouched = F.coalesce("can_be_untouched", F.lit(False))
        if happened.has_start:
            is_found = F.col("persistent") | F.lit(happened.finds_transient)
            can_be_untouched &= F.col("priority").isNotNull() & is_found & ~F.col("queue").isin(*cut_queues)
        is_untouched = can_be_untouched & F.isnull("is_touched") & F.isnull("is_changed")
        cut = (
            self.cut.join(touched, "sequence", "left")
            .join(F.broadcast(changed.distinct()), "queue", "left")
            .select(*SAVED_COLUMNS, is_untouched.alias("is_untouched"))
        )
        lanes = cut.where("is_untouched and priority is not null").groupBy("queue", "priority", "group")
        firsts = cache_rows(lanes.agg(F.min("sequence").alias("sequence"), (F.count("*") - 1).alias("others")))
        firsts.count()
        # The other untouched messages are not cached: with millions of them, to read them again takes less time.
        is_first = firsts.select("queue", "sequence", F.lit(True).alias("is_first"))
        needed = cache_rows(cut.join(is_first, ["queue", "sequence"], "left").where("is_first or not is_untouched"))
        first_messages = needed.where("is_first").select(*SAVED_COLUMNS)
        untouched = UntouchedMessages(
            cut.where("is_untouched"), first_messages, firsts, happened, (touched, firsts, needed)
        )
        return replace(self, cut=needed.where("is_first is null").select(*SAVED_COLUMNS)), untouched

    def after(self, events: DataFrame) -> DataFrame:
        return events.where(F.col("event") > self.state.last_event)

    def before(self, events: DataFrame) -> DataFrame:
        return events.where(F.col("event").between(self.state.first_event, self.state.last_event))

    def queues(self) -> DataFrame:
        return self.cut.where(F.col("code") == int(CutCode.SECTION)).select("queue")

    def block(self) -> DataFrame:
        """Return a row for `blocks` (runs.py) that stands for the last event before the cut."""
        state = self.state
        last = state.last_event
        stores = [] if state.store is None else [state.store]
        row = (state.run, last >> BLOCK_BITS, 1, last, last, state.last_at, stores, state.is_recovered)
        schema = (
            "run int, block bigint, events bigint, first bigint, last bigint, last_at bigint, stores array<string>, "
            "is_recovered boolean"
        )
        return self.cut.sparkSession.createDataFrame([row], schema)

    def opened(self) -> DataFrame:
        """Return messages that were not durable yet, as events `accepted`."""
        columns = ("queue", "sequence", "run", "batch", "persistent", F.lit("accepted").alias("kind"))
        return self.cut.where("batch is not null").select(*columns)

    def kept(self) -> DataFrame:
        """Return the messages that exist, as events `accepted` at the cut, with their payload."""
        return self.cut.where(F.col("code") == int(CutCode.SAVED)).select(
            *("queue", "sequence", "persistent", "payload"),
            F.lit(self.state.last_event).alias("event"),
            F.lit("accepted").alias("kind"),
            (F.col("number") > 0).alias("is_expiring"),
        )

    def rows(self, commits: DataFrame, proofs: DataFrame) -> DataFrame:
        """Return the rows of the cut, with CUT_SCHEMA. Messages that have become durable since have the event."""
        visible = self.opened().transform(with_visibility, commits, proofs)
        opened = (
            self.cut.where("batch is not null")
            .join(visible.select("queue", "sequence", "visible_event", "visible_at"), ["queue", "sequence"], "left")
            .mapInArrow(_become_durable, from_arrow_schema(_ROWS))
        )
        rows = self.cut.where("batch is null").select(*_ROWS.names).unionByName(opened)
        return _rows_of_cut(rows, self.state)

    def of_queues(self, queues: Iterable[str], rows: DataFrame, fresh: SectionRow) -> SavedQueues:
        """Return the saved cut of `queues`. `rows` are those of all queues, with CUT_SCHEMA; `fresh` is the beginning
        of queues without any."""
        names = [*queues]
        # Read more than once.
        rows = cache_rows(rows.where(F.col("queue").isin(*names)))
        rows.count()
        is_message = F.col("code") == int(CutCode.SAVED)
        sections = dict.fromkeys(names, fresh)
        consumers: defaultdict[tuple[str, int], list[ConsumerRow]] = defaultdict(list)
        untouched: dict[str, int] = {}
        for queue, code, number, payload in (
            rows.where(~is_message).select("queue", "code", "number", "payload").collect()
        ):
            if code == CutCode.SECTION:
                sections[queue] = msgspec.msgpack.decode(payload, type=SectionRow)
            elif code == CutCode.CONSUMER:
                consumer = msgspec.msgpack.decode(payload, type=ConsumerRow)
                consumers[queue, consumer.number].append(consumer)
            else:
                untouched[queue] = number
        for some in consumers.values():
            some.sort(key=attrgetter("since"))
        for section in sections.values():
            section.queue.refresh_start(fresh.queue)
        reset = with_beginnings(self.state.marks, [(self.state.first_event, self.state.last_event)])[-1]
        messages = rows.where(is_message).select("queue", "sequence", "payload")
        return SavedQueues(self.state.last_event, reset, sections, consumers, messages, untouched, rows)

    def fresh(self, *, is_recovered: bool) -> SectionRow:
        """Return the beginning of a queue that has no row in the cut. `is_recovered` says whether the run of the last
        event has finished its recovery by now."""
        resets = [each for each in self.state.marks if each.code in RESETS]
        queue = QueueRow()
        start = resets[-1] if resets and resets[-1].code == EventCode.RUN_STARTED else None
        queue.knows_consumers = queue.knows_exclusive = start is not None
        if start is not None and start.number & StartFlag.CONTINUED:
            queue.expected, queue.start_event = (0, 0), start.event
            queue.start_flags = start.number | (StartFlag.RECOVERED if is_recovered else 0)
        return SectionRow(self.state.last_event + 1, queue, NEVER, 0)


@dataclass(frozen=True)
class UntouchedMessages:
    """Messages of a saved cut that are untouched (untouched.py) up to the next cut."""

    messages: DataFrame
    """Their rows, with SAVED_COLUMNS."""
    first_messages: DataFrame
    """The rows of the first waiting message of each priority and group."""
    firsts: DataFrame
    """`queue`, `sequence` and `others` of these: how many messages are behind each."""
    since: Since
    cached: tuple[DataFrame, ...]

    def rows(self, state: AuditState) -> DataFrame:
        """Return the rows for the sweep: the first messages, and how many are behind them, with CUT_SCHEMA."""
        counts = self.firsts.groupBy("queue").agg(F.sum("others").alias("number"))
        untouched = counts.select(
            "queue",
            F.lit(int(CutCode.UNTOUCHED)).cast("bigint").alias("code"),
            F.lit(-1).cast("bigint").alias("sequence"),
            "number",
            F.lit(b"").alias("payload"),
        )
        return _rows_of_cut(self.first_messages.select(*_ROWS.names).unionByName(untouched), state)

    def saved(self, swept: DataFrame) -> DataFrame:
        """Return the rows of the next cut that the sweep does not return. `swept` are the rows `saved` that it does."""
        firsts = self.firsts.select("queue", "sequence")
        messages = self.messages.join(firsts, ["queue", "sequence"], "left_anti").select(*SAVED_COLUMNS)
        if not self.since.has_start:
            return messages
        is_queue = (F.col("code") == int(CutCode.SECTION)) & (F.col("number") > 0)
        in_doubt = swept.where(is_queue).select("queue", F.lit(True).alias("is_in_doubt"))
        after_starts = partial(_after_starts, has_gap=self.since.has_gap)
        return messages.join(F.broadcast(in_doubt), "queue", "left").mapInArrow(after_starts, messages.schema)


def _after_starts(batches: Iterable[pa.RecordBatch], has_gap: bool) -> Iterator[pa.RecordBatch]:
    """Write into saved rows of waiting messages what a gap and a start have changed."""
    for batch in batches:
        in_doubt = batch.column("is_in_doubt").fill_null(False)
        if not has_gap and not pc.any(in_doubt).as_py():
            yield batch.select([*SAVED_COLUMNS])
            continue
        payloads = []
        for payload, is_in_doubt in zip(batch.column("payload").to_pylist(), in_doubt.to_pylist(), strict=True):
            message = msgspec.msgpack.decode(payload, type=MessageRow)
            message.has_known_attempts &= not has_gap
            if is_in_doubt:
                message.state = MessageState.UNCERTAIN
            payloads.append(msgspec.msgpack.encode(message))
        changed = {"payload": pa.array(payloads, pa.binary())}
        # Only messages that wait have these.
        for name in ("priority", "group"):
            changed[name] = pc.if_else(in_doubt, pa.scalar(None, pa.int64()), batch.column(name))
        arrays = [changed.get(name, batch.column(name)) for name in SAVED_COLUMNS]
        yield pa.RecordBatch.from_arrays(arrays, names=[*SAVED_COLUMNS])


def _rows_of_cut(rows: DataFrame, state: AuditState) -> DataFrame:
    """Return rows of whole queues with CUT_SCHEMA, before the first event after a state."""
    return rows.select(
        "queue",
        F.lit(None).cast("bigint").alias("section"),
        F.lit(state.last_event).alias("event"),
        "code",
        "sequence",
        F.lit(-1).cast("bigint").alias("consumer"),
        "number",
        "payload",
    ).select(*CUT_SCHEMA.names)


def read_cut(spark: SparkSession, folder: StateFolder, state: AuditState) -> DataFrame:
    """Return the rows of the cut after the last event of `state`, with SAVED_COLUMNS."""
    return spark.read.parquet(path_to_read(folder.cut_folder(state.next_event).resolve()))


_ROWS = pa.schema(
    {
        "queue": pa.string(),
        **dict.fromkeys(("code", "sequence", "number"), pa.int64()),
        "payload": pa.binary(),
    }
)


def _become_durable(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        payloads = []
        columns = [batch.column(name).to_pylist() for name in ("payload", "visible_event", "visible_at")]
        for payload, event, at in zip(*columns, strict=True):
            message = msgspec.msgpack.decode(payload, type=MessageRow)
            # A return may have shown already that the message is visible.
            if event is not None and message.visible_event == NEVER:
                message.visible_event, message.visible_at = event, at
            payloads.append(msgspec.msgpack.encode(message))
        arrays = [*(batch.column(name) for name in _ROWS.names[:-1]), pa.array(payloads, pa.binary())]
        yield pa.RecordBatch.from_arrays(arrays, schema=_ROWS)


def saved_rows(swept: DataFrame, accepted: DataFrame, commits: DataFrame, run: int) -> DataFrame:
    """Return the rows `saved` of a sweep, with SAVED_COLUMNS. `accepted` are the messages of the history,
    those that were open before included; `run` is its last run."""
    durable = commits.where(F.col("run") == run).agg(F.coalesce(F.max("batch"), F.lit(0)).alias("durable"))
    opened = (
        accepted.where((F.col("kind") == "accepted") & (F.col("batch") > 0) & (F.col("run") == run))
        .crossJoin(F.broadcast(durable))
        .where("batch > durable")
        .select("queue", "sequence", F.col("run").cast("int"), F.col("batch").cast("bigint"))
    )
    return swept.join(opened, ["queue", "sequence"], "left").select(*SAVED_COLUMNS)


def reset_marks(marks: Sequence[TimelineRow]) -> tuple[TimelineRow, ...]:
    """Return the starts of runs, and the gaps."""
    return tuple(each for each in marks if each.code in RESETS)
