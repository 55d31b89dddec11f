"""What waits, and where: queues, their lanes, and the messages in these.

A queue has up to ten lanes, one for each priority, made when they are first needed. A lane holds persistent and
transient messages together, in the order of their sequences. What is in memory is a beginning of it; the rest, if any,
is in the store alone and is read page by page:

    returned, arrived                            unread
    <----- in memory, in order -----> horizon <----- in the store, or being written ----->

Every message at or below the horizon that waits is in memory, every one above it is returned by a page of the store or
is in `unread_in_memory`, because its write is under way. What was dispatched is below it or in `SelectedEntries`. So
there is one unread region, and a page never brings what is in memory, held or gone already. How the horizon moves:
horizon.py

There may be a hundred thousand lanes, most with a message or none: what holds messages is made when the first comes,
and until then it is one empty thing that all lanes share and none can change (memory.py).

One file, for an entry knows its lane, a lane its queue, and a queue its lanes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from enum import Enum
from heapq import heapify, heappop, heappush, merge
from itertools import islice
from operator import attrgetter
from sys import maxsize
from typing import Protocol, cast

import msgspec

from truenext.engine.state.causes import KnownCauses
from truenext.engine.state.memory import (
    DEQUE_BYTES,
    EMPTY,
    LANE_BYTES,
    NO_SEQUENCES,
    SELECTED_ENTRIES_BYTES,
    MemoryBudget,
    queue_size,
)
from truenext.model.batch import DUE_NEVER
from truenext.model.destination import Destination, DestinationKind
from truenext.model.message import SentMessage
from truenext.model.order import PRIORITY_MAX, rank
from truenext.model.policy import Policy
from truenext.model.record import lane_key

UNBOUNDED = maxsize
"""The horizon of a lane that is in memory wholly."""

NO_ENTRIES = cast("deque[Entry]", ())
_NO_REQUEUED = cast("list[tuple[int, Entry]]", ())

_sequence = attrgetter("sequence")


class QueueObserver(Protocol):
    """Who is told what happens in a queue, as long as somebody takes from it out of its turn: selecting.py."""

    def on_lane_created(self, lane: Lane) -> None:
        """There is a new lane; nothing is in it."""

    def on_arrived(self, entry: Entry) -> None:
        """A message has just got its place at the end of its lane."""

    def on_requeued(self, entry: Entry) -> None:
        """A message is in its lane again."""

    def on_delayed(self, entry: Entry) -> None:
        """A message of a group waits for its next try, and others pass it."""

    def on_delay_ended(self, entry: Entry) -> None:
        """It waits no longer, for whatever reason."""

    def on_horizon_lowering(self, lane: Lane) -> None:
        """The horizon of a lane is about to move down."""

    def has_found(self, entry: Entry) -> bool:
        """It has to stay known, whatever leaves memory."""


class Entry(msgspec.Struct, gc=False):
    """A message's place in a queue, and what became of it there so far."""

    sequence: int
    message: SentMessage | None
    """None if only the store has it: it has left memory, or it is done with."""
    lane: Lane
    batch: int
    """It is visible once this batch is durable; 0 is at once."""
    persistent: bool
    """What a crash must leave of it here; not so in a subscription that ends with its connection, whatever it is."""
    store_batch: int | None
    """The batch that gives it to the store, 0 for one of an earlier run: its removal must be told to the store. None
    if the store has never heard of it."""
    deliveries: int = 0
    attempts: int = 0
    has_mark: bool = False
    """The store has a mark for it (batch.Mark)."""
    due_us: int = 0
    """If not 0: it failed, and waits until then for its next try; see delays.py."""
    is_out_of_lane: bool = False
    """It stands in its lane no more; only kept while its queue is served by selectors."""
    is_requeued: bool = False
    """It is not in `Lane.arrived`: it was given back, or stays known while its body may leave."""
    group: str = ""
    """That of its message; see groups.py."""
    is_first_of_group: bool = False
    """Its last dispatch has made its group its consumer's."""
    content_number: int = 0
    """If not 0: the store has its content once for several queues, under this number."""
    is_started: bool = False
    """The client has said that it began this dispatch."""
    was_lost: bool = False
    """Its last attempt was a lost connection."""
    causes: KnownCauses | None = None
    """Why consumers failed with it, as they said; None if none has."""

    @property
    def address(self) -> str:
        """Of the queue in which it is."""
        return self.lane.queue.destination.address


