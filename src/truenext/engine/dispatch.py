"""Which consumer gets which message now.

The lanes are asked in order of rank. A lane answers with its head. If the head's commit is still in flight the lane
waits, for it must not be overtaken by its equals, and the lower lanes go on. If the head has to be read from the store
first, the lane and all lower ones wait: that message is ready, so it is next. So they do if it holds the others back
until it is due. Source: docs/contract.md, "True next".
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from truenext.engine.account import Account
    from truenext.engine.consumer import Consumer
    from truenext.engine.lane import Entry, Lane
    from truenext.engine.memory import Memory
    from truenext.engine.paging import Paging
    from truenext.engine.queue import Queue

Taker = tuple[int, int, int, "Consumer"]
"""Messages it holds, when it was last served, its place among the queue's consumers, and itself."""

Deliveries = dict["Consumer", list["Entry"]]


class Dispatcher:
    """Hands out messages; counts, so that it knows who has waited longest."""

    __slots__ = ("_account", "_expire", "_memory", "_paging", "dispatches")

    def __init__(self, account: Account, memory: Memory, paging: Paging, expire: Callable[[Entry], object]) -> None:
        """What turns out to be expired is taken out of its lane and told to `expire`."""
        self._account = account
        self._memory = memory
        self._paging = paging
        self._expire = expire
        self.dispatches = 0

    def dispatch(self, queue: Queue, committed: int, now_ms: int, deliveries: Deliveries) -> Lane | None:
        """Give out true nexts until no consumer has credit or no message is ready.

        `committed` is the last durable batch. What is given out is added to `deliveries`. Returns the lane that the
        consumers wait for until it is read, or that they came to last.
        """
        takers = [
            (len(consumer.held), consumer.served_at, index, consumer)
            for index, consumer in enumerate(queue.consumers)
            if consumer.is_open()
        ]
        if not takers:
            return None
        heapify(takers)
        given: list[Entry] = []
        getters: list[int] = []
        last = None
        for lane in queue.lanes:
            if lane.arrived or lane.returned or lane.unread:
                last = lane
                if not self._give_out(lane, takers, committed, now_ms, deliveries, given, getters):
                    break
        if given:
            self._account.dispatched(queue, given, getters)
        return last

    def _give_out(
        self,
        lane: Lane,
        takers: list[Taker],
        committed: int,
        now_ms: int,
        deliveries: Deliveries,
        given: list[Entry],
        getters: list[int],
    ) -> bool:
        """Give out what is ready in one lane. False if the lower lanes get no turn."""
        memory = self._memory
        while True:
            entry = lane.head()
            if entry is None:
                if lane.needs_page:
                    return False
                if not lane.unread or lane.recent[0].batch > committed:
                    return True
                # All that is above the horizon is still in memory.
                self._paging.take_in_recent(lane)
                continue
            if entry.batch > committed:
                return True
            message = entry.message
            if message is None or entry.due_us:
                return False
            lane.pop()
            if 0 < message.expires_ms <= now_ms:
                self._expire(entry)
                continue
            consumer = takers[0][3]
            entry.deliveries += 1
            held = consumer.held
            held[entry.sequence] = entry
            given.append(entry)
            getters.append(consumer.number)
            session = consumer.session
            size = len(message.body) + len(message.header) + consumer.frame_bytes
            session.unsent_bytes += size
            memory.unsent += size
            if memory.unsent > memory.unsent_mark:
                memory.unsent_max = 1
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
                return False
