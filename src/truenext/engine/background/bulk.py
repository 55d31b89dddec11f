"""Bulk requests, which move, remove or list many messages of a queue; and the planning of one piece of such work.

    redrive       dead letters go back to their original queues
    move          messages go to another queue
    purge         messages are removed
    dead-letters  messages are counted by the cause of their failure (model/dead_letters.py)
    scheduled     waiting scheduled sends are listed
    unschedule    waiting scheduled sends are removed (engine/background/scheduled.py)

A piece is one page of the store, together with the messages of the lane that are in memory. The only state between two
pieces is a position, which the client passes on. A message of the page may have been dispatched or removed since the
page was read. A piece moves or removes only messages that still wait in the lane. One batch removes the messages and
accepts their replacements. Pages read before this batch is durable still contain the messages; `Lane.removed` excludes
them.

While the page is being read, no message leaves the lane's memory (`Lane.is_pinned`). So each message is on the page or
in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from heapq import merge
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from truenext.engine.lifecycle.redelivery import redirect, restore_original
from truenext.engine.selecting.scan import ComparisonBudget
from truenext.engine.state.pages import PageMessage, PageResult, SideRead
from truenext.engine.state.queue import Entry, Lane, Queue, is_expired, is_undeliverable
from truenext.errors import Code, RemoteProtocolError
from truenext.model import selector
from truenext.model.batch import NO_MARK
from truenext.model.commands import decode_client_json
from truenext.model.control_answers import ScheduledSendInfo
from truenext.model.dead_letters import DeadLetterGroup, DeadLetterGroups, GroupFilter
from truenext.model.destination import Destination, parse_queue_name
from truenext.model.limits import (
    BULK_MESSAGES_PER_PIECE,
    CONTROL_REQUEST_SEQUENCES_MAX,
    DEAD_LETTERS_COST_PER_PIECE,
    DEAD_LETTERS_PER_PIECE,
    PAGE_BYTES,
    SCAN_NS_PER_TURN,
    SEQUENCE_MAX,
    SHOWN_SENDS_PER_PIECE,
)
from truenext.model.message import SentMessage
from truenext.model.order import RANKS

_Sequence = Annotated[int, Meta(ge=0, le=SEQUENCE_MAX)]


class BulkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields that all JSON requests for a piece of bulk work have."""

    queue: str
    """Name of the queue, as `queues` reports it. For requests about scheduled sends: name of the queue to which the
    sends go; "" stands for the sends that go to a topic or to several destinations."""
    sequences: Annotated[tuple[_Sequence, ...], Meta(max_length=CONTROL_REQUEST_SEQUENCES_MAX)] | None = None
    """Sequences of the messages, or numbers of the scheduled sends; None is all."""
    selector: str | None = None
    """Text of a selector that messages must match; None matches all."""
    limit: Annotated[int, Meta(ge=1)] | None = None
    """Maximum number of messages that this piece may move or remove; None is no limit. To limit the whole work, the
    client lowers the limit from piece to piece."""
    dry_run: bool = False
    """True changes nothing, and reports what would be changed."""
    after: tuple[Annotated[int, Meta(ge=0, lt=len(RANKS))], _Sequence] = (0, 0)
    """Rank and sequence after which this piece begins: `next` of the last result."""
    until: _Sequence | None = None
    """Highest sequence to include. In the first request None, for all messages accepted so far; then `until` of the
    last result."""


class MessageRequest(BulkRequest, frozen=True, forbid_unknown_fields=True):
    """Request for messages that wait in a queue."""

    group: GroupFilter | None = None
    """Group to which the messages must belong, of those that `dead-letters` reports; None is any."""


class Redrive(MessageRequest, frozen=True, forbid_unknown_fields=True):
    """Move dead letters back to the queues from which they came."""


