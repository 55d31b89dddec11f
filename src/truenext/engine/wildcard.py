"""Consumers of many queues, and which queues those are. Source: docs/contract.md, "Wildcards"

Where each lane of each of its queues begins is known to a `Wildcard`, in one heap for each rank: what is next for it is
at the top of one of them, however many queues there are. Whatever can make something earlier ready touches its queue,
and that is then looked at again; what has become later turns out when it is at the top.

What is being committed in such queues is noted, in the order of sequences: for a wildcard it holds back its equals in
all of them. How they are served: joint.py
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappush
from typing import TYPE_CHECKING

from truenext.destination import DEAD_LETTER_PREFIX, Kind
from truenext.engine.consumer import Consumer
from truenext.engine.memory import JOIN_BYTES
from truenext.engine.selecting import bytes_to_join
from truenext.engine.topics import virtual_topic
from truenext.engine.unused import no_room_for_selector
from truenext.order import RANKS
from truenext.pattern import matches

if TYPE_CHECKING:
    from collections.abc import Iterable

    from truenext.commands import Subscribe
    from truenext.engine.account import Account
    from truenext.engine.lane import Entry
    from truenext.engine.memory import Memory
    from truenext.engine.queue import Queue
    from truenext.engine.selecting import Scan, Selections
    from truenext.engine.session import Session

NOWHERE = -1
"""In place of a sequence: nothing is ready in that lane."""

STALE_MIN = 64
"""So many heads of lanes may be no longer true before the heap is made anew."""


class Wildcard(Consumer):
    """A consumer of all queues whose names match a pattern.

    Its `queue` is one in which nothing ever stands: to touch it says that it may have credit again.
    """

    __slots__ = ("_pushed", "_scans", "heads", "queues", "wanted", "words")

    is_of_many = True

    def __init__(
        self,
        session: Session,
        queue: Queue,
        subscribe: Subscribe,
        memory: Memory,
        *,
        number: int,
        served_at: int,
        now_ms: int,
    ) -> None:
        super().__init__(session, queue, subscribe, memory, number=number, served_at=served_at, now_ms=now_ms)
        self.words = subscribe.destination.name.split(".")
        """Of its pattern."""
        self.wanted = subscribe.selector
        self.queues: dict[Queue, list[int]] = {}
        """Each with the sequence, by rank, where what is next for it begins in that lane: of a message, or from which
        on something has to be read or tested."""
        self.heads: list[list[tuple[int, int, Queue]]] = [[] for _ in RANKS]
        """The same, by rank, as heaps of sequence, a number to tell them apart, and queue. Some are no longer true, see
        `queues`."""
        self._pushed = 0
        """Into these heaps."""
        self._scans: dict[Queue, Scan] = {}

    @property
    def has_selector(self) -> bool:
        """As far as a history is concerned: what it passes over in a queue may be held back in another one."""
        return True

    def scan_of(self, queue: Queue) -> Scan | None:
        return self._scans.get(queue)

    def scan_with(self, queue: Queue, scan: Scan) -> None:
        self._scans[queue] = scan

    def left_queue(self, queue: Queue) -> None:
        del self.queues[queue]
        self._scans.pop(queue, None)

    def all_queues(self) -> list[Queue]:
        return list(self.queues)

    def is_meant(self, queue: Queue) -> bool:
        """Its pattern means this queue."""
        if queue.destination.kind is not Kind.QUEUE or queue.destination.topic:
            return False
        name = queue.name
        words = name.split(".")
        is_special = queue.holds_dead_letters or name.startswith(DEAD_LETTER_PREFIX)
        if is_special and not name.startswith(DEAD_LETTER_PREFIX):
            return False
        if (is_special or virtual_topic(name)) and self.words[0] != words[0]:
            return False
        return matches(self.words, words)

    def stands(self, queue: Queue, rank: int, sequence: int) -> None:
        """What is next for it in a lane begins here."""
        known = self.queues[queue]
        if known[rank] == sequence:
            return
        known[rank] = sequence
        if sequence == NOWHERE:
            return
        heap = self.heads[rank]
        if len(heap) < 2 * len(self.queues) + STALE_MIN:
            self._pushed += 1
            heappush(heap, (sequence, self._pushed, queue))
            return
        everywhere = enumerate(self.queues.items(), self._pushed + 1)
        heap[:] = [(at[rank], number, one) for number, (one, at) in everywhere if at[rank] != NOWHERE]
        heapify(heap)
        self._pushed += len(self.queues)

    def head_at(self, queue: Queue, rank: int) -> int:
        """Where what is next for it begins in a lane; NOWHERE too if the queue has gone."""
        known = self.queues.get(queue)
        return NOWHERE if known is None else known[rank]


class Wildcards:
    """All of them, and what of their queues is being committed."""

    __slots__ = ("_account", "_consumers", "_selections", "expressive", "in_flight")

    def __init__(self, account: Account, selections: Selections) -> None:
        self._account = account
        self._selections = selections
        self._consumers: list[Wildcard] = []
        self.in_flight: list[deque[Entry]] = [deque() for _ in RANKS]
        """By rank, in the order of sequences; some may be durable by now."""
        self.expressive: dict[Queue, None] = {}
        """Queues that have had consumers with express."""

    def subscribe(self, wildcard: Wildcard, queues: Iterable[Queue], since: int, committed: int) -> list[Queue]:
        """Join it to those that it means: these are returned. What was accepted from sequence `since` on may be in
        flight; `committed` is the last durable batch.

        Raises: RemoteProtocolError if it has a selector, for which there is no room in so many
        """
        meant = [queue for queue in queues if wildcard.is_meant(queue)]
        self._check_room(wildcard, meant)
        self._consumers.append(wildcard)
        wildcard.queue.join_of_many(wildcard)
        self._note_in_flight((queue for queue in meant if not queue.wildcards), since, committed)
        for queue in meant:
            self._join(wildcard, queue)
        return meant

    def made(self, queue: Queue) -> None:
        """There is a new queue; nothing is in it."""
        for wildcard in self._consumers:
            if wildcard.is_meant(queue):
                self._join(wildcard, queue)

    def left(self, wildcard: Wildcard) -> None:
        self._consumers.remove(wildcard)
        wildcard.queue.wildcards = []
        for queue in wildcard.queues:
            queue.memory.queues -= JOIN_BYTES

    def gone(self, queue: Queue) -> None:
        """A queue has gone in which nothing was."""
        for wildcard in queue.wildcards:
            self._account.unsubscribed(wildcard, queue)
            wildcard.left_queue(queue)
            queue.memory.queues -= JOIN_BYTES
        queue.wildcards = []
        self.expressive.pop(queue, None)

    def accepted(self, entry: Entry) -> None:
        """A message of such a queue is visible when its batch is durable."""
        self.in_flight[entry.lane.rank].append(entry)

    def committed(self, batch: int) -> None:
        for in_flight in self.in_flight:
            while in_flight and in_flight[0].batch <= batch:
                in_flight.popleft()

    def _check_room(self, wildcard: Wildcard, meant: list[Queue]) -> None:
        selector = wildcard.wanted
        # Whoever takes all that is there makes room.
        if selector is not None:
            size = sum(JOIN_BYTES + bytes_to_join(queue, selector) for queue in meant)
            if not wildcard.memory.has_room_in_queues(size):
                raise no_room_for_selector(len(meant), size, wildcard.memory)

    def _join(self, wildcard: Wildcard, queue: Queue) -> None:
        wildcard.queues[queue] = [NOWHERE] * len(RANKS)
        queue.memory.queues += JOIN_BYTES
        queue.join_of_many(wildcard)
        if wildcard.wanted is not None or queue.groups is not None:
            self._selections.subscribe(wildcard, queue, wildcard.wanted)
        self._account.subscribed(wildcard, queue)

    def _note_in_flight(self, queues: Iterable[Queue], since: int, committed: int) -> None:
        found: list[list[Entry]] = [[] for _ in RANKS]
        for queue in queues:
            for lane in queue.lanes:
                found[lane.rank] += (entry for entry in lane.recent if entry.batch > committed)
                if lane.aside is not None:
                    found[lane.rank] += (entry for entry in lane.aside.plucked.values() if entry.batch > committed)
                for entry in reversed(lane.arrived):
                    if entry.sequence < since:
                        break
                    if entry.batch > committed:
                        found[lane.rank].append(entry)
        for rank, new in enumerate(found):
            # Some may be known from another wildcard, which has ended.
            everything = {entry.sequence: entry for entry in (*self.in_flight[rank], *new)}
            self.in_flight[rank] = deque(entry for _, entry in sorted(everything.items()))
