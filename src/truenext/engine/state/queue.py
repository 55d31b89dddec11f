"""Queues, their lanes, and the entries in the lanes.

A queue has up to ten lanes, one for each priority, created when first needed. A lane holds persistent and transient
messages together, in order of sequence. The lane's beginning is in memory. The rest, if any, is only in the store, and
is read page by page:

    requeued, arrived                            unread
    <----- in memory, in order -----> horizon <----- in the store, or being written ----->

All waiting messages at or below the horizon are in memory. A message above the horizon comes with a page of the store;
while its write is in flight, it is in `unread_in_memory`. Dispatched messages are below the horizon, or in
`SelectedEntries`. So a page never adds a message that is in memory, held or removed. memory/horizon.py moves the
horizon.

There may be a hundred thousand lanes, most with one message or none. So a lane allocates a container for its first
message; until then all lanes share an empty container that cannot be changed (memory.py).

Entries, lanes and queues are in one file because they refer to one another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heapify, heappop, heappush, merge
from itertools import islice
from operator import attrgetter
from sys import maxsize
from typing import Protocol, cast

import msgspec

from truenext.engine.state.causes import KnownCauses
from truenext.engine.state.counts import Counts
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
"""Horizon of a lane that is wholly in memory."""

NO_ENTRIES = cast("deque[Entry]", ())
_NO_REQUEUED = cast("list[tuple[int, Entry]]", ())

_sequence = attrgetter("sequence")


class QueueObserver(Protocol):
    """Callbacks for events in a queue that has selectors or groups. Implemented in selecting/selecting.py."""

    def on_lane_created(self, lane: Lane) -> None:
        """Called when an empty lane was created."""

    def on_arrived(self, entry: Entry) -> None:
        """Called when a new message was put at the end of its lane."""

    def on_requeued(self, entry: Entry) -> None:
        """Called when a message is in its lane again."""

    def on_delayed(self, entry: Entry) -> None:
        """Called when a message of a group begins to wait for its next try, while other messages are dispatched."""

    def on_delay_ended(self, entry: Entry) -> None:
        """Called when a message of a group stops waiting for its next try, for any reason."""

    def on_horizon_lowering(self, lane: Lane) -> None:
        """Called before the horizon of a lane moves down."""

    def has_found(self, entry: Entry) -> bool:
        """Return whether a search has found the entry, which must then stay in memory."""


class StartState(Enum):
    """Whether a program may have received a message: in its current dispatch, and in earlier ones."""

    UNSTARTED = auto()
    """The current dispatch is not started. An earlier dispatch may have reached a program, or there was none."""
    NEVER_STARTED = auto()
    """No dispatch so far was started, and all earlier dispatches went to clients that report started dispatches."""
    STARTED = auto()
    """The client has reported the current dispatch as started."""


UNSTARTED = StartState.UNSTARTED
NEVER_STARTED = StartState.NEVER_STARTED
STARTED = StartState.STARTED


class Entry(msgspec.Struct, gc=False):
    """Message in one queue, with its state there; a copy of the message in another queue has its own entry."""

    sequence: int
    message: SentMessage | None
    """Message; None if only the store has it, or if it is settled."""
    lane: Lane
    batch: int
    """Batch that makes the entry visible once it is durable; 0 if the entry is visible at once."""
    persistent: bool
    """True if the entry must survive a crash; always False in a temporary queue."""
    store_batch: int | None
    """Number of the batch that stores the message. 0 if an earlier run of the broker stored the message; None if the
    store does not have it. Unless None, the message's removal must be stored, too."""
    deliveries: int = 0
    attempts: int = 0
    has_mark: bool = False
    """True if the store has a mark (batch.Mark) for the message."""
    due_us: int = 0
    """Time of the next try in microseconds, by the clock of `DelayedEntries`; 0 if there is no delay. DUE_NEVER if the
    message was rejected."""
    is_out_of_lane: bool = False
    """True if the entry is no longer in its lane. Maintained only while the queue has selectors or groups."""
    is_requeued: bool = False
    """True if the entry is not in `Lane.arrived`, because the message was requeued or its body may be evicted
    separately."""
    group: str = ""
    """Name of the message's group; "" if the message has none."""
    is_first_of_group: bool = False
    """True if the last dispatch made the consumer the owner of the group."""
    content_number: int = 0
    """Number of the content that the store has once for several queues; 0 if the message has its own."""
    start_state: StartState = UNSTARTED
    """Whether this dispatch is started, and whether an earlier one may have been. One field for both facts, because
    another field would cost 16 bytes for each message."""
    was_lost: bool = False
    """True if the last attempt ended with a lost connection. While there is no attempt: True if a connection that held
    the message was lost."""
    causes: KnownCauses | None = None
    """Causes of the message's failures; None if no consumer gave any."""
    dispatched_us: int = 0
    """Time of the last dispatch in microseconds of the monotonic clock; 0 if there was none."""

    @property
    def address(self) -> str:
        return self.lane.queue.destination.address

    @property
    def redelivery_count(self) -> int:
        """Number of attempts; at least 1 if a connection that held the message was lost (C26.8)."""
        return self.attempts or int(self.was_lost)

    @property
    def is_started(self) -> bool:
        """Whether the client has reported this dispatch as started."""
        return self.start_state is STARTED

    @property
    def was_never_started(self) -> bool:
        """Whether the message was dispatched before, but none of these dispatches can have reached a program."""
        return self.start_state is NEVER_STARTED


