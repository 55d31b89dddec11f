"""Which messages are in memory: what is read from the store, and what leaves when memory is short.

The engine does not read. It says in the effects of a turn which pages it wants, and is told later what was there.

    a lane's consumers wait, or soon will    -> `ask`       -> a Read for the store
    the page is there                        -> `page_read` -> the lane's horizon moves up
    memory is short                          -> `relieve`   -> horizons move down; bodies of held messages go
    a batch is durable                       -> `let_go`    -> what was only waiting for that leaves

A transient that leaves becomes a record in the store like any other, written with the gathering batch; nobody waits
for it. Copies of one message that wait in several subscriptions leave together, so that their content is written once.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import groupby
from operator import attrgetter
from sys import maxsize
from typing import TYPE_CHECKING

import msgspec

from truenext.batch import DUE_NEVER, NO_MARK, Mark
from truenext.engine.copies import put_all
from truenext.engine.empty import with_sequence
from truenext.engine.lane import NO_ENTRIES, WHOLE, Entry, is_stored
from truenext.engine.memory import ENTRY_BYTES, size_of
from truenext.engine.redelivery import is_given_up
from truenext.engine.writing import put
from truenext.errors import StoreError
from truenext.limits import (
    PAGE_BYTES,
    PAGE_BYTES_SHORT,
    PAGE_SIZE_SHORT,
    REPLIES_BYTES,
    STORE_TRANSACTION_BYTES_MAX,
)
from truenext.order import PRIORITY_MAX, RANKS
from truenext.record import split_lane_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from truenext.engine.delays import Delays
    from truenext.engine.lane import Lane
    from truenext.engine.ledger import Ledger
    from truenext.engine.memory import Memory
    from truenext.engine.queue import Queue
    from truenext.message import Message


RELIEF = 4
"""Where a limit is passed a quarter of it is made free: messages leave many at a time."""

NEVER = (-1, 0)


class Read:
    """A page that is wanted."""

    __slots__ = ("after_sequence", "lane", "limit", "size_max")

    def __init__(self, lane: Lane, after_sequence: int, limit: int, size_max: int) -> None:
        self.lane = lane
        self.after_sequence = after_sequence
        self.limit = limit
        """Messages, at most."""
        self.size_max = size_max
        """Bytes of records, at most, unless the first is larger."""


class Look(Read):
    """A page that is nobody's next page: what is on it stays where it is, as far as the lane is concerned."""

    __slots__ = ()

    def begin(self) -> None:
        """It is wanted: the lane remembers what leaves it until `end`."""
        self.lane.looks += 1

    def end(self) -> None:
        self.lane.looks -= 1


class BodyRead(Look):
    """A message that was taken out of its turn and has left memory; what follows it may come as well."""

    __slots__ = ("entry",)

    def __init__(self, entry: Entry) -> None:
        super().__init__(entry.lane, entry.sequence - 1, PAGE_SIZE_SHORT, PAGE_BYTES_SHORT)
        self.entry = entry


class Found(msgspec.Struct, gc=False):
    """One message of a page."""

    sequence: int
    message: Message | None
    """None if its record is damaged."""
    mark: Mark = NO_MARK
    content: int = 0
    """The number of the content that it shares with others; 0 if its record has its own."""


class PageRead(msgspec.Struct, gc=False):
    """What was there."""

    found: list[Found]
    """In order of sequence."""
    as_of: int
    """Every batch up to this one is in it; what later ones did may be missing."""
    is_end: bool
    """As of then, there was nothing behind it."""


