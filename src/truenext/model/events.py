"""History files of the broker, byte by byte. docs/history.md describes the events.

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
    NAME = 0
    RUN_STARTED = 1
    RECOVERED = 2
    ACCEPTED = 3
    COMMITTED = 4
    SUBSCRIBED = 5
    UNSUBSCRIBED = 6
    DISPATCHED = 7
    ACKNOWLEDGED = 8
    RETURNED = 9
    EXPIRED = 10
    DEAD_LETTERED = 11
    MOVED = 12
    REMOVED = 13
    PAUSED = 14
    RESUMED = 15
    ACCEPTED_OF_GROUP = 16
    ENDED = 17
    WINDOW = 18
    REQUESTED = 19
    STARTED = 20
    SUBSCRIBED_EXCLUSIVE = 21
    CAUSE = 22

    @property
    def label(self) -> str:
        """Name of the kind in docs/history.md."""
        same = {EventKind.ACCEPTED_OF_GROUP: EventKind.ACCEPTED, EventKind.SUBSCRIBED_EXCLUSIVE: EventKind.SUBSCRIBED}
        return same.get(self, self).name.lower().replace("_", "-")


COLUMNS: dict[EventKind, tuple[tuple[str, str], ...]] = {
    EventKind.NAME: (),
    EventKind.RUN_STARTED: (),
    EventKind.RECOVERED: (),
    EventKind.ACCEPTED: (("sequence", "Q"), ("size", "I"), ("flags", "B")),
    EventKind.COMMITTED: (),
    EventKind.SUBSCRIBED: (("window", "I"),),
    EventKind.UNSUBSCRIBED: (),
    EventKind.DISPATCHED: (("sequence", "Q"), ("consumer", "I"), ("deliveries", "I")),
    EventKind.ACKNOWLEDGED: (("sequence", "Q"),),
    EventKind.RETURNED: (("sequence", "Q"), ("attempts", "I")),
    EventKind.EXPIRED: (("sequence", "Q"),),
    EventKind.DEAD_LETTERED: (("sequence", "Q"), ("target_queue", "I"), ("target_sequence", "Q")),
    EventKind.MOVED: (("sequence", "Q"), ("target_queue", "I"), ("target_sequence", "Q")),
    EventKind.REMOVED: (("sequence", "Q"),),
    EventKind.PAUSED: (),
    EventKind.RESUMED: (),
    EventKind.ACCEPTED_OF_GROUP: (("sequence", "Q"), ("size", "I"), ("flags", "B"), ("group", "Q")),
    EventKind.ENDED: (),
    EventKind.WINDOW: (("window", "I"),),
    EventKind.REQUESTED: (("count", "I"),),
    EventKind.STARTED: (("sequence", "Q"), ("consumer", "I")),
    EventKind.SUBSCRIBED_EXCLUSIVE: (("window", "I"), ("priority", "b")),
    EventKind.CAUSE: (),
}
"""Columns of the events of each kind: name, and type as in `array` and `struct`."""

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
