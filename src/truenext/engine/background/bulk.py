"""How many messages of a queue are moved or removed, a piece at a time.

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
from functools import partial
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from truenext import selector
from truenext.batch import NO_MARK
from truenext.client_json import read_json
from truenext.destination import Destination, parse_queue_name
from truenext.engine.lifecycle.redelivery import moved, revived
from truenext.engine.state.pages import Look, PageRead
from truenext.engine.state.queue import Entry, is_expired, is_given_up
from truenext.errors import Code, RemoteProtocolError
from truenext.limits import (
    BULK_MESSAGES_PER_PIECE,
    CONTROL_REQUEST_BYTES_MAX,
    CONTROL_REQUEST_SEQUENCES_MAX,
    PAGE_BYTES,
    SEQUENCE_MAX,
    SHOWN_SENDS_PER_PIECE,
)
from truenext.message import SentMessage
from truenext.order import RANKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from truenext.engine.state.pages import Found
    from truenext.engine.state.queue import Lane, Queue


_Sequence = Annotated[int, Meta(ge=0, le=SEQUENCE_MAX)]


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


class Redrive(Wanted, frozen=True, forbid_unknown_fields=True):
    pass


class Move(Wanted, frozen=True, forbid_unknown_fields=True, kw_only=True):
    to: str
    """The queue that the messages go to."""


class Purge(Wanted, frozen=True, forbid_unknown_fields=True):
    pass


class OfScheduled(Wanted, frozen=True, forbid_unknown_fields=True):
    """Here `queue` is the one that scheduled sends go to, and "" stands for all that do not go to one queue; they have
    their numbers for sequences, and each keeps its first one."""

    to: str | None = None
    """Of the latter, only what goes to this address; None is all. The order of several destinations does not matter."""


class Scheduled(OfScheduled, frozen=True, forbid_unknown_fields=True):
    pass


class Unschedule(OfScheduled, frozen=True, forbid_unknown_fields=True):
    pass


VERBS: dict[str, type[Wanted]] = {
    "redrive": Redrive,
    "move": Move,
    "purge": Purge,
    "scheduled": Scheduled,
    "unschedule": Unschedule,
}


class Done(msgspec.Struct):
    """The answer, in JSON."""

    moved: int
    """Or removed, or shown."""
    to: dict[str, int]
    """Those of them that went to each queue."""
    left: int
    """Wanted, and left where they are: they are still being committed, or (re-drive) they do not say where they came
    from, or are `ended`; at the end also what consumers and open transactions have (`left_with`)."""
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


class ScheduledShown(Done):
    """The answer to Scheduled and Unschedule; the latter shows nothing."""

    sends: list[ScheduledSendInfo] = msgspec.field(default_factory=list)


HELD_COMPARED_MAX = 5000
"""Messages that a selector is asked about only to say that they are left: 50 ms or so, during which nothing else is
done."""


class Taken(NamedTuple):
    """A message that leaves its place."""

    entry: Entry
    arrival: tuple[Destination, SentMessage] | None
    """What it becomes, and where; None if it is removed."""


class PageReceiver(Protocol):
    def page_read(self, look: BulkLook, page: PageRead) -> None:
        """The page of a piece is there."""


class BulkLook(Look):
    """The page of a piece."""

    __slots__ = ("receiver", "until")

    waits_for_commit = False

    def __init__(self, lane: Lane, after_sequence: int, limit: int, until: int) -> None:
        super().__init__(lane, after_sequence, limit, PAGE_BYTES)
        self.until = until
        self.receiver: PageReceiver | None = None

    def on_page(self, page: PageRead) -> None:
        if self.receiver is not None:
            self.receiver.page_read(self, page)

    def next(self, at: int, *, is_end: bool) -> tuple[int, int] | None:
        """Where the next piece goes on, when this one came to the sequence `at`, and nothing is behind that in its lane
        or something is."""
        rank = self.lane.rank
        if not is_end:
            return rank, at
        return (rank + 1, 0) if rank + 1 in RANKS else None


def wanted(verb: str, body: bytes) -> Wanted:
    """Raises: RemoteProtocolError if that is not a question for such work."""
    if len(body) > CONTROL_REQUEST_BYTES_MAX:
        raise RemoteProtocolError(
            f"{verb}: a question of more than {CONTROL_REQUEST_BYTES_MAX} bytes", Code.CONTROL_REQUEST
        )
    asked = read_json(verb, body, VERBS[verb])
    if asked.selector is not None:
        selector.compile_selector(asked.selector)
    if isinstance(asked, Move):
        if asked.to == asked.queue:
            raise RemoteProtocolError(f"{verb}: {asked.to!r} is where they are", Code.CONTROL_REQUEST)
        target_of(asked)
    return msgspec.structs.replace(asked, sequences=asked.sequences and tuple(sorted(set(asked.sequences))))


def target_of(asked: Move) -> Destination:
    """Raises: RemoteProtocolError if there can be no such queue."""
    return parse_queue_name(asked.to)


def read_for(asked: Wanted, queue: Queue, last_sequence: int) -> BulkLook | None:
    """What is to be read of a queue for a piece; None if nothing is left there. `last_sequence` is the last that was
    given out."""
    rank, after = asked.after
    until = last_sequence if asked.until is None else min(asked.until, last_sequence)
    is_scheduled = isinstance(asked, OfScheduled)
    limit = SHOWN_SENDS_PER_PIECE if isinstance(asked, Scheduled) else BULK_MESSAGES_PER_PIECE
    if asked.limit is not None and asked.selector is None and not is_scheduled:
        limit = min(asked.limit, BULK_MESSAGES_PER_PIECE)
    for lane in queue.lanes:
        if lane.rank < rank:
            continue
        if lane.rank > rank:
            after = 0
        if len(lane):
            # What repeats stands behind the number by which it is known.
            if asked.sequences is None or is_scheduled:
                return BulkLook(lane, after, limit, until)
            at = bisect_right(asked.sequences, after)
            if at < len(asked.sequences):
                return BulkLook(lane, asked.sequences[at] - 1, limit, until)
    return None


def nothing(asked: Wanted, why: str = "") -> Done:
    """The answer when nothing is left to do, or `why` it cannot be done any more."""
    kind = ScheduledShown if isinstance(asked, OfScheduled) else Done
    return kind(moved=0, to={}, left=0, next=None, until=asked.until or 0, error=why)


def left_with(theirs: Iterable[Entry], asked: Wanted, until: int) -> int:
    """How many of those wanted are among what consumers and open transactions have of the queue: they are left there.
    Of what has left memory, and of more than HELD_COMPARED_MAX, it is not known whether a selector wants it; it counts.
    """
    sequences = None if asked.sequences is None else set(asked.sequences)
    held = (entry for entry in theirs if entry.sequence <= until and (sequences is None or entry.sequence in sequences))
    if asked.selector is None:
        return sum(1 for _ in held)
    wants = selector.compile_selector(asked.selector).matches
    compared = sum(entry.message is None or wants(entry.message) for entry in islice(held, HELD_COMPARED_MAX))
    return compared + sum(1 for _ in held)


def take(
    asked: Wanted, read: BulkLook, page: PageRead, committed: int, now_ms: int, has_ended: Callable[[str], bool]
) -> tuple[list[Taken], Done]:
    """What is to be taken out of the lane, and the answer when that is done. What came from queues of which `has_ended`
    says that they are no more stays."""
    lane = read.lane
    last = read.until if page.is_end else min(page.found[-1].sequence, read.until)
    in_memory = _in_memory(lane, read.after_sequence, last)
    on_page = {found.sequence: found for found in page.found if found.sequence <= last}
    wants = selector.compile_selector(asked.selector).matches if asked.selector is not None else None
    become = _deed(asked, now_ms)
    sequences = asked.sequences and set(asked.sequences)
    here: list[Taken] = []
    answer = Done(moved=0, to={}, left=0, next=None, until=read.until)
    at = read.after_sequence
    for looked_at, at in enumerate(merge(sorted(in_memory), sorted(on_page.keys() - in_memory.keys())), 1):
        if sequences is None or at in sequences:
            _take_one(
                lane, in_memory.get(at), on_page.get(at), committed, now_ms, wants, become, has_ended, here, answer
            )
        if looked_at == read.limit or len(here) == asked.limit:
            break
    else:
        at = last
    answer.next = read.next(at, is_end=(page.is_end and at == last) or at >= read.until)
    answer.moved = len(here)
    if sequences is not None:
        answer.sequences = [taken.entry.sequence for taken in here]
    return here, answer


def _take_one(
    lane: Lane,
    entry: Entry | None,
    found: Found | None,
    committed: int,
    now_ms: int,
    wants: Callable[[SentMessage], bool] | None,
    become: Callable[[SentMessage], tuple[Destination, SentMessage] | None] | None,
    has_ended: Callable[[str], bool],
    here: list[Taken],
    answer: Done,
) -> None:
    message = entry.message if entry is not None else None
    if message is None and found is not None:
        message = found.message
    if message is None:
        # Damaged, or it has just left memory and is held together by what a page will bring.
        answer.left += 1
        return
    if (wants is not None and not wants(message)) or is_expired(message, now_ms):
        return
    if entry is None and found is not None:
        entry = _unread(lane, found)
    if entry is None:
        # It has gone, or is going, or a consumer holds it (`left_with`).
        return
    if entry.batch > committed:
        answer.left += 1
        return
    arrival = None
    if become is not None:
        arrival = become(message)
        if arrival is None or arrival[0].name == lane.queue.name:
            answer.left += 1
            return
        name = arrival[0].name
        if has_ended(name):
            answer.left += 1
            answer.ended[name] = answer.ended.get(name, 0) + 1
            return
        answer.to[name] = answer.to.get(name, 0) + 1
    here.append(Taken(entry, arrival))


def _deed(asked: Wanted, now_ms: int) -> Callable[[SentMessage], tuple[Destination, SentMessage] | None] | None:
    """What a message becomes, and where; None if it is removed."""
    if isinstance(asked, Move):
        return partial(moved, destination=target_of(asked))
    return partial(revived, now_ms=now_ms) if isinstance(asked, Redrive) else None


def _in_memory(lane: Lane, after: int, last: int) -> dict[int, Entry]:
    """What waits in memory behind the one sequence, up to the other; what somebody is about to dead-letter left out."""
    return {entry.sequence: entry for entry in lane.between(after, last, most=BULK_MESSAGES_PER_PIECE + 1)}


def _unread(lane: Lane, found: Found) -> Entry | None:
    """A message that only the store has; None if it is held, on its way out, or to be given up."""
    if found.message is None or not lane.is_only_in_store(found.sequence):
        return None
    attempts, deliveries, due_ms, _ = found.mark
    if is_given_up(lane.queue, attempts, due_ms):
        return None
    return Entry(
        sequence=found.sequence,
        message=None,
        lane=lane,
        batch=0,
        persistent=found.message.persistent,
        stored=0,
        deliveries=deliveries,
        attempts=attempts,
        marked=found.mark != NO_MARK,
        content=found.content,
    )
