"""When did the broker start, and how did it end before?"""

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F


def runs(events: DataFrame) -> DataFrame:
    """One row per run.

    `started_event`, `started_at` (null if the history begins within the run), `is_clean` (how the run before ended),
    `first_event`, `last_event`, `last_at`; `goes_on`: it got past its recovery; `previous_run`, `previous_at` (its last
    event), and `next_event`, `next_at` (the start after it).
    """
    is_started = F.col("kind") == "started"
    at = F.unix_micros("at")
    order = Window.orderBy("run")
    return (
        events.groupBy("run")
        .agg(
            F.min(F.when(is_started, F.col("event"))).alias("started_event"),
            F.min(F.when(is_started, at)).alias("started_at"),
            # As a boolean: Spark would sort all events for the sake of one string.
            F.bool_or(is_started & F.col("reason").eqNullSafe("clean")).alias("is_clean"),
            F.min("event").alias("first_event"),
            F.max("event").alias("last_event"),
            F.max_by(at, "event").alias("last_at"),
            F.bool_or(~F.col("kind").isin("started", "recovered")).alias("goes_on"),
        )
        .withColumn("previous_run", F.lag("run").over(order))
        .withColumn("previous_at", F.lag("last_at").over(order))
        .withColumn("next_event", F.lead("started_event").over(order))
        .withColumn("next_at", F.lead("started_at").over(order))
    )
