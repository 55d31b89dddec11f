"""Answers to control requests, in JSON: the broker encodes them, and clients decode them. docs/reference/control.md is
made of the texts here.

A field that is added later has a default, so that clients can decode the answers of older brokers.
"""

from enum import Enum

import msgspec
from msgspec import UNSET, UnsetType


class QueueReport(msgspec.Struct):
    """One queue or durable subscription. The counts are those since the broker has started, or since the queue was
    created, if that was later: an unused queue is removed with its counts."""

    name: str
    """Name of the queue. A durable subscription is called `subscription,CLIENT,NAME,TOPIC`; if it has a selector, one
    more comma and the whole selector follow. No part before the selector has a comma."""
    waiting: int
    """Number of messages that wait."""
    unacknowledged: int
    """Number of messages that consumers hold. A message that was acknowledged in an open transaction is neither
    waiting nor unacknowledged."""
    consumers: int
    """Number of consumers, including consumers of patterns that match the queue."""
    scheduled: int
    """Number of scheduled sends to this queue alone."""
    paused: bool
    """True if an operator has paused the queue."""
    dead_letters: bool = False
    """True for a dead-letter queue: named `DLQ.` + anything, or by the setting `dead_letters` of a policy."""
    topic: str | UnsetType = UNSET
    """Topic, or pattern of topics, of a durable subscription. The field is missing for a queue."""
    accepted: int = 0
    """Number of messages that came into the queue: sent, moved, due, dead-lettered from other queues, or reports."""
    acknowledged: int = 0
    """Number of messages that were acknowledged, those of a transaction once it is committed."""
    returned: int = 0
    """Number of times that a dispatched message was requeued, with or without an attempt. A message that becomes a dead
    letter instead does not count here."""
    failed_again: int = 0
    """Number of requeueings that counted a second or later attempt: these messages fail again and again."""
    expired: int = 0
    """Number of messages that were removed unconsumed, because they had expired or their durable subscription had
    ended. One that has become a dead letter does not count here."""
    dead_lettered: dict[str, int] = {}
    """Number of messages that have become dead letters in another queue, by reason: `attempts exhausted`, `rejected` or
    `expired`. Reasons without a message are left out."""
    handled: int = 0
    """Number of messages that have failed, and went to their next handler instead of a dead-letter queue."""
    moved: int = 0
    """Number of messages that a request has moved or re-driven to another queue."""
    purged: int = 0
    """Number of messages that a request has removed."""
    oldest_s: float | None = None
    """Seconds for which the oldest of the waiting messages has been in the queue; null if none waits, or if it is from
    before the broker's start and not read yet. A message that waits for its next try while others are dispatched is
    left out."""
    held_s: float | None = None
    """Seconds since the dispatch of the message that consumers have held longest; null if they hold none."""
    rate: float = 0
    """Messages acknowledged in a second, on average over the last seconds."""
    lanes: dict[str, int] | UnsetType = UNSET
    """Number of messages that wait, by priority, those with the field `names` in the request; otherwise missing."""


class QueueOrder(Enum):
    """Order of the queues in an answer. Queues that are equal in it follow one another by name."""

    NAME = "name"
    """Order by name, from A to Z."""
    WAITING = "waiting"
    """Order by `waiting`, the largest number first."""
    OLDEST = "oldest"
    """Order by `oldest_s`, the largest age first. Queues without a waiting message are last."""
    HELD = "held"
    """Order by `held_s`, the longest time first. Queues of which consumers hold nothing are last."""
    FAILING = "failing"
    """Order by `failed_again`, the largest number first."""
    RATE = "rate"
    """Order by `rate`, the highest first."""


class MessageCounts(msgspec.Struct):
    """Numbers of messages since the broker has started."""

    accepted: int = 0
    """Number of messages that came into a queue. A message counts once for each queue that gets a copy."""
    acknowledged: int = 0
    """Number of messages that were acknowledged."""
    returned: int = 0
    """Number of times that a dispatched message was requeued."""
    failed_again: int = 0
    """Number of requeueings that counted a second or later attempt."""
    expired: int = 0
    """Number of messages that were removed unconsumed."""
    dead_lettered: dict[str, int] = {}
    """Number of messages that have become dead letters, by reason: `attempts exhausted`, `rejected` or `expired`."""
    handled: int = 0
    """Number of messages that went to their next handler."""
    moved: int = 0
    """Number of messages that a request has moved or re-driven."""
    purged: int = 0
    """Number of messages that a request has removed."""


