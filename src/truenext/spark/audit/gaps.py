"""Which numbers of events are missing: what did a crash take from the history?"""

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from truenext.spark.audit.blocks import block


def gaps(events: DataFrame, blocks: DataFrame) -> DataFrame:
    """`first_missing`, `last_missing`, `missing`: one row per gap.

    Most histories have no gap, so events are counted by blocks, and only a block with too few is looked into.
    """
    whole = blocks.groupBy("block").agg(
        F.sum("events").alias("events"), F.min("first").alias("first"), F.max("last").alias("last")
    )
    broken = whole.where("last - first + 1 > events").select("block")
    numbered = events.select("event", block().alias("block"))
    inside = (
        numbered.join(F.broadcast(broken), "block")
        .withColumn("before", F.lag("event").over(Window.partitionBy("block").orderBy("event")))
        .select("before", F.col("event").alias("after"))
    )
    between = whole.withColumn("before", F.lag("last").over(Window.orderBy("block"))).select(
        "before", F.col("first").alias("after")
    )
    return (
        inside.union(between)
        .where("after - before > 1")
        .select(
            (F.col("before") + 1).alias("first_missing"),
            (F.col("after") - 1).alias("last_missing"),
            (F.col("after") - F.col("before") - 1).alias("missing"),
        )
    )
