"""How long does a message wait, and how long does a consumer need?"""

from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

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
