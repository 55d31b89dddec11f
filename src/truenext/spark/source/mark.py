"""How far a query is, as the broker keeps it.

The **mark** is one small message in the query's own queue that says which batch is done. It is replaced in one
transaction before the bundles of that batch are purged. So a checkpoint that is older than the mark is known to be, and
so is a broker that was restored from an older copy.
"""

from __future__ import annotations

import json
from typing import Any

from truenext.errors import Code, Refused
from truenext.spark.source.connection import ANSWER_SECONDS, BrokerConnection
from truenext.spark.source.task import Superseded
from truenext.wire.stomp.frame import Frame

CLOSED_BATCH = (1 << 43) - 1
"""The mark of a query that was abandoned: no batch has this number, and none a higher one."""


def read_mark(broker: BrokerConnection, queue: str, *, allow_closed: bool = False) -> int:
    """Return the last batch that is done; 0 if none is, CLOSED_BATCH if the query was abandoned and that is allowed.

    Raises: Superseded if the query was abandoned, Refused, ConnectionLost
    """
    mark = max(map(_batch_of, broker.browse(f"/queue/{queue}")), default=0)
    if mark == CLOSED_BATCH and not allow_closed:
        raise Superseded(f"{queue} says that this query was abandoned: start it with a new checkpoint")
    return mark


def replace_mark(broker: BrokerConnection, queue: str, batch: int, producer: str, number: int) -> None:
    """Say that all batches up to this one are done. In one transaction: a crash leaves the old mark or the new one, and
    of two that have the same number one does it.

    Raises: Superseded if another driver has gone further, Refused, ConnectionLost
    """
    destination, transaction = f"/queue/{queue}", {"transaction": "mark"}
    broker.subscribe_to_pull("old mark", destination, "client")
    broker.pull("old mark", 100)
    last: Frame | None = None
    while (
        frame := broker.next_message("old mark", ANSWER_SECONDS)
    ) is not None and "truenext-unused" not in frame.headers:
        last = frame
        if _batch_of(frame) > batch:
            raise Superseded(
                f"{queue} says that batch {_batch_of(frame)} is done: another run of this query has gone on"
            )
    broker.post("BEGIN", {**transaction, "truenext-count-attempts": "nacked"})
    if last is not None:
        broker.post("ACK", {"id": last.headers["ack"], **transaction})
    body = json.dumps({"batch": batch}).encode()
    broker.post("SEND", {"destination": destination, "persistent": "true", **transaction}, body)
    broker.call("COMMIT", transaction | {"truenext-producer": producer, "truenext-number": str(number)})
    broker.post("UNSUBSCRIBE", {"id": "old mark"})


def mark_producer(query_id: str) -> str:
    return f"spark/{query_id}/mark"


def close_mark(broker: BrokerConnection, queue: str, query_id: str) -> None:
    """Say that no batch of this query is to come. Does no harm if it was said before."""
    if read_mark(broker, queue, allow_closed=True) != CLOSED_BATCH:
        replace_mark(broker, queue, CLOSED_BATCH, mark_producer(query_id), CLOSED_BATCH)


def _batch_of(mark: Frame) -> int:
    return int(json.loads(mark.body)["batch"])


def purge(broker: BrokerConnection, queue: str, selector: str) -> int:
    """Remove what a selector wants of a queue, if that is there, and return how many messages that were.

    Raises: Refused, ConnectionLost
    """
    question: dict[str, Any] = {"queue": queue, "selector": selector}
    removed = 0
    while True:
        try:
            answer = broker.ask("purge", question)
        except Refused as error:
            if error.code == Code.NOT_FOUND:
                return removed
            raise
        removed += int(answer["moved"])
        if answer["next"] is None:
            return removed
        question |= {"after": answer["next"], "until": answer["until"]}
