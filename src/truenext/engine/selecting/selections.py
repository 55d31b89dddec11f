"""The selectors of all queues, and in which order their scans go on.

One slice of one queue in a turn, and one page at a time for all queues.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from truenext.engine.memory.horizon import pluck
from truenext.engine.selecting.scan import Scan, Scans
from truenext.engine.selecting.selecting import Selecting, bytes_to_join
from truenext.engine.state.pages import Found, Look, PageRead, damage
from truenext.engine.state.queue import WHOLE, is_given_up
from truenext.engine.writing.background_task import BackgroundTask
from truenext.limits import SCAN_BYTES, SCAN_PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from truenext.engine.memory.delays import Delays
    from truenext.engine.memory.reading import Reading
    from truenext.engine.memory.resident_set import ResidentSet
    from truenext.engine.selecting.groups import Groups
    from truenext.engine.state.clients import Clients
    from truenext.engine.state.consumer import BrokerConsumer
    from truenext.engine.state.memory import Memory
    from truenext.engine.state.queue import Entry, Lane, Queue
    from truenext.engine.writing.ledger import Ledger
    from truenext.selector import Selector


class ScanRead(Look):
    """A page that is read to be tested."""

    __slots__ = ("_selections", "rises")

    is_for_consumers = True

    def __init__(self, selections: Selections, lane: Lane, after_sequence: int) -> None:
        super().__init__(lane, after_sequence, min(lane.queue.policy.page_size, SCAN_PAGE_SIZE), SCAN_BYTES)
        assert lane.out_of_turn is not None, "somebody has a selector"
        self._selections = selections
        self.rises = lane.out_of_turn.rises
        lane.out_of_turn.scanning += 1

    def on_page(self, page: PageRead) -> None:
        self._selections.page_read(self, page)


class Selections(BackgroundTask):
    __slots__ = (
        "_active",
        "_clients",
        "_delays",
        "_ledger",
        "_memory",
        "_reading",
        "_resident",
        "_scanned",
        "_waiting",
        "of_queue",
        "scans",
    )

    def __init__(
        self,
        ledger: Ledger,
        memory: Memory,
        clients: Clients,
        delays: Delays,
        resident: ResidentSet,
        reading: Reading,
    ) -> None:
        self._ledger = ledger
        self._memory = memory
        self._delays = delays
        self._resident = resident
        self._reading = reading
        self._clients = clients
        self.scans = Scans()
        self.of_queue: dict[Queue, Selecting] = {}
        """Those of which some consumers have selectors, or that have groups."""
        self._active: dict[Selecting, None] = {}
        """Those that have something to test, the one that was served last at the end."""
        self._waiting: dict[Selecting, None] = {}
        """Those that need a page when the one that is being read is there."""
        self._scanned: ScanRead | None = None
        """The page that is being read."""

    @property
    def has_any(self) -> bool:
        return bool(self._active)

    def is_due(self) -> bool:
        return bool(self._active)

    def subscribe(self, consumer: BrokerConsumer, queue: Queue, selector: Selector | None) -> None:
        """To be told of those with a selector, and of all where there are groups."""
        selecting = self._of(queue)
        selecting.join(consumer, selector)
        self.go_on(selecting)

    def start_groups(self, queue: Queue) -> None:
        """A queue has a message of a group, for the first time in this run."""
        selecting = self._of(queue)
        selecting.start_groups(self._clients.receivers_of(queue).all())
        self.go_on(selecting)

    def _of(self, queue: Queue) -> Selecting:
        selecting = self.of_queue.get(queue)
        if selecting is None:
            selecting = self.of_queue[queue] = queue.watcher = Selecting(queue, self._memory, self.scans)
        return selecting

    def scan_of(self, consumer: BrokerConsumer, queue: Queue) -> Scan | None:
        """What is wanted of a queue by a consumer with a selector; of one with groups everybody has one."""
        return self.scans.of(consumer, queue)

    def bytes_to_join(self, queue: Queue, selector: Selector) -> int:
        """Bytes that one consumer more, with this selector, makes a queue take."""
        return bytes_to_join(queue, self.of_queue.get(queue), selector)

    def groups_of(self, queue: Queue) -> Groups:
        """To be asked of a queue in which a message has a group."""
        return self.of_queue[queue].known_groups

    def leave(self, consumer: BrokerConsumer, queue: Queue) -> None:
        selecting = self.of_queue.get(queue)
        if selecting is not None:
            selecting.leave(consumer)
            if selecting.groups is not None:
                selecting.groups.left(consumer)
            if not selecting.scans and not _needs_groups(queue):
                self.drop(queue)

    def drop(self, queue: Queue) -> None:
        """There is nobody with a selector any more, and nothing of a group; or no queue."""
        selecting = self.of_queue.pop(queue, None)
        if selecting is not None:
            for consumer in self._clients.receivers_of(queue).all():
                self.scans.end(consumer, queue)
            self._active.pop(selecting, None)
            self._waiting.pop(selecting, None)
            selecting.end()

    def go_on_in(self, queue: Queue) -> None:
        """Something may have become possible in a queue."""
        selecting = self.of_queue.get(queue)
        if selecting is not None:
            self.go_on(selecting)

    def go_on(self, selecting: Selecting) -> None:
        """Something may have become possible."""
        scanned = self._scanned
        if selecting in self._waiting or (scanned is not None and scanned.lane.queue is selecting.queue):
            return
        if selecting.behind and selecting.next_place() is not None:
            self._active[selecting] = None
            self._ledger.busy[self] = None

    def step(self) -> Sequence[ScanRead]:
        """Test a slice of one queue."""
        selecting = next(iter(self._active))
        del self._active[selecting]
        self._ledger.touched[selecting.queue] = None
        place = selecting.next_place()
        if place is None:
            return ()
        if not selecting.step(place):
            self.go_on(selecting)
        elif self._scanned is not None:
            self._waiting[selecting] = None
        else:
            self._scanned = ScanRead(self, place.lane, place.position)
            return (self._scanned,)
        return ()

    def page_read(self, read: ScanRead, page: PageRead) -> None:
        """Test a page, which names no batch that is not known to be durable.

        Raises: StoreError if the store has lost something
        """
        lane = read.lane
        self._scanned = None
        waiting, self._waiting = self._waiting, {}
        self._active.update(waiting)
        self._ledger.busy[self] = None
        if lane.out_of_turn is not None:
            # Else its subscription has ended.
            lane.out_of_turn.scanning -= 1
            if lane.queue.watcher is None:
                lane.end_out_of_turn()
        if not (page.found or page.is_end):
            raise damage(lane, "a page is empty, but not the last")
        selecting = self.of_queue.get(lane.queue)
        if selecting is not None:
            if _is_current(read):
                self._test(selecting, read, page)
            self.go_on(selecting)
        self._resident.free_durable_of(lane)

    def _test(self, selecting: Selecting, read: ScanRead, page: PageRead) -> None:
        lane = read.lane
        tested: list[Found] = []
        waiting: list[Found] = []
        recent = {entry.sequence for entry in lane.recent}
        for found in page.found:
            if found.message is None or found.sequence in recent or not lane.is_only_in_store(found.sequence):
                continue
            if is_given_up(lane.queue, found.mark.attempts, found.mark.due_ms):
                self._reading.collect_failed(self._reading.entry(lane, found, found.message))
                lane.unread -= 1
            elif found.message.group and self._delays.left_ms(found.mark.due_ms):
                # Whoever wants it, it holds back its group.
                waiting.append(found)
            else:
                tested.append(found)

        def bring(lane: Lane, found: Found) -> Entry:
            assert found.message is not None, "it is wanted"
            entry = self._reading.entry(lane, found, found.message)
            pluck(lane, entry)
            if self._delays.restore(entry, found.mark.due_ms):
                self._reading.delay_stray(entry)
            elif entry.due_us:
                self._reading.collect_waiting(entry)
            return entry

        for found in waiting:
            bring(lane, found)
        last = WHOLE if page.is_end else page.found[-1].sequence
        selecting.test_page(lane, read.after_sequence, last, tested, bring)


def _is_current(read: ScanRead) -> bool:
    """What a page does not show is still where it was when that was asked for."""
    lane = read.lane
    return lane.out_of_turn is not None and lane.out_of_turn.rises == read.rises and lane.horizon <= read.after_sequence


def _needs_groups(queue: Queue) -> bool:
    """Nobody takes from it; a message of a group may be there, or come back."""
    return queue.has_groups and (queue.is_needed or queue.has_lost_bodies)
