"""Consumers, browsers and their connections.

Whether a consumer has credit does not depend on the next message, so a large message is never skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from sys import maxsize
from typing import ClassVar

from truenext.engine.state.memory import MemoryBudget
from truenext.engine.state.queue import Queue
from truenext.engine.state.transaction import BrokerTransaction, EntryHolder, OpenTransactions, rollback_only_error
from truenext.engine.state.window import AutoWindow
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import AckMode, Browse, Subscribe
from truenext.model.destination import Destination, DestinationKind
from truenext.model.limits import HELD_MAX, SUBSCRIPTIONS_MAX, WINDOW_DEFAULT
from truenext.model.order import RANKS

# An enumeration's member costs more to look up than a name; this one is needed with every acknowledgement.
_AUTO = AckMode.AUTO

SUSPENDED_WINDOW = -1
"""Window of a suspended consumer. Below 0, so that a consumer that holds no message has no credit either."""

EXPRESS_MAX = 10
"""Number of messages beyond its window that a consumer with express dispatch may hold."""

FRAME_BYTES = 200
"""Rough number of bytes that the broker adds to a message in its MESSAGE frame, without the subscription's name."""


class Subscriber:
    """One subscription of one connection: a consumer or a browser."""

    __slots__ = ("destination", "frame_bytes", "memory", "selector", "session", "subscription")

    def __init__(self, session: ConnectionState, subscribe: Subscribe | Browse, memory: MemoryBudget) -> None:
        self.session = session
        self.memory = memory
        self.subscription = subscribe.subscription
        self.destination = subscribe.destination
        """Destination as the client named it."""
        self.selector = subscribe.selector
        self.frame_bytes = FRAME_BYTES + 2 * len(subscribe.subscription)
        """Rough number of bytes of a MESSAGE frame, without the message's header and body."""

    def has_credit(self) -> bool:
        """Return whether the connection may get another message."""
        return self.session.unsent_bytes < self.memory.unsent_bytes_max


