"""What is there, by blocks of 65,536 numbers of events? One look at all events, for all that asks about whole runs."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from truenext.model.events import REASONS, SUBSCRIPTION_MODES, EventKind

BLOCK_BITS = 16

KINDS = ({kind.label for kind in EventKind} - {"name", "cause"}) | {"drained"}
"""Kinds of event of docs/history.md."""


def block() -> Column:
    """The block of an `event`."""
    return F.shiftright("event", BLOCK_BITS)


def blocks(events: DataFrame) -> DataFrame:
    """One row per run and block: `events`, `first`, `last`, `last_at`, `started_event`, `started_at`, `is_clean`,
    `is_recovered`, `unknown_event`; see runs.py."""
    is_started = F.col("kind") == "run-started"
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
        F.bool_or(~F.col("kind").isin("run-started", "recovered")).alias("is_recovered"),
        F.min(F.when(_is_unknown(), F.col("event"))).alias("unknown_event"),
    )


def _is_unknown() -> Column:
    """No broker writes such an event into a history of the version that this truenext reads."""
    kind, reason, mode = F.col("kind"), F.col("reason"), F.col("mode")
    return (
        ~kind.isin(*sorted(KINDS))
        | ~reason.isin(*REASONS)
        # Up to version 8 this was the kind of a run's start.
        | ((kind == "started") & reason.isNotNull())
        | ~mode.isin(*SUBSCRIPTION_MODES)
    )
