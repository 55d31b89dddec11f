"""Answers of the broker to control requests, as far as the console shows them. Source: docs/reference/control.md

Unknown fields are ignored, and fields of newer brokers have defaults. So a broker that is a little older or newer is
shown, too.
"""

from typing import Any

import msgspec


class QueueReport(msgspec.Struct, frozen=True):
    name: str
    waiting: int = 0
    unacknowledged: int = 0
    consumers: int = 0
    scheduled: int = 0
    paused: bool = False
    topic: str | None = None
    """Topic of a durable subscription; None for a queue."""
    accepted: int = 0
    acknowledged: int = 0
    returned: int = 0
    expired: int = 0
    dead_lettered: dict[str, int] = {}
    """Number of messages that became dead letters, by reason."""
    oldest_s: float | None = None
    """Age in seconds of the oldest message that waits; None if none waits."""
    rate: float = 0.0
    """Number of messages acknowledged in a second, of the last seconds."""


class QueueList(msgspec.Struct, frozen=True):
    """Answer to `queues` with a body: a part of the queues, and sums of all that the user may see."""

    queues: list[QueueReport] = []
    next: Any = None
    """Cursor for `after` of the next request; None at the end."""
    sums: dict[str, Any] = {}


class UserReport(msgspec.Struct, frozen=True):
    """User of a connection, and the user's grants."""

    name: str
    send: list[str] = []
    take: list[str] = []
    browse: list[str] = []
    manage: list[str] = []
    monitor: bool = False
    admin: bool = False
    client_ids: list[str] = []


class ConnectionReport(msgspec.Struct, frozen=True):
    """Answer to `connection`."""

    user: UserReport | None = None
    """User of the connection; None if the broker has no users."""


class ConsumerReport(msgspec.Struct, frozen=True):
    id: str = ""
    connection: str | None = None
    address: str | None = None
    user: str | None = None
    client_id: str | None = None
    window: int | None = None
    held: int = 0
    last_acknowledgement_s: float | None = None
    selector: str | None = None


class Setting(msgspec.Struct, frozen=True):
    """One setting of a queue's policy."""

    value: Any = None
    source: str = ""
    """Origin of the value: the default, a pattern of the configuration file, or a consumer."""


class ClientReport(msgspec.Struct, frozen=True):
    """One connection of a client, in the answer to `connections`."""

    connection: str
    address: str = ""
    user: str | None = None
    tls: bool = False
    client_id: str | None = None
    since: int = 0
    """Time of the login, in milliseconds since 1970."""
    protocol: str = ""
    consumers: int = 0
    held: int = 0


class ClientList(msgspec.Struct, frozen=True):
    connections: list[ClientReport] = []
    next: Any = None


class DeadLetterGroup(msgspec.Struct, frozen=True):
    """Dead letters with the same original queue, reason and first line of the last cause."""

    origin: str = ""
    reason: str = ""
    cause: str = ""
    count: int = 0
    first: int | None = None
    """Time of the first dead letter, in milliseconds since 1970."""
    last: int | None = None
    sequences: list[int] = []


class SecurityEvent(msgspec.Struct, frozen=True):
    at: int = 0
    """Time in milliseconds since 1970."""
    event: str = ""
    user: str | None = None
    address: str = ""
    text: str = ""


class ScheduledSend(msgspec.Struct, frozen=True):
    number: int
    due_ms: int
    to: str = ""
    period_ms: int = 0
    repeat: int = 0
    cron: str = ""
    zone: str = ""
    delay_ms: int = 0
    priority: int = 4
    persistent: bool = True
    headers: dict[str, str] = {}
    size: int = 0
    body: str = ""


class BulkAnswer(msgspec.Struct, frozen=True):
    """Answer to one piece of bulk work."""

    moved: int = 0
    to: dict[str, int] = {}
    left: int = 0
    next: tuple[int, int] | None = None
    until: int = 0
    sequences: list[int] = []
    ended: dict[str, int] = {}
    error: str = ""
    sends: list[ScheduledSend] = []


class StageProcess(msgspec.Struct, frozen=True):
    """Answer of one process of a service of stages."""

    service: str = ""
    version: str = ""
    instance: str = ""
    health: dict[str, Any] = {}
    graph: Any = None
    metrics: Any = None
    outbox: Any = None
    at: int = 0
