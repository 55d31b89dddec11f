"""What a queue is: up to ten lanes, made when they are first needed, and the consumers that take from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from truenext.destination import Destination, Kind
from truenext.engine.lane import Lane
from truenext.engine.memory import LANE_BYTES, queue_size
from truenext.order import PRIORITY_MAX, rank
from truenext.record import lane_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from truenext.engine.consumer import Consumer
    from truenext.engine.groups import Groups
    from truenext.engine.lane import Entry
    from truenext.engine.memory import Memory
    from truenext.engine.selecting import Selecting
    from truenext.engine.wildcard import Wildcard
    from truenext.message import Message
    from truenext.policy import Policy


_NOBODY = cast("list[Consumer]", ())
"""Of all queues that nobody takes from."""
_NO_WILDCARDS = cast("list[Wildcard]", ())
_NOWHERE = -1

_places: dict[tuple[int, ...], list[int]] = {}
"""By the ranks of the lanes that there are: where among them that of each priority is, or _NOWHERE. There are many more
queues than these."""


def _places_of(lanes: tuple[Lane, ...]) -> list[int]:
    ranks = tuple(lane.rank for lane in lanes)
    places = _places.get(ranks)
    if places is None:
        by_priority = [rank(priority) for priority in range(PRIORITY_MAX + 1)]
        places = _places[ranks] = [ranks.index(each) if each in ranks else _NOWHERE for each in by_priority]
    return places


class Queue:
    __slots__ = (
        "_places",
        "consumers",
        "destination",
        "groups",
        "has_lost_bodies",
        "holds_dead_letters",
        "in_memory",
        "is_known_to_store",
        "is_paused",
        "lanes",
        "memory",
        "number",
        "owner",
        "policy",
        "resident",
        "selecting",
        "spilled",
        "spilled_sizes",
        "stored_number",
        "used_us",
        "wildcards",
    )

    def __init__(
        self,
        destination: Destination,
        number: int,
        policy: Policy,
        memory: Memory,
        *,
        holds_dead_letters: bool = False,
        used_us: int = 0,
    ) -> None:
        self.destination = destination
        self.memory = memory
        """What it takes of this it gives back with `let_go`."""
        memory.queues += queue_size(destination)
        self.policy = policy
        self.number = 0 if destination.kind is Kind.TEMPORARY else number
        """What the history calls it; 0 if it is not there."""
        self.stored_number = number
        """What the store calls it, or will; 0 if it does not."""
        self.holds_dead_letters = holds_dead_letters
        self.is_known_to_store = False
        self.is_paused = False
        """Nothing is dispatched."""
        self.lanes: tuple[Lane, ...] = ()
        """Those that there are, by rank: the first non-empty lane is served first."""
        self._places = _places_of(())
        self.consumers = _NOBODY
        """Those of this queue alone; see `join`."""
        self.wildcards = _NO_WILDCARDS
        """Those that take from others as well."""
        self.owner: Consumer | None = None
        """The only one that gets messages, as long as some are exclusive."""
        self.selecting: Selecting | None = None
        """As long as some consumers have selectors, or there are groups."""
        self.groups: Groups | None = None
        """Since it has had a message of one."""
        self.resident = 0
        """Bytes of memory that its messages take, waiting or held."""
        self.spilled = 0
        """Bytes of messages that have left memory; counted in a subscription that ends with its connection."""
        self.spilled_sizes: dict[int, int] = {}
        """Of those among them that are known without their bodies, by sequence."""
        self.in_memory = 0
        """How many messages that are."""
        self.has_lost_bodies = False
        """Bodies of messages that somebody held have left memory: `resident` does not say that nobody has one."""
        self.used_us = used_us
        """When something was done with it last that dispatch had to know of, in microseconds of Delays' clock."""

    @property
    def name(self) -> str:
        return self.destination.name

    @property
    def policy_name(self) -> str:
        """By what its policy is looked up: a subscription has that of its topic."""
        return self.destination.topic or self.destination.name

    @property
    def is_temporary(self) -> bool:
        """It goes with its connection; nothing of it outlives a crash."""
        return self.destination.kind is Kind.TEMPORARY

    @property
    def is_subscription(self) -> bool:
        """To a topic, and it ends with its connection."""
        return self.destination.kind is Kind.TEMPORARY and bool(self.destination.topic)

    @property
    def is_reply_queue(self) -> bool:
        """It goes with its connection, and never leaves memory."""
        return self.destination.kind is Kind.TEMPORARY and not self.destination.topic

    @property
    def keeps_failures(self) -> bool:
        """What fails here stays here, however often."""
        return self.is_temporary or self.holds_dead_letters

    @property
    def known_groups(self) -> Groups:
        """To be asked of a queue in which a message has a group."""
        assert self.groups is not None, "it has had a message of a group"
        return self.groups

    def lane_of(self, message: Message) -> Lane:
        """Where a message of this queue stands."""
        place = self._places[message.priority]
        return self.lanes[place] if place >= 0 else self.lane(rank(message.priority))

    def lane(self, rank: int) -> Lane:
        """Made if it is not there."""
        lane = self.lane_if_there(rank)
        if lane is None:
            lane = Lane(lane_key(self.stored_number, rank), self)
            self.memory.queues += LANE_BYTES
            self.lanes = tuple(sorted((*self.lanes, lane), key=lambda one: one.rank))
            self._places = _places_of(self.lanes)
            if self.selecting is not None:
                self.selecting.made(lane)
        return lane

    def lane_if_there(self, rank: int) -> Lane | None:
        place = self._places[PRIORITY_MAX - rank]
        return self.lanes[place] if place >= 0 else None

    @property
    def is_needed(self) -> bool:
        """Somebody has something of it, or takes from it alone, as far as it knows itself; or it goes with its
        connection."""
        return bool(self.resident or self.consumers or self.is_temporary or any(lane.is_needed for lane in self.lanes))

    def let_go(self) -> None:
        """It is nobody's any more. A lane and its queue refer to one another, and the garbage collector comes rarely:
        the circle is broken by hand."""
        for lane in self.lanes:
            self.memory.queues -= LANE_BYTES
            lane.clear()
        self.memory.queues -= queue_size(self.destination)
        self.lanes = ()
        self._places = _places_of(())

    def let_go_of_places(self) -> None:
        for lane in self.lanes:
            lane.let_go_of_places()

    def join(self, consumer: Consumer) -> None:
        """It takes from this queue alone."""
        if self.consumers is _NOBODY:
            self.consumers = []
        self.consumers.append(consumer)
        if consumer.is_exclusive:
            self.choose_owner()

    def join_of_many(self, wildcard: Wildcard) -> None:
        self.wildcards = [*self.wildcards, wildcard]
        if wildcard.is_exclusive:
            self.choose_owner()

    def leave(self, consumer: Consumer) -> None:
        """It takes from this queue no more; to be followed by `choose_owner` if it was exclusive."""
        self.consumers.remove(consumer)
        self.consumers = self.consumers or _NOBODY

    def leave_of_many(self, wildcard: Wildcard) -> None:
        self.wildcards = [one for one in self.wildcards if one is not wildcard] or _NO_WILDCARDS

    def choose_owner(self) -> None:
        """To be called when consumers have come or gone."""
        exclusive = [consumer for consumer in self.all_consumers() if consumer.is_exclusive]
        self.owner = min(exclusive, key=lambda consumer: (-consumer.priority, consumer.number), default=None)

    def all_consumers(self) -> list[Consumer]:
        return [*self.consumers, *self.wildcards] if self.wildcards else self.consumers

    def held(self) -> Iterator[Entry]:
        """What consumers have of it; not what was acknowledged in open transactions."""
        for consumer in self.consumers:
            yield from consumer.held.values()
        for wildcard in self.wildcards:
            yield from (entry for entry in wildcard.held.values() if entry.lane.queue is self)

    def waiting(self) -> int:
        """Messages that no consumer holds."""
        return sum(map(len, self.lanes))

    def unacknowledged(self) -> int:
        """Messages that consumers hold; those acknowledged in an open transaction are not among them."""
        of_many = sum(entry.lane.queue is self for each in self.wildcards for entry in each.held.values())
        return sum(len(consumer.held) for consumer in self.consumers) + of_many
