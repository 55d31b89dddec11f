"""What a queue is: ten lanes, and the consumers that take from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from truenext.destination import Destination, Kind
from truenext.engine.lane import Lane
from truenext.order import RANKS, rank
from truenext.record import lane_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from truenext.engine.consumer import Consumer
    from truenext.engine.groups import Groups
    from truenext.engine.lane import Entry
    from truenext.engine.selecting import Selecting
    from truenext.engine.wildcard import Wildcard
    from truenext.message import Message
    from truenext.policy import Policy


class Queue:
    __slots__ = (
        "consumers",
        "destination",
        "groups",
        "holds_dead_letters",
        "is_known_to_store",
        "is_paused",
        "lanes",
        "number",
        "owner",
        "policy",
        "resident",
        "selecting",
        "spilled",
        "spilled_sizes",
        "wildcards",
    )

    def __init__(
        self, destination: Destination, number: int, policy: Policy, *, holds_dead_letters: bool = False
    ) -> None:
        self.destination = destination
        self.policy = policy
        self.number = 0 if destination.kind is Kind.TEMPORARY else number
        """What store and history call it; 0 is not in the history."""
        self.holds_dead_letters = holds_dead_letters
        self.is_known_to_store = False
        self.is_paused = False
        """Nothing is dispatched."""
        self.lanes = [Lane(lane_key(number, rank), self) for rank in RANKS]
        """By rank: the first non-empty lane is served first."""
        self.consumers: list[Consumer] = []
        """Those of this queue alone."""
        self.wildcards: list[Wildcard] = []
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
        return self.lanes[rank(message.priority)]

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
