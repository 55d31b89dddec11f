"""What the engine knows of one connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from truenext.commands import AckMode
from truenext.destination import Destination, Kind
from truenext.errors import RemoteProtocolError
from truenext.limits import SUBSCRIPTIONS_MAX

if TYPE_CHECKING:
    from truenext.engine.browse import Browser
    from truenext.engine.consumer import Consumer
    from truenext.engine.queue import Queue
    from truenext.engine.transaction import Transaction


class Session:
    __slots__ = (
        "batch",
        "browsers",
        "consumers",
        "has_sent",
        "id",
        "served",
        "temporary_queues",
        "transactions",
        "unsent_bytes",
    )

    def __init__(self, session_id: str) -> None:
        self.id = session_id
        """Not to be guessed: it is the address of the connection's temporary queues."""
        self.consumers: dict[str, Consumer] = {}
        """By subscription."""
        self.served: dict[Consumer, None] = {}
        """Those of them that got something since the socket last took all there was."""
        self.browsers: dict[str, Browser] = {}
        """By subscription; those that were shown all are here until they unsubscribe."""
        self.transactions: dict[str, Transaction] = {}
        """Open ones, by the client's name for them."""
        self.temporary_queues: list[Queue] = []
        """They go with the connection; among them those of its subscriptions to topics."""
        self.batch = 0
        """The last batch that has anything of this connection; its answers wait for it."""
        self.has_sent = False
        """It has sent something to a queue."""
        self.unsent_bytes = 0
        """Bytes of messages dispatched to this connection that its socket has not taken."""

    @property
    def only_sends(self) -> bool:
        """It takes no messages away: it may have to wait until others have."""
        return self.has_sent and not self.consumers and not self.transactions

    def may_be_answered_in(self, destination: Destination) -> bool:
        """A temporary queue of its own that it may have however many queues there are: the first."""
        return not destination.topic and all(queue.destination.topic for queue in self.temporary_queues)

    def check_subscription(self, subscription: str, destination: Destination) -> None:
        """Raises: RemoteProtocolError if there cannot be such a subscription to it."""
        if subscription in self.consumers or subscription in self.browsers:
            raise RemoteProtocolError(f"subscription {subscription!r} exists already on this connection")
        if len(self.consumers) + len(self.browsers) >= SUBSCRIPTIONS_MAX:
            raise RemoteProtocolError(f"more than {SUBSCRIPTIONS_MAX} subscriptions on one connection")
        if destination.session and destination.session != self.id:
            what = "topic" if destination.kind is Kind.TOPIC else "queue"
            raise RemoteProtocolError(f"only the connection that owns a temporary {what} may subscribe to it")

    def consumer_of(self, subscription: str | None, sequence: int) -> Consumer:
        """The consumer that an ACK or NACK speaks of.

        Raises: RemoteProtocolError if none of this connection's holds the message.
        """
        if subscription is not None:
            consumer = self.consumers.get(subscription)
            if subscription in self.browsers:
                raise RemoteProtocolError(f"subscription {subscription!r} browses: nothing of it is acknowledged")
            if consumer is None:
                raise RemoteProtocolError(f"there is no subscription {subscription!r} on this connection")
            if consumer.mode is AckMode.AUTO:
                raise RemoteProtocolError(f"subscription {subscription!r} acknowledges by itself (ack:auto)")
            if sequence in consumer.held:
                return consumer
        else:
            for consumer in self.consumers.values():
                if sequence in consumer.held and consumer.mode is not AckMode.AUTO:
                    return consumer
        raise RemoteProtocolError(
            f"message {sequence} is not held by this connection's subscription: it was never sent to it, "
            "or is acknowledged or given back already"
        )

    def transaction(self, name: str) -> Transaction:
        """Raises: RemoteProtocolError if it is not open."""
        transaction = self.transactions.get(name)
        if transaction is None:
            raise RemoteProtocolError(f"transaction {name!r} is not open on this connection")
        return transaction
