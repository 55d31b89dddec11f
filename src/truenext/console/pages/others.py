"""Data of smaller pages: scheduled sends, durable subscriptions, connections, Spark's queries, users, settings, login,
errors."""

import msgspec

from truenext.console.pages.overview import Figure
from truenext.console.pages.queues import Act, PolicyRow, QueueRow


class ScheduledRow(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    due_ms: int
    to: str
    repeats: str
    """Words such as "every 60 s, 3 more times"; "" if the send is not repeated."""
    priority: int
    persistent: bool
    size: int
    beginning: str
    headers: list[tuple[str, str]]
    acts: list[Act]


class Scheduled(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[ScheduledRow]
    to: str
    """Destination whose sends are shown; "" shows all."""
    selector: str
    total: int
    is_part: bool
    """True if not all sends were read."""
    note: str
    acts: list[Act]


class Durable(msgspec.Struct, frozen=True, kw_only=True):
    rows: list["DurableRow"]
    next: str


class DurableRow(msgspec.Struct, frozen=True, kw_only=True):
    row: QueueRow
    client_id: str
    name: str
    topic: str
    selector: str


class ConnectionRow(msgspec.Struct, frozen=True, kw_only=True):
    connection: str
    address: str
    user: str | None
    tls: bool
    client_id: str | None
    since_ms: int
    protocol: str
    consumers: int
    held: int
    close: str
    """Link to the page that closes the connection; "" if the user may not."""


class Connections(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[ConnectionRow]
    next: str
    first: str


class QueryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One query of Spark that reads queues or writes to them."""

    space: str
    id: str
    does: str
    """`reads` or `writes`."""
    source: str
    batch: str
    state: str
    """What is not settled: `to publish`, `drafts`, `abandoned`, or ""."""
    rows: int
    bytes: int
    since_ms: int | None
    commands: list[str]
    """`truenext spark` commands to type."""


class Spark(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[QueryRow]
    queues: list[QueueRow]
    note: str


class SecurityRow(msgspec.Struct, frozen=True, kw_only=True):
    at_ms: int
    event: str
    user: str | None
    address: str
    text: str


class UserRow(msgspec.Struct, frozen=True, kw_only=True):
    """One user, with the connections and what was refused lately."""

    name: str
    connections: int | None
    refused: int
    failed_logins: int
    last_ms: int | None
    last: str
    """Text of the last refusal."""


class Security(msgspec.Struct, frozen=True, kw_only=True):
    users: list[UserRow]
    events: list[SecurityRow]
    note: str
    name: str
    """Name of the user that is logged in; "" without users."""
    grants: list[tuple[str, str]]
    """Right and pattern of each grant of this user."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    console: list[Figure]
    broker: list[Figure]
    queue: str
    policy: list[PolicyRow]
    note: str


class Login(msgspec.Struct, frozen=True, kw_only=True):
    next: str
    """Address to which a login leads: a path of this console."""
    error: str
    user: str
    """Name that was typed before."""
    needs_token: bool
    """True if the broker has no users: the console is opened by the address that the command has printed."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    status: int
    error: str
    """Sentence that says what is wrong, and what to do."""
