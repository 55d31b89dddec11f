"""Received messages that are not settled, buffered or held: by message, by subscription, and by session.

One file, because messages, subscriptions and buffers refer to one another.
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
    """Buffered, and not delivered to the program."""
    HELD = 1
    """Delivered to the program, and not settled."""
    SETTLED = 2
    """Acknowledged, nacked, rejected or released."""


class ReceivedMessage(Content):
    """One dispatch of a message to this client, with its state until it is settled."""

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
        """The broker was told that the program has the message."""
        self.transaction: object | None = None
        self.redelivery: ReceivedMessage | None = None
        """Later dispatch of the same message, which arrived while the program still holds this one."""
        self.may_have_missed: bool = False
        """Messages of this topic that were sent before this one may be missing: the connection had been lost."""


class SubscriptionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a subscription, checked by `parse_consumer_options`."""

    destination: str
    prefetch: int | None = None
    """Messages that the subscription may hold; with 0 each is requested, with None the broker decides."""
    selector: str | None = None
    priority: int = 0
    """Priority among the consumers of a queue, -127 to 127: the highest that has credit gets the message."""
    exclusive: bool = False
    durable: str | None = None
    """Name of a durable subscription to a topic."""
    headers: Mapping[str, str] = {}

    @property
    def is_lossy(self) -> bool:
        """Messages that are sent while there is no connection are lost."""
        return self.durable is None and self.destination.startswith(("/topic/", "/temp-topic/"))


@dataclass(slots=True, eq=False)
class Subscription:
    id: str
    """Name of the subscription on the wire."""
    options: SubscriptionOptions
    buffer: ReceiveBuffer
    held_by_ack_id: dict[str, ReceivedMessage] = field(default_factory=dict)
    """Messages of this connection that the program holds and no transaction has acknowledged, by ack id."""
    _heap: list[tuple[int, int, ReceivedMessage]] = field(default_factory=list, init=False)
    release_count_min: int = 0
    """Messages dispatched before this release count were released, and are ignored."""
    requested_count: int = 0
    """Number of messages that a pull request has requested and that have not arrived."""
    is_exhausted: bool = False
    """The broker had fewer messages than the last pull request asked for."""
    pull_id: str = ""
    is_suspended: bool = False
    """The broker was told to send nothing until the subscription is woken."""
    is_paused: bool = False
    """The program has paused the consumer."""
    is_release_due: bool = False
    """The buffer is to be released as soon as the broker has confirmed the subscription."""
    is_polled: bool = False
    """The program has requested a message since the last check for idle buffers."""
    is_subscribe_sent: bool = False
    """SUBSCRIBE was sent on this connection."""
    is_open: bool = False
    """The broker has confirmed the SUBSCRIBE."""
    is_closed: bool = False
    error: TruenextError | None = None
    """Error that has ended the subscription."""
    may_have_missed: bool = False
    """The next message is the first after a lost connection, and messages before it may be missing."""
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
        """Return the first message that may be delivered."""
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
        """Forget the state of an earlier connection."""
        self.clear()
        self.held_by_ack_id.clear()
        self.release_count_min = self.requested_count = 0
        self.is_suspended = self.is_release_due = self.is_subscribe_sent = self.is_open = False
        if self.opened.is_set and not self.is_closed:
            # A caller that has not looked yet waits for the next confirmation.
            self.opened = Signal()


class ReceiveBuffer:
    """Received messages of one session, or of all sessions of one `consume`."""

    is_shared = False
    """Several sessions share the subscriptions."""

    def __init__(self) -> None:
        self.subscriptions: list[Subscription] = []
        self._waiters: dict[Signal, Subscription | None] = {}
        self.is_closed = False
        """No message is delivered any more, and waiting callers return."""

    def push(self, received: ReceivedMessage) -> None:
        subscription = received.subscription
        subscription.push(received)
        if self._waiters:
            self._wake_one(subscription)

    def first(self, subscription: Subscription | None = None) -> ReceivedMessage | None:
        """Return the next message, of one subscription or of all."""
        if subscription is not None:
            return subscription.first()
        if len(self.subscriptions) == 1:
            return self.subscriptions[0].first()
        firsts = [first for each in self.subscriptions if (first := each.first()) is not None]
        return min(firsts, key=key_of, default=None)

    def pop(self, received: ReceivedMessage) -> None:
        """Remove the message that `first` has returned."""
        received.subscription.pop()

    def on_settled(self, messages: Iterable[ReceivedMessage]) -> None:
        """Note that the program no longer holds messages."""

    def on_cleared(self) -> None:
        """Note that subscriptions have lost their buffered messages."""

    withheld_count = 0
    """Number of messages that have arrived and may not be delivered yet."""

    # ---- Waiting callers ----

    def add_waiter(self, subscription: Subscription | None) -> Signal:
        """Return a signal, for `remove_waiter`, that is set when a message arrives or each caller is to check again."""
        signal = Signal()
        self._waiters[signal] = subscription
        return signal

    def remove_waiter(self, signal: Signal) -> None:
        """Remove a caller that no longer waits. A message for which it was woken goes to the next caller."""
        subscription = self._waiters.pop(signal)
        if signal.is_set and self._waiters and self.first(subscription) is not None:
            self._wake_one(subscription)

    def wait_until_woken(self, subscription: Subscription | None, deadline: float | None = None) -> Flow[bool]:
        """Wait for the signal of `add_waiter`. False if it is not set in time."""
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
