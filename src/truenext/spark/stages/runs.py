"""Executions of stages, as the stages have recorded them, joined with the history of their messages."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from truenext.spark.stages.schema import OUTCOMES

END_KINDS = ("acknowledged", "dead-lettered", "expired", "handled", "moved", "removed")
_MESSAGE_KINDS = ("accepted", "dispatched", "returned", *END_KINDS)
_START_FIELDS = (
    *("stage", "queue", "sequence", "message", "parent", "flow", "trace", "sender", "attempt", "deliveries"),
    *("accepted_ms", "exactly_once", "taken", "broker"),
)
_END_FIELDS = ("total_us", "run_us", "commit_us", "error", "given_up_for")


def runs(stage_events: DataFrame) -> DataFrame:
    """Return one row for each execution: the fields of its start, `sql_at` if its SQL was committed, and `outcome`,
    `ended_at`, `end_number`. The last three are null if its end was not recorded."""
    kind = F.col("kind")
    is_over = kind.isin(*OUTCOMES)
    return (
        stage_events.where(kind.isin("started", "SQL committed", *OUTCOMES))
        .groupBy("process", F.coalesce("execution", "number").alias("execution"))
        # Each event is recorded once; copies of an event count as one.
        .agg(
            _at(kind == "started").alias("started_at"),
            *(F.max(name).alias(name) for name in _START_FIELDS),
            _at(kind == "SQL committed").alias("sql_at"),
            F.max(F.when(is_over, kind)).alias("outcome"),
            F.max(F.when(is_over, F.col("number"))).alias("end_number"),
            _at(is_over).alias("ended_at"),
            *(F.max(name).alias(name) for name in _END_FIELDS),
        )
        # The file with its start may have been deleted.
        .where("started_at is not null")
    )


def message_histories(events: DataFrame, queues: DataFrame) -> DataFrame:
    """Return one row for each message in `queues`, from the history: the time at which it was accepted, the events of
    its acknowledgement and of its last return, the way in which it ended, and all its dispatches."""
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
    """Join each execution with the history of its message, and with its dispatch. `again` says that the message was
    dispatched or returned later. Messages without a recorded execution are included."""
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
