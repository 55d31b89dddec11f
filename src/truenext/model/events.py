"""History files of the broker, byte by byte. history/schema.py describes the columns of the events.

A file is a header and a sequence of chunks. A chunk is a header and a sequence of blocks. A block has one or more
events of one kind in one queue, column by column. All numbers are little-endian. If you change anything here, increase
HISTORY_VERSION.

    file      magic        "TNXH"
              version      u16
              run          u32     run of all its events
    chunk     checksum     u32     CRC-32 of the rest of the chunk
              size         u32     bytes of the blocks
              run          u32
              flags        u32     1: the first chunk of a file, which names every queue and the broker
                                   2: from a batch that was in the store before this chunk was written
              first event  u64     number of the first event; the others follow one by one
    block     kind         u8      Kind
              code         u8      reason or mode, else 0
              count        u32     number of events
              queue        u32     number of the queue, 0 is none; for RUN_STARTED the identity as a number, 0 is
                                   not known
              other        u64     batch, consumer or number, by kind; for RETURNED, DEAD_LETTERED and HANDLED
                                   the number of the cause, 0 is none; for RUN_STARTED the epoch, 0 is none
              at           u64     microseconds since the epoch
              columns      those of COLUMNS, each with `count` values
              text         only with NAME and CAUSE: `other` bytes of UTF-8

A block of kind NAME is no event, and its count is 0: from there on the queue number stands for the name in its text.
The number 0 stands for the broker; its name is the identity of the broker's data.
Nor is a block of kind CAUSE an event: up to the end of the chunk the number in `queue` stands for the cause in its
text."""

import struct
from collections.abc import Iterator
from enum import IntEnum
from hashlib import blake2b
from itertools import product

HISTORY_VERSION = 14
"""Version of the files that this truenext writes."""

OLDEST_HISTORY_VERSION = 9
"""Oldest version of the files that this truenext reads. Files of version 13 have an identity only at the start of a
run, those of version 12 have none, those of version 11 no epochs, those of version 10 no reason `closed`, and those of
version 9 no events `handled` and `reported`."""

BROKER = 0
"""Number in place of a queue's of the name that is the broker's identity."""

MAGIC = b"TNXH"
FILE = struct.Struct("<4sHI")
CHUNK = struct.Struct("<IIIIQ")
CHECKSUM = struct.Struct("<I")
BLOCK = struct.Struct("<BBIIQQ")

STARTS_FILE, FROM_BATCH = 1, 2
"""Flags of a chunk: the first chunk of a file; a chunk of a batch that was in the store before this chunk was
written."""


class EventKind(IntEnum):
    """Kind of event. docs/reference/history.md is made of the texts after the values."""

    NAME = 0
    RUN_STARTED = 1
    """A run of the broker begins. This is the run's first event."""
    RECOVERED = 2
    """The run has recovered a queue from disk. After `run-started` there is one such event for each name of a queue
    that has messages, or of an ended durable subscription that still has some on disk."""
    ACCEPTED = 3
    """A message was accepted, and got its sequence."""
    COMMITTED = 4
    """One batch or several are durable."""
    SUBSCRIBED = 5
    """A consumer has subscribed to the queue. A consumer of a pattern has one such event for each of its queues, also
    when such a queue is created later."""
    UNSUBSCRIBED = 6
    """A consumer has ended. A consumer of a pattern has one such event for each of its queues."""
    DISPATCHED = 7
    """A message was dispatched to a consumer."""
    ACKNOWLEDGED = 8
    """The message was acknowledged, and so removed. Inside a transaction this happens at COMMIT."""
    RETURNED = 9
    """The message was requeued. With `delayed` or `blocking` in its reason, the message waits for its next try, and has
    a second `returned`, with the reason `due`, when that time has come. A message with too many attempts has a
    `dead-lettered` in place of a `returned`."""
    EXPIRED = 10
    """The message was removed unconsumed: the time in its header `expires` had come, or its durable subscription had
    ended."""
    DEAD_LETTERED = 11
    """The message was removed from this queue, and has become a dead letter in another queue."""
    MOVED = 12
    """The message was removed from this queue: a request has moved or re-driven it to another queue."""
    REMOVED = 13
    """The message was removed by a request: it was purged."""
    PAUSED = 14
    """The queue was paused. After each `run-started`, the event is repeated for each queue that is still paused."""
    RESUMED = 15
    """The queue was resumed."""
    ACCEPTED_OF_GROUP = 16
    ENDED = 17
    """The durable subscription has ended: from now on no consumer gets a message that waits in its queue. Each of these
    messages has an `expired` when it is removed, in any order, perhaps in a later run. All other later events of this
    queue belong to a new durable subscription of the same name."""
    WINDOW = 18
    """The consumer may hold this number of messages from now on: its automatic window has changed, or the consumer was
    suspended (0) or woken. Consumers of a pattern, and consumers that pull, have no such event."""
    REQUESTED = 19
    """A consumer that pulls gets this number of messages from now on. The number is 0 if its pull request was
    withdrawn, or has ended early. Consumers of a pattern have no such event."""
    STARTED = 20
    """The client has started the message of this dispatch: it has reported so, or has acknowledged or nacked the
    message inside a transaction. Only connections that report started messages have this event, and a dispatch may have
    it more than once."""
    SUBSCRIBED_EXCLUSIVE = 21
    CAUSE = 22
    HANDLED = 23
    """The message was removed from this queue: it has failed, and moved to its next handler."""
    REPORTED = 24
    """The dead letter of the message has sent a report. This event follows the `dead-lettered` of the message."""

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
    **dict.fromkeys(
        (EventKind.DEAD_LETTERED, EventKind.MOVED, EventKind.HANDLED, EventKind.REPORTED),
        (("sequence", "Q"), ("target_queue", "I"), ("target_sequence", "Q")),
    ),
    EventKind.REMOVED: (("sequence", "Q"),),
    EventKind.ACCEPTED_OF_GROUP: (("sequence", "Q"), ("size", "I"), ("flags", "B"), ("group", "Q")),
    EventKind.WINDOW: (("window", "I"),),
    EventKind.REQUESTED: (("count", "I"),),
    EventKind.STARTED: (("sequence", "Q"), ("consumer", "I")),
    EventKind.SUBSCRIBED_EXCLUSIVE: (("window", "I"), ("priority", "b")),
}
"""Columns of the events of each kind: name, and type as in `array` and `struct`."""

