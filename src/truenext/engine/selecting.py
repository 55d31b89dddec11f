"""What the selectors of a queue's consumers want, wherever it is.

Each selector is one `Scan`, however many consumers have it. In each lane that there is, and that it can want anything
of, it has a `Place`; a lane that is made later gets one when it is made:

    tested                                 position            not tested yet
    <----- `found`: what it wants of it -----> | <--- in memory, in slices; in the store, page by page --->

What arrives where all is tested, or is given back where it is tested, is compared at once. So a consumer's next message
is the first of what was found; if there is none, and not all is tested, its consumers wait. What is found above the
horizon is plucked (aside.py): it comes into memory alone, and the horizon stays. If too much was found and not taken,
the position stays where it is until some was.

One slice of one queue in a turn, and one page at a time for all queues. Source: docs/contract.md, "True next"
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from truenext.engine.groups import GroupPlace, Groups
from truenext.engine.keyed import KeyedScans, keys_of
from truenext.engine.lane import WHOLE, Entry
from truenext.engine.memory import (
    ASIDE_BYTES,
    GROUP_LANE_BYTES,
    GROUPS_BYTES,
    KEYED_BYTES,
    SELECTING_BYTES,
    SELECTOR_BYTES,
    SELECTOR_LANE_BYTES,
    size_of,
)
from truenext.engine.paging import Look, damage
from truenext.engine.place import Place
from truenext.engine.redelivery import is_given_up
from truenext.limits import SCAN_BYTES, SCAN_PAGE_SIZE, SCAN_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from truenext.engine.consumer import Consumer
    from truenext.engine.delays import Delays
    from truenext.engine.lane import Lane
    from truenext.engine.memory import Memory
    from truenext.engine.paging import Found, PageRead, Paging
    from truenext.engine.queue import Queue
    from truenext.selector import Selector

    Pluck = Callable[[Lane, Found], Entry]
    """Brings a message of a page into memory; it may have to wait for its next try."""


class Scan:
    """What one selector wants of a queue."""

    __slots__ = ("consumers", "places", "selector")

    def __init__(self, selector: Selector | None, places: dict[int, Place]) -> None:
        self.selector = selector
        """None wants all; only where there are groups."""
        self.consumers = 0
        self.places = places
        """By rank, those of the lanes in which there can be anything that is wanted."""

    def waits_at(self) -> int | None:
        """The rank of the lane of which something has to be tested or read before anything else can be dispatched,
        should there be nothing before that; None if there is none."""
        for rank, place in self.places.items():
            entry = place.first()
            if (entry is None and place.is_behind) or (entry is not None and entry.message is None):
                return rank
        return None


class ScanRead(Look):
    """A page that is read to be tested."""

    __slots__ = ("rises",)

    def __init__(self, lane: Lane, after_sequence: int) -> None:
        super().__init__(lane, after_sequence, min(lane.queue.policy.page_size, SCAN_PAGE_SIZE), SCAN_BYTES)
        assert lane.aside is not None, "somebody has a selector"
        self.rises = lane.aside.rises


class Selecting:
    """The selectors of one queue."""

    __slots__ = ("_keyed", "_memory", "behind", "queue", "scans")

    def __init__(self, queue: Queue, memory: Memory) -> None:
        self._memory = memory
        self.queue = queue
        self.scans: dict[str, Scan] = {}
        """By the text of the selector."""
        memory.queues += SELECTING_BYTES
        self._keyed = KeyedScans()
        self.behind: dict[Place, None] = {}
        """Places that are not tested to their ends."""
        for lane in queue.lanes:
            lane.begin_aside()

    def made(self, lane: Lane) -> None:
        """There is a new lane; nothing is in it."""
        lane.begin_aside()
        for scan in self.scans.values():
            if self._may_want(scan.selector, lane):
                self._memory.queues -= self._bytes_of(scan)
                places = {**scan.places, lane.rank: self._new_place(scan.selector, lane)}
                scan.places = dict(sorted(places.items()))
                self._memory.queues += self._bytes_of(scan)

    def join(self, consumer: Consumer, selector: Selector | None) -> None:
        text = "" if selector is None else selector.text
        scan = self.scans.get(text)
        if scan is None:
            scan = self.scans[text] = Scan(selector, self._new_places(selector))
            self._memory.queues += self._bytes_of(scan)
            self._keyed.add(scan)
            self.behind.update((place, None) for place in scan.places.values() if place.is_behind)
        scan.consumers += 1
        consumer.scan_with(self.queue, scan)

    def leave(self, consumer: Consumer) -> None:
        scan = consumer.scan_of(self.queue)
        if scan is not None:
            scan.consumers -= 1
            if not scan.consumers:
                del self.scans["" if scan.selector is None else scan.selector.text]
                self._memory.queues -= self._bytes_of(scan)
                self._keyed.remove(scan)
                for place in scan.places.values():
                    self.behind.pop(place, None)

    def _new_places(self, selector: Selector | None) -> dict[int, Place]:
        lanes = (lane for lane in self.queue.lanes if self._may_want(selector, lane))
        return {lane.rank: self._new_place(selector, lane) for lane in lanes}

    def _may_want(self, selector: Selector | None, lane: Lane) -> bool:
        # Where there are groups any lane: a message that waits for its next try holds back its group.
        return self.queue.groups is not None or (selector is not None and lane.rank in selector.ranks)

    def _new_place(self, selector: Selector | None, lane: Lane) -> Place:
        groups = self.queue.groups
        return Place(lane, selector) if groups is None else GroupPlace(lane, selector, groups)

    def _bytes_of(self, scan: Scan) -> int:
        of_lane = SELECTOR_LANE_BYTES if self.queue.groups is None else GROUP_LANE_BYTES
        return SELECTOR_BYTES + KEYED_BYTES * keys_of(scan.selector) + len(scan.places) * of_lane

    def end(self) -> None:
        """Nobody needs it any more, or there is no queue."""
        queue = self.queue
        self._memory.queues -= SELECTING_BYTES + sum(map(self._bytes_of, self.scans.values()))
        if queue.groups is not None:
            self._memory.queues -= GROUPS_BYTES + queue.groups.size
        self.scans.clear()
        queue.selecting = queue.groups = None
        for lane in queue.lanes:
            lane.end_aside()

    def begin_groups(self) -> None:
        """All is tested anew, for all consumers."""
        queue = self.queue
        self._memory.queues += GROUPS_BYTES - sum(map(self._bytes_of, self.scans.values()))
        queue.groups = Groups(self.group_places, self._memory)
        self.scans.clear()
        self._keyed.clear()
        self.behind.clear()
        for consumer in queue.all_consumers():
            scan = consumer.scan_of(queue)
            self.join(consumer, None if scan is None else scan.selector)

    def group_places(self) -> Iterator[GroupPlace]:
        for scan in self.scans.values():
            for place in scan.places.values():
                assert isinstance(place, GroupPlace), "there are groups"
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
            lane.pluck(entry)
            lane.end_horizon()

    def came_back(self, entry: Entry) -> None:
        """A message is in its lane again."""
        for scan in self.scans.values():
            place = scan.places.get(entry.lane.rank)
            if place is not None:
                place.came_back(entry)

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

    def next_place(self) -> Place | None:
        """Where something is to be tested, in the order of the lanes. Half of what may wait has to be taken first."""
        return min(
            (place for place in self.behind if place.has_room),
            key=lambda place: place.lane.rank,
            default=None,
        )

    def step(self, place: Place, *, can_read: bool) -> ScanRead | bool:
        """Test a slice. Returns the page that is needed to go on, if one is; True if one is and none can be read."""
        lane = place.lane
        left = SCAN_SIZE
        while left > 0 and place.is_behind and not place.is_full:
            if place.noted:
                left -= place.test_noted(left)
            elif place.position < lane.horizon:
                place.note()
                left -= 1
            elif lane.needs_page:
                return ScanRead(lane, place.position) if can_read else True
            else:
                self._test_above(lane, [place], {}, place.position, WHOLE, _no_page)
        if not place.is_behind:
            self.behind.pop(place, None)
        return False

    def is_current(self, read: ScanRead) -> bool:
        """What a page does not show is still where it was when that was asked for."""
        lane = read.lane
        return lane.aside is not None and lane.aside.rises == read.rises and lane.horizon <= read.after_sequence

    def test_page(self, read: ScanRead, found: list[Found], last: int, pluck: Pluck) -> None:
        """Test what a page shows, up to `last`."""
        lane = read.lane
        after_sequence = read.after_sequence
        places = [place for place in self.behind if place.lane is lane and after_sequence <= place.position < last]
        self._test_above(lane, places, {one.sequence: one for one in found}, after_sequence, last, pluck)
        for place in places:
            if not place.is_behind:
                self.behind.pop(place, None)

    def _test_above(
        self,
        lane: Lane,
        places: list[Place],
        on_page: dict[int, Found],
        after_sequence: int,
        last: int,
        pluck: Pluck,
    ) -> None:
        """Test what is above the horizon, up to `last`: what is on a page, what is being written, and what was plucked
        already."""
        aside = lane.aside
        assert aside is not None, "somebody has a selector"
        here = {entry.sequence: entry for entry in lane.recent if after_sequence < entry.sequence <= last}
        here.update(place for place in aside.plucked.items() if after_sequence < place[0] <= last)
        from_recent: set[int] = set()
        for sequence in sorted(on_page.keys() | here.keys()):
            entry = here.get(sequence)
            message = on_page[sequence].message if entry is None else None
            for place in places:
                if place.position >= sequence or place.is_full:
                    continue
                if entry is not None:
                    if not entry.is_taken and place.test(entry) and sequence not in aside.strays:
                        from_recent.add(sequence)
                elif message is not None and place.wants(message, sequence):
                    entry = pluck(lane, on_page[sequence])
                    if not entry.is_taken:
                        place.add(entry)
                place.passed(sequence)
        for place in places:
            if not place.is_full:
                place.passed(last)
        if from_recent:
            self._pluck_recent(lane, from_recent)
        lane.end_horizon()

    def _pluck_recent(self, lane: Lane, sequences: set[int]) -> None:
        for entry in lane.recent:
            if entry.sequence in sequences:
                assert entry.message is not None, "what is recent has not left memory yet"
                self._memory.leaving -= size_of(entry.message)
                lane.pluck(entry)
        lane.recent = deque(entry for entry in lane.recent if entry.sequence not in sequences)


def _needs_groups(queue: Queue) -> bool:
    """Nobody takes from it; a message of a group may be there, or come back."""
    return queue.groups is not None and (queue.is_needed or queue.has_lost_bodies)


def bytes_to_join(queue: Queue, selector: Selector) -> int:
    """Bytes that one consumer more, with this selector, makes a queue take."""
    selecting = queue.selecting
    size = SELECTOR_BYTES + KEYED_BYTES * keys_of(selector)
    if selecting is None:
        size += SELECTING_BYTES + len(queue.lanes) * ASIDE_BYTES
    elif selector.text in selecting.scans:
        return 0
    if queue.groups is not None:
        return size + len(queue.lanes) * GROUP_LANE_BYTES
    return size + sum(lane.rank in selector.ranks for lane in queue.lanes) * SELECTOR_LANE_BYTES


def _no_page(lane: Lane, found: Found) -> Entry:
    raise AssertionError("there is no page")


class Selections:
    """The selectors of all queues: whose turn it is to be compared."""

    __slots__ = ("_active", "_delays", "_memory", "_paging", "_reading", "_waiting")

    def __init__(self, memory: Memory, paging: Paging, delays: Delays) -> None:
        self._memory = memory
        self._paging = paging
        self._delays = delays
        self._active: dict[Selecting, None] = {}
        """Those that have something to test, the one that was served last at the end."""
        self._waiting: dict[Selecting, None] = {}
        """Those that need a page when the one that is being read is there."""
        self._reading: ScanRead | None = None

    @property
    def has_work(self) -> bool:
        """A step would do something."""
        return bool(self._active)

    def subscribe(self, consumer: Consumer, queue: Queue, selector: Selector | None) -> None:
        """To be told of those with a selector, and of all where there are groups."""
        selecting = self._of(queue)
        selecting.join(consumer, selector)
        self.go_on(selecting)

    def begin_groups(self, queue: Queue) -> None:
        """A queue has a message of a group, for the first time in this run."""
        selecting = self._of(queue)
        selecting.begin_groups()
        self.go_on(selecting)

    def _of(self, queue: Queue) -> Selecting:
        selecting = queue.selecting
        if selecting is None:
            selecting = queue.selecting = Selecting(queue, self._memory)
        return selecting

    def leave(self, consumer: Consumer, queue: Queue) -> None:
        if queue.selecting is not None:
            queue.selecting.leave(consumer)
            if not queue.selecting.scans and not _needs_groups(queue):
                self.drop(queue)

    def drop(self, queue: Queue) -> None:
        """There is nobody with a selector any more, and nothing of a group; or no queue."""
        selecting = queue.selecting
        if selecting is not None:
            self._active.pop(selecting, None)
            self._waiting.pop(selecting, None)
            selecting.end()

    def go_on(self, selecting: Selecting) -> None:
        """Something may have become possible."""
        reading = self._reading
        if selecting in self._waiting or (reading is not None and reading.lane.queue is selecting.queue):
            return
        if selecting.behind and selecting.next_place() is not None:
            self._active[selecting] = None

    def step(self) -> tuple[Queue, ScanRead | None] | None:
        """Test a slice of one queue. Returns that, and a page of it that is wanted."""
        selecting = next(iter(self._active), None)
        if selecting is None:
            return None
        del self._active[selecting]
        place = selecting.next_place()
        if place is None:
            return selecting.queue, None
        read = selecting.step(place, can_read=self._reading is None)
        if isinstance(read, ScanRead):
            self._reading = read
            assert read.lane.aside is not None, "somebody has a selector"
            read.lane.aside.scanning += 1
            read.begin()
            return selecting.queue, read
        if read:
            self._waiting[selecting] = None
        else:
            self.go_on(selecting)
        return selecting.queue, None

    def page_read(self, read: ScanRead, page: PageRead) -> list[Entry]:
        """Test a page, which names no batch that is not known to be durable.

        Returns the messages in it that failed too often: they stand in no lane any more.

        Raises: StoreError if the store has lost something
        """
        read.end()
        lane = read.lane
        self._reading = None
        waiting, self._waiting = self._waiting, {}
        self._active.update(waiting)
        if lane.aside is not None:
            # Else its subscription has ended.
            lane.aside.scanning -= 1
            if lane.queue.selecting is None:
                lane.end_aside()
        failed: list[Entry] = []
        if not (page.found or page.is_end):
            raise damage(lane, "a page is empty, but not the last")
        selecting = lane.queue.selecting
        if selecting is not None:
            if lane.queue.groups is None and any(one.message is not None and one.message.group for one in page.found):
                # Nothing was tested for them yet, so this page is none that anybody waits for.
                self.begin_groups(lane.queue)
            elif selecting.is_current(read):
                self._test(selecting, read, page, failed)
            self.go_on(selecting)
        self._paging.let_go_of(lane)
        return failed

    def _test(self, selecting: Selecting, read: ScanRead, page: PageRead, failed: list[Entry]) -> None:
        lane = read.lane
        aside = lane.aside
        assert aside is not None, "somebody has a selector"
        tested: list[Found] = []
        waiting: list[Found] = []
        recent = {entry.sequence for entry in lane.recent}
        for found in page.found:
            sequence = found.sequence
            if sequence in lane.taken_out or sequence in aside.strays or sequence in recent or found.message is None:
                continue
            if is_given_up(lane.queue, found.mark.attempts, found.mark.due_ms):
                failed.append(self._paging.entry(lane, found, found.message))
                lane.unread -= 1
            elif found.message.group and self._delays.left_ms(found.mark.due_ms):
                # Whoever wants it, it holds back its group.
                waiting.append(found)
            else:
                tested.append(found)

        def pluck(lane: Lane, found: Found) -> Entry:
            assert found.message is not None, "it is wanted"
            entry = self._paging.entry(lane, found, found.message)
            lane.pluck(entry)
            if self._delays.restore(entry, found.mark.due_ms):
                self._paging.delay_stray(entry)
            elif entry.due_us:
                self._paging.shows_waiting(entry)
            return entry

        for found in waiting:
            pluck(lane, found)
        last = WHOLE if page.is_end else page.found[-1].sequence
        selecting.test_page(read, tested, last, pluck)
