"""Operator commands for queries that read queues or write to them.

Each step of a command is one transaction, so an interrupted command can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from truenext.errors import TruenextError
from truenext.model.spark_queues import QueryStatus, SinkStatus, mark_queue
from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.broker.latest import purge
from truenext.spark.sink.admin import close_sink, forget_sink, list_sinks, sinks_of
from truenext.spark.sink.admin import publish_decision as publish_decision
from truenext.spark.source.admin import close_source, list_queries, outputs_of, return_rows
from truenext.spark.source.admin import reject as reject

BEGINNING_LENGTH_MIN = 6
"""Minimum number of leading characters of an id that an operator must give. With fewer, a typing error could name
another query."""

T = TypeVar("T")


def find_source(broker: BrokerConnection, query_id: str) -> QueryStatus:
    """Return the query that reads queues, and whose id is `query_id` or begins with it.

    Raises: TruenextError if there is no such query, or several
    """
    return _only(query_id, _sources(broker), " that reads")


def find_sink(broker: BrokerConnection, query_id: str) -> SinkStatus:
    """Return the query or batch write that writes to queues, and whose id is `query_id` or begins with it.

    Raises: TruenextError if there is no such query or batch write, or several
    """
    return _only(query_id, _sinks(broker), " that writes")


def find(broker: BrokerConnection, query_id: str) -> QueryStatus | SinkStatus:
    """Return the source or sink whose id is `query_id` or begins with it.

    Raises: TruenextError if there is no such source or sink, or several
    """
    known: list[tuple[str, QueryStatus | SinkStatus]] = [*_sources(broker), *_sinks(broker)]
    return _only(query_id, known)


def _sources(broker: BrokerConnection) -> list[tuple[str, QueryStatus]]:
    return [(each.id, each) for each in list_queries(broker)]


def _sinks(broker: BrokerConnection) -> list[tuple[str, SinkStatus]]:
    return [(each.queues.id, each) for each in list_sinks(broker)]


def _only(query_id: str, known: Sequence[tuple[str, T]], kind: str = "") -> T:
    found = [status for id, status in known if id == query_id]
    if not found and len(query_id) >= BEGINNING_LENGTH_MIN:
        found = [status for id, status in known if id.startswith(query_id)]
    if len(found) != 1:
        count = "several match" if found else "there is none"
        raise TruenextError(
            f"query {query_id!r}{kind}: {count}; give a whole ID of `truenext spark list`, or its first "
            f"{BEGINNING_LENGTH_MIN} characters or more"
        )
    return found[0]


def abandon(broker: BrokerConnection, status: QueryStatus | SinkStatus) -> Iterator[tuple[int, int]]:
    """Close a query for ever, and return the rows of its bundles to their queues. Rows are dropped if a sink of the
    same broker has published the output of their batch.

    Yields the numbers of returned and of dropped rows, after each transaction.

    Raises: TruenextError if the broker refuses a step, or the connection is lost
    """
    if isinstance(status, SinkStatus):
        close_sink(broker, status.queues)
        return
    bundle_queues = close_source(broker, status)
    published = {
        query: max(close_sink(broker, queues) for queues in sinks_of(broker, query, status.space))
        for query in outputs_of(broker, bundle_queues)
    }
    yield from return_rows(broker, bundle_queues, published)


def forget(broker: BrokerConnection, status: QueryStatus | SinkStatus) -> None:
    """Remove everything that the broker stores for a query that never runs again.

    Raises: TruenextError if the query still has rows, or if its sink is needed to abandon its source; Refused,
    ConnectionLost if a step fails
    """
    if isinstance(status, SinkStatus):
        # The decision says which rows of the source are published.
        for source in list_queries(broker, with_rows=False):
            if status.queues.id in outputs_of(broker, source.bundle_queues):
                raise TruenextError(
                    f"the decision of {status.queues.id} says which rows of query {source.id} are published: run "
                    f"`truenext spark abandon {source.id}` first"
                )
        forget_sink(broker, status)
        return
    if status.rows:
        raise TruenextError(f"query {status.id} has {status.rows} rows in bundles: run `truenext spark abandon` first")
    purge(broker, mark_queue(status.space, status.id))
