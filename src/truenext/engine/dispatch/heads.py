"""Heads: the next message for a consumer in a lane, or the reason why the lane has none.

    Entry    a message that is ready
    Wait     the reason why the consumer must wait, and the sequence of the first message to which it may apply
    None     the lane has no message for the consumer

Finding a head changes nothing. Dispatch then reads or compares what a head needs (selective.py), and idle.py reports
the head to the client. Source: docs/contract.md, "True next"; docs/protocol.md, "Control requests"
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from truenext.engine.selecting.groups import GroupScanCursor
from truenext.engine.selecting.scan import ScanCursor
from truenext.engine.state.consumer import BrokerConsumer
from truenext.engine.state.queue import UNBOUNDED, Entry


class WaitReason(Enum):
    """Reason why a subscription gets no message. The first reason in this order that is true is reported. For a
    subscription to several queues, the reason of the queue with the next message is reported."""

    BROWSES = "browses"
    """The subscription is a browser."""
    SUSPENDED = "suspended"
    """The subscription was released with `suspend`, and not woken."""
    NO_CREDIT = "no credit"
    """The window is full, the subscription pulls and has requested no more, or its connection holds too many
    messages."""
    UNREAD = "unread"
    """Too many bytes of messages wait to be written to the connection's socket."""
    JOINING = "joining"
    """The subscription is to a pattern, and has not joined all queues yet."""
    PAUSED = "paused"
    """The queue is paused."""
    EXCLUSIVE = "exclusive"
    """Another consumer is exclusive, and gets all messages of the queue."""
    SCANNING = "scanning"
    """The selector is being compared with the messages."""
    READING = "reading"
    """A message that may be next is being read."""
    COMMITTING = "committing"
    """The next message is not durable yet."""
    GROUP = "group"
    """The messages that wait belong to groups of other consumers. Evicted messages count as matching the selector."""
    DELAYED = "delayed"
    """The next message is held back by a message that waits for its next try, or all messages wait for their next try.
    Evicted messages count as matching the selector."""
    EMPTY = "empty"
    """No message waits that matches the selector."""


SCANNING, READING = WaitReason.SCANNING, WaitReason.READING
COMMITTING, DELAYED = WaitReason.COMMITTING, WaitReason.DELAYED


class Wait(NamedTuple):
    reason: WaitReason
    """Reason why no message is ready: SCANNING, READING, COMMITTING or DELAYED."""
    sequence: int
    """Sequence of the first message to which the reason may apply; 0 if the sequence is not known."""

    @property
    def is_undecided(self) -> bool:
        """Whether a scan or a read is needed to know the next message."""
        return self.reason is SCANNING or self.reason is READING


Head = Entry | Wait | None


def entry_head(entry: Entry, committed: int) -> Entry | Wait:
    """Return the head of a lane in which this entry is first. Batches up to `committed` are durable."""
    if entry.batch > committed:
        return Wait(COMMITTING, entry.sequence)
    if entry.message is None:
        return Wait(READING, entry.sequence)
    return Wait(DELAYED, entry.sequence) if entry.due_us else entry


def cursor_head(cursor: ScanCursor, committed: int) -> Head:
    """Return the head of a cursor's lane, for all consumers with the cursor's selector."""
    entry = cursor.first()
    if entry is None:
        known_to = cursor.known_to
        return Wait(SCANNING, known_to + 1) if known_to < UNBOUNDED else None
    return entry_head(entry, committed)


def group_cursor_head(cursor: GroupScanCursor, consumer: BrokerConsumer | None, committed: int) -> Head:
    """Return the head of a cursor's lane for a consumer; `consumer` is None for all consumers that own no group. Sets
    `cursor.needs_refill` if messages that the scan has skipped must be scanned again to find the head."""
    entry, must_wait = cursor.first_for(consumer)
    if entry is None:
        return Wait(SCANNING, 0) if must_wait else None
    return entry_head(entry, committed)


def first_head(heads: Iterable[Head]) -> Head:
    """Return the head that comes first among several lanes. `heads` are in order of rank. A message that is being
    committed holds back only its own lane. Any other reason to wait holds back the later lanes, too.
    """
    first = None
    for head in heads:
        if head is None:
            continue
        if isinstance(head, Entry):
            return head
        first = first or head
        if head.reason is not COMMITTING:
            break
    return first
