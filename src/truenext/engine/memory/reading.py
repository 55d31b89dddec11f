"""What is read from the store, and what becomes of a page of it.

The engine does not read. It says in the effects of a turn which pages it wants, and is told later what was there.

    a lane's consumers wait, or soon will       `ask`        a page of the lane, and its horizon moves up
    somebody waits for one out of its turn      `ask_body`   a page of that message, and of what follows it
    a page shows a message that is needed       `entry`      it is in memory from then on
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from truenext.batch import DUE_NEVER, NO_CAUSES, NO_MARK
from truenext.engine.memory.horizon import is_stored
from truenext.engine.state.causes import IN_STORE
from truenext.engine.state.empty import with_sequence
from truenext.engine.state.pages import Look, PageRead, Read, damage
from truenext.engine.state.queue import WHOLE, Entry, is_given_up
from truenext.limits import PAGE_BYTES, PAGE_BYTES_SHORT, PAGE_SIZE_SHORT

if TYPE_CHECKING:
    from truenext.batch import Causes
    from truenext.engine.memory.delays import Delays
    from truenext.engine.memory.resident_set import ResidentSet
    from truenext.engine.state.memory import Memory
    from truenext.engine.state.pages import Found
    from truenext.engine.state.queue import Lane
    from truenext.message import SentMessage


class LanePage(Read):
    """The next page of a lane."""

    __slots__ = ("_reading",)

    is_for_consumers = True

    def __init__(self, reading: Reading, lane: Lane, after_sequence: int, limit: int, size_max: int) -> None:
        super().__init__(lane, after_sequence, limit, size_max)
        self._reading = reading

    def on_page(self, page: PageRead) -> None:
        self._reading.page_read(self, page)


class BodyRead(Look):
    """A message that was taken out of its turn and has left memory; what follows it may come as well."""

    __slots__ = ("_reading", "entry")

    is_for_consumers = True

    def __init__(self, reading: Reading, entry: Entry) -> None:
        super().__init__(entry.lane, entry.sequence - 1, PAGE_SIZE_SHORT, PAGE_BYTES_SHORT)
        self._reading = reading
        self.entry = entry

    def on_page(self, page: PageRead) -> None:
        self._reading.body_read(self, page)


class Reading:
    def __init__(self, memory: Memory, resident: ResidentSet, delays: Delays, *, redelivered_below: int) -> None:
        """Messages with a sequence below `redelivered_below` may have been dispatched without a trace."""
        self._memory = memory
        self._resident = resident
        self._delays = delays
        self._redelivered_below = redelivered_below
        self._reads: list[Read] = []
        self._failed: list[Entry] = []
        self._waiting: list[Entry] = []
        """Messages of the last pages that wait for their next try."""

    def ask(self, lane: Lane) -> None:
        """The consumers of a queue wait for this lane, or came to it last: see that they need not wait long."""
        if lane.reading is not None:
            return
        head = lane.head()
        queue = lane.queue
        is_short = queue.resident + PAGE_BYTES > queue.policy.memory_limit
        if self._memory.excess + PAGE_BYTES > 0:
            is_short = self._memory.is_short = True
        if head is not None and head.message is None:
            after_sequence = head.sequence - 1
        elif lane.needs_page and (
            head is None or (not is_short and len(lane.arrived) < queue.policy.page_size // 2 and not lane.returned)
        ):
            after_sequence = lane.horizon
        else:
            return
        if is_short:
            # What is not taken at once may have to leave again.
            self._read(lane, after_sequence, min(queue.policy.page_size, PAGE_SIZE_SHORT), PAGE_BYTES_SHORT)
        else:
            self._read(lane, after_sequence, queue.policy.page_size, PAGE_BYTES)

    def take_reads(self) -> list[Read]:
        """What is to be read from the store."""
        for entry in self._resident.awaiting_dead_letter():
            if entry.lane.out_of_turn is not None and entry.sequence in entry.lane.out_of_turn.strays:
                self.ask_body(entry)
            elif entry.lane.reading is None:
                self._read(entry.lane, entry.sequence - 1, 1, PAGE_BYTES)
        reads, self._reads = self._reads, []
        return reads

    def ask_body(self, entry: Entry) -> None:
        """Somebody waits for this one, out of its turn."""
        lane = entry.lane
        assert lane.out_of_turn is not None, "it was taken out of its turn, or may be"
        if entry.sequence not in lane.out_of_turn.bodies_being_read:
            lane.out_of_turn.bodies_being_read = with_sequence(lane.out_of_turn.bodies_being_read, entry.sequence)
            read = BodyRead(self, entry)
            self._reads.append(read)

    def body_read(self, read: BodyRead, page: PageRead) -> None:
        """Take in the message that was to be read, and what follows it.

        Raises: StoreError if the store has lost the message
        """
        lane, wanted = read.lane, read.entry
        if lane.out_of_turn is not None:
            lane.out_of_turn.bodies_being_read.discard(wanted.sequence)
        is_there = lane.bodiless.get(wanted.sequence) is not wanted
        for found in page.found:
            entry = lane.bodiless.pop(found.sequence, None)
            if entry is not None:
                is_there |= entry is wanted
                if self._restore_body(entry, found) and entry.message is not None:
                    self._failed.append(entry)
        if not is_there:
            raise damage(lane, "a message is not there any more")

    def _read(self, lane: Lane, after_sequence: int, limit: int, size_max: int) -> None:
        read = lane.reading = LanePage(self, lane, after_sequence, limit, size_max)
        self._reads.append(read)

    def page_read(self, read: LanePage, page: PageRead) -> None:
        """Take in a page, which names no batch that is not known to be durable.

        Raises: StoreError if the store has lost something.
        """
        lane = read.lane
        if lane.reading is not read:
            # Meanwhile the lane lost what follows on the page, or got back what the page has.
            self._resident.free_durable_of(lane)
            return
        lane.reading = None
        if not (page.found or page.is_end):
            raise damage(lane, "a page is empty, but not the last")
        up_to = WHOLE if page.is_end else page.found[-1].sequence
        fresh: list[Entry] = []
        left_out = 0
        for found in page.found:
            if found.sequence in lane.bodiless:
                entry = lane.bodiless.pop(found.sequence)
                was_doomed = self._restore_body(entry, found)
                if was_doomed and entry.message is not None:
                    self.collect_failed(entry)
            elif lane.is_only_in_store(found.sequence):
                if found.message is None:
                    left_out += 1
                    continue
                entry = self.entry(lane, found, found.message)
                if is_given_up(lane.queue, entry.attempts, entry.due_us):
                    left_out += 1
                    self.collect_failed(entry)
                elif self._delays.restore(entry, found.mark.due_ms):
                    left_out += 1
                    self._wait_without_body(entry)
                    self._waiting.append(entry)
                else:
                    fresh.append(entry)
                    if entry.due_us:
                        self._waiting.append(entry)
        # What was written after the page was read, and has left memory since, is on the next page.
        if any(
            read.after_sequence < sequence <= up_to and is_stored(entry, page.as_of)
            for sequence, entry in lane.bodiless.items()
        ):
            raise damage(lane, "a message is not there any more")
        if up_to > lane.horizon:
            self._resident.move_horizon(lane, fresh, left_out, up_to, page.as_of)
        self._resident.free_durable_of(lane)

    def collect_failed(self, entry: Entry) -> None:
        """A message that a page showed failed too often: it stands in no lane any more."""
        self._failed.append(entry)
        self._resident.left_with_page(entry)

    def take_failed(self) -> list[Entry]:
        """Those of pages since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def take_waiting(self) -> list[Entry]:
        """Messages of pages since the last call that wait for their next try."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def collect_waiting(self, entry: Entry) -> None:
        """A message that a page showed waits for its next try."""
        self._waiting.append(entry)

    def delay_stray(self, entry: Entry) -> None:
        """The same for one that was plucked, and that others pass meanwhile: it keeps its place, but not its body."""
        lane = entry.lane
        assert lane.out_of_turn is not None, "it was plucked"
        del lane.out_of_turn.plucked[entry.sequence]
        entry.has_left_lane = True
        self._resident.left_for_disk(entry, is_known=True)
        lane.delay(entry)
        self._waiting.append(entry)

    def _wait_without_body(self, entry: Entry) -> None:
        """A message of a page waits for its next try: without its body, as it may for days."""
        lane = entry.lane
        self._resident.left_for_disk(entry, is_known=True)
        lane.delay(entry)
        lane.horizon_min = max(lane.horizon_min, entry.sequence)

    def entry(self, lane: Lane, found: Found, message: SentMessage) -> Entry:
        """Of a message that only the store had until now."""
        attempts, deliveries, due_ms, was_lost = found.mark
        if found.sequence < self._redelivered_below:
            deliveries = max(deliveries, 1)
        entry = Entry(
            sequence=found.sequence,
            message=message,
            lane=lane,
            batch=0,
            persistent=message.persistent,
            stored=0,
            deliveries=deliveries,
            attempts=attempts,
            marked=found.mark != NO_MARK,
            due_us=DUE_NEVER if due_ms == DUE_NEVER else 0,
            group=message.group,
            content=found.content,
            was_lost=was_lost,
        )
        if found.causes is not NO_CAUSES:
            entry.causes = IN_STORE
        self._take_in(entry, message, found.causes)
        return entry

    def _take_in(self, entry: Entry, message: SentMessage, causes: Causes) -> None:
        self._resident.back_from_disk(entry, message)
        self._resident.causes_back_from_disk(entry, causes)

    def _restore_body(self, entry: Entry, found: Found) -> bool:
        """A message that has left memory is back, if its record is not damaged. True if it is to be dead-lettered,
        whatever its policy says by now: it stands in no lane."""
        was_doomed = self._resident.stop_awaiting_dead_letter(entry)
        if found.message is None:
            entry.lane.leave_out(entry)
        else:
            entry.message = found.message
            self._take_in(entry, found.message, found.causes)
        return was_doomed
