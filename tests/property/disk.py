"""Disk and threads between the engine and its store, run one step at a time.

In the broker two threads do this, whenever they come to it: one makes batches durable, one reads pages. Here every step
is taken when the state machine says so, so that anything can happen between them.

    hand_over(batch)   write()   done()        the engine knows of the batch only after `done`
    want(read)         read()    next_page()   a page shows what was written when it was read

The same for pages of timers.
"""

from collections import Counter, deque
from collections.abc import Collection
from functools import lru_cache
from sys import maxsize
from typing import NamedTuple

from truenext.broker.pager import read_page
from truenext.engine.background.browsing import BrowseRead
from truenext.engine.memory.timers import TimerRead, TimersResult
from truenext.engine.state.pages import PageMessage, PageResult, SideRead, StoreRead
from truenext.model.batch import Batch, Causes, Mark
from truenext.model.destination import ENDED_PREFIX
from truenext.model.message import SentMessage
from truenext.model.order import RANKS
from truenext.model.record import (
    CONTENTS_LANE_KEY,
    LANE_KEY_SIZE,
    content_key,
    decode_record,
    lane_key,
    referenced_content_number,
    sequence_of,
    split_lane_key,
)
from truenext.store.memory import MemoryStore
from truenext.store.store import Recovered, UndecodedMessage

HIDDEN_PREFIX = "/scheduled/"
"""Prefix of the hidden queues of scheduled sends, which no client can name."""


class Stored(NamedTuple):
    """A message as the store has it."""

    message: SentMessage
    mark: Mark
    content: int
    """Number of the content that it shares; 0 if it has its own."""
    causes: Causes


def found_of(stored: UndecodedMessage) -> PageMessage:
    """Return the message as the broker's pager makes it."""
    message = decode_record(stored.key, stored.record, stored.content)
    return PageMessage(
        sequence_of(stored.key), message, stored.mark, referenced_content_number(stored.record), stored.causes
    )


_decoded = lru_cache(maxsize=1000)(decode_record)
"""Cache for comparisons, which read the stored messages with every batch."""


