"""Wildcard consumers: the queues that they have joined, and the uncommitted messages of these queues.

Uncommitted messages are kept in order of sequence. Each holds back, from a wildcard consumer, the later messages of its
priority in all queues of the consumer. A wildcard consumer joins a limited number of queues in each turn. It gets
nothing before it has joined all its queues, because its true next may be in any of them. Source: docs/contract.md,
"Wildcards"
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain, islice

from truenext.engine.selecting.selections import Selections
from truenext.engine.state.memory import JOIN_BYTES
from truenext.engine.state.queue import UNBOUNDED, Entry, Queue
from truenext.engine.state.wildcard import Wildcard
from truenext.engine.writing.commit_state import BackgroundTask
from truenext.engine.writing.engine_state import EngineState
from truenext.model.limits import JOIN_QUEUES_PER_TURN, LEAVE_QUEUES_PER_TURN
from truenext.model.order import RANKS


class Wildcards(BackgroundTask):
    def __init__(self, state: EngineState, selections: Selections) -> None:
        self._commit_state = state.commit_state
        self._queues = state.queues_by_name
        self._events = state.commit_state.events
        self._clients = state.clients
        self._selections = selections
        self._wildcards: dict[Wildcard, None] = {}
        self.joining: dict[Wildcard, int] = {}
        """Wildcard consumers that have not joined all their queues, with the bytes reserved for further queues. The
        first consumer joins first."""
        self._joining_now: Wildcard | None = None
        self._queues_to_join: list[Queue] = []
        """Queues that existed when the consumer `_joining_now` began to join, and were not compared with the consumer's
        pattern yet."""
        self.uncommitted: list[deque[Entry]] = [deque() for _ in RANKS]
        """Messages that were not durable when accepted, by rank, in order of sequence. Some may be durable by now."""
        self.express_queues: dict[Queue, None] = {}
        """Queues that have had consumers with express dispatch, which get urgent messages beyond their window."""
        self._leaving: list[Wildcard] = []
        """Wildcard consumers that have ended and not left all their queues yet. Such a consumer has no credit."""
        self._left_at_once = 0
        """Number of queues that ended wildcard consumers have left since the last step."""

    def join_bytes(self, wildcard: Wildcard) -> int:
        """Return the bytes that must be free for a new wildcard consumer. The size of each queue already includes its
        first wildcard consumer."""
        selector = wildcard.selector
        if selector is None and not self._wildcards:
            return 0
        matching = [queue for queue in self._queues.values() if wildcard.matches_queue(queue)]
        size = JOIN_BYTES * sum(queue.has_wildcards for queue in matching)
        return (
            size
            if selector is None
            else size + sum(self._selections.bytes_to_join(queue, selector) for queue in matching)
        )

    def subscribe(self, wildcard: Wildcard, size: int) -> None:
        """Register a wildcard consumer. Later steps join it to its queues; until then `size` bytes are reserved."""
        self._wildcards[wildcard] = None
        self.joining[wildcard] = size
        self._commit_state.active_work[self] = None
        wildcard.memory.queue_bytes += size

    @property
    def has_work(self) -> bool:
        return bool(self.joining or self._leaving)

    def step(self) -> tuple[()]:
        """Join one consumer to some of its queues, and remove one ended consumer from some of its queues."""
        self._left_at_once = 0
        if self.joining:
            self._join_some()
        if self._leaving:
            self._leave_some(self._leaving[0])
        return ()

    def _join_some(self) -> None:
        wildcard = next(iter(self.joining))
        if wildcard is not self._joining_now:
            self._joining_now, self._queues_to_join = wildcard, list(self._queues.values())
        # From the end, where removing them from the list is cheap.
        queues = self._queues_to_join[-JOIN_QUEUES_PER_TURN:]
        del self._queues_to_join[-JOIN_QUEUES_PER_TURN:]
        known, joined = self._queues, wildcard.queues
        current = (queue for queue in queues if known.get(queue.name) is queue and queue not in joined)
        matching = [queue for queue in current if wildcard.matches_queue(queue)]
        self._add_uncommitted(queue for queue in matching if not queue.has_wildcards)
        memory = wildcard.memory
        before = memory.queue_bytes
        for queue in matching:
            self._join(wildcard, queue)
        # Memory that is counted for the joined queues now is not reserved any more.
        counted = min(self.joining[wildcard], memory.queue_bytes - before)
        self.joining[wildcard] -= counted
        memory.queue_bytes -= counted
        self._commit_state.touched_queues.update(dict.fromkeys(matching))
        if not self._queues_to_join:
            self._end_joining(wildcard)
            self._commit_state.touched_wildcards[wildcard] = None

    def _end_joining(self, wildcard: Wildcard) -> None:
        wildcard.is_joining = False
        wildcard.memory.queue_bytes -= self.joining.pop(wildcard, 0)
        if wildcard is self._joining_now:
            self._joining_now, self._queues_to_join = None, []

    def on_queue_created(self, queue: Queue) -> None:
        """Join wildcard consumers to a new, empty queue."""
        for wildcard in self._wildcards:
            if wildcard.matches_queue(queue):
                self._join(wildcard, queue)

    def unsubscribe(self, wildcard: Wildcard) -> list[Queue]:
        """End a wildcard consumer. Returns the queues from which the caller must remove the consumer now; later steps
        remove it from all other queues."""
        del self._wildcards[wildcard]
        self._end_joining(wildcard)
        self._commit_state.touched_wildcards.pop(wildcard, None)
        self._clients.forget_wildcard(wildcard)
        self._commit_state.active_work[self] = None
        at_once = wildcard.all_queues()
        if self._left_at_once + len(at_once) > LEAVE_QUEUES_PER_TURN and not self._commit_state.is_stopped:
            wildcard.is_leaving = True
            self._leaving.append(wildcard)
            at_once = [queue for queue in at_once if self._selections.owns_groups(wildcard, queue)]
        self._left_at_once += len(at_once)
        for queue in at_once:
            self._free_join_bytes(queue)
            wildcard.remove_queue(queue)
        if wildcard.is_leaving:
            self._give_way(wildcard)
        return at_once

    def _give_way(self, wildcard: Wildcard) -> None:
        """Mark queues for dispatch, because a wildcard consumer is leaving them. If it was exclusive, other consumers
        may get messages now. In all other cases, other consumers may get express dispatch now."""
        touched = self._commit_state.touched_queues
        if wildcard.is_exclusive:
            for queue in wildcard.queues:
                self._clients.receivers_of(queue).choose_exclusive()
            touched.update(wildcard.queues)
        else:
            touched.update((queue, None) for queue in self.express_queues if queue in wildcard.queues)

    def _leave_some(self, wildcard: Wildcard) -> None:
        """Remove a wildcard consumer that has ended from some of its queues."""
        # From the end, where removing them from the dictionary is cheap.
        queues = list(islice(reversed(wildcard.queues), LEAVE_QUEUES_PER_TURN))
        for queue in queues:
            self._free_join_bytes(queue)
            wildcard.remove_queue(queue)
            self._clients.remove_consumer(wildcard, queue)
            queue.shrink()
            self._selections.remove_consumer(wildcard, queue)
            self._events.unsubscribed(wildcard, queue)
        if not wildcard.queues:
            self._leaving.remove(wildcard)

    def _free_join_bytes(self, queue: Queue) -> None:
        if len(self._clients.receivers_of(queue).wildcards) > 1:
            queue.memory.queue_bytes -= JOIN_BYTES

    def on_queue_removed(self, queue: Queue) -> None:
        """Remove an empty queue from all wildcard consumers that have joined it."""
        wildcards = self._clients.receivers_of(queue).wildcards
        for wildcard in wildcards:
            self._events.unsubscribed(wildcard, queue)
            wildcard.remove_queue(queue)
        queue.memory.queue_bytes -= JOIN_BYTES * max(0, len(wildcards) - 1)
        self._clients.forget_queue(queue)
        self.express_queues.pop(queue, None)

    @property
    def has_uncommitted(self) -> bool:
        """Whether a message in a queue of any wildcard consumer is not durable yet."""
        return any(entry.batch > self._commit_state.last_committed for entry in chain(*self.uncommitted))

    def first_uncommitted(self, wildcard: Wildcard, rank: int) -> int:
        """Return the sequence of the first message of this rank that is being committed and that the consumer could
        get; UNBOUNDED if there is none. This message holds back later messages in all queues of the consumer, even if
        an earlier message of its queue blocks this message, too."""
        return next(
            (entry.sequence for entry in self.uncommitted[rank] if self._could_take(wildcard, entry)), UNBOUNDED
        )

    def _could_take(self, wildcard: Wildcard, entry: Entry) -> bool:
        lane = entry.lane
        queue = lane.queue
        if entry.batch <= self._commit_state.last_committed or queue not in wildcard.queues:
            return False
        if queue.is_paused or self._clients.receivers_of(queue).exclusive not in (None, wildcard):
            return False
        message = entry.message
        if wildcard.selector is not None and message is not None and not wildcard.selector.matches(message):
            return False
        if not entry.group:
            return True
        groups = self._selections.existing_groups_of(queue)
        return groups.is_open_to(wildcard, entry.group) and not groups.has_earlier_delayed(
            entry.group, lane.rank, entry.sequence
        )

    def on_message_accepted(self, entry: Entry) -> None:
        """Note a message in a queue of a wildcard consumer; the message is visible once its batch is durable."""
        self.uncommitted[entry.lane.rank].append(entry)

    def on_committed(self) -> None:
        batch = self._commit_state.last_committed
        for uncommitted in self.uncommitted:
            while uncommitted and uncommitted[0].batch <= batch:
                uncommitted.popleft()

    def _join(self, wildcard: Wildcard, queue: Queue) -> None:
        wildcard.queues[queue] = None
        if queue.has_wildcards:
            queue.memory.queue_bytes += JOIN_BYTES
        self._clients.add_wildcard(wildcard, queue)
        if wildcard.selector is not None or queue.has_groups:
            self._selections.subscribe(wildcard, queue, wildcard.selector)
        # It may skip a message because of another queue: to the audit of the history that looks like a selector.
        self._events.subscribed(wildcard, queue, has_selector=True)

    def _add_uncommitted(self, queues: Iterable[Queue]) -> None:
        commit_state = self._commit_state
        since, committed = commit_state.first_uncommitted_sequence, commit_state.last_committed
        found: list[list[Entry]] = [[] for _ in RANKS]
        for queue in queues:
            for lane in queue.lanes:
                # Requeued messages were dispatched, and so are visible, except those of `move_arrived_to_requeued`.
                found[lane.rank] += (
                    entry
                    for entry in lane.entries_between(since - 1, UNBOUNDED, with_delayed=False)
                    if entry.batch > committed
                )
        for rank, new in enumerate(found):
            if not new:
                continue
            # Some may be known already from a wildcard consumer that has ended.
            everything = {entry.sequence: entry for entry in (*self.uncommitted[rank], *new)}
            self.uncommitted[rank] = deque(entry for _, entry in sorted(everything.items()))
