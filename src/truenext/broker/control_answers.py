"""Answers to the control requests `queues`, `status`, `pause` and `resume`, as JSON. docs/reference/control.md"""

import msgspec
from msgspec import UNSET, UnsetType


class QueueReport(msgspec.Struct):
    """One queue or durable subscription. The answer to `queues` is a list of these, sorted by name."""

    name: str
    """Name of the queue. A durable subscription is called `subscription,CLIENT,NAME,TOPIC`; if it has a selector, one
    more comma and the whole selector follow. No part before the selector has a comma."""
    waiting: int
    """Number of messages that wait."""
    unacknowledged: int
    """Number of messages that consumers hold. Messages that they have acknowledged in an open transaction are in
    neither count."""
    consumers: int
    """Number of consumers, with those of patterns that match the queue."""
    scheduled: int
    """Number of scheduled sends to this queue alone."""
    paused: bool
    """True if an operator has paused the queue."""
    topic: str | UnsetType = UNSET
    """Topic, or pattern of topics, of a durable subscription; a queue does not have this field."""


class StuckQueueReport(msgspec.Struct):
    """One queue with a ready message and a consumer with credit, in which nothing happens: a fault of the broker."""

    queue: str
    """Name of the queue."""
    waiting_ms: int
    """Milliseconds for which it has been stuck."""


class MemoryReport(msgspec.Struct):
    """Memory of the broker, in bytes."""

    limit: int | None
    """Part of the memory limit for messages; None if there is none."""
    used: int
    """Bytes of messages in memory."""
    leaving: int
    """Bytes, among `used`, that are being written and are then evicted."""
    unsent: int
    """Bytes of messages that the sockets of clients have not taken."""
    open: int
    """Bytes of open transactions."""
    incomplete: int
    """Bytes of large frames that are not complete yet."""


class SubscriptionCounts(msgspec.Struct):
    """Subscriptions to topics."""

    durable: int
    """Number of durable subscriptions."""
    non_durable: int
    """Number of subscriptions that end with their connections."""


class TemporaryQueueReport(msgspec.Struct):
    """One temporary queue, or one subscription to a topic that is not durable. It names the client that reads too
    slowly if disk or memory is short and the queues give no reason."""

    destination: str
    """Destination, as its client named it."""
    client: str
    """Address from which the client connects, as in the log."""
    client_id: str
    """Name that the client gave itself, `client-id` of its CONNECT; "" if none."""
    waiting: int
    """Number of messages that wait."""
    unacknowledged: int
    """Number of messages that consumers hold."""
    bytes: int
    """Bytes of these messages, in memory and on disk."""


class TemporaryReport(msgspec.Struct):
    """Temporary queues, and subscriptions to topics that are not durable, which `queues` does not report. A message
    counts in full for each subscription in which a copy waits, so there may be less on the disk."""

    waiting: int
    """Number of messages that wait in all of them."""
    unacknowledged: int
    """Number of messages that their consumers hold."""
    bytes: int
    """Bytes of these messages, in memory and on disk."""
    largest: list[TemporaryQueueReport]
    """The ten with the most bytes, the largest first."""


class StatusReport(msgspec.Struct):
    """State of the broker."""

    stuck: list[StuckQueueReport]
    """Queues that are stuck."""
    memory: MemoryReport
    """Memory for messages."""
    disk_level: str
    """Free space for new messages, by the name of its level."""
    disk_bytes: dict[str, int]
    """Bytes from which `disk_level` was found: `free` and `needed` of the disk, and `used` and `limit` if there is a
    limit."""
    page_reads: int
    """Number of pages that are being read from the store."""
    queues: int
    """Number of queues and durable subscriptions."""
    subscriptions: SubscriptionCounts
    """Number of subscriptions to topics."""
    scheduled: int
    """Number of all scheduled sends."""
    scheduled_for_topics: int
    """Number of scheduled sends, among `scheduled`, to a topic or to several destinations."""
    waiting: int
    """Number of messages that wait in queues and durable subscriptions."""
    in_memory: int
    """Number of their messages that are in memory."""
    temporary: TemporaryReport
    """Messages in queues that end with their connections."""
    codec: str
    """Language of the codec's inner loops: `C`, or `Python` if the module in C is not installed or switched off."""


class QueueChange(msgspec.Struct):
    """Answer to `pause` and `resume`, once the change is durable."""

    queue: str
    """Name of the queue."""
    created: bool | UnsetType = UNSET
    """True if `pause` has created the queue; the answer to `resume` does not have this field."""
