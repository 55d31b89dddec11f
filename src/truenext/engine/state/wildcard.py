"""A consumer of all queues whose names match a pattern. Source: docs/contract.md, "Wildcards"

Where each lane of each of its queues begins is known to it, in one heap for each rank: what is next for it is at the
top of one of them, however many queues there are. Whatever can make something earlier ready touches its queue, and that
is then looked at again; what has become later turns out when it is at the top. How it is
served: dispatch/wildcard.py
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
"""In place of a sequence: nothing is ready in that lane."""

STALE_MIN = 64
"""So many heads of lanes may be no longer true before the heap is made anew."""


class Wildcard(BrokerConsumer):
    __slots__ = ("_head_sequences", "_push_count", "heads", "is_joining", "pattern_words", "queues")

    def __init__(
        self,
        session: ConnectionState,
        subscribe: Subscribe,
        memory: MemoryBudget,
        *,
        number: int,
        last_dispatch_number: int,
        now_ms: int,
    ) -> None:
        super().__init__(
            session, subscribe, memory, number=number, last_dispatch_number=last_dispatch_number, now_ms=now_ms
        )
        self.queue = None
        self.pattern_words = subscribe.destination.name.split(".")
        """Of its pattern."""
        self.queues: dict[Queue, None] = {}
        """Those that it has joined."""
        self.is_joining = True
        """Some that were there when it came are still to be looked at."""
        self._head_sequences: list[dict[Queue, int]] = [{} for _ in RANKS]
        """By rank, the sequence where what is next for it begins in that lane of a queue: of a message, or from which
        on something has to be read or tested. Where nothing is there is no entry: most queues are empty."""
        self.heads: list[list[tuple[int, int, Queue]]] = [[] for _ in RANKS]
        """The same, by rank, as heaps of sequence, a number to tell them apart, and queue. Some are no longer true, see
        `head_at`."""
        self._push_count = 0
        """Into these heaps."""

    def remove_queue(self, queue: Queue) -> None:
        del self.queues[queue]
        for heads in self._head_sequences:
            heads.pop(queue, None)

    def has_credit(self) -> bool:
        return not self.is_joining and super().has_credit()

    def all_queues(self) -> list[Queue]:
        return list(self.queues)

    def matches_queue(self, queue: Queue) -> bool:
        """Its pattern means this queue."""
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
        # These are meant by a pattern with their own first word alone.
        is_special = has_dead_letter_prefix or name.startswith(SPARK_PREFIX) or virtual_topic(name)
        return not is_special or not is_pattern(self.pattern_words[0])

    def set_head(self, queue: Queue, rank: int, sequence: int) -> None:
        """What is next for it in a lane begins here."""
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
        """Where what is next for it begins in a lane; NOWHERE too if the queue has gone."""
        return self._head_sequences[rank].get(queue, NO_HEAD)
