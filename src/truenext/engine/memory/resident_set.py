"""Counts the messages in memory, one by one, as they come and go.

What the store has, or is about to get, may leave; `Entry.message` says whether it has. What is above the horizon of its
lane leaves by itself once it is durable (`free_durable_entries`). What leaves because memory is short: eviction.py
"""

from __future__ import annotations

from sys import maxsize

from truenext.engine.memory import horizon
from truenext.engine.state.causes import ONLY_IN_STORE, KnownCauses, append_cause, causes_size, merge_stored_causes
from truenext.engine.state.memory import ENTRY_BYTES, MemoryBudget, size_of
from truenext.engine.state.pages import damage_error
from truenext.engine.state.queue import NO_ENTRIES, UNBOUNDED, Entry, Lane, Queue
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.entries import put
from truenext.model.batch import NO_CAUSES, Causes
from truenext.model.message import SentMessage

NEVER_EXHAUSTED = (-1, 0)


class ResidentSet:
    def __init__(self, commit_state: CommitState, memory: MemoryBudget) -> None:
        self._commit_state = commit_state
        self._memory = memory
        self._unread_dead_letters: list[Entry] = []
        """Failed too often, and to be read before they can move to the dead-letter queue."""
        self.lanes_with_unread_in_memory: dict[Lane, None] = {}
        """Lanes from which something leaves once it is durable."""
        self._lanes_with_removed: dict[Lane, None] = {}
        self.queues_over_limit: dict[Queue, None] = {}
        """Queues that may be over their own limit."""
        self.queues_still_over_limit: dict[Queue, None] = {}
        """Queues that are, from which more can leave once a write under way is durable."""
        self.limited_subscriptions: dict[Queue, None] = {}
        """Subscriptions that end with their connections, have a limit of their own, and have something on disk."""
        self._lanes_awaiting_page: dict[Lane, None] = {}
        """Lanes in which causes stay in memory as long as a page is read."""
        self.nothing_evictable_at = NEVER_EXHAUSTED
        """The last batch, and what was used, when everything that could leave had left."""

    # ---- What comes and goes, message by message ----

    def count_loaded(self, entry: Entry, message: SentMessage) -> None:
        """A message is in memory, in its lane or held."""
        size = size_of(message)
        queue = entry.lane.queue
        self._memory.message_bytes += size
        queue.resident_bytes += size
        queue.resident_count += 1
        if queue.resident_bytes > queue.policy.memory_limit:
            self.queues_over_limit[queue] = None

    def unload(self, entry: Entry) -> None:
        """A message is done with, or only the store has it from here on."""
        if entry.causes is not None:
            self.unload_causes(entry)
        message = entry.message
        if message is not None:
            # size_of, without the call.
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
        """A message stays in its queue, and only the store has it from here on, or all of it but its place."""
        queue = entry.lane.queue
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
        """A message that only the store had is in memory again."""
        queue = entry.lane.queue
        if queue.spilled_sizes:
            queue.spilled_sizes.pop(entry.sequence, None)
        if queue.is_subscription:
            queue.spilled_bytes -= size_of(message)
        self.count_loaded(entry, message)

    def add_cause(self, entry: Entry, cause: str) -> None:
        """A consumer that has failed with a message says why."""
        self._set_causes(entry, append_cause(entry.causes, cause))

    def unload_causes(self, entry: Entry) -> None:
        """Only the store has them from here on, or the message is done with."""
        self._set_causes(entry, ONLY_IN_STORE)

    def load_causes(self, entry: Entry, causes: Causes) -> None:
        """A page shows a message whose causes are not all in memory."""
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
        """No page that was read before the store had them can bring this message back. If one may, whoever makes
        messages leave is to ask again after that."""
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
        """Nothing of it is needed any more."""
        if lane in self._lanes_awaiting_page:
            del self._lanes_awaiting_page[lane]
            self.queues_over_limit[lane.queue] = None
            self.nothing_evictable_at = NEVER_EXHAUSTED

    def on_requeued(self, entry: Entry) -> None:
        """A message is in its lane again; if a transaction had it, it can leave memory only now."""
        if entry.message is not None:
            self.nothing_evictable_at = NEVER_EXHAUSTED
            queue = entry.lane.queue
            if queue.resident_bytes > queue.policy.memory_limit:
                self.queues_over_limit[queue] = None

    def add(self, entry: Entry, message: SentMessage) -> None:
        """Give a new message its place in its lane."""
        lane = entry.lane
        queue = lane.queue
        # `count_loaded`, without the calls.
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
        # Above the horizon nothing may be that the store does not get.
        if entry.store_batch is None:
            put(self._commit_state.batch, entry)
        lane.unread += 1
        (lane.unread_in_memory or lane.allocate_unread_in_memory()).append(entry)
        memory.pending_free_bytes += size
        self.lanes_with_unread_in_memory[lane] = None

    def await_dead_letter(self, entry: Entry) -> None:
        """A message that has left memory is to be dead-lettered, once it is read."""
        entry.lane.add_unloaded(entry)
        self._unread_dead_letters.append(entry)

    def awaiting_dead_letter(self) -> list[Entry]:
        """Those that are not read yet; they stand in no lane."""
        return self._unread_dead_letters[:]

    def stop_awaiting_dead_letter(self, entry: Entry) -> bool:
        """It is read. True if it is to be dead-lettered."""
        remaining = [one for one in self._unread_dead_letters if one is not entry]
        was_awaiting = len(remaining) < len(self._unread_dead_letters)
        self._unread_dead_letters = remaining
        return was_awaiting

    def awaits_dead_letter(self, entry: Entry) -> bool:
        return any(one is entry for one in self._unread_dead_letters)

    def on_policy_changed(self, queue: Queue) -> None:
        """Its limit may be another."""
        if queue.resident_bytes > queue.policy.memory_limit:
            self.queues_over_limit[queue] = None
        if queue.spilled_bytes:
            self.limited_subscriptions[queue] = None

    def remove_entries(self, lane: Lane, entries: list[Entry]) -> None:
        """Messages leave their lane out of their turn; the gathering batch removes them."""
        for entry in horizon.remove_entries(lane, entries, self._commit_state.batch.number):
            assert entry.message is not None, "what is recent has not left memory yet"
            self._memory.pending_free_bytes -= size_of(entry.message)
        if lane.removed:
            self._lanes_with_removed[lane] = None

    def forget_lane(self, lane: Lane) -> None:
        """A lane has ended with its queue: nothing of it is in memory, or will be."""
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
        self._unread_dead_letters = [entry for entry in self._unread_dead_letters if entry.lane is not lane]

    def remember_removed(self, entry: Entry) -> None:
        """A message of the page that came last did not come into its lane; the gathering batch removes it."""
        entry.lane.remember_removed(entry.sequence, self._commit_state.batch.number)
        self._lanes_with_removed[entry.lane] = None

    def forget_selected(self, entry: Entry) -> None:
        """A message that was taken out of its turn is done with; the gathering batch removes it."""
        lane = entry.lane
        batch = self._commit_state.batch.number
        assert lane.selected is not None, "somebody had a selector"
        if lane.selected.entries.pop(entry.sequence, None) is not None and entry.store_batch not in (None, batch):
            lane.remember_removed(entry.sequence, batch)
            self._lanes_with_removed[lane] = None

    def move_horizon(self, lane: Lane, fresh: list[Entry], excluded: int, up_to: int, as_of: int) -> None:
        memory = self._memory
        in_page, in_memory = horizon.apply_page(lane, fresh, excluded, up_to, as_of)
        for entry in in_page + in_memory:
            assert entry.message is not None, "what is recent has not left memory yet"
            memory.pending_free_bytes -= size_of(entry.message)
        for entry in in_page:
            self.unload_to_disk(entry, is_known=False)
        if up_to == UNBOUNDED and lane.unread:
            raise damage_error(lane, f"the count of its messages and what is in it differ by {lane.unread}")

    # ---- What leaves by itself ----

    def free_durable_entries(self) -> None:
        """A batch is durable, and so is whatever was written with it."""
        self.queues_over_limit.update(self.queues_still_over_limit)
        self.queues_still_over_limit.clear()
        for lane in list(self.lanes_with_unread_in_memory):
            self.free_durable_in_lane(lane)
        self.forget_durable_removals()

    def forget_durable_removals(self) -> None:
        """What durable batches have removed, and no page that is being read may show. To be called now and then as
        well: the last such page may come when nothing more is written.
        """
        for lane in list(self._lanes_with_removed):
            lane.forget_durable_removals(self._commit_state.last_committed)
            if not lane.removed:
                del self._lanes_with_removed[lane]

    def free_durable_in_lane(self, lane: Lane) -> None:
        """The same for one lane, of which no page is being read any more."""
        for entry in horizon.pop_durable(lane, self._commit_state.last_committed):
            assert entry.message is not None, "what is recent has not left memory yet"
            self._memory.pending_free_bytes -= size_of(entry.message)
            self.unload_to_disk(entry, is_known=False)
        if not lane.unread_in_memory:
            self.lanes_with_unread_in_memory.pop(lane, None)

    def pin(self, lane: Lane) -> None:
        """Nothing leaves its memory until `unpin`."""
        lane.is_pinned = True

    def unpin(self, lane: Lane) -> None:
        lane.is_pinned = False
        self.free_durable_in_lane(lane)
        # Whatever could not leave meanwhile can.
        self.queues_over_limit[lane.queue] = None
        self.nothing_evictable_at = NEVER_EXHAUSTED

    def load_unread_in_memory(self, lane: Lane) -> None:
        """What was about to leave the lane is needed now."""
        for entry in lane.unread_in_memory:
            assert entry.message is not None, "what is recent has not left memory yet"
            self._memory.pending_free_bytes -= size_of(entry.message)
        horizon.load_unread_in_memory(lane)
