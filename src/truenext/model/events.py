"""History files of the broker, byte by byte. history/schema.py describes the columns of the events.

A file is a header and a sequence of chunks; a chunk is a header and a sequence of blocks; a block is one or more events
of one kind in one queue, by columns. All little-endian. If you change anything here, increase HISTORY_VERSION.

    file      magic        "TNXH"
              version      u16
              run          u32     run of all its events
    chunk     checksum     u32     CRC-32 of the rest of the chunk
              size         u32     bytes of the blocks
              run          u32
              flags        u32     1: the first chunk of a file, which names every queue
                                   2: from a batch that was in the store before this chunk was written
              first event  u64     number of the first event; the others follow one by one
    block     kind         u8      Kind
              code         u8      reason or mode, else 0
              count        u32     number of events
              queue        u32     number of the queue, 0 is none
              other        u64     batch, consumer or number, by kind; for RETURNED and DEAD_LETTERED the number
                                   of the cause, 0 is none
              at           u64     microseconds since the epoch
              columns      those of COLUMNS, each with `count` values
              text         only with NAME and CAUSE: `other` bytes of UTF-8

NAME is not an event, its count is 0: from here on the queue number stands for that name. CAUSE is none either: the
number in `queue` stands for that cause up to the end of the chunk.
"""

import struct
from enum import IntEnum
from hashlib import blake2b
from itertools import product

HISTORY_VERSION = 9
"""The only version that this truenext reads and writes."""

MAGIC = b"TNXH"
FILE = struct.Struct("<4sHI")
CHUNK = struct.Struct("<IIIIQ")
CHECKSUM = struct.Struct("<I")
BLOCK = struct.Struct("<BBIIQQ")

STARTS_FILE, FROM_BATCH = 1, 2
"""Flags of a chunk."""


class EventKind(IntEnum):
    """Kind of event. docs/reference/history.md is made of the texts here."""

    NAME = 0
    RUN_STARTED = 1
    """A run begins, before any other event of it."""
    RECOVERED = 2
    """The run has recovered a queue: each name of a queue that has messages, or has ended and still has some on disk,
    has one, after `run-started`."""
    ACCEPTED = 3
    """A message got its sequence."""
    COMMITTED = 4
    """Batches are durable."""
    SUBSCRIBED = 5
    """A consumer has subscribed. A consumer of a pattern does so in each of its queues, also when one is created."""
    UNSUBSCRIBED = 6
    """A consumer has ended, in each of its queues."""
    DISPATCHED = 7
    """A message was dispatched to a consumer."""
    ACKNOWLEDGED = 8
    """The message is gone; inside a transaction at its COMMIT."""
    RETURNED = 9
    """The message was requeued at its place, or (`delayed`, `blocking`) will be when it is `due`. A message with too
    many attempts is `dead-lettered` instead, and has no `returned`."""
    EXPIRED = 10
    """The message was removed, and no consumer has handled it: its time had come, or its durable subscription had
    ended."""
    DEAD_LETTERED = 11
    """The message is gone from this queue: it is a dead letter in another one."""
    MOVED = 12
    """The message is gone from this queue, as a request has moved or re-driven it."""
    REMOVED = 13
    """The message is gone: it was purged."""
    PAUSED = 14
    """Dispatch from the queue was paused. After a `run-started` each paused queue has one more `paused`."""
    RESUMED = 15
    """Dispatch from the queue was resumed."""
    ACCEPTED_OF_GROUP = 16
    ENDED = 17
    """The durable subscription has ended: all messages that wait in this queue are gone from here on. An `expired`
    follows for each when it is removed, in whatever order, perhaps in a later run. All other events of this queue that
    follow are of a new durable subscription of the same name."""
    WINDOW = 18
    """The consumer may hold this number of messages from here on: an automatic window has changed, or the consumer was
    suspended (0), or woken. Consumers of a pattern, and those that pull, have no such event."""
    REQUESTED = 19
    """The consumer, which pulls, gets this number of messages from here on; 0 if its pull request was withdrawn, or has
    ended before all of it came. Consumers of a pattern have no such event."""
    STARTED = 20
    """The client has reported that it has started this dispatch, or has acknowledged or nacked the message inside a
    transaction. Only connections that report started dispatches have it, perhaps more than once for a dispatch."""
    SUBSCRIBED_EXCLUSIVE = 21
    CAUSE = 22

    @property
    def label(self) -> str:
        """Name of the kind in docs/reference/history.md."""
        same = {EventKind.ACCEPTED_OF_GROUP: EventKind.ACCEPTED, EventKind.SUBSCRIBED_EXCLUSIVE: EventKind.SUBSCRIBED}
        return same.get(self, self).name.lower().replace("_", "-")


