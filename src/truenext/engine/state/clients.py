"""Who is connected, and who takes from which queue. A queue from which nobody takes has no entry here.

consumers     of this queue alone
wildcards     that take from others as well
owner         the only one of these that gets messages, as long as some are exclusive
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from truenext.engine.state.consumer import BrokerConsumer, Browser, ConnectionState, QueueConsumer
from truenext.engine.state.queue import UNBOUNDED, Entry, Queue
from truenext.engine.state.transaction import EntryHolder
from truenext.engine.state.wildcard import Wildcard

_NO_CONSUMERS = cast("list[QueueConsumer]", ())
"""Of all queues from which only wildcards take."""


@dataclass(slots=True, eq=False)
class QueueReceivers:
    """Of one queue."""

    consumers: list[QueueConsumer] = _NO_CONSUMERS
    """In the order in which they came."""
    wildcards: tuple[Wildcard, ...] = ()
    exclusive: BrokerConsumer | None = None

    def all(self) -> list[BrokerConsumer]:
        return [*self.consumers, *self.wildcards]

    def choose_exclusive(self) -> None:
        exclusive = [consumer for consumer in self.all() if consumer.is_exclusive]
        self.exclusive = min(exclusive, key=lambda consumer: (-consumer.priority, consumer.number), default=None)


NO_RECEIVERS = QueueReceivers()
"""Of all queues that nobody takes from; not to be changed."""


class ClientRegistry:
    """All connections, and the receivers of all queues."""

    def __init__(self) -> None:
        self.sessions: dict[str, ConnectionState] = {}
        """By their ids."""
        self.receivers_by_queue: dict[Queue, QueueReceivers] = {}
        """Those from which somebody takes."""
        self._wildcard_singletons: dict[Wildcard, tuple[Wildcard]] = {}
        """Each as the only one of a queue."""
        self.active_browsers: dict[Browser, None] = {}
        """Those that were not shown all yet, the one that was served last at the end."""
        self.last_consumer_number = 0
        """Of consumers."""
        self.dispatch_count = 0
        """How many there were: says who has waited longest."""
        self.express_ack_count = 0
        """Of consumers with express: says who was the last."""

    def receivers_of(self, queue: Queue) -> QueueReceivers:
        return self.receivers_by_queue.get(queue, NO_RECEIVERS)

    def add_consumer(self, consumer: QueueConsumer) -> None:
        receivers = self._get_or_create_receivers(consumer.queue)
        if receivers.consumers is _NO_CONSUMERS:
            receivers.consumers = []
        receivers.consumers.append(consumer)
        if consumer.is_exclusive:
            receivers.choose_exclusive()

    def add_wildcard(self, wildcard: Wildcard, queue: Queue) -> None:
        receivers = self._get_or_create_receivers(queue)
        # Most queues have one, which has many: they share what says so.
        singleton = self._wildcard_singletons.setdefault(wildcard, (wildcard,))
        receivers.wildcards = (*receivers.wildcards, wildcard) if receivers.wildcards else singleton
        queue.has_wildcards = True
        if wildcard.is_exclusive:
            receivers.choose_exclusive()

    def remove_consumer(self, consumer: BrokerConsumer, queue: Queue) -> None:
        """It takes from this queue no more."""
        receivers = self.receivers_by_queue[queue]
        if isinstance(consumer, QueueConsumer):
            receivers.consumers.remove(consumer)
        else:
            receivers.wildcards = tuple(one for one in receivers.wildcards if one is not consumer)
            queue.has_wildcards = bool(receivers.wildcards)
        if consumer.is_exclusive:
            receivers.choose_exclusive()
        if not (receivers.consumers or receivers.wildcards):
            del self.receivers_by_queue[queue]

    def forget_wildcard(self, wildcard: Wildcard) -> None:
        """It has ended."""
        self._wildcard_singletons.pop(wildcard, None)

    def forget_queue(self, queue: Queue) -> None:
        """It has gone, and only wildcards took from it."""
        self.receivers_by_queue.pop(queue, None)
        queue.has_wildcards = False

    def _get_or_create_receivers(self, queue: Queue) -> QueueReceivers:
        receivers = self.receivers_by_queue.get(queue)
        if receivers is None:
            receivers = self.receivers_by_queue[queue] = QueueReceivers()
        return receivers

    # ---- Who has what ----

    def held_by_consumers(self, queue: Queue) -> Iterator[Entry]:
        """What consumers have of a queue; not what was acknowledged or refused in open transactions."""
        for consumer in self.receivers_by_queue.get(queue, NO_RECEIVERS).all():
            yield from (entry for entry in consumer.held.values() if entry.lane.queue is queue)

    def held_entries(self, queue: Queue, first: int = 0, until: int = UNBOUNDED) -> Iterator[Entry]:
        """What somebody has of a queue, with a sequence from `first` on and below `until`."""
        for holder in self._holders(queue):
            # Most hold nothing so old.
            if holder.held and min(holder.held) < until:
                for entry in holder.held.values():
                    if entry.lane.queue is queue and first <= entry.sequence < until:
                        yield entry

    def _holders(self, queue: Queue) -> Iterator[EntryHolder]:
        """All that may have something of a queue."""
        yield from self.receivers_by_queue.get(queue, NO_RECEIVERS).all()
        for session in self.sessions.values():
            yield from session.transactions.settling_transactions
