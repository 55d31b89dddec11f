"""Measures of queues: how long messages waited and were held, starvation, redelivery, depth, and positions."""

from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from truenext.model.events import FAILURES

# ---- Times until dispatch and until acknowledgement ----

ACCURACY = 10_000
"""Accuracy of percentiles: their rank is wrong by at most a 10,000th of the number of messages."""

MEASURES = {"visible to dispatched": "wait", "dispatched to acknowledged": "hold"}
"""Column of the sweep's rows (sweep.py) for each measure. Its values are microseconds."""


def latency(sweep_rows: DataFrame) -> DataFrame:
    """Return p50, p90, p99 and maximum of each measure in milliseconds, and the number of messages: a row for each
    queue, priority and measure."""
    times = sweep_rows.where((F.col("row") == "message") & (F.col("delivery") > 0))
    return reduce(DataFrame.unionByName, (_measured(times, measure, name) for measure, name in MEASURES.items()))


def _measured(times: DataFrame, measure: str, name: str) -> DataFrame:
    shares = [0.5, 0.9, 0.99]
    measured = times.groupBy("queue", "priority").agg(
        F.count(name).alias("count"),
        F.percentile_approx(name, shares, ACCURACY).alias("shares"),
        F.max(name).alias("max"),
    )
    return measured.where("count > 0").select(
        "queue",
        "priority",
        F.lit(measure).alias("measure"),
        "count",
        *((F.col("shares")[index] / 1e3).alias(f"p{share * 100:.0f}") for index, share in enumerate(shares)),
        (F.col("max") / 1e3).alias("max"),
    )


# ---- Longest waits, and messages that were overtaken ----


def starvation(sweep_rows: DataFrame) -> DataFrame:
    """Return for each queue and priority the longest wait for a first dispatch, with its message, and how far messages
    were overtaken.

    `overtaken` is the number of later arrivals dispatched before a message, minus the number of earlier arrivals
    dispatched after it. A large number usually follows from priorities, and is no violation.
    """
    return (
        sweep_rows.where(F.col("row") == "message")
        .where("wait is not null")
        .withColumn("places", F.greatest(F.col("delivery") - F.col("arrival"), F.lit(0)))
        .withColumn("places", F.when(F.col("delivery") > 0, F.col("places")))
        .groupBy("queue", "priority")
        .agg(
            F.count("*").alias("messages"),
            (F.max("wait") / 1e6).alias("longest_seconds"),
            F.max_by("sequence", "wait").alias("longest_sequence"),
            F.sum(F.when(F.col("delivery") == 0, 1).otherwise(0)).alias("never_dispatched"),
            F.max("places").alias("overtaken_max"),
            F.avg("places").alias("overtaken_mean"),
        )
    )


# ---- Returns and dead letters ----

REASONS = (*FAILURES, "released")


def redelivery(events: DataFrame) -> DataFrame:
    """Return for each queue: dispatches, redeliveries, returns by reason, dead letters, expired messages, and the
    highest `deliveries` and `attempts` of a message. A redelivery is a dispatch after the first one, whether or not its
    MESSAGE says so."""
    kind = F.col("kind")
    return (
        events.where(kind.isin("dispatched", "returned", "dead-lettered", "expired"))
        .groupBy("queue")
        .agg(
            F.count_if(kind == "dispatched").alias("dispatches"),
            F.count_if((kind == "dispatched") & (F.col("deliveries") > 1)).alias("redeliveries"),
            *(
                # A message that then waits for its retry has a suffix in its reason.
                F.count_if((kind == "returned") & F.col("reason").startswith(reason)).alias(reason)
                for reason in REASONS
            ),
            F.count_if(kind == "dead-lettered").alias("dead_letters"),
            F.count_if(kind == "expired").alias("expired"),
            F.max("deliveries").alias("deliveries_max"),
            F.max("attempts").alias("attempts_max"),
        )
    )


# ---- Messages waiting and held, over time ----


def depth(sweep_rows: DataFrame) -> DataFrame:
    """Return for each queue at most 1,001 depths, at regular distances in its events, and at its last event. The
    columns are `queue`, `event`, `at`, `waiting`, `held`."""
    return sweep_rows.where(F.col("row") == "depth").select(
        "queue", "event", F.timestamp_micros("at").alias("at"), "waiting", "held"
    )


# ---- Orders of arrival and of delivery ----

POINTS_MAX = 4000


def positions(sweep_rows: DataFrame) -> DataFrame:
    """Return the positions of messages in a queue's order of arrival and order of delivery, from 1. There is a row for
    every n-th arrival, at most 4,000 for each queue, and for the last delivery of each priority."""
    delivered = sweep_rows.where((F.col("row") == "message") & (F.col("delivery") > 0))
    last = delivered.groupBy("queue", "priority").agg(F.max("delivery").alias("last"))
    steps = delivered.groupBy("queue").agg(F.ceil(F.max("arrival") / POINTS_MAX).alias("step"))
    return (
        delivered.join(F.broadcast(steps), "queue")
        .join(F.broadcast(last), ["queue", "priority"])
        .where("arrival % step = 0 or delivery = last")
        .select("queue", "priority", "persistent", "sequence", "arrival", "delivery")
    )
