"""Which failed messages wait for their next try, and when the first of them is due.

A message that waits while others pass stands in `Lane.delayed`, and in no other place of its lane. One that holds the
others back stands in its lane as if it were ready; dispatch comes upon it, sees that it is not due, and stops there.

Time is that of a clock that does not jump. The store is told the wall clock's, which is all that is left after a
restart. What was due once stays due, also when it has left memory and the wall clock is set back before it is read.
"""

from __future__ import annotations

from heapq import heappop, heappush

from truenext.engine.state.queue import Entry
from truenext.engine.writing.commit_state import CommitState
from truenext.model.batch import DUE_NEVER
from truenext.model.limits import DELAY_MS_MAX
from truenext.model.policy import WhileWaiting


class DelayedEntries:
    def __init__(self, commit_state: CommitState) -> None:
        self._commit_state = commit_state
        self._due_heap: list[tuple[int, int, Entry]] = []
        """A heap by due time. What became of a message in the meantime is not noticed here until then."""
        self._heap_tie_breaker = 0

    @property
    def next_us(self) -> int | None:
        """When the first of those that wait is due."""
        return self._due_heap[0][0] if self._due_heap else None

    def delay(self, entry: Entry, delay_ms: int) -> bool:
        """A message is due so many milliseconds from now. True if it has to be kept out of its lane until then."""
        entry.due_us = self._commit_state.now_us + delay_ms * 1000
        self._heap_tie_breaker += 1
        heappush(self._due_heap, (entry.due_us, self._heap_tie_breaker, entry))
        self._commit_state.active_work[self] = None
        # One of a group holds back nothing but its group, which knows that.
        return entry.group != "" or entry.lane.queue.policy.while_waiting is WhileWaiting.SKIP

    def remaining_ms(self, due_ms: int) -> int:
        """How long a message of the store still waits, which is due at a time of the wall clock; 0 if it does not."""
        if due_ms == DUE_NEVER:
            # Poison, in a queue that keeps its failures by now.
            return 0
        # No delay was ever longer: else it is the wall clock that has been somewhere else.
        commit_state = self._commit_state
        return max(0, min(due_ms - (commit_state.now_us + commit_state.wall_clock_ahead_us) // 1000, DELAY_MS_MAX))

    def restore(self, entry: Entry, due_ms: int) -> bool:
        """The same for a message of the store, which is due at a time of the wall clock."""
        if due_ms == DUE_NEVER:
            entry.due_us = 0
        delay_ms = self.remaining_ms(due_ms)
        return delay_ms > 0 and self.delay(entry, delay_ms)

    def due_ms(self, entry: Entry) -> int:
        """When a message is due, for the store: milliseconds since the epoch, 0 if it does not wait."""
        if entry.due_us in (0, DUE_NEVER):
            return entry.due_us
        return self._commit_state.now_ms - (self._commit_state.now_us - entry.due_us) // 1000

    def pop_due(self) -> list[Entry]:
        """Those whose time has come; they wait no longer."""
        due: list[Entry] = []
        waiting = self._due_heap
        while waiting and waiting[0][0] <= self._commit_state.now_us:
            entry = heappop(waiting)[2]
            entry.due_us = 0
            due.append(entry)
        return due