COLUMNS: dict[EventKind, tuple[tuple[str, str], ...]] = {
    **dict.fromkeys(EventKind, ()),
    EventKind.ACCEPTED: (("sequence", "Q"), ("size", "I"), ("flags", "B")),
    EventKind.SUBSCRIBED: (("window", "I"),),
    EventKind.DISPATCHED: (("sequence", "Q"), ("consumer", "I"), ("deliveries", "I")),
    EventKind.ACKNOWLEDGED: (("sequence", "Q"),),
    EventKind.RETURNED: (("sequence", "Q"), ("attempts", "I")),
    EventKind.EXPIRED: (("sequence", "Q"),),
    EventKind.DEAD_LETTERED: (("sequence", "Q"), ("target_queue", "I"), ("target_sequence", "Q")),
    EventKind.MOVED: (("sequence", "Q"), ("target_queue", "I"), ("target_sequence", "Q")),
    EventKind.REMOVED: (("sequence", "Q"),),
    EventKind.ACCEPTED_OF_GROUP: (("sequence", "Q"), ("size", "I"), ("flags", "B"), ("group", "Q")),
    EventKind.WINDOW: (("window", "I"),),
    EventKind.REQUESTED: (("count", "I"),),
    EventKind.STARTED: (("sequence", "Q"), ("consumer", "I")),
    EventKind.SUBSCRIBED_EXCLUSIVE: (("window", "I"), ("priority", "b")),
}
"""Columns of the events of each kind, if it has any: name, and type as in `array` and `struct`."""

PERSISTENT_FLAG = 16
"""Added to the priority in the flags of an accepted message that is persistent."""

FAILURES = ("nacked", "aborted", "lost")
"""Ways in which a consumer can fail with a message."""

DELAYED, BLOCKING = "delayed", "blocking"
"""Ways in which a message waits for its retry: others skip it, or it blocks them."""

REASONS = (
    *("", "released", "clean", "unclean", DELAYED, BLOCKING, "due"),
    *FAILURES,
    *(f"{failure} and {wait}" for failure in FAILURES for wait in (DELAYED, BLOCKING)),
)
"""Texts by code: why a message was requeued, and how it then waits; how the previous run ended."""

_ACK_MODES = ("auto", "client", "client-individual")
WITH_SELECTOR, WITH_EXPRESS, WITH_STARTED, PULLING = " with selector", " with express", " with started", " pulling"
EXCLUSIVE = " exclusive"
SUBSCRIPTION_MODES = tuple(
    ack_mode + selector + express + started + pulling + exclusive
    for exclusive, pulling, started, express, selector, ack_mode in product(
        ("", EXCLUSIVE), ("", PULLING), ("", WITH_STARTED), ("", WITH_EXPRESS), ("", WITH_SELECTOR), _ACK_MODES
    )
)
"""Texts by code: the acknowledgement mode of a subscription; whether it has a selector and express dispatch, its
connection reports started messages, it pulls, and it is exclusive."""

NO_WINDOW = 0xFFFFFFFF
"""Window of a subscription in auto mode, which its socket's buffer limits, and of one that pulls."""

GAP_EVENTS = 1 << 20
"""Event numbers skipped after an unclean stop: events that were only in memory may have had them, and been seen."""


def chunk_position(chunk: bytes) -> tuple[int, int]:
    """Return run and first event of a chunk: the order of the chunks of one run."""
    _, _, run, _, first_event = CHUNK.unpack_from(chunk)
    return run, first_event


def group_number(group: str) -> int:
    """Return the number of a group in the history: a hash, never 0, hardly ever the same for two names."""
    return int.from_bytes(blake2b(group.encode(), digest_size=8).digest(), "big") >> 1 or 1


def event_bytes(kind: int) -> int:
    """Return the size in bytes of the columns of one event of this kind."""
    return _WIDTHS[kind]


_WIDTHS = [sum(struct.calcsize("<" + code) for _, code in COLUMNS[kind]) for kind in EventKind]
