"""Selections (scans for selectors, and message groups) of all queues, and the order in which scans continue.

A turn tests one slice of one queue. For all queues together, only one page is read at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from truenext.engine.memory.delays import DelayedEntries
from truenext.engine.memory.horizon import load_early
from truenext.engine.memory.reading import PageReader
from truenext.engine.memory.resident_set import ResidentSet
from truenext.engine.selecting.groups import GroupOwnership
from truenext.engine.selecting.scan import ComparisonBudget, ConsumerScans, QueueScan
from truenext.engine.selecting.selecting import QueueSelection, bytes_to_join
from truenext.engine.state.consumer import BrokerConsumer
from truenext.engine.state.pages import PageMessage, PageResult, SideRead, damage_error
from truenext.engine.state.queue import UNBOUNDED, Entry, Lane, Queue, is_undeliverable
from truenext.engine.writing.commit_state import BackgroundTask
from truenext.engine.writing.engine_state import EngineState
from truenext.model.limits import COMPARISONS_NS_PER_PASS, SCAN_BYTES, SCAN_NS_PER_TURN, SCAN_PAGE_SIZE
from truenext.model.selector import Selector


class ScanRead(SideRead):
    """Read of a page. Its messages are then compared with the selectors of the queue's consumers."""

    __slots__ = ("horizon_rise_count",)

    is_for_consumers = True

    def __init__(self, selections: Selections, lane: Lane, after_sequence: int) -> None:
        limit = min(lane.queue.policy.page_size, SCAN_PAGE_SIZE)
        super().__init__(selections.on_page_read, lane, after_sequence, limit, SCAN_BYTES)
        assert lane.selected is not None, "a consumer has a selector"
        self.horizon_rise_count = lane.selected.horizon_rise_count
        lane.selected.scan_read_count += 1


