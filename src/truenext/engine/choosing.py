"""Which consumer gets which message now, where some of them have selectors.

Consumers with the same selector (and those without) want the same: they are asked together for the first message that
is ready for them. The first of all these is dispatched, to the best consumer of those for whom it is that. So no lane
is gone through, whatever waits in it. Source: docs/contract.md, "True next"
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from truenext.engine.consumer import Consumer
    from truenext.engine.lane import Entry, Lane
    from truenext.engine.paging import Paging
    from truenext.engine.queue import Queue
    from truenext.engine.selecting import Scan

    Offer = tuple[int, int, int, Entry]
    """Rank and sequence of a message, the number of those who could get it, and itself."""


class Choosing:
    """One queue's dispatch in one turn."""

    __slots__ = ("_committed", "_expire", "_now_ms", "_paging", "_queue", "last")

    def __init__(
        self, queue: Queue, paging: Paging, expire: Callable[[Entry], object], *, committed: int, now_ms: int
    ) -> None:
        self._queue = queue
        self._paging = paging
        self._expire = expire
        self._committed = committed
        self._now_ms = now_ms
        self.last: Lane | None = None
        """The lane that consumers without a selector wait for until it is read, or that they came to last."""

    def dispatch(self, consumers: list[Consumer], give: Callable[[Entry, Consumer], object]) -> None:
        """Give out true nexts until no consumer has credit or no message is ready."""
        places = {consumer: place for place, consumer in enumerate(consumers)}
        groups: dict[Scan | None, list[Consumer]] = {}
        for consumer in consumers:
            if consumer.is_open():
                groups.setdefault(consumer.scan, []).append(consumer)
        scans = list(groups)
        offers: list[Offer] = []
        for number, scan in enumerate(scans):
            self._offer(offers, number, scan)
        heapify(offers)
        while offers:
            entry = offers[0][3]
            asked: list[int] = []
            while offers and offers[0][3] is entry:
                asked.append(heappop(offers)[2])
            takers = [one for number in asked for one in groups[scans[number]] if one.is_open()]
            if takers:
                taker = min(takers, key=lambda one: (one.standing, len(one.held), one.served_at, places[one]))
                entry.lane.lift(entry)
                give(entry, taker)
            for number in asked:
                scan = scans[number]
                groups[scan] = [consumer for consumer in groups[scan] if consumer.is_open()]
                if groups[scan]:
                    self._offer(offers, number, scan)

    def express(self, consumers: list[Consumer], give: Callable[[Entry, Consumer], object]) -> None:
        """Where nobody has credit, give what is more urgent than all that somebody holds to him all the same, if he
        wants that."""
        while not any(consumer.is_open() for consumer in consumers):
            offers = []
            for consumer in consumers:
                entry = self._first(consumer.scan) if consumer.has_express else None
                if entry is not None and consumer.has_express_credit(entry.lane.rank):
                    offers.append((entry.lane.rank, entry.sequence, -consumer.answered_at, consumer.number, consumer))
            if not offers:
                return
            taker = min(offers)[4]
            entry = self._first(taker.scan)
            assert entry is not None, "it was there"
            entry.lane.lift(entry)
            give(entry, taker)

    def _offer(self, offers: list[Offer], number: int, scan: Scan | None) -> None:
        entry = self._first(scan)
        if entry is not None:
            heappush(offers, (entry.lane.rank, entry.sequence, number, entry))

    def _first(self, scan: Scan | None) -> Entry | None:
        """What is ready first for who has this selector; None if nothing is, or something has to be read or tested
        before."""
        return self._first_of_all() if scan is None else self._first_wanted(scan)

    def _first_of_all(self) -> Entry | None:
        for lane in self._queue.lanes:
            if not (lane.arrived or lane.returned or lane.unread):
                continue
            self.last = lane
            while True:
                entry = lane.head()
                if entry is None:
                    if lane.needs_page:
                        return None
                    if not lane.unread or lane.recent[0].batch > self._committed:
                        break
                    self._paging.take_in_recent(lane)
                    continue
                if entry.batch > self._committed:
                    break
                if entry.message is None or entry.due_us:
                    return None
                if not self._is_over(entry):
                    return entry
        return None

    def _first_wanted(self, scan: Scan) -> Entry | None:
        for place in scan.places.values():
            while True:
                entry = place.first()
                if entry is None:
                    if place.is_behind:
                        return None
                    break
                if entry.batch > self._committed:
                    break
                if entry.message is None:
                    self._paging.ask_body(entry)
                    return None
                if entry.due_us:
                    return None
                if not self._is_over(entry):
                    return entry
        return None

    def _is_over(self, entry: Entry) -> bool:
        message = entry.message
        if message is None or not 0 < message.expires_ms <= self._now_ms:
            return False
        entry.lane.lift(entry)
        self._expire(entry)
        return True
