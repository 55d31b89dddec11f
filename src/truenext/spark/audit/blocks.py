"""What is there, by blocks of 65,536 numbers of events? One look at all events, for all that asks about whole runs."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

BLOCK_BITS = 16


def block() -> Column:
    """The block of an `event`."""
    return F.shiftright("event", BLOCK_BITS)


def blocks(events: DataFrame) -> DataFrame:
    """One row per run and block: `events`, `first`, `last`, `last_at`, `started_event`, `started_at`, `is_clean`,
    `goes_on`; see runs.py."""
    is_started = F.col("kind") == "started"
    at = F.unix_micros("at")
    return events.groupBy("run", block().alias("block")).agg(
        F.count("*").alias("events"),
        F.min("event").alias("first"),
        F.max("event").alias("last"),
        F.max_by(at, "event").alias("last_at"),
        F.min(F.when(is_started, F.col("event"))).alias("started_event"),
        F.min(F.when(is_started, at)).alias("started_at"),
        # As a boolean: Spark would sort all events for the sake of one string.
        F.bool_or(is_started & F.col("reason").eqNullSafe("clean")).alias("is_clean"),
        F.bool_or(~F.col("kind").isin("started", "recovered")).alias("goes_on"),
    )
