"""Memory budget: counts the bytes of messages and queues against their limits.

    --memory-limit  =  memory of the broker itself  +  messages, up to `limit`  +  queues, up to `queues_limit`

Messages and queues have separate limits, because memory freed by many small objects is fragmented, and hardly usable
for other objects. A message's memory is freed when the message is evicted or gone, a queue's when the queue is removed
(queues/unused.py).
"""

from __future__ import annotations

from sys import getsizeof, maxsize
from typing import Any, NoReturn

from truenext.model.destination import Destination, DestinationKind
from truenext.model.limits import UNSENT_ANSWER_BYTES_MAX, UNSENT_BYTES_MAX
from truenext.model.message import SentMessage
from truenext.model.selector import Selector

ENTRY_BYTES = 400
"""Rough number of bytes of a message besides header and body: Python objects and their slots in lists."""

GROUP_BYTES = 150
"""Bytes of each group with an owner, without its name."""

JOIN_BYTES = 320
"""Bytes that a wildcard consumer takes for each queue that it has joined and in which messages wait."""

QUEUE_BYTES = 880 + JOIN_BYTES
"""Bytes of a queue with a name of usual length: the queue itself, its data in history and store, and JOIN_BYTES for its
first wildcard consumer, so that a consumer of all queues finds memory."""

NAME_BYTES = 64
"""Bytes of the name that QUEUE_BYTES includes."""

NAME_COPIES = 4
"""Bytes of memory for each byte of a name beyond NAME_BYTES: the name is in several objects, in the store's memory, and
in the history."""

_TOPIC_BYTES = 100
"""Bytes of a temporary topic of a JMS client, without its name."""

LANE_BYTES = 250
"""Bytes of a lane, without slots for messages."""

DEQUE_BYTES = 800
"""Bytes of a lane's empty deque, which is allocated when a first message arrives."""

SELECTED_ENTRIES_BYTES = 400
"""Additional bytes of a lane in a queue with selectors or groups."""

SELECTION_BYTES = 600
"""Additional bytes of a queue with selectors or groups."""

GROUPS_BYTES = 600
"""Further bytes of a queue with groups."""

SELECTOR_BYTES = 400
"""Bytes of each selector of a queue. In a queue with groups, consumers without a selector share one that matches
all."""

KEYED_BYTES = 350
"""Bytes of each property value by which a selector is indexed (selecting/keyed.py)."""

SELECTOR_LANE_BYTES = 500
"""Bytes of each lane in which a selector may match."""

GROUP_LANE_BYTES = 1800
"""Bytes of each lane in a queue with groups, instead of SELECTOR_LANE_BYTES."""

CONSUMER_BYTES = 700
"""Bytes of a subscription to a queue, without the subscription's name and without the queue."""

WILDCARD_BYTES = 3000
"""Additional bytes of a wildcard consumer, without its pattern and queues."""

PATTERN_BYTES = 8
"""Bytes of each character of a pattern, which is kept as a whole and split into words."""

CONSUMERS_RESERVE = 2 * 1024 * 1024
"""Bytes that consumers may take beyond the limit for queues, so that queues can be emptied when the limit is
reached."""

UNSENT_THRESHOLD_MIN = 4 * UNSENT_BYTES_MAX
"""Smallest `unsent_threshold`, however small the limit for messages is."""


class MemoryBudget:
    def __init__(self, limit: int = maxsize, queues_limit: int = maxsize) -> None:
        self.limit = limit
        """Bytes of messages above which messages are evicted. Bytes of open transactions, unsent messages, unread
        answers and incomplete frames count, too."""
        self.queues_limit = queues_limit
        """Bytes of queues above which no queue is created."""
        self.queue_bytes = 0
        """Bytes of queues and consumers, without messages."""
        self.selector_use_counts: dict[Selector, int] = {}
        """Number of users of each selector."""
        self.deque_bytes = 0
        """Bytes of the lanes' slots for messages; counted against `limit`."""
        self.message_bytes = 0
        """Bytes of messages in queues and windows."""
        self.pending_free_bytes = 0
        """Bytes of `message_bytes` that are freed as soon as a write in flight is durable."""
        self.unsent_bytes = 0
        """Bytes of messages that sockets have not taken."""
        self.unsent_threshold = max(limit // 4, UNSENT_THRESHOLD_MIN)
        """Unsent bytes of all connections above which each connection gets one message at a time."""
        self.unsent_bytes_max = UNSENT_BYTES_MAX
        """Unsent bytes of one connection from which on its consumers have no credit."""
        self.transaction_bytes = 0
        """Bytes of sends and causes in open transactions."""
        self.incomplete_bytes = 0
        """Bytes of large incomplete frames."""
        self.answer_bytes = 0
        """Bytes of answers that sockets have not taken."""
        self.is_page_space_short = False
        """Whether a lane needed a page that does not fit below `limit`."""

    @property
    def bytes_over_limit(self) -> int:
        """Number of bytes above `limit`, which must be evicted; negative below the limit."""
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
        """Whether one more queue with one lane fits into the memory for queues."""
        return self.queue_bytes + QUEUE_BYTES + LANE_BYTES <= self.queues_limit

    def has_space_for_consumer(self, size: int) -> bool:
        """Return whether memory has space for a consumer that takes `size` bytes in all."""
        return self.queue_bytes + size <= self.queues_limit + CONSUMERS_RESERVE

    def bytes_for_selector(self, selector: Selector | None) -> int:
        """Return the bytes that one more user of a selector takes: none if the selector is in use already."""
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
        """Bytes that sends in open transactions may take. A single send may take more, if no other is open."""
        return self.limit // 4

    @property
    def incomplete_bytes_max(self) -> int:
        """Bytes of incomplete frames above which the broker reads on only one of the frames."""
        return self.limit // 4

    @property
    def answer_bytes_max(self) -> int:
        """Bytes of all unread answers above which a connection with many unread answers is ended."""
        return max(self.limit // 4, UNSENT_ANSWER_BYTES_MAX)

    def has_space_for_send(self, size: int) -> bool:
        """Return whether an open transaction may grow by a send of `size` bytes."""
        return not self.transaction_bytes or self.transaction_bytes + size <= self.transaction_bytes_max


def size_of(message: SentMessage) -> int:
    """Return roughly the bytes of memory of a waiting message."""
    return len(message.body) + len(message.header) + ENTRY_BYTES


def queue_size(destination: Destination) -> int:
    """Return roughly the bytes of memory of a queue without lanes."""
    names = len(destination.name.encode()) + len(destination.topic.encode())
    return QUEUE_BYTES + NAME_COPIES * max(0, names - NAME_BYTES)


def temporary_topic_size(name: str) -> int:
    """Return roughly the bytes of memory of a temporary topic of a JMS client."""
    return _TOPIC_BYTES + getsizeof(name)


def consumer_size(subscription: str, destination: Destination) -> int:
    """Return roughly the bytes of memory of a subscription with this name."""
    size = CONSUMER_BYTES + getsizeof(subscription)
    if destination.kind is not DestinationKind.QUEUE_PATTERN:
        return size
    return size + WILDCARD_BYTES + PATTERN_BYTES * len(destination.name)


# ---- Shared empty containers, which cannot be changed ----
# There may be a hundred thousand queues and lanes, so each makes its own container only when it has an entry.


def _raise_shared(*_: object) -> NoReturn:
    raise TypeError("this empty container is shared by all lanes, and cannot be changed")


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
