"""Waits for the end of the work of stages.

The queues of stages do not tell: a message that an open transaction has acknowledged is neither waiting nor
unacknowledged (docs/protocol.md). So tests wait until as many messages as expected have ended in other queues, or until
the broker has no open transaction, either.
"""

import asyncio
import json
from typing import Any

import truenext
from truenext.testing.local import LocalBroker

POLL_S = 0.05


async def await_waiting(connection: truenext.Connection, count: int, *queues: str) -> None:
    """Wait until at least `count` messages wait in these queues together."""
    while await count_waiting(connection, *queues) < count:
        await asyncio.sleep(POLL_S)


async def count_waiting(connection: truenext.Connection, *queues: str) -> int:
    """Return the number of messages that wait in these queues."""
    return sum(each["waiting"] for each in await facts_of_queues(connection) if each["name"] in queues)


async def facts_of_queues(connection: truenext.Connection) -> list[dict[str, Any]]:
    """Return the answer to the control request `queues`, also if the connection is lost meanwhile."""
    while True:
        try:
            facts: list[dict[str, Any]] = json.loads(await connection.control_request("queues"))
        except truenext.ConnectionLost:
            continue
        return facts


def settles_messages(local: LocalBroker) -> bool:
    """Return whether the broker has an open transaction that acknowledges or NACKs messages."""
    sessions = local._broker_run._broker._engine.state.clients.sessions.values()
    return any(each.transactions.settling_transactions for each in sessions)