class SelectedEntries:
    """What of a lane was taken out of its turn, because a selector or a group wanted it.

    All else relies on messages leaving a lane in order: who was dispatched is below the horizon. A message that is
    taken from the middle of a lane, or from above its horizon, is none of those. It is a *stray* until it is done with,
    whoever has it, and no page brings a stray:

        waits, below the horizon     in `Lane.requeued`, like any that was given back
        waits, above it              in `loaded_early`
        is held, or delayed          nowhere in particular

    Where it was taken from it is not looked for: its place stays, and is known to be empty.
    """

    __slots__ = (
        "arrived_gaps",
        "body_reads",
        "entries",
        "horizon_rise_count",
        "loaded_early",
        "requeued_gaps",
        "scan_read_count",
    )

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        """Those that were taken out of their turn and are not done with, by sequence."""
        self.loaded_early: dict[int, Entry] = {}
        """Those of them that wait and are above the horizon."""
        self.arrived_gaps = NO_SEQUENCES
        """Empty places in `Lane.arrived`."""
        self.requeued_gaps = NO_SEQUENCES
        """Empty places in `Lane.requeued`; who comes back to one of these fills it."""
        self.scan_read_count = 0
        """Pages being read for a selector: while there are any nothing leaves `Lane.unread_in_memory`, for it may be
        missing on them."""
        self.horizon_rise_count = 0
        """How often the horizon was moved up."""
        self.body_reads = NO_SEQUENCES
        """Strays that are being read."""

    @property
    def is_empty(self) -> bool:
        """Nothing of the lane was taken out of its turn and is not done with."""
        return not (
            self.entries
            or self.loaded_early
            or self.arrived_gaps
            or self.requeued_gaps
            or self.scan_read_count
            or self.body_reads
        )