class DeferredEntries:
    """Requeued entries of a lane that wait to be compared with selectors. Consumers with a selector get nothing from
    the first of these entries on."""

    __slots__ = ("_entries", "_heap", "compared_scans", "was_in_memory")

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._heap: list[int] = []
        self.compared_scans = 0
        """Number of scans (searches for messages of one selector) with which the first entry was compared so far."""
        self.was_in_memory = True
        """Whether the first entry was in memory when it was compared. When this changes, all comparisons of the entry
        are repeated."""

    def add(self, entry: Entry) -> None:
        sequence, heap, entries = entry.sequence, self._heap, self._entries
        if heap and sequence <= heap[0]:
            self.compared_scans = 0
        if sequence not in entries:
            heappush(heap, sequence)
        entries[sequence] = entry

    @property
    def first(self) -> Entry:
        """First entry. Call it only while there is one."""
        return self._entries[self._heap[0]]

    def pop(self) -> bool:
        """Remove the first entry. Returns whether other entries are left."""
        del self._entries[heappop(self._heap)]
        self.compared_scans = 0
        return bool(self._heap)


@dataclass(slots=True, eq=False)
class SelectedEntries:
    """Selected entries of a lane: entries taken from within the lane for a selector or a group.

    Messages usually leave a lane in order, so a dispatched message is below the horizon. A selected message comes from
    the middle of a lane, or from above the lane's horizon. A message stays selected until it is settled, and no page
    adds it to the lane:

        waits, below the horizon     in `Lane.requeued`, like any requeued entry
        waits, above it              in `loaded_early`
        is held, or delayed          with its holder, or in `Lane.delayed`

    The slot from which an entry was taken stays in its container, as a gap.
    """

    entries: dict[int, Entry] = field(default_factory=dict)
    """Selected entries that are not settled, by sequence."""
    loaded_early: dict[int, Entry] = field(default_factory=dict)
    """Selected entries, by sequence, that wait above the lane's horizon: they were read from the store before the page
    to which they belong."""
    arrived_gaps: set[int] = field(default_factory=lambda: NO_SEQUENCES)
    """Sequences of empty slots in `Lane.arrived`."""
    requeued_gaps: set[int] = field(default_factory=lambda: NO_SEQUENCES)
    """Sequences of empty slots in `Lane.requeued`; requeueing an entry fills its slot."""
    scan_read_count: int = 0
    """Number of pages that are being read for selectors. While there are any, entries stay in `unread_in_memory`,
    because the pages may lack these entries."""
    horizon_rise_count: int = 0
    body_reads: set[int] = field(default_factory=lambda: NO_SEQUENCES)
    """Sequences of selected entries whose bodies are being read."""
    deferred: DeferredEntries | None = None
    """Requeued entries that will be compared with selectors later; None if there are none."""

    @property
    def is_empty(self) -> bool:
        """Whether no entry of the lane is selected or being read for a selector."""
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
        "evicted_ms",
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
        """Prefix of this lane's keys in the store (model/record.py)."""
        self.queue = queue
        self.rank = key[-1]
        self.arrived = NO_ENTRIES
        """Waiting entries that are not in `requeued`, in order of sequence. Call `allocate_arrived` before the first is
        appended."""
        self.requeued = _NO_REQUEUED
        """Requeued entries, and other entries whose bodies may be evicted; a heap by sequence."""
        self.unloaded: dict[int, Entry] = EMPTY
        """Entries, by sequence, that cannot be used before their message was read: requeued entries, and entries on the
        way to the dead-letter queue."""
        self.delayed: dict[int, Entry] = EMPTY
        """Entries that wait for their next try while other entries are dispatched, by sequence. Delayed entries are in
        no other container."""
        self.horizon = UNBOUNDED
        """Sequence up to which this lane is in memory."""
        self.horizon_min = 0
        """Sequence below which the horizon must not move: a page has loaded the message of this sequence, and no page
        may load it again."""
        self.unread = 0
        """Number of messages above the horizon."""
        self.unread_in_memory = NO_ENTRIES
        """Unread messages, in order, whose write is in flight now, or was in flight when the page that is being read
        was requested."""
        self.pending_read: object | None = None
        """Request for the lane's next page, while it is being read."""
        self.is_pinned = False
        """True if no message of the lane may leave memory, because memory and the page being read must together have
        all messages."""
        self.side_read_count = 0
        """Number of side reads in progress."""
        self.evicted_ms = 0
        """Time at which the oldest message arrived whose body only the store has, in milliseconds since the epoch; 0 if
        it is not known. Once that message has gone, the time may be too early, until the next page."""
        self.selected: SelectedEntries | None = None
        """Selected entries. None if there are none, and the queue has neither selectors nor groups."""
        self.removed: dict[int, int] = EMPTY
        """Batches that remove messages from within the lane, by sequence of the message. Pages may still contain these
        messages."""

    def __len__(self) -> int:
        length = len(self.arrived) + len(self.requeued) + len(self.delayed) + self.unread
        selected = self.selected
        return (
            length
            if selected is None
            else length + len(selected.loaded_early) - len(selected.arrived_gaps) - len(selected.requeued_gaps)
        )

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries in memory, in no particular order."""
        selected = self.selected
        if selected is None:
            yield from self.arrived
        else:
            yield from (entry for entry in self.arrived if entry.sequence not in selected.arrived_gaps)
        yield from self.requeued_entries()
        yield from self.delayed.values()

    def requeued_entries(self) -> Iterator[Entry]:
        """Yield the waiting entries in memory that are not in `arrived`, in no particular order. Their bodies may be
        evicted."""
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
        """Return the waiting entries in memory with sequences after `after` and up to `until`, in order; at most
        `limit` entries.

        `with_delayed=False` leaves out entries that wait for their next try: a caller that searches for messages to
        dispatch is notified when such an entry is due. `with_unread=False` leaves out `unread_in_memory`, for a caller
        that has these entries already.
        """
        found: list[Entry] = []
        arrived, selected = self.arrived, self.selected
        if arrived and arrived[-1].sequence > after and arrived[0].sequence <= until:
            at = bisect_right(arrived, after, key=_sequence)
            # Rotate them to the front: to reach the middle of a deque step by step takes longer.
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
        """Return whether a message on a page is neither in memory, held nor removed. `unread_in_memory` is not
        checked."""
        if sequence <= self.horizon or sequence in self.removed:
            return False
        return self.selected is None or sequence not in self.selected.entries

    def head(self) -> Entry | None:
        """Return the first entry in memory, ready or not."""
        arrived, requeued = self.arrived, self.requeued
        if requeued and (not arrived or requeued[0][0] < arrived[0].sequence):
            return requeued[0][1]
        return arrived[0] if arrived else None

    def note_evicted(self, entry: Entry) -> None:
        """Note that the body of a message leaves memory."""
        message = entry.message
        if message is not None and not 0 < self.evicted_ms < message.arrived_ms:
            self.evicted_ms = message.arrived_ms

    def oldest_ms(self) -> int | None:
        """Return the time at which the oldest waiting message arrived, in milliseconds since the epoch. Messages in
        `delayed` are left out. None if no other message waits, or if the time is not known."""
        if self.arrived and not self.requeued:
            # The usual case: all bodies in `arrived` are in memory.
            message = self.arrived[0].message
            return None if message is None else message.arrived_ms
        head = self.head()
        if head is None and self.unread_in_memory and not self.needs_page:
            head = self.unread_in_memory[0]
        if head is None and self.selected is not None and self.selected.loaded_early and not self.unread:
            head = self.selected.loaded_early[min(self.selected.loaded_early)]
        if head is not None and head.message is not None:
            return head.message.arrived_ms
        return (self.evicted_ms or None) if head is not None or self.unread else None

    def pop(self) -> Entry:
        """Remove and return the head."""
        arrived, requeued = self.arrived, self.requeued
        if requeued and (not arrived or requeued[0][0] < arrived[0].sequence):
            entry = heappop(requeued)[1]
        else:
            entry = arrived.popleft()
        if self.selected is not None:
            self.trim_gaps()
        return entry

    def requeue(self, entry: Entry) -> None:
        """Put a dispatched entry back to its position in the lane."""
        sequence = entry.sequence
        entry.is_out_of_lane = False
        entry.is_requeued = True
        selected = self.selected
        if selected is not None and sequence > self.horizon:
            selected.loaded_early[sequence] = entry
        elif selected is not None and sequence in selected.requeued_gaps:
            selected.requeued_gaps.discard(sequence)
        else:
            # push, inlined for speed.
            if self.requeued is _NO_REQUEUED:
                self.requeued = []
            heappush(self.requeued, (sequence, entry))
        if entry.message is None:
            self.add_unloaded(entry)

    def push(self, sequence: int, entry: Entry) -> None:
        if self.requeued is _NO_REQUEUED:
            self.requeued = []
        heappush(self.requeued, (sequence, entry))

    def add_unloaded(self, entry: Entry) -> None:
        """Note that the entry's message must be read before the entry can be used."""
        if self.unloaded is EMPTY:
            self.unloaded = {}
        self.unloaded[entry.sequence] = entry

    def remember_removed(self, sequence: int, batch: int) -> None:
        """Note that `batch` removes a message from within the lane."""
        if self.removed is EMPTY:
            self.removed = {}
        self.removed[sequence] = batch

    def delay(self, entry: Entry) -> None:
        """Set an entry aside until its next try. Other entries are dispatched meanwhile, except those of its group."""
        if self.delayed is EMPTY:
            self.delayed = {}
        self.delayed[entry.sequence] = entry
        if entry.group:
            assert self.queue.observer is not None, "there are groups"
            self.queue.observer.on_delayed(entry)

    def end_delay(self, sequence: int) -> None:
        entry = self.delayed.pop(sequence, None)
        if entry is not None and entry.group:
            assert self.queue.observer is not None, "there are groups"
            self.queue.observer.on_delay_ended(entry)

    def forget_requeued(self, entry: Entry) -> None:
        entry.is_out_of_lane = True
        if self.selected is not None:
            self.selected.loaded_early.pop(entry.sequence, None)
            self.selected.entries.pop(entry.sequence, None)
            self.selected.requeued_gaps.discard(entry.sequence)
        self.requeued = [(sequence, one) for sequence, one in self.requeued if one is not entry]
        heapify(self.requeued)

    def forget_durable_removals(self, committed: int) -> None:
        """Forget removals of durable batches, unless a page is being read: later pages do not contain these
        messages."""
        if self.pending_read is None and not self.side_read_count:
            remaining = {sequence: batch for sequence, batch in self.removed.items() if batch > committed}
            self.removed = remaining or EMPTY

    @property
    def needs_page(self) -> bool:
        """Whether the lane has messages that only the store has."""
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

    # ---- Containers ----

    def allocate_arrived(self) -> deque[Entry]:
        """Allocate `arrived` for a first entry. `arrived` is freed when dispatch finds the lane empty, or memory is
        short."""
        assert self.arrived is NO_ENTRIES, "it has begun"
        self.queue.memory.deque_bytes += DEQUE_BYTES
        self.arrived = deque()
        return self.arrived

    def free_arrived(self) -> None:
        """Free `arrived`, which is empty."""
        self.arrived = NO_ENTRIES
        self.queue.memory.deque_bytes -= DEQUE_BYTES

    def allocate_unread_in_memory(self) -> deque[Entry]:
        self.unread_in_memory = deque()
        return self.unread_in_memory

    def shrink(self) -> None:
        """Free all containers that are empty."""
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
        """Whether the lane must stay: it has messages, is being read, or remembers removed messages."""
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

    # ---- Selected entries ----

    def allocate_selected(self) -> None:
        """Prepare the lane for selectors or groups."""
        if self.selected is None:
            self.selected = SelectedEntries()
            self.queue.memory.queue_bytes += SELECTED_ENTRIES_BYTES

    def free_selected(self) -> None:
        """Free `selected` if no entry is selected. Called when the queue has no selectors and groups any more."""
        if self.selected is not None and self.selected.is_empty:
            self._drop_selected()

    def _drop_selected(self) -> None:
        self.selected = None
        self.queue.memory.queue_bytes -= SELECTED_ENTRIES_BYTES

    def trim_gaps(self) -> None:
        """Remove gaps at the ends of the containers."""
        selected = self.selected
        assert selected is not None, "a consumer has a selector"
        arrived_gaps, requeued_gaps = selected.arrived_gaps, selected.requeued_gaps
        arrived, requeued = self.arrived, self.requeued
        while arrived_gaps and arrived and arrived[0].sequence in arrived_gaps:
            arrived_gaps.discard(arrived.popleft().sequence)
        while arrived_gaps and arrived and arrived[-1].sequence in arrived_gaps:
            arrived_gaps.discard(arrived.pop().sequence)
        while requeued_gaps and requeued and requeued[0][0] in requeued_gaps:
            requeued_gaps.discard(heappop(requeued)[0])