class QueueSums(MessageCounts, kw_only=True):
    """Sums of all queues and durable subscriptions that the user may see and `name` selects, whatever `limit` and
    `after` are. The counts are those of QueueReport; queues that were removed are not in them."""

    queues: int = 0
    """Number of these queues and durable subscriptions."""
    waiting: int = 0
    """Number of messages that wait."""
    held: int = 0
    """Number of messages that consumers hold."""
    scheduled: int = 0
    """Number of scheduled sends to one of these queues alone."""
    oldest_s: float | None = None
    """Largest `oldest_s` of these queues; null if none has one."""
    held_s: float | None = None
    """Largest `held_s` of these queues; null if none has one."""
    rate: float = 0.0
    """Messages acknowledged in a second."""


class QueuesReport(msgspec.Struct):
    """Answer to a request `queues` with a body."""

    queues: list[QueueReport]
    """Queues and durable subscriptions, in the requested order."""
    next: str | None
    """Cursor, to be `after` in the next request; null if no queue is left."""
    sums: QueueSums
    """Sums of all that the request selects."""


class CommitsReport(msgspec.Struct):
    """Batches of changes that the broker has made durable since its start."""

    batches: int
    """Number of batches."""
    bytes: int
    """Bytes of these batches, with the events for the history."""
    seconds: float
    """Seconds that writing them took, in sum."""


class JournalReport(msgspec.Struct):
    """Journal of the broker's folder."""

    segments: int
    """Number of its segments."""
    bytes: int
    """Bytes of its segments, unused bytes included."""


class HistoryReport(msgspec.Struct):
    """History of the broker."""

    bytes: int
    """Bytes of events since the broker's start."""


class StuckQueueReport(msgspec.Struct):
    """One queue with a ready message and a consumer with credit, in which nothing is dispatched: a fault of the
    broker."""

    queue: str
    """Name of the queue."""
    waiting_ms: int
    """Milliseconds for which the queue has been stuck."""


class MemoryReport(msgspec.Struct):
    """Memory of the broker, in bytes."""

    limit: int | None
    """Part of the memory limit for messages; null if the broker has no memory limit."""
    used: int
    """Bytes of messages in memory."""
    leaving: int
    """Bytes of messages, counted in `used` too, that are being written to disk and then leave memory."""
    unsent: int
    """Bytes of messages that the sockets of clients have not taken."""
    open: int
    """Bytes of sends and causes in open transactions."""
    incomplete: int
    """Bytes of large frames that are not complete yet."""


class SubscriptionCounts(msgspec.Struct):
    """Numbers of subscriptions to topics."""

    durable: int
    """Number of durable subscriptions."""
    non_durable: int
    """Number of subscriptions that end with their connections."""


class TemporaryQueueReport(msgspec.Struct):
    """One temporary queue, or one subscription to a topic that is not durable. If disk or memory is short, and the
    queues in `queues` are small, this shows which client reads too slowly."""

    destination: str
    """Destination, as the client that owns it writes it."""
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
    """Temporary queues, and subscriptions to topics that are not durable. `queues` does not report these. A message
    counts in full for each subscription in which a copy waits, so there may be fewer bytes on the disk."""

    waiting: int
    """Number of messages that wait in all these queues and subscriptions."""
    unacknowledged: int
    """Number of messages that consumers of these queues and subscriptions hold."""
    bytes: int
    """Bytes of these messages, in memory and on disk."""
    largest: list[TemporaryQueueReport]
    """The ten queues and subscriptions with the most bytes, the largest first."""


class MemberReport(msgspec.Struct):
    """One broker of a log, as it has described itself in the log."""

    name: str
    """Member name of the broker."""
    host: str
    """Name of its machine."""
    role: str
    """`active`, `standing by`, or `stopped` after a clean stop. A broker that was killed keeps its role."""
    epoch: int
    """Epoch of this broker if it is active, else of the active broker that it follows or has followed."""
    number: int
    """Number of its last row."""
    age_ms: int
    """Milliseconds since it has written this. A broker that runs does so once a second."""


class LogReport(msgspec.Struct):
    """Log in PostgreSQL of which the broker's folder is a copy."""

    server: str
    """Host and port of the PostgreSQL that is or was in use."""
    epoch: int
    """Number of brokers that have taken over the log, this one included. A broker with a lower epoch is fenced."""
    number: int
    """Number of the log's last row."""
    position: int
    """Number of the row up to which the rows were compacted."""
    replicated: bool
    """True if a message is confirmed only once the database's synchronous standby has it, too."""
    awaited: str | None
    """Cause for which nothing is confirmed at the moment: `database` (PostgreSQL does not answer), `standby` (its
    synchronous standby does not confirm) or `space` (its disk is full); null if there is none."""
    waiting_since_ms: int | None
    """Time since which nothing is confirmed, in milliseconds since 1970; null if `awaited` is null."""
    members: list[MemberReport]
    """Brokers of the log, active or not."""