class Move(MessageRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Move messages to another queue."""

    to: str
    """Name of the target queue, without `/queue/`."""


class Purge(MessageRequest, frozen=True, forbid_unknown_fields=True):
    """Remove messages."""


class CountDeadLetters(MessageRequest, frozen=True, forbid_unknown_fields=True):
    """Count the messages of a dead-letter queue by origin, reason and cause. Nothing is changed, as with `dry_run`."""


class ScheduledRequest(BulkRequest, frozen=True, forbid_unknown_fields=True):
    """Request for scheduled sends. Here `sequences` has the numbers of the sends; a repeated send keeps its first
    number."""

    to: str | None = None
    """If `queue` is "", the address to which the sends must go; None is any. The order of several destinations does not
    matter."""


class ListScheduled(ScheduledRequest, frozen=True, forbid_unknown_fields=True):
    """List scheduled sends."""


class Unschedule(ScheduledRequest, frozen=True, forbid_unknown_fields=True):
    """Cancel scheduled sends."""


VERBS: dict[str, type[BulkRequest]] = {
    "redrive": Redrive,
    "move": Move,
    "purge": Purge,
    "dead-letters": CountDeadLetters,
    "scheduled": ListScheduled,
    "unschedule": Unschedule,
}


class BulkResult(msgspec.Struct):
    """Result of one piece of bulk work, which the client gets as JSON."""

    count: int = msgspec.field(name="moved")
    """Number of messages moved, removed or counted, or of scheduled sends listed or cancelled."""
    to: dict[str, int]
    """Number of messages moved, by queue."""
    left: int
    """Number of matching messages that stay. A message stays if it is uncommitted or damaged, if `redrive` finds no
    original queue in it, if it counts in `ended`, or if a consumer or an open transaction holds it. A held message
    counts in the piece that would otherwise have moved or removed the message. Evicted held messages, and held messages
    beyond 5000, count even if the selector does not match."""
    next: tuple[int, int] | None
    """Rank and sequence after which the next piece begins, for `after` of the next request; None at the end."""
    until: int
    """Last sequence included, for `until` of the next request. Later messages are ignored."""
    sequences: list[int] = []
    """Sequences of the messages moved, removed or cancelled, if the request had `sequences`."""
    ended: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of messages among `left` that cannot go back to their durable subscription, by the name of its queue: the
    subscription has ended, or was created again for another topic or with another selector. A `move` request can move
    these messages to a queue."""
    error: str = ""
    """Reason why the work cannot continue after the request was accepted, for instance that the durable subscription
    has ended; "" if there is none. A queue that was removed because it was empty is no error: nothing is left to do."""
    transient: int = 0
    """Number of messages moved that `redrive` makes transient again, as they were sent: a crash of the broker loses
    them. Dead letters are persistent."""


class ScheduledResult(BulkResult):
    """Result of one piece of bulk work with scheduled sends."""

    sends: list[ScheduledSendInfo] = msgspec.field(default_factory=list)
    """Scheduled sends, if the request lists them."""


class DeadLettersResult(BulkResult):
    """Result of one piece of `dead-letters`."""

    groups: list[DeadLetterGroup] = msgspec.field(default_factory=list)
    """Groups of this piece, the largest first. A group may come again in later pieces, with other messages."""


HELD_COMPARED_MAX = 5000
"""Maximum number of held messages that one piece compares with a selector, only to count the matches. The comparisons
take about 50 ms, during which the broker does nothing else."""

HELD_COST_MAX = 4 * DEAD_LETTERS_COST_PER_PIECE
"""Cost at which one piece compares no further held messages with a group, after about 10 ms."""


class PlannedRemoval(NamedTuple):
    """Removal of a message by a piece of bulk work, and the message's replacement in another queue."""

    entry: Entry
    replacement: tuple[Destination, SentMessage] | None
    """Destination and content of the message to accept in place of the removed one; None if the message is only
    removed."""


def _ignore_page(read: BulkRead, page: PageResult) -> None:
    """Ignore a page: handler of a read until `BulkTask.step` sets its own."""


class BulkRead(SideRead):
    """Read of the page whose messages one piece of bulk work moves or removes."""

    __slots__ = ("until",)

    waits_for_commit = False

    def __init__(self, lane: Lane, after_sequence: int, limit: int, until: int, size_max: int = PAGE_BYTES) -> None:
        super().__init__(_ignore_page, lane, after_sequence, limit, size_max)
        self.until = until

    def next_position(self, sequence: int, *, is_end: bool) -> tuple[int, int] | None:
        """Return the position after which the next piece begins. This piece has reached `sequence`, or with `is_end`
        the end of its lane. None if no lane follows."""
        rank = self.lane.rank
        if not is_end:
            return rank, sequence
        return (rank + 1, 0) if rank + 1 in RANKS else None


def parse_request(verb: str, body: bytes) -> BulkRequest:
    """Decode and check the body of a bulk request.

    Raises: RemoteProtocolError if the body is not a valid request.
    """
    request = decode_client_json(verb, body, VERBS[verb])
    if request.selector is not None:
        selector.compile_selector(request.selector)
    if isinstance(request, Move):
        if request.to == request.queue:
            raise RemoteProtocolError(
                f"{verb}: source and target are the same queue, {request.to!r}", Code.CONTROL_REQUEST
            )
        target_of(request)
    return msgspec.structs.replace(request, sequences=request.sequences and tuple(sorted(set(request.sequences))))


def target_of(request: Move) -> Destination:
    """Return the queue to which messages are to be moved.

    Raises: RemoteProtocolError if the name is not valid for a queue.
    """
    return parse_queue_name(request.to)


_PIECE_SIZES: dict[type[BulkRequest], tuple[int, int]] = {
    ListScheduled: (SHOWN_SENDS_PER_PIECE, PAGE_BYTES),
    CountDeadLetters: (DEAD_LETTERS_PER_PIECE, PAGE_BYTES // 4),
}
"""Maximum number of messages of a piece, and of bytes of its page."""


def group_of(request: BulkRequest) -> GroupFilter | None:
    """Return the group to which messages must belong; None is any."""
    return request.group if isinstance(request, MessageRequest) else None


def next_read(request: BulkRequest, queue: Queue, last_sequence: int) -> BulkRead | None:
    """Return the read for the next piece in a queue; None if nothing is left. `last_sequence` is the broker's last
    sequence so far."""
    rank, after = request.after
    until = last_sequence if request.until is None else min(request.until, last_sequence)
    is_scheduled = isinstance(request, ScheduledRequest)
    limit, size_max = _PIECE_SIZES.get(type(request), (BULK_MESSAGES_PER_PIECE, PAGE_BYTES))
    if request.limit is not None and request.selector is None and group_of(request) is None and not is_scheduled:
        limit = min(request.limit, BULK_MESSAGES_PER_PIECE)
    for lane in queue.lanes:
        if lane.rank < rank:
            continue
        if lane.rank > rank:
            after = 0
        if len(lane):
            # A repeated send is stored with a later number than the one that identifies it.
            if request.sequences is None or is_scheduled:
                return BulkRead(lane, after, limit, until, size_max)
            index = bisect_right(request.sequences, after)
            if index < len(request.sequences):
                return BulkRead(lane, request.sequences[index] - 1, limit, until, size_max)
    return None


def empty_result(request: BulkRequest, error: str = "") -> BulkResult:
    """Return the result of a piece that does nothing, because nothing is left to do or an `error` stops the work."""
    return _result_type(request)(count=0, to={}, left=0, next=None, until=request.until or 0, error=error)


def _result_type(request: BulkRequest) -> type[BulkResult]:
    if isinstance(request, CountDeadLetters):
        return DeadLettersResult
    return ScheduledResult if isinstance(request, ScheduledRequest) else BulkResult


def count_held(entries: Iterable[Entry], request: BulkRequest, until: int, to: tuple[int, int] | None = None) -> int:
    """Count the messages of this piece that consumers and open transactions hold. The piece ends at the position `to`;
    None is the end of the queue.

    A held message is counted without a comparison if it is evicted, or if HELD_COMPARED_MAX or the time for comparisons
    is reached.
    """
    sequences = None if request.sequences is None else set(request.sequences)
    held = (
        one
        for one in entries
        if one.sequence <= until
        and (sequences is None or one.sequence in sequences)
        and request.after < (position := (one.lane.rank, one.sequence))
        and (to is None or position <= to)
    )
    if request.selector is None and group_of(request) is None:
        return sum(1 for _ in held)
    choice = _Choice(request, HELD_COST_MAX)
    count = 0
    for number, one in enumerate(held):
        if one.message is None or number >= HELD_COMPARED_MAX or not choice.has_time(one.message):
            count += 1
        else:
            count += choice.includes(one.message)
    return count


class _Choice:
    """Choice of messages by selector and group, and the time that it may take in one step."""

    def __init__(self, request: BulkRequest, cost_max: int = DEAD_LETTERS_COST_PER_PIECE) -> None:
        self._selector = None if request.selector is None else selector.compile_selector(request.selector)
        self._group = group_of(request)
        self._budget = ComparisonBudget(SCAN_NS_PER_TURN)
        self._cost = 0
        self._cost_max = cost_max

    def has_time(self, message: SentMessage | None) -> bool:
        """Return whether there is time to compare the message, and take it for the selector."""
        return self._cost < self._cost_max and self._budget.take(self._selector, message)

    def includes(self, message: SentMessage) -> bool:
        if self._selector is not None and not self._selector.matches(message):
            return False
        if self._group is None:
            return True
        is_chosen, cost = self._group.compare(message)
        self._cost += cost
        return is_chosen


@dataclass(slots=True, eq=False)
class _PiecePlan:
    lane: Lane
    committed: int
    now_ms: int
    transform: Callable[[SentMessage], tuple[Destination, SentMessage] | None] | None
    has_ended: Callable[[str], bool]
    result: BulkResult
    groups: DeadLetterGroups | None
    """Groups in which messages are counted, in place of their removal; None if they are removed."""
    removals: list[PlannedRemoval] = field(default_factory=list)

    def add(self, entry: Entry | None, found: PageMessage | None, message: SentMessage) -> None:
        """Plan the removal of a message that matches the request, or count the message as left."""
        if is_expired(message, self.now_ms):
            return
        if entry is None and found is not None:
            entry = _entry_in_store(self.lane, found)
        if entry is None:
            # It was or will be removed, or a consumer holds it (`count_held`).
            return
        result = self.result
        if entry.batch > self.committed:
            result.left += 1
            return
        if self.groups is not None:
            self.groups.add_message(message, entry.sequence)
            result.count += 1
            return
        arrival = None
        if self.transform is not None:
            arrival = self.transform(message)
            if arrival is None or arrival[0].name == self.lane.queue.name:
                result.left += 1
                return
            name = arrival[0].name
            if self.has_ended(name):
                result.left += 1
                result.ended[name] = result.ended.get(name, 0) + 1
                return
            result.to[name] = result.to.get(name, 0) + 1
            result.transient += message.persistent and not arrival[1].persistent
        self.removals.append(PlannedRemoval(entry, arrival))


def plan_piece(
    request: BulkRequest,
    read: BulkRead,
    page: PageResult,
    committed: int,
    now_ms: int,
    has_ended: Callable[[str], bool],
) -> tuple[list[PlannedRemoval], BulkResult]:
    """Return the planned removals of a piece, and the result to be sent once the removals are executed.

    A message that should go back to its original queue stays if `has_ended` returns True for the name of that queue.
    """
    lane = read.lane
    last = read.until if page.is_end else min(page.messages[-1].sequence, read.until)
    in_memory = _entries_in_memory(lane, read.after_sequence, last)
    on_page = {found.sequence: found for found in page.messages if found.sequence <= last}
    choice = _Choice(request)
    result = _result_type(request)(count=0, to={}, left=0, next=None, until=read.until)
    groups = DeadLetterGroups() if isinstance(request, CountDeadLetters) else None
    plan = _PiecePlan(lane, committed, now_ms, _replacement_function(request, now_ms), has_ended, result, groups)
    removals = plan.removals
    sequences = request.sequences and set(request.sequences)
    sequence = read.after_sequence
    for count, following in enumerate(merge(sorted(in_memory), sorted(on_page.keys() - in_memory.keys())), 1):
        entry, found = in_memory.get(following), on_page.get(following)
        message = _message_of(entry, found)
        if not choice.has_time(message):
            break
        sequence = following
        if sequences is None or sequence in sequences:
            if message is None:
                # Damaged, or its body was unloaded just now and is not on the page.
                result.left += 1
            elif choice.includes(message):
                plan.add(entry, found, message)
        if count == read.limit or request.limit in (len(removals), result.count):
            break
        if groups is not None and groups.cost >= DEAD_LETTERS_COST_PER_PIECE:
            break
    else:
        sequence = last
    result.next = read.next_position(sequence, is_end=(page.is_end and sequence == last) or sequence >= read.until)
    if isinstance(result, DeadLettersResult):
        result.groups = list(groups or ())
    else:
        result.count = len(removals)
    if sequences is not None:
        result.sequences = [removal.entry.sequence for removal in removals]
    return removals, result


def _message_of(entry: Entry | None, found: PageMessage | None) -> SentMessage | None:
    if entry is not None and entry.message is not None:
        return entry.message
    return None if found is None else found.message


def _replacement_function(
    request: BulkRequest, now_ms: int
) -> Callable[[SentMessage], tuple[Destination, SentMessage] | None] | None:
    """Return a function from a message to its new destination and its replacement. None if the request only removes
    messages."""
    if isinstance(request, Move):
        return partial(redirect, destination=target_of(request))
    return partial(restore_original, now_ms=now_ms) if isinstance(request, Redrive) else None


def _entries_in_memory(lane: Lane, after: int, last: int) -> dict[int, Entry]:
    """Return the entries that wait in memory after the sequence `after` and up to `last`, by sequence."""
    return {entry.sequence: entry for entry in lane.entries_between(after, last, limit=BULK_MESSAGES_PER_PIECE + 1)}


def _entry_in_store(lane: Lane, found: PageMessage) -> Entry | None:
    """Return an entry for a message that only the store has. None if the message is held, being removed, or must be
    dead-lettered."""
    if found.message is None or not lane.is_only_in_store(found.sequence):
        return None
    attempts, deliveries, due_ms, _ = found.mark
    if is_undeliverable(lane.queue, attempts, due_ms):
        return None
    return Entry(
        sequence=found.sequence,
        message=None,
        lane=lane,
        batch=0,
        persistent=found.message.persistent,
        store_batch=0,
        deliveries=deliveries,
        attempts=attempts,
        has_mark=found.mark != NO_MARK,
        content_number=found.content_number,
    )