_NO_LANE = -1

_NO_LANES = [_NO_LANE] * (PRIORITY_MAX + 1)

_indexes_with_lane: dict[tuple[int, ...], tuple[int, list[int]]] = {}
"""Cached results of `_index_with_lane`, by its arguments in one tuple. Queues that have lanes of the same ranks share
the indexes."""


def _index_with_lane(index: list[int], new_rank: int) -> tuple[int, list[int]]:
    """Return the position of a new lane in `Queue.lanes`, and the index of all lanes with the new one. `index` has the
    position of the lane of each priority."""
    found = _indexes_with_lane.get((*index, new_rank))
    if found is None:
        by_priority = [rank(priority) for priority in range(PRIORITY_MAX + 1)]
        ranks = sorted([new_rank, *(each for each, at in zip(by_priority, index, strict=True) if at != _NO_LANE)])
        indexes = [ranks.index(each) if each in ranks else _NO_LANE for each in by_priority]
        found = _indexes_with_lane[(*index, new_rank)] = (ranks.index(new_rank), indexes)
    return found


class Queue:
    __slots__ = (
        "_lane_index",
        "counted",
        "counts",
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
        "rate",
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
        """Memory budget against which the queue is counted, until `dispose`."""
        memory.queue_bytes += queue_size(destination)
        self.policy = policy
        self.number = 0 if destination.kind is DestinationKind.TEMPORARY else number
        """Number of the queue in the history; 0 if it has none."""
        self.stored_number = number
        """Number of the queue in the store, reserved before the store knows the queue; 0 if the queue is never
        stored."""
        self.is_temporary = destination.kind is DestinationKind.TEMPORARY
        """True if the queue is removed with its connection; nothing of such a queue survives a crash."""
        self.holds_dead_letters = holds_dead_letters
        self.counts = Counts()
        self.rate = 0.0
        """Messages acknowledged in a second, by broker/rates.py."""
        self.counted = 0
        """Messages acknowledged until `rate` was computed last."""
        self.is_known_to_store = False
        self.is_paused = False
        """True if the queue is paused: no message is dispatched."""
        self.lanes: tuple[Lane, ...] = ()
        """Existing lanes, by rank: the first non-empty lane is served first."""
        self._lane_index = _NO_LANES
        self.has_wildcards = False
        """True if wildcard consumers have joined the queue."""
        self.observer: QueueObserver | None = None
        """Object that is notified of changes in the queue; None while the queue has no selectors and groups."""
        self.has_groups = False
        """True if the queue has had a message of a group. Such a queue has an observer."""
        self.resident_bytes = 0
        """Bytes of memory that the queue's messages take, waiting or held."""
        self.spilled_bytes = 0
        """Bytes of messages evicted to disk. Counted only for topic subscriptions that end with their connection."""
        self.spilled_sizes: dict[int, int] = {}
        """Bytes of evicted messages whose entries are in memory, by sequence. In queues that are no topic subscription:
        only of messages that were evicted while held."""
        self.resident_count = 0
        """Number of messages that `resident_bytes` counts."""
        self.has_unloaded_held = False
        """True if bodies of held messages were evicted; then messages may be held although `resident_bytes` is 0."""
        self.last_used_us = last_used_us
        """Time when a turn last found a change in the queue that concerns dispatch, in microseconds of the clock of
        `DelayedEntries`."""

    @property
    def name(self) -> str:
        return self.destination.name

    @property
    def is_subscription(self) -> bool:
        """Whether the queue is a topic subscription that ends with its connection."""
        return self.destination.kind is DestinationKind.TEMPORARY and bool(self.destination.topic)

    @property
    def is_reply_queue(self) -> bool:
        """Whether the queue is a temporary queue other than a topic subscription. Its messages never leave memory."""
        return self.destination.kind is DestinationKind.TEMPORARY and not self.destination.topic

    @property
    def keeps_failures(self) -> bool:
        """Whether failed messages stay in this queue, however often they fail."""
        return self.is_temporary or self.holds_dead_letters

    def lane_of(self, message: SentMessage) -> Lane:
        index = self._lane_index[message.priority]
        return self.lanes[index] if index >= 0 else self.lane(rank(message.priority))

    def lane(self, rank: int) -> Lane:
        """Return the lane of a rank, created if missing."""
        lane = self.find_lane(rank)
        if lane is None:
            lane = Lane(lane_key(self.stored_number, rank), self)
            self.memory.queue_bytes += LANE_BYTES
            at, self._lane_index = _index_with_lane(self._lane_index, rank)
            self.lanes = (*self.lanes[:at], lane, *self.lanes[at:])
            if self.observer is not None:
                self.observer.on_lane_created(lane)
        return lane

    def find_lane(self, rank: int) -> Lane | None:
        index = self._lane_index[PRIORITY_MAX - rank]
        return self.lanes[index] if index >= 0 else None

    @property
    def is_needed(self) -> bool:
        """Whether the queue has messages in memory, has a lane that is needed, or is temporary. Held messages whose
        bodies were evicted do not count."""
        return bool(self.resident_bytes or self.is_temporary or any(lane.is_needed for lane in self.lanes))

    def dispose(self) -> None:
        """Free the memory of a removed queue. Lanes and queue refer to one another; this breaks the cycle, because the
        garbage collector runs rarely."""
        for lane in self.lanes:
            self.memory.queue_bytes -= LANE_BYTES
            lane.clear()
        self.memory.queue_bytes -= queue_size(self.destination)
        self.lanes = ()
        self._lane_index = _NO_LANES

    def shrink(self) -> None:
        for lane in self.lanes:
            lane.shrink()

    def waiting_count(self) -> int:
        """Return the number of messages in the queue that no consumer holds and no transaction has."""
        return sum(map(len, self.lanes))

    def oldest_ms(self) -> int | None:
        """Return the time at which the oldest waiting message arrived, as `Lane.oldest_ms` does."""
        oldest_ms = None
        for lane in self.lanes:
            time_ms = lane.oldest_ms()
            if time_ms is not None and (oldest_ms is None or time_ms < oldest_ms):
                oldest_ms = time_ms
        return oldest_ms


def is_undeliverable(queue: Queue, attempts: int, due: int) -> bool:
    """Return whether a message must be dead-lettered. That is so if it has failed too often or was rejected, unless its
    queue keeps failed messages. `attempts` includes the last failure. `due` is the due time of the entry or of its
    mark, DUE_NEVER after a rejection."""
    return (attempts >= queue.policy.attempts_max or due == DUE_NEVER) and not queue.keeps_failures


def is_expired(message: SentMessage | None, now_ms: int) -> bool:
    """Return whether a message in memory has expired."""
    return message is not None and 0 < message.expires_ms <= now_ms


class RequeueReason(Enum):
    """Reason for requeueing a message (docs/reference/history.md). All but RELEASED count as an attempt."""

    # Enum's own `__hash__` is a slow function in Python, and would be called for each requeued message.
    __hash__ = object.__hash__

    NACKED = "nacked"
    ABORTED = "aborted"
    LOST = "lost"
    CLOSED = "closed"
    RELEASED = "released"
