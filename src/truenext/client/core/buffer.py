"""Received messages that are not settled: buffered ones, and ones that the program holds.

Messages, subscriptions and buffers are in one file, because they refer to one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heappop, heappush

import msgspec

from truenext.client.core.message import Content
from truenext.client.core.waiting import Flow, Signal, Wait
from truenext.errors import TruenextError


class ReceivedMessageState(IntEnum):
    BUFFERED = 0
    """The client has the message, and has not delivered it to the program."""
    HELD = 1
    """The program has got the message, and has not settled it."""
    SETTLED = 2
    """The message was acknowledged, nacked, rejected or released."""


class ReceivedMessage(Content):
    """One dispatch of a message to this client, and how far the client has processed it."""

    __slots__ = (
        "ack_id",
        "is_started",
        "link_number",
        "may_have_missed",
        "redelivery",
        "state",
        "subscription",
        "transaction",
    )

    def __init__(
        self, headers: dict[str, str], body: bytes, arrival: int, subscription: Subscription, link_number: int
    ) -> None:
        super().__init__(headers, body, arrival)
        self.subscription = subscription
        self.link_number = link_number
        """Number of the link on which the message arrived."""
        self.ack_id = headers.get("ack", "")
        self.state = ReceivedMessageState.BUFFERED
        self.is_started = False
        """True if the client has reported to the broker that the program has the message."""
        self.transaction: object | None = None
        self.redelivery: ReceivedMessage | None = None
        """Later dispatch of the same message, which arrived while the program still held this dispatch."""
        self.may_have_missed: bool = False
        """True if the connection was lost before this message, so that earlier messages of its topic may be missing."""


class SubscriptionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a subscription, after `parse_consumer_options` has checked them."""

    destination: str
    prefetch: int | None = None
    """Largest number of messages that the subscription may hold. 0: each message is requested. None: the broker
    decides."""
    selector: str | None = None
    priority: int = 0
    """Priority among the consumers of a queue, -127 to 127. The consumer with the highest priority and with credit gets
    a message."""
    exclusive: bool = False
    durable: str | None = None
    """Name of a durable subscription to a topic."""
    headers: Mapping[str, str] = {}

    @property
    def is_lossy(self) -> bool:
        """Whether the subscription loses messages that are sent while there is no connection."""
        return self.durable is None and self.destination.startswith(("/topic/", "/temp-topic/"))


@dataclass(slots=True, eq=False)
class Subscription:
    id: str
    """Name of the subscription on the wire."""
    options: SubscriptionOptions
    buffer: ReceiveBuffer
    held_by_ack_id: dict[str, ReceivedMessage] = field(default_factory=dict)
    """Messages of this connection, by ack id, that the program holds and that no transaction has acknowledged."""
    _heap: list[tuple[int, int, ReceivedMessage]] = field(default_factory=list, init=False)
    release_count_min: int = 0
    """Release count below which a dispatch is ignored: its message was released after the dispatch."""
    requested_count: int = 0
    """Number of messages that pull requests have requested, and that have not arrived."""
    is_exhausted: bool = False
    """True if the broker had fewer messages than the last pull request asked for."""
    pull_id: str = ""
    is_suspended: bool = False
    """True if the broker was asked to send no messages until the client wakes the subscription."""
    is_paused: bool = False
    """True if the program has paused the consumer."""
    is_release_due: bool = False
    """True if the buffered messages must be released as soon as the broker has confirmed the subscription."""
    is_polled: bool = False
    """True if the program has requested a message since the reconciler last checked for idle buffers."""
    is_subscribe_sent: bool = False
    is_open: bool = False
    """True once the broker has confirmed the SUBSCRIBE."""
    is_closed: bool = False
    error: TruenextError | None = None
    """Error that has ended the subscription."""
    may_have_missed: bool = False
    """True if the next message is the first one after a lost connection, so that messages before it may be missing."""
    opened: Signal = field(default_factory=Signal)
    """Set when the subscription is open, or has ended."""

    @property
    def pulls(self) -> bool:
        return self.options.prefetch == 0

    def end(self, error: TruenextError | None) -> None:
        self.is_closed = True
        self.error = error
        self.opened.set()

    # ---- Buffered messages ----

    def push(self, received: ReceivedMessage) -> None:
        heappush(self._heap, (received.rank, received.sequence, received))

    def first(self) -> ReceivedMessage | None:
        """Return the first message that may be delivered; None if there is none."""
        return self._heap[0][2] if self._heap and not (self.is_paused or self.is_release_due) else None

    def pop(self) -> ReceivedMessage:
        """Remove and return the first message."""
        return heappop(self._heap)[2]

    def clear(self) -> list[ReceivedMessage]:
        heap, self._heap = self._heap, []
        return [each[2] for each in heap]

    def __len__(self) -> int:
        return len(self._heap)

    def reset_for_connection(self) -> None:
        """Drop all state that belongs to an earlier connection."""
        self.clear()
        self.held_by_ack_id.clear()
        self.release_count_min = self.requested_count = 0
        self.is_suspended = self.is_release_due = self.is_subscribe_sent = self.is_open = False
        if self.opened.is_set and not self.is_closed:
            # A caller that has not seen this confirmation waits for the next one.
            self.opened = Signal()


