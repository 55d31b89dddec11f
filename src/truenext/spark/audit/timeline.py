"""Timeline: the events of each queue in order, with everything that a sweep over one queue needs.

Events `committed` and `run-started` belong to no queue. So the timeline gives each message the event that made it
visible. Each queue gets a row for every start, every gap, and the end of the history.
"""

from collections.abc import Iterable
from functools import partial, reduce
from operator import add

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from truenext.model.events import BLOCKING, DELAYED, EXCLUSIVE, PULLING, WITH_EXPRESS, WITH_SELECTOR, WITH_STARTED
from truenext.spark.audit.broker_numbers import broker_number, own_number
from truenext.spark.audit.model import (
    AUTO_WINDOW,
    HAS_CAUSE,
    NEVER,
    SELECTOR_WINDOW,
    UNLIMITED,
    ConsumerFlags,
    EventCode,
    ReturnReason,
    StartFlag,
    TimelineRow,
)

COLUMNS = ("queue", *TimelineRow._fields)
_UNRECORDED = {
    *(EventCode.DELAYED, EventCode.BLOCKING, EventCode.RUN_STARTED),
    *(EventCode.GAP, EventCode.FINISHED, EventCode.NOT_RECOVERED),
}
"""Codes that do not correspond to one kind of event."""
CODES = {code.name.lower().replace("_", "-"): code for code in EventCode if code not in _UNRECORDED}


def kinds(codes: Iterable[EventCode]) -> list[str]:
    """Return the kinds of events that have the codes."""
    return sorted(kind for kind, code in CODES.items() if code in codes)


FLAGS = {
    "auto": ConsumerFlags.AUTO,
    WITH_EXPRESS: ConsumerFlags.EXPRESS,
    WITH_STARTED: ConsumerFlags.NAMES_STARTED,
    PULLING: ConsumerFlags.PULLS,
    EXCLUSIVE: ConsumerFlags.EXCLUSIVE,
}
"""Flag for each word in a consumer's mode."""
RETURN_REASONS = {"released": ReturnReason.RELEASED, "lost": ReturnReason.STARTED, "aborted": ReturnReason.STARTED}
"""ReturnReason for each first word of a return's reason."""


def timeline(rows: DataFrame) -> DataFrame:
    """Return the rows from `queue_rows` with all rows of a queue in one partition, and each partition sorted by
    `event`."""
    # Without the queue: sorting one number is several times faster, and the sweep separates the queues.
    return rows.repartition(partitions(rows), "queue").sortWithinPartitions("event")


def partitions(rows: DataFrame) -> int:
    """Return the session's number of shuffle partitions. Without an explicit number Spark would join partitions, and
    cores would stay idle."""
    return int(rows.sparkSession.conf.get("spark.sql.shuffle.partitions") or 8)


def queue_rows(
    events: DataFrame,
    marks: DataFrame,
    commits: DataFrame,
    proofs: DataFrame,
    after_ends: DataFrame | None,
    queues: DataFrame | None = None,
) -> DataFrame:
    """Return the events of all queues, and the `marks` for each queue. The columns are `COLUMNS`, without nulls.
    `proofs` are from `proven`, and `after_ends` has the events of messages after their end (after_end.py). `queues`
    have no events perhaps.

    Times are in microseconds. Three columns depend on the kind:

        kind           number                              detail_code                           sequence
        accepted       priority                            hash of the group                     of the message
        subscribed     window, SELECTOR_WINDOW, UNLIMITED  ConsumerFlags                         priority, if exclusive
        window         window, or AUTO_WINDOW
        recovered      count
        requested      count                               0                                     of the message
        returned       attempts                            ReturnReason, HAS_CAUSE               of the message
        dead-lettered  0                                   HAS_CAUSE                             of the message
        handled        0                                   HAS_CAUSE                             of the message
        start          StartFlag
        gap            last missing event
        others         0                                   0                                     of the message

    For `dispatched`, `started`, `reported` and the kinds that end a message, `number` is the code of the event by which
    the message had ended before, or 0.
    """
    own = events.where("queue is not null")
    if after_ends is not None:
        own = own.join(after_ends, "event", "left")
    of_queues = marks_of_queues(marks, own, queues)
    return message_rows(own, commits, proofs).unionByName(of_queues.select(*COLUMNS))


def message_rows(own: DataFrame, commits: DataFrame, proofs: DataFrame) -> DataFrame:
    """Return the rows of events of queues, with the event that made each accepted message visible. Events may have the
    column `end_code`."""
    return own.transform(with_visibility, commits, proofs).transform(encoded_rows)


BATCH_BITS = 12
"""Commits are found in ranges of 4,096 batches: the more batches a history has, the more tasks."""


def commits(events: DataFrame) -> DataFrame:
    """Return the events `committed`: `run`, `batch`, `range` and the struct `commit` of `event` and `at`."""
    commit = F.struct("event", F.unix_micros("at").alias("at"))
    return events.where("kind = 'committed'").select("run", "batch", _range().alias("range"), commit.alias("commit"))


