"""Data of the page about one message."""

import msgspec

from truenext.console.pages.queues import Act


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a message, or a part of it, as text that is shown."""

    form: str
    """`text`, `json` (indented), `hex` or `empty`."""
    text: str
    size: int
    """Bytes of the whole body."""
    start: int
    """Offset of the first byte shown."""
    shown: int
    """Number of bytes shown."""
    forms: dict[str, str]
    """Links to the same body in other forms, by form."""
    next: str
    """Link to the next part; "" at the end."""
    first: str


class Waiting(msgspec.Struct, frozen=True):
    """Endpoint, or starter of the flow, that waits for a reply."""

    to: str
    state: str
    """State of the waiting stage as indented JSON, in part if it is large."""


class StageMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Message of stages, decoded from its body."""

    trace: str
    flow: str
    """Link to the flow; "" if the console reads no events."""
    kind: str
    sender: str
    started_by: str
    started_ms: int
    parent: str
    calls: int
    interactive: bool
    message: str
    """Message of the program as indented JSON, in part if it is large."""
    state: str
    properties: dict[str, str]
    waiting: list[Waiting]
    """Endpoints that wait for a reply, the outermost first."""
    attachments: dict[str, int]
    """Bytes of the attachments, by name."""


class MessagePage(msgspec.Struct, frozen=True, kw_only=True):
    queue: str
    queue_link: str
    sequence: int
    priority: int
    message_id: str
    persistent: bool
    arrived_ms: int | None
    expires_ms: int | None
    attempts: int
    deliveries: int
    origin: str
    """Queue in which a dead letter failed; "" for other messages."""
    reason: str
    first_cause: str
    last_cause: str
    headers: list[tuple[str, str]]
    """All headers, by name."""
    body: Body
    stage: StageMessage | None
    download: str
    """Link to the body as a file."""
    acts: list[Act]
    spark_command: str
