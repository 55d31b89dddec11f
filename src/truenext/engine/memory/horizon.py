"""How far a lane is in memory, and what is taken out of it though it is not its head.

The horizon moves up when a page comes (`take_in`), down when memory is short (`lower_horizon`), and is WHOLE when all
that waits is in memory (`end_horizon`). What was taken out of its turn is kept in one place below the horizon and in
another above it, and moves with it (`_rebalance`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from heapq import heapify, merge
from operator import attrgetter

from truenext.engine.state.empty import with_sequence
from truenext.engine.state.queue import NO_ENTRIES, WHOLE, Entry, Lane


def lift(lane: Lane, entry: Entry) -> None:
    """Take a message out that waits in memory, wherever it stands."""
    out_of_turn = lane.out_of_turn
    assert out_of_turn is not None, "somebody has a selector"
    entry.has_left_lane = True
    if entry is lane.head():
        lane.pop()
        return
    sequence = entry.sequence
    if out_of_turn.plucked.pop(sequence, None) is None:
        if entry.is_again:
            out_of_turn.returned_gaps = with_sequence(out_of_turn.returned_gaps, sequence)
        else:
            out_of_turn.arrived_gaps = with_sequence(out_of_turn.arrived_gaps, sequence)
        lane.strip()
    out_of_turn.strays[sequence] = entry
    lane.bodiless.pop(sequence, None)


def pluck(lane: Lane, entry: Entry) -> None:
    """Have a message in memory that is above the horizon."""
    assert lane.out_of_turn is not None, "somebody has a selector"
    lane.out_of_turn.strays[entry.sequence] = lane.out_of_turn.plucked[entry.sequence] = entry
    entry.is_again = True
    lane.unread -= 1


def keep_above(lane: Lane) -> None:
    """Move the horizon below the last message in memory, and have that in memory all the same."""
    entry = lower_horizon(lane)
    pluck(lane, entry)


def end_horizon(lane: Lane) -> None:
    """To be called when messages above the horizon have left: if there are none it is nowhere."""
    if not lane.unread:
        if lane.out_of_turn is not None and lane.horizon != WHOLE:
            lane.out_of_turn.rises += 1
        lane.horizon = WHOLE
    if lane.out_of_turn is not None:
        lane.strip()
        _rebalance(lane)


def _rebalance(lane: Lane) -> None:
    """The horizon has moved: what was taken out of its turn and waits stands on its other side."""
    out_of_turn = lane.out_of_turn
    assert out_of_turn is not None, "somebody has a selector"
    if out_of_turn.plucked and min(out_of_turn.plucked) <= lane.horizon:
        for sequence in [sequence for sequence in out_of_turn.plucked if sequence <= lane.horizon]:
            lane.push(sequence, out_of_turn.plucked.pop(sequence))
    if lane.horizon != WHOLE and any(sequence > lane.horizon for sequence, _ in lane.returned):
        above = [place for place in lane.returned if place[0] > lane.horizon]
        out_of_turn.plucked.update(place for place in above if place[0] not in out_of_turn.returned_gaps)
        out_of_turn.returned_gaps.difference_update(sequence for sequence, _ in above)
        lane.returned = [place for place in lane.returned if place[0] <= lane.horizon]
        heapify(lane.returned)


def remove_from_lane(lane: Lane, entries: list[Entry], batch: int) -> list[Entry]:
    """Take messages out that wait anywhere in the lane; `batch` removes them. Returns those that were recent."""
    gone = {entry.sequence for entry in entries}
    # The store never hears of what it was not told of before this batch.
    for one in entries:
        if one.stored not in (None, batch):
            lane.remember_removed(one.sequence, batch)
    _take_from_arrived(lane, gone)
    out_of_turn = lane.out_of_turn
    if out_of_turn is not None:
        for entry in entries:
            entry.has_left_lane = True
            out_of_turn.plucked.pop(entry.sequence, None)
        # Who came back stands elsewhere; its empty place goes as well.
        out_of_turn.arrived_gaps -= gone
        out_of_turn.returned_gaps -= gone
    if any(sequence in gone for sequence, _ in lane.returned):
        lane.returned = [place for place in lane.returned if place[0] not in gone]
        heapify(lane.returned)
    for sequence in gone:
        lane.end_delay(sequence)
        lane.bodiless.pop(sequence, None)
    recent = [entry for entry in lane.recent if entry.sequence in gone]
    if recent:
        lane.recent = deque(entry for entry in lane.recent if entry.sequence not in gone) or NO_ENTRIES
    lane.unread -= sum(
        sequence > lane.horizon and (out_of_turn is None or sequence not in out_of_turn.strays) for sequence in gone
    )
    end_horizon(lane)
    return recent


def _take_from_arrived(lane: Lane, gone: set[int]) -> None:
    arrived = lane.arrived
    first, last = min(gone), max(gone)
    if not arrived or arrived[0].sequence > last or arrived[-1].sequence < first:
        return
    # Turned until the first of them is in front: what is before and behind them is not looked at.
    at = bisect_left(arrived, first, key=attrgetter("sequence"))
    arrived.rotate(-at)
    kept: list[Entry] = []
    for _ in range(len(arrived) - at):
        if arrived[0].sequence > last:
            break
        entry = arrived.popleft()
        if entry.sequence not in gone:
            kept.append(entry)
    arrived.extendleft(reversed(kept))
    arrived.rotate(at)


def fix_horizon(lane: Lane) -> None:
    """What is in memory stays known there; its bodies can leave."""
    for entry in lane.arrived:
        if lane.out_of_turn is None or entry.sequence not in lane.out_of_turn.arrived_gaps:
            entry.is_again = True
            lane.push(entry.sequence, entry)
    if lane.arrived:
        lane.arrived.clear()
        lane.let_go_of_places()
    if lane.out_of_turn is not None:
        lane.out_of_turn.arrived_gaps.clear()


def lower_horizon(lane: Lane) -> Entry:
    """Move the last message in memory above the horizon; whoever asked for a page must ask again."""
    entry = lane.arrived.pop()
    lane.horizon = entry.sequence - 1
    lane.unread += 1
    lane.reading = None
    if lane.out_of_turn is not None:
        lane.strip()
    return entry


def starts_uncommitted(lane: Lane, committed: int) -> bool:
    """Of a lane that has no head and something in `recent` alone: is its first message not visible yet?

    What was plucked and has come back may stand before it, also when nobody takes out of turn any more.
    """
    first = lane.recent[0]
    if first.batch <= committed:
        return False
    return lane.out_of_turn is None or all(sequence > first.sequence for sequence in lane.out_of_turn.plucked)


def take_in_recent(lane: Lane) -> None:
    """Nothing above the horizon has left memory: the lane is whole again."""
    if lane.arrived is NO_ENTRIES:
        lane.allocate_arrived()
    lane.arrived.extend(lane.recent)
    lane.recent = NO_ENTRIES
    lane.unread = 0
    end_horizon(lane)
    lane.reading = None


def take_in(lane: Lane, page: list[Entry], left_out: int, up_to: int, as_of: int) -> tuple[list[Entry], list[Entry]]:
    """Move the horizon up to sequence `up_to`, WHOLE at the lane's end; `page` is what the store had between the
    two when batch `as_of` was the last, `left_out` how many of it do not belong into the lane.

    Returns what was recent up to there: what is in the page as well, and what is not and has come into the lane.
    """
    in_page: list[Entry] = []
    not_in_page: list[Entry] = []
    while lane.recent and lane.recent[0].sequence <= up_to:
        entry = lane.recent.popleft()
        (in_page if is_stored(entry, as_of) else not_in_page).append(entry)
    # Nothing of what was written meanwhile may be left behind: it is below the horizon now.
    come = merge(page, not_in_page, key=attrgetter("sequence")) if not_in_page else page
    if page or not_in_page:
        if lane.arrived is NO_ENTRIES:
            lane.allocate_arrived()
        lane.arrived.extend(come)
    lane.unread -= len(page) + len(not_in_page) + left_out
    lane.horizon = up_to
    if lane.out_of_turn is not None:
        lane.out_of_turn.rises += 1
        end_horizon(lane)
    return in_page, not_in_page


def let_go(lane: Lane, committed: int) -> list[Entry]:
    """What no longer has to be in memory, now that this batch is durable; not while a page is being read."""
    if lane.reading is not None or lane.is_pinned or (lane.out_of_turn is not None and lane.out_of_turn.scanning):
        # It may have been read before the batch was written.
        return []
    gone = [entry for entry in lane.recent if is_stored(entry, committed)]
    if len(gone) == len(lane.recent):
        lane.recent = NO_ENTRIES
    elif gone:
        lane.recent = deque(entry for entry in lane.recent if not is_stored(entry, committed))
    return gone


def is_stored(entry: Entry, as_of: int) -> bool:
    """The store had it when this batch was the last."""
    return entry.stored is not None and entry.stored <= as_of
