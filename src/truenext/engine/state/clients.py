"""Registry of connections, and of the receivers of each queue. A queue without receivers is not in the registry.

consumers     consumers of this queue alone
wildcards     wildcard consumers, which consume from other queues too
exclusive     the only receiver that gets messages, while any receiver is exclusive

A queue may have ten thousand receivers, and a connection with a thousand receivers may end in one step. So the lists of
receivers are sorted, and a receiver is found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import cast

from truenext.engine.state.consumer import BrokerConsumer, Browser, ConnectionState, QueueConsumer
from truenext.engine.state.queue import UNBOUNDED, Entry, Queue
from truenext.engine.state.transaction import EntryHolder
from truenext.engine.state.wildcard import Wildcard
from truenext.model.limits import HELD_MAX

_NO_CONSUMERS = cast("list[QueueConsumer]", ())
"""Empty list, shared by all queues that have only wildcard consumers. It is a tuple, so that it cannot be changed."""
_NO_EXCLUSIVES = cast("list[BrokerConsumer]", ())

_number = attrgetter("number")


@dataclass(slots=True, eq=False)
class QueueReceivers:
    """Consumers and wildcard consumers that get messages of one queue."""

    consumers: list[QueueConsumer] = _NO_CONSUMERS
    """Consumers in order of subscription, and so of their numbers."""
    express: list[QueueConsumer] = _NO_CONSUMERS
    """Consumers that get urgent messages beyond their window (express dispatch), in order of subscription."""
    wildcards: Sequence[Wildcard] = ()
    """Wildcard consumers in order of subscription: a list, or a tuple of a single one, which queues share."""
    exclusives: list[BrokerConsumer] = _NO_EXCLUSIVES
    """Exclusive receivers, the preferred one first."""
    exclusive: BrokerConsumer | None = None

    def all(self) -> list[BrokerConsumer]:
        return [*self.consumers, *self.wildcards]

    def add_exclusive(self, consumer: BrokerConsumer) -> None:
        self.exclusives = self.exclusives or []
        insort(self.exclusives, consumer, key=_exclusive_preference)
        self.choose_exclusive()

    def remove_exclusive(self, consumer: BrokerConsumer) -> None:
        exclusives = self.exclusives
        index = bisect_left(exclusives, _exclusive_preference(consumer), key=_exclusive_preference)
        if exclusives[index : index + 1] == [consumer]:
            del exclusives[index]
        self.choose_exclusive()

    def choose_exclusive(self) -> None:
        exclusives = self.exclusives
        while exclusives and isinstance(exclusives[0], Wildcard) and exclusives[0].is_leaving:
            del exclusives[0]
        self.exclusive = exclusives[0] if exclusives else None


def _exclusive_preference(consumer: BrokerConsumer) -> tuple[int, int]:
    return -consumer.priority, consumer.number


NO_RECEIVERS = QueueReceivers()
"""Shared by all queues without receivers; never changed."""


class ClientRegistry:
    """Register of all connections, their browsers, and the receivers of each queue."""

    def __init__(self) -> None:
        self.sessions: dict[str, ConnectionState] = {}
        """Connections that have logged in, by their ids."""
        self.receivers_by_queue: dict[Queue, QueueReceivers] = {}
        """Receivers of each queue that has some."""
        self._wildcard_singletons: dict[Wildcard, tuple[Wildcard]] = {}
        """One tuple per wildcard consumer, shared by all queues that have no other wildcard consumer."""
        self.full_sessions: dict[ConnectionState, None] = {}
        """Connections that hold HELD_MAX messages or more, and therefore get no message."""
        self.active_browsers: dict[Browser, None] = {}
        """Browsers that are not done, in the order in which the broker serves them."""
        self.last_consumer_number = 0
        """Number of the last consumer that was created."""
        self.dispatch_count = 0
        """Number of dispatches so far. The broker serves the consumers by this number instead of by the time."""
        self.express_ack_count = 0
        """Number of acknowledgements by express consumers so far. The number shows which consumer acknowledged last."""

    def receivers_of(self, queue: Queue) -> QueueReceivers:
        return self.receivers_by_queue.get(queue, NO_RECEIVERS)

    def add_consumer(self, consumer: QueueConsumer) -> None:
        receivers = self._get_or_create_receivers(consumer.queue)
        if receivers.consumers is _NO_CONSUMERS:
            receivers.consumers = []
        receivers.consumers.append(consumer)
        if consumer.has_express:
            receivers.express = receivers.express or []
            receivers.express.append(consumer)
        if consumer.is_exclusive:
            receivers.add_exclusive(consumer)

    def add_wildcard(self, wildcard: Wildcard, queue: Queue) -> None:
        receivers = self._get_or_create_receivers(queue)
        if not receivers.wildcards:
            # Most queues have one wildcard consumer, which has many queues: they share one tuple.
            receivers.wildcards = self._wildcard_singletons.setdefault(wildcard, (wildcard,))
        elif isinstance(receivers.wildcards, list):
            receivers.wildcards.append(wildcard)
        else:
            receivers.wildcards = [*receivers.wildcards, wildcard]
        queue.has_wildcards = True
        if wildcard.is_exclusive:
            receivers.add_exclusive(wildcard)

    def remove_consumer(self, consumer: BrokerConsumer, queue: Queue) -> None:
        receivers = self.receivers_by_queue[queue]
        if isinstance(consumer, QueueConsumer):
            del receivers.consumers[bisect_left(receivers.consumers, consumer.number, key=_number)]
            if consumer.has_express:
                del receivers.express[bisect_left(receivers.express, consumer.number, key=_number)]
        else:
            if isinstance(receivers.wildcards, list):
                del receivers.wildcards[bisect_left(receivers.wildcards, consumer.number, key=_number)]
            else:
                receivers.wildcards = ()
            queue.has_wildcards = bool(receivers.wildcards)
        if consumer.is_exclusive:
            receivers.remove_exclusive(consumer)
        if not (receivers.consumers or receivers.wildcards):
            del self.receivers_by_queue[queue]

    def forget_wildcard(self, wildcard: Wildcard) -> None:
        """Forget a wildcard consumer that has ended."""
        self._wildcard_singletons.pop(wildcard, None)

    def forget_queue(self, queue: Queue) -> None:
        """Forget a removed queue. Only wildcard consumers were its receivers."""
        self.receivers_by_queue.pop(queue, None)
        queue.has_wildcards = False

    def _get_or_create_receivers(self, queue: Queue) -> QueueReceivers:
        receivers = self.receivers_by_queue.get(queue)
        if receivers is None:
            receivers = self.receivers_by_queue[queue] = QueueReceivers()
        return receivers

    # ---- Held entries ----

    def count_dispatched(self, session: ConnectionState, count: int) -> bool:
        """Count messages dispatched to a connection, by `held_weight`. A connection that holds HELD_MAX messages gets
        no more. Returns whether the connection has just reached HELD_MAX."""
        session.held_estimate += count
        if session.held_estimate < HELD_MAX or session in self.full_sessions:
            return False
        session.count_held()
        if session.holds_too_much:
            self.full_sessions[session] = None
        return session.holds_too_much

    def take_freed_sessions(self) -> list[ConnectionState]:
        """Return the connections that held HELD_MAX messages and hold fewer now, each connection once."""
        for session in self.full_sessions:
            session.count_held()
        freed = [session for session in self.full_sessions if not session.holds_too_much]
        for session in freed:
            del self.full_sessions[session]
        return freed

    def held_by_consumers(self, queue: Queue) -> Iterator[Entry]:
        """Yield the entries of a queue that consumers hold; entries settled in open transactions are left out."""
        for consumer in self.receivers_by_queue.get(queue, NO_RECEIVERS).all():
            yield from (entry for entry in consumer.held.values() if entry.lane.queue is queue)

    def held_entries(self, queue: Queue, first: int = 0, until: int = UNBOUNDED) -> Iterator[Entry]:
        """Yield the entries of a queue that consumers or transactions hold. Sequences are from `first` on, and below
        `until`."""
        for holder in self._holders(queue):
            # Most holders hold nothing so old.
            if holder.held and min(holder.held) < until:
                for entry in holder.held.values():
                    if entry.lane.queue is queue and first <= entry.sequence < until:
                        yield entry

    def _holders(self, queue: Queue) -> Iterator[EntryHolder]:
        yield from self.receivers_by_queue.get(queue, NO_RECEIVERS).all()
        for session in self.sessions.values():
            yield from session.transactions.settling_transactions
