"""Requests to move or remove many messages of a queue, and which messages one piece of such work takes.

    redrive     dead letters go back to where they came from
    move        messages go to another queue
    purge       messages are removed
    scheduled   scheduled sends that wait are shown, and left where they are
    unschedule  they are removed (engine/background/scheduled.py)

A piece is one page of the store, together with what is in memory alone: it reaches what has left memory, and nothing is
kept from one piece to the next but a position, which whoever asked brings along. What stands on the page may have
changed since: it is taken only if it still waits in the lane. What is taken goes in one batch with what comes of it. A
page that was read before that is durable still shows it; `Lane.removed` says that it is gone.

While the page is read nothing leaves the lane's memory (`Lane.is_pinned`): what is neither on the page nor in memory
then is not there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from heapq import merge
from itertools import islice
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from truenext.engine.lifecycle.redelivery import redirect, restore_original
from truenext.engine.state.pages import PageMessage, PageResult, SideRead
from truenext.engine.state.queue import Entry, Lane, Queue, is_expired, is_undeliverable
from truenext.errors import Code, RemoteProtocolError
from truenext.model import selector
from truenext.model.batch import NO_MARK
from truenext.model.commands import decode_client_json
from truenext.model.destination import Destination, parse_queue_name
from truenext.model.limits import (
    BULK_MESSAGES_PER_PIECE,
    CONTROL_REQUEST_BYTES_MAX,
    CONTROL_REQUEST_SEQUENCES_MAX,
    PAGE_BYTES,
    SEQUENCE_MAX,
    SHOWN_SENDS_PER_PIECE,
)
from truenext.model.message import SentMessage
from truenext.model.order import RANKS

_Sequence = Annotated[int, Meta(ge=0, le=SEQUENCE_MAX)]


class BulkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One piece of work, as it is asked for, in JSON: a purge, and what all of them have."""

    queue: str
    sequences: Annotated[tuple[_Sequence, ...], Meta(max_length=CONTROL_REQUEST_SEQUENCES_MAX)] | None = None
    """In order; None is all."""
    selector: str | None = None
    """Which messages are wanted; None is all."""
    limit: Annotated[int, Meta(ge=1)] | None = None
    """Messages to take from here on; None is all."""
    dry_run: bool = False
    """Nothing is done; the answer is what would be."""
    after: tuple[Annotated[int, Meta(ge=0, lt=len(RANKS))], _Sequence] = (0, 0)
    """Rank and sequence behind which it goes on: `next` of the last answer."""
    until: _Sequence | None = None
    """The last sequence that is looked at: `until` of the last answer; None is what was accepted so far."""


class Redrive(BulkRequest, frozen=True, forbid_unknown_fields=True):
    pass


