"""Which consumer gets which message now, where some of them have selectors.

Consumers with the same selector (and those without) want the same: they are asked together for the first message that
is ready for them. The first of all these is dispatched, to the best consumer of those for whom it is that. So no lane
is gone through, whatever waits in it. Source: docs/contract.md, "True next"
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from truenext.engine.groups import GroupPlace

if TYPE_CHECKING:
    from collections.abc import Callable

    from truenext.engine.consumer import Consumer
    from truenext.engine.lane import Entry, Lane
    from truenext.engine.paging import Paging
    from truenext.engine.place import Place
    from truenext.engine.queue import Queue
    from truenext.engine.selecting import Scan

    Offer = tuple[int, int, int, Entry]
    """Rank and sequence of a message, the number of those who could get it, and itself."""

    Head = Entry | int | None
    """What is ready first in a lane for somebody; None if nothing is, or it is being committed. A number: from this
    sequence on something has to be read or tested before; HOLDS: nothing in the queue is ready behind it."""

HOLDS = -1


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
                taker = min(takers, key=lambda one: preference(one, places[one]))
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
                entry = self.first_for(consumer) if consumer.has_express else None
                if entry is not None and consumer.has_express_credit(entry.lane.rank):
                    offers.append((entry.lane.rank, entry.sequence, -consumer.answered_at, consumer.number, consumer))
            if not offers:
                return
            taker = min(offers)[4]
            entry = self.first_for(taker)
            assert entry is not None, "it was there"
            take(entry)
            give(entry, taker)

    def _offer(self, offers: list[Offer], number: int, scan: Scan | None) -> None:
        entry = self._first(scan)
        if entry is not None:
            heappush(offers, (entry.lane.rank, entry.sequence, number, entry))

    def first_for(self, consumer: Consumer) -> Entry | None:
        """What is ready first for a consumer; None if nothing is, or something has to be read or tested before."""
        return self._first(consumer.scan_of(self._queue))

    def _first(self, scan: Scan | None) -> Entry | None:
        """What is ready first for who has this selector; None if nothing is, or something has to be read or tested
        before."""
        return self._first_of_all() if scan is None else self._first_wanted(scan)

    def _first_of_all(self) -> Entry | None:
        for lane in self._queue.lanes:
            head = self._head_of(lane)
            if head is not None:
                return None if isinstance(head, int) else head
        return None

    def _head_of(self, lane: Lane) -> Head:
        if not (lane.arrived or lane.returned or lane.unread):
            return None
        self.last = lane
        while True:
            entry = lane.head()
            if entry is None:
                if lane.needs_page:
                    return lane.horizon + 1
                if not lane.unread:
                    return None
                first = lane.recent[0]
                if first.batch > self._committed and not lane.has_plucked_before(first.sequence):
                    return None
                self._paging.take_in_recent(lane)
                continue
            if entry.batch > self._committed:
                return None
            if entry.due_us:
                return HOLDS
            if entry.message is None:
                return entry.sequence
            if not self._is_over(entry):
                return entry

    def _first_wanted(self, scan: Scan) -> Entry | None:
        for place in scan.places.values():
            head = self._head_wanted(place)
            if head is not None:
                return None if isinstance(head, int) else head
        return None

    def _head_wanted(self, place: Place) -> Head:
        while True:
            entry = place.first()
            if entry is None:
                return place.position + 1 if place.is_behind else None
            if not self._is_over(entry):
                return self._found(entry)

    def _found(self, entry: Entry) -> Head:
        """What the first of what was found in a lane is for who waits for it."""
        if entry.batch > self._committed:
            return None
        if entry.message is None:
            self._paging.ask_body(entry)
        if entry.due_us:
            return HOLDS
        return entry.sequence if entry.message is None else entry

    def head_for(self, consumer: Consumer, rank: int) -> Head:
        """The same of one lane."""
        scan = consumer.scan_of(self._queue)
        if scan is None:
            return self._head_of(self._queue.lanes[rank])
        place = scan.places.get(rank)
        return None if place is None else self._head_wanted(place)

    def _is_over(self, entry: Entry) -> bool:
        """It was ready, and has expired."""
        message = entry.message
        if message is None or not 0 < message.expires_ms <= self._now_ms:
            return False
        if entry.batch > self._committed or entry.due_us:
            return False
        take(entry)
        self._expire(entry)
        return True


def take(entry: Entry) -> None:
    """Out of its lane, where it is the head if nobody has a selector."""
    lane = entry.lane
    if lane.aside is None:
        lane.pop()
    else:
        lane.lift(entry)


class GroupChoosing(Choosing):
    """The same where there are groups: what is ready first differs from consumer to consumer."""

    __slots__ = ()

    def dispatch(self, consumers: list[Consumer], give: Callable[[Entry, Consumer], object]) -> None:
        groups = self._queue.known_groups
        asking = [consumer for consumer in consumers if consumer.is_open()]
        offers: list[Offer] = []
        to_ask = list(range(len(asking)))
        while True:
            for number in to_ask:
                if asking[number].is_open():
                    entry = self.first_for(asking[number])
                    if entry is not None:
                        heappush(offers, (entry.lane.rank, entry.sequence, number, entry))
            if not offers:
                return
            entry = offers[0][3]
            to_ask = []
            while offers and offers[0][3] is entry:
                to_ask.append(heappop(offers)[2])
            takers = [
                number
                for number in to_ask
                # Meanwhile its group may have become another's.
                if asking[number].is_open() and groups.is_open_to(asking[number], entry.group)
            ]
            if not takers:
                continue
            taker = asking[min(takers, key=lambda number: preference(asking[number], number))]
            changes = groups.changes
            entry.lane.lift(entry)
            give(entry, taker)
            if groups.changes != changes:
                # Of a group that is free now anybody may get something earlier; what of one that is not any more was
                # being committed, or had to be read, holds nobody else back.
                offers = []
                to_ask = list(range(len(asking)))

    def first_for(self, consumer: Consumer) -> Entry | None:
        scan = consumer.scan_of(self._queue)
        assert scan is not None, "where there are groups everybody has one"
        for place in scan.places.values():
            head = self._head_of_groups(place, consumer)
            if head is not None:
                return None if isinstance(head, int) else head
        return None

    def head_for(self, consumer: Consumer, rank: int) -> Head:
        scan = consumer.scan_of(self._queue)
        assert scan is not None, "where there are groups everybody has one"
        place = scan.places.get(rank)
        return None if place is None else self._head_of_groups(place, consumer)

    def _head_of_groups(self, place: Place, consumer: Consumer) -> Head:
        assert isinstance(place, GroupPlace), "there are groups"
        while True:
            entry, must_wait = place.first_for(consumer)
            if entry is None:
                if place.is_hungry:
                    place.fill()
                    assert self._queue.selecting is not None, "there are groups"
                    self._queue.selecting.behind[place] = None
                # It is not known from where on.
                return 0 if must_wait else None
            if not self._is_over(entry):
                return self._found(entry)


def preference(consumer: Consumer, place: int) -> tuple[int, int, int, int]:
    return consumer.standing, len(consumer.held), consumer.served_at, place
