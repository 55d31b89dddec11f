"""Contradictions between the events of stages and the broker's history.

No finding compares the clocks of two machines. The order of events is known within one history, and within the events
of one process. A missing record alone is no finding: a process that was killed has not recorded its last events, and
old files are deleted.
"""

from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from truenext.spark.stages.schema import DONE

COLUMNS = ("kind", "queue", "sequence", "message", "trace", "stage", "detail")

SENTENCES = {
    "unacknowledged": "{:,} messages were redelivered, or not acknowledged, although their stages had completed",
    "not recorded": "{:,} messages were acknowledged although their process did not record that their stages completed",
    "repeated": "{:,} messages were completed more than once",
    "orphaned": "{:,} messages were sent although their stage was not committed",
}


def stage_findings(joined: DataFrame, processes: DataFrame, last_gap: int) -> DataFrame:
    """Return one row for each contradiction and message. `last_gap` is the number of the last event that the history
    lacks; 0 if it lacks none."""
    parts = (
        joined.transform(_unacknowledged, last_gap),
        joined.transform(_not_recorded, processes),
        joined.transform(_repeated),
        joined.transform(_orphaned, last_gap),
    )
    all_findings = reduce(DataFrame.unionByName, (part.select(*COLUMNS, "process") for part in parts))
    return all_findings.join(F.broadcast(processes.select("process", "instance")), "process", "left").drop("process")


def commit_gaps(joined: DataFrame, processes: DataFrame) -> DataFrame:
    """Return one row for each execution whose SQL was committed, but whose message was not acknowledged. This is the
    commit gap of best-effort 1PC (docs/stages.md). Such a gap is no finding: it has no effect if the stage is
    `exactly_once`, and any other stage must expect it."""
    is_own = F.col("last_dispatch")["event"] == F.col("dispatch")["event"]
    is_with_it = F.col("acknowledged_event").isNotNull() & is_own
    is_known = F.col("again") | F.col("end_kind").isNotNull()
    return (
        joined.where("sql_at is not null and dispatch is not null")
        .where(~F.coalesce(_done(), F.lit(False)))
        .where(is_known & ~is_with_it)
        .join(F.broadcast(processes.select("process", "instance")), "process", "left")
        .select(
            *("sql_at", "queue", "sequence", "message", "trace", "stage", "instance", "attempt"),
            F.coalesce("exactly_once", F.lit(False)).alias("exactly_once"),
            F.coalesce("outcome", F.lit("interrupted")).alias("outcome"),
            "error",
        )
    )


def _done() -> Column:
    return F.col("outcome").isin(*DONE)


def _unacknowledged(joined: DataFrame, last_gap: int) -> DataFrame:
    """Return completed messages that the history should show as acknowledged, but does not. The broker has confirmed
    their commits. A message counts if it was dispatched again or ended in another way, or if its process has an
    acknowledgement for a later execution. Only persistent messages count, because other acknowledgements are not
    durable."""
    known = joined.where("started_at is not null")
    later = (
        known.where("acknowledged_event is not null")
        .groupBy("process")
        .agg(F.max("execution").alias("later_execution"))
    )
    is_redelivered = F.col("again") | F.col("end_kind").isNotNull()
    is_late = (F.col("end_number") < F.col("later_execution")) & (F.col("last_event") > last_gap)
    return (
        known.where(_done() & F.col("persistent") & F.col("dispatch").isNotNull())
        .where("acknowledged_event is null")
        .join(F.broadcast(later), "process", "left")
        .where(is_redelivered | F.coalesce(is_late, F.lit(False)))
        .dropDuplicates(["queue", "sequence"])
        .withColumn("kind", F.lit("unacknowledged"))
        .withColumn(
            "detail",
            F.when(F.col("end_kind").isNotNull(), F.col("end_kind"))
            .when(F.col("again"), "came again")
            .otherwise("held"),
        )
    )


