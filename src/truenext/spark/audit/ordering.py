"""Which messages were not the true next one when they were dispatched?"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

KINDS = ("inversion", "order", "premature")
"""A ready message of higher priority was overtaken; one of equal priority and smaller sequence was, ready or still
being committed; the message itself was not visible yet."""


def ordering(sweep_rows: DataFrame) -> DataFrame:
    """One row per violation, with its witness: what was dispatched, to whom, at which event, and what it overtook."""
    return (
        sweep_rows.where(F.col("row") == "finding")
        .where(F.col("kind").isin(*KINDS))
        .select(
            "kind",
            "queue",
            "event",
            F.timestamp_micros("at").alias("at"),
            "sequence",
            "priority",
            "persistent",
            "consumer",
            F.when(F.col("overtaken_sequence") >= 0, F.col("overtaken_sequence")).alias("overtaken_sequence"),
            F.when(F.col("overtaken_sequence") >= 0, F.col("overtaken_priority")).alias("overtaken_priority"),
        )
    )
