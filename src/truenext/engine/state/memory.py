"""Counts the memory that messages and queues take, against its limits.

    --memory-limit  =  what the broker takes by itself  +  messages, up to `limit`  +  queues, up to `queues_limit`

The two are limited apart, for memory that many small things have taken and given back is fragmented, and of little use
to others. What a message takes is given back when it leaves memory. What a queue takes is given back when it
goes (unused.py).
"""

from __future__ import annotations

from sys import getsizeof, maxsize
from typing import Any, NoReturn

from truenext.model.destination import Destination, DestinationKind
from truenext.model.limits import UNSENT_BYTES_MAX
from truenext.model.message import SentMessage
from truenext.model.selector import Selector

ENTRY_BYTES = 400
"""What a message costs beside its header and body, roughly: objects of this language, and their places in lists."""

GROUP_BYTES = 150
"""Of each group of which is known whose it is, without its name."""

JOIN_BYTES = 300
"""A queue of a wildcard's: what that knows of it while something waits there."""

QUEUE_BYTES = 750 + JOIN_BYTES
"""The same of a queue: itself, a name of usual length, where that is known, with the history and the store, and its
first wildcard: whoever comes to empty all queues must find room."""

NAME_BYTES = 64
"""Bytes of a name that are among these."""

NAME_COPIES = 4
"""What each byte more takes: as text, as the store has it in memory, and in the history while a file of it begins."""

LANE_BYTES = 250
"""Of a lane, without places for messages."""

DEQUE_BYTES = 800
"""Places for the first messages of a lane."""

SELECTED_ENTRIES_BYTES = 400
"""What a lane costs more where there are selectors or groups."""

SELECTION_BYTES = 600
"""The same of a queue."""

GROUPS_BYTES = 600
"""What it costs beside that where there are groups."""

SELECTOR_BYTES = 400
"""Of each selector of a queue; where there are groups those without one have one that wants all."""

KEYED_BYTES = 350
"""Of each text that one asks for and that is looked up (keyed.py)."""

SELECTOR_LANE_BYTES = 500
"""Of each lane of which a selector may want anything."""

GROUP_LANE_BYTES = 1800
"""The same where there are groups."""

CONSUMER_BYTES = 700
"""A subscription to a queue, beside its name and that queue."""

WILDCARD_BYTES = 3000
"""What a wildcard takes more, without its pattern and its queues."""

PATTERN_BYTES = 8
"""What each character of that takes, as a whole and in words."""

CONSUMERS_RESERVE = 2 * 1024 * 1024
"""Bytes that consumers may take when queues have taken all there is: somebody must be able to empty them."""

UNSENT_THRESHOLD_MIN = 4 * UNSENT_BYTES_MAX
"""Bytes that all sockets together may have waiting, however small the limit."""


class MemoryBudget:
    def __init__(self, limit: int = maxsize, queues_limit: int = maxsize) -> None:
        self.limit = limit
        """Bytes that messages may take before some leave; those of open transactions, sockets and incomplete
        frames count too."""
        self.queues_limit = queues_limit
        """Bytes that queues may take beside that before no more are made."""
        self.queue_bytes = 0
        """Bytes of queues, without their messages, and of those who take from them."""
        self.selector_use_counts: dict[Selector, int] = {}
        """How many use each."""
        self.deque_bytes = 0
        """Bytes of places for messages in lanes; they count as these do."""
        self.message_bytes = 0
        """Bytes of messages in queues and windows."""
        self.pending_free_bytes = 0
        """How much of that goes by itself as soon as a write under way is durable."""
        self.unsent_bytes = 0
        """Bytes of messages that sockets have not taken."""
        self.unsent_threshold = max(limit // 4, UNSENT_THRESHOLD_MIN)
        """So much of that is enough: from there on each connection gets one message at a time."""
        self.unsent_bytes_max = UNSENT_BYTES_MAX
        """Bytes that one connection's socket may have waiting before its windows shut."""
        self.transaction_bytes = 0
        """Bytes of sends and causes in open transactions."""
        self.incomplete_bytes = 0
        """Bytes of large frames that are not complete yet."""
        self.is_page_space_short = False
        """A page was wanted for which there is hardly room."""

    @property
    def bytes_over_limit(self) -> int:
        """Bytes over the limit; they have to leave."""
        return (
            self.message_bytes
            + self.deque_bytes
            - self.pending_free_bytes
            + self.unsent_bytes
            + self.transaction_bytes
            + self.incomplete_bytes
            - self.limit
        )

    @property
    def has_space_for_queue(self) -> bool:
        """One more can be made, with all that a queue of the plain kind may need."""
        return self.queue_bytes + QUEUE_BYTES + LANE_BYTES <= self.queues_limit

    def has_space_for_consumer(self, size: int) -> bool:
        """One more can be there, which takes `size` bytes with all that is known because of it."""
        return self.queue_bytes + size <= self.queues_limit + CONSUMERS_RESERVE

    def bytes_for_selector(self, selector: Selector | None) -> int:
        """What one user more of a selector takes."""
        return 0 if selector is None or selector in self.selector_use_counts else selector.size

    def add_selector(self, selector: Selector | None) -> None:
        """Until `remove_selector`."""
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
        """Bytes that sends in open transactions may take, unless it is one."""
        return self.limit // 4

    @property
    def incomplete_bytes_max(self) -> int:
        """Bytes of incomplete frames from which on only one of them is read on."""
        return self.limit // 4

    def has_space_for_send(self, size: int) -> bool:
        """An open transaction may grow by a send of `size` bytes."""
        return not self.transaction_bytes or self.transaction_bytes + size <= self.transaction_bytes_max


def size_of(message: SentMessage) -> int:
    """Bytes of memory that a waiting message takes, roughly."""
    return len(message.body) + len(message.header) + ENTRY_BYTES


def queue_size(destination: Destination) -> int:
    """Bytes of memory that a queue takes, roughly, without lanes."""
    names = len(destination.name.encode()) + len(destination.topic.encode())
    return QUEUE_BYTES + NAME_COPIES * max(0, names - NAME_BYTES)


def consumer_size(subscription: str, destination: Destination) -> int:
    """The same of a subscription of this name."""
    size = CONSUMER_BYTES + getsizeof(subscription)
    if destination.kind is not DestinationKind.QUEUE_PATTERN:
        return size
    return size + WILDCARD_BYTES + PATTERN_BYTES * len(destination.name)


# ---- Empty containers that all who hold nothing yet share, and that none can change ----
#
# There may be a hundred thousand queues and lanes. Whoever has something to put makes a place of its own.


def _raise_shared(*_: object) -> NoReturn:
    raise TypeError("it is shared")


class _EmptyDict(dict[int, Any]):
    __setitem__ = __ior__ = update = setdefault = _raise_shared


class _EmptySet(set[int]):
    add = update = __ior__ = _raise_shared


EMPTY: dict[int, Any] = _EmptyDict()
NO_SEQUENCES: set[int] = _EmptySet()


def add_sequence(sequences: set[int], sequence: int) -> set[int]:
    """The same set with one more, or one of its own."""
    if sequences is NO_SEQUENCES:
        return {sequence}
    sequences.add(sequence)
    return sequences
