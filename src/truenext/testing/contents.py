"""Contents of a queue, for a test. They are read over a connection, as any client can read them."""

import json
from dataclasses import dataclass

from truenext.client.tasks.connection import connect


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingMessage:
    """Message that waits in a queue."""

    body: bytes
    """Body of the message."""
    headers: dict[str, str]
    """Headers of the MESSAGE that a browser gets: the headers of the SEND, and those that the broker adds, such as
    `priority`, `truenext-sequence` and `truenext-attempts` (docs/reference/headers.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueContents:
    """Contents of a queue at one moment."""

    messages: tuple[WaitingMessage, ...]
    """Messages that wait in the queue, in the order in which they would be dispatched."""
    unacknowledged: int
    """Number of messages that consumers hold. Messages that an open transaction has acknowledged are not counted."""
    scheduled: int
    """Number of scheduled sends that are not due yet."""

    @property
    def waiting(self) -> int:
        """Number of waiting messages."""
        return len(self.messages)

    @property
    def bodies(self) -> list[bytes]:
        """Bodies of the waiting messages."""
        return [message.body for message in self.messages]


async def read_queue_contents(url: str, queue: str) -> QueueContents:
    """Return the contents of the queue with this name. If the queue does not exist, the contents are empty."""
    async with connect(url, reconnect=False) as connection:
        messages = [
            WaitingMessage(body=each.body, headers=each.headers) async for each in connection.browse(f"/queue/{queue}")
        ]
        rows = json.loads(await connection.control_request("queues"))
    row = next((row for row in rows if row["name"] == queue), {"unacknowledged": 0, "scheduled": 0})
    return QueueContents(messages=tuple(messages), unacknowledged=row["unacknowledged"], scheduled=row["scheduled"])