class BrokerConsumer(Subscriber, EntryHolder):
    """Subscription to which messages are dispatched, with its window and the messages that it holds."""

    __slots__ = (
        "_express_granted",
        "_express_refused",
        "_express_state",
        "auto_window",
        "awake_window",
        "has_express",
        "held",
        "is_exclusive",
        "last_ack_number",
        "last_dispatch_number",
        "last_settled_us",
        "mode",
        "number",
        "priority",
        "pull_request",
        "queue",
        "service_rank",
        "window",
    )

    queue: Queue | None
    """Queue of the consumer; None for a wildcard consumer (wildcard.py)."""
    held_weight: ClassVar[int] = 1
    """Number that each held message counts towards HELD_MAX."""

    def __init__(
        self,
        queue: Queue | None,
        session: ConnectionState,
        subscribe: Subscribe,
        memory: MemoryBudget,
        *,
        number: int,
        last_dispatch_number: int,
        now_ms: int,
    ) -> None:
        super().__init__(session, subscribe, memory)
        self.queue = queue
        self.number = number
        """Number of the consumer in the history; unique within a run."""
        self.mode = subscribe.mode
        is_auto = subscribe.window is None and self.mode is AckMode.INDIVIDUAL and not subscribe.is_pulling
        self.auto_window = AutoWindow(now_ms) if is_auto else None
        """Automatic window. None if the client has set a window, pulls, or does not acknowledge messages one by one."""
        self.pull_request = PullRequest() if subscribe.is_pulling else None
        """Messages requested and not dispatched yet; None if the subscription does not pull."""
        self.window = _requested_window(subscribe) if self.auto_window is None else self.auto_window.size
        """Number of messages that the consumer may hold. If it pulls: the number that it held and had requested when
        `adjust_window` last ran."""
        self.awake_window: int | None = None
        """Window that a suspended consumer has again once woken; None if the consumer is not suspended."""
        self.priority = subscribe.priority
        self.service_rank = _service_rank(subscribe.priority, is_stretched=False)
        """Consumers with credit and the smallest service rank are served first, however many messages they hold."""
        self.is_exclusive = subscribe.is_exclusive
        self.has_express = subscribe.has_express
        self.last_ack_number = 0
        """Value of `express_ack_count` at the last acknowledgement by this consumer. Counted if `has_express`."""
        self.last_settled_us = 0
        """Time of the last ACK or NACK, in microseconds of the monotonic clock; in auto mode, when the socket had last
        taken all messages. 0 if there was none."""
        self._express_state = (-1, 0, 0)
        """Number of held messages, window and last dispatch number for which `_express_granted` and `_express_refused`
        are valid."""
        self._express_granted = -1
        """Least urgent rank for which the held messages are known to allow express dispatch; -1 if none is known."""
        self._express_refused = len(RANKS)
        """Most urgent rank for which the held messages are known to prevent express dispatch; the number of ranks if
        none is known."""
        self.held = {}
        """Messages dispatched and neither settled nor requeued, in order of dispatch."""
        self.last_dispatch_number = last_dispatch_number
        """Value of `dispatch_count` at the last dispatch to this consumer, or at its subscription. The consumer with
        the smallest value has waited longest."""

    def all_queues(self) -> list[Queue]:
        return [] if self.queue is None else [self.queue]

    @property
    def is_subscribed(self) -> bool:
        """Whether the subscription has not ended."""
        return self.session.consumers.get(self.subscription) is self

    @property
    def reports_started(self) -> bool:
        """Whether the broker knows which messages the program has received: the client reports each as started, and no
        report is lost."""
        session = self.session
        return session.is_truenext_client and not session.may_lack_reports and self.mode is not AckMode.AUTO

    def has_credit(self) -> bool:
        """Return whether the window and the connection allow another message."""
        session = self.session
        return (
            len(self.held) < self.window
            and session.unsent_bytes < self.memory.unsent_bytes_max
            and not session.holds_too_much
        )

    @property
    def is_suspended(self) -> bool:
        """Whether the consumer gets no messages until it is woken."""
        return self.awake_window is not None

    def suspend(self) -> None:
        if self.awake_window is None:
            self.awake_window = self.window
            self.window = SUSPENDED_WINDOW

    def wake(self, now_ms: int) -> None:
        if self.awake_window is not None:
            self.window, self.awake_window = self.awake_window, None
            self.restart_auto_window(now_ms)

    def restart_auto_window(self, now_ms: int) -> None:
        """Restart the measurement of the automatic window, after messages left the consumer unprocessed."""
        if self.auto_window is not None:
            self.auto_window.reset(now_ms)

    def adjust_window(self, now_ms: int) -> bool:
        """Set the window from recent acknowledgements, or from the pull request. Returns whether an automatic window
        has changed."""
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
        """Enlarge an automatic window that was full for long while nothing was settled. Returns whether it was
        enlarged."""
        auto_window = self.auto_window
        if auto_window is None or self.is_suspended or len(self.held) < self.window or not auto_window.stretch(now_ms):
            return False
        self.window = auto_window.size
        self.service_rank = _service_rank(self.priority, is_stretched=True)
        return True

    def has_express_credit(self, rank: int) -> bool:
        """Return whether a message of this rank may be dispatched beyond the window, because less urgent messages fill
        the window. Once the result is False, it stays False for this rank and all less urgent ones until the end of the
        turn."""
        beyond = len(self.held) - self.window
        if not (self.has_express and self.window > 1 and 0 <= beyond < EXPRESS_MAX):
            return False
        if self.session.unsent_bytes >= self.memory.unsent_bytes_max or self.session.holds_too_much:
            return False
        # Since the last dispatch, held messages were only removed: if their number is the same, so are the messages.
        state = (len(self.held), self.window, self.last_dispatch_number)
        if state != self._express_state:
            self._express_state, self._express_granted, self._express_refused = state, -1, len(RANKS)
        if self._express_granted < rank < self._express_refused:
            if self._fills_window_below(rank, beyond):
                self._express_granted = rank
            else:
                self._express_refused = rank
        return rank <= self._express_granted

    def _fills_window_below(self, rank: int, beyond: int) -> bool:
        """Return whether at most `beyond` of the held messages are as urgent as `rank`, or more urgent. The other held
        messages then are less urgent."""
        for entry in self.held.values():
            if entry.lane.rank <= rank:
                beyond -= 1
                if beyond < 0:
                    return False
        return True

    def on_express_dispatch(self) -> None:
        """Note that a message was dispatched by express credit. `_express_granted` and `_express_refused` stay
        valid."""
        self._express_state = (len(self.held), self.window, self.last_dispatch_number)

    def covered_sequences(self, sequence: int) -> list[int]:
        """Return the sequences that an ACK or NACK of a held message covers, in order of dispatch."""
        return self.sequences_up_to(sequence) if self.mode is AckMode.CLIENT else [sequence]

    def sequences_up_to(self, sequence: int) -> list[int]:
        """Return the sequences of a held message and of all held messages dispatched before it, in order of
        dispatch."""
        sequences = []
        for earlier in self.held:
            sequences.append(earlier)
            if earlier == sequence:
                break
        return sequences


class QueueConsumer(BrokerConsumer):
    """Consumer of exactly one queue."""

    __slots__ = ()

    queue: Queue


