"""Numbers and names of several brokers in one audit.

Each broker counts its events, runs and messages from 1 on, and has names of queues of its own. In an audit of several,
those of the n-th broker have n << NUMBER_BITS added, and its queues have n before their names. So all steps of the
audit tell brokers apart by these numbers and names, and the first broker, which is mostly the only one, has its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

NUMBER_BITS = 48
OWN_MASK = (1 << NUMBER_BITS) - 1
"""Bits of a number that are the broker's own."""
BROKERS_MAX = 1 << 13
"""Largest number of brokers in one audit. Numbers of the last one are below NEVER (model.py)."""

_NUMBERED = ("event", "sequence", "overtaken_sequence", "longest_sequence", "first_missing", "last_missing")
"""Columns of tables that have numbers of events or messages."""


def broker_number(number: Column) -> Column:
    """Return the number of the broker that an event, run or message belongs to."""
    return F.shiftright(number.cast("bigint"), NUMBER_BITS)


def own_number(number: Column) -> Column:
    """Return the number that an event, run or message has at its broker."""
    return number.bitwiseAND(F.lit(OWN_MASK))


def with_numbers(events: DataFrame, broker: int) -> DataFrame:
    """Return the events with the numbers and names of the broker with this number."""
    offset = F.lit(broker << NUMBER_BITS)
    return events.withColumns(
        {
            "event": F.col("event") + offset,
            "sequence": F.col("sequence") + offset,
            "run": F.col("run") + offset,
            "queue": F.concat(F.lit(queue_key(broker, "")), F.col("queue")),
        }
    )


def queue_key(broker: int, queue: str) -> str:
    """Return the name that a queue has in an audit of several brokers."""
    return f"{broker}:{queue}"


def with_brokers(table: DataFrame, brokers: Sequence[str]) -> DataFrame:
    """Return a table of the audit with the brokers' own numbers and names, and their names in the column `broker`,
    which comes first."""
    if len(brokers) == 1:
        return table.select(F.lit(brokers[0]).alias("broker"), "*")
    if "queue" in table.columns:
        number = F.substring_index("queue", ":", 1).cast("int")
    else:
        number = broker_number(F.col("first_missing"))
    named = table.select(F.element_at(F.array(*map(F.lit, brokers)), number.cast("int") + 1).alias("broker"), "*")
    own: dict[str, Column] = {
        # A number below 0 stands for none.
        name: F.when(F.col(name) >= 0, own_number(F.col(name))).otherwise(F.col(name))
        for name in _NUMBERED
        if name in table.columns
    }
    if "queue" in table.columns:
        own["queue"] = F.expr("substring(queue, instr(queue, ':') + 1)")
    return named.withColumns(own)
