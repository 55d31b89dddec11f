"""Which queues may go because nobody has used them for a while, and which stay, or have room kept for them, because an
open transaction sends to them. All are looked at in turns.

A queue costs memory though nothing is in it. So one that is empty, unused and has nothing to remember goes, in memory
and in the store, and is made again when somebody names it. Source: docs/contract.md, "Queues that come and go"

    every second       a part of all queues is looked at: what was not used for a minute goes
    a queue is made    where there is no room for it, what was not used for a second goes
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from truenext.engine.state.memory import LANE_BYTES, MemoryBudget, queue_size
from truenext.engine.state.queue import Queue
from truenext.engine.writing.commit_state import CommitState
from truenext.errors import Code, RemoteProtocolError
from truenext.model.destination import Destination, virtual_topic
from truenext.model.limits import UNUSED_QUEUE_SECONDS, UNUSED_QUEUE_SECONDS_SHORT


class UnusedQueueFinder:
    def __init__(self, by_name: Mapping[str, Queue], commit_state: CommitState, memory: MemoryBudget) -> None:
        self._by_name = by_name
        """All that there are."""
        self._commit_state = commit_state
        self._memory = memory
        self._remaining: list[Queue] = []
        """Those that are still to be looked at, the next one last."""

    def candidates(self, count: int) -> Iterator[Queue]:
        """Of so many queues those that were not used lately."""
        is_short = not self._memory.has_space_for_queue
        seconds = UNUSED_QUEUE_SECONDS_SHORT if is_short else UNUSED_QUEUE_SECONDS
        before_us = self._commit_state.now_us - int(seconds * 1_000_000)
        for _ in range(min(count, len(self._by_name))):
            if not self._remaining:
                self._remaining = list(self._by_name.values())
                self._remaining.reverse()
            queue = self._remaining.pop()
            if queue.last_used_us <= before_us and self._by_name.get(queue.name) is queue:
                yield queue


def must_keep(queue: Queue) -> bool:
    """It is there for what was said of it, or comes by itself, whether it is used or not."""
    return bool(queue.is_paused or queue.destination.topic or virtual_topic(queue.name))


def consumer_memory_error(size: int, memory: MemoryBudget) -> RemoteProtocolError:
    """A consumer or a browser takes so many bytes, with its selector, and there is no room for that."""
    return RemoteProtocolError(
        f"no room for this subscription: it takes {-(-size >> 10)} KiB with its selector and in all its queues, and "
        f"queues and their consumers take {memory.queue_bytes >> 20} of the {memory.queues_limit >> 20} MiB that "
        "--memory-limit leaves for them; make it larger, have fewer or shorter selectors, or let fewer queues match",
        Code.NO_SPACE,
    )


def no_memory_error(queues: int, memory: MemoryBudget) -> RemoteProtocolError:
    """There is no room for another queue, and none of those that are there can go."""
    return RemoteProtocolError(
        f"no room for another queue: {queues} queues and their consumers take all of the {memory.queues_limit >> 20} "
        "MiB that --memory-limit leaves for them; make it larger, or let fewer queues be in use at once",
        Code.NO_SPACE,
    )


# ---- Which queues open transactions send to, and the room that is kept for those that are not there ----
#
# A SEND in a transaction is refused where there is no room for its queue, and its COMMIT is not. So the queue that it
# names does not go before the transaction ends, and the room for one that is not there counts as taken until it is
# made, or no open transaction sends to it any more.


class QueueReservations:
    def __init__(self, memory: MemoryBudget) -> None:
        self._memory = memory
        self._transaction_counts: dict[str, int] = {}
        """By the name of a queue, how many open transactions send to it."""
        self._missing_queues: dict[str, Destination] = {}
        """Those of them that are not there, and for which room is kept."""

    def __contains__(self, name: str) -> bool:
        """An open transaction sends to the queue of this name."""
        return name in self._transaction_counts

    def has_reserved_space(self, name: str) -> bool:
        """It is not there, and may be made without asking whether there is room."""
        return name in self._missing_queues

    def reserved_temporary(self, session: str) -> list[Destination]:
        """Of the connection of this name, those that are not there."""
        return [one for one in self._missing_queues.values() if one.session == session]

    def reserve(self, destination: Destination, *, exists: bool) -> None:
        """One open transaction more sends to a queue."""
        name = destination.name
        self._transaction_counts[name] = self._transaction_counts.get(name, 0) + 1
        if not exists and name not in self._missing_queues:
            self._missing_queues[name] = destination
            self._memory.queue_bytes += _queue_bytes(destination)

    def free(self, names: Iterable[str]) -> None:
        """One that sends to these is over."""
        senders = self._transaction_counts
        for name in names:
            remaining = senders[name] - 1
            if remaining:
                senders[name] = remaining
                continue
            del senders[name]
            if self._missing_queues:
                self.on_queue_created(name)

    def on_queue_created(self, name: str) -> None:
        """A queue counts by itself from here on, or is needed no more."""
        destination = self._missing_queues.pop(name, None)
        if destination is not None:
            self._memory.queue_bytes -= _queue_bytes(destination)


def _queue_bytes(destination: Destination) -> int:
    """What it takes once something is in it."""
    return queue_size(destination) + LANE_BYTES