class StatusReport(msgspec.Struct, kw_only=True):
    """Answer to `status`: the state of the broker."""

    stuck: list[StuckQueueReport]
    """Queues in which a message is ready and a consumer has credit, but nothing is dispatched."""
    ready: bool
    """False while the broker is [drained](#drain): give it no new clients."""
    memory: MemoryReport
    """Memory that messages use, and its limit."""
    disk_level: str
    """Free space for new messages: `plenty`, `little`, `none` or `full`."""
    disk_bytes: dict[str, int]
    """Sizes that decide `disk_level`, in bytes: `free` and `needed` on the disk; `used` and `limit` if the broker has a
    disk limit; `database_used` and `database_limit` if its messages are in PostgreSQL; `backup` while a backup needs
    space."""
    page_reads: int
    """Number of pages that are being read from the store."""
    queues: int
    """Number of queues and durable subscriptions."""
    subscriptions: SubscriptionCounts
    """Number of subscriptions to topics."""
    scheduled: int
    """Number of all scheduled sends."""
    scheduled_for_topics: int
    """Number of scheduled sends to a topic or to several destinations; `scheduled` counts these, too."""
    waiting: int
    """Number of messages that wait in queues and durable subscriptions."""
    dead_letters: int
    """Number of these messages that are in dead-letter queues."""
    in_memory: int
    """Number of messages of queues and durable subscriptions that are in memory."""
    temporary: TemporaryReport
    """Messages in queues that end with their connections."""
    codec: str
    """Language of the codec's inner loops: `C`, or `Python` if the module in C is not installed or switched off."""
    version: str
    """Version of truenext that runs the broker."""
    uptime_s: float
    """Seconds since the broker has started."""
    connections: int
    """Number of open connections of clients, this one included."""
    held: int
    """Number of messages of queues and durable subscriptions that consumers hold."""
    oldest_s: float | None
    """Largest `oldest_s` of all queues and durable subscriptions (see [queues](#queues)) but dead-letter queues and
    those of Spark, in which messages stay; null if nothing waits in them."""
    held_s: float | None = None
    """Largest `held_s` of all queues and durable subscriptions but those of Spark, whose queries hold messages until
    they commit; null if consumers hold nothing of them."""
    rate: float
    """Messages of queues and durable subscriptions acknowledged in a second, on average over the last seconds."""
    counts: MessageCounts
    """Numbers of messages of queues and durable subscriptions since the broker's start, also of those that were removed
    meanwhile."""
    temporary_counts: MessageCounts
    """Numbers of messages of temporary queues, and of subscriptions that are not durable, since the broker's start."""
    commits: CommitsReport
    """Batches made durable since the broker's start."""
    journal: JournalReport | None
    """Journal; null if the broker keeps messages in memory alone."""
    history: HistoryReport | None
    """History; null if the broker keeps none."""
    log: LogReport | UnsetType = UNSET
    """Log of the broker. The field is missing if the broker's messages are not in PostgreSQL."""


class QueueChange(msgspec.Struct):
    """Answer to `pause` and `resume`, once the change is durable."""

    queue: str
    """Name of the queue."""
    created: bool | UnsetType = UNSET
    """True if `pause` has created the queue. The field is missing in the answer to `resume`."""


class ConsumerReport(msgspec.Struct, kw_only=True):
    """One consumer of a queue. The answer to `consumers` is a list of these, in the order of their subscriptions,
    consumers of patterns last."""

    id: str
    """Id that the client gave its subscription."""
    connection: str
    """Connection of the consumer, as `connections` reports it."""
    address: str | None
    """Address from which the client connects. Null if the client that asks lacks the right `monitor`, and the
    connection is of another user; so are `user` and `client_id`."""
    user: str | None
    """User of the connection; "" if the broker has no users."""
    client_id: str | None
    """Name that the client gave itself, `client-id` of its CONNECT; "" if none."""
    destination: str
    """Destination of the subscription: the queue, or a pattern of queues or topics."""
    selector: str | None
    """Selector of the subscription; null if it has none."""
    ack: str
    """Mode of acknowledgement: `auto`, `client` or `client-individual`."""
    window: int | None
    """Number of messages that the consumer may hold, in all queues of its pattern; null in auto mode, and if the
    subscription pulls."""
    automatic: bool
    """True if the broker chooses the window."""
    suspended: bool
    """True if the consumer gets no messages until its client wakes it."""
    held: int
    """Number of messages of this queue that the consumer holds."""
    held_s: float | None = None
    """Seconds since the dispatch of the message of this queue that the consumer has held longest; null if the consumer
    holds none. A consumer that has acknowledged nothing for as long hangs or works for long."""
    last_acknowledgement_s: float | None
    """Seconds since the consumer's last ACK or NACK; null if there was none."""


