"""What is known of the messages of one queue, and what is found?"""

from __future__ import annotations

from enum import IntEnum, IntFlag

import msgspec

NEVER = 1 << 62
"""The `visible_event` of a message that the history never shows to be durable."""
AUTO_WINDOW = 1
"""In `auto` mode a consumer that holds something may have no room for more bytes; one that holds nothing has."""
SELECTOR_WINDOW = -1
"""In place of the window of a consumer with a selector: what it wants the history does not say, so that nothing that it
got, or did not get, is evidence."""
UNLIMITED = 1 << 62
"""Messages, where it is not known that a consumer may have fewer."""
NO_MESSAGE = -1
UNKNOWN_PRIORITY = -1
NO_CONSUMER = -1


class EventCode(IntEnum):
    """Kinds of event, and the marks that concern every queue."""

    ACCEPTED = 0
    DISPATCHED = 1
    ACKNOWLEDGED = 2
    RETURNED = 3
    EXPIRED = 4
    DEAD_LETTERED = 5
    SUBSCRIBED = 6
    UNSUBSCRIBED = 7
    RECOVERED = 8
    DRAINED = 9
    MOVED = 10
    REMOVED = 11
    PAUSED = 12
    RESUMED = 13
    DELAYED = 14
    BLOCKING = 15
    ENDED = 16
    WINDOW = 17
    REQUESTED = 18
    STARTED = 19
    RUN_STARTED = 20
    GAP = 21
    FINISHED = 22
    """The history ends."""


class ConsumerFlags(IntFlag):
    """What decides what a consumer may have, and which attempts count against it."""

    AUTO = 1
    EXPRESS = 2
    NAMES_STARTED = 4
    PULLS = 8
    EXCLUSIVE = 16


NO_FLAGS = ConsumerFlags(0)


class ReturnReason(IntEnum):
    """What the return of a message says of its consumer."""

    OTHER = 0
    RELEASED = 1
    """It has not failed."""
    STARTED = 2
    """It has failed, which is said only of what its client had started, if that says what it starts: its connection was
    lost, or a transaction aborted."""


HAS_CAUSE = 4
"""Added to the ReturnReason of a return, and said of a dead letter: it has a cause."""


class StartFlag(IntEnum):
    """Flags of a RUN_STARTED."""

    CLEAN = 1
    """The run before stopped by itself: transients are still there."""
    CONTINUED = 2
    """The run before is in the history."""
    RECOVERED = 4
    """The run got past its recovery: a queue without a `recovered` had no messages."""
    COMPLETE = 8
    """Nothing is in any queue that the history has not seen arrive."""


class MessageState(IntEnum):
    WAITING = 0
    HELD = 1
    MAYBE_GONE = 2
    """A gap may hide what became of it; a start makes sure of a persistent one."""
    UNCERTAIN = 3
    """Never durable as far as is known, or lost already: it may turn up again, and may not."""
    DELAYED = 4
    """It failed, and is not due yet."""
    ENDED = 5
    """It is there, but the durable subscription that had it is not: it is about to expire."""


STILL_WAITING = "waiting"


class AuditedMessage(msgspec.Struct, gc=False):
    """What is known of a message that is not gone."""

    sequence: int
    priority: int
    is_persistent: bool
    visible_event: int
    visible_at: int
    arrival: int
    """Its place among the messages that this queue accepted, from 1; 0 if that was not seen."""
    state: MessageState = MessageState.WAITING
    consumer: int = NO_CONSUMER
    receiver: AuditedConsumer | None = None
    """That consumer, if it is known."""
    is_started: bool = False
    """Its client has said so of the last dispatch."""
    dispatched_at: int = 0
    wait: int | None = None
    """Microseconds from visible to the first dispatch, or to the end of the history."""
    hold: int | None = None
    """Microseconds from the last dispatch to acknowledged."""
    end_reason: str = STILL_WAITING
    """How it ended."""
    delivery: int = 0
    """Its place among the first dispatches of this queue, from 1."""
    deliveries: int = 0
    attempts: int = 0
    has_known_attempts: bool = True
    has_cause: bool = False
    """A consumer has said why it failed."""
    group: int = 0


class AuditedConsumer(msgspec.Struct, gc=False):
    """What is known of one that has not ended."""

    window: int
    """Messages that it may hold, as far as is known; with SELECTOR_WINDOW it may hold none."""
    flags: ConsumerFlags = NO_FLAGS
    requested: int = UNLIMITED
    """Messages that it has requested and not got."""
    limit: int = UNLIMITED
    """It gets nothing while it holds so many that are not started. These are in its window surely: what is acknowledged
    inside a transaction, and is in no window any more, counts as started."""
    rank: tuple[int, int] | None = None
    """Consumer priority, negative, and number of one that is exclusive: the lowest has the queue."""
    held: int = 0
    unstarted: int = 0
    """Those held that are not started."""
    is_free: bool = False
    """It is counted as one that could take a message."""
    has_ended: bool = False

    @property
    def counts_started(self) -> bool:
        """What it has started is in the history, so that all else was not started."""
        return bool(self.flags & ConsumerFlags.NAMES_STARTED) and not self.flags & ConsumerFlags.AUTO

    @property
    def has_exact_window(self) -> bool:
        """Surely: every change of it is told, and nothing comes beyond it."""
        return (
            self.counts_started
            and self.window != SELECTOR_WINDOW
            and not self.flags & (ConsumerFlags.EXPRESS | ConsumerFlags.PULLS)
        )


class Finding(msgspec.Struct, gc=False):
    """What the contract does not allow, with a witness."""

    kind: str
    """`inversion`, `order`, `premature`, `duplicate`, `lost`, `resurrected`, `stuck`, `uncredited`, `miscount`,
    `stale`, `lost-failure`"""
    event: int
    at: int
    sequence: int
    """The message dispatched, or lost, or left to wait."""
    priority: int = UNKNOWN_PRIORITY
    persistent: bool | None = None
    consumer: int = NO_CONSUMER
    overtaken_sequence: int = NO_MESSAGE
    overtaken_priority: int = UNKNOWN_PRIORITY
    count: int = 1
    """Messages that this finding speaks of."""
    duration: int = 0
    """Microseconds, of `stuck`."""
    detail: str = ""


class RemovedMessages:
    """Which messages are gone, a byte each: sequences of all queues are close together."""

    __slots__ = ("pages",)

    def __init__(self) -> None:
        self.pages: dict[int, bytearray] = {}

    def add(self, sequence: int, code: int) -> None:
        page = self.pages.get(sequence >> 16)
        if page is None:
            page = self.pages[sequence >> 16] = bytearray(1 << 16)
        page[sequence & 0xFFFF] = code

    def get(self, sequence: int) -> int:
        """Code of the event that ended it; 0 if it is not known to be gone."""
        page = self.pages.get(sequence >> 16)
        return 0 if page is None else page[sequence & 0xFFFF]


END_REASONS = {
    EventCode.ACKNOWLEDGED: "acknowledged",
    EventCode.EXPIRED: "expired",
    EventCode.DEAD_LETTERED: "dead-lettered",
    EventCode.MOVED: "moved",
    EventCode.REMOVED: "removed",
    EventCode.ENDED: "ended",
    EventCode.RUN_STARTED: "gone with a crash",
}
