"""Removal of ended topic subscriptions: deletes their messages, in memory and in the store.

    end           the store gives the subscription's queue another name, by which no client can reach it
    afterwards    pages of the queue are read and their messages removed, page by page and lane by lane
    at last       the queue is removed like any empty queue (writing/numbers.py)

The queue of a subscription that ends with its connection has such a name from the beginning
(memory/spilled_subscriptions.py).

Messages in memory are dropped at once. Messages in the store, or being written, are on the pages that are read once the
new name is durable. A restarted broker continues the removal.
"""

from __future__ import annotations

from dataclasses import dataclass

from truenext.engine.memory.spilled_subscriptions import SpilledSubscriptions
from truenext.engine.state.counts import Counts
from truenext.engine.state.pages import PageResult, SideRead
from truenext.engine.state.queue import Entry, Queue
from truenext.engine.writing.commit_state import BackgroundTask, CommitState
from truenext.engine.writing.entries import dereference_content
from truenext.engine.writing.numbers import QueueNumberAllocator
from truenext.model.batch import NO_MARK
from truenext.model.destination import ENDED_PREFIX
from truenext.model.limits import PAGE_BYTES, PAGE_SIZE
from truenext.model.order import RANKS
from truenext.model.record import message_key


class CleanupRead(SideRead):
    """Read of a page of an ended queue. All messages of the page are removed."""

    __slots__ = ()

    waits_for_commit = False


@dataclass(slots=True, eq=False)
class _EndedQueue:
    queue: Queue
    end_batch: int
    """Last batch that may store messages of the queue."""
    rank: int = 0
    removed_up_to: int = 0
    """Last removed sequence of the lane of `rank`."""
    has_damage: bool = False


class SubscriptionCleanup(BackgroundTask):
    def __init__(
        self,
        commit_state: CommitState,
        numbers: QueueNumberAllocator,
        spilling: SpilledSubscriptions,
        removed: Counts,
    ) -> None:
        """`removed` are the counts of ended durable subscriptions."""
        self._removed = removed
        self._commit_state = commit_state
        self._events = commit_state.events
        self._numbers = numbers
        self._spilling = spilling
        self._ended_queues: list[_EndedQueue] = []
        """Queues to be removed; the removal of the first one is in progress."""
        self._is_reading = False

    def end_subscription(self, queue: Queue) -> None:
        """Rename an ended queue in the store with the gathering batch, and remove the queue once that batch is
        durable."""
        batch = self._commit_state.batch
        batch.queues[queue.number] = ENDED_PREFIX + queue.name
        self.add_ended_queue(queue, batch.number)

    def end_temporary(self, queue: Queue) -> None:
        """End a temporary queue, and remove its messages from the disk if any are there."""
        if self._spilling.remove(queue):
            # It gets no messages after the last batch that is not empty.
            self.add_ended_queue(queue, self._commit_state.latest_batch)
        else:
            queue.dispose()

    def add_ended_queue(self, queue: Queue, batch: int) -> None:
        """Remove a queue from the store once `batch` is durable."""
        self._ended_queues.append(_EndedQueue(queue, batch))
        self._commit_state.active_work[self] = None

    @property
    def has_work(self) -> bool:
        return bool(self._ended_queues)

    def queues(self) -> list[Queue]:
        return [ended.queue for ended in self._ended_queues]

    def can_step(self) -> bool:
        return (
            bool(self._ended_queues)
            and not self._is_reading
            and not self._commit_state.is_stopped
            and self._ended_queues[0].end_batch <= self._commit_state.last_committed
            and not self._commit_state.is_full
        )

    def step(self) -> list[SideRead]:
        self._is_reading = True
        ended = self._ended_queues[0]
        return [
            CleanupRead(self.on_page_read, ended.queue.lane(ended.rank), ended.removed_up_to, PAGE_SIZE, PAGE_BYTES)
        ]

    def on_page_read(self, read: CleanupRead, page: PageResult) -> None:
        batch = self._commit_state.batch
        self._is_reading = False
        ended = self._ended_queues[0]
        lane = read.lane
        for found in page.messages:
            ended.removed_up_to = found.sequence
            if found.message is None:
                # A damaged record does not tell whether it is persistent, and so where to remove it. It does no harm.
                ended.has_damage = True
                continue
            key = message_key(lane.key, found.sequence)
            (batch.removes if found.message.persistent else batch.transient_removes).append(key)
            if found.content_number:
                dereference_content(batch, found.content_number, persistent=found.message.persistent)
            if found.mark != NO_MARK:
                batch.unmarks.append(key)
            batch.size += len(key)
            if not lane.queue.is_temporary:
                self._removed.rare.expired += 1
            self._events.expired(Entry(found.sequence, None, lane, 0, found.message.persistent, 0))
        if not page.is_end:
            return
        ended.rank, ended.removed_up_to = ended.rank + 1, 0
        if ended.rank == len(RANKS):
            del self._ended_queues[0]
            if not ended.has_damage:
                self._numbers.free(ended.queue)
            ended.queue.dispose()
