"""Parts of a history: blocks of events, runs of the broker, and gaps that crashes have left."""

from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import pairwise
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F

from truenext.errors import HistoryError
from truenext.history.schema import DRAINED
from truenext.model.events import REASONS, SUBSCRIPTION_MODES, EventKind
from truenext.spark.audit.broker_numbers import NUMBER_BITS, broker_number

# Blocks of 65,536 event numbers: one pass over all events serves all tables about whole runs.

BLOCK_BITS = 16

KINDS = ({kind.label for kind in EventKind} - {"name", "cause"}) | {DRAINED}
"""Kinds of events that this version of the history has, as docs/reference/history.md lists them."""


BLOCKS = (
    "run bigint, block bigint, events bigint, first bigint, last bigint, last_at bigint, started_event bigint, "
    "started_at bigint, stores array<string>, is_clean boolean, is_recovered boolean, unknown_event bigint"
)
"""Columns of blocks."""


def block() -> Column:
    return F.shiftright("event", BLOCK_BITS)


def blocks(events: DataFrame) -> DataFrame:
    """Return one row for each run and block of 65,536 event numbers, with `events`, `first`, `last`, `last_at`,
    `started_event`, `started_at`, `stores`, `is_clean`, `is_recovered`, `unknown_event`. `runs` describes the columns;
    `stores` are the identities that events of the block name."""
    is_started = F.col("kind") == "run-started"
    at = F.unix_micros("at")
    return events.groupBy("run", block().alias("block")).agg(
        F.count("*").alias("events"),
        F.min("event").alias("first"),
        F.max("event").alias("last"),
        F.max_by(at, "event").alias("last_at"),
        F.min(F.when(is_started, F.col("event"))).alias("started_event"),
        F.min(F.when(is_started, at)).alias("started_at"),
        F.collect_set("store").alias("stores"),
        # As a boolean: for a string Spark would sort all events.
        F.bool_or(is_started & F.col("reason").eqNullSafe("clean")).alias("is_clean"),
        F.bool_or(~F.col("kind").isin("run-started", "recovered")).alias("is_recovered"),
        F.min(F.when(_is_unknown(), F.col("event"))).alias("unknown_event"),
    )


def _is_unknown() -> Column:
    """Return a condition that is true for events that do not exist in this version of the history."""
    kind, reason, mode = F.col("kind"), F.col("reason"), F.col("mode")
    return (
        ~kind.isin(*sorted(KINDS))
        | ~reason.isin(*REASONS)
        # Up to version 8 `started` was the kind of a run's start.
        | ((kind == "started") & reason.isNotNull())
        | ~mode.isin(*SUBSCRIPTION_MODES)
    )


# ---- Brokers: a restored one has another identity, and the history of the original up to its backup ----


class EarlierBroker(NamedTuple):
    """Broker whose history is before that of the broker of the last run."""

    store: str
    """Identity of the earlier broker."""
    next_run: int
    """First run that is not the earlier broker's."""
    next_at: datetime | None
    """Time at which that run started; None if its start is not in the history any more."""


def last_store(blocks: Iterable[Row]) -> str | None:
    """Return the identity of the last run that names one; None if none does."""
    return max(((row["run"], max(row["stores"])) for row in blocks if row["stores"]), default=(0, None))[1]


def earlier_broker(blocks: Iterable[Row]) -> EarlierBroker | None:
    """Return the broker before that of the last run; None if one broker has all runs, as far as is known. `blocks` are
    rows from `blocks`.

    Raises: HistoryError if a run is there of two brokers
    """
    stores: dict[int, str] = {}
    starts: dict[int, int] = {}
    for row in blocks:
        run = row["run"]
        if row["started_at"] is not None:
            starts[run] = row["started_at"]
        for store in sorted(row["stores"]):
            if stores.setdefault(run, store) != store:
                raise HistoryError(
                    f"run {run} is there twice, of the brokers with the identities {stores[run]} and {store}: "
                    f"audit the history of each broker alone"
                )
    for before, after in reversed([*pairwise(sorted(stores))]):
        if stores[before] != stores[after]:
            started_at = datetime.fromtimestamp(starts[after] / 1e6, UTC) if after in starts else None
            return EarlierBroker(stores[before], after, started_at)
    return None


# ---- Runs of the broker: start, and end of the run before ----


def runs(blocks: DataFrame) -> DataFrame:
    """Return one row for each run.

    `started_event` and `started_at` are null if the history begins within the run. `is_clean` says how the run before
    ended. `first_event`, `last_event` and `last_at` are the limits of the run. `is_recovered` says that the run
    finished its recovery. `unknown_event` is the first event that is not in docs/reference/history.md, or null.
    `previous_run` is the run before, `previous_at` the time of its last event. `next_event` and `next_at` are the start
    of the next run.
    """
    order = Window.partitionBy(broker_number(F.col("run"))).orderBy("run")
    return (
        blocks.groupBy("run")
        .agg(
            F.min("started_event").alias("started_event"),
            F.min("started_at").alias("started_at"),
            F.bool_or("is_clean").alias("is_clean"),
            F.min("first").alias("first_event"),
            F.max("last").alias("last_event"),
            F.max_by("last_at", "last").alias("last_at"),
            F.bool_or("is_recovered").alias("is_recovered"),
            F.min("unknown_event").alias("unknown_event"),
        )
        .withColumn("previous_run", F.lag("run").over(order))
        .withColumn("previous_at", F.lag("last_at").over(order))
        .withColumn("next_event", F.lead("started_event").over(order))
        .withColumn("next_at", F.lead("started_at").over(order))
    )


# ---- Gaps: event numbers that a crash took from the history ----


def gaps(events: DataFrame, blocks: DataFrame, earlier_event: int | None = None) -> DataFrame:
    """Return one row for each gap: `first_missing`, `last_missing`, `missing`. `blocks` may count an event before the
    first one, `earlier_event`.

    Most histories have no gap. So events are counted by block, and only a block with too few events is searched.
    """
    whole = blocks.groupBy("block").agg(
        F.sum("events").alias("events"), F.min("first").alias("first"), F.max("last").alias("last")
    )
    broken = whole.where("last - first + 1 > events").select("block")
    numbered = events.select("event")
    if earlier_event is not None:
        numbered = numbered.unionByName(events.sparkSession.createDataFrame([(earlier_event,)], "event bigint"))
    numbered = numbered.withColumn("block", block())
    inside = (
        numbered.join(F.broadcast(broken), "block")
        .withColumn("before", F.lag("event").over(Window.partitionBy("block").orderBy("event")))
        .select("before", F.col("event").alias("after"))
    )
    of_broker = Window.partitionBy(F.shiftright("block", NUMBER_BITS - BLOCK_BITS)).orderBy("block")
    between = whole.withColumn("before", F.lag("last").over(of_broker)).select("before", F.col("first").alias("after"))
    return (
        inside.union(between)
        .where("after - before > 1")
        .select(
            (F.col("before") + 1).alias("first_missing"),
            (F.col("after") - 1).alias("last_missing"),
            (F.col("after") - F.col("before") - 1).alias("missing"),
        )
    )
