"""Which process wrote what, and has it written all of it?"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def processes(stage_events: DataFrame) -> DataFrame:
    """One row per process: `service`, `instance`, `format`, and `is_whole` if no event is missing between the first and
    the last that there are. Older files may be gone, and what a crash took stands behind the last."""
    numbered = F.when(F.col("kind") != "opened", F.col("number"))
    return (
        stage_events.groupBy("process")
        .agg(
            F.max("service").alias("service"),
            F.max("instance").alias("instance"),
            F.max("format").alias("format"),
            F.count_distinct(numbered).alias("recorded"),
            F.min(numbered).alias("first"),
            F.max(numbered).alias("last"),
        )
        .select(
            "process",
            "service",
            "instance",
            "format",
            (F.coalesce(F.col("last") - F.col("first") + 1, F.lit(0)) == F.col("recorded")).alias("is_whole"),
        )
    )
