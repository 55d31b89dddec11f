"""What did each run of a stage do, by its own account, and what does the history say of its message?"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from truenext.spark.stages.schema import OUTCOMES

END_KINDS = ("acknowledged", "dead-lettered", "expired", "moved", "removed")
_MESSAGE_KINDS = ("accepted", "dispatched", "returned", *END_KINDS)
_START_FIELDS = (
    *("stage", "queue", "sequence", "message", "parent", "flow", "trace", "sender", "attempt", "deliveries"),
    "exactly_once",
)
_END_FIELDS = ("total_us", "run_us", "commit_us", "error")


def runs(stage_events: DataFrame) -> DataFrame:
    """One row per run, from the events of stages: what it started with, `sql_at` if its SQL was committed, and
    `outcome`, `ended_at`, `end_number`; null if that was not recorded."""
    kind = F.col("kind")
    is_over = kind.isin(*OUTCOMES)
    return (
        stage_events.where(kind.isin("started", "SQL committed", *OUTCOMES))
        .groupBy("process", F.coalesce("execution", "number").alias("execution"))
        # Each is recorded once; an event of which there is a copy is one.
        .agg(
            _at(kind == "started").alias("started_at"),
            *(F.max(name).alias(name) for name in _START_FIELDS),
            _at(kind == "SQL committed").alias("sql_at"),
            F.max(F.when(is_over, kind)).alias("outcome"),
            F.max(F.when(is_over, F.col("number"))).alias("end_number"),
            _at(is_over).alias("ended_at"),
            *(F.max(name).alias(name) for name in _END_FIELDS),
        )
        # Its start may be in a file that is deleted.
        .where("started_at is not null")
    )


def message_histories(events: DataFrame, queues: DataFrame) -> DataFrame:
    """One row per message in one of `queues`, from the history: when it was accepted and acknowledged, by which event
    it ended, and all its dispatches."""
    kind, event = F.col("kind"), F.col("event")
    dispatch = F.when(
        kind == "dispatched", F.struct("event", "at", F.col("run").alias("broker_run"), "consumer", "deliveries")
    )
    return (
        events.where(kind.isin(*_MESSAGE_KINDS))
        .join(F.broadcast(queues), "queue", "left_semi")
        .groupBy("queue", "sequence")
        .agg(
            F.max(F.when(kind == "accepted", F.col("at"))).alias("accepted_at"),
            F.max(F.when(kind == "accepted", F.col("persistent"))).alias("persistent"),
            F.max(F.when(kind == "acknowledged", event)).alias("acknowledged_event"),
            F.max(F.when(kind == "returned", event)).alias("returned_event"),
            F.max_by(F.when(kind.isin(*END_KINDS), kind), F.when(kind.isin(*END_KINDS), event)).alias("end_kind"),
            F.max(event).alias("last_event"),
            F.collect_list(dispatch).alias("dispatches"),
        )
        .withColumn("last_dispatch", F.array_max("dispatches"))
    )


def joined(runs: DataFrame, message_histories: DataFrame) -> DataFrame:
    """Every run with what the history says of its message and of its dispatch, `again` if the message came or stood
    there once more after that; and every message of which no run is recorded."""
    own = F.array_max(F.filter("dispatches", lambda each: each["deliveries"] == F.col("deliveries")))
    return (
        runs.join(message_histories, ["queue", "sequence"], "full")
        .withColumn("dispatch", F.when(F.col("started_at").isNotNull(), own))
        .withColumn(
            "again",
            (F.col("last_dispatch")["event"] > F.col("dispatch")["event"])
            | F.coalesce(F.col("returned_event") > F.col("dispatch")["event"], F.lit(False)),
        )
        .drop("dispatches")
    )


def _at(which: Column) -> Column:
    return F.timestamp_micros(F.max(F.when(which, F.col("at"))))
