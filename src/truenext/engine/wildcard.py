"""Consumers of many queues, and which queues those are. Source: docs/contract.md, "Wildcards"

Where each lane of each of its queues begins is known to a `Wildcard`, in one heap for each rank: what is next for it is
at the top of one of them, however many queues there are. Whatever can make something earlier ready touches its queue,
and that is then looked at again; what has become later turns out when it is at the top.

What is being committed in such queues is noted, in the order of sequences: for a wildcard it holds back its equals in
all of them. How they are served: joint.py

Where there are many queues a wildcard joins some of them in each turn, and gets nothing before it has joined all: else
it might get what is behind its true next.
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
from truenext.limits import JOIN_PIECE
from truenext.order import RANKS
from truenext.pattern import is_pattern, matches

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from truenext.commands import Subscribe
    from truenext.engine.account import Account
    from truenext.engine.lane import Entry
    from truenext.engine.ledger import Ledger
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

    __slots__ = ("_pushed", "_scans", "_standing_at", "heads", "is_joining", "queues", "words")

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
        self.queues: dict[Queue, None] = {}
        """Those that it has joined."""
        self.is_joining = True
        """Some that were there when it came are still to be looked at."""
        self._standing_at: list[dict[Queue, int]] = [{} for _ in RANKS]
        """By rank, the sequence where what is next for it begins in that lane of a queue: of a message, or from which
        on something has to be read or tested. Where nothing is there is no entry: most queues are empty."""
        self.heads: list[list[tuple[int, int, Queue]]] = [[] for _ in RANKS]
        """The same, by rank, as heaps of sequence, a number to tell them apart, and queue. Some are no longer true, see
        `head_at`."""
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
        for standing in self._standing_at:
            standing.pop(queue, None)

    def is_open(self) -> bool:
        return not self.is_joining and super().is_open()

    def all_queues(self) -> list[Queue]:
        return list(self.queues)

    def is_meant(self, queue: Queue) -> bool:
        """Its pattern means this queue."""
        destination = queue.destination
        name = destination.name
        if destination.kind is not Kind.QUEUE or destination.topic or not matches(self.words, name.split(".")):
            return False
        is_called_so = name.startswith(DEAD_LETTER_PREFIX)
        if queue.holds_dead_letters and not is_called_so:
            return False
        # These are meant by a pattern with their own first word alone.
        return not (is_called_so or virtual_topic(name)) or not is_pattern(self.words[0])

    def stands(self, queue: Queue, rank: int, sequence: int) -> None:
        """What is next for it in a lane begins here."""
        standing = self._standing_at[rank]
        if standing.get(queue, NOWHERE) == sequence:
            return
        if sequence == NOWHERE:
            del standing[queue]
            return
        standing[queue] = sequence
        heap = self.heads[rank]
        if len(heap) < 2 * len(standing) + STALE_MIN:
            self._pushed += 1
            heappush(heap, (sequence, self._pushed, queue))
            return
        heap[:] = [(at, number, one) for number, (one, at) in enumerate(standing.items(), self._pushed + 1)]
        heapify(heap)
        self._pushed += len(standing)

    def head_at(self, queue: Queue, rank: int) -> int:
        """Where what is next for it begins in a lane; NOWHERE too if the queue has gone."""
        return self._standing_at[rank].get(queue, NOWHERE)


class Wildcards:
    """All of them, and what of their queues is being committed."""

    __slots__ = (
        "_account",
        "_begun",
        "_consumers",
        "_ledger",
        "_left",
        "_queues",
        "_selections",
        "expressive",
        "in_flight",
        "joining",
    )

    def __init__(self, ledger: Ledger, queues: Mapping[str, Queue], account: Account, selections: Selections) -> None:
        self._ledger = ledger
        self._queues = queues
        """All that there are."""
        self._account = account
        self._selections = selections
        self._consumers: list[Wildcard] = []
        self.joining: dict[Wildcard, int] = {}
        """Those that have not joined all their queues yet, with the bytes that are counted for those; one after the
        other does."""
        self._begun: Wildcard | None = None
        """The one whose turn it is, if it has begun."""
        self._left: list[Queue] = []
        """Queues that were there when it had, at which it is still to look."""
        self.in_flight: list[deque[Entry]] = [deque() for _ in RANKS]
        """By rank, in the order of sequences; some may be durable by now."""
        self.expressive: dict[Queue, None] = {}
        """Queues that have had consumers with express."""

    def size_to_join(self, wildcard: Wildcard) -> int:
        """Bytes for which there must be room before it can subscribe. Each queue has room for its first wildcard."""
        selector = wildcard.wanted
        if selector is None and not self._consumers:
            return 0
        meant = [queue for queue in self._queues.values() if wildcard.is_meant(queue)]
        size = JOIN_BYTES * sum(bool(queue.wildcards) for queue in meant)
        return size if selector is None else size + sum(bytes_to_join(queue, selector) for queue in meant)

    def subscribe(self, wildcard: Wildcard, size: int) -> None:
        """`go_on` joins it to the queues that it means; `size_to_join` is counted for them until it has."""
        self._consumers.append(wildcard)
        wildcard.queue.join_of_many(wildcard)
        self.joining[wildcard] = size
        wildcard.memory.queues += size

    def go_on(self) -> list[Queue]:
        """Look at some of the queues that somebody has to join: those that he has joined now, and the one that stands
        for him once these were all."""
        wildcard = next(iter(self.joining))
        if wildcard is not self._begun:
            self._begun, self._left = wildcard, list(self._queues.values())
        # The last ones, which are let go of for nothing.
        some = self._left[-JOIN_PIECE:]
        del self._left[-JOIN_PIECE:]
        known, joined = self._queues, wildcard.queues
        current = (queue for queue in some if known.get(queue.name) is queue and queue not in joined)
        meant = [queue for queue in current if wildcard.is_meant(queue)]
        self._note_in_flight(queue for queue in meant if not queue.wildcards)
        memory = wildcard.memory
        before = memory.queues
        for queue in meant:
            self._join(wildcard, queue)
        # What was counted for that before is not counted twice.
        there = min(self.joining[wildcard], memory.queues - before)
        self.joining[wildcard] -= there
        memory.queues -= there
        if not self._left:
            self._end_joining(wildcard)
            meant.append(wildcard.queue)
        return meant

    def _end_joining(self, wildcard: Wildcard) -> None:
        wildcard.is_joining = False
        wildcard.memory.queues -= self.joining.pop(wildcard, 0)
        if wildcard is self._begun:
            self._begun, self._left = None, []

    def made(self, queue: Queue) -> None:
        """There is a new queue; nothing is in it."""
        for wildcard in self._consumers:
            if wildcard.is_meant(queue):
                self._join(wildcard, queue)

    def left(self, wildcard: Wildcard) -> None:
        self._consumers.remove(wildcard)
        self._end_joining(wildcard)
        wildcard.queue.wildcards = []
        for queue in wildcard.queues:
            if len(queue.wildcards) > 1:
                queue.memory.queues -= JOIN_BYTES

    def gone(self, queue: Queue) -> None:
        """A queue has gone in which nothing was."""
        for wildcard in queue.wildcards:
            self._account.unsubscribed(wildcard, queue)
            wildcard.left_queue(queue)
        queue.memory.queues -= JOIN_BYTES * max(0, len(queue.wildcards) - 1)
        queue.wildcards = []
        self.expressive.pop(queue, None)

    def accepted(self, entry: Entry) -> None:
        """A message of such a queue is visible when its batch is durable."""
        self.in_flight[entry.lane.rank].append(entry)

    def committed(self) -> None:
        batch = self._ledger.committed
        for in_flight in self.in_flight:
            while in_flight and in_flight[0].batch <= batch:
                in_flight.popleft()

    def _join(self, wildcard: Wildcard, queue: Queue) -> None:
        wildcard.queues[queue] = None
        if queue.wildcards:
            queue.memory.queues += JOIN_BYTES
        queue.join_of_many(wildcard)
        if wildcard.wanted is not None or queue.groups is not None:
            self._selections.subscribe(wildcard, queue, wildcard.wanted)
        self._account.subscribed(wildcard, queue)

    def _note_in_flight(self, queues: Iterable[Queue]) -> None:
        since, committed = self._ledger.first_in_flight, self._ledger.committed
        found: list[list[Entry]] = [[] for _ in RANKS]
        for queue in queues:
            for lane in queue.lanes:
                # What had left memory too early may have come back to its lane before it is durable.
                found[lane.rank] += (entry for entry in (*lane.recent, *lane.again()) if entry.batch > committed)
                for entry in reversed(lane.arrived):
                    if entry.sequence < since:
                        break
                    if entry.batch > committed:
                        found[lane.rank].append(entry)
        for rank, new in enumerate(found):
            if not new:
                continue
            # Some may be known from another wildcard, which has ended.
            everything = {entry.sequence: entry for entry in (*self.in_flight[rank], *new)}
            self.in_flight[rank] = deque(entry for _, entry in sorted(everything.items()))
