"""Horizon of a lane: the sequence up to which its messages are in memory; and removal of single messages.

The horizon moves up with a page (`apply_page`), and down when memory is short (`lower_horizon`). The horizon is
UNBOUNDED when all waiting messages are in memory (`update_horizon`). Selected entries are in one container below the
horizon and in another above it. When the horizon moves, `_move_selected_across` moves entries between the two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from heapq import heapify, merge
from operator import attrgetter

from truenext.engine.state.memory import add_sequence
from truenext.engine.state.queue import NO_ENTRIES, UNBOUNDED, Entry, Lane


def remove_entry(lane: Lane, entry: Entry) -> None:
    """Remove a waiting message from anywhere in its lane, because it is dispatched or expired."""
    selected = lane.selected
    assert selected is not None, "a consumer has a selector"
    entry.is_out_of_lane = True
    if entry is lane.head():
        lane.pop()
        return
    sequence = entry.sequence
    if selected.loaded_early.pop(sequence, None) is None:
        if entry.is_requeued:
            selected.requeued_gaps = add_sequence(selected.requeued_gaps, sequence)
        else:
            selected.arrived_gaps = add_sequence(selected.arrived_gaps, sequence)
        lane.trim_gaps()
    selected.entries[sequence] = entry
    lane.unloaded.pop(sequence, None)


def load_early(lane: Lane, entry: Entry) -> None:
    """Add a message above the horizon to the lane's entries in memory, as a selected entry."""
    assert lane.selected is not None, "a consumer has a selector"
    lane.selected.entries[entry.sequence] = lane.selected.loaded_early[entry.sequence] = entry
    entry.is_requeued = True
    lane.unread -= 1


def lower_horizon_keeping_last(lane: Lane) -> None:
    """Move the horizon below the last message in memory, and keep this message in `loaded_early`."""
    entry = lower_horizon(lane)
    load_early(lane, entry)


def update_horizon(lane: Lane) -> None:
    """Set the horizon to UNBOUNDED if no messages above it are left. Called whenever messages above the horizon have
    left the lane."""
    if not lane.unread:
        if lane.selected is not None and lane.horizon != UNBOUNDED:
            lane.selected.horizon_rise_count += 1
        lane.horizon = UNBOUNDED
    if lane.selected is not None:
        lane.trim_gaps()
        _move_selected_across(lane)


def _move_selected_across(lane: Lane) -> None:
    """Move waiting selected entries to the container for their side of the horizon, after the horizon has moved."""
    selected = lane.selected
    assert selected is not None, "a consumer has a selector"
    if selected.loaded_early and min(selected.loaded_early) <= lane.horizon:
        for sequence in [sequence for sequence in selected.loaded_early if sequence <= lane.horizon]:
            lane.push(sequence, selected.loaded_early.pop(sequence))
    if lane.horizon != UNBOUNDED and any(sequence > lane.horizon for sequence, _ in lane.requeued):
        items_above = [item for item in lane.requeued if item[0] > lane.horizon]
        selected.loaded_early.update(item for item in items_above if item[0] not in selected.requeued_gaps)
        selected.requeued_gaps.difference_update(sequence for sequence, _ in items_above)
        lane.requeued = [item for item in lane.requeued if item[0] <= lane.horizon]
        heapify(lane.requeued)


def remove_entries(lane: Lane, entries: list[Entry], batch: int) -> list[Entry]:
    """Remove waiting messages from anywhere in the lane. `batch` removes them from the store. Returns the removed
    messages that were in `unread_in_memory`."""
    removed = {entry.sequence for entry in entries}
    # A message that this batch would store is never written.
    for one in entries:
        if one.store_batch not in (None, batch):
            lane.remember_removed(one.sequence, batch)
    _remove_from_arrived(lane, removed)
    selected = lane.selected
    if selected is not None:
        for entry in entries:
            entry.is_out_of_lane = True
            selected.loaded_early.pop(entry.sequence, None)
        # A requeued entry is in another container; its gap is removed too.
        selected.arrived_gaps -= removed
        selected.requeued_gaps -= removed
    if any(sequence in removed for sequence, _ in lane.requeued):
        lane.requeued = [item for item in lane.requeued if item[0] not in removed]
        heapify(lane.requeued)
    for sequence in removed:
        lane.end_delay(sequence)
        lane.unloaded.pop(sequence, None)
    in_memory = [entry for entry in lane.unread_in_memory if entry.sequence in removed]
    if in_memory:
        lane.unread_in_memory = (
            deque(entry for entry in lane.unread_in_memory if entry.sequence not in removed) or NO_ENTRIES
        )
    lane.unread -= sum(
        sequence > lane.horizon and (selected is None or sequence not in selected.entries) for sequence in removed
    )
    update_horizon(lane)
    return in_memory


