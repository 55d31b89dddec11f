"""Cut of a queue: rows with the state of its audit between two events.

A history is cut into sections, before some of its events. `QueueAudit.save` makes the cut at the end of a section, and
`QueueAudit.begin` starts the audit of the next section from it. `sections.py` computes the same cuts without the audit.
The fields of `QueueRow`, `ConsumerRow` and `MessageRow` are the schema of the rows.

Derived state has no rows: lanes, numbers of waiting and held messages, credit, the owner of a queue. An idle time that
lasts over a cut is joined afterwards: whether one lasts follows from the rows, but not since when.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

import msgspec

from truenext.spark.audit.model import NEVER, NO_CONSUMER, Finding, MessageState


class QueueRow(msgspec.Struct):
    """State of a queue at a cut, except that of its consumers and messages. `QueueAudit` describes the fields."""

    arrivals: int = 0
    first_dispatches: int = 0
    ticks: int = 0
    """Number of the queue's events before the cut."""
    knows_consumers: bool = False
    knows_exclusive: bool = False
    is_paused: bool = False
    expected: tuple[int, int] | None = None
    """After a start that the queue has not recovered from, the numbers of messages that are certainly there, and that
    may be there. Else None."""
    start_flags: int = 0
    """Flags of that start; 0 if `expected` is None."""
    start_event: int = 0

    def refresh_start(self, fresh: QueueRow) -> None:
        """Take the flags of the start from `fresh`, the state of a queue without rows in the cut: meanwhile the run may
        have finished its recovery."""
        if self.expected is not None and self.start_event == fresh.start_event:
            self.start_flags = fresh.start_flags


class ConsumerRow(msgspec.Struct):
    """State of a consumer at a cut. A consumer that has ended has a row while messages are held that it got."""

    number: int
    since: int
    """Event of the subscription: the key of the row."""
    window: int
    flags: int
    """ConsumerFlags."""
    priority: int
    """Consumer priority of an exclusive consumer, else 0."""
    requested: int
    limit: int
    has_ended: bool = False


class MessageRow(msgspec.Struct):
    """State of a message at a cut, if the queue or an ended subscription of its name has the message.
    `AuditedMessage` describes the first fields."""

    sequence: int
    priority: int
    is_persistent: bool
    visible_event: int
    visible_at: int
    group: int = 0
    arrival: int = 0
    state: MessageState = MessageState.WAITING
    consumer: int = NO_CONSUMER
    wait: int | None = None
    delivery: int = 0
    deliveries: int = 0
    attempts: int = 0
    has_known_attempts: bool = True
    has_cause: bool = False
    subscription: int = 0
    """Event of the subscription that holds a held message; 0 if no subscription does, or the event is not known."""
    dispatched_at: int = 0
    """Time of the dispatch of a held message; 0 if the message is not held."""
    is_started: bool = False
    """True if the message is held, and its processing has begun."""
    is_blocking: bool = False
    """True if all messages after this delayed one wait for it, not only those of its group."""
    is_expiring: bool = False
    """True if the durable subscription of the message has ended."""

    def can_be_untouched(self, cut: int) -> bool:
        """Return whether the message can be untouched (untouched.py) from a cut on: it is visible, no consumer holds
        it, and it delays no other message."""
        if self.visible_event >= cut or self.state is MessageState.HELD:
            return False
        return self.state is not MessageState.DELAYED or not (self.is_blocking or self.group)


COMMON_FIELDS = MessageRow.__struct_fields__[:15]
"""Fields that MessageRow and AuditedMessage have both, with the same values."""


class IdleTime(msgspec.Struct):
    """Time in which a consumer of the queue was free, a message ready, and none was dispatched."""

    event: int
    at: int
    """Start of the time in microseconds. NEVER once a finding has told that the time is too long."""
    sequence: int
    """Sequence of the true next message when the time began."""
    priority: int
    is_persistent: bool

    def finding(self, until: int, waiting: int) -> Finding:
        """Return the finding that this time was too long, after its end with a number of waiting messages."""
        finding = Finding("stuck", self.event, self.at, self.sequence, self.priority, self.is_persistent)
        finding.count, finding.duration = waiting, until - self.at
        return finding


