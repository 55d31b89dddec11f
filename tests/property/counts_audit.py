"""Audit that compares the counts of queues with the events of the history, and with the messages that are there.

Two accounts of the same run: the engine counts each message in its queue (engine/state/counts.py), and writes an event
of it (engine/writing/event_log.py). At each batch both must agree, queue by queue and in sum (C32.1,
C32.2, C32.3, C32.4).
"""

import struct
from collections import Counter, defaultdict
from collections.abc import Iterator

from truenext.engine.engine import Engine
from truenext.engine.state.counts import NO_RARE_COUNTS, Counts
from truenext.engine.state.queue import Queue
from truenext.engine.writing.event_log import NoEventLog
from truenext.model.events import (
    BLOCK,
    BLOCKING,
    CHUNK,
    DELAYED,
    FAILURES,
    REASONS,
    EventKind,
    chunks_in,
    columns_size,
)

COUNTED = {
    EventKind.ACCEPTED: "accepted",
    EventKind.ACCEPTED_OF_GROUP: "accepted",
    EventKind.ACKNOWLEDGED: "acknowledged",
    EventKind.RETURNED: "returned",
    EventKind.EXPIRED: "expired",
    EventKind.DEAD_LETTERED: "dead-lettered",
    EventKind.HANDLED: "handled",
    EventKind.MOVED: "moved",
    EventKind.REMOVED: "purged",
}
"""Counts, by the kind of event that counts one."""

LEAVING = ("acknowledged", "expired", "dead-lettered", "handled", "moved", "purged")
"""Counts of messages that have left their queue."""

NOT_REQUEUED = tuple(map(REASONS.index, (DELAYED, BLOCKING, "due")))
"""Reasons of a `returned` with which no message was requeued: one was read from the store, or its delay has ended."""

FAILED = tuple(code for code, reason in enumerate(REASONS) if reason.split(" ")[0] in FAILURES)
"""Reasons of a `returned` that counted an attempt."""


def _blocks(history: bytes) -> Iterator[tuple[EventKind, int, int, int, int]]:
    """Yield kind, reason, number of events and queue of each block, and how many of its messages have failed again."""
    for chunk in chunks_in(history):
        at = CHUNK.size
        while at < len(chunk):
            kind, code, count, queue, other, _ = BLOCK.unpack_from(chunk, at)
            at += BLOCK.size
            again = 0
            if kind == EventKind.RETURNED and code in FAILED:
                # After the sequences, of 8 bytes each.
                again = sum(attempts > 1 for attempts in struct.unpack_from(f"<{count}I", chunk, at + 8 * count))
            at += columns_size(kind, count, other)
            yield EventKind(kind), code, count, queue, again


def _as_counter(counts: Counts) -> Counter[str]:
    rare = counts.known_rare or NO_RARE_COUNTS
    found = Counter(
        {
            "accepted": counts.accepted,
            "acknowledged": counts.acknowledged,
            "returned": rare.returned,
            "failed again": rare.failed_again,
            "expired": rare.expired,
            "dead-lettered": sum(rare.dead_lettered.values()),
            "handled": rare.handled,
            "moved": rare.moved,
            "purged": rare.purged,
        }
    )
    return +found


class CountsAudit:
    """Audit of one run of an engine, from before its start."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._by_number: dict[int, Counter[str]] = defaultdict(Counter)
        """Events of each queue, by its number, since the queue got it."""
        self._sum: Counter[str] = Counter()
        self._recovered = {queue: queue.waiting_count() for queue in engine.queues.by_name.values()}

    def add(self, history: bytes) -> None:
        """Add the events of a batch that the engine has just closed."""
        for kind, code, count, queue, again in _blocks(history):
            if kind is EventKind.NAME:
                self._by_number[queue] = Counter()
            elif kind in COUNTED and not (kind is EventKind.RETURNED and code in NOT_REQUEUED):
                self._by_number[queue][COUNTED[kind]] += count
                self._sum[COUNTED[kind]] += count
            if again:
                self._by_number[queue]["failed again"] += again
                self._sum["failed again"] += again

    def differing(self) -> list[str]:
        """Return the counts that differ from the events. Call it only after the events of the last batch were added,
        before the engine does anything. Empty if the engine has no history."""
        if isinstance(self._engine.state.commit_state.events, NoEventLog):
            return []
        queues = self._permanent()
        sums = Counts()
        sums.add(self._engine.queues.removed)
        for queue in queues:
            sums.add(queue.counts)
        books = [(queue.name, _as_counter(queue.counts), self._by_number[queue.number]) for queue in queues]
        books.append(("all", _as_counter(sums), self._sum))
        return [f"{name}: {counted}, events {events}" for name, counted, events in books if counted != events]

    def unbalanced(self) -> list[str]:
        """Return the queues that have more or fewer messages than their counts say."""
        found = []
        for queue in self._permanent():
            counts = _as_counter(queue.counts)
            expected = self._recovered.get(queue, 0) + counts["accepted"] - sum(counts[name] for name in LEAVING)
            held = sum(1 for _ in self._engine.state.clients.held_entries(queue))
            there = queue.waiting_count() + held + self._engine.given_up_count(queue)
            if expected != there:
                found.append(f"{queue.name}: {there} messages, {expected} by {counts}")
        return found

    def _permanent(self) -> list[Queue]:
        return [queue for queue in self._engine.queues.by_name.values() if not queue.is_temporary]