class Browser(Subscriber):
    """Browser of one queue. background/browsing.py shows it the messages, in the queue's order."""

    __slots__ = ("after_sequence", "last_sequence", "queue", "rank", "remaining", "requested")

    def __init__(
        self, session: ConnectionState, queue: Queue, browse: Browse, memory: MemoryBudget, *, last_sequence: int
    ) -> None:
        super().__init__(session, browse, memory)
        self.queue = queue
        self.last_sequence = last_sequence
        """Last sequence to be shown: messages with greater sequences came after the browse began."""
        self.rank = -1
        """Rank of the lane that is being browsed; the number of ranks if the browser is done."""
        self.after_sequence = 0
        """Sequence up to which the lane of `rank` was browsed."""
        self.requested: int | None = 0 if browse.is_pulling else None
        """Number of messages that the client has requested and not been shown; None requests all."""
        self.remaining = browse.count
        """Number of messages with which the browse ends; None shows all."""
        if browse.after is None:
            self.next_lane()
        else:
            self.rank = browse.after[0] - 1
            self.next_lane()
            if self.rank == browse.after[0]:
                self.after_sequence = browse.after[1]

    def has_credit(self) -> bool:
        return self.requested != 0 and super().has_credit()

    @property
    def is_done(self) -> bool:
        return self.rank >= len(RANKS)

    def next_lane(self) -> None:
        ranks = RANKS if self.selector is None else self.selector.ranks
        self.rank = min((rank for rank in ranks if rank > self.rank), default=len(RANKS))
        self.after_sequence = 0

    @property
    def shown_max(self) -> int:
        """Number of messages that may be shown before the client requests more, or the browse ends."""
        return min(each for each in (self.requested, self.remaining, maxsize) if each is not None)

    def on_shown(self) -> None:
        """Count a message that is shown."""
        if self.requested is not None:
            self.requested -= 1
        if self.remaining is not None:
            self.remaining -= 1
            if not self.remaining:
                self.rank = len(RANKS)


