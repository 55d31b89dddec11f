"""Which consumer gets which message now, where some of them have selectors.

Consumers with the same selector (and those without) want the same: they are asked together for the first message that
is ready for them, and so are those of them that own no message group of which anything waits. The first of all these is
dispatched, to the preferred consumer among those to which it was offered. So no lane is gone through, whatever waits in
it, and one question is asked for each selector, not for each consumer. Source: docs/contract.md, "True next"
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from truenext.engine.memory import horizon
from truenext.engine.selecting.groups import GroupScanCursor
from truenext.engine.state.queue import NO_ENTRIES

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from truenext.engine.lifecycle.outcomes import Outcomes
    from truenext.engine.memory.reading import Reading
    from truenext.engine.memory.resident_set import ResidentSet
    from truenext.engine.selecting.groups import Groups
    from truenext.engine.selecting.scan import Scan, ScanCursor, Scans
    from truenext.engine.selecting.selecting import Selecting
    from truenext.engine.state.consumer import BrokerConsumer
    from truenext.engine.state.queue import Entry, Lane, Queue
    from truenext.engine.writing.ledger import Ledger

    RankedConsumer = tuple[int, int, int, int, BrokerConsumer]
    """Its service rank, messages it holds, when it was last served, its place among the consumers, and itself."""

    Offer = tuple[int, int, int, Entry, "Bidders"]
    """Rank and sequence of a message, the number of its bidders, the message, and these."""

    Head = Entry | int | None
    """What is ready first in a lane for a consumer: a message; None if nothing is, or it is being committed; or where
    something has to be read or tested before that is known: from this sequence on, from SOMEWHERE on, or, with HOLDS,
    nowhere in the queue."""

HOLDS = -1
"""A message holds back all behind it until it is due."""

SOMEWHERE = 0
"""Before every sequence."""


class Bidders:
    """Consumers that are offered the same."""

    __slots__ = ("alone", "is_held_back", "number", "offered", "receivers", "scan")

    def __init__(self, number: int, scan: Scan | None, alone: BrokerConsumer | None) -> None:
        self.number = number
        self.scan = scan
        self.alone = alone
        """The one consumer, if these are one alone because it owns groups."""
        self.receivers: list[RankedConsumer] = []
        """As a heap, the best first; of those behind some may have no credit any more."""
        self.offered: Entry | None = None
        """What was found for them, and not given out yet."""
        self.is_held_back = False
        """What others are given may be what they wait for."""

    def has_receiver(self) -> bool:
        # Subscriptions of one connection share its room.
        while self.receivers and not self.receivers[0][4].has_credit():
            heappop(self.receivers)
        return bool(self.receivers)

    def best(self) -> tuple[int, int, int, int]:
        """How well the best one stands among others: the smallest is served. There is one."""
        return self.receivers[0][:4]


class Choosing:
    """One queue's dispatch in one turn."""

    __slots__ = (
        "_has_passed_over",
        "_ledger",
        "_outcomes",
        "_queue",
        "_reading",
        "_resident",
        "_scans",
        "_selecting",
        "last",
    )

    def __init__(
        self,
        queue: Queue,
        scans: Scans,
        selecting: Selecting | None,
        ledger: Ledger,
        resident: ResidentSet,
        reading: Reading,
        outcomes: Outcomes,
    ) -> None:
        self._queue = queue
        self._scans = scans
        self._selecting = selecting
        self._ledger = ledger
        self._resident = resident
        self._reading = reading
        self._outcomes = outcomes
        self._has_passed_over = False
        """Whoever was asked last would have got something earlier, were it not being committed."""
        self.last: Lane | None = None
        """The lane that consumers without a selector wait for until it is read, or that they came to last."""

    def dispatch(self, consumers: Sequence[BrokerConsumer], give: Callable[[Entry, BrokerConsumer], object]) -> None:
        """Give out true nexts until no consumer has credit or no message is ready."""
        bidders: dict[Hashable, Bidders] = {}
        for place, consumer in enumerate(consumers):
            if consumer.has_credit():
                self._ask_along(bidders, consumer, place)
        offers: list[Offer] = []
        to_ask = list(bidders.values())
        while True:
            for bidder in to_ask:
                self._has_passed_over = False
                bidder.offered = entry = self._first(bidder) if bidder.has_receiver() else None
                bidder.is_held_back = entry is None or self._has_passed_over
                if entry is not None:
                    heappush(offers, (entry.lane.rank, entry.sequence, bidder.number, entry, bidder))
            if not offers:
                return
            entry = offers[0][3]
            to_ask = []
            while offers and offers[0][3] is entry:
                bidder = heappop(offers)[4]
                # Else they were asked once more since.
                if bidder.offered is entry:
                    bidder.offered = None
                    to_ask.append(bidder)
            taking = [bidder for bidder in to_ask if bidder.has_receiver() and self._is_open_to(bidder, entry)]
            if taking:
                bidder = min(taking, key=Bidders.best)
                *_, place, consumer = heappop(bidder.receivers)
                horizon.lift(entry.lane, entry)
                give(entry, consumer)
                to_ask = self._asked_again(bidders, to_ask, offers)
                if consumer.has_credit():
                    bidder = self._ask_along(bidders, consumer, place)
                    if bidder.offered is None and bidder not in to_ask:
                        to_ask.append(bidder)

    def _ask_along(self, bidders: dict[Hashable, Bidders], consumer: BrokerConsumer, place: int) -> Bidders:
        """Put a consumer, who is at this place among all, to those who are offered the same."""
        scan = None if self._selecting is None else self._scans.of(consumer, self._queue)
        alone = self._is_alone(consumer, scan)
        key = consumer if alone else scan
        bidder = bidders.get(key)
        if bidder is None:
            bidder = bidders[key] = Bidders(len(bidders), scan, consumer if alone else None)
        heappush(bidder.receivers, (*preference(consumer, place), consumer))
        return bidder

    def _is_alone(self, consumer: BrokerConsumer, scan: Scan | None) -> bool:
        """Something is for this consumer alone."""
        return False

    def _is_open_to(self, bidder: Bidders, entry: Entry) -> bool:
        """What was offered still is."""
        return True

    def _asked_again(
        self, bidders: dict[Hashable, Bidders], asked: list[Bidders], offers: list[Offer]
    ) -> list[Bidders]:
        """Who is to be asked when a message was given that was offered to `asked`; all others keep their offers."""
        return asked

    def express(self, consumers: Sequence[BrokerConsumer], give: Callable[[Entry, BrokerConsumer], object]) -> None:
        """Where nobody has credit, give what is more urgent than all that a consumer holds to that consumer all the
        same, if it has express."""
        while not any(consumer.has_credit() for consumer in consumers):
            offers = []
            for consumer in consumers:
                entry = self.first_for(consumer) if consumer.has_express else None
                if entry is not None and consumer.has_express_credit(entry.lane.rank):
                    offers.append((entry.lane.rank, entry.sequence, -consumer.answered_at, consumer.number, consumer))
            if not offers:
                return
            receiver = min(offers)[4]
            entry = self.first_for(receiver)
            assert entry is not None, "it was there"
            take(entry)
            give(entry, receiver)

    def first_for(self, consumer: BrokerConsumer) -> Entry | None:
        """What is ready first for a consumer; None if nothing is, or something has to be read or tested before."""
        return self._first_of(None if self._selecting is None else self._scans.of(consumer, self._queue))

    def _first(self, bidder: Bidders) -> Entry | None:
        return self._first_of(bidder.scan)

    def _first_of(self, scan: Scan | None) -> Entry | None:
        return self._first_of_all() if scan is None else self._first_wanted(scan)

    def _first_of_all(self) -> Entry | None:
        for lane in self._queue.lanes:
            head = self._head_of(lane)
            if head is not None:
                return None if isinstance(head, int) else head
        return None

    def _head_of(self, lane: Lane) -> Head:
        if not (lane.arrived or lane.returned or lane.unread):
            if lane.arrived is not NO_ENTRIES:
                lane.end_arrived()
            return None
        self.last = lane
        while True:
            entry = lane.head()
            if entry is None:
                if lane.needs_page:
                    return lane.horizon + 1
                if not lane.unread or horizon.starts_uncommitted(lane, self._ledger.committed):
                    return None
                self._resident.take_in_recent(lane)
                continue
            if entry.batch > self._ledger.committed:
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

    def _head_wanted(self, place: ScanCursor) -> Head:
        while True:
            entry = place.first()
            if entry is None:
                return place.position + 1 if place.is_behind else None
            if not self._is_over(entry):
                return self._found(entry)

    def _found(self, entry: Entry) -> Head:
        """What the first of what was found in a lane is for who waits for it."""
        if entry.batch > self._ledger.committed:
            self._has_passed_over = True
            return None
        if entry.message is None:
            # Whether it is wanted, and so holds back anything for this one, is known when it is read.
            self._reading.ask_body(entry)
            return entry.sequence
        return HOLDS if entry.due_us else entry

    def head_for(self, consumer: BrokerConsumer, rank: int) -> Head:
        """The same of one lane."""
        scan = None if self._selecting is None else self._scans.of(consumer, self._queue)
        if scan is None:
            lane = self._queue.lane_if_there(rank)
            return None if lane is None else self._head_of(lane)
        place = scan.places.get(rank)
        return None if place is None else self._head_wanted(place)

    def _is_over(self, entry: Entry) -> bool:
        """It was ready, and has expired."""
        message = entry.message
        if message is None or not 0 < message.expires_ms <= self._ledger.now_ms:
            return False
        if entry.batch > self._ledger.committed or entry.due_us:
            return False
        take(entry)
        self._outcomes.expire(entry)
        return True


