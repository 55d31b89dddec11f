"""When did the broker start, and how did it end before?"""

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F


def runs(blocks: DataFrame) -> DataFrame:
    """One row per run.

    `started_event`, `started_at` (null if the history begins within the run), `is_clean` (how the run before ended),
    `first_event`, `last_event`, `last_at`; `is_recovered`: it got past its recovery;
    `unknown_event`: the first event that is none of docs/history.md, null if all are; `previous_run`, `previous_at`
    (its last event), and `next_event`, `next_at` (the start after it).
    """
    order = Window.orderBy("run")
    return (
        blocks.groupBy("run")
        .agg(
            F.min("started_event").alias("started_event"),
            F.min("started_at").alias("started_at"),
            F.bool_or("is_clean").alias("is_clean"),
            F.min("first").alias("first_event"),
            F.max("last").alias("last_event"),
            F.max_by("last_at", "last").alias("last_at"),
            F.bool_or("is_recovered").alias("is_recovered"),
            F.min("unknown_event").alias("unknown_event"),
        )
        .withColumn("previous_run", F.lag("run").over(order))
        .withColumn("previous_at", F.lag("last_at").over(order))
        .withColumn("next_event", F.lead("started_event").over(order))
        .withColumn("next_at", F.lead("started_at").over(order))
    )
