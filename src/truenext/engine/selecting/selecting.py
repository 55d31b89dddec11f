"""Selectors of a queue's consumers: finds the matching messages in memory and in the store.

Each selector has one `QueueScan`, however many consumers use the selector. The scan has a `ScanCursor` for each lane
that can contain matches:

    tested                            position          not tested yet
    <---- matches are in `found` ----> | <---- in memory, in slices; in the store, page by page ---->

A message that is requeued in the tested part, or arrives when all is tested, is compared at once. The consumers' next
message is the first match. If no match is found and the lane is not wholly tested, the consumers wait.

A match above the horizon is loaded early (memory/horizon.py): only the match comes into memory, and the horizon stays.
If too many matches wait, the position stays until some matches were dispatched. Source: docs/contract.md, "True next"
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from truenext.engine.memory.horizon import load_early, update_horizon
from truenext.engine.selecting.groups import GroupOwnership, GroupScanCursor
from truenext.engine.selecting.keyed import KeyedScans, key_count
from truenext.engine.selecting.scan import ComparisonBudget, ConsumerScans, QueueScan, ScanCursor
from truenext.engine.state.consumer import BrokerConsumer
from truenext.engine.state.memory import (
    GROUP_LANE_BYTES,
    GROUPS_BYTES,
    KEYED_BYTES,
    SELECTED_ENTRIES_BYTES,
    SELECTION_BYTES,
    SELECTOR_BYTES,
    SELECTOR_LANE_BYTES,
    MemoryBudget,
    size_of,
)
from truenext.engine.state.pages import PageMessage
from truenext.engine.state.queue import UNBOUNDED, DeferredEntries, Entry, Lane, Queue
from truenext.model.limits import REQUEUE_IN_GROUPS_NS, SCAN_MESSAGES_PER_TURN
from truenext.model.selector import Selector

_MISSING = object()
Load = Callable[[Lane, PageMessage], Entry]
"""Function that loads a message of a page into memory. A message that is not due is put into `Lane.delayed`."""


class QueueSelection:
    """Scans of one queue, one for each selector of its consumers, and the queue's message groups."""

    __slots__ = (
        "_arrival_budget",
        "_deferred_lanes",
        "_keyed",
        "_memory",
        "_stopped_ranks",
        "consumer_scans",
        "groups",
        "queue",
        "scans",
        "unfinished_cursors",
    )

    def __init__(
        self, queue: Queue, memory: MemoryBudget, consumer_scans: ConsumerScans, arrival_budget: ComparisonBudget
    ) -> None:
        """`consumer_scans` has the scans of all queues. `arrival_budget`, which all queues share, limits the
        comparisons of messages that arrive or are requeued."""
        self._memory = memory
        self._arrival_budget = arrival_budget
        self.queue = queue
        self.scans: dict[str, QueueScan] = {}
        """Scans by the text of the selector; "" for no selector."""
        self.consumer_scans = consumer_scans
        self.groups: GroupOwnership | None = None
        """Groups of the queue; None before the queue's first message with a group."""
        memory.queue_bytes += SELECTION_BYTES
        self._keyed = KeyedScans()
        self.unfinished_cursors: dict[ScanCursor, None] = {}
        """Cursors that have not tested their whole lane. The cursor served last is at the end."""
        self._stopped_ranks = 0
        """Bit for each rank in which all scans that are not indexed (KeyedScans) are unfinished. Arriving messages of
        such a rank are not compared with these scans."""
        self._deferred_lanes: dict[int, Lane] = {}
        """Lanes with requeued messages that will be compared later, by rank."""
        for lane in queue.lanes:
            lane.allocate_selected()

    def on_lane_created(self, lane: Lane) -> None:
        """Add cursors for a new, empty lane."""
        lane.allocate_selected()
        for scan in self.scans.values():
            if self._may_match(scan.selector, lane):
                self._memory.queue_bytes -= self._scan_bytes(scan)
                cursors = {**scan.cursors, lane.rank: self._new_cursor(scan.selector, lane)}
                scan.cursors = dict(sorted(cursors.items()))
                self._memory.queue_bytes += self._scan_bytes(scan)

    def add(self, consumer: BrokerConsumer, selector: Selector | None) -> None:
        text = "" if selector is None else selector.text
        scan = self.scans.get(text)
        if scan is None:
            scan = self.scans[text] = QueueScan(selector, self._new_cursors(selector))
            self._memory.queue_bytes += self._scan_bytes(scan)
            self._keyed.add(scan)
            self._stopped_ranks = 0
            self._restart_deferred()
            self.unfinished_cursors.update((cursor, None) for cursor in scan.cursors.values() if cursor.is_unfinished)
        scan.consumers += 1
        self.consumer_scans.add(consumer, self.queue, scan)

    def remove(self, consumer: BrokerConsumer) -> None:
        scan = self.consumer_scans.remove(consumer, self.queue)
        if scan is not None:
            scan.consumers -= 1
            if not scan.consumers:
                del self.scans["" if scan.selector is None else scan.selector.text]
                self._memory.queue_bytes -= self._scan_bytes(scan)
                self._keyed.remove(scan)
                self._restart_deferred()
                for cursor in scan.cursors.values():
                    self.unfinished_cursors.pop(cursor, None)

    def _restart_deferred(self) -> None:
        """Let the first deferred message of each lane be compared with all scans again, because the scans have
        changed."""
        for lane in self._deferred_lanes.values():
            _deferred_of(lane).compared_scans = 0

    def _new_cursors(self, selector: Selector | None) -> dict[int, ScanCursor]:
        lanes = (lane for lane in self.queue.lanes if self._may_match(selector, lane))
        return {lane.rank: self._new_cursor(selector, lane) for lane in lanes}

    def _may_match(self, selector: Selector | None, lane: Lane) -> bool:
        # With groups, any lane: a delayed message holds back its group.
        return self.groups is not None or (selector is not None and lane.rank in selector.ranks)

    def _new_cursor(self, selector: Selector | None, lane: Lane) -> ScanCursor:
        groups = self.groups
        return ScanCursor(lane, selector) if groups is None else GroupScanCursor(lane, selector, groups)

    def _scan_bytes(self, scan: QueueScan) -> int:
        lane_bytes = SELECTOR_LANE_BYTES if self.groups is None else GROUP_LANE_BYTES
        return SELECTOR_BYTES + KEYED_BYTES * key_count(scan.selector) + len(scan.cursors) * lane_bytes

    def close(self) -> None:
        """End the selection, because the queue was removed, or has neither selectors nor groups any more."""
        queue = self.queue
        self._memory.queue_bytes -= SELECTION_BYTES + sum(map(self._scan_bytes, self.scans.values()))
        if self.groups is not None:
            self._memory.queue_bytes -= GROUPS_BYTES + self.groups.owned_bytes
        self.scans.clear()
        self.groups = None
        queue.observer, queue.has_groups = None, False
        for lane in queue.lanes:
            if lane.selected is not None:
                # Otherwise the lane's next selection would wait for comparisons that it never makes.
                lane.selected.deferred = None
            lane.free_selected()

    def start_groups(self, consumers: Iterable[BrokerConsumer]) -> None:
        """Begin to track groups, and test all messages again. `consumers` are all consumers of the queue."""
        queue = self.queue
        self._memory.queue_bytes += GROUPS_BYTES - sum(map(self._scan_bytes, self.scans.values()))
        self.groups = GroupOwnership(self.group_cursors, self._memory)
        queue.has_groups = True
        self.scans.clear()
        self._keyed.clear()
        self.unfinished_cursors.clear()
        for consumer in consumers:
            scan = self.consumer_scans.find_scan(consumer, queue)
            self.add(consumer, None if scan is None else scan.selector)

    def group_cursors(self) -> Iterator[GroupScanCursor]:
        for scan in self.scans.values():
            for cursor in scan.cursors.values():
                assert isinstance(cursor, GroupScanCursor), "there are groups"
                yield cursor

    # ---- Messages that arrive, return or leave ----

    def on_arrived(self, entry: Entry) -> None:
        """Test a message that has just been added to the end of its lane."""
        lane = entry.lane
        is_match = is_compared = False
        assert entry.message is not None, "it has just arrived"
        budget = self._arrival_budget
        with_unkeyed = not self._stopped_ranks >> lane.rank & 1
        for scan in self._keyed.candidate_scans(entry.message, with_unkeyed=with_unkeyed):
            cursor = scan.cursors.get(lane.rank)
            if cursor is None or cursor.tested_to < UNBOUNDED:
                continue
            if cursor.stop_before(entry.sequence):
                self.unfinished_cursors[cursor] = None
            elif not budget.take(scan.selector, entry.message):
                cursor.stop_before(entry.sequence, if_full=False)
                self.unfinished_cursors[cursor] = None
            else:
                is_compared = True
                is_match |= cursor.on_arrived(entry)
        if not is_compared and budget.is_spent:
            self._stopped_ranks |= 1 << lane.rank
        if is_match and lane.horizon != UNBOUNDED:
            lane.unread_in_memory.pop()
            self._memory.pending_free_bytes -= size_of(entry.message)
            load_early(lane, entry)
            update_horizon(lane)

    def on_requeued(self, entry: Entry) -> None:
        """Test a message that was requeued. If the budget for comparisons is spent, defer the test."""
        budget = self._arrival_budget
        if budget.is_spent_for_requeued(self.groups is not None) or self._test_requeued(entry, budget) is not None:
            lane = entry.lane
            selected = lane.selected
            assert selected is not None, "a consumer has a selector"
            deferred = selected.deferred
            if deferred is None:
                deferred = selected.deferred = DeferredEntries()
                self._deferred_lanes[lane.rank] = lane
            deferred.add(entry)

    def _test_requeued(self, entry: Entry, budget: ComparisonBudget, first: int = 0) -> int | None:
        """Test a requeued message with all scans, beginning with the scan of number `first`. Returns None if all tests
        are done; else the number of the next scan, because the budget is spent."""
        message = entry.message
        scans = list(self.scans.values()) if message is None else self._keyed.candidate_scans(message)
        for number in range(first, len(scans)):
            scan = scans[number]
            cursor = scan.cursors.get(entry.lane.rank)
            if cursor is not None:
                if not budget.take(scan.selector, message):
                    return number
                cursor.on_requeued(entry)
        if self.groups is not None:
            budget.spend(REQUEUE_IN_GROUPS_NS)
        return None

    def on_delayed(self, entry: Entry) -> None:
        self.existing_groups.on_delayed(entry)

    def on_delay_ended(self, entry: Entry) -> None:
        self.existing_groups.on_delay_ended(entry)

    @property
    def existing_groups(self) -> GroupOwnership:
        """Groups of the queue. Use it only if the queue has had a message with a group."""
        assert self.groups is not None, "it has had a message of a group"
        return self.groups

    def on_horizon_lowering(self, lane: Lane) -> None:
        """Drop the pending messages of a lane, before the lane's horizon moves down."""
        for scan in self.scans.values():
            cursor = scan.cursors.get(lane.rank)
            if cursor is not None:
                cursor.pending = []

    def has_found(self, entry: Entry) -> bool:
        """Return whether a scan has found the entry. A found entry must stay in memory; its body may be evicted."""
        for scan in self.scans.values():
            cursor = scan.cursors.get(entry.lane.rank)
            if cursor is not None and entry.sequence in cursor.found:
                return True
        return False

    # ---- Requeued messages that were not compared at once ----

    @property
    def has_deferred(self) -> bool:
        return bool(self._deferred_lanes)

    def test_deferred(self, budget: ComparisonBudget) -> None:
        """Test deferred messages until the budget is spent, beginning with the highest priority."""
        for rank, lane in sorted(self._deferred_lanes.items()):
            deferred = _deferred_of(lane)
            has_more = True
            while has_more:
                entry = deferred.first
                if not entry.is_out_of_lane:
                    if self.groups is not None and not budget.has_time:
                        return
                    if deferred.was_in_memory is not (entry.message is not None):
                        deferred.was_in_memory = not deferred.was_in_memory
                        deferred.compared_scans = 0
                    next_scan = self._test_requeued(entry, budget, deferred.compared_scans)
                    if next_scan is not None:
                        deferred.compared_scans = next_scan
                        return
                has_more = deferred.pop()
            assert lane.selected is not None, "it has deferred messages"
            lane.selected.deferred = None
            del self._deferred_lanes[rank]

    # ---- Messages that were there before ----

    def next_cursor(self) -> ScanCursor | None:
        """Return the unfinished cursor with space that has the highest priority; None if there is none."""
        return min(
            (cursor for cursor in self.unfinished_cursors if cursor.has_space),
            key=lambda cursor: cursor.lane.rank,
            default=None,
        )

    def test_slice(self, cursor: ScanCursor, budget: ComparisonBudget) -> bool:
        """Test a slice of a cursor's lane. Returns whether the next messages must be read from the store."""
        lane = cursor.lane
        # Put the cursor at the end, so that the others are next.
        if self.unfinished_cursors.pop(cursor, _MISSING) is not _MISSING:
            self.unfinished_cursors[cursor] = None
        remaining = SCAN_MESSAGES_PER_TURN
        while remaining > 0 and cursor.is_unfinished and not cursor.is_full:
            if cursor.pending:
                remaining -= cursor.test_pending(remaining, budget)
            elif cursor.position < lane.horizon:
                cursor.load_pending()
                remaining -= 1
            elif lane.needs_page:
                return True
            elif not self._test_above_horizon(
                lane, [cursor], {}, cursor.position, UNBOUNDED, _load_without_page, budget
            ):
                break
        self._end_if_finished(cursor)
        return False

    def _end_if_finished(self, cursor: ScanCursor) -> None:
        if not cursor.is_unfinished:
            self.unfinished_cursors.pop(cursor, None)
            self._stopped_ranks &= ~(1 << cursor.lane.rank)

    def test_page(
        self,
        lane: Lane,
        after_sequence: int,
        last: int,
        found: list[PageMessage],
        load: Load,
        budget: ComparisonBudget,
    ) -> None:
        """Test the messages of a page until the budget is spent. The page has the messages after `after_sequence`, up
        to `last`."""
        cursors = [
            cursor
            for cursor in self.unfinished_cursors
            if cursor.lane is lane and after_sequence <= cursor.position < last
        ]
        on_page = {one.sequence: one for one in found}
        self._test_above_horizon(lane, cursors, on_page, after_sequence, last, load, budget)
        for cursor in cursors:
            self._end_if_finished(cursor)

    def _test_above_horizon(
        self,
        lane: Lane,
        cursors: list[ScanCursor],
        on_page: dict[int, PageMessage],
        after_sequence: int,
        last: int,
        load: Load,
        budget: ComparisonBudget,
    ) -> bool:
        """Test messages above the horizon, up to `last`, with the selectors of `cursors`.

        These are messages of a page, messages being written, and messages loaded early. Returns False if the budget was
        spent before the last message; then each cursor stays at the last message that it has tested.
        """
        selected = lane.selected
        assert selected is not None, "a consumer has a selector"
        in_memory = {
            entry.sequence: entry for entry in lane.unread_in_memory if after_sequence < entry.sequence <= last
        }
        in_memory.update(item for item in selected.loaded_early.items() if after_sequence < item[0] <= last)
        matched_in_memory: set[int] = set()
        for sequence in sorted(on_page.keys() | in_memory.keys()):
            entry = in_memory.get(sequence)
            message = on_page[sequence].message if entry is None else None
            for cursor in cursors:
                if cursor.position >= sequence or cursor.is_full:
                    continue
                if not budget.take(cursor.selector, message if entry is None else entry.message):
                    break
                if entry is not None:
                    if not entry.is_out_of_lane and cursor.test(entry) and sequence not in selected.entries:
                        matched_in_memory.add(sequence)
                elif message is not None and cursor.matches(message, sequence):
                    entry = load(lane, on_page[sequence])
                    if not entry.is_out_of_lane:
                        cursor.add(entry)
                cursor.advance_to(sequence)
            else:
                continue
            is_complete = False
            break
        else:
            is_complete = True
            for cursor in cursors:
                if not cursor.is_full:
                    cursor.advance_to(last)
        if matched_in_memory:
            self._load_unread_early(lane, matched_in_memory)
        update_horizon(lane)
        return is_complete

    def _load_unread_early(self, lane: Lane, sequences: set[int]) -> None:
        for entry in lane.unread_in_memory:
            if entry.sequence in sequences:
                assert entry.message is not None, "unread messages in memory have bodies"
                self._memory.pending_free_bytes -= size_of(entry.message)
                load_early(lane, entry)
        lane.unread_in_memory = deque(entry for entry in lane.unread_in_memory if entry.sequence not in sequences)


def bytes_to_join(queue: Queue, selection: QueueSelection | None, selector: Selector) -> int:
    """Return the bytes that one more consumer with this selector adds to a queue. `selection` is the queue's selection;
    None if the queue has none."""
    size = SELECTOR_BYTES + KEYED_BYTES * key_count(selector)
    if selection is None:
        size += SELECTION_BYTES + len(queue.lanes) * SELECTED_ENTRIES_BYTES
    elif selector.text in selection.scans:
        return 0
    if queue.has_groups:
        return size + len(queue.lanes) * GROUP_LANE_BYTES
    return size + sum(lane.rank in selector.ranks for lane in queue.lanes) * SELECTOR_LANE_BYTES


def _deferred_of(lane: Lane) -> DeferredEntries:
    assert lane.selected is not None and lane.selected.deferred is not None, "it has deferred messages"
    return lane.selected.deferred


def _load_without_page(lane: Lane, found: PageMessage) -> Entry:
    raise AssertionError("there is no page")
