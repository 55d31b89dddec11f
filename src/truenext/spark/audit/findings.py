"""What is found of messages: which were overtaken, lost or delivered twice, what consumers must not have got, and when
ready messages waited."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

_WHERE = ("queue", "event", "at")

# ---- Which messages were not the true next one when they were dispatched? ----

ORDER_KINDS = ("inversion", "order", "premature")
"""A ready message of higher priority was overtaken; one of equal priority and smaller sequence was, ready or still
being committed; the message itself was not visible yet."""


def ordering(sweep_rows: DataFrame) -> DataFrame:
    """One row per violation, with its witness: what was dispatched, to whom, at which event, and what it overtook."""
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


# ---- Which messages were lost, and which were delivered twice? ----


def lost(sweep_rows: DataFrame) -> DataFrame:
    """One row per observation: `count` messages, `detail` by what it was seen (`found empty`, `not recovered`).

    `sequence` is the first message that it can be; `persistent` null if it may be either.
    """
    return _found(sweep_rows, F.col("kind") == "lost", *_WHERE, "sequence", "priority", "persistent", "count", "detail")


def duplicates(sweep_rows: DataFrame) -> DataFrame:
    """Dispatched although held or gone, acknowledged although its durable subscription had ended; and `resurrected`:
    more messages recovered than there can be.
    """
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
    """The findings of some kinds, `at` as a time."""
    at = F.timestamp_micros("at")
    return sweep_rows.where(F.col("row") == "finding").where(which).withColumn("at", at).select(*columns)


def _if_known(column: str) -> Column:
    """Null instead of a negative number."""
    return F.when(F.col(column) >= 0, F.col(column)).alias(column)


# ---- What did consumers get, or have counted against them, that they must not? ----

CONSUMER_KINDS = ("uncredited", "miscount", "stale", "lost-failure")
"""A dispatch for which there was no credit, or beside an exclusive consumer; an attempt that was nobody's failure; an
act of a consumer that had ended, or did not hold the message; a failure that the broker had recorded and lost: its
attempt is not counted any more, or its cause is not in the dead letter."""


def consumers(sweep_rows: DataFrame) -> DataFrame:
    """One row per finding, and in `detail` what it was."""
    return _found(
        sweep_rows,
        F.col("kind").isin(*CONSUMER_KINDS),
        "kind",
        *_WHERE,
        "sequence",
        _if_known("consumer"),
        "detail",
    )


# ---- When did ready messages wait although a consumer could have taken them? ----


def stuck(sweep_rows: DataFrame) -> DataFrame:
    """One row per time: since `event`, for `seconds`, `waiting` messages, the first of them `sequence`."""
    return _found(
        sweep_rows,
        F.col("kind") == "stuck",
        *_WHERE,
        "sequence",
        "priority",
        F.col("count").alias("waiting"),
        (F.col("duration") / 1e6).alias("seconds"),
    )