def _range() -> Column:
    return F.shiftright("batch", BATCH_BITS)


def later_commits(commits: DataFrame) -> DataFrame:
    """Return for each range of batches, of which a later range has a commit, the first such commit: `run`, `range`,
    `later`."""
    order = Window.partitionBy("run").orderBy("range")
    to_end = order.rowsBetween(Window.currentRow, Window.unboundedFollowing)
    return (
        commits.groupBy("run", "range")
        .agg(F.min("commit").alias("commit"))
        .select(
            "run",
            F.coalesce(F.lag("range").over(order), F.lit(0)).alias("first"),
            (F.col("range") - 1).alias("last"),
            F.min("commit").over(to_end).alias("later"),
        )
        .where("first <= last")
        .select("run", F.explode(F.sequence("first", "last")).alias("range"), "later")
    )


def with_commits(accepted: DataFrame, commits: DataFrame) -> DataFrame:
    """Add to messages accepted in a batch the struct `commit` of the first event that says that the batch is durable.
    Null if the history has none."""
    from_batch_on = Window.partitionBy("run", "range").orderBy(F.col("batch").desc())
    ranged = accepted.withColumn("range", _range())
    return (
        ranged.unionByName(commits, allowMissingColumns=True)
        .withColumn("commit", F.min("commit").over(from_batch_on))
        .where("kind = 'accepted'")
        .join(F.broadcast(later_commits(commits)), ["run", "range"], "left")
        .withColumn("commit", F.least("commit", "later"))
        .drop("range", "later")
    )


def with_visibility(own: DataFrame, commits: DataFrame, proofs: DataFrame) -> DataFrame:
    """Add to each message the event that made it visible."""
    in_batch = F.col("kind").eqNullSafe("accepted") & (F.coalesce("batch", F.lit(0)) > 0)
    return (
        own.where(in_batch)
        .transform(with_commits, commits)
        .unionByName(own.where(~in_batch).withColumn("batch", F.lit(None).cast("bigint")), allowMissingColumns=True)
        .join(F.broadcast(proofs), "sequence", "left")
        .withColumn("visible_event", F.coalesce("commit.event", "proven_event"))
        .withColumn("visible_at", F.coalesce("commit.at", "proven_at"))
    )


def encoded_rows(own: DataFrame) -> DataFrame:
    """Return the rows of events of queues. `own` may have `visible_event` and `visible_at`, which accepted messages
    need, and `end_code`."""
    optional = {"visible_event", "visible_at", "end_code"} - set(own.columns)
    own = own.withColumns({name: F.lit(None).cast("bigint") for name in sorted(optional)})
    is_at_once = (F.col("kind") == "accepted") & F.col("batch").isNull()
    at = F.unix_micros("at")
    is_subscribed = F.col("kind") == "subscribed"
    number: Column = (
        F.when(F.col("kind") == "accepted", F.col("priority"))
        .when(is_subscribed & F.col("mode").contains(WITH_SELECTOR), F.lit(SELECTOR_WINDOW))
        .when(is_subscribed & F.col("mode").contains(PULLING), F.lit(UNLIMITED))
        .when(is_subscribed | (F.col("kind") == "window"), F.coalesce("window", F.lit(AUTO_WINDOW)))
        .when(F.col("kind") == "returned", F.col("attempts"))
        .otherwise(F.coalesce("count", "end_code"))
    )
    has_cause = F.when(F.col("cause").isNull(), F.lit(0)).otherwise(F.lit(HAS_CAUSE))
    detail_code: Column = (
        F.when(is_subscribed, _flags())
        .when(F.col("kind") == "returned", F.coalesce(_return_reason(), F.lit(0)) + has_cause)
        .when(F.col("kind").isin("dead-lettered", "handled"), has_cause)
        .otherwise(F.col("group"))
    )
    return own.select(
        "queue",
        "event",
        at.alias("at"),
        _code().alias("code"),
        F.coalesce("sequence", F.when(is_subscribed, F.col("priority")), F.lit(-1)).alias("sequence"),
        F.coalesce("consumer", F.lit(-1)).alias("consumer"),
        F.coalesce(number, F.lit(0)).cast("bigint").alias("number"),
        F.coalesce("persistent", F.lit(False)).alias("persistent"),
        F.when(is_at_once, F.col("event")).otherwise(F.coalesce("visible_event", F.lit(NEVER))).alias("visible_event"),
        F.when(is_at_once, at).otherwise(F.coalesce("visible_at", F.lit(0))).alias("visible_at"),
        F.coalesce(detail_code, F.lit(0)).cast("bigint").alias("detail_code"),
    ).where("code is not null")


def _flags() -> Column:
    columns = (
        F.when(F.col("mode").contains(word), F.lit(int(flag))).otherwise(F.lit(0)) for word, flag in FLAGS.items()
    )
    return reduce(add, columns)