class Move(BulkRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    to: str
    """The queue that the messages go to."""


class Purge(BulkRequest, frozen=True, forbid_unknown_fields=True):
    pass


class ScheduledRequest(BulkRequest, frozen=True, forbid_unknown_fields=True):
    """Here `queue` is the one that scheduled sends go to, and "" stands for all that do not go to one queue; they have
    their numbers for sequences, and each keeps its first one."""

    to: str | None = None
    """Of the latter, only what goes to this address; None is all. The order of several destinations does not matter."""


class ListScheduled(ScheduledRequest, frozen=True, forbid_unknown_fields=True):
    pass


class Unschedule(ScheduledRequest, frozen=True, forbid_unknown_fields=True):
    pass


VERBS: dict[str, type[BulkRequest]] = {
    "redrive": Redrive,
    "move": Move,
    "purge": Purge,
    "scheduled": ListScheduled,
    "unschedule": Unschedule,
}


class BulkResult(msgspec.Struct):
    """The answer, in JSON."""

    count: int = msgspec.field(name="moved")
    """How many were moved, removed or shown."""
    to: dict[str, int]
    """Those of them that went to each queue."""
    left: int
    """Wanted, and left where they are: they are still being committed, or (re-drive) they do not say where they came
    from, or are `ended`; and what consumers and open transactions have (`count_held`)."""
    next: tuple[int, int] | None
    """Where to go on; None at the end."""
    until: int
    """What was accepted behind this is not looked at."""
    sequences: list[int] = []
    """Which ones were moved, if single ones were wanted."""
    ended: dict[str, int] = msgspec.field(default_factory=dict)
    """Those of `left` whose durable subscription is no more, by the name that its queue had."""
    error: str = ""
    """Why nothing more can be done, if that turned out only after it was asked for; such as that the queue was that of
    a durable subscription, which has ended."""


class ScheduledSendInfo(msgspec.Struct):
    """A scheduled send as it is shown, in JSON; times are in milliseconds, due times since the epoch."""

    number: int
    due_ms: int
    to: str
    """The address, if it is not that of one queue."""
    period_ms: int
    repeat: int
    cron: str
    delay_ms: int
    """Of `cron`: from each hit on. What has no `cron` is due when its delay is over."""
    priority: int
    persistent: bool
    headers: dict[str, str]
    size: int
    """Bytes of the body."""
    body: str
    """The first SHOWN_BODY_BYTES of it."""


class ScheduledResult(BulkResult):
    """The answer to ListScheduled and Unschedule; the latter shows nothing."""

    sends: list[ScheduledSendInfo] = msgspec.field(default_factory=list)


HELD_COMPARED_MAX = 5000
"""Messages that a selector is asked about only to say that they are left: 50 ms or so, during which nothing else is
done."""


class PlannedRemoval(NamedTuple):
    """A message that leaves its place."""

    entry: Entry
    replacement: tuple[Destination, SentMessage] | None
    """What it becomes, and where; None if it is removed."""


class BulkPageHandler(Protocol):
    def on_page_read(self, read: BulkRead, page: PageResult) -> None:
        """The page of a piece is there."""


class BulkRead(SideRead):
    """The page of a piece."""

    __slots__ = ("page_handler", "until")

    waits_for_commit = False

    def __init__(self, lane: Lane, after_sequence: int, limit: int, until: int) -> None:
        super().__init__(lane, after_sequence, limit, PAGE_BYTES)
        self.until = until
        self.page_handler: BulkPageHandler | None = None

    def on_page(self, page: PageResult) -> None:
        if self.page_handler is not None:
            self.page_handler.on_page_read(self, page)

    def next_position(self, sequence: int, *, is_end: bool) -> tuple[int, int] | None:
        """Where the next piece goes on, when this one came to the `sequence`, and nothing is behind that in its lane
        or something is."""
        rank = self.lane.rank
        if not is_end:
            return rank, sequence
        return (rank + 1, 0) if rank + 1 in RANKS else None


def parse_request(verb: str, body: bytes) -> BulkRequest:
    """Raises: RemoteProtocolError if that is not a question for such work."""
    if len(body) > CONTROL_REQUEST_BYTES_MAX:
        raise RemoteProtocolError(
            f"{verb}: a question of more than {CONTROL_REQUEST_BYTES_MAX} bytes", Code.CONTROL_REQUEST
        )
    request = decode_client_json(verb, body, VERBS[verb])
    if request.selector is not None:
        selector.compile_selector(request.selector)
    if isinstance(request, Move):
        if request.to == request.queue:
            raise RemoteProtocolError(f"{verb}: {request.to!r} is where they are", Code.CONTROL_REQUEST)
        target_of(request)
    return msgspec.structs.replace(request, sequences=request.sequences and tuple(sorted(set(request.sequences))))


def target_of(request: Move) -> Destination:
    """Raises: RemoteProtocolError if there can be no such queue."""
    return parse_queue_name(request.to)


def next_read(request: BulkRequest, queue: Queue, last_sequence: int) -> BulkRead | None:
    """What is to be read of a queue for a piece; None if nothing is left there. `last_sequence` is the last that was
    given out."""
    rank, after = request.after
    until = last_sequence if request.until is None else min(request.until, last_sequence)
    is_scheduled = isinstance(request, ScheduledRequest)
    limit = SHOWN_SENDS_PER_PIECE if isinstance(request, ListScheduled) else BULK_MESSAGES_PER_PIECE
    if request.limit is not None and request.selector is None and not is_scheduled:
        limit = min(request.limit, BULK_MESSAGES_PER_PIECE)
    for lane in queue.lanes:
        if lane.rank < rank:
            continue
        if lane.rank > rank:
            after = 0
        if len(lane):
            # What repeats stands behind the number by which it is known.
            if request.sequences is None or is_scheduled:
                return BulkRead(lane, after, limit, until)
            index = bisect_right(request.sequences, after)
            if index < len(request.sequences):
                return BulkRead(lane, request.sequences[index] - 1, limit, until)
    return None


def empty_result(request: BulkRequest, error: str = "") -> BulkResult:
    """The answer when nothing is left to do, or `error` it cannot be done any more."""
    kind = ScheduledResult if isinstance(request, ScheduledRequest) else BulkResult
    return kind(count=0, to={}, left=0, next=None, until=request.until or 0, error=error)


def count_held(entries: Iterable[Entry], request: BulkRequest, until: int, to: tuple[int, int] | None = None) -> int:
    """How many of those wanted are among what consumers and open transactions have of the queue: they are left there.
    Only those of this piece count, which goes to the position `to` (None is the end): what returns when its piece is
    done was counted.

    Of what has left memory, and of more than HELD_COMPARED_MAX, it is not known whether a selector wants it; it counts.
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
    if request.selector is None:
        return sum(1 for _ in held)
    matches = selector.compile_selector(request.selector).matches
    compared = sum(one.message is None or matches(one.message) for one in islice(held, HELD_COMPARED_MAX))
    return compared + sum(1 for _ in held)


def plan_piece(
    request: BulkRequest,
    read: BulkRead,
    page: PageResult,
    committed: int,
    now_ms: int,
    has_ended: Callable[[str], bool],
) -> tuple[list[PlannedRemoval], BulkResult]:
    """What is to be taken out of the lane, and the answer when that is done. What came from queues of which `has_ended`
    says that they are no more stays."""
    lane = read.lane
    last = read.until if page.is_end else min(page.messages[-1].sequence, read.until)
    in_memory = _entries_in_memory(lane, read.after_sequence, last)
    on_page = {found.sequence: found for found in page.messages if found.sequence <= last}
    matches = selector.compile_selector(request.selector).matches if request.selector is not None else None
    transform = _replacement_function(request, now_ms)
    sequences = request.sequences and set(request.sequences)
    removals: list[PlannedRemoval] = []
    result = BulkResult(count=0, to={}, left=0, next=None, until=read.until)
    sequence = read.after_sequence
    for count, sequence in enumerate(merge(sorted(in_memory), sorted(on_page.keys() - in_memory.keys())), 1):
        if sequences is None or sequence in sequences:
            _plan_entry(
                lane,
                in_memory.get(sequence),
                on_page.get(sequence),
                committed,
                now_ms,
                matches,
                transform,
                has_ended,
                removals,
                result,
            )
        if count == read.limit or len(removals) == request.limit:
            break
    else:
        sequence = last
    result.next = read.next_position(sequence, is_end=(page.is_end and sequence == last) or sequence >= read.until)
    result.count = len(removals)
    if sequences is not None:
        result.sequences = [removal.entry.sequence for removal in removals]
    return removals, result


def _plan_entry(
    lane: Lane,
    entry: Entry | None,
    found: PageMessage | None,
    committed: int,
    now_ms: int,
    matches: Callable[[SentMessage], bool] | None,
    transform: Callable[[SentMessage], tuple[Destination, SentMessage] | None] | None,
    has_ended: Callable[[str], bool],
    removals: list[PlannedRemoval],
    result: BulkResult,
) -> None:
    message = entry.message if entry is not None else None
    if message is None and found is not None:
        message = found.message
    if message is None:
        # Damaged, or it has just left memory and is held together by what a page will bring.
        result.left += 1
        return
    if (matches is not None and not matches(message)) or is_expired(message, now_ms):
        return
    if entry is None and found is not None:
        entry = _entry_in_store(lane, found)
    if entry is None:
        # It has gone, or is going, or a consumer holds it (`count_held`).
        return
    if entry.batch > committed:
        result.left += 1
        return
    arrival = None
    if transform is not None:
        arrival = transform(message)
        if arrival is None or arrival[0].name == lane.queue.name:
            result.left += 1
            return
        name = arrival[0].name
        if has_ended(name):
            result.left += 1
            result.ended[name] = result.ended.get(name, 0) + 1
            return
        result.to[name] = result.to.get(name, 0) + 1
    removals.append(PlannedRemoval(entry, arrival))


def _replacement_function(
    request: BulkRequest, now_ms: int
) -> Callable[[SentMessage], tuple[Destination, SentMessage] | None] | None:
    """What a message becomes, and where; None if it is removed."""
    if isinstance(request, Move):
        return partial(redirect, destination=target_of(request))
    return partial(restore_original, now_ms=now_ms) if isinstance(request, Redrive) else None


def _entries_in_memory(lane: Lane, after: int, last: int) -> dict[int, Entry]:
    """What waits in memory behind the one sequence, up to the other; what somebody is about to dead-letter left out."""
    return {entry.sequence: entry for entry in lane.entries_between(after, last, limit=BULK_MESSAGES_PER_PIECE + 1)}


def _entry_in_store(lane: Lane, found: PageMessage) -> Entry | None:
    """A message that only the store has; None if it is held, on its way out, or to be given up."""
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
