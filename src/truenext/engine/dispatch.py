"""Which consumer gets which message now.

The lanes are asked in order of rank. A lane answers with its head; if the head's commit is still in flight the lane
waits, for it must not be overtaken by its equals, and the lower lanes go on. Source: docs/contract.md, "True next".
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from truenext.engine.account import Account
    from truenext.engine.consumer import Consumer
    from truenext.engine.lane import Entry
    from truenext.engine.queue import Queue

Taker = tuple[int, int, int, "Consumer"]
"""Messages it holds, when it was last served, its place among the queue's consumers, and itself."""

Deliveries = dict["Consumer", list["Entry"]]


class Dispatcher:
    """Hands out messages; counts, so that it knows who has waited longest."""

    __slots__ = ("_account", "dispatches")

    def __init__(self, account: Account) -> None:
        self._account = account
        self.dispatches = 0

    def dispatch(
        self,
        queue: Queue,
        committed: int,
        now_ms: int,
        deliveries: Deliveries,
        expire: Callable[[Entry], object],
    ) -> None:
        """Give out true nexts until no consumer has credit or no message is ready.

        `committed` is the last durable batch. What is given out is added to `deliveries`; what turns out to be expired
        is taken out of its lane and told to `expire`.
        """
        takers = [
            (len(consumer.held), consumer.served_at, index, consumer)
            for index, consumer in enumerate(queue.consumers)
            if consumer.is_open()
        ]
        if not takers:
            return
        given: list[Entry] = []
        getters: list[int] = []
        self._give_out(queue, takers, committed, now_ms, deliveries, expire, given, getters)
        if given:
            self._account.dispatched(queue, given, getters)

    def _give_out(
        self,
        queue: Queue,
        takers: list[Taker],
        committed: int,
        now_ms: int,
        deliveries: Deliveries,
        expire: Callable[[Entry], object],
        given: list[Entry],
        getters: list[int],
    ) -> None:
        heapify(takers)
        for lane in queue.lanes:
            if not lane.arrived and not lane.returned:
                continue
            while (entry := lane.head()) is not None and entry.batch <= committed:
                lane.pop()
                message = entry.message
                if 0 < message.expires_ms <= now_ms:
                    expire(entry)
                    continue
                consumer = takers[0][3]
                entry.deliveries += 1
                held = consumer.held
                held[entry.sequence] = entry
                given.append(entry)
                getters.append(consumer.number)
                session = consumer.session
                session.unsent_bytes += len(message.body) + len(message.header) + consumer.frame_bytes
                self.dispatches += 1
                consumer.served_at = self.dispatches
                if consumer in deliveries:
                    deliveries[consumer].append(entry)
                else:
                    deliveries[consumer] = [entry]
                if consumer.is_open():
                    heapreplace(takers, (len(held), consumer.served_at, takers[0][2], consumer))
                else:
                    heappop(takers)
                # Subscriptions of one connection share its room: those behind may just have lost theirs.
                while takers and not takers[0][3].is_open():
                    heappop(takers)
                if not takers:
                    return
