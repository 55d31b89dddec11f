"""A queue with one message that records the progress of a query. A new message replaces the old one in one transaction.

The broker forgets the numbers of a producer after a week, but never this message.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from truenext.errors import Code, Refused
from truenext.model.spark_queues import Latest, parse_latest
from truenext.spark.broker.connection import BrokerConnection

_PULL_MAX = 100
"""Largest number of messages that one call reads. The queue never holds as many."""


def read_latest(broker: BrokerConnection, queue: str) -> Latest | None:
    """Return the content of the waiting message with the highest batch; None if none waits. A message that another
    connection holds is not seen.

    Raises: Refused if the broker refuses a request; ConnectionLost if the connection is lost
    """
    return parse_latest(frame.body for frame in broker.browse(f"/queue/{queue}"))


def replace_latest(
    broker: BrokerConnection,
    queue: str,
    latest: Latest,
    producer: str,
    number: int,
    *,
    replaces: Callable[[int | None], bool],
) -> bool:
    """Replace the message in one transaction. After a crash there is either the old message or the new one.

    `replaces` decides whether the message may be replaced. This function gets the highest batch found; None if no
    message is ready. If `replaces` returns False, or the `number` was used before, nothing is changed, and the result
    is False. If two connections use one number, the first COMMIT wins.

    Raises: Refused if the broker refuses a request; ConnectionLost if the connection is lost
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
    # Pulled messages that were not acknowledged return.
    broker.post("UNSUBSCRIBE", {"id": "latest"})
    return is_replaced


def purge(broker: BrokerConnection, queue: str, selector: str | None = None) -> int:
    """Remove the messages of a queue that match the selector, and return their number. Return 0 if there is no such
    queue.

    Raises: Refused if the broker refuses a request; ConnectionLost if the connection is lost
    """
    return _purge(broker, queue, selector, dry_run=False)[0]


def count(broker: BrokerConnection, queue: str, selector: str | None = None) -> tuple[int, int]:
    """Return two numbers of messages that match the selector: waiting ones, and ones that other connections hold or
    have acknowledged in an open transaction. The second number may be too high, but never too low.

    Raises: Refused if the broker refuses a request; ConnectionLost if the connection is lost
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
