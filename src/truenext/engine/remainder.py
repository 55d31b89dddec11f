"""Remainder: the messages for which a drain waits, and those that it leaves in the broker. Source: docs/contract.md,
"Drain"

The messages are counted in steps, between which clients go on. The order of the steps is that of a message's life, so
that no message is missed because it goes on meanwhile; it may count twice:

    queues          messages that wait, or are given up
    consumers       messages that they hold
    transactions    messages that they have, of one connection after its consumers
    other holders   messages that are neither in the engine's queues nor with its holders

A new message, and one that returns to an earlier place of this list, may be missed. The engine counts both, so that
`Remainder.is_certain` is False then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable
from dataclasses import dataclass, field
from itertools import islice

from truenext.engine.engine import Engine
from truenext.engine.state.queue import Entry, Queue
from truenext.model.batch import DUE_NEVER
from truenext.model.destination import is_progress_queue

QUEUES_PER_STEP = 50
ENTRIES_PER_STEP = 1000

Steps = Generator[None, None, None]


@dataclass(slots=True)
class QueueRemainder:
    """Messages of one queue for which a drain waits."""

    waiting: int = 0
    """Number of messages that wait, or are given up and not dead letters yet."""
    held: int = 0
    """Number of messages that consumers hold or transactions have."""


@dataclass(slots=True)
class Remainder:
    queues: dict[Queue, QueueRemainder] = field(default_factory=dict)
    """Queues with messages for which a drain waits."""
    scheduled: int = 0
    delayed: int = 0
    paused: int = 0
    dead: int = 0
    kept: int = 0
    """Number of marks and decisions of Spark's queries."""
    is_certain: bool = False
    """True if no message was missed: what is counted here includes all that there was at the end."""

    @property
    def is_empty(self) -> bool:
        """Whether a drain has nothing to wait for."""
        return not self.queues


def count_remainder(
    engine: Engine, other_holders: Callable[[], Iterable[Entry]] = tuple
) -> Generator[None, None, Remainder]:
    """Count the messages of a broker, in steps. `other_holders` returns the messages that are held outside of the
    engine."""
    return RemainderCount(engine).run(other_holders)


class RemainderCount:
    """One count of the messages of a broker."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._found = Remainder()
        self._progress_queues: list[Queue] = []
        """Queues with messages in which queries of Spark keep their progress."""

    def run(self, other_holders: Callable[[], Iterable[Entry]]) -> Generator[None, None, Remainder]:
        engine, found = self._engine, self._found
        before = self._moment()
        yield from self._count_queues(list(engine.queues.by_name.values()))
        for number, name in enumerate(list(engine.queues.hidden_by_name), 1):
            found.scheduled += engine.queues.scheduled_count(name)
            if number % QUEUES_PER_STEP == 0:
                yield
        for session in list(engine.state.clients.sessions.values()):
            for consumer in list(session.consumers.values()):
                if consumer.queue is None:
                    yield from self._count_held(consumer.held.values())
                elif consumer.held:
                    self._add_held(consumer.queue, len(consumer.held))
            for transaction in list(session.transactions.settling_transactions):
                yield from self._count_held(transaction.held.values())
            yield
        for entry in other_holders():
            self._add_held(entry.lane.queue, 1)
        self._leave_out_progress()
        found.is_certain = self._moment() == before
        return found

    def _moment(self) -> tuple[int, int]:
        """Return two numbers, one of which has changed if a message may have been missed."""
        state = self._engine.state.commit_state
        return state.next_sequence, state.return_count

    # ---- Queues ----

    def _count_queues(self, queues: Collection[Queue]) -> Steps:
        blocking: dict[Queue, dict[int, Entry]] = {}
        yield from self._find_blocking(blocking)
        for number, queue in enumerate(queues, 1):
            waiting = queue.waiting_count()
            given_up = self._engine.given_up_count(queue)
            if waiting or given_up:
                self._add_waiting(queue, waiting, given_up, blocking.get(queue, {}).values())
            if number % QUEUES_PER_STEP == 0:
                yield

    def _find_blocking(self, blocking: dict[Queue, dict[int, Entry]]) -> Steps:
        """Find the messages that wait for their next try at their places in their lanes, and so block them."""
        entries = self._engine.delayed_entries()
        while chunk := list(islice(entries, ENTRIES_PER_STEP)):
            for entry in chunk:
                if self._is_blocking(entry):
                    blocking.setdefault(entry.lane.queue, {})[entry.sequence] = entry
            yield

    def _add_waiting(self, queue: Queue, waiting: int, given_up: int, blocking: Iterable[Entry]) -> None:
        found = self._found
        if queue.holds_dead_letters:
            found.dead += waiting
            waiting = 0
        elif queue.is_paused:
            found.paused += waiting
            waiting = 0
        else:
            # Checked again: since they were found, some may have been removed.
            delayed = sum(len(lane.delayed) for lane in queue.lanes) + sum(map(self._is_blocking, blocking))
            found.delayed += delayed
            waiting -= delayed
        if waiting + given_up:
            self._of(queue).waiting += waiting + given_up

    def _is_blocking(self, entry: Entry) -> bool:
        """Return whether a message waits for its next try at its place in its lane."""
        lane = entry.lane
        return (
            entry.due_us not in (0, DUE_NEVER)
            and lane.delayed.get(entry.sequence) is not entry
            and (entry.message is not None or lane.unloaded.get(entry.sequence) is entry)
            and not self._engine.is_given_up(entry)
        )

    # ---- Holders ----

    def _count_held(self, entries: Collection[Entry]) -> Steps:
        entries = list(entries)
        for first in range(0, len(entries), ENTRIES_PER_STEP):
            for entry in entries[first : first + ENTRIES_PER_STEP]:
                self._add_held(entry.lane.queue, 1)
            yield

    def _add_held(self, queue: Queue, count: int) -> None:
        if queue.holds_dead_letters:
            self._found.dead += count
        else:
            self._of(queue).held += count

    def _of(self, queue: Queue) -> QueueRemainder:
        each = self._found.queues.get(queue)
        if each is None:
            each = self._found.queues[queue] = QueueRemainder()
            if is_progress_queue(queue.name):
                self._progress_queues.append(queue)
        return each

    def _leave_out_progress(self) -> None:
        """Count one message of each queue with the progress of a Spark query as kept."""
        for queue in self._progress_queues:
            each = self._found.queues[queue]
            self._found.kept += 1
            if each.waiting:
                each.waiting -= 1
            else:
                each.held -= 1
            if not (each.waiting or each.held):
                del self._found.queues[queue]