class Lane:
    __slots__ = (
        "arrived",
        "delayed",
        "horizon",
        "horizon_min",
        "is_pinned",
        "key",
        "pending_read",
        "queue",
        "rank",
        "removed",
        "requeued",
        "selected",
        "side_read_count",
        "unloaded",
        "unread",
        "unread_in_memory",
    )

    def __init__(self, key: bytes, queue: Queue) -> None:
        self.key = key
        """What the store's keys of this lane begin with, see record.py."""
        self.queue = queue
        self.rank = key[-1]
        self.arrived = NO_ENTRIES
        """Not given back in this run, in order of sequence. Who appends keeps it so, and says `allocate_arrived` to an
        empty one first."""
        self.requeued = _NO_REQUEUED
        """Given back, as a heap by sequence."""
        self.unloaded: dict[int, Entry] = EMPTY
        """Those whose message has to be read before anything can be done with them, by sequence: given back ones, and
        failed ones on their way to the dead-letter queue."""
        self.delayed: dict[int, Entry] = EMPTY
        """Those that wait for their next try while others pass, by sequence; they stand nowhere else."""
        self.horizon = UNBOUNDED
        """The highest sequence up to which this lane is in memory."""
        self.horizon_min = 0
        """The horizon stays above this: a page has brought this message, and it may be anywhere by now."""
        self.unread = 0
        """Messages above the horizon."""
        self.unread_in_memory = NO_ENTRIES
        """Those of them whose write is under way, or was when the page was asked for that is being read; in order."""
        self.pending_read: object | None = None
        """The page that is being read."""
        self.is_pinned = False
        """Nothing leaves memory: a page is being read, and is laid beside what is there."""
        self.side_read_count = 0
        """Other pages of it that are being read, and are nobody's next ones."""
        self.selected: SelectedEntries | None = None
        """What was taken out of its turn; where there are consumers with selectors or groups, and where there were as
        long as something is."""
        self.removed: dict[int, int] = EMPTY
        """Messages that have left out of their turn, by sequence, and the batch that removes them: pages may still show
        them."""

    def __len__(self) -> int:
        length = len(self.arrived) + len(self.requeued) + len(self.delayed) + self.unread
        selected = self.selected
        return (
            length
            if selected is None
            else length + len(selected.loaded_early) - len(selected.arrived_gaps) - len(selected.requeued_gaps)
        )

    def __iter__(self) -> Iterator[Entry]:
        """Those in memory, in no particular order."""
        selected = self.selected
        if selected is None:
            yield from self.arrived
        else:
            yield from (entry for entry in self.arrived if entry.sequence not in selected.arrived_gaps)
        yield from self.requeued_entries()
        yield from self.delayed.values()

    def requeued_entries(self) -> Iterator[Entry]:
        """Those in memory that wait and have not just arrived, in no particular order: they may lose their bodies."""
        selected = self.selected
        if selected is None:
            for _, entry in self.requeued:
                yield entry
        else:
            yield from (entry for sequence, entry in self.requeued if sequence not in selected.requeued_gaps)
            yield from selected.loaded_early.values()

    def entries_between(
        self, after: int, until: int, *, limit: int = maxsize, with_delayed: bool = True, with_unread: bool = True
    ) -> list[Entry]:
        """What waits in memory behind the sequence `after` and up to `until`, in order; the first ones, if they are
        more than `limit`.

        Without those that wait for their next try while others pass, for whoever looks for what can be dispatched: it
        hears of these when they are due. Without those above the horizon whose write is under way, for whoever has them
        from elsewhere.
        """
        found: list[Entry] = []
        arrived, selected = self.arrived, self.selected
        if arrived and arrived[-1].sequence > after and arrived[0].sequence <= until:
            at = bisect_right(arrived, after, key=_sequence)
            # Turned until they are in front: to get to the middle of it step by step takes longer.
            arrived.rotate(-at)
            for entry in islice(arrived, len(arrived) - at):
                if entry.sequence > until or len(found) >= limit:
                    break
                if selected is None or entry.sequence not in selected.arrived_gaps:
                    found.append(entry)
            arrived.rotate(at)
        others = [entry for entry in self.requeued_entries() if after < entry.sequence <= until]
        if with_delayed and self.delayed:
            others += [entry for entry in self.delayed.values() if after < entry.sequence <= until]
        if with_unread and self.unread_in_memory:
            others += [entry for entry in self.unread_in_memory if after < entry.sequence <= until]
        if others:
            others.sort(key=_sequence)
            found = list(islice(merge(found, others, key=_sequence), limit))
        return found

    def is_only_in_store(self, sequence: int) -> bool:
        """Of one that a page shows: it has not gone, and nobody has it, unless it is `unread_in_memory`."""
        if sequence <= self.horizon or sequence in self.removed:
            return False
        return self.selected is None or sequence not in self.selected.entries

    def head(self) -> Entry | None:
        """The earliest message in memory, ready or not."""
        arrived, requeued = self.arrived, self.requeued
        if requeued and (not arrived or requeued[0][0] < arrived[0].sequence):
            return requeued[0][1]
        return arrived[0] if arrived else None

    def pop(self) -> Entry:
        """Take the head out."""
        arrived, requeued = self.arrived, self.requeued
        if requeued and (not arrived or requeued[0][0] < arrived[0].sequence):
            entry = heappop(requeued)[1]
        else:
            entry = arrived.popleft()
        if self.selected is not None:
            self.trim_gaps()
        return entry

    def requeue(self, entry: Entry) -> None:
        """Put a message that was dispatched at its place again."""
        sequence = entry.sequence
        entry.is_out_of_lane = False
        entry.is_requeued = True
        selected = self.selected
        if selected is not None and sequence > self.horizon:
            selected.loaded_early[sequence] = entry
        elif selected is not None and sequence in selected.requeued_gaps:
            selected.requeued_gaps.discard(sequence)
        else:
            self.push(sequence, entry)
        if entry.message is None:
            self.add_unloaded(entry)

    def push(self, sequence: int, entry: Entry) -> None:
        if self.requeued is _NO_REQUEUED:
            self.requeued = []
        heappush(self.requeued, (sequence, entry))

    def add_unloaded(self, entry: Entry) -> None:
        """It has to be read before anything can be done with it."""
        if self.unloaded is EMPTY:
            self.unloaded = {}
        self.unloaded[entry.sequence] = entry

    def remember_removed(self, sequence: int, batch: int) -> None:
        """A message has left out of its turn; `batch` removes it."""
        if self.removed is EMPTY:
            self.removed = {}
        self.removed[sequence] = batch

    def delay(self, entry: Entry) -> None:
        """It waits for its next try, and others pass it, if not of its group."""
        if self.delayed is EMPTY:
            self.delayed = {}
        self.delayed[entry.sequence] = entry
        if entry.group:
            assert self.queue.observer is not None, "there are groups"
            self.queue.observer.on_delayed(entry)

    def end_delay(self, sequence: int) -> None:
        """If it waited, it does no longer."""
        entry = self.delayed.pop(sequence, None)
        if entry is not None and entry.group:
            assert self.queue.observer is not None, "there are groups"
            self.queue.observer.on_delay_ended(entry)

    def forget_requeued(self, entry: Entry) -> None:
        """Forget a message that was given back."""
        entry.is_out_of_lane = True
        if self.selected is not None:
            self.selected.loaded_early.pop(entry.sequence, None)
            self.selected.entries.pop(entry.sequence, None)
            self.selected.requeued_gaps.discard(entry.sequence)
        self.requeued = [(sequence, one) for sequence, one in self.requeued if one is not entry]
        heapify(self.requeued)

    def forget_durable_removals(self, committed: int) -> None:
        """This batch is durable: pages that are asked for from now on do not show what it removed."""
        if self.pending_read is None and not self.side_read_count:
            remaining = {sequence: batch for sequence, batch in self.removed.items() if batch > committed}
            self.removed = remaining or EMPTY

    @property
    def needs_page(self) -> bool:
        """There are messages that only the store has."""
        return self.unread > len(self.unread_in_memory)

    def clear(self) -> None:
        if self.arrived:
            self.arrived.clear()
        if self.requeued:
            self.requeued.clear()
        if self.delayed:
            self.delayed.clear()
        self.shrink()
        if self.selected is not None:
            self._drop_selected()

    # ---- Places ----

    def allocate_arrived(self) -> deque[Entry]:
        """For the first message that comes; it stays until somebody finds the lane empty, or memory is short."""
        assert self.arrived is NO_ENTRIES, "it has begun"
        self.queue.memory.deque_bytes += DEQUE_BYTES
        self.arrived = deque()
        return self.arrived

    def free_arrived(self) -> None:
        """Nothing is there any more."""
        self.arrived = NO_ENTRIES
        self.queue.memory.deque_bytes -= DEQUE_BYTES

    def allocate_unread_in_memory(self) -> deque[Entry]:
        self.unread_in_memory = deque()
        return self.unread_in_memory

    def shrink(self) -> None:
        """What holds no message takes no memory either, until one comes."""
        if not self.arrived and self.arrived is not NO_ENTRIES:
            self.free_arrived()
        if not self.requeued:
            self.requeued = _NO_REQUEUED
        if not self.unloaded:
            self.unloaded = EMPTY
        if not self.delayed:
            self.delayed = EMPTY
        if not self.removed:
            self.removed = EMPTY
        if self.selected is not None and self.queue.observer is None:
            self.free_selected()

    @property
    def is_needed(self) -> bool:
        """It has messages, or is being read, or knows something that must not be forgotten yet."""
        selected = self.selected
        return bool(
            self.arrived
            or self.requeued
            or self.unread
            or self.delayed
            or self.unread_in_memory
            or self.unloaded
            or self.removed
            or self.side_read_count
            or self.is_pinned
            or self.pending_read is not None
            or (
                selected is not None
                and (selected.entries or selected.loaded_early or selected.scan_read_count or selected.body_reads)
            )
        )

    # ---- Out of turn ----

    def allocate_selected(self) -> None:
        """Somebody has a selector, or there are groups."""
        if self.selected is None:
            self.selected = SelectedEntries()
            self.queue.memory.queue_bytes += SELECTED_ENTRIES_BYTES

    def free_selected(self) -> None:
        """Nobody has a selector, and there are no groups; it stays while something is out of its turn."""
        if self.selected is not None and self.selected.is_empty:
            self._drop_selected()

    def _drop_selected(self) -> None:
        self.selected = None
        self.queue.memory.queue_bytes -= SELECTED_ENTRIES_BYTES

    def trim_gaps(self) -> None:
        """Let both ends of what is in memory be no empty places."""
        selected = self.selected
        assert selected is not None, "somebody has a selector"
        arrived_gaps, requeued_gaps = selected.arrived_gaps, selected.requeued_gaps
        arrived, requeued = self.arrived, self.requeued
        while arrived_gaps and arrived and arrived[0].sequence in arrived_gaps:
            arrived_gaps.discard(arrived.popleft().sequence)
        while arrived_gaps and arrived and arrived[-1].sequence in arrived_gaps:
            arrived_gaps.discard(arrived.pop().sequence)
        while requeued_gaps and requeued and requeued[0][0] in requeued_gaps:
            requeued_gaps.discard(heappop(requeued)[0])