def _return_reason() -> Column:
    return reduce(
        lambda chain, each: chain.when(F.col("reason").startswith(each[0]), F.lit(int(each[1]))),
        RETURN_REASONS.items(),
        F.when(F.col("reason").isNull(), F.lit(0)),
    )


def _code() -> Column:
    return reduce(
        lambda chain, each: chain.when(F.col("kind") == each[0], F.lit(int(each[1])).cast("tinyint")),
        CODES.items(),
        # The suffix of a reason, after the consumer's act, or the whole reason.
        F.when(F.col("reason").endswith(DELAYED), F.lit(int(EventCode.DELAYED)).cast("tinyint")).when(
            F.col("reason").endswith(BLOCKING), F.lit(int(EventCode.BLOCKING)).cast("tinyint")
        ),
    )


def proven(events: DataFrame, runs: DataFrame, commits: DataFrame) -> DataFrame:
    """Return messages whose commit is not in the history, but that occur in a later run: `sequence`, `proven_event`,
    `proven_at`.

    These messages were recovered, so the start of the next run made them visible. Messages that occur in no later run
    may not have been durable.
    """
    last = commits.groupBy("run").agg(F.max("batch").alias("last_batch"))
    open_runs = (
        runs.where("next_event is not null")
        .join(last, "run", "left")
        .select("run", "next_event", "next_at", "last_batch")
    )
    uncertain = (
        events.where("kind = 'accepted' and batch > 0")
        .join(F.broadcast(open_runs), "run")
        .where("last_batch is null or batch > last_batch")
        .select("sequence", F.col("next_event").alias("proven_event"), F.col("next_at").alias("proven_at"))
    )
    return (
        events.where("sequence is not null and kind <> 'accepted'")
        .select("event", "sequence")
        .join(F.broadcast(uncertain), "sequence")
        .where("event > proven_event")
        .select("sequence", "proven_event", "proven_at")
        .distinct()
    )


def marks_of_queues(marks: DataFrame, own: DataFrame, queues: DataFrame | None) -> DataFrame:
    """Return the `marks` of each broker for each of its queues. `own` are events of queues; `queues` are further queues
    of the only broker."""
    named = own.select("queue", broker_number(F.col("event")).alias("broker"))
    if queues is not None:
        named = named.unionByName(queues.select("queue", F.lit(0).cast("bigint").alias("broker")))
    return marks.withColumn("broker", broker_number(F.col("event"))).join(F.broadcast(named.distinct()), "broker")


def marks(runs: DataFrame, gaps: DataFrame, is_whole: bool | None = None) -> DataFrame:
    """Return rows for the starts of runs, the gaps, and the end of the history. They apply to every queue of their
    broker. `is_whole` says whether the history up to the first of `runs` has every event; None if it begins with that
    run."""
    nothing = {"sequence": -1, "consumer": -1, "persistent": False, "visible_event": NEVER, "detail_code": 0}
    # With the history complete from its first event to a start, no queue can have an unknown message then.
    broker = broker_number(F.col("run"))
    order = Window.partitionBy(broker).orderBy("run").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    every_run = F.col("run") - F.min("run").over(order) + 1 == F.count("*").over(order)
    from_first = own_number(F.min("first_event").over(order)) == 1 if is_whole is None else F.lit(is_whole)
    flags = (
        F.when(F.col("is_clean"), F.lit(int(StartFlag.CLEAN))).otherwise(F.lit(0))
        + F.when(F.col("previous_run") == F.col("run") - 1, F.lit(int(StartFlag.CONTINUED))).otherwise(F.lit(0))
        + F.when(F.col("is_recovered"), F.lit(int(StartFlag.RECOVERED))).otherwise(F.lit(0))
        + F.when(from_first & every_run, F.lit(int(StartFlag.COMPLETE))).otherwise(F.lit(0))
    )
    starts = (
        runs.withColumn("flags", flags)
        .where("started_event is not null")
        .select(
            F.col("started_event").alias("event"),
            F.col("started_at").alias("at"),
            F.lit(int(EventCode.RUN_STARTED)).alias("code"),
            F.col("flags").alias("number"),
            # Time of the last event of the run before.
            F.col("previous_at").alias("visible_at"),
        )
    )
    missing = gaps.select(
        F.col("first_missing").alias("event"),
        F.lit(0).alias("at"),
        F.lit(int(EventCode.GAP)).alias("code"),
        F.col("last_missing").alias("number"),
    )
    end = runs.groupBy(broker).agg(
        (F.max("last_event") + 1).alias("event"),
        F.max_by("last_at", "last_event").alias("at"),
        F.lit(int(EventCode.FINISHED)).alias("code"),
    )
    rows = reduce(partial(DataFrame.unionByName, allowMissingColumns=True), (starts, missing, end))
    return rows.select(
        *(F.coalesce(name, F.lit(0)).cast("bigint").alias(name) for name in ("event", "at", "number", "visible_at")),
        F.col("code").cast("tinyint").alias("code"),
        *(F.lit(value).cast("boolean" if value is False else "bigint").alias(name) for name, value in nothing.items()),
    )
