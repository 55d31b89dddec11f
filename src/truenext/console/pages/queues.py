"""Data of the pages about queues: the list of queues, and one queue."""

from typing import Any

import msgspec

from truenext.console.pages.overview import Chart, Figure


class QueueRow(msgspec.Struct, frozen=True, kw_only=True):
    """One queue in a list."""

    name: str
    link: str
    kind: str
    """`queue`, `dead letters`, `Spark`, `durable subscription` or `virtual topic`."""
    waiting: int
    held: int
    consumers: int
    scheduled: int
    paused: bool
    oldest_s: float | None
    held_s: float | None
    """Seconds for which a consumer has held a message, the longest time; None if none is held."""
    rate: float
    accepted: int
    acknowledged: int
    returned: int
    failed_again: int
    expired: int
    dead_lettered: int
    level: str = ""
    """`bad`, `warn` or ""."""
    why: str = ""
    """Reason for the level."""
    subject: str = ""
    """Figure that is the reason: `oldest` or `held`; "" without a reason."""


class Queues(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[QueueRow]
    name: str
    """Part or pattern of the names that are shown; "" shows all."""
    order: str
    orders: dict[str, str]
    """Links to the same list in other orders, by order: `name`, `waiting`, `oldest`, `held`, `failing`, `rate`."""
    next: str
    """Link to the next rows; "" at the end."""
    first: str
    """Link to the first rows; "" if these are the first."""
    sums: list[Figure]


class ConsumerRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    connection: str | None
    address: str | None
    """Address of the client; None if the user may not see it."""
    user: str | None
    client_id: str | None
    window: int | None
    held: int
    held_s: float | None
    """Seconds for which the consumer has held the first of these messages; None if the consumer holds none."""
    last_acknowledgement_s: float | None
    """Seconds since the last acknowledgement; None if there was none."""
    selector: str | None
    close: str = ""
    """Link to the page that closes the connection; "" if the user may not."""


class PolicyRow(msgspec.Struct, frozen=True):
    name: str
    value: Any
    source: str


class MessageRow(msgspec.Struct, frozen=True, kw_only=True):
    """One message in a list."""

    sequence: int
    priority: int
    link: str
    persistent: bool
    size: int
    arrived_ms: int | None
    attempts: int
    redelivered: bool
    group: str
    expires_ms: int | None
    cause: str
    """First line of the last cause; "" if there is none."""
    origin: str
    """Queue in which a dead letter failed; "" for other messages."""
    trace: str
    """Trace of the flow, of a message of stages; else ""."""
    beginning: str
    """Beginning of the body as text, of at most 200 characters."""


class MessageList(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the messages that wait in a queue, in its order."""

    rows: list[MessageRow]
    selector: str
    next: str
    """Link to the next messages; "" at the end."""
    first: str
    note: str = ""
    """Sentence on why messages are not shown: no right to browse, or an invalid selector."""


class Act(msgspec.Struct, frozen=True):
    """Action that the user may take: a link to the page that first says what would happen."""

    name: str
    """`re-drive`, `move`, `purge`, `pause`, `resume`, `unschedule` or `close`."""
    link: str
    """Link to the page of what would happen; "" for `pause` and `resume`, which are posted at once."""


class QueuePage(msgspec.Struct, frozen=True, kw_only=True):
    row: QueueRow
    lanes: list[tuple[int, int]]
    """Number of messages that wait, by priority, the highest first; empty if the broker does not tell."""
    dead_lettered: dict[str, int]
    """Number of dead letters since the broker's start, by reason."""
    consumers: list[ConsumerRow]
    policy: list[PolicyRow]
    messages: MessageList
    acts: list[Act]
    """Actions on all messages of the queue that the user may take."""
    spark_command: str
    """`truenext spark` command to type instead of acting here, if the queue is one of Spark's queries; else ""."""
    charts: list[Chart]
    dead_letters: str
    """Link to the dead letters of this queue, or by cause of this dead-letter queue; "" if there are none."""
