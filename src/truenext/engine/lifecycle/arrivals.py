"""Arrival of messages in queues: gives each its sequence, and decides when it is visible and whether it is stored.

A message is stored if it is persistent and its queue is not temporary. It is visible:

    sent alone, or a copy               not stored                      at once
                                        stored, queue is `concurrent`   at once, while its write is in flight
                                        stored                          with the gathering batch
    sent in a transaction               the COMMIT stores nothing       at once
                                        the COMMIT stores something     with the gathering batch
    moved, failed, due, or a report     stored or not                   with the gathering batch, which also removes the
                                                                        message from its former queue
    reply to a control request          never stored                    with the batch of the requested change

No message is visible before its sequence is reserved durably. Source: docs/contract.md
"""

from __future__ import annotations

from collections.abc import Sequence

from truenext.engine.memory.resident_set import ResidentSet
from truenext.engine.memory.timers import Timers
from truenext.engine.queues.queues import Queues
from truenext.engine.queues.topics import RouteAhead
from truenext.engine.queues.wildcards import Wildcards
from truenext.engine.selecting.selections import Selections
from truenext.engine.state.queue import NO_ENTRIES, UNBOUNDED, Entry, Queue
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.entries import NO_CONTENTS, ContentNumbers, put, put_run, put_shared_content
from truenext.model.destination import Destination, DestinationKind, parse_stored_address
from truenext.model.message import SentMessage
from truenext.model.policy import StoreAndDispatch
from truenext.model.record import timer_key

_CONCURRENT = StoreAndDispatch.CONCURRENT

SENT_ALONE = -1
"""Value of `batch` in `Arrivals.accept` for a message whose visibility depends on no other message. A stored message is
visible once it is durable, or at once with the policy `concurrent`; any other message is visible at once."""

EXPIRY_ROUND_MS = 1000
"""Timers of expiry are due at multiples of this many milliseconds, so that many messages share a timer."""

_DUE_MAX = (2**63 - 1) // EXPIRY_ROUND_MS * EXPIRY_ROUND_MS


