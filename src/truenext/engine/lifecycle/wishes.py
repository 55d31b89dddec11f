"""What subscriptions that pull have asked for: when it begins, is spent, and has ended.

A wish that does not wait ends when nothing is ready; who finds that out is dispatch/nothing_ready.py. Source:
docs/contract.md, "Pulling"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from truenext.engine.state.consumer import Consumer
    from truenext.engine.state.queue import Entry, Queue
    from truenext.engine.writing.event_log import EventLog


class EndedWish(NamedTuple):
    """What a client is told of a wish that has ended though not all has come, or was withdrawn."""

    consumer: Consumer
    unused: int
    """Messages that have not come."""
    correlation: str | None


class Wishes:
    __slots__ = ("_events", "ended", "impatient", "open")

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self.open: dict[Consumer, None] = {}
        """Those that have asked for something that has not come."""
        self.impatient: dict[Queue | Consumer, dict[Consumer, None]] = {}
        """Those whose wish does not wait, by their queue; of those that take from many each by itself."""
        self.ended: list[EndedWish] = []
        """Those of which the clients are to be told."""

    def began(self, consumer: Consumer) -> None:
        """It has asked for more."""
        wish = consumer.wish
        assert wish is not None, "it pulls"
        self._tell(consumer, wish.left)
        self.open[consumer] = None
        if wish.waits:
            self._waits(consumer)
        else:
            self.impatient.setdefault(consumer.queue or consumer, {})[consumer] = None

    def end(self, consumer: Consumer) -> None:
        """Nothing is ready for it, and its client is told so, behind what was dispatched."""
        self.ended.append(self.withdrawn(consumer))

    def withdrawn(self, consumer: Consumer) -> EndedWish:
        """Nothing more comes of what it has asked for."""
        wish = consumer.wish
        assert wish is not None, "it pulls"
        ended = EndedWish(consumer, wish.left, wish.correlation)
        self.forget(consumer)
        return ended

    def forget(self, consumer: Consumer) -> None:
        """The same, and its client knows."""
        wish = consumer.wish
        if wish is not None:
            wish.left = 0
            self.open.pop(consumer, None)
            # Else what it acknowledges from here on would look like credit to whoever counts by its window.
            consumer.adjust_window(0)
            self._waits(consumer)
            self._tell(consumer, 0)

    def left(self, consumer: Consumer) -> None:
        """Its subscription has ended."""
        self.open.pop(consumer, None)
        self._waits(consumer)

    def spend(self, deliveries: Mapping[Consumer, list[Entry]]) -> None:
        """This was dispatched."""
        for consumer, entries in deliveries.items():
            wish = consumer.wish
            if wish is not None:
                wish.left -= len(entries)
                if not wish.left:
                    self.open.pop(consumer, None)
                    self._waits(consumer)

    def take_ended(self) -> list[EndedWish]:
        """Those of subscriptions that are still there."""
        ended, self.ended = self.ended, []
        return [one for one in ended if one.consumer.is_subscribed]

    def _waits(self, consumer: Consumer) -> None:
        """It is none of those whose wish does not wait, or not any more."""
        where = consumer.queue or consumer
        others = self.impatient.get(where)
        if others is not None:
            others.pop(consumer, None)
            if not others:
                del self.impatient[where]

    def _tell(self, consumer: Consumer, count: int) -> None:
        if consumer.queue is not None:
            self._events.asked(consumer, consumer.queue, count)