PERSISTENT_FLAG = 16
"""Flag of a persistent message. The flags of an accepted message are its priority, plus this."""

_DELAYABLE = ("nacked", "aborted", "lost")
CLOSED = "closed"
FAILURES = (*_DELAYABLE, CLOSED)
"""Ways in which a consumer can fail with a message. After CLOSED the message is due at once."""

DELAYED, BLOCKING = "delayed", "blocking"
"""Ways in which a message waits for its next try: other messages skip it, or it holds later messages back."""

REASONS = (
    *("", "released", "clean", "unclean", DELAYED, BLOCKING, "due"),
    *_DELAYABLE,
    *(f"{failure} and {wait}" for failure in _DELAYABLE for wait in (DELAYED, BLOCKING)),
    # Last, so that the codes of the others are those of versions 9 and 10.
    CLOSED,
)
"""Texts of the column `reason`, by code: why a message was requeued, and whether it waits; or how the run before has
ended."""

_ACK_MODES = ("auto", "client", "client-individual")
WITH_SELECTOR, WITH_EXPRESS, WITH_STARTED, PULLING = " with selector", " with express", " with started", " pulling"
EXCLUSIVE = " exclusive"
SUBSCRIPTION_MODES = tuple(
    ack_mode + selector + express + started + pulling + exclusive
    for exclusive, pulling, started, express, selector, ack_mode in product(
        ("", EXCLUSIVE), ("", PULLING), ("", WITH_STARTED), ("", WITH_EXPRESS), ("", WITH_SELECTOR), _ACK_MODES
    )
)
"""Texts of the column `mode`, by code: the `ack` mode of a subscription, and its other properties, such as having a
selector."""

NO_WINDOW = 0xFFFFFFFF
"""Value of `window` for a subscription that has none: in auto mode, and if it pulls."""

EVENT_MAX = (1 << 63) - 1
"""Largest number of an event."""

GAP_EVENTS = 1 << 20
"""Number of event numbers that are left out after an unclean stop, because lost events may have had these numbers, and
a reader may have seen such events."""


def chunk_position(history: bytes) -> tuple[int, int]:
    """Return the run and the first event of the last of the chunks that are one behind the other. Chunks are in the
    order of these two numbers."""
    *_, chunk = chunks_in(history)
    _, _, run, _, first_event = CHUNK.unpack_from(chunk)
    return run, first_event


def next_event(history: bytes) -> int:
    """Return the number that follows the last event of chunks that are one behind the other."""
    *_, chunk = chunks_in(history)
    number: int = CHUNK.unpack_from(chunk)[-1]
    at = CHUNK.size
    while at < len(chunk):
        kind, _, count, _, other, _ = BLOCK.unpack_from(chunk, at)
        number += count
        at += BLOCK.size + columns_size(kind, count, other)
    return number


def chunks_in(history: bytes) -> Iterator[bytes]:
    """Yield the chunks that are one behind the other in `history`, such as that of a row of a log."""
    at = 0
    while at < len(history):
        end = at + CHUNK.size + CHUNK.unpack_from(history, at)[1]
        yield history[at:end]
        at = end


def columns_size(kind: int, count: int, other: int) -> int:
    """Return the size in bytes of the columns of a block, or of its text. The arguments are the block's fields of these
    names."""
    return other if kind in (EventKind.NAME, EventKind.CAUSE) else count * event_bytes(kind)


def group_number(group: str) -> int:
    """Return the number that stands for a group in the history. It is a hash of the group's name, and never 0. Two
    names hardly ever have the same number."""
    return int.from_bytes(blake2b(group.encode(), digest_size=8).digest(), "big") >> 1 or 1


def event_bytes(kind: int) -> int:
    """Return the size in bytes of the columns of one event of this kind."""
    return _WIDTHS[kind]


_WIDTHS = [sum(struct.calcsize("<" + code) for _, code in COLUMNS[kind]) for kind in EventKind]
