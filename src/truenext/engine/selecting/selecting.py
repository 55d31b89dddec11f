"""What the selectors of a queue's consumers want, wherever it is.

Each selector is one `Scan`, however many consumers have it. In each lane that there is, and that it can want anything
of, it has a `ScanCursor`; a lane that is made later gets one when it is made:

    tested                                 position            not tested yet
    <----- `found`: what it wants of it -----> | <--- in memory, in slices; in the store, page by page --->

What arrives where all is tested, or is given back where it is tested, is compared at once. So a consumer's next message
is the first of what was found; if there is none, and not all is tested, its consumers wait. What is found above the
horizon is plucked (horizon.py): it comes into memory alone, and the horizon stays. If too much was found and not taken,
the position stays where it is until some was. Source: docs/contract.md, "True next"
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from truenext.engine.memory.horizon import end_horizon, pluck
from truenext.engine.selecting.groups import Groups, GroupScanCursor
from truenext.engine.selecting.keyed import KeyedScans, keys_of
from truenext.engine.selecting.scan import Scan, ScanCursor, Scans
from truenext.engine.state.memory import (
    GROUP_LANE_BYTES,
    GROUPS_BYTES,
    KEYED_BYTES,
    OUT_OF_TURN_BYTES,
    SELECTING_BYTES,
    SELECTOR_BYTES,
    SELECTOR_LANE_BYTES,
    size_of,
)
from truenext.engine.state.queue import WHOLE
from truenext.limits import SCAN_MESSAGES_PER_TURN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from truenext.engine.state.consumer import BrokerConsumer
    from truenext.engine.state.memory import Memory
    from truenext.engine.state.pages import Found
    from truenext.engine.state.queue import Entry, Lane, Queue
    from truenext.selector import Selector

    Bring = Callable[[Lane, Found], Entry]
    """Brings a message of a page into memory; it may have to wait for its next try."""


class Selecting:
    """The selectors of one queue."""

    __slots__ = ("_keyed", "_memory", "behind", "groups", "queue", "scans", "scans_of")

    def __init__(self, queue: Queue, memory: Memory, scans_of: Scans) -> None:
        """`scans_of` has those of the consumers of all queues."""
        self._memory = memory
        self.queue = queue
        self.scans: dict[str, Scan] = {}
        """By the text of the selector."""
        self.scans_of = scans_of
        self.groups: Groups | None = None
        """Since the queue has had a message of one."""
        memory.queues += SELECTING_BYTES
        self._keyed = KeyedScans()
        self.behind: dict[ScanCursor, None] = {}
        """Places that are not tested to their ends."""
        for lane in queue.lanes:
            lane.begin_out_of_turn()

    def made(self, lane: Lane) -> None:
        """There is a new lane; nothing is in it."""
        lane.begin_out_of_turn()
        for scan in self.scans.values():
            if self._may_want(scan.selector, lane):
                self._memory.queues -= self._bytes_of(scan)
                places = {**scan.places, lane.rank: self._new_place(scan.selector, lane)}
                scan.places = dict(sorted(places.items()))
                self._memory.queues += self._bytes_of(scan)

    def join(self, consumer: BrokerConsumer, selector: Selector | None) -> None:
        text = "" if selector is None else selector.text
        scan = self.scans.get(text)
        if scan is None:
            scan = self.scans[text] = Scan(selector, self._new_places(selector))
            self._memory.queues += self._bytes_of(scan)
            self._keyed.add(scan)
            self.behind.update((place, None) for place in scan.places.values() if place.is_behind)
        scan.consumers += 1
        self.scans_of.add(consumer, self.queue, scan)

    def leave(self, consumer: BrokerConsumer) -> None:
        scan = self.scans_of.end(consumer, self.queue)
        if scan is not None:
            scan.consumers -= 1
            if not scan.consumers:
                del self.scans["" if scan.selector is None else scan.selector.text]
                self._memory.queues -= self._bytes_of(scan)
                self._keyed.remove(scan)
                for place in scan.places.values():
                    self.behind.pop(place, None)

    def _new_places(self, selector: Selector | None) -> dict[int, ScanCursor]:
        lanes = (lane for lane in self.queue.lanes if self._may_want(selector, lane))
        return {lane.rank: self._new_place(selector, lane) for lane in lanes}

    def _may_want(self, selector: Selector | None, lane: Lane) -> bool:
        # Where there are groups any lane: a message that waits for its next try holds back its group.
        return self.groups is not None or (selector is not None and lane.rank in selector.ranks)

    def _new_place(self, selector: Selector | None, lane: Lane) -> ScanCursor:
        groups = self.groups
        return ScanCursor(lane, selector) if groups is None else GroupScanCursor(lane, selector, groups)

    def _bytes_of(self, scan: Scan) -> int:
        of_lane = SELECTOR_LANE_BYTES if self.groups is None else GROUP_LANE_BYTES
        return SELECTOR_BYTES + KEYED_BYTES * keys_of(scan.selector) + len(scan.places) * of_lane

    def end(self) -> None:
        """Nobody needs it any more, or there is no queue."""
        queue = self.queue
        self._memory.queues -= SELECTING_BYTES + sum(map(self._bytes_of, self.scans.values()))
        if self.groups is not None:
            self._memory.queues -= GROUPS_BYTES + self.groups.size
        self.scans.clear()
        self.groups = None
        queue.watcher, queue.has_groups = None, False
        for lane in queue.lanes:
            lane.end_out_of_turn()

    def start_groups(self, consumers: Iterable[BrokerConsumer]) -> None:
        """All is tested anew, for all consumers: these."""
        queue = self.queue
        self._memory.queues += GROUPS_BYTES - sum(map(self._bytes_of, self.scans.values()))
        self.groups = Groups(self.group_places, self._memory)
        queue.has_groups = True
        self.scans.clear()
        self._keyed.clear()
        self.behind.clear()
        for consumer in consumers:
            scan = self.scans_of.of(consumer, queue)
            self.join(consumer, None if scan is None else scan.selector)

    def group_places(self) -> Iterator[GroupScanCursor]:
        for scan in self.scans.values():
            for place in scan.places.values():
                assert isinstance(place, GroupScanCursor), "there are groups"
                yield place

    # ---- What comes and goes ----

    def arrived(self, entry: Entry) -> None:
        """A message has just got its place at the end of its lane."""
        lane = entry.lane
        is_wanted = False
        assert entry.message is not None, "it has just arrived"
        for scan in self._keyed.that_may_want(entry.message):
            place = scan.places.get(lane.rank)
            if place is None or place.tested < WHOLE:
                continue
            if place.stop_before(entry.sequence):
                self.behind[place] = None
            else:
                is_wanted |= place.heard_of(entry)
        if is_wanted and lane.horizon != WHOLE:
            lane.recent.pop()
            self._memory.leaving -= size_of(entry.message)
            pluck(lane, entry)
            end_horizon(lane)

    def came_back(self, entry: Entry) -> None:
        """A message is in its lane again."""
        for scan in self.scans.values():
            place = scan.places.get(entry.lane.rank)
            if place is not None:
                place.came_back(entry)

    def delayed(self, entry: Entry) -> None:
        self.known_groups.delayed(entry)

    def ended_delay(self, entry: Entry) -> None:
        self.known_groups.ended_delay(entry)

    @property
    def known_groups(self) -> Groups:
        """To be asked of a queue in which a message has a group."""
        assert self.groups is not None, "it has had a message of a group"
        return self.groups

    def lowering(self, lane: Lane) -> None:
        """The horizon of a lane is about to move down."""
        for scan in self.scans.values():
            place = scan.places.get(lane.rank)
            if place is not None:
                place.noted = []

    def has_found(self, entry: Entry) -> bool:
        """It has to stay known, whatever leaves memory."""
        for scan in self.scans.values():
            place = scan.places.get(entry.lane.rank)
            if place is not None and entry.sequence in place.found:
                return True
        return False

    # ---- What was there before ----

    def next_place(self) -> ScanCursor | None:
        """Where something is to be tested, in the order of the lanes. Half of what may wait has to be taken first."""
        return min(
            (place for place in self.behind if place.has_room),
            key=lambda place: place.lane.rank,
            default=None,
        )

    def step(self, place: ScanCursor) -> bool:
        """Test a slice. True if what follows on its position has to be read."""
        lane = place.lane
        left = SCAN_MESSAGES_PER_TURN
        while left > 0 and place.is_behind and not place.is_full:
            if place.noted:
                left -= place.test_noted(left)
            elif place.position < lane.horizon:
                place.note()
                left -= 1
            elif lane.needs_page:
                return True
            else:
                self._test_above(lane, [place], {}, place.position, WHOLE, _no_page)
        if not place.is_behind:
            self.behind.pop(place, None)
        return False

    def test_page(self, lane: Lane, after_sequence: int, last: int, found: list[Found], bring: Bring) -> None:
        """Test what a page shows behind the one sequence, and up to the other."""
        places = [place for place in self.behind if place.lane is lane and after_sequence <= place.position < last]
        self._test_above(lane, places, {one.sequence: one for one in found}, after_sequence, last, bring)
        for place in places:
            if not place.is_behind:
                self.behind.pop(place, None)

    def _test_above(
        self,
        lane: Lane,
        places: list[ScanCursor],
        on_page: dict[int, Found],
        after_sequence: int,
        last: int,
        bring: Bring,
    ) -> None:
        """Test what is above the horizon, up to `last`: what is on a page, what is being written, and what was plucked
        already."""
        out_of_turn = lane.out_of_turn
        assert out_of_turn is not None, "somebody has a selector"
        here = {entry.sequence: entry for entry in lane.recent if after_sequence < entry.sequence <= last}
        here.update(place for place in out_of_turn.plucked.items() if after_sequence < place[0] <= last)
        from_recent: set[int] = set()
        for sequence in sorted(on_page.keys() | here.keys()):
            entry = here.get(sequence)
            message = on_page[sequence].message if entry is None else None
            for place in places:
                if place.position >= sequence or place.is_full:
                    continue
                if entry is not None:
                    if not entry.has_left_lane and place.test(entry) and sequence not in out_of_turn.strays:
                        from_recent.add(sequence)
                elif message is not None and place.wants(message, sequence):
                    entry = bring(lane, on_page[sequence])
                    if not entry.has_left_lane:
                        place.add(entry)
                place.passed(sequence)
        for place in places:
            if not place.is_full:
                place.passed(last)
        if from_recent:
            self._pluck_recent(lane, from_recent)
        end_horizon(lane)

    def _pluck_recent(self, lane: Lane, sequences: set[int]) -> None:
        for entry in lane.recent:
            if entry.sequence in sequences:
                assert entry.message is not None, "what is recent has not left memory yet"
                self._memory.leaving -= size_of(entry.message)
                pluck(lane, entry)
        lane.recent = deque(entry for entry in lane.recent if entry.sequence not in sequences)


def bytes_to_join(queue: Queue, selecting: Selecting | None, selector: Selector) -> int:
    """Bytes that one consumer more, with this selector, makes a queue take, which has this Selecting."""
    size = SELECTOR_BYTES + KEYED_BYTES * keys_of(selector)
    if selecting is None:
        size += SELECTING_BYTES + len(queue.lanes) * OUT_OF_TURN_BYTES
    elif selector.text in selecting.scans:
        return 0
    if queue.has_groups:
        return size + len(queue.lanes) * GROUP_LANE_BYTES
    return size + sum(lane.rank in selector.ranks for lane in queue.lanes) * SELECTOR_LANE_BYTES


def _no_page(lane: Lane, found: Found) -> Entry:
    raise AssertionError("there is no page")