def take(entry: Entry) -> None:
    """Out of its lane, where it is the head if nobody has a selector."""
    lane = entry.lane
    if lane.out_of_turn is None:
        lane.pop()
    else:
        horizon.lift(lane, entry)


class GroupChoosing(Choosing):
    """The same where there are groups: what is ready first differs from consumer to consumer."""

    __slots__ = ("_times",)

    @property
    def _groups(self) -> Groups:
        assert self._selecting is not None, "there are groups"
        return self._selecting.known_groups

    def dispatch(self, consumers: Sequence[BrokerConsumer], give: Callable[[Entry, BrokerConsumer], object]) -> None:
        groups = self._groups
        # As of when somebody was asked last.
        self._times = groups.times_owned, groups.times_freed
        super().dispatch(consumers, give)

    def _is_alone(self, consumer: BrokerConsumer, scan: Scan | None) -> bool:
        assert scan is not None, "where there are groups everybody has one"
        return any(isinstance(place, GroupScanCursor) and place.heads.get(consumer) for place in scan.places.values())

    def _is_open_to(self, bidder: Bidders, entry: Entry) -> bool:
        # Meanwhile its group may have become another's.
        owner = self._groups.owners.get(entry.group)
        return owner is None or owner is bidder.alone

    def _asked_again(
        self, bidders: dict[Hashable, Bidders], asked: list[Bidders], offers: list[Offer]
    ) -> list[Bidders]:
        groups = self._groups
        owned, freed = self._times
        self._times = groups.times_owned, groups.times_freed
        if groups.times_freed != freed:
            # Anybody may get something earlier.
            offers.clear()
            return list(bidders.values())
        if groups.times_owned != owned:
            # What of this group was being committed, or had to be read, holds nobody else back any more.
            asked += [bidder for bidder in bidders.values() if bidder.is_held_back and bidder not in asked]
        return asked

    def _first(self, bidder: Bidders) -> Entry | None:
        assert bidder.scan is not None, "where there are groups everybody has one"
        return self._first_in_groups(bidder.scan, bidder.alone)

    def first_for(self, consumer: BrokerConsumer) -> Entry | None:
        scan = self._scans.of(consumer, self._queue)
        assert scan is not None, "where there are groups everybody has one"
        return self._first_in_groups(scan, consumer)

    def _first_in_groups(self, scan: Scan, consumer: BrokerConsumer | None) -> Entry | None:
        """None is somebody who owns no group."""
        for place in scan.places.values():
            head = self._head_of_groups(place, consumer)
            if head is not None:
                return None if isinstance(head, int) else head
        return None

    def head_for(self, consumer: BrokerConsumer, rank: int) -> Head:
        scan = self._scans.of(consumer, self._queue)
        assert scan is not None, "where there are groups everybody has one"
        place = scan.places.get(rank)
        return None if place is None else self._head_of_groups(place, consumer)

    def _head_of_groups(self, place: ScanCursor, consumer: BrokerConsumer | None) -> Head:
        assert isinstance(place, GroupScanCursor), "there are groups"
        while True:
            entry, must_wait = place.first_for(consumer)
            if entry is None:
                if place.is_hungry:
                    place.fill()
                    assert self._selecting is not None, "there are groups"
                    self._selecting.behind[place] = None
                return SOMEWHERE if must_wait else None
            if not self._is_over(entry):
                return self._found(entry)


def preference(consumer: BrokerConsumer, place: int) -> tuple[int, int, int, int]:
    return consumer.service_rank, len(consumer.held), consumer.served_at, place
