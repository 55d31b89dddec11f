"""Which messages were lost, and which were delivered twice?"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F


def lost(sweep_rows: DataFrame) -> DataFrame:
    """One row per observation: `count` messages, `detail` by what it was seen (`found empty`, `not recovered`).

    `sequence` is the first message that it can be; `persistent` null if it may be either.
    """
    return _found(sweep_rows, F.col("kind") == "lost", "sequence", "priority", "persistent", "count", "detail")


def duplicates(sweep_rows: DataFrame) -> DataFrame:
    """Dispatched although held or gone, acknowledged although its durable subscription had ended; and `resurrected`:
    more messages recovered than there can be.
    """
    return _found(
        sweep_rows,
        F.col("kind").isin("duplicate", "resurrected"),
        "kind",
        F.when(F.col("sequence") >= 0, F.col("sequence")).alias("sequence"),
        F.when(F.col("consumer") >= 0, F.col("consumer")).alias("consumer"),
        "count",
        "detail",
    )


def _found(sweep_rows: DataFrame, which: Column, *columns: str | Column) -> DataFrame:
    return (
        sweep_rows.where(F.col("row") == "finding")
        .where(which)
        .select("queue", "event", F.timestamp_micros("at").alias("at"), *columns)
    )
