"""Mark: the progress of a query, as the broker stores it.

The **mark** is one small message in the query's own queue. The mark says which batch is done. One transaction replaces
the mark before the bundles of that batch are removed. So the query detects an outdated checkpoint, and a broker whose
store was restored from an older copy.
"""

from __future__ import annotations

from truenext.model.spark_queues import CLOSED_BATCH
from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.broker.latest import read_latest, replace_latest
from truenext.spark.source.task import Superseded


def read_mark(broker: BrokerConnection, queue: str, *, allow_closed: bool = False) -> int:
    """Return the last batch that is done; 0 if there is none. With `allow_closed` return CLOSED_BATCH for an abandoned
    query.

    Raises: Superseded if the query was abandoned, unless `allow_closed`; Refused, ConnectionLost if a step fails
    """
    latest = read_latest(broker, queue)
    mark = 0 if latest is None else int(latest["batch"])
    if mark == CLOSED_BATCH and not allow_closed:
        raise Superseded(f"this query was abandoned (mark in {queue}): start it with a new checkpoint")
    return mark


def replace_mark(broker: BrokerConnection, queue: str, batch: int, producer: str, number: int) -> None:
    """Mark all batches up to this one as done. If two connections use the same number, the first COMMIT wins.

    Raises: Superseded if another driver has marked a later batch; Refused, ConnectionLost if a step fails
    """
    is_replaced = replace_latest(
        broker, queue, {"batch": batch}, producer, number, replaces=lambda last: last is None or last <= batch
    )
    if not is_replaced and (mark := read_mark(broker, queue, allow_closed=True)) > batch:
        raise Superseded(
            f"batch {mark} is done already (mark in {queue}): another run of this query is ahead; end one of the two"
        )


def mark_producer(query_id: str) -> str:
    return f"spark/{query_id}/mark"


def close_mark(broker: BrokerConnection, queue: str, query_id: str) -> None:
    """Prevent any further batch of this query. The call may be repeated."""
    if read_mark(broker, queue, allow_closed=True) != CLOSED_BATCH:
        replace_mark(broker, queue, CLOSED_BATCH, mark_producer(query_id), CLOSED_BATCH)
