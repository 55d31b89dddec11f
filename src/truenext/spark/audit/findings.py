"""Tables of findings: messages overtaken, lost or delivered twice, wrong events of consumers, and idle queues with
ready messages."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

_WHERE = ("queue", "event", "at")

# ---- Messages that were not the true next when they were dispatched ----

ORDER_KINDS = ("inversion", "order", "premature")
"""`inversion` overtook a ready message of higher priority; `order` overtook one of equal priority and smaller
sequence, ready or still being committed; `premature` was not visible or due yet itself, or its queue was paused."""


def ordering(sweep_rows: DataFrame) -> DataFrame:
    """Return one row per violation: the dispatched message, its consumer, the event, and the overtaken witness."""
    return _found(
        sweep_rows,
        F.col("kind").isin(*ORDER_KINDS),
        "kind",
        *_WHERE,
        "sequence",
        "priority",
        "persistent",
        "consumer",
        _if_known("overtaken_sequence"),
        F.when(F.col("overtaken_sequence") >= 0, F.col("overtaken_priority")).alias("overtaken_priority"),
    )


# ---- Lost and duplicate messages ----


def lost(sweep_rows: DataFrame) -> DataFrame:
    """Return one row per observation of `count` lost messages; `detail`: `found empty` or `not recovered`.

    `sequence` is the first message that may be lost; `persistent` is null if either kind may be.
    """
    return _found(sweep_rows, F.col("kind") == "lost", *_WHERE, "sequence", "priority", "persistent", "count", "detail")


def duplicates(sweep_rows: DataFrame) -> DataFrame:
    """Return messages dispatched although held or gone, or ended other than by expiry after their durable
    subscription had ended; and `resurrected`: more messages recovered than there can be."""
    return _found(
        sweep_rows,
        F.col("kind").isin("duplicate", "resurrected"),
        *_WHERE,
        "kind",
        _if_known("sequence"),
        _if_known("consumer"),
        "count",
        "detail",
    )


def _found(sweep_rows: DataFrame, which: Column, *columns: str | Column) -> DataFrame:
    """Return the findings that match `which`, with `at` as a timestamp."""
    at = F.timestamp_micros("at")
    return sweep_rows.where(F.col("row") == "finding").where(which).withColumn("at", at).select(*columns)


def _if_known(column: str) -> Column:
    """Return the column with null for negative numbers."""
    return F.when(F.col(column) >= 0, F.col(column)).alias(column)


# ---- Dispatches, attempts and acts of consumers that the contract forbids ----

CONSUMER_KINDS = ("uncredited", "miscount", "stale", "lost-failure")
"""`uncredited`: dispatch without credit, or not to the exclusive consumer; `miscount`: attempt counted without a
failure; `stale`: dispatch to, or act of, a consumer that had ended or did not hold the message; `lost-failure`:
recorded failure that the broker lost: attempt not counted any more, or cause missing in the dead letter."""


def consumers(sweep_rows: DataFrame) -> DataFrame:
    """Return one row per finding, described in `detail`."""
    return _found(
        sweep_rows,
        F.col("kind").isin(*CONSUMER_KINDS),
        "kind",
        *_WHERE,
        "sequence",
        _if_known("consumer"),
        "detail",
    )


# ---- Idle time with a ready message and a free consumer ----


def stuck(sweep_rows: DataFrame) -> DataFrame:
    """Return one row per idle time: since `event`, for `seconds`, `waiting` messages, `sequence` as true next."""
    return _found(
        sweep_rows,
        F.col("kind") == "stuck",
        *_WHERE,
        "sequence",
        "priority",
        F.col("count").alias("waiting"),
        (F.col("duration") / 1e6).alias("seconds"),
    )