class SettingReport(msgspec.Struct):
    """One setting of a queue's policy."""

    value: int | float | str | None
    """Value of the setting, sizes in bytes; null for "none"."""
    source: str
    """Table of the configuration file that sets it, such as `[policy."orders.>"]`; `command line` or `default`."""


class PolicyReport(msgspec.Struct):
    """Settings of one queue ([settings](settings.md))."""

    queue: str = ""
    """Name of the queue."""
    settings: dict[str, SettingReport] = {}
    """Settings by name."""


class OpenConnection(msgspec.Struct, kw_only=True):
    """One connection that has logged in. The answer to `connections` is a list of these, in the order of logins."""

    connection: str
    """Name of the connection, for `close`. No other connection ever has the same name."""
    address: str
    """Address and port from which the client connects."""
    user: str
    """User of the connection; "" if the broker has no users."""
    tls: str | None
    """Version of TLS, such as `TLSv1.3`; null if the connection is not encrypted."""
    client_id: str
    """Name that the client gave itself, `client-id` of its CONNECT; "" if none."""
    since: int
    """Time of the login, in milliseconds since 1970."""
    protocol: str
    """Protocol of the connection: `STOMP` or `OpenWire`."""
    consumers: int
    """Number of consumers of the connection."""
    held: int
    """Number of messages that the connection's consumers hold, or that its open transactions have acknowledged."""


class UserReport(msgspec.Struct):
    """User of the connection, and the user's grants, those of its roles included."""

    name: str
    """Name of the user."""
    send: list[str] = []
    """Patterns of the queues and topics to which the user may send, each with `/queue/` or `/topic/`."""
    take: list[str] = []
    """Patterns of the queues and topics that the user may consume from (right `take`)."""
    browse: list[str] = []
    """Patterns of the queues that the user may browse."""
    manage: list[str] = []
    """Patterns of the queues that the user may manage: move, purge and pause."""
    monitor: bool = False
    """True if the user may use `status` and `connections`, and see all queues and their consumers (right `monitor`)."""
    admin: bool = False
    """True if the user may use `close`, `security`, `reload`, `failover`, `backup` and `drain`, and `scheduled` and
    `unschedule` for all destinations (right `admin`)."""
    client_ids: list[str] = []
    """Client ids that the users file lists for this user. The user's name and client ids that begin with `NAME.` are
    always allowed, and not listed."""


class ConnectionUser(msgspec.Struct):
    """Part of the answer to `connection`: the user alone."""

    user: UserReport | None = None
    """User of the connection; None if the broker has no users."""


class SecurityEvent(msgspec.Struct):
    """One event, or several equal ones. The answer to `security` is a list of these, the latest first: the last
    {SECURITY_EVENTS_MAX} different ones of each kind, since the start of the broker. Kinds are refusals, failed logins,
    and control requests; but not those that only read."""

    at: int
    """Time of the event, or of the latest of equal ones, in milliseconds since 1970."""
    event: str
    """`request refused`; `connection ended` by a reload; `login failed`; `TLS failed`; or `control request`."""
    user: str
    """Name of the user; "" if the client has named none, or the broker has no users; `unknown` if there is no such
    user."""
    address: str
    """Address from which the client connects, without the port."""
    text: str
    """Reason; of a control request, its verb, and the queue or connection that it names."""
    count: int
    """Number of equal events: those with the same event, user, address and text."""
    first: int
    """Time of the first of equal events, in milliseconds since 1970."""


class ScheduledSendInfo(msgspec.Struct):
    """One scheduled send, in the answer to `scheduled`."""

    number: int
    """Number that identifies the scheduled send."""
    due_ms: int
    """Time at which the send is due, in milliseconds since the epoch."""
    to: str
    """Address of a topic or of several destinations; "" if the send goes to one queue."""
    period_ms: int
    """Milliseconds between two sends; 0 if the send is not repeated after a period."""
    repeat: int
    """Number of further sends; -1 is for ever."""
    cron: str
    """Cron expression of the times of the send; "" is none."""
    zone: str
    """Time zone of `cron`; "" is UTC."""
    delay_ms: int
    """Milliseconds of delay after each time of `cron`; 0 without `cron`, because `due_ms` includes the delay."""
    priority: int
    """Priority of the message."""
    persistent: bool
    """True if the message is persistent."""
    headers: dict[str, str]
    """Headers of the message."""
    size: int
    """Size of the body in bytes."""
    body: str
    """Beginning of the body as text: its first {SHOWN_BODY_BYTES} bytes. Bytes that are not UTF-8 are replaced."""
