"""What did consumers get, or have counted against them, that they must not?"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

KINDS = ("uncredited", "miscount", "stale", "forgotten")
"""A dispatch for which there was no credit, or beside an exclusive consumer; an attempt that was nobody's failure; a
consumer that had ended, or did not hold the message, and acted; an attempt that was counted before and is no more, or
the cause of a failure that the dead letter does not say."""


def consumers(sweep_rows: DataFrame) -> DataFrame:
    """One row per finding, and in `detail` what it was."""
    return (
        sweep_rows.where(F.col("row") == "finding")
        .where(F.col("kind").isin(*KINDS))
        .select(
            "kind",
            "queue",
            "event",
            F.timestamp_micros("at").alias("at"),
            "sequence",
            F.when(F.col("consumer") >= 0, F.col("consumer")).alias("consumer"),
            "detail",
        )
    )
