"""Page reader: requests pages from the store, and loads their messages into memory.

The engine does not read from the store. The effects of a turn contain its requests for pages; the broker passes the
pages in later.

    request_page    requests the next page of a lane, if consumers need it now or soon; the page moves the horizon up
    request_body    requests a page with the body of a selected message, and the messages after it
    load_entry      makes the entry of a message on a page
"""

from __future__ import annotations

from itertools import islice

from truenext.engine.memory.delays import DelayedEntries
from truenext.engine.memory.horizon import is_stored
from truenext.engine.memory.resident_set import ResidentSet
from truenext.engine.state.causes import ONLY_IN_STORE
from truenext.engine.state.memory import MemoryBudget, add_sequence
from truenext.engine.state.pages import PageMessage, PageResult, SideRead, StoreRead, damage_error
from truenext.engine.state.queue import UNBOUNDED, Entry, Lane, is_undeliverable
from truenext.model.batch import DUE_NEVER, NO_CAUSES, NO_MARK, Causes
from truenext.model.limits import PAGE_BYTES, PAGE_BYTES_SHORT, PAGE_SIZE_SHORT
from truenext.model.message import SentMessage

GIVEN_UP_LANES_PER_TURN = 100
"""Maximum number of lanes in which one turn requests the bodies of messages that were given up and evicted."""


class LaneRead(StoreRead):
    """Request for the next page of a lane. Applying the page moves the lane's horizon up."""

    __slots__ = ()

    is_for_consumers = True


class BodyRead(SideRead):
    """Request for the body of a selected message. Bodies of later messages may be loaded, too."""

    __slots__ = ("entry",)

    is_for_consumers = True

    def __init__(self, page_reader: PageReader, entry: Entry) -> None:
        super().__init__(page_reader.on_body_read, entry.lane, entry.sequence - 1, PAGE_SIZE_SHORT, PAGE_BYTES_SHORT)
        self.entry = entry


