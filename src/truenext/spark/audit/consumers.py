"""What did consumers get, or have counted against them, that they must not?"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

KINDS = ("uncredited", "miscount", "stale", "lost-failure")
"""A dispatch for which there was no credit, or beside an exclusive consumer; an attempt that was nobody's failure; an
act of a consumer that had ended, or did not hold the message; a failure that the broker had recorded and lost: its
attempt is not counted any more, or its cause is not in the dead letter."""


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
