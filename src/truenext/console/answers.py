"""Answers of the broker to control requests, as far as the console shows them. Source: docs/reference/control.md

Unknown fields are ignored, and fields of newer brokers have defaults. So a broker that is a little older or newer is
shown, too.
"""

import msgspec

from truenext.model.dead_letters import DeadLetterGroup


class Counts(msgspec.Struct, frozen=True):
    """Numbers of messages since the broker's start."""

    accepted: int = 0
    acknowledged: int = 0
    returned: int = 0
    failed_again: int = 0
    """Number of times that a message failed which had failed before, and was requeued."""
    expired: int = 0
    dead_lettered: dict[str, int] = {}
    """Number of messages that became dead letters, by reason."""


class QueueReport(Counts, frozen=True, kw_only=True):
    name: str
    waiting: int = 0
    unacknowledged: int = 0
    consumers: int = 0
    scheduled: int = 0
    paused: bool = False
    dead_letters: bool = False
    """Whether it is a dead-letter queue."""
    topic: str | None = None
    """Topic of a durable subscription; None for a queue."""
    oldest_s: float | None = None
    """Age in seconds of the oldest message that waits; None if none waits."""
    held_s: float | None = None
    """Seconds for which a consumer has held a message, the longest time; None if none is held."""
    rate: float = 0.0
    """Number of messages acknowledged in a second, of the last seconds."""
    lanes: dict[str, int] = {}
    """Number of messages that wait, by priority; empty unless the request names the queue."""


class Sums(Counts, frozen=True, kw_only=True):
    """Sums of the queues that a request selects."""

    queues: int = 0
    waiting: int = 0
    held: int = 0
    scheduled: int = 0
    oldest_s: float | None = None
    rate: float = 0.0


class QueueList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `queues` with a body: a part of the queues, and sums of all that the user may see."""

    queues: list[QueueReport] = []
    next: str | None = None
    """Cursor for `after` of the next request; None at the end."""
    sums: Sums


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
    connection: str = ""
    address: str | None = None
    """Address of the client; None if the user may not see it."""
    user: str | None = None
    client_id: str | None = None
    destination: str = ""
    selector: str | None = None
    ack: str = ""
    window: int | None = None
    suspended: bool = False
    held: int = 0
    held_s: float | None = None
    """Seconds for which it has held the first of these messages; None if it holds none."""
    last_acknowledgement_s: float | None = None


class Setting(msgspec.Struct, frozen=True):
    """One setting of a queue's policy."""

    value: int | float | str | None = None
    source: str = ""
    """Origin of the value: a table of the configuration file, `command line` or `default`."""


class PolicyReport(msgspec.Struct, frozen=True):
    queue: str = ""
    settings: dict[str, Setting] = {}


class ClientReport(msgspec.Struct, frozen=True):
    """One connection of a client, in the answer to `connections`."""

    connection: str
    address: str = ""
    user: str = ""
    tls: str | None = None
    """Version of TLS; None without TLS."""
    client_id: str = ""
    since: int = 0
    """Time of the login, in milliseconds since 1970."""
    protocol: str = ""
    consumers: int = 0
    held: int = 0


class SecurityEvent(msgspec.Struct, frozen=True):
    at: int = 0
    """Time in milliseconds since 1970."""
    event: str = ""
    user: str = ""
    address: str = ""
    text: str = ""
    count: int = 1
    """Number of equal events."""


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
    groups: list[DeadLetterGroup] = []


class Stuck(msgspec.Struct, frozen=True):
    """Queue in which nothing is dispatched, although a message is ready: a fault of the broker."""

    queue: str
    waiting_ms: int = 0


class LogReport(msgspec.Struct, frozen=True):
    """Log in PostgreSQL of a broker."""

    server: str = ""
    replicated: bool = True
    awaited: str | None = None
    """Cause for which nothing is confirmed at the moment; None if there is none."""
    waiting_since_ms: int | None = None


class StatusReport(msgspec.Struct, frozen=True):
    """Answer to `status`."""

    stuck: list[Stuck] = []
    ready: bool = True
    memory: dict[str, int | None] = {}
    disk_level: str = ""
    disk_bytes: dict[str, int] = {}
    queues: int = 0
    scheduled: int = 0
    waiting: int = 0
    codec: str = ""
    version: str = ""
    uptime_s: float | None = None
    connections: int | None = None
    held: int = 0
    oldest_s: float | None = None
    rate: float = 0.0
    counts: Counts = Counts()
    commits: dict[str, float] = {}
    journal: dict[str, int] | None = None
    history: dict[str, int] | None = None
    log: LogReport | None = None
