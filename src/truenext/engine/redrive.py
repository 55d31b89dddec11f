"""How dead letters get back to where they came from, a piece at a time.

A piece is one page of the store: it reaches what has left memory, and nothing is kept from one piece to the next but a
position, which whoever asked brings along. What stands on the page may have changed since: it is moved only if it still
waits in the lane. A message that is taken out here may be shown by a page that was read before its removal is durable;
`Lane.taken_out` says that it is gone.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import msgspec

from truenext.batch import NO_MARK
from truenext.engine.lane import Entry
from truenext.engine.paging import Look
from truenext.engine.redelivery import revived
from truenext.errors import RemoteProtocolError
from truenext.limits import PAGE_BYTES, REDRIVE_PIECE
from truenext.order import RANKS

if TYPE_CHECKING:
    from collections.abc import Callable

    from truenext.destination import Destination
    from truenext.engine.paging import Found, PageRead
    from truenext.engine.queue import Queue
    from truenext.message import Message


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One piece of a re-drive, as it is asked for, in JSON."""

    queue: str
    sequences: tuple[int, ...] | None = None
    """In order; None is all."""
    limit: int | None = None
    """Messages to move from here on; None is all."""
    dry_run: bool = False
    """Nothing is moved; the answer is what would be."""
    after: tuple[int, int] = (0, 0)
    """Rank and sequence behind which it goes on: `next` of the last answer."""


class Redriven(msgspec.Struct):
    """The answer, in JSON."""

    moved: int
    to: dict[str, int]
    """Those of them that went to each queue."""
    left: int
    """Wanted, and left where they are: consumers hold them, or they do not say where they came from."""
    next: tuple[int, int] | None
    """Where to go on; None at the end."""
    sequences: list[int] = []
    """Which ones were moved, if single ones were wanted."""


class Revival(msgspec.Struct, gc=False):
    """A dead letter that is to be moved."""

    entry: Entry
    destination: Destination
    message: Message


def wanted(body: bytes) -> Wanted:
    """Raises: RemoteProtocolError if that is not a question for a re-drive."""
    try:
        asked = msgspec.json.decode(body, type=Wanted)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"redrive: {error}") from error
    rank, after = asked.after
    if rank not in RANKS or after < 0 or (asked.limit is not None and asked.limit < 1):
        raise RemoteProtocolError("redrive: `after` is no rank and sequence, or `limit` is less than 1")
    return msgspec.structs.replace(asked, sequences=asked.sequences and tuple(sorted(set(asked.sequences))))


def read_for(asked: Wanted, queue: Queue) -> Look | None:
    """What is to be read of a queue for a piece; None if nothing is left there."""
    rank, after = asked.after
    limit = min(asked.limit or REDRIVE_PIECE, REDRIVE_PIECE)
    for lane in queue.lanes[rank:]:
        if len(lane):
            if asked.sequences is None:
                return Look(lane, after, limit, PAGE_BYTES)
            at = bisect_right(asked.sequences, after)
            if at < len(asked.sequences):
                return Look(lane, asked.sequences[at] - 1, limit, PAGE_BYTES)
        after = 0
    return None


def revivals(
    asked: Wanted, read: Look, page: PageRead, committed: int, now_ms: int, has_ended: Callable[[str], bool]
) -> tuple[list[Revival], Redriven]:
    """What of a page is to be moved, and the answer when that is done. What came from queues of which `has_ended` says
    that they are no more stays."""
    lane = read.lane
    sequences = asked.sequences
    chosen = [found for found in page.found if sequences is None or found.sequence in sequences]
    waiting = {entry.sequence: entry for entry in lane} | {entry.sequence: entry for entry in lane.recent}
    found_here: list[Revival] = []
    answer = Redriven(moved=0, to={}, left=0, next=_next(read, page))
    for found in chosen:
        entry = waiting.get(found.sequence) or _unread(read, found)
        what = None
        if found.message is not None and entry is not None and entry.batch <= committed:
            what = revived(found.message, now_ms)
        if entry is None or what is None or what[0].name == lane.queue.name or has_ended(what[0].name):
            answer.left += 1
            continue
        destination, message = what
        found_here.append(Revival(entry, destination, message))
        answer.to[destination.name] = answer.to.get(destination.name, 0) + 1
    answer.moved = len(found_here)
    if sequences is not None:
        answer.sequences = [revival.entry.sequence for revival in found_here]
    return found_here, answer


def _next(read: Look, page: PageRead) -> tuple[int, int] | None:
    rank = read.lane.queue.lanes.index(read.lane)
    if not page.is_end:
        return rank, page.found[-1].sequence
    return (rank + 1, 0) if rank + 1 in RANKS else None


def _unread(read: Look, found: Found) -> Entry | None:
    """A message that only the store has; None if it is held, or on its way out."""
    lane = read.lane
    if found.sequence <= lane.horizon or found.sequence in lane.taken_out or found.message is None:
        return None
    attempts, deliveries, _ = found.mark
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
    )
