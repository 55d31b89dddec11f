"""Who has messages that wait in no lane: consumers, and open transactions.

Whatever asks who has what of a queue asks for holders: `ClientRegistry.held_entries`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from truenext.engine.state.queue import Entry, Queue


class EntryHolder:
    __slots__ = ()

    held: dict[int, Entry]
    """By sequence, in the order in which it got them."""

    def drop_queue(self, queue: Queue) -> list[Entry]:
        """Forget what is of a queue that has ended. Returns it."""
        dropped = [entry for entry in self.held.values() if entry.lane.queue is queue]
        for entry in dropped:
            del self.held[entry.sequence]
        return dropped
