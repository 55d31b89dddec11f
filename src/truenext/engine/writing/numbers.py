"""Numbers of queues, for the store and the history: allocation and reuse.

A queue gets its number when it is created. The number may be reused once the queue was removed from memory, durably
from the store, and from the current file of the history.
"""

from __future__ import annotations

from truenext.engine.state.queue import Queue
from truenext.engine.writing.commit_state import CommitState
from truenext.model.limits import QUEUE_REMOVAL_BYTES


class QueueNumberAllocator:
    def __init__(self, commit_state: CommitState) -> None:
        self._commit_state = commit_state
        self._events = commit_state.events
        self._last = 0
        """Highest number ever allocated."""
        self._free: list[int] = []
        self._pending_free: list[tuple[int, int]] = []
        """Pairs of batch and queue number, in order: the number is free once the batch is durable. Used only by a
        broker without a history."""

    def allocate(self) -> int:
        if self._free:
            return self._free.pop()
        self._last += 1
        return self._last

    def restore(self, number: int) -> None:
        """Note that the store knows a queue of this number, so that the number is not allocated again."""
        self._last = max(self._last, number)

    def free(self, queue: Queue) -> None:
        """Free the number of a queue, and remove the queue's name from the store. The gathering batch or earlier ones
        must remove everything else of the queue."""
        batch = self._commit_state.batch
        number = queue.stored_number
        if queue.is_known_to_store:
            if number in batch.queues:
                # The store never gets to know it.
                del batch.queues[number]
                batch.paused.pop(number, None)
            else:
                batch.queues[number] = ""
                batch.size += QUEUE_REMOVAL_BYTES
        if self._events.forget_queue(queue):
            return
        if queue.is_known_to_store:
            self._pending_free.append((batch.number, number))
        else:
            self._free.append(number)

    def on_committed(self) -> None:
        """Free the numbers of queues whose removal is durable."""
        committed = self._commit_state.last_committed
        if self._events.reusable_numbers:
            self._free += self._events.take_reusable_numbers()
        pending_free = self._pending_free
        if pending_free and pending_free[0][0] <= committed:
            self._free += [number for batch, number in pending_free if batch <= committed]
            self._pending_free = [pair for pair in pending_free if pair[0] > committed]
