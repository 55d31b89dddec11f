"""Processes that recorded events of stages, and whether their records are complete."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def processes(stage_events: DataFrame) -> DataFrame:
    """Return one row per process: `service`, `instance`, `format`, and `is_whole` if no event is missing between its
    first and last record. Earlier files may have been deleted, and events that a crash took come after the last."""
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
