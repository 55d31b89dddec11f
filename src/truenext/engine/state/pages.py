"""Pages of messages: requests to the store, and their results.

`StoreRead.on_page` gets the page that was read. Most requests are for the next page of a lane; such a page moves the
lane's horizon up. The page of a `SideRead` moves no horizon.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgspec

from truenext.engine.state.queue import Lane
from truenext.errors import StoreError
from truenext.model.batch import NO_CAUSES, NO_MARK, Causes, Mark
from truenext.model.message import SentMessage
from truenext.model.order import PRIORITY_MAX
from truenext.model.record import split_lane_key


class PageMessage(msgspec.Struct, gc=False):
    """Stored message on a page, with its mark and its causes."""

    sequence: int
    message: SentMessage | None
    """Message; None if its record is damaged."""
    mark: Mark = NO_MARK
    content_number: int = 0
    """Number of the content that the message shares with other copies; 0 if its record has its own."""
    causes: Causes = NO_CAUSES


class PageResult(msgspec.Struct, gc=False):
    """Messages that the store has returned for a StoreRead."""

    messages: list[PageMessage]
    """Messages in order of sequence."""
    as_of: int
    """Number of the last batch whose changes the page includes; changes of later batches may be missing."""
    is_end: bool
    """True if the page ends the lane, as of batch `as_of`."""


PageHandler = Callable[[Any, PageResult], None]
"""Function that applies a page: it gets the request, a StoreRead, and the page."""


class StoreRead:
    """Request to the store for a page of a lane; its handler applies the page."""

    __slots__ = ("after_sequence", "handler", "lane", "limit", "size_max")

    waits_for_commit = True
    """True if the page must not be applied before all its batches are known to be durable."""

    is_for_consumers = False
    """True if consumers of the queue may be waiting for messages of this page."""

    def __init__(self, handler: PageHandler, lane: Lane, after_sequence: int, limit: int, size_max: int) -> None:
        self.handler = handler
        self.lane = lane
        self.after_sequence = after_sequence
        self.limit = limit
        """Maximum number of messages."""
        self.size_max = size_max
        """Maximum bytes of records, unless the first is larger."""

    def start(self) -> None:
        """Mark the page as being read, until `finish`."""

    def finish(self) -> None:
        """Note that the page was applied."""

    def on_page(self, page: PageResult) -> None:
        """Apply the page.

        Raises: StoreError if the store lacks messages that it should have.
        """
        self.handler(self, page)


class SideRead(StoreRead):
    """Request for a page that is not the next one of its lane. The page does not move the lane's horizon. Until the
    request is finished, the lane remembers in `removed` which messages were removed."""

    __slots__ = ("_is_started",)

    def __init__(self, handler: PageHandler, lane: Lane, after_sequence: int, limit: int, size_max: int) -> None:
        super().__init__(handler, lane, after_sequence, limit, size_max)
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
    """Return the error of a store that lacks messages of a lane."""
    priority = PRIORITY_MAX - split_lane_key(lane.key)[1]
    return StoreError(
        f"the store is damaged: queue {lane.queue.name!r}, priority {priority}: {problem}. "
        "`truenext store check DIR` shows details, `truenext store export DIR NEW` saves all that is readable"
    )
