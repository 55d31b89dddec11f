"""Where the messages of one queue and one priority wait.

A lane holds persistent and transient messages together, in the order of their sequences. New ones arrive in that order
by themselves; one that is given back has an older sequence than those that arrived since, and stands in a heap beside
them. The earlier of the two heads is the lane's head.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import msgspec

from truenext.message import Message

if TYPE_CHECKING:
    from collections.abc import Iterator

    from truenext.engine.queue import Queue


class Entry(msgspec.Struct, gc=False):
    """A message's place in a queue, and what became of it there so far."""

    sequence: int
    message: Message
    queue: Queue
    batch: int
    """It is visible once this batch is durable; 0 is at once."""
    stored: bool
    """The store has it, or will have with `batch`: its removal must be told to the store."""
    deliveries: int = 0
    attempts: int = 0
    marked: bool = False
    """The store has a mark for it (attempts, deliveries)."""


class Lane:
    __slots__ = ("arrived", "key", "returned")

    def __init__(self, key: bytes) -> None:
        self.key = key
        """What the store's keys of this lane begin with, see record.py."""
        self.arrived: deque[Entry] = deque()
        """Not given back in this run, in order of sequence. Whoever appends keeps it so."""
        self.returned: list[tuple[int, Entry]] = []
        """Given back, as a heap by sequence."""

    def __len__(self) -> int:
        return len(self.arrived) + len(self.returned)

    def __iter__(self) -> Iterator[Entry]:
        """In no particular order."""
        yield from self.arrived
        for _, entry in self.returned:
            yield entry

    def head(self) -> Entry | None:
        """The earliest message, ready or not."""
        arrived, returned = self.arrived, self.returned
        if returned and (not arrived or returned[0][0] < arrived[0].sequence):
            return returned[0][1]
        return arrived[0] if arrived else None

    def pop(self) -> Entry:
        """Take the head out."""
        arrived, returned = self.arrived, self.returned
        if returned and (not arrived or returned[0][0] < arrived[0].sequence):
            return heappop(returned)[1]
        return arrived.popleft()

    def give_back(self, entry: Entry) -> None:
        """Put a message that was dispatched at its place again."""
        heappush(self.returned, (entry.sequence, entry))

    def clear(self) -> None:
        self.arrived.clear()
        self.returned.clear()