def _remove_from_arrived(lane: Lane, removed: set[int]) -> None:
    arrived = lane.arrived
    first, last = min(removed), max(removed)
    if not arrived or arrived[0].sequence > last or arrived[-1].sequence < first:
        return
    # Rotated until the first removed entry is in front: entries outside of the removed range are not touched.
    at = bisect_left(arrived, first, key=attrgetter("sequence"))
    arrived.rotate(-at)
    remaining: list[Entry] = []
    for _ in range(len(arrived) - at):
        if arrived[0].sequence > last:
            break
        entry = arrived.popleft()
        if entry.sequence not in removed:
            remaining.append(entry)
    arrived.extendleft(reversed(remaining))
    arrived.rotate(at)


def move_arrived_to_requeued(lane: Lane) -> None:
    """Move the entries of `arrived` to `requeued`. There, bodies may be evicted while their entries stay."""
    for entry in lane.arrived:
        if lane.selected is None or entry.sequence not in lane.selected.arrived_gaps:
            entry.is_requeued = True
            lane.push(entry.sequence, entry)
    if lane.arrived:
        lane.arrived.clear()
        lane.shrink()
    if lane.selected is not None:
        lane.selected.arrived_gaps.clear()


def lower_horizon(lane: Lane) -> Entry:
    """Move the horizon below the last message in `arrived`, and remove and return this message. A page that is being
    read must be requested again."""
    entry = lane.arrived.pop()
    lane.note_evicted(entry)
    lane.horizon = entry.sequence - 1
    lane.unread += 1
    lane.pending_read = None
    if lane.selected is not None:
        lane.trim_gaps()
    return entry


def is_first_uncommitted(lane: Lane, committed: int) -> bool:
    """Return whether the first message of `unread_in_memory` is not visible yet, and precedes all messages in
    `loaded_early`. Call this function only if the lane has no head, and all unread messages are in `unread_in_memory`.

    `loaded_early` may have a requeued message even when the queue no longer has selectors or groups.
    """
    first = lane.unread_in_memory[0]
    if first.batch <= committed:
        return False
    return lane.selected is None or all(sequence > first.sequence for sequence in lane.selected.loaded_early)


def load_unread_in_memory(lane: Lane) -> None:
    """Move all messages of `unread_in_memory` to `arrived`, so that the whole lane is in memory. Call this function
    only if all unread messages are in `unread_in_memory`."""
    if lane.arrived is NO_ENTRIES:
        lane.allocate_arrived()
    lane.arrived.extend(lane.unread_in_memory)
    lane.unread_in_memory = NO_ENTRIES
    lane.unread = 0
    update_horizon(lane)
    lane.pending_read = None


def apply_page(lane: Lane, page: list[Entry], excluded: int, up_to: int, as_of: int) -> tuple[list[Entry], list[Entry]]:
    """Add the messages of a page to the lane, and move the horizon up to `up_to`; UNBOUNDED at the end of the lane.

    The page includes all batches up to `as_of`. `excluded` is the number of messages that are not in `page`, because
    they are damaged, delayed or to be dead-lettered. Returns two lists of entries that were in `unread_in_memory` up to
    `up_to`: entries that the page has, too, and entries that the page lacks, which are added to the lane.
    """
    in_page: list[Entry] = []
    not_in_page: list[Entry] = []
    while lane.unread_in_memory and lane.unread_in_memory[0].sequence <= up_to:
        entry = lane.unread_in_memory.popleft()
        (in_page if is_stored(entry, as_of) else not_in_page).append(entry)
    # Messages written meanwhile must be included: they are below the horizon now.
    entries = merge(page, not_in_page, key=attrgetter("sequence")) if not_in_page else page
    if page or not_in_page:
        if lane.arrived is NO_ENTRIES:
            lane.allocate_arrived()
        lane.arrived.extend(entries)
    lane.unread -= len(page) + len(not_in_page) + excluded
    lane.horizon = up_to
    if lane.selected is not None:
        lane.selected.horizon_rise_count += 1
        update_horizon(lane)
    return in_page, not_in_page


def pop_durable(lane: Lane, committed: int) -> list[Entry]:
    """Remove from `unread_in_memory` and return the entries that are durable with batch `committed`. Empty while a page
    is being read."""
    if lane.pending_read is not None or lane.is_pinned or (lane.selected is not None and lane.selected.scan_read_count):
        # The page may have been read before the batch was written.
        return []
    durable = [entry for entry in lane.unread_in_memory if is_stored(entry, committed)]
    if len(durable) == len(lane.unread_in_memory):
        lane.unread_in_memory = NO_ENTRIES
    elif durable:
        lane.unread_in_memory = deque(entry for entry in lane.unread_in_memory if not is_stored(entry, committed))
    return durable


def is_stored(entry: Entry, as_of: int) -> bool:
    """Return whether batch `as_of` or an earlier one has stored the entry."""
    return entry.store_batch is not None and entry.store_batch <= as_of
