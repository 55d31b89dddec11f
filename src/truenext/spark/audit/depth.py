"""How many messages waited and were held, over time?"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def depth(sweep_rows: DataFrame) -> DataFrame:
    """`queue`, `event`, `at`, `waiting`, `held`: at most 1,001 points per queue, evenly by its events, and the last."""
    return sweep_rows.where(F.col("row") == "depth").select(
        "queue", "event", F.timestamp_micros("at").alias("at"), "waiting", "held"
    )
