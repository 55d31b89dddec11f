"""Which consumer gets which message now, where some of them have selectors.

Consumers with the same selector (and those without) want the same: they are asked together for the first message that
is ready for them, and so are those of them who own no message group of which anything waits. The first of all these is
dispatched, to the best consumer of those for whom it is that. So no lane is gone through, whatever waits in it, and
nobody is asked for each consumer. Source: docs/contract.md, "True next"
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from truenext.engine.memory import horizon
from truenext.engine.selecting.groups import GroupPlace
from truenext.engine.state.queue import NO_ENTRIES

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from truenext.engine.lifecycle.outcomes import Outcomes
    from truenext.engine.memory.reading import Reading
    from truenext.engine.memory.resident_set import ResidentSet
    from truenext.engine.selecting.groups import Groups
    from truenext.engine.selecting.scan import Place, Scan
    from truenext.engine.selecting.selecting import Selecting
    from truenext.engine.state.consumer import Consumer
    from truenext.engine.state.queue import Entry, Lane, Queue
    from truenext.engine.writing.ledger import Ledger

    Taker = tuple[int, int, int, int, Consumer]
    """His standing, messages he holds, when he was last served, his place among the queue's consumers, and himself."""

    Offer = tuple[int, int, int, Entry, "Asker"]
    """Rank and sequence of a message, the number of those who could get it, itself, and they."""

    Head = Entry | int | None
    """What is ready first in a lane for somebody; None if nothing is, or it is being committed. A number: from this
    sequence on something has to be read or tested before; HOLDS: nothing in the queue is ready behind it."""

HOLDS = -1


class Asker:
    """Consumers who are offered the same."""

    __slots__ = ("alone", "is_held_back", "number", "offered", "scan", "takers")

    def __init__(self, number: int, scan: Scan | None, alone: Consumer | None) -> None:
        self.number = number
        self.scan = scan
        self.alone = alone
        """If it is one alone, for he owns groups, he."""
        self.takers: list[Taker] = []
        """As a heap, the best first; of those behind some may have no credit any more."""
        self.offered: Entry | None = None
        """What was found for them, and not given out yet."""
        self.is_held_back = False
        """What others are given may be what they wait for."""

    def has_taker(self) -> bool:
        # Subscriptions of one connection share its room.
        while self.takers and not self.takers[0][4].is_open():
            heappop(self.takers)
        return bool(self.takers)

    def best(self) -> tuple[int, int, int, int]:
        """How good the best is, who is there."""
        return self.takers[0][:4]


