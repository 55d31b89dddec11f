"""When has a wish ended that does not wait: is no message ready for the subscription, wherever?

It is asked right behind a dispatch, so what is ready was given. What is left: something has to be read or compared
before anybody can know, or the connection has no room. Then the wish stays, and is looked at again when anything
happens in its queue, as that brings the page or the comparison on. Source: docs/contract.md, "Pulling"
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from truenext.engine.dispatch.selective import HOLDS
from truenext.engine.state.wildcard import Wildcard
from truenext.engine.state.wish import EndedWish

if TYPE_CHECKING:
    from collections.abc import Container

    from truenext.engine.dispatch.plain import Deliveries, Dispatcher
    from truenext.engine.dispatch.wildcard import WildcardDispatch
    from truenext.engine.state.clients import Clients
    from truenext.engine.state.consumer import Consumer
    from truenext.engine.state.queue import Queue
    from truenext.engine.writing.event_log import EventLog


class Wishes:
    __slots__ = ("_clients", "_dispatcher", "_ended", "_events", "_impatient")

    def __init__(self, events: EventLog, clients: Clients, dispatcher: Dispatcher) -> None:
        self._events = events
        self._clients = clients
        self._dispatcher = dispatcher
        self._impatient: dict[Consumer, None] = {}
        """Those whose wish does not wait."""
        self._ended: list[EndedWish] = []
        """Those of which the clients are to be told."""

    def began(self, consumer: Consumer) -> None:
        """It has asked for more."""
        wish = consumer.wish
        assert wish is not None, "it pulls"
        self._tell(consumer, wish.left)
        if wish.waits:
            self._impatient.pop(consumer, None)
        else:
            self._impatient[consumer] = None

    def end(self, consumer: Consumer) -> None:
        """Nothing more comes of what it has asked for, and its client is told so."""
        wish = consumer.wish
        assert wish is not None, "it pulls"
        self._ended.append(EndedWish(consumer, wish.left, wish.correlation))
        self.forget(consumer)

    def forget(self, consumer: Consumer) -> None:
        """The same, and its client knows."""
        wish = consumer.wish
        if wish is not None:
            wish.left = 0
            self._impatient.pop(consumer, None)
            self._tell(consumer, 0)

    def spend(self, deliveries: Deliveries) -> None:
        """This was dispatched."""
        for consumer, entries in deliveries.items():
            if consumer.wish is not None:
                consumer.wish.left -= len(entries)

    def look(self, touched: Container[Queue], together: WildcardDispatch | None) -> None:
        """End what has ended, where something has happened; `together` is the dispatch that wildcards took part in."""
        for consumer in list(self._impatient):
            wish, queue = consumer.wish, consumer.queue
            assert wish is not None, "it pulls"
            if not (wish.left and consumer.is_subscribed):
                del self._impatient[consumer]
            elif isinstance(consumer, Wildcard):
                if together is not None and together.has_nothing_for(consumer):
                    self.end(consumer)
            elif queue is not None and queue in touched and self._has_nothing_for(consumer, queue):
                self.end(consumer)

    def take_ended(self) -> list[EndedWish]:
        """Those of subscriptions that are still there."""
        if not self._ended:
            return []
        ended, self._ended = self._ended, []
        return [one for one in ended if one.consumer.is_subscribed]

    def _has_nothing_for(self, consumer: Consumer, queue: Queue) -> bool:
        if queue.is_paused or self._clients.takers_of(queue).exclusive not in (None, consumer):
            return True
        choosing = self._dispatcher.choosing(queue)
        for lane in queue.lanes:
            head = choosing.head_for(consumer, lane.rank)
            if head is not None:
                return head == HOLDS
        return True

    def _tell(self, consumer: Consumer, count: int) -> None:
        if consumer.queue is not None:
            self._events.asked(consumer, consumer.queue, count)
