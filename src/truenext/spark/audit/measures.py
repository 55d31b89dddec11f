"""What is measured of queues: how long messages waited and were held, how often they came back, how many there were."""

from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from truenext.model.events import FAILURES

# ---- How long does a message wait, and how long does a consumer need? ----

ACCURACY = 10_000
"""Percentiles are off by a 10,000th of the messages at most."""

MEASURES = {"visible to dispatched": "wait", "dispatched to acknowledged": "hold"}
"""What is measured, and the column of the sweep that has it in microseconds."""


def latency(sweep_rows: DataFrame) -> DataFrame:
    """Per queue, priority and measure, in milliseconds: p50, p90, p99, max, and the count of messages."""
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


# ---- Who waited longest, and how often were they overtaken? ----


def starvation(sweep_rows: DataFrame) -> DataFrame:
    """Per queue and priority: the longest wait to the first dispatch, which message that was, and places lost.

    A message loses a place with each later arrival that is dispatched before it, and wins one with each earlier
    arrival that it is dispatched before; `overtaken` is the difference. Much of it is what priorities are for:
    it is no violation.
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


# ---- How often were messages given back and given up? ----

REASONS = (*FAILURES, "released")


def redelivery(events: DataFrame) -> DataFrame:
    """Per queue: dispatches, how many of them were not the first, returns by reason, dead letters, and the most
    `deliveries` and `attempts` that one message came to."""
    kind = F.col("kind")
    return (
        events.where(kind.isin("dispatched", "returned", "dead-lettered", "expired"))
        .groupBy("queue")
        .agg(
            F.count_if(kind == "dispatched").alias("dispatches"),
            F.count_if((kind == "dispatched") & (F.col("deliveries") > 1)).alias("redeliveries"),
            *(
                # Those that then wait for their next try say so behind it.
                F.count_if((kind == "returned") & F.col("reason").startswith(reason)).alias(reason)
                for reason in REASONS
            ),
            F.count_if(kind == "dead-lettered").alias("dead_letters"),
            F.count_if(kind == "expired").alias("expired"),
            F.max("deliveries").alias("deliveries_max"),
            F.max("attempts").alias("attempts_max"),
        )
    )


# ---- How many messages waited and were held, over time? ----


def depth(sweep_rows: DataFrame) -> DataFrame:
    """`queue`, `event`, `at`, `waiting`, `held`: at most 1,001 points per queue, evenly by its events, and the last."""
    return sweep_rows.where(F.col("row") == "depth").select(
        "queue", "event", F.timestamp_micros("at").alias("at"), "waiting", "held"
    )


# ---- In which order did messages arrive, and in which were they delivered? ----

POINTS_MAX = 4000


def positions(sweep_rows: DataFrame) -> DataFrame:
    """Places within the queue, from 1; every n-th arrival, so that a queue has at most 4,000, and the last delivery of
    each priority.
    """
    delivered = sweep_rows.where((F.col("row") == "message") & (F.col("delivery") > 0))
    last = delivered.groupBy("queue", "priority").agg(F.max("delivery").alias("last"))
    steps = delivered.groupBy("queue").agg(F.ceil(F.max("arrival") / POINTS_MAX).alias("step"))
    return (
        delivered.join(F.broadcast(steps), "queue")
        .join(F.broadcast(last), ["queue", "priority"])
        .where("arrival % step = 0 or delivery = last")
        .select("queue", "priority", "persistent", "sequence", "arrival", "delivery")
    )