class Selections(BackgroundTask):
    def __init__(
        self,
        state: EngineState,
        delays: DelayedEntries,
        resident: ResidentSet,
        page_reader: PageReader,
    ) -> None:
        self._commit_state = state.commit_state
        self._memory = state.memory
        self._delayed_entries = delays
        self._resident = resident
        self._page_reader = page_reader
        self._clients = state.clients
        self.scans = ConsumerScans()
        self._arrival_budget = ComparisonBudget(COMPARISONS_NS_PER_PASS)
        self._scan_ns = SCAN_NS_PER_TURN
        self.by_queue: dict[Queue, QueueSelection] = {}
        """Selections of the queues that have groups, or consumers with selectors."""
        self._active: dict[QueueSelection, None] = {}
        """Selections with messages to test. The selection served last is at the end."""
        self._awaiting_page: dict[QueueSelection, None] = {}
        """Selections that need a page, and wait until the current read has ended."""
        self._current_read: ScanRead | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._active)

    def begin_pass(self) -> None:
        """Renew the budget for comparing messages that arrive or are requeued until the next turn."""
        if self.by_queue:
            self._arrival_budget.renew()

    def subscribe(self, consumer: BrokerConsumer, queue: Queue, selector: Selector | None) -> None:
        """Register a consumer with a selector, or any consumer of a queue with groups."""
        selection = self._get_or_create(queue)
        selection.add(consumer, selector)
        self.activate_selection(selection)

    def start_groups(self, queue: Queue) -> None:
        """Begin to track the groups of a queue, at its first message with a group in this run."""
        selection = self._get_or_create(queue)
        selection.start_groups(self._clients.receivers_of(queue).all())
        self.activate_selection(selection)

    def _get_or_create(self, queue: Queue) -> QueueSelection:
        selection = self.by_queue.get(queue)
        if selection is None:
            selection = self.by_queue[queue] = queue.observer = QueueSelection(
                queue, self._memory, self.scans, self._arrival_budget
            )
        return selection

    def scan_of(self, consumer: BrokerConsumer, queue: Queue) -> QueueScan | None:
        """Return the scan of a consumer in a queue. None if the consumer has no selector and the queue no groups."""
        return self.scans.find_scan(consumer, queue)

    def bytes_to_join(self, queue: Queue, selector: Selector) -> int:
        """Return the bytes that one more consumer with this selector adds to a queue."""
        return bytes_to_join(queue, self.by_queue.get(queue), selector)

    def existing_groups_of(self, queue: Queue) -> GroupOwnership:
        """Return the groups of a queue, which must have had a message with a group."""
        return self.by_queue[queue].existing_groups

    def owns_groups(self, consumer: BrokerConsumer, queue: Queue) -> bool:
        return queue.has_groups and self.existing_groups_of(queue).owns_any(consumer)

    def remove_consumer(self, consumer: BrokerConsumer, queue: Queue) -> None:
        selection = self.by_queue.get(queue)
        if selection is not None:
            selection.remove(consumer)
            if selection.groups is not None:
                selection.groups.on_unsubscribed(consumer)
            if not selection.scans and not _needs_groups(queue):
                self.drop_selection(queue)

    def drop_selection(self, queue: Queue) -> None:
        """Drop the selection of a queue that has neither selectors nor groups any more, or was removed."""
        selection = self.by_queue.pop(queue, None)
        if selection is not None:
            for consumer in self._clients.receivers_of(queue).all():
                self.scans.remove(consumer, queue)
            self._active.pop(selection, None)
            self._awaiting_page.pop(selection, None)
            selection.close()

    def activate_queue(self, queue: Queue) -> None:
        """Let the scans of a queue continue in the next steps, if they have something to test and need no page."""
        selection = self.by_queue.get(queue)
        if selection is not None:
            self.activate_selection(selection)

    def activate_selection(self, selection: QueueSelection) -> None:
        """Let the scans of a selection continue in the next steps, if they have something to test and need no page."""
        current_read = self._current_read
        if selection in self._awaiting_page or (
            current_read is not None and current_read.lane.queue is selection.queue
        ):
            return
        if selection.has_deferred or (selection.unfinished_cursors and selection.next_cursor() is not None):
            self._active[selection] = None
            self._commit_state.active_work[self] = None

    def step(self) -> Sequence[ScanRead]:
        """Test a slice of one queue."""
        selection = next(iter(self._active))
        del self._active[selection]
        self._commit_state.touched_queues[selection.queue] = None
        budget = ComparisonBudget(self._scan_ns)
        if selection.has_deferred:
            selection.test_deferred(budget)
        cursor = selection.next_cursor()
        if cursor is None or selection.has_deferred:
            self.activate_selection(selection)
            return ()
        if not selection.test_slice(cursor, budget):
            self.activate_selection(selection)
        elif self._current_read is not None:
            self._awaiting_page[selection] = None
        else:
            self._current_read = ScanRead(self, cursor.lane, cursor.position)
            return (self._current_read,)
        return ()

    def on_page_read(self, read: ScanRead, page: PageResult) -> None:
        """Test the messages of a page. All batches that the page contains are known to be durable.

        Raises: StoreError if the store lacks messages that it should have.
        """
        lane = read.lane
        self._current_read = None
        waiting, self._awaiting_page = self._awaiting_page, {}
        self._active.update(waiting)
        self._commit_state.active_work[self] = None
        if lane.selected is not None:
            # Otherwise its subscription has ended.
            lane.selected.scan_read_count -= 1
            if lane.queue.observer is None:
                lane.free_selected()
        if not (page.messages or page.is_end):
            raise damage_error(lane, "no message was read, although the store says that there are more")
        selection = self.by_queue.get(lane.queue)
        if selection is not None:
            if _is_page_current(read):
                self._test_page(selection, read, page)
            self.activate_selection(selection)
        self._resident.free_durable_in_lane(lane)

    def _test_page(self, selection: QueueSelection, read: ScanRead, page: PageResult) -> None:
        lane = read.lane
        tested: list[PageMessage] = []
        waiting: list[PageMessage] = []
        recent = {entry.sequence for entry in lane.unread_in_memory}
        for found in page.messages:
            if found.message is None or found.sequence in recent or not lane.is_only_in_store(found.sequence):
                continue
            if is_undeliverable(lane.queue, found.mark.attempts, found.mark.due_ms):
                self._page_reader.collect_exhausted(self._page_reader.load_entry(lane, found, found.message))
                lane.unread -= 1
            elif found.message.group and self._delayed_entries.remaining_ms(found.mark.due_ms):
                # It holds back its group, for all selectors.
                waiting.append(found)
            else:
                tested.append(found)

        def load(lane: Lane, found: PageMessage) -> Entry:
            assert found.message is not None, "it is wanted"
            entry = self._page_reader.load_entry(lane, found, found.message)
            load_early(lane, entry)
            if self._delayed_entries.restore(entry, found.mark.due_ms):
                self._page_reader.delay_selected(entry)
            elif entry.due_us:
                self._page_reader.collect_delayed(entry)
            return entry

        for found in waiting:
            load(lane, found)
        last = UNBOUNDED if page.is_end else page.messages[-1].sequence
        selection.test_page(lane, read.after_sequence, last, tested, load, ComparisonBudget(self._scan_ns))


def _is_page_current(read: ScanRead) -> bool:
    """Return whether a page can be used: since its request the horizon has not moved up, and is not above the page's
    beginning. Otherwise messages that the page lacks may be below the horizon now."""
    lane = read.lane
    return (
        lane.selected is not None
        and lane.selected.horizon_rise_count == read.horizon_rise_count
        and lane.horizon <= read.after_sequence
    )


def _needs_groups(queue: Queue) -> bool:
    """Return whether messages of a group may still be in a queue without consumers, or be requeued there."""
    return queue.has_groups and (queue.is_needed or queue.has_unloaded_held)
