"""Resident set: loads messages into memory, unloads them, and counts their bytes.

A message may leave memory when the store has it, or is about to get it; then `Entry.message` is None. A message above
the horizon of its lane leaves as soon as it is durable (`free_durable_entries`). eviction.py chooses the messages that
leave when memory is short.
"""

from __future__ import annotations

from sys import maxsize

from truenext.engine.memory import horizon
from truenext.engine.memory.entries_by_lane import EntriesByLane
from truenext.engine.state.causes import ONLY_IN_STORE, KnownCauses, append_cause, causes_size, merge_stored_causes
from truenext.engine.state.memory import ENTRY_BYTES, MemoryBudget, size_of
from truenext.engine.state.pages import damage_error
from truenext.engine.state.queue import NO_ENTRIES, UNBOUNDED, Entry, Lane, Queue
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.entries import put
from truenext.model.batch import NO_CAUSES, Causes
from truenext.model.message import SentMessage

NEVER_EXHAUSTED = (-1, 0, 0)


class ResidentSet:
    def __init__(self, commit_state: CommitState, memory: MemoryBudget) -> None:
        self._commit_state = commit_state
        self._memory = memory
        self.unread_given_up = EntriesByLane()
        """Messages that were given up, and must be read before they can be dead-lettered."""
        self.given_up = EntriesByLane()
        """Messages in memory that were given up, and wait to be dead-lettered."""
        self.lanes_with_unread_in_memory: dict[Lane, None] = {}
        """Lanes with messages that will leave memory once they are durable."""
        self._lanes_with_removed: dict[Lane, None] = {}
        self.queues_over_limit: dict[Queue, None] = {}
        """Queues that may be above their own limits."""
        self.queues_still_over_limit: dict[Queue, None] = {}
        """Queues above their own limits from which no more messages can leave now. `retry_queues_over_limit` and
        `on_page_applied` let these queues be checked again."""
        self.limited_subscriptions: dict[Queue, None] = {}
        """Topic subscriptions that end with their connections, have their own limit, and have messages on disk."""
        self._lanes_awaiting_page: dict[Lane, None] = {}
        """Lanes in which causes must stay in memory until a page was applied."""
        self._first_failure: KnownCauses | None = None
        """Causes of the last message that had none before its failure. Other messages of the same NACK share them."""
        self.nothing_evictable_at = NEVER_EXHAUSTED
        """Value of `Eviction._moment` when all messages that could leave memory had left. Eviction runs again once this
        value has changed."""

    # ---- Loading and unloading ----

    def count_loaded(self, entry: Entry, message: SentMessage) -> None:
        """Count a message that has been loaded into memory."""
        size = size_of(message)
        queue = entry.lane.queue
        self._memory.message_bytes += size
        queue.resident_bytes += size
        queue.resident_count += 1
        if queue.resident_bytes > queue.policy.memory_limit:
            self.queues_over_limit[queue] = None

    def unload(self, entry: Entry) -> None:
        """Remove the body of a message from memory, because the message is settled, or only the store keeps it."""
        if entry.causes is not None:
            self.unload_causes(entry)
        message = entry.message
        if message is not None:
            # size_of, inlined for speed.
            size = len(message.body) + len(message.header) + ENTRY_BYTES
            self._memory.message_bytes -= size
            queue = entry.lane.queue
            queue.resident_bytes -= size
            queue.resident_count -= 1
            entry.message = None
        elif entry.lane.queue.spilled_sizes:
            queue = entry.lane.queue
            size = queue.spilled_sizes.pop(entry.sequence, 0)
            if queue.is_subscription:
                queue.spilled_bytes -= size

    def unload_to_disk(self, entry: Entry, *, is_known: bool) -> None:
        """Remove the body of a message from memory; the message stays in its queue. `is_known` is True if the entry
        stays in memory."""
        queue = entry.lane.queue
        if is_known:
            entry.lane.note_evicted(entry)
        if queue.is_subscription:
            assert entry.message is not None, "it has not left yet"
            size = size_of(entry.message)
            queue.spilled_bytes += size
            if is_known:
                queue.spilled_sizes[entry.sequence] = size
            if queue.policy.memory_limit != maxsize:
                self.limited_subscriptions[queue] = None
        self.unload(entry)

    def count_loaded_from_disk(self, entry: Entry, message: SentMessage) -> None:
        """Count a message that was read from the store."""
        queue = entry.lane.queue
        if queue.spilled_sizes:
            queue.spilled_sizes.pop(entry.sequence, None)
        if queue.is_subscription:
            queue.spilled_bytes -= size_of(message)
        self.count_loaded(entry, message)

    def add_cause(self, entry: Entry, cause: str) -> None:
        """Add the cause that a consumer has given for a failure."""
        known = self._first_failure
        if entry.causes is not None:
            self._set_causes(entry, append_cause(entry.causes, cause))
            return
        if known is None or known.last is not cause:
            # Messages of one NACK share the object.
            known = self._first_failure = append_cause(None, cause)
        self._set_causes(entry, known)

    def unload_causes(self, entry: Entry) -> None:
        """Remove the causes of a message from memory, because the message is settled, or only the store keeps them."""
        self._set_causes(entry, ONLY_IN_STORE)

    def load_causes(self, entry: Entry, causes: Causes) -> None:
        """Add to an entry the causes of its failures, which a page brought from the store. Does nothing if the entry is
        not known to have causes."""
        if entry.causes is not None:
            self._set_causes(entry, merge_stored_causes(entry.causes, causes))

    def _set_causes(self, entry: Entry, causes: KnownCauses) -> None:
        size = causes_size(causes) - causes_size(entry.causes)
        entry.causes = causes
        queue = entry.lane.queue
        self._memory.message_bytes += size
        queue.resident_bytes += size
        if queue.resident_bytes > queue.policy.memory_limit:
            self.queues_over_limit[queue] = None

    def can_unload_causes(self, entry: Entry) -> bool:
        """Return whether the causes of a message may leave memory: the store has them durably, and no page is being
        read that may lack these causes. If a page is being read, eviction is repeated after it was applied."""
        known, lane = entry.causes, entry.lane
        if known is None:
            return True
        if known.unstored is not NO_CAUSES or known.batch > self._commit_state.last_committed:
            return False
        if lane.side_read_count or lane.pending_read is not None:
            self._lanes_awaiting_page[lane] = None
            return False
        return True

    def on_page_applied(self, lane: Lane) -> None:
        """Note that a page of the lane was applied, so that messages and causes kept until then may leave memory."""
        if lane in self._lanes_awaiting_page or lane.queue in self.queues_still_over_limit:
            self._lanes_awaiting_page.pop(lane, None)
            self.queues_over_limit[lane.queue] = None
            self.nothing_evictable_at = NEVER_EXHAUSTED

    def on_requeued(self, entry: Entry) -> None:
        """Note that a message was requeued. A message that a transaction held could not leave memory; from now on, the
        message can."""
        if entry.message is not None:
            self.nothing_evictable_at = NEVER_EXHAUSTED
            queue = entry.lane.queue
            if queue.resident_bytes > queue.policy.memory_limit:
                self.queues_over_limit[queue] = None

    def add(self, entry: Entry, message: SentMessage) -> None:
        """Put a new message at the end of its lane."""
        lane = entry.lane
        queue = lane.queue
        # count_loaded, inlined for speed.
        size = len(message.body) + len(message.header) + ENTRY_BYTES
        memory = self._memory
        memory.message_bytes += size
        queue.resident_bytes += size
        queue.resident_count += 1
        if queue.resident_bytes > queue.policy.memory_limit:
            self.queues_over_limit[queue] = None
        if lane.horizon == UNBOUNDED:
            arrived = lane.arrived
            if arrived is NO_ENTRIES:
                arrived = lane.allocate_arrived()
            arrived.append(entry)
            return
        # All messages above the horizon must be in the store.
        if entry.store_batch is None:
            put(self._commit_state.batch, entry)
        lane.unread += 1
        (lane.unread_in_memory or lane.allocate_unread_in_memory()).append(entry)
        memory.pending_free_bytes += size
        self.lanes_with_unread_in_memory[lane] = None

    def count_run(self, queue: Queue, count: int, size: int) -> None:
        """Count `count` new messages, whose headers and bodies have `size` bytes in all."""
        size += count * ENTRY_BYTES
        self._memory.message_bytes += size
        queue.resident_bytes += size
        queue.resident_count += count
        if queue.resident_bytes > queue.policy.memory_limit:
            self.queues_over_limit[queue] = None

    def await_dead_letter(self, entry: Entry) -> None:
        """Keep a message that was given up, in no lane, until it is dead-lettered. If the message was evicted, its body
        is requested."""
        lane = entry.lane
        if entry.message is None:
            lane.add_unloaded(entry)
            self.unread_given_up.add(entry)
            return
        if entry.sequence <= lane.horizon:
            # No page may load it again.
            lane.horizon_min = max(lane.horizon_min, entry.sequence)
        self.given_up.add(entry)
        self._commit_state.active_work[self] = None

    def awaiting_dead_letter(self) -> list[Entry]:
        """Return the messages that were given up and are not dead-lettered yet. They are in no lane."""
        return [*self.unread_given_up, *self.given_up]

    def on_policy_changed(self, queue: Queue) -> None:
        """Note whether the queue may be above its memory limit, after a change of the limit."""
        if queue.resident_bytes > queue.policy.memory_limit:
            self.queues_over_limit[queue] = None
        if queue.spilled_bytes:
            self.limited_subscriptions[queue] = None

    def remove_entries(self, lane: Lane, entries: list[Entry]) -> None:
        """Remove messages from anywhere in their lane. The gathering batch removes them from the store."""
        for entry in horizon.remove_entries(lane, entries, self._commit_state.batch.number):
            assert entry.message is not None, "unread messages in memory have bodies"
            self._memory.pending_free_bytes -= size_of(entry.message)
        if lane.removed:
            self._lanes_with_removed[lane] = None

    def forget_lane(self, lane: Lane) -> None:
        """Free all memory of a lane that was removed with its queue."""
        self._memory.pending_free_bytes -= sum(
            size_of(entry.message) for entry in lane.unread_in_memory if entry.message is not None
        )
        for entry in (*lane, *lane.unread_in_memory, *lane.unloaded.values()):
            self.unload(entry)
        lane.unloaded.clear()
        if lane.unread_in_memory:
            lane.unread_in_memory.clear()
        lane.clear()
        lane.unread = 0
        lane.pending_read = None
        self.lanes_with_unread_in_memory.pop(lane, None)
        self._lanes_with_removed.pop(lane, None)
        self.limited_subscriptions.pop(lane.queue, None)
        self._lanes_awaiting_page.pop(lane, None)
        self.unread_given_up.pop_lane(lane)
        for entry in self.given_up.pop_lane(lane):
            self.unload(entry)

    def remember_removed(self, entry: Entry) -> None:
        """Note that the gathering batch removes a message that is not in its lane, so that no page adds it."""
        entry.lane.remember_removed(entry.sequence, self._commit_state.batch.number)
        self._lanes_with_removed[entry.lane] = None

    def forget_selected(self, entry: Entry) -> None:
        """Forget a selected message that is settled. The gathering batch removes it from the store."""
        lane = entry.lane
        batch = self._commit_state.batch.number
        assert lane.selected is not None, "a consumer had a selector"
        if lane.selected.entries.pop(entry.sequence, None) is not None and entry.store_batch not in (None, batch):
            self.remember_removed(entry)

    def move_horizon(self, lane: Lane, fresh: list[Entry], excluded: int, up_to: int, as_of: int) -> None:
        memory = self._memory
        in_page, in_memory = horizon.apply_page(lane, fresh, excluded, up_to, as_of)
        for entry in in_page + in_memory:
            assert entry.message is not None, "unread messages in memory have bodies"
            memory.pending_free_bytes -= size_of(entry.message)
        for entry in in_page:
            self.unload_to_disk(entry, is_known=False)
        last = fresh[-1].message if fresh else None
        # Unread messages are younger than the page.
        lane.evicted_ms = last.arrived_ms if last is not None and lane.unread else 0
        if up_to == UNBOUNDED and lane.unread:
            raise damage_error(
                lane,
                f"the store has a different number of messages than it has counted: the difference is {lane.unread}",
            )

    # ---- Unloading of durable messages ----

    def free_durable_entries(self) -> None:
        """Unload messages above horizons that the last committed batch has made durable."""
        if self.queues_still_over_limit:
            self.retry_queues_over_limit()
        for lane in list(self.lanes_with_unread_in_memory):
            self.free_durable_in_lane(lane)
        self.forget_durable_removals()

    def retry_queues_over_limit(self) -> None:
        """Let the next eviction check again the queues that were still above their limits after the last eviction.
        Called when a batch is durable, or when the gathering batch can take evicted messages again."""
        self.queues_over_limit.update(self.queues_still_over_limit)
        self.queues_still_over_limit.clear()

    def forget_durable_removals(self) -> None:
        """Forget removed messages whose removal is durable, in lanes of which no page is being read. Called after each
        commit, and once a second, because a read may end after the last commit."""
        for lane in list(self._lanes_with_removed):
            lane.forget_durable_removals(self._commit_state.last_committed)
            if not lane.removed:
                del self._lanes_with_removed[lane]

    def free_durable_in_lane(self, lane: Lane) -> None:
        """Unload the durable messages above the horizon of a lane, unless a page of the lane is being read."""
        for entry in horizon.pop_durable(lane, self._commit_state.last_committed):
            assert entry.message is not None, "unread messages in memory have bodies"
            self._memory.pending_free_bytes -= size_of(entry.message)
            self.unload_to_disk(entry, is_known=False)
        if not lane.unread_in_memory:
            self.lanes_with_unread_in_memory.pop(lane, None)

    def pin(self, lane: Lane) -> None:
        """Keep all messages of the lane that are in memory there until `unpin`."""
        lane.is_pinned = True

    def unpin(self, lane: Lane) -> None:
        lane.is_pinned = False
        self.free_durable_in_lane(lane)
        # Messages that were to leave meanwhile can leave now.
        self.queues_over_limit[lane.queue] = None
        self.nothing_evictable_at = NEVER_EXHAUSTED

    def load_unread_in_memory(self, lane: Lane) -> None:
        """Put all messages of `unread_in_memory`, which were about to leave memory, back into the lane."""
        for entry in lane.unread_in_memory:
            assert entry.message is not None, "unread messages in memory have bodies"
            self._memory.pending_free_bytes -= size_of(entry.message)
        horizon.load_unread_in_memory(lane)
