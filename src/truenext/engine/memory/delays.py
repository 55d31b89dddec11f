"""Delayed entries: failed messages that wait for their next try, in order of due time.

A delayed message that does not block its queue is in `Lane.delayed`, and in no other container of its lane. A delayed
message that blocks its queue keeps its position in the lane. When such a message is the head, dispatch stops there
until it is due.

Due times in memory are those of a monotonic clock. The store gets due times of the wall clock, because a restart resets
the monotonic clock. A message that was due once stays due, even if it is evicted and the wall clock is set back before
the message is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from truenext.engine.state.queue import Entry
from truenext.engine.writing.commit_state import CommitState
from truenext.model.batch import DUE_NEVER
from truenext.model.limits import DELAY_MS_MAX, RETRIES_PER_TURN
from truenext.model.policy import WhileWaiting


class DelayedEntries:
    def __init__(self, commit_state: CommitState) -> None:
        self._commit_state = commit_state
        self._due_heap: list[tuple[int, int, Entry]] = []
        """Heap by due time, in microseconds of the monotonic clock. Messages that were settled or removed stay in the
        heap until their due time."""
        self._heap_tie_breaker = 0

    @property
    def next_us(self) -> int | None:
        """Due time of the first delayed message, in microseconds of the monotonic clock; None if there is none."""
        return self._due_heap[0][0] if self._due_heap else None

    def entries(self) -> Iterator[Entry]:
        """Return an iterator of all messages that are in the heap now, in no particular order, some of them twice. The
        heap may change meanwhile."""
        return (entry for _, _, entry in self._due_heap[:])

    def delay(self, entry: Entry, delay_ms: int) -> bool:
        """Delay a message by `delay_ms`. Returns True if the message must be in `Lane.delayed` until it is due, because
        it does not block its queue."""
        entry.due_us = self._commit_state.now_us + delay_ms * 1000
        self._heap_tie_breaker += 1
        heappush(self._due_heap, (entry.due_us, self._heap_tie_breaker, entry))
        self._commit_state.active_work[self] = None
        # A message of a group blocks only its group, which knows about it.
        return entry.group != "" or entry.lane.queue.policy.while_waiting is WhileWaiting.SKIP

    def remaining_ms(self, due_ms: int) -> int:
        """Return how many milliseconds a stored message still waits; 0 if it is due. `due_ms` is its stored due time,
        of the wall clock."""
        if due_ms == DUE_NEVER:
            # The message was rejected, and by now its queue keeps failed messages.
            return 0
        # No delay is longer: if this one seems to be, the wall clock was wrong.
        commit_state = self._commit_state
        return max(0, min(due_ms - (commit_state.now_us + commit_state.wall_clock_ahead_us) // 1000, DELAY_MS_MAX))

    def restore(self, entry: Entry, due_ms: int) -> bool:
        """Delay a message read from the store, if it is not due yet. `due_ms` is its stored due time. Returns True if
        the message must be in `Lane.delayed` until it is due."""
        if due_ms == DUE_NEVER:
            entry.due_us = 0
        delay_ms = self.remaining_ms(due_ms)
        return delay_ms > 0 and self.delay(entry, delay_ms)

    def due_ms(self, entry: Entry) -> int:
        """Return the due time of a message as the store gets it, in milliseconds since the epoch. 0 if there is no
        delay; DUE_NEVER if the message was rejected."""
        if entry.due_us in (0, DUE_NEVER):
            return entry.due_us
        return self._commit_state.now_ms - (self._commit_state.now_us - entry.due_us) // 1000

    def pop_due(self) -> list[Entry]:
        """Remove and return messages that are due, at most RETRIES_PER_TURN."""
        due: list[Entry] = []
        waiting = self._due_heap
        while waiting and waiting[0][0] <= self._commit_state.now_us and len(due) < RETRIES_PER_TURN:
            entry = heappop(waiting)[2]
            entry.due_us = 0
            due.append(entry)
        return due
