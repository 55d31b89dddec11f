"""Tables of findings: overtaken, lost and duplicate messages, wrong events of consumers, and idle queues with ready
messages."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

_WHERE = ("queue", "event", "at")

# ---- Messages that were not the true next when they were dispatched ----

ORDER_KINDS = ("inversion", "order", "premature")
"""Kinds of order violations. `inversion`: the dispatched message overtook a ready message of higher priority. `order`:
the dispatched message overtook a message of equal priority and smaller sequence, which was ready or being committed.
`premature`: the dispatched message was not visible or not due yet, or its queue was paused."""


def ordering(sweep_rows: DataFrame) -> DataFrame:
    """Return one row for each violation of the order of dispatch: the dispatched message, its consumer, the event, and
    the overtaken message."""
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
    """Return one row for each time that messages were found to be lost. `count` is their number, `detail` is `found
    empty` or `not recovered`.

    `sequence` is the first message that may be lost. `persistent` is null if it is unknown whether the lost messages
    were persistent.
    """
    return _found(sweep_rows, F.col("kind") == "lost", *_WHERE, "sequence", "priority", "persistent", "count", "detail")


def duplicates(sweep_rows: DataFrame) -> DataFrame:
    """Return one row for each duplicate: a message that was dispatched while another consumer held it, or after the
    message had ended; or a message that ended, other than by expiry, after its durable subscription had ended. A row
    `resurrected` means that more messages were recovered than the history allows."""
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
    """Return the rows of findings that match `which`. Their column `at` becomes a timestamp."""
    at = F.timestamp_micros("at")
    return sweep_rows.where(F.col("row") == "finding").where(which).withColumn("at", at).select(*columns)


def _if_known(column: str) -> Column:
    """Return the column, with null in place of a negative number."""
    return F.when(F.col(column) >= 0, F.col(column)).alias(column)


# ---- Dispatches, attempts and acts of consumers that the contract forbids ----

CONSUMER_KINDS = ("uncredited", "miscount", "stale", "lost-failure")
"""Kinds of findings about consumers. `uncredited`: a dispatch without credit, or to another consumer than the exclusive
one. `miscount`: an attempt counted without a failure. `stale`: a dispatch to a consumer that had ended, or an act of a
consumer that had ended or did not hold the message. `lost-failure`: a recorded failure that the broker has forgotten;
its attempt does not count any more, or its cause is missing in the dead letter."""


def consumers(sweep_rows: DataFrame) -> DataFrame:
    """Return one row for each finding about a consumer. The column `detail` describes it."""
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
    """Return one row for each idle time that was too long: the event at the start of that time, its length in
    `seconds`, the number of `waiting` messages, and the `sequence` of the true next message."""
    return _found(
        sweep_rows,
        F.col("kind") == "stuck",
        *_WHERE,
        "sequence",
        "priority",
        F.col("count").alias("waiting"),
        (F.col("duration") / 1e6).alias("seconds"),
    )