class Paging:
    def __init__(self, ledger: Ledger, memory: Memory, delays: Delays, *, redelivered_below: int) -> None:
        """Messages with a sequence below `redelivered_below` may have been dispatched without a trace."""
        self._ledger = ledger
        self._memory = memory
        self._delays = delays
        self.begin_groups: Callable[[Queue], None] | None = None
        """To be told of a queue of which a message has a group, the first time."""
        self.begin_spilling: Callable[[Queue], None] | None = None
        """To be told of a subscription that ends with its connection before anything of it leaves memory, the first
        time."""
        self._redelivered_below = redelivered_below
        self._reads: list[Read] = []
        self._doomed: list[Entry] = []
        """Failed too often, and to be read before they can move to the dead-letter queue."""
        self._with_recent: dict[Lane, None] = {}
        """Lanes from which something leaves once it is durable."""
        self._with_taken_out: dict[Lane, None] = {}
        self._waiting: list[Entry] = []
        """Messages of the last pages that wait for their next try."""
        self._too_large: dict[Queue, None] = {}
        """Queues that may be over their own limit."""
        self._still_too_large: dict[Queue, None] = {}
        """Queues that are, from which more can leave once a write under way is durable."""
        self._limited: dict[Queue, None] = {}
        """Subscriptions that end with their connections, have a limit of their own, and have something on disk."""
        self._futile = NEVER
        """The last batch, and what was used, when everything that could leave had left."""
        self._is_short = False
        """A page was wanted for which there is hardly room."""

    # ---- What comes and goes, message by message ----

    def came(self, entry: Entry, message: Message) -> None:
        """A message is in memory, in its lane or held."""
        size = size_of(message)
        queue = entry.lane.queue
        self._memory.used += size
        queue.resident += size
        queue.in_memory += 1
        if queue.resident > queue.policy.memory_limit:
            self._too_large[queue] = None

    def went(self, entry: Entry) -> None:
        """A message is done with, or only the store has it from here on."""
        message = entry.message
        if message is not None:
            # size_of, without the call.
            size = len(message.body) + len(message.header) + ENTRY_BYTES
            self._memory.used -= size
            queue = entry.lane.queue
            queue.resident -= size
            queue.in_memory -= 1
            entry.message = None
        elif entry.lane.queue.spilled_sizes:
            queue = entry.lane.queue
            queue.spilled -= queue.spilled_sizes.pop(entry.sequence, 0)

    def _leave(self, entry: Entry, *, is_known: bool) -> None:
        """A message stays in its queue, and only the store has it from here on, or all of it but its place."""
        queue = entry.lane.queue
        if queue.is_subscription:
            assert entry.message is not None, "it has not left yet"
            size = size_of(entry.message)
            queue.spilled += size
            if is_known:
                queue.spilled_sizes[entry.sequence] = size
            if queue.policy.memory_limit != maxsize:
                self._limited[queue] = None
        self.went(entry)

    def _is_back(self, entry: Entry, message: Message) -> None:
        """A message that only the store had is in memory again."""
        queue = entry.lane.queue
        if queue.is_subscription:
            queue.spilled -= size_of(message)
            queue.spilled_sizes.pop(entry.sequence, None)
        self.came(entry, message)

    def came_back(self, entry: Entry) -> None:
        """A message is in its lane again; if a transaction had it, it can leave memory only now."""
        if entry.message is not None:
            self._futile = NEVER
            queue = entry.lane.queue
            if queue.resident > queue.policy.memory_limit:
                self._too_large[queue] = None

    def add(self, entry: Entry, message: Message) -> None:
        """Give a new message its place in its lane."""
        lane = entry.lane
        queue = lane.queue
        # `came`, without the calls.
        size = len(message.body) + len(message.header) + ENTRY_BYTES
        memory = self._memory
        memory.used += size
        queue.resident += size
        queue.in_memory += 1
        if queue.resident > queue.policy.memory_limit:
            self._too_large[queue] = None
        if lane.horizon == WHOLE:
            arrived = lane.arrived
            if arrived is NO_ENTRIES:
                arrived = lane.begin_arrived()
            arrived.append(entry)
            return
        # Above the horizon nothing may be that the store does not get.
        if entry.stored is None:
            put(self._ledger.batch, entry)
        lane.unread += 1
        (lane.recent or lane.begin_recent()).append(entry)
        memory.leaving += size
        self._with_recent[lane] = None

    def doom(self, entry: Entry) -> None:
        """A message that has left memory is to be dead-lettered; `page_read` will return it."""
        entry.lane.keep_bodiless(entry)
        self._doomed.append(entry)

    def doomed(self) -> list[Entry]:
        """Those that `page_read` has not returned yet; they stand in no lane."""
        return self._doomed[:]

    def is_doomed(self, entry: Entry) -> bool:
        return any(one is entry for one in self._doomed)

    def policy_changed(self, queue: Queue) -> None:
        """Its limit may be another."""
        if queue.resident > queue.policy.memory_limit:
            self._too_large[queue] = None
        if queue.spilled:
            self._limited[queue] = None

    def take_out(self, lane: Lane, entries: list[Entry]) -> None:
        """Messages leave their lane out of their turn; the gathering batch removes them."""
        for entry in lane.take_out(entries, self._ledger.batch.number):
            assert entry.message is not None, "what is recent has not left memory yet"
            self._memory.leaving -= size_of(entry.message)
        if lane.taken_out:
            self._with_taken_out[lane] = None

    def forget(self, lane: Lane) -> None:
        """A lane has ended with its queue: nothing of it is in memory, or will be."""
        self._memory.leaving -= sum(size_of(entry.message) for entry in lane.recent if entry.message is not None)
        for entry in (*lane, *lane.recent, *lane.bodiless.values()):
            self.went(entry)
        lane.bodiless.clear()
        if lane.recent:
            lane.recent.clear()
        lane.clear()
        lane.unread = 0
        lane.reading = None
        self._with_recent.pop(lane, None)
        self._with_taken_out.pop(lane, None)
        self._limited.pop(lane.queue, None)
        self._doomed = [entry for entry in self._doomed if entry.lane is not lane]

    def left_with_page(self, entry: Entry) -> None:
        """A message of the page that came last did not come into its lane; the gathering batch removes it."""
        entry.lane.remember_taken_out(entry.sequence, self._ledger.batch.number)
        self._with_taken_out[entry.lane] = None

    # ---- Reading ----

    def ask(self, lane: Lane) -> None:
        """The consumers of a queue wait for this lane, or came to it last: see that they need not wait long."""
        if lane.reading is not None:
            return
        head = lane.head()
        queue = lane.queue
        is_short = queue.resident + PAGE_BYTES > queue.policy.memory_limit
        if self._memory.excess + PAGE_BYTES > 0:
            is_short = self._is_short = True
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
        for entry in self._doomed:
            if entry.lane.aside is not None and entry.sequence in entry.lane.aside.strays:
                self.ask_body(entry)
            elif entry.lane.reading is None:
                self._read(entry.lane, entry.sequence - 1, 1, PAGE_BYTES)
        reads, self._reads = self._reads, []
        return reads

    def ask_body(self, entry: Entry) -> None:
        """Somebody waits for this one, out of its turn."""
        lane = entry.lane
        assert lane.aside is not None, "it was taken out of its turn, or may be"
        if entry.sequence not in lane.aside.embodying:
            lane.aside.embodying = with_sequence(lane.aside.embodying, entry.sequence)
            read = BodyRead(entry)
            read.begin()
            self._reads.append(read)

    def body_read(self, read: BodyRead, page: PageRead) -> list[Entry]:
        """Returns those messages of the page that failed too often: they stand in no lane any more.

        Raises: StoreError if the store has lost the message
        """
        read.end()
        lane, wanted = read.lane, read.entry
        if lane.aside is not None:
            lane.aside.embodying.discard(wanted.sequence)
        failed: list[Entry] = []
        is_there = lane.bodiless.get(wanted.sequence) is not wanted
        for found in page.found:
            entry = lane.bodiless.pop(found.sequence, None)
            if entry is not None:
                is_there |= entry is wanted
                if self._embody(entry, found.message) and entry.message is not None:
                    failed.append(entry)
        if not is_there:
            raise damage(lane, "a message is not there any more")
        return failed

    def forgot_stray(self, entry: Entry) -> None:
        """A message that was taken out of its turn is done with; the gathering batch removes it."""
        lane = entry.lane
        batch = self._ledger.batch.number
        assert lane.aside is not None, "somebody had a selector"
        if lane.aside.strays.pop(entry.sequence, None) is not None and entry.stored not in (None, batch):
            lane.remember_taken_out(entry.sequence, batch)
            self._with_taken_out[lane] = None

    def _read(self, lane: Lane, after_sequence: int, limit: int, size_max: int) -> None:
        lane.reading = Read(lane, after_sequence, limit, size_max)
        self._reads.append(lane.reading)

    def page_read(self, read: Read, page: PageRead) -> list[Entry]:
        """Take in a page, which names no batch that is not known to be durable.

        Returns the messages in it that failed too often: they stand in no lane any more.

        Raises: StoreError if the store has lost something.
        """
        lane = read.lane
        if lane.reading is not read:
            # Meanwhile the lane lost what follows on the page, or got back what the page has.
            self.let_go_of(lane)
            return []
        lane.reading = None
        if not (page.found or page.is_end):
            raise damage(lane, "a page is empty, but not the last")
        up_to = WHOLE if page.is_end else page.found[-1].sequence
        fresh: list[Entry] = []
        failed: list[Entry] = []
        left_out = 0
        for found in page.found:
            if found.sequence in lane.bodiless:
                entry = lane.bodiless.pop(found.sequence)
                was_doomed = self._embody(entry, found.message)
                if was_doomed and entry.message is not None:
                    failed.append(entry)
            elif (
                found.sequence > lane.horizon
                and found.sequence not in lane.taken_out
                and (lane.aside is None or found.sequence not in lane.aside.strays)
            ):
                if found.message is None:
                    left_out += 1
                    continue
                entry = self.entry(lane, found, found.message)
                if self._has_failed(entry):
                    left_out += 1
                    failed.append(entry)
                elif self._delays.restore(entry, found.mark.due_ms):
                    left_out += 1
                    self._set_aside(entry)
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
            self._move_horizon(lane, fresh, left_out, up_to, page.as_of)
        self.let_go_of(lane)
        return failed

    def take_waiting(self) -> list[Entry]:
        """Messages of pages since the last call that wait for their next try."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def shows_waiting(self, entry: Entry) -> None:
        """A message that a page showed waits for its next try."""
        self._waiting.append(entry)

    def delay_stray(self, entry: Entry) -> None:
        """The same for one that was plucked, and that others pass meanwhile: it keeps its place, but not its body."""
        lane = entry.lane
        assert lane.aside is not None, "it was plucked"
        del lane.aside.plucked[entry.sequence]
        entry.is_taken = True
        self._leave(entry, is_known=True)
        lane.delay(entry)
        self._waiting.append(entry)

    def _has_failed(self, entry: Entry) -> bool:
        """It was on its way to the dead-letter queue when the broker ended, or has to go there since."""
        return is_given_up(entry.lane.queue, entry.attempts, entry.due_us)

    def _set_aside(self, entry: Entry) -> None:
        """A message of a page waits for its next try: without its body, as it may for days."""
        lane = entry.lane
        self._leave(entry, is_known=True)
        lane.delay(entry)
        lane.horizon_min = max(lane.horizon_min, entry.sequence)

    def entry(self, lane: Lane, found: Found, message: Message) -> Entry:
        """Of a message that only the store had until now."""
        attempts, deliveries, due_ms = found.mark
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
        )
        if message.group and lane.queue.groups is None and self.begin_groups is not None:
            self.begin_groups(lane.queue)
        self._is_back(entry, message)
        return entry

    def _embody(self, entry: Entry, message: Message | None) -> bool:
        """A message that has left memory is back; None if its record is damaged. True if it is to be dead-lettered,
        whatever its policy says by now: it stands in no lane."""
        was_doomed = False
        if self._doomed:
            left = [one for one in self._doomed if one is not entry]
            was_doomed = len(left) < len(self._doomed)
            self._doomed = left
        if message is None:
            entry.lane.leave_out(entry)
        else:
            entry.message = message
            self._is_back(entry, message)
        return was_doomed

    def _move_horizon(self, lane: Lane, fresh: list[Entry], left_out: int, up_to: int, as_of: int) -> None:
        memory = self._memory
        in_page, in_memory = lane.take_in(fresh, left_out, up_to, as_of)
        for entry in in_page + in_memory:
            assert entry.message is not None, "what is recent has not left memory yet"
            memory.leaving -= size_of(entry.message)
        for entry in in_page:
            self._leave(entry, is_known=False)
        if up_to == WHOLE and lane.unread:
            raise damage(lane, f"the count of its messages and what is in it differ by {lane.unread}")

    # ---- Leaving ----

    def let_go(self) -> None:
        """A batch is durable, and so is whatever was written with it."""
        self._too_large.update(self._still_too_large)
        self._still_too_large.clear()
        for lane in list(self._with_recent):
            self.let_go_of(lane)
        self.forget_taken_out()

    def forget_taken_out(self) -> None:
        """What durable batches have removed, and no page that is being read may show. To be called now and then as
        well: the last such page may come when nothing more is written.
        """
        for lane in list(self._with_taken_out):
            lane.forget_taken_out(self._ledger.committed)
            if not lane.taken_out:
                del self._with_taken_out[lane]

    def let_go_of(self, lane: Lane) -> None:
        """The same for one lane, of which no page is being read any more."""
        for entry in lane.let_go(self._ledger.committed):
            assert entry.message is not None, "what is recent has not left memory yet"
            self._memory.leaving -= size_of(entry.message)
            self._leave(entry, is_known=False)
        if not lane.recent:
            self._with_recent.pop(lane, None)

    def pin(self, lane: Lane) -> None:
        """Nothing leaves its memory until `unpin`."""
        lane.is_pinned = True

    def unpin(self, lane: Lane) -> None:
        lane.is_pinned = False
        self.let_go_of(lane)
        # Whatever could not leave meanwhile can.
        self._too_large[lane.queue] = None
        self._futile = NEVER

    def take_in_recent(self, lane: Lane) -> None:
        """What was about to leave the lane is needed now."""
        for entry in lane.recent:
            assert entry.message is not None, "what is recent has not left memory yet"
            self._memory.leaving -= size_of(entry.message)
        lane.take_in_recent()

    def relieve(self, queues: Iterable[Queue]) -> list[Queue]:
        """Make messages leave until the limits are kept; what the store does not have yet joins the gathering batch.

        Not between a dispatch and the writing of what was dispatched. Returns the temporary queues that have to go: a
        reply queue, whose messages cannot leave, and subscriptions that hold more than they may.
        """
        too_slow = [queue for queue in self._limited if queue.resident + queue.spilled > queue.policy.memory_limit]
        too_large, self._too_large = self._too_large, {}
        for queue in too_large:
            limit = queue.policy.memory_limit
            if queue.is_temporary:
                # Of a reply queue the limit of some pattern was never meant.
                if queue.destination.topic and queue.resident > limit and queue not in too_slow:
                    too_slow.append(queue)
                continue
            if queue.resident > limit:
                self._shrink([queue], queue.resident - limit + limit // RELIEF)
            if queue.resident > limit:
                self._still_too_large[queue] = None
        memory = self._memory
        is_short, self._is_short = self._is_short, False
        if (memory.excess <= 0 and not is_short) or self._futile == (self._ledger.committed, memory.used):
            return too_slow
        if memory.places:
            for queue in queues:
                queue.let_go_of_places()
        largest_first = sorted((queue for queue in queues if queue.resident), key=_resident, reverse=True)
        done: set[Queue] = set()
        for queue in largest_first:
            needed = memory.excess + memory.limit // RELIEF
            if needed <= 0:
                return too_slow
            if queue in done or queue.is_reply_queue:
                continue
            together = [queue]
            if queue.destination.topic:
                least = queue.resident // 2
                together = [
                    one for one in largest_first if one.destination.topic and one.resident >= least and one not in done
                ]
            done.update(together)
            self._shrink(together, needed)
        if memory.excess + memory.limit // 4 > 0:
            self._futile = (self._ledger.committed, memory.used)
        if memory.excess <= min(REPLIES_BYTES, memory.limit * 3 // 4):
            # Somebody has asked for something large, and reads it.
            return too_slow
        return too_slow + [queue for queue in largest_first[:1] if queue.is_reply_queue]

    def _shrink(self, queues: list[Queue], needed: int) -> None:
        """Make `needed` bytes of the messages of these queues leave; those that would be served last go first."""
        for queue in queues:
            if queue.is_subscription and not queue.is_known_to_store and self.begin_spilling is not None:
                self.begin_spilling(queue)
        for rank in reversed(RANKS):
            lanes = _lanes_of(queues, rank)
            needed -= self._lower_horizons(lanes, needed)
            if needed <= 0:
                return
        held = [entry for queue in queues for entry in queue.held() if entry.message is not None]
        freed = self._disembody(held, needed)
        if freed:
            for queue in queues:
                queue.has_lost_bodies = True
        needed -= freed
        for rank in reversed(RANKS):
            if needed <= 0:
                return
            lanes = _lanes_of(queues, rank)
            waiting = [
                entry
                for lane in lanes
                for entry in (*lane.delayed.values(), *lane.again())
                if entry.message is not None
            ]
            needed -= self._disembody(waiting, needed)
            for lane in lanes:
                for entry in lane.again():
                    if entry.message is None:
                        lane.keep_bodiless(entry)

    def _lower_horizons(self, lanes: list[Lane], needed: int) -> int:
        """Bytes that left these lanes, or will once they are durable: what was accepted last goes first. The sequences
        of copies follow one another, so they go together.
        """
        left = 0
        ends: list[tuple[int, Lane]] = []
        for lane in lanes:
            if lane.arrived and lane.queue.selecting is not None:
                lane.queue.selecting.lowering(lane)
            self._add_end(ends, lane)
        while ends and left < needed:
            message = ends[0][1].arrived[-1].message
            assert message is not None, "what has arrived stands in memory as a whole"
            copies: list[Lane] = []
            while ends and ends[0][1].arrived[-1].message is message:
                copies.append(heappop(ends)[1])
            new = [lane.arrived[-1] for lane in copies if lane.arrived[-1].stored is None]
            if new:
                if self._ledger.batch.size >= STORE_TRANSACTION_BYTES_MAX:
                    break
                put_all(self._ledger.batch, new)
            for lane in copies:
                self._lower_horizon(lane)
                self._add_end(ends, lane)
            left += len(copies) * size_of(message)
        for lane in lanes:
            if lane.aside is not None:
                lane.end_horizon()
            lane.let_go_of_places()
        return left

    def _add_end(self, ends: list[tuple[int, Lane]], lane: Lane) -> None:
        """Put the last message that can leave a lane, if there is one, into a heap by sequence, the last one first."""
        selecting = lane.queue.selecting
        while lane.arrived:
            entry = lane.arrived[-1]
            if entry.sequence <= lane.horizon_min:
                lane.fix_horizon()
            elif selecting is not None and selecting.has_found(entry):
                lane.keep_above()
            else:
                heappush(ends, (-entry.sequence, lane))
                return

    def _lower_horizon(self, lane: Lane) -> None:
        """The last message in a lane's memory leaves, or will once it is durable."""
        entry = lane.lower_horizon()
        message = entry.message
        assert message is not None, "what has arrived stands in memory as a whole"
        committed = self._ledger.committed
        if entry.batch <= committed and is_stored(entry, committed) and not lane.is_pinned:
            self._leave(entry, is_known=False)
        else:
            (lane.recent or lane.begin_recent()).appendleft(entry)
            self._memory.leaving += size_of(message)
            self._with_recent[lane] = None

    def _disembody(self, entries: list[Entry], needed: int) -> int:
        """Leave messages to the store, but not the knowledge of them. Bytes that left, or can once they are durable."""
        left = 0
        entries.sort(key=_sequence)
        for _, of_message in groupby(entries, key=_identity):
            if left >= needed:
                break
            new: list[Entry] = []
            for entry in of_message:
                if entry.lane.is_pinned:
                    continue
                if entry.stored is None:
                    new.append(entry)
                    continue
                left += _size(entry)
                if entry.stored <= self._ledger.committed:
                    self._leave(entry, is_known=True)
            if new and self._ledger.batch.size < STORE_TRANSACTION_BYTES_MAX:
                left += sum(map(_size, new))
                put_all(self._ledger.batch, new)
        return left


def _lanes_of(queues: list[Queue], rank: int) -> list[Lane]:
    """Those that there are."""
    lanes = (queue.lane_if_there(rank) for queue in queues)
    return [lane for lane in lanes if lane is not None]


def _resident(queue: Queue) -> int:
    return queue.resident


_sequence = attrgetter("sequence")


def _identity(entry: Entry) -> int:
    return id(entry.message)


def _size(entry: Entry) -> int:
    assert entry.message is not None, "it has not left yet"
    return size_of(entry.message)


def damage(lane: Lane, what: str) -> StoreError:
    """The store does not have what it should."""
    priority = PRIORITY_MAX - split_lane_key(lane.key)[1]
    return StoreError(
        f"the store is damaged: of queue {lane.queue.name!r}, priority {priority}, {what}. "
        "`truenext store check DIR` says more, `truenext store export DIR NEW` saves what can be read"
    )
