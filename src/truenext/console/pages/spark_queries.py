"""Queries of Spark, and the commands to type for their queues. Pure."""

from __future__ import annotations

from truenext.console.pages.others import QueryRow
from truenext.model.destination import SPARK_PREFIX
from truenext.model.spark_queues import SINK_PREFIX, SOURCE_PREFIX, QueryStatus, SinkStatus


def spark_command(queue: str) -> str:
    """Return the `truenext spark` command for a queue of Spark's queries; "" for any other queue.

    >>> spark_command("Spark.source.main.1a2b.0"), spark_command("Spark.sink.main.1a2b"), spark_command("a")
    ('truenext spark abandon 1a2b', 'truenext spark publish 1a2b', '')
    """
    for prefix, verb in ((SOURCE_PREFIX, "abandon"), (SINK_PREFIX, "publish")):
        words = queue.removeprefix(prefix).split(".")
        if queue.startswith(prefix) and len(words) in (2, 3):
            return f"truenext spark {verb} {words[1]}"
    return "truenext spark list" if queue.startswith(SPARK_PREFIX) else ""


def source_row(status: QueryStatus) -> QueryRow:
    return QueryRow(
        space=status.space,
        id=status.id,
        does="reads",
        source=status.source,
        batch="" if status.is_abandoned else f"{status.batch:,}",
        state="abandoned" if status.is_abandoned else "rows of a batch" if status.rows else "",
        rows=status.rows,
        bytes=status.bytes,
        since_ms=status.since_ms or None,
        commands=[f"truenext spark abandon {status.id}"] if status.rows else [f"truenext spark forget {status.id}"],
    )


def sink_row(status: SinkStatus) -> QueryRow:
    decision, id = status.decision, status.queues.id
    is_closed = decision is not None and decision.is_closed
    return QueryRow(
        space=status.queues.space,
        id=id,
        does="writes",
        source="",
        batch="" if decision is None or is_closed else f"{decision.batch:,}",
        state="abandoned" if is_closed else "to publish" if status.rows else "drafts" if status.bytes else "",
        rows=status.rows,
        bytes=status.bytes,
        since_ms=status.since_ms or None,
        commands=[f"truenext spark publish {id}"] if status.rows else [f"truenext spark forget {id}"],
    )
