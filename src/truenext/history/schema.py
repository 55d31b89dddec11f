"""Schema of the history: its columns, each with its meaning.

The schemas for Arrow (table.py) and for Spark are made from this table, and so is docs/reference/history.md.
model/events.py has the kinds of events.
"""

from typing import Literal, NamedTuple

ColumnType = Literal["bigint", "int", "tinyint", "boolean", "string", "timestamp"]
"""Type of a column, by its name in SQL. A timestamp is in UTC, in microseconds."""


class HistoryColumn(NamedTuple):
    name: str
    type: ColumnType
    meaning: str
    kinds: tuple[str, ...] = ()
    """Kinds of events that have a value in this column. All other kinds have null. If empty, all kinds have a value."""


_OF_MESSAGES = (
    *("accepted", "dispatched", "started", "acknowledged", "returned", "expired"),
    *("dead-lettered", "handled", "reported", "moved", "removed"),
)
_OF_QUEUES = (
    *("recovered", "accepted", "subscribed", "unsubscribed", "dispatched", "window", "requested", "started"),
    *("acknowledged", "returned", "expired", "ended", "dead-lettered", "handled", "reported", "moved"),
    *("removed", "paused", "resumed", "drained"),
)

COLUMNS: tuple[HistoryColumn, ...] = (
    HistoryColumn(
        "event",
        "bigint",
        "number of the event: one counter for all queues, 1 for the first event, one more for each. A missing number "
        "is a gap: a crash or damage has lost events",
    ),
    HistoryColumn(
        "run", "int", "run of the broker in which the event happened; the run after the broker's first start is 1"
    ),
    HistoryColumn("at", "timestamp", "time by the broker's clock; the order is that of `event`, never that of `at`"),
    HistoryColumn("kind", "string", "kind of event, see above"),
    HistoryColumn("queue", "string", "name of the queue", _OF_QUEUES),
    HistoryColumn("sequence", "bigint", "sequence of the message; no sequence is used twice", _OF_MESSAGES),
    HistoryColumn(
        "priority",
        "tinyint",
        "priority of the message, 0 to 9. Of `subscribed` the consumer priority, -127 to 127, if the consumer is "
        "exclusive, else null",
        ("accepted", "subscribed"),
    ),
    HistoryColumn("persistent", "boolean", "true if the message is persistent", ("accepted",)),
    HistoryColumn("size", "int", "bytes of the body", ("accepted",)),
    HistoryColumn(
        "batch",
        "bigint",
        "of `accepted`: 0, or the batch that makes the message visible. Of `committed`: this batch and all before it "
        "are durable. Each run counts its batches anew",
        ("accepted", "committed"),
    ),
    HistoryColumn(
        "consumer",
        "bigint",
        "number of the subscription; no number is used twice in a run",
        ("subscribed", "unsubscribed", "dispatched", "window", "requested", "started"),
    ),
    HistoryColumn("deliveries", "int", "number of dispatches of the message, this one included", ("dispatched",)),
    HistoryColumn(
        "attempts",
        "int",
        "number of attempts of the message, with the one that this return may have added",
        ("returned",),
    ),
    HistoryColumn(
        "reason", "string", "reason of the requeue, or end of the previous run, see below", ("returned", "run-started")
    ),
    HistoryColumn("mode", "string", "mode of the subscription, see below", ("subscribed",)),
    HistoryColumn(
        "window",
        "int",
        "number of messages that the consumer may hold; null in `auto` mode, and if the subscription pulls",
        ("subscribed", "window"),
    ),
    HistoryColumn(
        "target_queue",
        "string",
        "queue to which the message, or the report about it, goes; the event `accepted` of this new entry "
        "follows. Null for a report to a topic",
        ("dead-lettered", "handled", "reported", "moved"),
    ),
    HistoryColumn(
        "target_sequence",
        "bigint",
        "sequence of the new entry in `target_queue`; null for a report to a topic",
        ("dead-lettered", "handled", "reported", "moved"),
    ),
    HistoryColumn(
        "count",
        "bigint",
        "of `recovered`: number of messages in the queue at the start of the run. Messages of ended durable "
        "subscriptions with this name are included, unless they have expired. Of `requested`: number of messages that "
        "the subscription may get from now on, until the next `requested`",
        ("recovered", "requested"),
    ),
    HistoryColumn(
        "group", "bigint", "number that stands for the group of the message; null if it has none", ("accepted",)
    ),
    HistoryColumn(
        "cause",
        "string",
        "of `returned`: the cause that the NACK stated. Of `dead-lettered` and `handled`: the last cause of "
        "the message. Null if there is none",
        ("returned", "dead-lettered", "handled"),
    ),
    HistoryColumn(
        "epoch",
        "bigint",
        "epoch of the broker that runs from now on: its number among those that have taken over the log. Null if its "
        "messages are not in PostgreSQL",
        ("run-started",),
    ),
    HistoryColumn(
        "store",
        "string",
        "identity of the broker's data (`truenext-store`): eight hexadecimal digits. A folder that was restored from a "
        "backup has another one from then on, and its events before are those of the original. Of files of version 13 "
        "only `run-started` has it, of earlier ones no event",
    ),
)
DATE = "date"
"""Name before the `=` in the names of the folders of Parquet files; the value after the `=` is the date of `at`, in
UTC. Readers show the name as one more column, of the type date."""
REQUIRED = ("event", "run", "at", "kind")
"""Columns that are never null."""

DRAINED = "drained"
"""`truenext record` has found the queue empty: a message that by the earlier events should still wait is lost. Only
this command writes such an event."""