class ReceiveBuffer:
    """Received messages of one session, or of all sessions of one `consume`."""

    is_shared = False
    """True if several sessions use the same subscriptions."""

    def __init__(self) -> None:
        self.subscriptions: list[Subscription] = []
        self._waiters: dict[Signal, Subscription | None] = {}
        self.is_closed = False
        """True if no message is delivered any more, and calls that wait for a message must return."""

    def push(self, received: ReceivedMessage) -> None:
        subscription = received.subscription
        subscription.push(received)
        if self._waiters:
            self._wake_one(subscription)

    def first(self, subscription: Subscription | None = None) -> ReceivedMessage | None:
        """Return the next message of one subscription, or of all subscriptions; None if there is none."""
        if subscription is not None:
            return subscription.first()
        if len(self.subscriptions) == 1:
            return self.subscriptions[0].first()
        firsts = [first for each in self.subscriptions if (first := each.first()) is not None]
        return min(firsts, key=key_of, default=None)

    def pop(self, received: ReceivedMessage) -> None:
        """Remove `received`, which `first` has returned."""
        received.subscription.pop()

    def on_settled(self, messages: Iterable[ReceivedMessage]) -> None:
        """Note that the program no longer holds these messages."""

    def on_cleared(self) -> None:
        """Note that buffered messages of a subscription were dropped."""

    withheld_count = 0
    """Number of arrived messages that wait until another message of their group is settled."""

    # ---- Waiting callers ----

    def add_waiter(self, subscription: Subscription | None) -> Signal:
        """Return a signal that is set when a message arrives, or when all waiting callers must check again. When the
        caller stops waiting, it must pass the signal to `remove_waiter`."""
        signal = Signal()
        self._waiters[signal] = subscription
        return signal

    def remove_waiter(self, signal: Signal) -> None:
        """Remove the signal of a caller that has stopped waiting. If a message has set the signal, the next caller is
        woken."""
        subscription = self._waiters.pop(signal)
        if signal.is_set and self._waiters and self.first(subscription) is not None:
            self._wake_one(subscription)

    def wait_until_woken(self, subscription: Subscription | None, deadline: float | None = None) -> Flow[bool]:
        """Wait until a message arrives, or until all callers must check again. Return False at the deadline."""
        signal = self.add_waiter(subscription)
        try:
            return (yield Wait(signal, deadline))
        finally:
            self.remove_waiter(signal)

    def _wake_one(self, subscription: Subscription | None) -> None:
        for signal, awaited in self._waiters.items():
            if not signal.is_set and (awaited is subscription or awaited is None or subscription is None):
                signal.set()
                return

    def wake_all(self) -> None:
        for signal in self._waiters:
            signal.set()

    def has_waiter(self, subscription: Subscription) -> bool:
        """Return whether a caller waits for messages of the subscription."""
        return any(awaited is None or awaited is subscription for awaited in self._waiters.values())


def key_of(received: ReceivedMessage) -> tuple[int, int]:
    return received.rank, received.sequence
