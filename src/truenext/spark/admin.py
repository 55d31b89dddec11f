"""Operator commands for queries that read queues or write to them.

Each step is one transaction, so an interrupted command can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from truenext.errors import TruenextError
from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.broker.latest import purge
from truenext.spark.sink.admin import SinkStatus, close_sink, forget_sink, list_sinks, sinks_of
from truenext.spark.source.admin import QueryStatus, close_source, list_queries, outputs_of, return_rows
from truenext.spark.source.offset import mark_queue

BEGINNING_LENGTH_MIN = 6
"""Characters of an id that an operator must give at least, so that a slip names no other query."""

T = TypeVar("T")


def find_source(broker: BrokerConnection, query_id: str) -> QueryStatus:
    """Return the query that reads queues under this id, or an id that begins so.

    Raises: TruenextError if there is no such query, or several
    """
    return _only(query_id, [each for each in list_queries(broker) if _is_meant(each.id, query_id)], " that reads")


def find_sink(broker: BrokerConnection, query_id: str) -> SinkStatus:
    """Return the query, or batch write, that writes to queues under this id, or an id that begins so.

    Raises: TruenextError if there is none, or several
    """
    return _only(query_id, [each for each in list_sinks(broker) if _is_meant(each.queues.id, query_id)], " that writes")


def find(broker: BrokerConnection, query_id: str) -> QueryStatus | SinkStatus:
    """Return the source or sink with this id, or an id that starts with it.

    Raises: TruenextError if there is none, or several
    """
    found: list[QueryStatus | SinkStatus] = []
    found += [each for each in list_queries(broker) if _is_meant(each.id, query_id)]
    found += [each for each in list_sinks(broker) if _is_meant(each.queues.id, query_id)]
    return _only(query_id, found)


def _is_meant(full: str, query_id: str) -> bool:
    return full == query_id or (len(query_id) >= BEGINNING_LENGTH_MIN and full.startswith(query_id))


def _only(query_id: str, found: list[T], kind: str = "") -> T:
    if len(found) != 1:
        known = "several match" if found else "there is none"
        raise TruenextError(
            f"query {query_id!r}{kind}: {known}; give a whole ID of `truenext spark list`, or its first "
            f"{BEGINNING_LENGTH_MIN} characters or more"
        )
    return found[0]


def abandon(broker: BrokerConnection, status: QueryStatus | SinkStatus) -> Iterator[tuple[int, int]]:
    """Close a query for ever, and return the rows of its bundles to their queues. Rows of batches whose output a
    sink of the same broker has published are dropped.

    Yields the numbers of rows returned and dropped, after each transaction.
    Raises: TruenextError
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
    """Remove what the broker keeps of a query that never runs again.

    Raises: TruenextError if it still has rows, or its sink is needed to abandon its source; Refused, ConnectionLost
    """
    if isinstance(status, SinkStatus):
        # The decision says which rows of the source are published.
        for source in list_queries(broker):
            if status.queues.id in outputs_of(broker, source.bundle_queues):
                raise TruenextError(
                    f"query {source.id} has rows that {status.queues.id} writes: run `truenext spark abandon "
                    f"{source.id}` first"
                )
        forget_sink(broker, status)
        return
    if status.rows:
        raise TruenextError(f"query {status.id} has {status.rows} rows in bundles: run `truenext spark abandon` first")
    purge(broker, mark_queue(status.space, status.id))
