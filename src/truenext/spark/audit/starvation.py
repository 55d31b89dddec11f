"""Who waited longest, and how often were they overtaken?"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


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