@dataclass(slots=True, eq=False)
class ConnectionState:
    id: str
    """Id of the connection, a part of the addresses of its temporary queues. It cannot be guessed, unless the client is
    a JMS client: such a client names its connection itself when it logs in."""
    consumers: dict[str, BrokerConsumer] = field(default_factory=dict)
    """Consumers by subscription."""
    served_consumers: dict[BrokerConsumer, None] = field(default_factory=dict)
    """Consumers that have got messages since the last moment when the socket had taken all bytes."""
    browsers: dict[str, Browser] = field(default_factory=dict)
    """Browsers by subscription; a browser that is done stays until it is unsubscribed."""
    transactions: OpenTransactions = field(default_factory=OpenTransactions)
    temporary_queues: list[Queue] = field(default_factory=list)
    """Temporary queues of the connection, including those of its topic subscriptions. They are removed with the
    connection."""
    last_batch: int = 0
    """Last batch with changes of this connection. The connection's answers wait for that batch."""
    has_sent: bool = False
    """True if the connection has sent a message to a queue."""
    unsent_bytes: int = 0
    """Bytes of messages dispatched to this connection that its socket has not taken."""
    held_estimate: int = 0
    """Upper bound of the number of held messages: the last count, and all dispatches since."""
    holds_too_much: bool = False
    """True if the connection held HELD_MAX messages or more at the last count. Its consumers then have no credit."""
    release_count: int = 0
    """Number of releases by this connection so far."""
    is_truenext_client: bool = False
    """True if the client is a truenext client. Such a client may release messages, and reports which dispatches its
    program has started."""
    is_jms_client: bool = False
    """True if the client is a JMS client (docs/contract.md, "JMS clients")."""
    temporary_topics: set[str] = field(default_factory=set)
    """Names of the temporary topics that a JMS client has created."""
    may_lack_reports: bool = False
    """True if the connection has ended without a DISCONNECT, so that reports of started dispatches may be lost."""

    @property
    def stays_after_refusal(self) -> bool:
        """Whether the connection stays open after a refused command. A plain client is disconnected by an ERROR."""
        return self.is_truenext_client or self.is_jms_client

    @property
    def only_sends(self) -> bool:
        """Whether the connection has sent messages, and has neither subscriptions nor open transactions. Such a
        connection may have to wait for space on the disk. Subscriptions of a truenext client to its own temporary
        queues do not count."""
        if not self.has_sent or self.transactions:
            return False
        if self.is_truenext_client:
            return all(each.destination.kind is DestinationKind.TEMPORARY for each in self.consumers.values())
        return not self.consumers

    def count_held(self) -> int:
        """Count the messages that the connection holds, by `held_weight`, and note whether HELD_MAX is reached."""
        self.held_estimate = sum(len(each.held) * each.held_weight for each in self.consumers.values())
        self.held_estimate += sum(len(each.held) for each in self.transactions.settling_transactions)
        self.holds_too_much = self.held_estimate >= HELD_MAX
        return self.held_estimate

    def creates_by_use(self, destination: Destination) -> bool:
        """Return whether the first use creates this temporary queue of the connection. A JMS client creates its
        temporary queues by a command; those of its topic subscriptions are created by the subscription."""
        return not self.is_jms_client or destination.topic != ""

    def is_first_reply_queue(self, destination: Destination) -> bool:
        """Return whether this queue would be the connection's first temporary queue that is no topic subscription.
        Each connection may have one such queue, even if there is no memory for another queue."""
        return not destination.topic and all(queue.destination.topic for queue in self.temporary_queues)

    def check_subscription(self, subscription: str, destination: Destination) -> None:
        """Check that this subscription can be added.

        Raises: RemoteProtocolError if its name is in use, the connection has too many subscriptions, or the destination
        is another connection's temporary queue or topic.
        """
        if subscription in self.consumers or subscription in self.browsers:
            raise RemoteProtocolError(f"subscription {subscription!r} exists already on this connection", Code.IN_USE)
        if len(self.consumers) + len(self.browsers) >= SUBSCRIPTIONS_MAX:
            raise RemoteProtocolError(
                f"this connection has {SUBSCRIPTIONS_MAX} subscriptions, the most allowed: end some, or open another "
                "connection",
                Code.LIMIT,
            )
        if destination.session and destination.session != self.id:
            noun = "topic" if destination.kind is DestinationKind.TOPIC else "queue"
            raise RemoteProtocolError(
                f"only the connection that owns a temporary {noun} may subscribe to it", Code.DESTINATION
            )

    def consumer(self, subscription: str) -> BrokerConsumer:
        """Return the consumer of a subscription whose messages the client acknowledges.

        Raises: RemoteProtocolError if there is no such subscription, it is a browser, or it has ack:auto.
        """
        consumer = self.consumers.get(subscription)
        if subscription in self.browsers:
            raise RemoteProtocolError(
                f"subscription {subscription!r} is a browser: its messages are not acknowledged", Code.NOT_HELD
            )
        if consumer is None:
            raise RemoteProtocolError(f"there is no subscription {subscription!r} on this connection", Code.NOT_FOUND)
        if consumer.mode is AckMode.AUTO:
            raise RemoteProtocolError(
                f"subscription {subscription!r} has ack:auto: its messages are not acknowledged by the client",
                Code.NOT_HELD,
            )
        return consumer

    def consumer_of(self, subscription: str | None, sequence: int, dispatch: int = 0) -> BrokerConsumer:
        """Return the consumer that an ACK or NACK refers to. `dispatch` is the number of deliveries that the frame
        names, 0 if none.

        Raises: RemoteProtocolError if no consumer of this connection holds the message.
        """
        if subscription is not None:
            consumer = self.consumers.get(subscription)
            if consumer is None or consumer.mode is _AUTO:
                # Raises the error that says what is wrong with the subscription.
                consumer = self.consumer(subscription)
            if sequence in consumer.held and (not dispatch or consumer.held[sequence].deliveries == dispatch):
                return consumer
        else:
            for consumer in self.consumers.values():
                if sequence in consumer.held and consumer.mode is not AckMode.AUTO:
                    return consumer
        raise RemoteProtocolError(
            f"message {sequence} is not held by this connection's subscription: it was never delivered there, "
            "or is settled already",
            Code.NOT_HELD,
        )

    def transaction(self, name: str) -> BrokerTransaction:
        """Return an open transaction.

        Raises: RemoteProtocolError if the transaction is not open, or is rollback-only.
        """
        transaction = self.transaction_to_abort(name)
        if transaction.is_rollback_only:
            raise rollback_only_error(name, transaction)
        return transaction

    def transaction_to_abort(self, name: str) -> BrokerTransaction:
        """Return an open transaction, also a rollback-only one.

        Raises: RemoteProtocolError if the transaction is not open.
        """
        transaction = self.transactions.get(name)
        if transaction is None:
            raise RemoteProtocolError(f"transaction {name!r} is not open on this connection", Code.NO_TRANSACTION)
        return transaction


def _service_rank(priority: int, *, is_stretched: bool) -> int:
    return is_stretched - 2 * priority


def _requested_window(subscribe: Subscribe) -> int:
    if subscribe.is_pulling:
        return 0
    if subscribe.window is not None:
        return subscribe.window
    # In auto mode the socket's buffer is the window; it is bounded in bytes.
    return maxsize if subscribe.mode is AckMode.AUTO else WINDOW_DEFAULT


@dataclass(slots=True, eq=False)
class PullRequest:
    """Messages that a subscription has requested and that were not dispatched yet. Source: docs/contract.md, "Pull"."""

    remaining: int = 0
    """Number of messages requested and not dispatched yet."""
    waits_for_messages: bool = True
    """If True, the request stays open until all messages have come. If False, the request ends when no message is
    ready."""
    correlation: str | None = None
    """Correlation id that the client gave its last request; None if there was none."""
