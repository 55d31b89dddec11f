"""State of the messages and consumers of one queue, as an audit follows it, and its findings."""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import NamedTuple

import msgspec

NEVER = 1 << 62
"""`visible_event` of a message for which the history has no proof that it became durable."""
AUTO_WINDOW = 1
"""Window that the audit assumes in `auto` mode. A consumer that already holds a message may have no capacity for the
bytes of a second one."""
SELECTOR_WINDOW = -1
"""Window that the audit assumes for a consumer with a selector. The history does not have the selector, so dispatches
to this consumer prove nothing."""
UNLIMITED = 1 << 62
"""Number of messages that a consumer may hold, if no lower limit is known."""
NO_MESSAGE = -1
UNKNOWN_PRIORITY = -1
NO_CONSUMER = -1


class EventCode(IntEnum):
    """Kinds of events, and of rows that apply to every queue: starts, gaps, and the end of the history."""

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
    HANDLED = 20
    REPORTED = 21
    RUN_STARTED = 22
    GAP = 23
    FINISHED = 24
    """End of the history."""
    NOT_RECOVERED = 25
    """A start has not recovered all messages of the queue. `sections.py` adds these rows to those of the timeline."""


class TimelineRow(NamedTuple):
    """Row of a queue's timeline. `timeline` (timeline.py) says what the columns hold, for each kind of event."""

    event: int
    at: int
    code: int
    sequence: int = -1
    consumer: int = -1
    number: int = 0
    persistent: bool = False
    visible_event: int = NEVER
    visible_at: int = 0
    detail_code: int = 0


class ConsumerFlags(IntFlag):
    """Options of a consumer that matter to the audit: which messages it may get, and which returns count an attempt."""

    AUTO = 1
    EXPRESS = 2
    NAMES_STARTED = 4
    PULLS = 8
    EXCLUSIVE = 16


NO_FLAGS = ConsumerFlags(0)


class ReturnReason(IntEnum):
    """Reason why a message returned. The reason decides whether the return may count an attempt."""

    OTHER = 0
    RELEASED = 1
    """The client has released the message, which is no failure."""
    STARTED = 2
    """The connection was lost or the transaction aborted, which is a failure. If the client reports the messages that
    it starts, the broker may record this reason only for started messages."""


HAS_CAUSE = 4
"""Number added to the ReturnReason of a return with a cause. For a dead letter or handled message with a cause this
number is used without a ReturnReason."""


class StartFlag(IntEnum):
    """Flags that the audit gives to the start of a run. Each flag states a fact about the run before, this run, or the
    history."""

    CLEAN = 1
    """The run before stopped cleanly, so its transient messages still exist."""
    CONTINUED = 2
    """The history also has the events of the run before."""
    RECOVERED = 4
    """The run finished its recovery, so a queue without an event `recovered` had no messages."""
    COMPLETE = 8
    """The history has the arrivals of all messages in all queues."""


class MessageState(IntEnum):
    WAITING = 0
    HELD = 1
    DOUBTFUL = 2
    """The message may have ended in a gap of the history. After the next start a persistent message counts as certain
    again."""
    UNCERTAIN = 3
    """The message may not be durable, or was reported as lost. The message may still exist or not."""
    DELAYED = 4
    """The message has failed, and is not due yet."""
    ENDED = 5
    """The message is stored, but its durable subscription has ended, so it will expire."""


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
    """Position among the messages that this queue has accepted, from 1. 0 if the history does not have the arrival."""
    state: MessageState = MessageState.WAITING
    consumer: int = NO_CONSUMER
    receiver: AuditedConsumer | None = None
    """State of the consumer whose number is `consumer`; None if it is not known."""
    is_started: bool = False
    """True if the client has started the message after its last dispatch."""
    dispatched_at: int = 0
    wait: int | None = None
    """Microseconds from the time at which the message became visible to its first dispatch. Without a dispatch: to the
    end of the history."""
    hold: int | None = None
    """Microseconds from the last dispatch of the message to its acknowledgement."""
    end_reason: str = STILL_WAITING
    """How the message ended: one of END_REASONS, `waiting`, `held` or `unknown`."""
    delivery: int = 0
    """Position of the message's first dispatch among all first dispatches of this queue, from 1. 0 before the first
    dispatch."""
    deliveries: int = 0
    attempts: int = 0
    has_known_attempts: bool = True
    has_cause: bool = False
    """True if a consumer has given a cause for a failure of the message."""


class AuditedConsumer(msgspec.Struct, gc=False):
    """State of one consumer, as far as the history shows it."""

    window: int
    """Number of messages that the consumer may hold, if known. With SELECTOR_WINDOW the audit never takes the consumer
    for free."""
    flags: ConsumerFlags = NO_FLAGS
    since: int = 0
    """Event of the subscription."""
    requested: int = UNLIMITED
    """Number of messages that the consumer has requested, and that were not delivered yet."""
    limit: int = UNLIMITED
    """Number of unstarted messages at which the consumer must get no further message. Only unstarted messages are
    certainly in its window. A message acknowledged inside a transaction has left the window, and counts as started."""
    rank: tuple[int, int] | None = None
    """For an exclusive consumer: its negated consumer priority, and its number. The exclusive consumer with the lowest
    rank owns the queue."""
    held: int = 0
    unstarted: int = 0
    """Number of messages that the consumer holds and has not started."""
    is_free: bool = False
    """True if the consumer counts among the `free_consumers` of its queue."""
    has_ended: bool = False

    @property
    def counts_started(self) -> bool:
        """Whether the history shows which messages the consumer has started. All other messages that the consumer holds
        are then unstarted."""
        return bool(self.flags & ConsumerFlags.NAMES_STARTED) and not self.flags & ConsumerFlags.AUTO

    @property
    def has_exact_window(self) -> bool:
        """Whether the audit may check the window: the history shows each change of the window, and the consumer gets no
        messages by express dispatch or pull requests."""
        return (
            self.counts_started
            and self.window != SELECTOR_WINDOW
            and not self.flags & (ConsumerFlags.EXPRESS | ConsumerFlags.PULLS)
        )


class Finding(msgspec.Struct, gc=False):
    """Violation of the contract. It may name a witness, the overtaken message."""

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
    """Number of messages to which the finding applies."""
    duration: int = 0
    """Length of the idle time in microseconds. Used by `stuck`."""
    detail: str = ""


END_REASONS = {
    EventCode.ACKNOWLEDGED: "acknowledged",
    EventCode.EXPIRED: "expired",
    EventCode.DEAD_LETTERED: "dead-lettered",
    EventCode.HANDLED: "handled",
    EventCode.REPORTED: "dead-lettered",
    EventCode.MOVED: "moved",
    EventCode.REMOVED: "removed",
    EventCode.ENDED: "ended",
    EventCode.RUN_STARTED: "lost in a crash",
}