class Choosing:
    """One queue's dispatch in one turn."""

    __slots__ = ("_has_passed_over", "_ledger", "_outcomes", "_queue", "_reading", "_resident", "_selecting", "last")

    def __init__(
        self,
        queue: Queue,
        selecting: Selecting | None,
        ledger: Ledger,
        resident: ResidentSet,
        reading: Reading,
        outcomes: Outcomes,
    ) -> None:
        self._queue = queue
        self._selecting = selecting
        self._ledger = ledger
        self._resident = resident
        self._reading = reading
        self._outcomes = outcomes
        self._has_passed_over = False
        """Whoever was asked last would have got something earlier, were it not being committed."""
        self.last: Lane | None = None
        """The lane that consumers without a selector wait for until it is read, or that they came to last."""

    def dispatch(self, consumers: Sequence[Consumer], give: Callable[[Entry, Consumer], object]) -> None:
        """Give out true nexts until no consumer has credit or no message is ready."""
        askers: dict[Hashable, Asker] = {}
        for place, consumer in enumerate(consumers):
            if consumer.is_open():
                self._ask_along(askers, consumer, place)
        offers: list[Offer] = []
        to_ask = list(askers.values())
        while True:
            for asker in to_ask:
                self._has_passed_over = False
                asker.offered = entry = self._first(asker) if asker.has_taker() else None
                asker.is_held_back = entry is None or self._has_passed_over
                if entry is not None:
                    heappush(offers, (entry.lane.rank, entry.sequence, asker.number, entry, asker))
            if not offers:
                return
            entry = offers[0][3]
            to_ask = []
            while offers and offers[0][3] is entry:
                asker = heappop(offers)[4]
                # Else they were asked once more since.
                if asker.offered is entry:
                    asker.offered = None
                    to_ask.append(asker)
            taking = [asker for asker in to_ask if asker.has_taker() and self._is_open_to(asker, entry)]
            if taking:
                asker = min(taking, key=Asker.best)
                *_, place, consumer = heappop(asker.takers)
                horizon.lift(entry.lane, entry)
                give(entry, consumer)
                to_ask = self._asked_again(askers, to_ask, offers)
                if consumer.is_open():
                    asker = self._ask_along(askers, consumer, place)
                    if asker.offered is None and asker not in to_ask:
                        to_ask.append(asker)

    def _ask_along(self, askers: dict[Hashable, Asker], consumer: Consumer, place: int) -> Asker:
        """Put a consumer, who is at this place among all, to those who are offered the same."""
        scan = self._scan_of(consumer)
        alone = self._is_alone(consumer, scan)
        key = consumer if alone else scan
        asker = askers.get(key)
        if asker is None:
            asker = askers[key] = Asker(len(askers), scan, consumer if alone else None)
        heappush(asker.takers, (*preference(consumer, place), consumer))
        return asker

    def _is_alone(self, consumer: Consumer, scan: Scan | None) -> bool:
        """Something is for this consumer alone."""
        return False

    def _is_open_to(self, asker: Asker, entry: Entry) -> bool:
        """What was offered still is."""
        return True

    def _asked_again(self, askers: dict[Hashable, Asker], asked: list[Asker], offers: list[Offer]) -> list[Asker]:
        """Who is to be asked when a message was given that was offered to `asked`; all others keep their offers."""
        return asked

    def express(self, consumers: Sequence[Consumer], give: Callable[[Entry, Consumer], object]) -> None:
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

    def first_for(self, consumer: Consumer) -> Entry | None:
        """What is ready first for a consumer; None if nothing is, or something has to be read or tested before."""
        return self._first_of(self._scan_of(consumer))

    def _scan_of(self, consumer: Consumer) -> Scan | None:
        return None if self._selecting is None else self._selecting.scans_of.of(consumer, self._queue)

    def _first(self, asker: Asker) -> Entry | None:
        return self._first_of(asker.scan)

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
                if not lane.unread:
                    return None
                first = lane.recent[0]
                if first.batch > self._ledger.committed and not horizon.has_plucked_before(lane, first.sequence):
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

    def _head_wanted(self, place: Place) -> Head:
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

    def head_for(self, consumer: Consumer, rank: int) -> Head:
        """The same of one lane."""
        scan = self._scan_of(consumer)
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
    if lane.aside is None:
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

    def dispatch(self, consumers: Sequence[Consumer], give: Callable[[Entry, Consumer], object]) -> None:
        groups = self._groups
        # As of when somebody was asked last.
        self._times = groups.times_owned, groups.times_freed
        super().dispatch(consumers, give)

    def _is_alone(self, consumer: Consumer, scan: Scan | None) -> bool:
        assert scan is not None, "where there are groups everybody has one"
        return any(isinstance(place, GroupPlace) and place.heads.get(consumer) for place in scan.places.values())

    def _is_open_to(self, asker: Asker, entry: Entry) -> bool:
        # Meanwhile its group may have become another's.
        owner = self._groups.owners.get(entry.group)
        return owner is None or owner is asker.alone

    def _asked_again(self, askers: dict[Hashable, Asker], asked: list[Asker], offers: list[Offer]) -> list[Asker]:
        groups = self._groups
        owned, freed = self._times
        self._times = groups.times_owned, groups.times_freed
        if groups.times_freed != freed:
            # Anybody may get something earlier.
            offers.clear()
            return list(askers.values())
        if groups.times_owned != owned:
            # What of this group was being committed, or had to be read, holds nobody else back any more.
            asked += [asker for asker in askers.values() if asker.is_held_back and asker not in asked]
        return asked

    def _first(self, asker: Asker) -> Entry | None:
        assert asker.scan is not None, "where there are groups everybody has one"
        return self._first_in_groups(asker.scan, asker.alone)

    def first_for(self, consumer: Consumer) -> Entry | None:
        scan = self._scan_of(consumer)
        assert scan is not None, "where there are groups everybody has one"
        return self._first_in_groups(scan, consumer)

    def _first_in_groups(self, scan: Scan, consumer: Consumer | None) -> Entry | None:
        """None is somebody who owns no group."""
        for place in scan.places.values():
            head = self._head_of_groups(place, consumer)
            if head is not None:
                return None if isinstance(head, int) else head
        return None

    def head_for(self, consumer: Consumer, rank: int) -> Head:
        scan = self._scan_of(consumer)
        assert scan is not None, "where there are groups everybody has one"
        place = scan.places.get(rank)
        return None if place is None else self._head_of_groups(place, consumer)

    def _head_of_groups(self, place: Place, consumer: Consumer | None) -> Head:
        assert isinstance(place, GroupPlace), "there are groups"
        while True:
            entry, must_wait = place.first_for(consumer)
            if entry is None:
                if place.is_hungry:
                    place.fill()
                    assert self._selecting is not None, "there are groups"
                    self._selecting.behind[place] = None
                # It is not known from where on.
                return 0 if must_wait else None
            if not self._is_over(entry):
                return self._found(entry)


def preference(consumer: Consumer, place: int) -> tuple[int, int, int, int]:
    return consumer.standing, len(consumer.held), consumer.served_at, place