class QueueCut(msgspec.Struct):
    """Rows of one queue before an event."""

    event: int
    """First event of the section that begins here."""
    queue: QueueRow
    consumers: list[ConsumerRow]
    messages: list[MessageRow]
    idle: IdleTime | None = None
    """Idle time that lasts at the cut. None without one, or if its start is in an earlier section and not known."""
    untouched: int = 0
    """Number of messages that wait through the whole section and have no row. An earlier one of the same priority and
    group has one."""


# ---- Rows of a cut in the timeline ----


class CutCode(IntEnum):
    """Kinds of rows of a cut, in place of the codes of events. All but HOLDER, GAP_DISPATCH and UNTOUCHED have a
    `payload`."""

    SECTION = 0
    """The payload is a SectionRow."""
    CONSUMER = 1
    """The payload is a ConsumerRow."""
    MESSAGE = 2
    """The payload is a MessageRow. Its `subscription` is the event of its last dispatch, and its negative `arrival` and
    `delivery` are the events of acceptance and first dispatch, negated: the positions are in earlier sections. Of a
    message in a saved cut they are what the saved cut has, the positions negated: they are lower than all events after
    it."""
    HOLDER = 3
    """The message `sequence` is held by the subscription whose event is `number`."""
    GAP_DISPATCH = 4
    """A consumer that is not exclusive has got a message since the last gap: no unknown consumer is exclusive."""
    SAVED = 5
    """The payload is a MessageRow from `QueueAudit.save`."""
    UNTOUCHED = 6
    """`number` waiting messages are untouched in the section (`QueueCut.untouched`)."""
    LEFT = 7
    """No row of a cut: the payload is the MessageRow, at the end of the history, of a message without a row in the last
    section."""


class SectionRow(msgspec.Struct):
    """Section of a queue, and the state of the queue at its beginning."""

    first: int
    queue: QueueRow
    """State of the queue. `first_dispatches` is 0, as each section counts them anew."""
    end: int
    """First event of the next section, or NEVER."""
    total: int
    """Number of the queue's events in the whole history. 0 if the history goes on."""
    idle: IdleTime | None = None
    """See QueueCut."""


WHOLE = SectionRow(0, QueueRow(), NEVER, 0)
"""Beginning of a queue whose whole history is audited."""


# ---- Idle times that last over cuts ----


class IdleEdges(NamedTuple):
    """Idle times at both edges of a section."""

    carried_end: tuple[int, int] | None
    """End of the idle time that lasted at the beginning of the section: microseconds, and the number of waiting
    messages. None if there was no such time, if it lasts at the end of the section, or if a gap hides its end."""
    is_carried: bool
    """True if that idle time lasts at the end of the section."""
    begun: IdleTime | None
    """Idle time that began in the section, or in the saved cut before it, and lasts at its end."""


def join_idle_times(sections: Iterable[IdleEdges], stuck_limit: int) -> tuple[list[Finding], IdleTime | None]:
    """Return the findings about idle times of a queue that began in one of its `sections`, given in order, and ended in
    a later one after more than `stuck_limit` microseconds; and the idle time that lasts after the last section."""
    findings = []
    idle: IdleTime | None = None
    for edges in sections:
        if edges.carried_end is not None and idle is not None:
            until, waiting = edges.carried_end
            if until - idle.at > stuck_limit:
                findings.append(idle.finding(until, waiting))
        if not edges.is_carried:
            idle = edges.begun
    return findings, idle


# ---- Depths ----

DEPTHS_MAX = 1000
"""Largest number of depths that are kept for a queue."""


def depth_mask(ticks: int) -> int:
    """Return the mask of a queue with `ticks` events: its depths are those after each event whose number has no bit of
    the mask. So they are at regular distances, and at most DEPTHS_MAX."""
    mask = 0
    while ticks // (mask + 1) > DEPTHS_MAX:
        mask = mask * 2 + 1
    return mask
