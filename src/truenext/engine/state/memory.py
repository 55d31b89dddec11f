"""Memory budget: counts the bytes of messages and queues against their limits.

    --memory-limit  =  memory of the broker itself  +  messages, up to `limit`  +  queues, up to `queues_limit`

The limits are separate, because memory that many small objects have used and freed is fragmented, and of little use
to others. The memory of a message is freed when it leaves memory, that of a queue when the queue is removed
(unused.py).
"""

from __future__ import annotations

from sys import getsizeof, maxsize
from typing import Any, NoReturn

from truenext.model.destination import Destination, DestinationKind
from truenext.model.limits import UNSENT_ANSWER_BYTES_MAX, UNSENT_BYTES_MAX
from truenext.model.message import SentMessage
from truenext.model.selector import Selector

ENTRY_BYTES = 400
"""Bytes of a message besides header and body, roughly: Python objects and their slots in lists."""

GROUP_BYTES = 150
"""Bytes of each group with an owner, without its name."""

JOIN_BYTES = 300
"""Bytes of a queue in a wildcard consumer that has joined it, while messages wait there."""

QUEUE_BYTES = 750 + JOIN_BYTES
"""Bytes of a queue, with a name of usual length, its data in history and store, and its first wildcard consumer: a
consumer that is to empty all queues must find memory."""

NAME_BYTES = 64
"""Bytes of the name that QUEUE_BYTES includes."""

NAME_COPIES = 4
"""Bytes that each further byte of the name takes: as text, in the store's memory, and in the history while a file
begins."""

LANE_BYTES = 250
"""Bytes of a lane, without slots for messages."""

DEQUE_BYTES = 800
"""Bytes of a lane's slots for its first messages."""

SELECTED_ENTRIES_BYTES = 400
"""Additional bytes of a lane in a queue with selectors or groups."""

SELECTION_BYTES = 600
"""Additional bytes of a queue with selectors or groups."""

GROUPS_BYTES = 600
"""Further bytes of a queue with groups."""

SELECTOR_BYTES = 400
"""Bytes of each selector of a queue; where there are groups, consumers without a selector share one that matches
all."""

KEYED_BYTES = 350
"""Bytes of each text that a selector compares with and that is looked up (keyed.py)."""

SELECTOR_LANE_BYTES = 500
"""Bytes of each lane in which a selector may match."""

GROUP_LANE_BYTES = 1800
"""Bytes of each lane, in place of SELECTOR_LANE_BYTES, where there are groups."""

CONSUMER_BYTES = 700
"""Bytes of a subscription to a queue, without its name and that queue."""

WILDCARD_BYTES = 3000
"""Additional bytes of a wildcard consumer, without its pattern and queues."""

PATTERN_BYTES = 8
"""Bytes of each character of a pattern, as a whole and in words."""

CONSUMERS_RESERVE = 2 * 1024 * 1024
"""Bytes that consumers may take beyond the queues' limit: full queues need consumers that empty them."""

UNSENT_THRESHOLD_MIN = 4 * UNSENT_BYTES_MAX
"""Bytes that all sockets together may have unsent, however small the limit."""


