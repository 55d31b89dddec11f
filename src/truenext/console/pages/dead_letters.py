"""Data of the page about dead letters: queues of dead letters, and groups by origin, reason and cause."""

import msgspec

from truenext.console.pages.queues import Act, QueueRow


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters with the same original queue, reason and first line of the last cause, but for words with digits."""

    origin: str
    origin_link: str
    reason: str
    cause: str
    """First line of the last cause of one of the messages."""
    count: int
    first_ms: int | None
    last_ms: int | None
    example: str
    """Link to one of the messages; "" if the user may not browse."""
    messages: str
    """Link to the messages of the group."""
    flow: str
    """Link to the flow of the example, if it is a message of stages; else ""."""
    acts: list[Act]


class DeadLetters(msgspec.Struct, frozen=True, kw_only=True):
    queue: str
    """Name of the queue whose groups are shown; "" shows the queues alone."""
    queues: list[QueueRow]
    """Queues of dead letters, the fullest first."""
    next: str
    groups: list[Group]
    others: int
    """Number of messages beyond the groups shown."""
    is_part: bool
    """True if the queue has more messages than were read for this page."""
    read: int
    """Number of messages that were read."""
    total: int | None
    """Number of messages that wait in the queue; None without a queue."""
    go_on: str
    """Link to the same page that reads on, for some seconds; "" if all were read."""
    acts: list[Act]
    """Actions on all messages of the queue."""
