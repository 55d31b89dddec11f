"""Which number a queue has for the store and the history, and when a number is used again.

A number is given to a queue when it is made, and given again once nothing of the queue is left: not in memory, durably
not in the store, and not in the file of the history that is being written.
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
        """The highest that was ever given."""
        self._free: list[int] = []
        self._pending_free: list[tuple[int, int]] = []
        """Batches and the numbers that are free when these are durable, in order; where there is no history."""

    def allocate(self) -> int:
        if self._free:
            return self._free.pop()
        self._last += 1
        return self._last

    def restore(self, number: int) -> None:
        """The store knows a queue by it."""
        self._last = max(self._last, number)

    def free(self, queue: Queue) -> None:
        """Nothing of a queue is left but what batches up to the gathering one take away; its name goes with that."""
        batch = self._commit_state.batch
        number = queue.stored_number
        if queue.is_known_to_store:
            if number in batch.queues:
                # The store never hears of it.
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
        """A batch is durable."""
        committed = self._commit_state.last_committed
        if self._events.reusable_numbers:
            self._free += self._events.take_reusable_numbers()
        pending_free = self._pending_free
        if pending_free and pending_free[0][0] <= committed:
            self._free += [number for batch, number in pending_free if batch <= committed]
            self._pending_free = [pair for pair in pending_free if pair[0] > committed]
