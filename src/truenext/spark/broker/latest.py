"""A queue with one message, which says how far a query is. A transaction acknowledges the last one and sends the next.

The broker forgets the numbers of producers after a week; it does not forget this message.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from truenext.errors import Code, Refused
from truenext.spark.broker.connection import BrokerConnection

Latest = dict[str, Any]
"""What the message says. Has at least `batch`, a number that rises."""

CLOSED_BATCH = (1 << 43) - 1
"""The batch of a query that was abandoned: no batch has this number, and none a higher one."""

_PULL_MAX = 100
"""More messages than the queue ever has."""


def read_latest(broker: BrokerConnection, queue: str) -> Latest | None:
    """Return the message with the highest batch; None if none waits. One that another connection holds is not seen.

    Raises: Refused, ConnectionLost
    """
    found = (json.loads(frame.body) for frame in broker.browse(f"/queue/{queue}"))
    return max(found, key=lambda latest: latest["batch"], default=None)


def replace_latest(
    broker: BrokerConnection,
    queue: str,
    latest: Latest,
    producer: str,
    number: int,
    *,
    replaces: Callable[[int | None], bool],
) -> bool:
    """Put `latest` in the place of what is there, in one transaction: a crash leaves the old message or the new one.

    `replaces` says whether it may, by the highest batch that is there; None if no message is ready. Returns False, and
    changes nothing, if it may not, or if the number is a repeat: of two connections that commit the same number one
    does it.
    Raises: Refused, ConnectionLost
    """
    broker.subscribe_to_pull("latest", f"/queue/{queue}", "client")
    broker.pull("latest", _PULL_MAX)
    last_ack = ""
    last_batch: int | None = None
    while "truenext-unused" not in (frame := broker.answer("latest")).headers:
        last_ack = frame.headers["ack"]
        batch = int(json.loads(frame.body)["batch"])
        last_batch = batch if last_batch is None else max(batch, last_batch)
    is_replaced = replaces(last_batch)
    if is_replaced:
        transaction = {"transaction": "latest"}
        broker.post("BEGIN", {**transaction, "truenext-count-attempts": "nacked"})
        if last_ack:
            broker.post("ACK", {"id": last_ack, **transaction})
        body = json.dumps(latest, separators=(",", ":")).encode()
        broker.post("SEND", {"destination": f"/queue/{queue}", "persistent": "true", **transaction}, body)
        receipt = broker.call("COMMIT", {**transaction, "truenext-producer": producer, "truenext-number": str(number)})
        is_replaced = receipt.headers.get("truenext-repeat") != "true"
    # What was pulled and not acknowledged returns.
    broker.post("UNSUBSCRIBE", {"id": "latest"})
    return is_replaced


def purge(broker: BrokerConnection, queue: str, selector: str | None = None) -> int:
    """Remove what a selector matches in a queue, and return how many messages that were; 0 if there is no such queue.

    Raises: Refused, ConnectionLost
    """
    return _purge(broker, queue, selector, dry_run=False)[0]


def count(broker: BrokerConnection, queue: str, selector: str | None = None) -> tuple[int, int]:
    """Return how many messages of a queue match a selector: those that wait, and those that other connections hold or
    have acknowledged in an open transaction. The second may be too high, never too low.

    Raises: Refused, ConnectionLost
    """
    return _purge(broker, queue, selector, dry_run=True)


def _purge(broker: BrokerConnection, queue: str, selector: str | None, *, dry_run: bool) -> tuple[int, int]:
    request: dict[str, Any] = {"queue": queue, "dry_run": dry_run}
    if selector is not None:
        request["selector"] = selector
    moved = left = 0
    while True:
        try:
            answer = broker.ask("purge", request)
        except Refused as error:
            if error.code == Code.NOT_FOUND:
                return moved, left
            raise
        moved += int(answer["moved"])
        left += int(answer["left"])
        if answer["next"] is None:
            return moved, left
        request |= {"after": answer["next"], "until": answer["until"]}
