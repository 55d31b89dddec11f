"""Flows: their durations, their executions, and the messages that were given up."""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from truenext.spark.stages.schema import DONE, OUTCOMES

SLOWEST_MAX = 50
"""Number of slowest flows on the page."""
GIVEN_UP_MAX = 50
"""Number of flows with given-up messages on the page. The latest ones are shown."""
RUNS_MAX = 60
"""Largest number of executions of one flow on the page."""


def flows(joined: DataFrame) -> DataFrame:
    """Return one row for each flow that has a recorded execution. The columns are trace, start, duration, and the
    numbers of messages, of executions (`runs`), and of failures. `given_up` counts the messages that are dead letters,
    expired, were removed, or were rejected and did not move to a handler; `in_progress` those that have neither ended
    nor been given up."""
    # An acknowledged message is not in progress, even if its process was killed before it recorded that. But a job of
    # Spark takes all messages of its batch, also those that it then rejects.
    is_taken = F.coalesce("taken", F.lit(False))
    is_acknowledged = F.coalesce(F.col("end_kind") == "acknowledged", F.lit(False))
    ended = F.col("outcome").isin(*DONE) | (is_acknowledged & ~is_taken)
    is_handled = F.coalesce(F.col("end_kind") == "handled", F.lit(False))
    lost = F.col("end_kind").isin("dead-lettered", "expired", "removed")
    lost |= ((F.col("outcome") == "rejected") | F.col("given_up_for").isNotNull()) & ~is_handled
    messages = (
        joined.where("started_at is not null")
        .groupBy("flow", "message")
        .agg(
            F.min("trace").alias("trace"),
            F.min(F.least(_accepted_at(), "started_at")).alias("started_at"),
            F.max(F.greatest("started_at", "ended_at")).alias("last_at"),
            F.count("*").alias("runs"),
            F.count_if(F.col("outcome") == "failed").alias("failures"),
            F.coalesce(F.max(ended), F.lit(False)).alias("has_ended"),
            F.coalesce(F.max(lost), F.lit(False)).alias("is_lost"),
        )
    )
    given_up = ~F.col("has_ended") & F.col("is_lost")
    return messages.groupBy("flow").agg(
        F.min("trace").alias("trace"),
        F.min("started_at").alias("started_at"),
        _seconds(F.min("started_at"), F.max("last_at")).alias("seconds"),
        F.count("*").alias("messages"),
        F.sum("runs").alias("runs"),
        F.sum("failures").alias("failures"),
        F.count_if(given_up).alias("given_up"),
        F.count_if(~F.col("has_ended") & ~F.col("is_lost")).alias("in_progress"),
    )


def waterfalls(joined: DataFrame, flows: DataFrame) -> DataFrame:
    """Return the executions of the flows on the page. `position` counts the executions of each flow from 1."""
    slowest = flows.orderBy(F.desc("seconds")).limit(SLOWEST_MAX)
    given_up = flows.where("given_up > 0").orderBy(F.desc("started_at")).limit(GIVEN_UP_MAX)
    shown = (
        slowest.union(given_up)
        .distinct()
        .select(
            "flow",
            F.col("started_at").alias("flow_started_at"),
            *("seconds", "messages", "runs", "failures", "given_up", "in_progress"),
        )
    )
    in_order = Window.partitionBy("flow").orderBy("started_at", "process", "execution")
    return (
        stage_runs(joined)
        .join(F.broadcast(shown), "flow")
        .withColumn("position", F.row_number().over(in_order))
        .where(F.col("position") <= RUNS_MAX)
    )


def stage_runs(joined: DataFrame) -> DataFrame:
    """Return one row for each execution. A row has the times at which the message was accepted and dispatched, by the
    broker's clock, and how the message ended (`end_kind`)."""
    return joined.where("started_at is not null").select(
        *("flow", "trace", "message", "parent", "sender", "stage", "queue", "sequence", "attempt", "deliveries"),
        *("process", "execution", _accepted_at().alias("accepted_at")),
        F.col("dispatch")["at"].alias("dispatched_at"),
        *("started_at", "sql_at", "ended_at", "outcome", "error", "run_us", "commit_us", "total_us"),
        *("given_up_for", "end_kind"),
    )


def stages(joined: DataFrame) -> DataFrame:
    """Return one row for each stage: the number of executions by outcome, how long messages waited for their first
    dispatch, and how long executions worked. Times are in milliseconds."""
    outcome = F.col("outcome")
    first = F.when(F.col("deliveries") == 1, F.unix_micros(F.col("dispatch")["at"]) - F.unix_micros("accepted_at"))
    return (
        joined.where("started_at is not null")
        .withColumn("waited", first)
        .groupBy("stage")
        .agg(
            F.count("*").alias("runs"),
            *(F.count_if(outcome == name).alias(name.replace(" ", "_")) for name in OUTCOMES),
            F.count_if(outcome.isNull()).alias("interrupted"),
            *_shares("waited", "waited"),
            *_shares("total_us", "worked"),
        )
    )


def _accepted_at() -> Column:
    """Return the time at which the broker accepted the message: from the history, or else, such as of a subscriber's
    message, from the message itself."""
    return F.coalesce("accepted_at", F.timestamp_millis("accepted_ms"))


def _shares(column: str, name: str) -> tuple[Column, ...]:
    return (
        (F.percentile_approx(column, 0.5) / 1e3).alias(f"{name}_p50"),
        (F.percentile_approx(column, 0.99) / 1e3).alias(f"{name}_p99"),
        (F.max(column) / 1e3).alias(f"{name}_max"),
    )


def _seconds(first: Column, last: Column) -> Column:
    return (F.unix_micros(last) - F.unix_micros(first)) / 1e6
