"""Who takes messages, who only looks at them, and the connections whose they are.

Whether a consumer has credit does not depend on the next message, so a large one is never passed over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from sys import maxsize

from truenext.engine.state.memory import MemoryBudget
from truenext.engine.state.queue import Queue
from truenext.engine.state.transaction import BrokerTransaction, EntryHolder, OpenTransactions, rollback_only_error
from truenext.engine.state.window import AutoWindow
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import AckMode, Browse, Subscribe
from truenext.model.destination import Destination, DestinationKind
from truenext.model.limits import SUBSCRIPTIONS_MAX, WINDOW_DEFAULT
from truenext.model.order import RANKS

# A member of an enumeration costs more to look up than a name; this one is asked for with every acknowledgement.
_AUTO = AckMode.AUTO

SUSPENDED_WINDOW = -1
"""The window of a consumer that rests: not even one that holds nothing has credit."""

EXPRESS_MAX = 10
"""Messages beyond its window that an express consumer may hold."""

FRAME_BYTES = 200
"""Bytes of a MESSAGE frame that are the broker's own, roughly, its subscription's name apart."""


class Subscriber:
    """One subscription of one connection: a consumer or a browser."""

    __slots__ = ("destination", "frame_bytes", "memory", "selector", "session", "subscription")

    def __init__(self, session: ConnectionState, subscribe: Subscribe | Browse, memory: MemoryBudget) -> None:
        self.session = session
        self.memory = memory
        self.subscription = subscribe.subscription
        self.destination = subscribe.destination
        """As the client has named it."""
        self.selector = subscribe.selector
        """Its selector, if it has one."""
        self.frame_bytes = FRAME_BYTES + 2 * len(subscribe.subscription)
        """What a message costs on the connection beside its header and body, roughly."""

    def has_credit(self) -> bool:
        """Its connection has room for a message."""
        return self.session.unsent_bytes < self.memory.unsent_bytes_max


class BrokerConsumer(Subscriber, EntryHolder):
    """Messages are dispatched to it."""

    __slots__ = (
        "auto_window",
        "awake_window",
        "has_express",
        "held",
        "is_exclusive",
        "last_ack_number",
        "last_dispatch_number",
        "mode",
        "number",
        "priority",
        "pull_request",
        "queue",
        "service_rank",
        "window",
    )

    queue: Queue | None
    """The one that it takes from; None if it takes from many (wildcard.py)."""

    def __init__(
        self,
        session: ConnectionState,
        subscribe: Subscribe,
        memory: MemoryBudget,
        *,
        number: int,
        last_dispatch_number: int,
        now_ms: int,
    ) -> None:
        super().__init__(session, subscribe, memory)
        self.number = number
        """What the history calls it; never used twice in a run."""
        self.mode = subscribe.mode
        is_auto = subscribe.window is None and self.mode is AckMode.INDIVIDUAL and not subscribe.is_pulling
        self.auto_window = AutoWindow(now_ms) if is_auto else None
        """Decides over its window, if the client has not."""
        self.pull_request = PullRequest() if subscribe.is_pulling else None
        """What it has asked for, if it gets nothing else."""
        self.window = _requested_window(subscribe) if self.auto_window is None else self.auto_window.size
        """Messages it may hold; of one that pulls, those that it may get included, as of the last dispatch."""
        self.awake_window: int | None = None
        """What its window is when it is woken; None if it does not rest."""
        self.priority = subscribe.priority
        self.service_rank = _service_rank(subscribe.priority, is_stretched=False)
        """Of two that have credit the one with the smaller is served, whatever they hold."""
        self.is_exclusive = subscribe.is_exclusive
        self.has_express = subscribe.has_express
        self.last_ack_number = 0
        """When it last acknowledged something, on the count of acknowledgements; only with express."""
        self.held = {}
        """Dispatched and neither acknowledged nor given back, in order of dispatch."""
        self.last_dispatch_number = last_dispatch_number
        """When it last got a message, or else subscribed, on the count of dispatches; the smallest has waited
        longest."""

    def all_queues(self) -> list[Queue]:
        return [] if self.queue is None else [self.queue]

    @property
    def is_subscribed(self) -> bool:
        """Still: its subscription has not ended."""
        return self.session.consumers.get(self.subscription) is self

    def has_credit(self) -> bool:
        """It has credit for a message."""
        return len(self.held) < self.window and self.session.unsent_bytes < self.memory.unsent_bytes_max

    @property
    def is_suspended(self) -> bool:
        """It gets nothing until it is woken."""
        return self.awake_window is not None

    def suspend(self) -> None:
        if self.awake_window is None:
            self.awake_window = self.window
            self.window = SUSPENDED_WINDOW

    def wake(self, now_ms: int) -> None:
        """May be said of one that does not rest."""
        if self.awake_window is not None:
            self.window, self.awake_window = self.awake_window, None
            self.restart_auto_window(now_ms)

    def restart_auto_window(self, now_ms: int) -> None:
        """That it holds less now says nothing of what it handles."""
        if self.auto_window is not None:
            self.auto_window.reset(now_ms)

    def adjust_window(self, now_ms: int) -> bool:
        """Make of what it answered lately, or asked for, how many it may hold. True if an automatic window changed."""
        if self.awake_window is not None:
            return False
        auto_window = self.auto_window
        if auto_window is not None:
            if auto_window.settled_count:
                auto_window.update(self.held, now_ms)
                self.service_rank = _service_rank(self.priority, is_stretched=False)
                if self.window != auto_window.size:
                    self.window = auto_window.size
                    return True
        elif self.pull_request is not None:
            self.window = len(self.held) + self.pull_request.remaining
        return False

    def stretch_window(self, now_ms: int) -> bool:
        """True if its window was full for so long, and nothing came, that it has more room now."""
        auto_window = self.auto_window
        if auto_window is None or self.is_suspended or len(self.held) < self.window or not auto_window.stretch(now_ms):
            return False
        self.window = auto_window.size
        self.service_rank = _service_rank(self.priority, is_stretched=True)
        return True

    def has_express_credit(self, rank: int) -> bool:
        """A message of this rank may come to it beyond its window, which is full of what goes behind it."""
        beyond = len(self.held) - self.window
        if not (self.has_express and self.window > 1 and 0 <= beyond < EXPRESS_MAX):
            return False
        if self.session.unsent_bytes >= self.memory.unsent_bytes_max:
            return False
        for entry in self.held.values():
            if entry.lane.rank <= rank:
                beyond -= 1
                if beyond < 0:
                    return False
        return True

    def covered_sequences(self, sequence: int) -> list[int]:
        """The sequences that an ACK or NACK of a held one covers, in order of dispatch."""
        if self.mode is not AckMode.CLIENT:
            return [sequence]
        covered = []
        for earlier in self.held:
            covered.append(earlier)
            if earlier == sequence:
                break
        return covered


class QueueConsumer(BrokerConsumer):
    """It takes from one queue."""

    __slots__ = ()

    queue: Queue

    def __init__(
        self,
        queue: Queue,
        session: ConnectionState,
        subscribe: Subscribe,
        memory: MemoryBudget,
        *,
        number: int,
        last_dispatch_number: int,
        now_ms: int,
    ) -> None:
        super().__init__(
            session, subscribe, memory, number=number, last_dispatch_number=last_dispatch_number, now_ms=now_ms
        )
        self.queue = queue


class Browser(Subscriber):
    """It is shown messages, in the order of its queue: how, see browsing.py."""

    __slots__ = ("after_sequence", "last_sequence", "queue", "rank")

    def __init__(
        self, session: ConnectionState, queue: Queue, browse: Browse, memory: MemoryBudget, *, last_sequence: int
    ) -> None:
        super().__init__(session, browse, memory)
        self.queue = queue
        self.last_sequence = last_sequence
        """What has a later one came after the browse began."""
        self.rank = -1
        """Of the lane that is looked at; behind the last rank there is nothing more to look at."""
        self.after_sequence = 0
        """Up to here that lane was looked at."""
        self.next_lane()

    @property
    def is_done(self) -> bool:
        return self.rank >= len(RANKS)

    def next_lane(self) -> None:
        ranks = RANKS if self.selector is None else self.selector.ranks
        self.rank = min((rank for rank in ranks if rank > self.rank), default=len(RANKS))
        self.after_sequence = 0


@dataclass(slots=True, eq=False)
class ConnectionState:
    id: str
    """Not to be guessed: it is the address of the connection's temporary queues."""
    consumers: dict[str, BrokerConsumer] = field(default_factory=dict)
    """By subscription."""
    served_consumers: dict[BrokerConsumer, None] = field(default_factory=dict)
    """Those of them that got something since the socket last took all there was."""
    browsers: dict[str, Browser] = field(default_factory=dict)
    """By subscription; those that were shown all are here until they unsubscribe."""
    transactions: OpenTransactions = field(default_factory=OpenTransactions)
    temporary_queues: list[Queue] = field(default_factory=list)
    """They go with the connection; among them those of its subscriptions to topics."""
    last_batch: int = 0
    """The last batch that has anything of this connection; its answers wait for it."""
    has_sent: bool = False
    """It has sent something to a queue."""
    unsent_bytes: int = 0
    """Bytes of messages dispatched to this connection that its socket has not taken."""
    has_rounds: bool = False
    """Its messages say in which round they were dispatched: it may give back."""
    release_count: int = 0
    """How often it has given back."""
    names_begun: bool = False
    """Its client says what it begins; nothing else counts as begun."""
    keeps_open: bool = False
    """What is refused does not end it."""

    @property
    def only_sends(self) -> bool:
        """It takes no messages away: it may have to wait until others have."""
        if not self.has_sent or self.transactions:
            return False
        if self.keeps_open:
            return all(_uses_own_queue(consumer) for consumer in self.consumers.values())
        return not self.consumers

    def is_first_reply_queue(self, destination: Destination) -> bool:
        """A temporary queue of its own that it may have however many queues there are: the first."""
        return not destination.topic and all(queue.destination.topic for queue in self.temporary_queues)

    def check_subscription(self, subscription: str, destination: Destination) -> None:
        """Raises: RemoteProtocolError if there cannot be such a subscription to it."""
        if subscription in self.consumers or subscription in self.browsers:
            raise RemoteProtocolError(f"subscription {subscription!r} exists already on this connection", Code.IN_USE)
        if len(self.consumers) + len(self.browsers) >= SUBSCRIPTIONS_MAX:
            raise RemoteProtocolError(f"more than {SUBSCRIPTIONS_MAX} subscriptions on one connection", Code.LIMIT)
        if destination.session and destination.session != self.id:
            noun = "topic" if destination.kind is DestinationKind.TOPIC else "queue"
            raise RemoteProtocolError(
                f"only the connection that owns a temporary {noun} may subscribe to it", Code.DESTINATION
            )

    def consumer(self, subscription: str) -> BrokerConsumer:
        """The one that answers for what it gets.

        Raises: RemoteProtocolError if there is none.
        """
        consumer = self.consumers.get(subscription)
        if subscription in self.browsers:
            raise RemoteProtocolError(
                f"subscription {subscription!r} browses: nothing of it is acknowledged", Code.NOT_HELD
            )
        if consumer is None:
            raise RemoteProtocolError(f"there is no subscription {subscription!r} on this connection", Code.NOT_FOUND)
        if consumer.mode is AckMode.AUTO:
            raise RemoteProtocolError(f"subscription {subscription!r} acknowledges by itself (ack:auto)", Code.NOT_HELD)
        return consumer

    def consumer_of(self, subscription: str | None, sequence: int, dispatch: int = 0) -> BrokerConsumer:
        """The consumer that an ACK or NACK speaks of; `dispatch` is the one that it names, 0 if it names none.

        Raises: RemoteProtocolError if none of this connection's holds the message.
        """
        if subscription is not None:
            consumer = self.consumers.get(subscription)
            if consumer is None or consumer.mode is _AUTO:
                # Only what is wrong with it is asked.
                consumer = self.consumer(subscription)
            if sequence in consumer.held and (not dispatch or consumer.held[sequence].deliveries == dispatch):
                return consumer
        else:
            for consumer in self.consumers.values():
                if sequence in consumer.held and consumer.mode is not AckMode.AUTO:
                    return consumer
        raise RemoteProtocolError(
            f"message {sequence} is not held by this connection's subscription: it was never sent to it, "
            "or is acknowledged or given back already",
            Code.NOT_HELD,
        )

    def transaction(self, name: str) -> BrokerTransaction:
        """Raises: RemoteProtocolError if it is not open, or can only be aborted."""
        transaction = self.transaction_to_abort(name)
        if transaction.is_rollback_only:
            raise rollback_only_error(name)
        return transaction

    def transaction_to_abort(self, name: str) -> BrokerTransaction:
        """Raises: RemoteProtocolError if it is not open."""
        transaction = self.transactions.get(name)
        if transaction is None:
            raise RemoteProtocolError(f"transaction {name!r} is not open on this connection", Code.NO_TRANSACTION)
        return transaction


def _uses_own_queue(consumer: BrokerConsumer) -> bool:
    """It takes from a temporary queue of its own connection: nobody else waits for what is there."""
    return consumer.destination.kind is DestinationKind.TEMPORARY


def _service_rank(priority: int, *, is_stretched: bool) -> int:
    return is_stretched - 2 * priority


def _requested_window(subscribe: Subscribe) -> int:
    if subscribe.is_pulling:
        return 0
    if subscribe.window is not None:
        return subscribe.window
    # In auto mode the socket's buffer is the window; it is bounded in bytes.
    return maxsize if subscribe.mode is AckMode.AUTO else WINDOW_DEFAULT


# How many messages a subscription that pulls has asked for and not got. Source: docs/contract.md, "Pulling"


@dataclass(slots=True, eq=False)
class PullRequest:
    """One for each subscription that pulls, whether it has asked for anything or not."""

    remaining: int = 0
    """Messages that were asked for and have not come."""
    waits_for_messages: bool = True
    """It stays until all have come; else it ends when none is ready."""
    correlation: str | None = None
    """What the client calls the last of what it has asked for."""
