"""Removal of unused queues, and memory reserved for queues of open transactions.

Even an empty queue takes memory. So a queue that is empty, unused and has no state such as a pause is removed from
memory and store. The queue is created again when a client names it. Source: docs/contract.md, "Queues that come and go"

    every second                   some queues are checked; queues unused for a minute are removed
    a new queue finds no memory    queues unused for UNUSED_QUEUE_SECONDS_SHORT are removed
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
        self._commit_state = commit_state
        self._memory = memory
        self._remaining: list[Queue] = []
        """Queues that are still to be checked in this pass over all queues; the next queue to check is the last
        element."""

    def candidates(self, count: int) -> Iterator[Queue]:
        """Check up to `count` queues, and yield those that have not been used for UNUSED_QUEUE_SECONDS, or for
        UNUSED_QUEUE_SECONDS_SHORT if memory is short."""
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
    """Return whether a queue stays although it is unused, because it is paused or gets messages from a topic."""
    return bool(queue.is_paused or queue.destination.topic or virtual_topic(queue.name))


def consumer_memory_error(size: int, memory: MemoryBudget) -> RemoteProtocolError:
    """Return the error for a subscription that does not fit into memory. `size` is its bytes, with its selector."""
    return RemoteProtocolError(
        f"no memory for this subscription: it needs {-(-size >> 10)} KiB with its selector and in all its queues, and "
        f"queues and their consumers take {memory.queue_bytes >> 20} of the {memory.queues_limit >> 20} MiB that "
        "--memory-limit leaves for them; raise it, use fewer or shorter selectors, or a pattern of fewer queues",
        Code.NO_SPACE,
    )


def no_memory_error(queues: int, memory: MemoryBudget) -> RemoteProtocolError:
    """Return the error for a queue that does not fit into memory."""
    return RemoteProtocolError(
        f"no memory for another queue: {queues} queues and their consumers take all of the "
        f"{memory.queues_limit >> 20} MiB that --memory-limit leaves for them; raise it, or use fewer queues at once",
        Code.NO_SPACE,
    )


# ---- Memory reserved for the queues that open transactions send to ----
#
# A SEND in a transaction is refused if there is no memory for its queue; its COMMIT is not. So an existing queue stays
# until the transaction ends, and memory for a missing one is reserved until it is created, or no open transaction sends
# to it any more.


class QueueReservations:
    def __init__(self, memory: MemoryBudget) -> None:
        self._memory = memory
        self._transaction_counts: dict[str, int] = {}
        """Number of open transactions that send to a queue, by name of the queue."""
        self._missing_queues: dict[str, Destination] = {}
        """Queues in `_transaction_counts` that do not exist, by name. Memory is reserved for these queues."""

    def __contains__(self, name: str) -> bool:
        """Return whether an open transaction sends to the queue of this name."""
        return name in self._transaction_counts

    def has_reserved_space(self, name: str) -> bool:
        """Return whether memory is reserved for the queue of this name, which does not exist."""
        return name in self._missing_queues

    def reserved_temporary(self, session: str) -> list[Destination]:
        """Return the temporary queues of a connection that do not exist and for which memory is reserved."""
        return [one for one in self._missing_queues.values() if one.session == session]

    def reserve(self, destination: Destination, *, exists: bool) -> None:
        """Count one more open transaction that sends to a queue."""
        name = destination.name
        self._transaction_counts[name] = self._transaction_counts.get(name, 0) + 1
        if not exists and name not in self._missing_queues:
            self._missing_queues[name] = destination
            self._memory.queue_bytes += _queue_bytes(destination)

    def free(self, names: Iterable[str]) -> None:
        """Reduce the number of open transactions that send to each of these queues by one."""
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
        """Free the memory reserved for a queue: either the queue exists now, or no transaction sends to the queue any
        more."""
        destination = self._missing_queues.pop(name, None)
        if destination is not None:
            self._memory.queue_bytes -= _queue_bytes(destination)


def _queue_bytes(destination: Destination) -> int:
    return queue_size(destination) + LANE_BYTES