_NO_LANE = -1

_lane_indexes: dict[tuple[int, ...], list[int]] = {}
"""By the ranks of the lanes that there are: where among them that of each priority is, or _NOWHERE. There are many more
queues than these."""


def _lane_index_of(lanes: tuple[Lane, ...]) -> list[int]:
    ranks = tuple(lane.rank for lane in lanes)
    indexes = _lane_indexes.get(ranks)
    if indexes is None:
        by_priority = [rank(priority) for priority in range(PRIORITY_MAX + 1)]
        indexes = _lane_indexes[ranks] = [ranks.index(each) if each in ranks else _NO_LANE for each in by_priority]
    return indexes


class Queue:
    __slots__ = (
        "_lane_index",
        "destination",
        "has_groups",
        "has_unloaded_held",
        "has_wildcards",
        "holds_dead_letters",
        "is_known_to_store",
        "is_paused",
        "is_temporary",
        "lanes",
        "last_used_us",
        "memory",
        "number",
        "observer",
        "policy",
        "resident_bytes",
        "resident_count",
        "spilled_bytes",
        "spilled_sizes",
        "stored_number",
    )

    def __init__(
        self,
        destination: Destination,
        number: int,
        policy: Policy,
        memory: MemoryBudget,
        *,
        holds_dead_letters: bool = False,
        last_used_us: int = 0,
    ) -> None:
        self.destination = destination
        self.memory = memory
        """What it takes of this it gives back with `dispose`."""
        memory.queue_bytes += queue_size(destination)
        self.policy = policy
        self.number = 0 if destination.kind is DestinationKind.TEMPORARY else number
        """What the history calls it; 0 if it is not there."""
        self.stored_number = number
        """What the store calls it, or will; 0 if it does not."""
        self.is_temporary = destination.kind is DestinationKind.TEMPORARY
        """It goes with its connection; nothing of it outlives a crash."""
        self.holds_dead_letters = holds_dead_letters
        self.is_known_to_store = False
        self.is_paused = False
        """Nothing is dispatched."""
        self.lanes: tuple[Lane, ...] = ()
        """Those that there are, by rank: the first non-empty lane is served first."""
        self._lane_index = _lane_index_of(())
        self.has_wildcards = False
        """Somebody takes from it who takes from other queues as well."""
        self.observer: QueueObserver | None = None
        """As long as some consumers have selectors, or there are groups."""
        self.has_groups = False
        """It has had a message of one; then there is a watcher."""
        self.resident_bytes = 0
        """Bytes of memory that its messages take, waiting or held."""
        self.spilled_bytes = 0
        """Bytes of messages that have left memory; counted in a subscription that ends with its connection."""
        self.spilled_sizes: dict[int, int] = {}
        """Of those among them that are known without their bodies, by sequence; in any queue of those whose bodies have
        left memory while somebody held them."""
        self.resident_count = 0
        """How many messages these are of which `resident_bytes` counts the bytes."""
        self.has_unloaded_held = False
        """Bodies of messages that somebody held have left memory: `resident_bytes` does not say that nobody has one."""
        self.last_used_us = last_used_us
        """When something was done with it last that dispatch had to know of, by DelayedEntries' clock."""

    @property
    def name(self) -> str:
        return self.destination.name

    @property
    def policy_name(self) -> str:
        """By what its policy is looked up: a subscription has that of its topic."""
        return self.destination.topic or self.destination.name

    @property
    def is_subscription(self) -> bool:
        """To a topic, and it ends with its connection."""
        return self.destination.kind is DestinationKind.TEMPORARY and bool(self.destination.topic)

    @property
    def is_reply_queue(self) -> bool:
        """It goes with its connection, and never leaves memory."""
        return self.destination.kind is DestinationKind.TEMPORARY and not self.destination.topic

    @property
    def keeps_failures(self) -> bool:
        """What fails here stays here, however often."""
        return self.is_temporary or self.holds_dead_letters

    def lane_of(self, message: SentMessage) -> Lane:
        """Where a message of this queue stands."""
        index = self._lane_index[message.priority]
        return self.lanes[index] if index >= 0 else self.lane(rank(message.priority))

    def lane(self, rank: int) -> Lane:
        """Made if it is not there."""
        lane = self.find_lane(rank)
        if lane is None:
            lane = Lane(lane_key(self.stored_number, rank), self)
            self.memory.queue_bytes += LANE_BYTES
            self.lanes = tuple(sorted((*self.lanes, lane), key=lambda one: one.rank))
            self._lane_index = _lane_index_of(self.lanes)
            if self.observer is not None:
                self.observer.on_lane_created(lane)
        return lane

    def find_lane(self, rank: int) -> Lane | None:
        index = self._lane_index[PRIORITY_MAX - rank]
        return self.lanes[index] if index >= 0 else None

    @property
    def is_needed(self) -> bool:
        """Something of it is there, as far as it knows itself; or it goes with its connection."""
        return bool(self.resident_bytes or self.is_temporary or any(lane.is_needed for lane in self.lanes))

    def dispose(self) -> None:
        """It is nobody's any more. A lane and its queue refer to one another, and the garbage collector comes rarely:
        the circle is broken by hand."""
        for lane in self.lanes:
            self.memory.queue_bytes -= LANE_BYTES
            lane.clear()
        self.memory.queue_bytes -= queue_size(self.destination)
        self.lanes = ()
        self._lane_index = _lane_index_of(())

    def shrink(self) -> None:
        for lane in self.lanes:
            lane.shrink()

    def waiting_count(self) -> int:
        """Messages that no consumer holds."""
        return sum(map(len, self.lanes))


def is_undeliverable(queue: Queue, attempts: int, due: int) -> bool:
    """Whether a message failed too often, the last failure included, or was rejected, in a queue that does not keep its
    failures; `due` is the due time of an entry, or of its mark.
    """
    return (attempts >= queue.policy.attempts_max or due == DUE_NEVER) and not queue.keeps_failures


def is_expired(message: SentMessage | None, now_ms: int) -> bool:
    """Its time is known to have come."""
    return message is not None and 0 < message.expires_ms <= now_ms


class RequeueReason(Enum):
    """Why a message is given back, in the words of docs/history.md; all but the last count as an attempt."""

    NACKED = "nacked"
    ABORTED = "aborted"
    LOST = "lost"
    RELEASED = "released"
