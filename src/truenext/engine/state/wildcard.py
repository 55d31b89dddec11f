"""Wildcard consumer: a consumer of all queues whose names match a pattern. Source: docs/contract.md, "Wildcards"

A wildcard consumer has the heads of all lanes of its queues, in one heap per rank. Its true next is at the top of one
heap, however many queues there are. Each change that can make an earlier message ready touches its queue, and the next
dispatch updates the queue's heads. The head of a message that has left the queue is removed when it reaches the top of
the heap. dispatch/wildcard.py dispatches from these heaps.
"""

from __future__ import annotations

from heapq import heapify, heappush

from truenext.engine.state.consumer import BrokerConsumer, ConnectionState
from truenext.engine.state.memory import MemoryBudget
from truenext.engine.state.queue import Queue
from truenext.model.commands import Subscribe
from truenext.model.destination import DEAD_LETTER_PREFIX, SPARK_PREFIX, DestinationKind, virtual_topic
from truenext.model.order import RANKS
from truenext.model.pattern import is_pattern, matches

NO_HEAD = -1
"""Value instead of a sequence: no message of the lane is ready."""

STALE_MIN = 64
"""Number of outdated items that even a small heap may have before it is rebuilt."""


class Wildcard(BrokerConsumer):
    __slots__ = ("_head_sequences", "_push_count", "heads", "is_joining", "is_leaving", "pattern_words", "queues")

    # Messages of many queues take up to twice as long to requeue.
    held_weight = 2

    def __init__(
        self, session: ConnectionState, subscribe: Subscribe, memory: MemoryBudget, **consumer_fields: int
    ) -> None:
        super().__init__(None, session, subscribe, memory, **consumer_fields)
        self.pattern_words = subscribe.destination.name.split(".")
        """Pattern, split into words."""
        self.queues: dict[Queue, None] = {}
        """Queues that the consumer has joined."""
        self.is_joining = True
        """True until all queues that existed at the subscription were compared with the pattern."""
        self.is_leaving = False
        """True if the consumer has ended, and has not left all its queues yet."""
        self._head_sequences: list[dict[Queue, int]] = [{} for _ in RANKS]
        """Sequence of the head, by rank and queue. The head is the first ready message for the consumer, or a message
        that must first be read or compared. Queues without a head, which most are, have no item."""
        self.heads: list[list[tuple[int, int, Queue]]] = [[] for _ in RANKS]
        """One heap of heads per rank. An item is a sequence, a number that makes items distinct, and a queue. An item
        is outdated if its sequence differs from `head_at`."""
        self._push_count = 0

    def remove_queue(self, queue: Queue) -> None:
        del self.queues[queue]
        for heads in self._head_sequences:
            heads.pop(queue, None)

    def has_credit(self) -> bool:
        return not (self.is_joining or self.is_leaving) and super().has_credit()

    def all_queues(self) -> list[Queue]:
        return list(self.queues)

    def matches_queue(self, queue: Queue) -> bool:
        destination = queue.destination
        name = destination.name
        if (
            destination.kind is not DestinationKind.QUEUE
            or destination.topic
            or not matches(self.pattern_words, name.split("."))
        ):
            return False
        has_dead_letter_prefix = name.startswith(DEAD_LETTER_PREFIX)
        if queue.holds_dead_letters and not has_dead_letter_prefix:
            return False
        # Only a pattern that begins with the same word matches such a queue.
        is_special = has_dead_letter_prefix or name.startswith(SPARK_PREFIX) or virtual_topic(name)
        return not is_special or not is_pattern(self.pattern_words[0])

    def set_head(self, queue: Queue, rank: int, sequence: int) -> None:
        """Set the sequence of the consumer's head (its next message) in a lane; NO_HEAD removes the head."""
        heads_of_rank = self._head_sequences[rank]
        if heads_of_rank.get(queue, NO_HEAD) == sequence:
            return
        if sequence == NO_HEAD:
            del heads_of_rank[queue]
            return
        heads_of_rank[queue] = sequence
        heap = self.heads[rank]
        if len(heap) < 2 * len(heads_of_rank) + STALE_MIN:
            self._push_count += 1
            heappush(heap, (sequence, self._push_count, queue))
            return
        heap[:] = [(at, number, one) for number, (one, at) in enumerate(heads_of_rank.items(), self._push_count + 1)]
        heapify(heap)
        self._push_count += len(heads_of_rank)

    def head_at(self, queue: Queue, rank: int) -> int:
        """Return the sequence of the consumer's head (its next message) in a lane. NO_HEAD if there is none, or the
        queue was removed."""
        return self._head_sequences[rank].get(queue, NO_HEAD)
