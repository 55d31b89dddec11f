"""How long does a message wait, and how long does a consumer need?"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

ACCURACY = 10_000
"""Percentiles are off by a 10,000th of the messages at most."""


def latency(outcomes: DataFrame) -> DataFrame:
    """Per queue and priority, in seconds: `wait_*` from visible to the first dispatch, `hold_*` from dispatch to
    acknowledged; p50, p90, p99, max."""
    times = outcomes.where((F.col("row") == "message") & (F.col("delivery") > 0))
    shares = [0.5, 0.9, 0.99]
    measured = times.groupBy("queue", "priority").agg(
        F.count("*").alias("messages"),
        *(F.percentile_approx(name, shares, ACCURACY).alias(name) for name in ("wait", "hold")),
        *(F.max(name).alias(f"{name}_max") for name in ("wait", "hold")),
    )
    return measured.select(
        "queue",
        "priority",
        "messages",
        *(
            (F.col(name)[place] / 1e6).alias(f"{name}_p{share * 100:.0f}")
            for name in ("wait", "hold")
            for place, share in enumerate(shares)
        ),
        *((F.col(f"{name}_max") / 1e6).alias(f"{name}_max") for name in ("wait", "hold")),
    )