class Arrivals:
    def __init__(
        self,
        commit_state: CommitState,
        resident: ResidentSet,
        selections: Selections,
        wildcards: Wildcards,
        queues: Queues,
        timers: Timers,
    ) -> None:
        """`timers` are the timers of expiry."""
        self._commit_state = commit_state
        self._events = commit_state.events
        self._resident = resident
        self._selections = selections
        self._wildcards = wildcards
        self._queues = queues
        self._timers = timers

    def accept(
        self, queue: Queue, message: SentMessage, batch: int = SENT_ALONE, contents: ContentNumbers = NO_CONTENTS
    ) -> bool:
        """Accept a new message into a queue. Returns whether the message is stored.

        The message is visible when `batch` is durable, at once if `batch` is 0. SENT_ALONE is for a message that is
        sent alone, and for each copy of a message. `contents` is the result of `share_content`.
        """
        commit_state = self._commit_state
        sequence = commit_state.next_sequence
        commit_state.next_sequence = sequence + 1
        is_stored = message.persistent and not queue.is_temporary
        if batch == SENT_ALONE:
            batch = commit_state.batch.number if is_stored and queue.policy.store_and_dispatch is not _CONCURRENT else 0
        if sequence >= commit_state.sequence_limit:
            batch = max(batch, commit_state.reserving_batch(sequence))
        message.arrived_ms = commit_state.now_ms
        entry = Entry(sequence, message, queue.lane_of(message), batch, is_stored, None)
        group = message.group
        if group:
            entry.group = group
            if not queue.has_groups:
                self._selections.start_groups(queue)
        if contents is not NO_CONTENTS:
            if is_stored:
                entry.content_number = contents.persistent
            elif entry.lane.horizon != UNBOUNDED:
                entry.content_number = contents.transient
        if is_stored:
            put(commit_state.batch, entry)
        queue.counts.accepted += 1
        self._resident.add(entry, message)
        if queue.observer is not None:
            queue.observer.on_arrived(entry)
        if message.expires_ms and not queue.is_temporary:
            self._timers.set(_expiry_timer(entry, message.expires_ms))
        events = self._events
        if events.accepting_queue is queue and events.accepting_batch == batch and not group:
            events.block_entries.append(entry)
        else:
            events.accepted(entry)
        if batch:
            if queue.has_wildcards and batch > commit_state.last_committed:
                self._wildcards.on_message_accepted(entry)
            if batch == commit_state.batch.number:
                commit_state.is_batch_awaited = True
            commit_state.waiting_queues.setdefault(batch, {})[queue] = None
        else:
            commit_state.touched_queues[queue] = None
        return is_stored

    def may_accept_run(self, queue: Queue, count: int) -> bool:
        """Return whether `accept_run` may accept `count` messages without group and expiry. It may not if the queue is
        temporary, has selectors, groups or wildcard consumers, or has unread messages, or if sequences must be reserved
        first."""
        commit_state = self._commit_state
        return (
            queue.observer is None
            and not queue.is_temporary
            and not queue.has_wildcards
            and commit_state.next_sequence + count <= commit_state.sequence_limit
            and all(lane.horizon == UNBOUNDED for lane in queue.lanes)
        )

    def accept_run(self, queue: Queue, messages: Sequence[SentMessage]) -> bool:
        """Accept new messages with the same effect as one call of `accept` for each. All must be persistent, or all
        transient. Call this only if `may_accept_run` is True. Returns whether the messages are stored."""
        commit_state = self._commit_state
        now_ms = commit_state.now_ms
        sequence = commit_state.next_sequence
        commit_state.next_sequence = sequence + len(messages)
        is_stored = messages[0].persistent
        batch = commit_state.batch.number if is_stored and queue.policy.store_and_dispatch is not _CONCURRENT else 0
        entries: list[Entry] = []
        size = 0
        priority = -1
        for message in messages:
            message.arrived_ms = now_ms
            if message.priority != priority:
                priority = message.priority
                lane = queue.lane_of(message)
                arrived = lane.allocate_arrived() if lane.arrived is NO_ENTRIES else lane.arrived
            entry = Entry(sequence, message, lane, batch, is_stored, None)
            arrived.append(entry)
            entries.append(entry)
            size += len(message.body) + len(message.header)
            sequence += 1
        if is_stored:
            put_run(commit_state.batch, entries)
        queue.counts.accepted += len(entries)
        self._resident.count_run(queue, len(entries), size)
        events = self._events
        events.accepted(entries[0])
        if events.accepting_queue is queue:
            # Without a history nothing is recorded.
            events.block_entries.extend(entries[1:])
        if batch:
            commit_state.is_batch_awaited = True
            commit_state.waiting_queues.setdefault(batch, {})[queue] = None
        else:
            commit_state.touched_queues[queue] = None
        return is_stored

    def accept_copies(self, queues: Sequence[Queue], message: SentMessage) -> bool:
        """Accept a message into several queues, in one batch. Each copy is visible as if it were the only one. Returns
        whether any copy is stored."""
        contents = self.share_content(message, queues)
        is_stored = False
        for queue in queues:
            is_stored |= self.accept(queue, message, SENT_ALONE, contents)
        return is_stored

    def share_content(self, message: SentMessage, queues: Sequence[Queue]) -> ContentNumbers:
        """Put the content of a message into the gathering batch, once for all of these queues that store it. Returns
        the content's numbers, for `accept`."""
        if len(queues) < 2:
            return NO_CONTENTS
        message.arrived_ms = self._commit_state.now_ms
        return put_shared_content(self._commit_state.batch, message, queues, self._commit_state.next_sequence)

    def accept_with_batch(self, name: str, to: str, message: SentMessage, ahead: RouteAhead | None = None) -> int:
        """Accept a scheduled send that is due, or a report. If `to` is empty, the queue `name` gets the message; else
        all queues that get messages sent to the address `to`. All copies are visible with the gathering batch. Returns
        the number of copies."""
        needed = self._queues.ensure
        if to:
            queues = self._queues.queues_for_copies(parse_stored_address(to), message, needed, ahead)
        else:
            queues = [needed(Destination(DestinationKind.QUEUE, name))]
        contents = self.share_content(message, queues)
        for queue in queues:
            self.accept(queue, message, self._commit_state.batch.number, contents)
        return len(queues)


def _expiry_timer(entry: Entry, expires_ms: int) -> bytes:
    due_ms = min(-(-expires_ms // EXPIRY_ROUND_MS) * EXPIRY_ROUND_MS, _DUE_MAX)
    return timer_key(due_ms, entry.lane.key, entry.sequence)