class PageReader:
    def __init__(
        self, memory: MemoryBudget, resident: ResidentSet, delays: DelayedEntries, *, redelivered_below: int
    ) -> None:
        """Messages with sequences below `redelivered_below` may have been dispatched without a record of the
        dispatch."""
        self._memory = memory
        self._resident = resident
        self._delayed_entries = delays
        self._redelivered_below = redelivered_below
        self._unsent_reads: list[StoreRead] = []
        self._exhausted_entries: list[Entry] = []
        self._newly_delayed: list[Entry] = []
        """Messages of pages that wait for their next try, until `take_delayed`."""

    def request_page(self, lane: Lane) -> None:
        """Request the next page of a lane, if consumers need it now or soon. `lane` is the last lane that a dispatch
        has reached."""
        if lane.pending_read is not None:
            return
        head = lane.head()
        queue = lane.queue
        is_short = queue.resident_bytes + PAGE_BYTES > queue.policy.memory_limit
        if self._memory.bytes_over_limit + PAGE_BYTES > 0:
            is_short = self._memory.is_page_space_short = True
        if head is not None and head.message is None:
            after_sequence = head.sequence - 1
        elif lane.needs_page and (
            head is None or (not is_short and len(lane.arrived) < queue.policy.page_size // 2 and not lane.requeued)
        ):
            after_sequence = lane.horizon
        else:
            return
        if is_short:
            # Messages that are not dispatched at once may have to be evicted again.
            self._request_read(lane, after_sequence, min(queue.policy.page_size, PAGE_SIZE_SHORT), PAGE_BYTES_SHORT)
        else:
            self._request_read(lane, after_sequence, queue.policy.page_size, PAGE_BYTES)

    def take_reads(self) -> list[StoreRead]:
        """Return and forget the requests for pages to be read from the store."""
        if self._resident.unread_given_up:
            self._request_given_up()
        reads, self._unsent_reads = self._unsent_reads, []
        return reads

    def _request_given_up(self) -> None:
        for lane, given_up in islice(self._resident.unread_given_up.by_lane(), GIVEN_UP_LANES_PER_TURN):
            for entry in islice(given_up, PAGE_SIZE_SHORT):
                if lane.selected is not None and entry.sequence in lane.selected.entries:
                    self.request_body(entry)
                elif lane.pending_read is None:
                    self._request_read(lane, entry.sequence - 1, 1, PAGE_BYTES)

    def request_body(self, entry: Entry) -> None:
        """Request the body of a selected or requeued message, unless this body is requested already."""
        lane = entry.lane
        assert lane.selected is not None, "the lane has selected entries"
        if entry.sequence not in lane.selected.body_reads:
            lane.selected.body_reads = add_sequence(lane.selected.body_reads, entry.sequence)
            read = BodyRead(self, entry)
            self._unsent_reads.append(read)

    def on_body_read(self, read: BodyRead, page: PageResult) -> None:
        """Load the requested body, and bodies after it.

        Raises: StoreError if the store lacks the message.
        """
        lane, target = read.lane, read.entry
        if lane.selected is not None:
            lane.selected.body_reads.discard(target.sequence)
        is_found = lane.unloaded.get(target.sequence) is not target
        for found in page.messages:
            entry = lane.unloaded.pop(found.sequence, None)
            if entry is not None:
                is_found |= entry is target
                if self._restore_body(entry, found) and entry.message is not None:
                    self._exhausted_entries.append(entry)
        if not is_found:
            raise damage_error(lane, "a message is missing")

    def _request_read(self, lane: Lane, after_sequence: int, limit: int, size_max: int) -> None:
        read = lane.pending_read = LaneRead(self.on_page_read, lane, after_sequence, limit, size_max)
        self._unsent_reads.append(read)

    def on_page_read(self, read: LaneRead, page: PageResult) -> None:
        """Apply a page of a lane. All batches that the page includes are durable.

        Raises: StoreError if the store lacks messages that it should have.
        """
        lane = read.lane
        if lane.pending_read is not read:
            # Meanwhile the horizon moved down, or all unread messages were loaded from memory.
            self._resident.free_durable_in_lane(lane)
            return
        lane.pending_read = None
        if not (page.messages or page.is_end):
            raise damage_error(lane, "no message was read, although the store says that there are more")
        up_to = UNBOUNDED if page.is_end else page.messages[-1].sequence
        fresh: list[Entry] = []
        excluded = 0
        for found in page.messages:
            if found.sequence in lane.unloaded:
                entry = lane.unloaded.pop(found.sequence)
                was_awaiting = self._restore_body(entry, found)
                if was_awaiting and entry.message is not None:
                    self.collect_exhausted(entry)
            elif lane.is_only_in_store(found.sequence):
                if found.message is None:
                    excluded += 1
                    continue
                entry = self.load_entry(lane, found, found.message)
                if is_undeliverable(lane.queue, entry.attempts, entry.due_us):
                    excluded += 1
                    self.collect_exhausted(entry)
                elif self._delayed_entries.restore(entry, found.mark.due_ms):
                    excluded += 1
                    self._delay_without_body(entry)
                    self._newly_delayed.append(entry)
                else:
                    fresh.append(entry)
                    if entry.due_us:
                        # Only its body may be evicted: the history must be told when it is due.
                        lane.horizon_min = max(lane.horizon_min, entry.sequence)
                        self._newly_delayed.append(entry)
        # A message written and evicted after the page was read is on the next page.
        if any(
            read.after_sequence < sequence <= up_to and is_stored(entry, page.as_of)
            for sequence, entry in lane.unloaded.items()
        ):
            raise damage_error(lane, "a message is missing")
        if up_to > lane.horizon:
            self._resident.move_horizon(lane, fresh, excluded, up_to, page.as_of)
        self._resident.free_durable_in_lane(lane)

    def collect_exhausted(self, entry: Entry) -> None:
        """Collect a message of a page that has failed too often and is to be dead-lettered. Such a message is in no
        lane."""
        self._exhausted_entries.append(entry)
        self._resident.remember_removed(entry)

    def take_exhausted(self) -> list[Entry]:
        """Return the messages to be dead-lettered that were collected since the last call."""
        failed, self._exhausted_entries = self._exhausted_entries, []
        return failed

    def take_delayed(self) -> list[Entry]:
        """Return the messages waiting for their next try that were collected since the last call."""
        delayed, self._newly_delayed = self._newly_delayed, []
        return delayed

    def collect_delayed(self, entry: Entry) -> None:
        """Collect a message of a page that waits for its next try."""
        self._newly_delayed.append(entry)

    def delay_selected(self, entry: Entry) -> None:
        """Move a message from `loaded_early` to `Lane.delayed`, and evict its body; other messages are dispatched
        meanwhile."""
        lane = entry.lane
        assert lane.selected is not None, "it was plucked"
        del lane.selected.loaded_early[entry.sequence]
        entry.is_out_of_lane = True
        self._resident.unload_to_disk(entry, is_known=True)
        lane.delay(entry)
        self._newly_delayed.append(entry)

    def _delay_without_body(self, entry: Entry) -> None:
        """Put a message of a page into `Lane.delayed` without its body, because it may wait for days."""
        lane = entry.lane
        self._resident.unload_to_disk(entry, is_known=True)
        lane.delay(entry)
        lane.horizon_min = max(lane.horizon_min, entry.sequence)

    def load_entry(self, lane: Lane, found: PageMessage, message: SentMessage) -> Entry:
        """Return a new entry for a message that was only in the store."""
        attempts, deliveries, due_ms, was_lost = found.mark
        if found.sequence < self._redelivered_below:
            deliveries = max(deliveries, 1)
        entry = Entry(
            sequence=found.sequence,
            message=message,
            lane=lane,
            batch=0,
            persistent=message.persistent,
            store_batch=0,
            deliveries=deliveries,
            attempts=attempts,
            has_mark=found.mark != NO_MARK,
            due_us=DUE_NEVER if due_ms == DUE_NEVER else 0,
            group=message.group,
            content_number=found.content_number,
            was_lost=was_lost,
        )
        if found.causes is not NO_CAUSES:
            entry.causes = ONLY_IN_STORE
        self._load_message(entry, message, found.causes)
        return entry

    def _load_message(self, entry: Entry, message: SentMessage, causes: Causes) -> None:
        self._resident.count_loaded_from_disk(entry, message)
        self._resident.load_causes(entry, causes)

    def _restore_body(self, entry: Entry, found: PageMessage) -> bool:
        """Restore the body of an entry, unless its record is damaged. Returns True if the entry was waiting to become a
        dead letter. Such an entry is in no lane, and is dead-lettered even if the policy has changed."""
        was_awaiting = self._resident.unread_given_up.discard(entry)
        if found.message is None:
            entry.lane.forget_requeued(entry)
        else:
            entry.message = found.message
            self._load_message(entry, found.message, found.causes)
        return was_awaiting
