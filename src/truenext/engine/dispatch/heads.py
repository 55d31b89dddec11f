"""Heads: what is next for a consumer in a lane, or why nothing comes from there.

    Entry    a message that is ready
    Wait     something that is not ready, or may not be for this consumer, and from which sequence on
    None     nothing

Finding a head changes nothing: dispatch does what a head needs (selective.py), and idle.py reports it to the client.
Source: docs/contract.md, "True next"; docs/protocol.md, "Control requests"
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
    """Reason for no messages. The first one that is true is reported, of several queues that of the next message."""

    BROWSES = "browses"
    """The subscription is a browser."""
    SUSPENDED = "suspended"
    """The subscription was released with `suspend`, and not woken."""
    NO_CREDIT = "no credit"
    """The window is full, the subscription pulls and has requested nothing more, or its connection holds too much."""
    UNREAD = "unread"
    """The connection has too much to read."""
    JOINING = "joining"
    """The subscription is to a pattern, and has not joined all queues yet."""
    PAUSED = "paused"
    """The queue is paused."""
    EXCLUSIVE = "exclusive"
    """The queue has an exclusive consumer, which is another one."""
    SCANNING = "scanning"
    """The selector is being compared with the messages."""
    READING = "reading"
    """The message that may be next is being read."""
    COMMITTING = "committing"
    """The next message is not durable yet."""
    GROUP = "group"
    """The messages that wait are of groups of other consumers. Those that have left memory count as wanted."""
    DELAYED = "delayed"
    """The next message is held back by one that waits for its retry, or only such messages are there. Those that have
    left memory count as wanted."""
    EMPTY = "empty"
    """The subscription has no message that waits and that its selector wants."""


SCANNING, READING = WaitReason.SCANNING, WaitReason.READING
COMMITTING, DELAYED = WaitReason.COMMITTING, WaitReason.DELAYED


class Wait(NamedTuple):
    reason: WaitReason
    """SCANNING, READING, COMMITTING or DELAYED."""
    sequence: int
    """Sequence of the first message that may wait for this reason; 0 if that is not known."""

    @property
    def is_undecided(self) -> bool:
        """Whether a scan or a read will show what is next."""
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
    """Return the head of the lane of a cursor, for all consumers with its selector."""
    entry = cursor.first()
    if entry is None:
        known_to = cursor.known_to
        return Wait(SCANNING, known_to + 1) if known_to < UNBOUNDED else None
    return entry_head(entry, committed)


def group_cursor_head(cursor: GroupScanCursor, consumer: BrokerConsumer | None, committed: int) -> Head:
    """Return the head of the lane of a cursor for a consumer, or for all that own no group. Sets `needs_refill`."""
    entry, must_wait = cursor.first_for(consumer)
    if entry is None:
        return Wait(SCANNING, 0) if must_wait else None
    return entry_head(entry, committed)


def first_head(heads: Iterable[Head]) -> Head:
    """Return what is next of several lanes, whose heads are in order of rank.

    A message that is being committed holds back only its equals; any other reason holds back lower lanes, too.
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
