"""Which queues open transactions send to, and the room that is kept for those that are not there.

A SEND in a transaction is refused where there is no room for its queue, and its COMMIT is not. So the queue that it
names does not go before the transaction ends, and the room for one that is not there counts as taken until it is made,
or no open transaction sends to it any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from truenext.engine.state.memory import LANE_BYTES, queue_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from truenext.engine.state.memory import MemoryBudget
    from truenext.model.destination import Destination


class QueueReservations:
    __slots__ = ("_memory", "_missing_queues", "_transaction_counts")

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
