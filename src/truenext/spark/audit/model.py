"""State of the messages and consumers of one queue, and findings about them."""

from __future__ import annotations

from enum import IntEnum, IntFlag

import msgspec

NEVER = 1 << 62
"""`visible_event` of a message that the history never shows to be durable."""
AUTO_WINDOW = 1
"""Window assumed in `auto` mode: a consumer may lack capacity for more bytes once it holds a message, not before."""
SELECTOR_WINDOW = -1
"""Window assumed for a consumer with a selector. The history lacks the selector, so dispatches to this consumer prove
nothing.
"""
UNLIMITED = 1 << 62
"""Number of messages that a consumer may have if no lower limit is known."""
NO_MESSAGE = -1
UNKNOWN_PRIORITY = -1
NO_CONSUMER = -1


class EventCode(IntEnum):
    """Kinds of event, and marks that apply to every queue."""

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
    """End of the history."""


class ConsumerFlags(IntFlag):
    """Options of a consumer that decide which messages it may have, and which returns count an attempt."""

    AUTO = 1
    EXPRESS = 2
    NAMES_STARTED = 4
    PULLS = 8
    EXCLUSIVE = 16


NO_FLAGS = ConsumerFlags(0)


class ReturnReason(IntEnum):
    """Reason of a return, as far as it decides whether an attempt counts."""

    OTHER = 0
    RELEASED = 1
    """Released by the client: no failure."""
    STARTED = 2
    """Connection lost or transaction aborted: a failure. If the client names the messages that it starts, the broker
    may record this only for those."""


HAS_CAUSE = 4
"""Added to the ReturnReason of a return that has a cause; alone for a dead letter that has one."""


class StartFlag(IntEnum):
    """Flags that the audit gives to a RUN_STARTED: facts about the run before, this run, and the history."""

    CLEAN = 1
    """The previous run stopped cleanly: transient messages are still there."""
    CONTINUED = 2
    """The previous run is in the history."""
    RECOVERED = 4
    """The run finished its recovery: a queue without a `recovered` had no messages."""
    COMPLETE = 8
    """The history has the arrival of every message in every queue."""


class MessageState(IntEnum):
    WAITING = 0
    HELD = 1
    MAYBE_GONE = 2
    """A gap may hide the end of the message; the next start makes a persistent message certain."""
    UNCERTAIN = 3
    """Possibly not durable, or reported as lost: the message may come again or not."""
    DELAYED = 4
    """Failed, and not due yet."""
    ENDED = 5
    """Stored, but its durable subscription has ended: about to expire."""


STILL_WAITING = "waiting"


class AuditedMessage(msgspec.Struct, gc=False):
    """State of one message, as far as the history shows it."""

    sequence: int
    priority: int
    is_persistent: bool
    visible_event: int
    visible_at: int
    group: int = 0
    arrival: int = 0
    """Position among the messages that this queue accepted, from 1; 0 if the history lacks the arrival."""
    state: MessageState = MessageState.WAITING
    consumer: int = NO_CONSUMER
    receiver: AuditedConsumer | None = None
    """State of `consumer`, if it is known."""
    is_started: bool = False
    """The client has started the last dispatch."""
    dispatched_at: int = 0
    wait: int | None = None
    """Microseconds from visible to the first dispatch, or to the end of the history."""
    hold: int | None = None
    """Microseconds from the last dispatch to the acknowledgement."""
    end_reason: str = STILL_WAITING
    """A value of END_REASONS, or `waiting`, `held` or `unknown`."""
    delivery: int = 0
    """Position among the first dispatches of this queue, from 1; 0 before the message's first dispatch."""
    deliveries: int = 0
    attempts: int = 0
    has_known_attempts: bool = True
    has_cause: bool = False
    """A consumer has named the cause of a failure."""


class AuditedConsumer(msgspec.Struct, gc=False):
    """State of one consumer, as far as the history shows it."""

    window: int
    """Number of messages that the consumer may hold, as far as is known; SELECTOR_WINDOW counts as none."""
    flags: ConsumerFlags = NO_FLAGS
    requested: int = UNLIMITED
    """Number of messages requested and not delivered yet."""
    limit: int = UNLIMITED
    """Number of unstarted messages from which on the consumer gets no more. Only these are certainly in its window:
    a message acknowledged inside a transaction is in no window any more, and counts as started."""
    rank: tuple[int, int] | None = None
    """Negated consumer priority and consumer number of an exclusive consumer: the lowest rank has the queue."""
    held: int = 0
    unstarted: int = 0
    """Number of held messages that are not started."""
    is_free: bool = False
    """The consumer is counted in `free_consumers` of its queue."""
    has_ended: bool = False

    @property
    def counts_started(self) -> bool:
        """The history has every message that the consumer has started, so that all others are unstarted."""
        return bool(self.flags & ConsumerFlags.NAMES_STARTED) and not self.flags & ConsumerFlags.AUTO

    @property
    def has_exact_window(self) -> bool:
        """The history has every change of the window, and no dispatch may exceed it."""
        return (
            self.counts_started
            and self.window != SELECTOR_WINDOW
            and not self.flags & (ConsumerFlags.EXPRESS | ConsumerFlags.PULLS)
        )


class Finding(msgspec.Struct, gc=False):
    """Violation of the contract, with a witness."""

    kind: str
    """Kind of violation: `inversion`, `order`, `premature`, `duplicate`, `lost`, `resurrected`, `stuck`, `uncredited`,
    `miscount`, `stale` or `lost-failure`."""
    event: int
    at: int
    sequence: int
    """Sequence of the message that was dispatched, lost, or left waiting."""
    priority: int = UNKNOWN_PRIORITY
    persistent: bool | None = None
    consumer: int = NO_CONSUMER
    overtaken_sequence: int = NO_MESSAGE
    overtaken_priority: int = UNKNOWN_PRIORITY
    count: int = 1
    """Number of messages that this finding is about."""
    duration: int = 0
    """Length of the idle time in microseconds, for `stuck`."""
    detail: str = ""


class RemovedMessages:
    """End codes of removed messages, one byte each: the sequences of all queues are close together."""

    __slots__ = ("pages",)

    def __init__(self) -> None:
        self.pages: dict[int, bytearray] = {}

    def add(self, sequence: int, code: int) -> None:
        page = self.pages.get(sequence >> 16)
        if page is None:
            page = self.pages[sequence >> 16] = bytearray(1 << 16)
        page[sequence & 0xFFFF] = code

    def get(self, sequence: int) -> int:
        """Return the code of the event that ended a message; 0 if the message is not known to be gone."""
        page = self.pages.get(sequence >> 16)
        return 0 if page is None else page[sequence & 0xFFFF]


END_REASONS = {
    EventCode.ACKNOWLEDGED: "acknowledged",
    EventCode.EXPIRED: "expired",
    EventCode.DEAD_LETTERED: "dead-lettered",
    EventCode.MOVED: "moved",
    EventCode.REMOVED: "removed",
    EventCode.ENDED: "ended",
    EventCode.RUN_STARTED: "lost in a crash",
}
