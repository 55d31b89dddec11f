"""Processes that have recorded events of stages, and whether their records are complete."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def processes(stage_events: DataFrame) -> DataFrame:
    """Return one row for each process: `service`, `instance`, `format`, and `is_whole`. `is_whole` says that no event
    is missing between its first and its last record. Earlier events may be in deleted files, and a crash may have lost
    later ones."""
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