def _not_recorded(joined: DataFrame, processes: DataFrame) -> DataFrame:
    """Return acknowledged messages for which no completion is recorded, although their process has recorded completions
    for the same consumer before and after. The consumer's other messages tell which process this is."""
    known = joined.where(_done() & F.col("dispatch").isNotNull() & F.col("acknowledged_event").isNotNull())
    spans = (
        known.groupBy(
            F.col("dispatch")["broker_run"].alias("broker_run"), F.col("dispatch")["consumer"].alias("consumer")
        )
        .agg(
            F.min("process").alias("process"),
            F.max("process").alias("other"),
            F.min("acknowledged_event").alias("from_event"),
            F.max(F.col("dispatch")["event"]).alias("to_event"),
        )
        .where("process = other")
        .drop("other")
        .join(F.broadcast(processes.where("is_whole").select("process")), "process")
    )
    is_recorded = F.coalesce(F.col("outcome").isin(*DONE, "in doubt") | F.col("taken"), F.lit(False))
    return (
        joined.where("acknowledged_event is not null and last_dispatch is not null")
        .groupBy("queue", "sequence")
        .agg(
            F.max(is_recorded).alias("is_recorded"),
            F.max("acknowledged_event").alias("acknowledged_event"),
            F.max("last_dispatch").alias("last_dispatch"),
            *(F.max(name).alias(name) for name in ("message", "trace", "stage")),
            F.max_by("outcome", "execution").alias("outcome"),
        )
        .where(~F.col("is_recorded"))
        .withColumn("broker_run", F.col("last_dispatch")["broker_run"])
        .withColumn("consumer", F.col("last_dispatch")["consumer"])
        .join(F.broadcast(spans), ["broker_run", "consumer"])
        .where(F.col("last_dispatch")["event"] > F.col("from_event"))
        .where("acknowledged_event < to_event")
        .withColumn("kind", F.lit("not recorded"))
        .withColumn("detail", F.coalesce("outcome", F.lit("nothing recorded")))
    )


def _repeated(joined: DataFrame) -> DataFrame:
    return (
        joined.where((F.col("outcome") == "completed") & F.col("queue").isNotNull())
        .groupBy("queue", "message")
        .agg(
            F.count("*").alias("times"),
            *(F.max(name).alias(name) for name in ("sequence", "trace", "stage", "process")),
        )
        .where("times > 1")
        .withColumn("kind", F.lit("repeated"))
        .withColumn("detail", F.concat(F.col("times").cast("string"), F.lit(" times")))
    )


def _orphaned(joined: DataFrame, last_gap: int) -> DataFrame:
    """Return messages that a stage has sent although the message that it processed was never acknowledged. Sends and
    acknowledgement belong to one commit. A processed message that was dead-lettered, handled or moved is no finding: it
    may have been completed under another sequence. Messages of exactly-once stages are no finding either, because any
    process may send these once the SQL is committed.
    """
    parents = (
        joined.where("message is not null and queue is not null")
        .groupBy(F.col("message").alias("parent"))
        .agg(
            F.count("acknowledged_event").alias("acknowledged"),
            F.count_if(F.col("end_kind").isin("dead-lettered", "handled", "moved")).alias("elsewhere"),
            F.every(F.coalesce("persistent", F.lit(False))).alias("is_known"),
            F.some(F.coalesce("exactly_once", F.lit(False))).alias("is_exactly_once"),
            F.min("last_event").alias("parent_event"),
        )
        .where(f"is_known and not is_exactly_once and acknowledged = 0 and elsewhere = 0 and parent_event > {last_gap}")
        .select("parent")
    )
    return (
        # Messages that continue from a stash may be sent before the commit of its stage; their sender is no stage.
        joined.where("parent <> '' and instr(sender, ' ') > 0 and dispatch is not null")
        .join(parents, "parent")
        .dropDuplicates(["queue", "sequence"])
        .withColumn("kind", F.lit("orphaned"))
        .withColumn("detail", F.concat(F.lit("sent by "), F.col("sender")))
    )
