"""What is asked of the store, and what it answers.

A page is read for somebody, and comes back by `StoreRead.on_page`. Most are the next page of a lane, whose
horizon then moves; a SideRead reads a page and moves no horizon.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection

import msgspec

from truenext.engine.state.queue import Lane
from truenext.errors import StoreError
from truenext.model.batch import NO_CAUSES, NO_MARK, Causes, Mark
from truenext.model.message import SentMessage
from truenext.model.order import PRIORITY_MAX
from truenext.model.record import split_lane_key


class PageMessage(msgspec.Struct, gc=False):
    """One message of a page."""

    sequence: int
    message: SentMessage | None
    """None if its record is damaged."""
    mark: Mark = NO_MARK
    content_number: int = 0
    """The number of the content that it shares with others; 0 if its record has its own."""
    causes: Causes = NO_CAUSES


class PageResult(msgspec.Struct, gc=False):
    """What was there."""

    messages: list[PageMessage]
    """In order of sequence."""
    as_of: int
    """Every batch up to this one is in it; what later ones did may be missing."""
    is_end: bool
    """As of then, there was nothing behind it."""


class StoreRead:
    """A page that is wanted."""

    __slots__ = ("after_sequence", "lane", "limit", "size_max")

    waits_for_commit = True
    """It is taken in once all batches that are in it are known to be durable."""

    is_for_consumers = False
    """Consumers of the queue may wait for what it brings into memory."""

    def __init__(self, lane: Lane, after_sequence: int, limit: int, size_max: int) -> None:
        self.lane = lane
        self.after_sequence = after_sequence
        self.limit = limit
        """Messages, at most."""
        self.size_max = size_max
        """Bytes of records, at most, unless the first is larger."""

    def start(self) -> None:
        """It is wanted, until `finish`."""

    def finish(self) -> None:
        """It is there."""

    @abstractmethod
    def on_page(self, page: PageResult) -> None:
        """Whoever wanted it gets it.

        Raises: StoreError if the store has lost something
        """


class SideRead(StoreRead):
    """A page that is nobody's next page: what is on it stays where it is, as far as the lane is concerned, which
    remembers meanwhile what leaves it."""

    __slots__ = ("_is_started",)

    def __init__(self, lane: Lane, after_sequence: int, limit: int, size_max: int) -> None:
        super().__init__(lane, after_sequence, limit, size_max)
        self._is_started = False

    def start(self) -> None:
        if not self._is_started:
            self._is_started = True
            for lane in self.lanes_read():
                lane.side_read_count += 1

    def finish(self) -> None:
        if self._is_started:
            self._is_started = False
            for lane in self.lanes_read():
                lane.side_read_count -= 1

    def lanes_read(self) -> Collection[Lane]:
        return (self.lane,)


def damage_error(lane: Lane, problem: str) -> StoreError:
    """The store does not have what it should."""
    priority = PRIORITY_MAX - split_lane_key(lane.key)[1]
    return StoreError(
        f"the store is damaged: of queue {lane.queue.name!r}, priority {priority}, {problem}. "
        "`truenext store check DIR` says more, `truenext store export DIR NEW` saves what can be read"
    )