class Disk:
    def __init__(self) -> None:
        self._store = MemoryStore()
        self.in_flight: Batch | None = None
        self.is_written = False
        """The batch in flight is durable; the engine does not know yet."""
        self.requested: deque[StoreRead] = deque()
        self._pages: deque[tuple[StoreRead, PageResult]] = deque()
        """Read, and not handed to the engine yet."""
        self._early: list[tuple[StoreRead, PageResult]] = []
        """Handed to the engine, which does not know of the batch that they show."""
        self.requested_timers: deque[TimerRead] = deque()
        self._timers: deque[tuple[TimerRead, TimersResult]] = deque()
        self.queue_names: dict[int, str] = {}
        """Names of queues, also of those that go with the batch in flight."""
        self._contents: dict[int, dict[bytes, Stored]] = {}
        """Contents of queues since the last write to the store."""

    # Batches ----------------------------------------------------------------------------------------------------------

    def submit(self, batch: Batch) -> None:
        assert self.in_flight is None, "one batch at a time"
        self.in_flight, self.is_written = batch, False
        self.queue_names.update((number, name) for number, name in batch.queues.items() if name)

    def write(self) -> None:
        """Make the batch in flight durable.

        Raises: StoreError if it cannot be done.
        """
        assert self.in_flight is not None
        if not self.in_flight.is_empty():
            self._contents.clear()
            self._store.apply(self.in_flight)
        self.is_written = True

    def done(self) -> Batch:
        """The batch in flight, written; the engine is about to be told."""
        batch = self.in_flight
        assert batch is not None
        if not self.is_written:
            self.write()
        self.in_flight = None
        for number, name in batch.queues.items():
            if not name:
                del self.queue_names[number]
        self._early = [(read, page) for read, page in self._early if page.as_of > batch.number]
        return batch

    # Pages ------------------------------------------------------------------------------------------------------------

    def request(self, reads: list[StoreRead]) -> None:
        self.requested.extend(reads)

    def read(self) -> tuple[StoreRead, PageResult]:
        """Read the page that was wanted first."""
        read = self.requested.popleft()
        self._pages.append((read, self.read_at_once(read)))
        return self._pages[-1]

    def read_at_once(self, read: StoreRead) -> PageResult:
        page = read_page(self._store, read)
        found = [found_of(each) for each in page.messages]
        return PageResult(found, page.as_of, page.is_end)

    @property
    def has_page(self) -> bool:
        return bool(self._pages)

    def next_page(self, committed: int) -> tuple[StoreRead, PageResult]:
        """The page that was read first; the engine is about to get it, and knows of batches up to `committed`."""
        read, page = self._pages.popleft()
        if page.as_of > committed and not isinstance(read, BrowseRead):
            self._early.append((read, page))
        return read, page

    def reading(self) -> dict[str, int]:
        """Return the smallest rank of the pages being read, by queue."""
        ranks: dict[str, int] = {}
        for read in [*self.requested, *(read for read, _ in [*self._pages, *self._early])]:
            if isinstance(read, SideRead):
                # Nobody's consumers wait for it.
                continue
            _, rank = split_lane_key(read.lane.key)
            queue = read.lane.queue.name
            ranks[queue] = min(rank, ranks.get(queue, rank))
        return ranks

    # Timers -----------------------------------------------------------------------------------------------------------

    def read_timers(self) -> tuple[TimerRead, TimersResult]:
        """Read the page of timers that was wanted first."""
        read = self.requested_timers.popleft()
        page = self._store.read_timers(read.after, read.limit)
        self._timers.append((read, TimersResult(page.timers, page.as_of, page.is_end)))
        return self._timers[-1]

    @property
    def has_timers(self) -> bool:
        return bool(self._timers)

    def next_timers(self) -> tuple[TimerRead, TimersResult]:
        """The page that was read first; the engine is about to get it."""
        return self._timers.popleft()

    # The whole --------------------------------------------------------------------------------------------------------

    def has_ended(self, key: bytes) -> bool:
        """True for a message of a subscription that has ended and is being removed, or that ends with its connection:
        no client may see it after a stop or a crash."""
        return self.queue_names[split_lane_key(key[:LANE_KEY_SIZE])[0]].startswith(ENDED_PREFIX)

    def contents(self) -> dict[bytes, Stored]:
        """Return all messages by key."""
        found: dict[bytes, Stored] = {}
        for queue, name in self.queue_names.items():
            if not name.startswith((HIDDEN_PREFIX, ENDED_PREFIX)):
                found |= self._contents_of(queue)
        return found

    def wrong_contents(self) -> dict[bytes, tuple[int, int]]:
        """References that contents are said to have, and those that they have, where that differs; by key."""
        expected = {
            each.key: each.mark.attempts
            for each in self._store.read_page(CONTENTS_LANE_KEY, 0, maxsize - 1, maxsize).messages
        }
        have = Counter({content_key(number): count for number, count in self.copies().items()})
        return {key: (expected.get(key, 0), have[key]) for key in expected | have if expected.get(key, 0) != have[key]}

    def copies(self) -> Counter[int]:
        """Return the number of copies of each content, including those being removed."""
        numbers = (each.content for queue in self.queue_names for each in self._contents_of(queue).values())
        return Counter(number for number in numbers if number)

    def hidden(self) -> list[SentMessage]:
        """Scheduled sends."""
        return [
            each.message
            for queue, name in self.queue_names.items()
            if name.startswith(HIDDEN_PREFIX)
            for each in self._contents_of(queue).values()
        ]

    def is_hidden(self, key: bytes) -> bool:
        return self.queue_names[split_lane_key(key[:-8])[0]].startswith(HIDDEN_PREFIX)

    def _contents_of(self, queue: int) -> dict[bytes, Stored]:
        if queue not in self._contents:
            self._contents[queue] = {
                each.key: Stored(
                    _decoded(each.key, each.record, each.content),
                    each.mark,
                    referenced_content_number(each.record),
                    each.causes,
                )
                for rank in RANKS
                for each in self._store.read_page(lane_key(queue, rank), 0, maxsize - 1, maxsize).messages
            }
        return self._contents[queue]

    def content_references(self, numbers: Collection[int]) -> dict[int, int]:
        return self._store.content_references(numbers)

    def restart(self) -> Recovered:
        """The broker is gone, with all that was under way; the store opens again."""
        self.in_flight = None
        self.requested.clear()
        self.requested_timers.clear()
        self._timers.clear()
        self._pages.clear()
        self._early.clear()
        self._contents.clear()
        recovered = self._store.recover()
        self.queue_names = dict(recovered.queues)
        return recovered