class MemoryBudget:
    def __init__(self, limit: int = maxsize, queues_limit: int = maxsize) -> None:
        self.limit = limit
        """Bytes of messages above which some are evicted; those of open transactions, sockets, unread answers and
        incomplete frames count too."""
        self.queues_limit = queues_limit
        """Bytes of queues, counted separately, above which no more queues are created."""
        self.queue_bytes = 0
        """Bytes of queues, without their messages, and of their consumers."""
        self.selector_use_counts: dict[Selector, int] = {}
        """Number of users of each selector."""
        self.deque_bytes = 0
        """Bytes of slots for messages in lanes; they count as messages do."""
        self.message_bytes = 0
        """Bytes of messages in queues and windows."""
        self.pending_free_bytes = 0
        """Bytes of `message_bytes` that are freed as soon as a write in flight is durable."""
        self.unsent_bytes = 0
        """Bytes of messages that sockets have not taken."""
        self.unsent_threshold = max(limit // 4, UNSENT_THRESHOLD_MIN)
        """Unsent bytes above which each connection gets one message at a time."""
        self.unsent_bytes_max = UNSENT_BYTES_MAX
        """Unsent bytes of one connection at which its consumers have no credit."""
        self.transaction_bytes = 0
        """Bytes of sends and causes in open transactions."""
        self.incomplete_bytes = 0
        """Bytes of large incomplete frames."""
        self.answer_bytes = 0
        """Bytes of answers that sockets have not taken."""
        self.is_page_space_short = False
        """A page was requested for which there is hardly memory."""

    @property
    def bytes_over_limit(self) -> int:
        """Bytes that have to be evicted; negative below the limit."""
        return (
            self.message_bytes
            + self.deque_bytes
            - self.pending_free_bytes
            + self.unsent_bytes
            + self.transaction_bytes
            + self.incomplete_bytes
            + self.answer_bytes
            - self.limit
        )

    @property
    def has_space_for_queue(self) -> bool:
        """One more queue of the plain kind fits into memory."""
        return self.queue_bytes + QUEUE_BYTES + LANE_BYTES <= self.queues_limit

    def has_space_for_consumer(self, size: int) -> bool:
        """Return whether a consumer may be added that takes `size` bytes, with all that is kept for it."""
        return self.queue_bytes + size <= self.queues_limit + CONSUMERS_RESERVE

    def bytes_for_selector(self, selector: Selector | None) -> int:
        """Bytes that one more user of a selector takes."""
        return 0 if selector is None or selector in self.selector_use_counts else selector.size

    def add_selector(self, selector: Selector | None) -> None:
        """Count one more user of a selector, until `remove_selector`."""
        if selector is not None:
            self.queue_bytes += self.bytes_for_selector(selector)
            self.selector_use_counts[selector] = self.selector_use_counts.get(selector, 0) + 1

    def remove_selector(self, selector: Selector | None) -> None:
        if selector is not None:
            self.selector_use_counts[selector] -= 1
            if not self.selector_use_counts[selector]:
                del self.selector_use_counts[selector]
                self.queue_bytes -= selector.size

    @property
    def transaction_bytes_max(self) -> int:
        """Bytes that sends in open transactions may take; a single send may take more."""
        return self.limit // 4

    @property
    def incomplete_bytes_max(self) -> int:
        """Bytes of incomplete frames above which only one of them is read on."""
        return self.limit // 4

    @property
    def answer_bytes_max(self) -> int:
        """Bytes of unread answers above which a connection with many of them ends."""
        return max(self.limit // 4, UNSENT_ANSWER_BYTES_MAX)

    def has_space_for_send(self, size: int) -> bool:
        """Return whether an open transaction may grow by a send of `size` bytes."""
        return not self.transaction_bytes or self.transaction_bytes + size <= self.transaction_bytes_max


def size_of(message: SentMessage) -> int:
    """Bytes of memory of a waiting message, roughly."""
    return len(message.body) + len(message.header) + ENTRY_BYTES


def queue_size(destination: Destination) -> int:
    """Bytes of memory of a queue without lanes, roughly."""
    names = len(destination.name.encode()) + len(destination.topic.encode())
    return QUEUE_BYTES + NAME_COPIES * max(0, names - NAME_BYTES)


def consumer_size(subscription: str, destination: Destination) -> int:
    """Bytes of memory of a subscription of this name, roughly."""
    size = CONSUMER_BYTES + getsizeof(subscription)
    if destination.kind is not DestinationKind.QUEUE_PATTERN:
        return size
    return size + WILDCARD_BYTES + PATTERN_BYTES * len(destination.name)


# ---- Shared empty containers, which cannot be changed ----
# There may be a hundred thousand queues and lanes, so each makes its own container only when it has an entry.


def _raise_shared(*_: object) -> NoReturn:
    raise TypeError("it is shared")


class _EmptyDict(dict[int, Any]):
    __setitem__ = __ior__ = update = setdefault = _raise_shared


class _EmptySet(set[int]):
    add = update = __ior__ = _raise_shared


EMPTY: dict[int, Any] = _EmptyDict()
NO_SEQUENCES: set[int] = _EmptySet()


def add_sequence(sequences: set[int], sequence: int) -> set[int]:
    """Add a sequence to a set; return the set, or a new one instead of the shared empty one."""
    if sequences is NO_SEQUENCES:
        return {sequence}
    sequences.add(sequence)
    return sequences
