"""What has come and is not settled: in a buffer, or with the program. By message, by subscription, and by session.

One file, for a message knows its subscription, a subscription its buffer, and a buffer its subscriptions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heapify, heappop, heappush

import msgspec

from truenext.client.core.message import Content
from truenext.client.core.waiting import Flow, Signal, Wait
from truenext.errors import TruenextError


class ReceivedMessageState(IntEnum):
    BUFFERED = 0
    """The program does not have it yet."""
    HELD = 1
    """The program has it, and has not said what became of it."""
    SETTLED = 2
    """It was acknowledged, refused or given back."""


class ReceivedMessage(Content):
    """One dispatch of a message."""

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
        """The number of the connection on which it came."""
        self.ack_id = headers.get("ack", "")
        self.state = ReceivedMessageState.BUFFERED
        self.is_started = False
        """The broker was told that the program has it."""
        self.transaction: object | None = None
        """The transaction that was given it."""
        self.redelivery: ReceivedMessage | None = None
        """A later dispatch of the same message, which has come while the program still has this one."""
        self.may_have_missed: bool = False
        """It is the first of a topic after the connection was lost: what was sent meanwhile did not come here."""


class SubscriptionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a subscription asks for."""

    destination: str
    prefetch: int | None = None
    """Messages that it holds beside those that the program has taken; 0 is none, None leaves it to the broker."""
    selector: str | None = None
    priority: int = 0
    """Among the consumers of a queue, -127 to 127: the highest that has room gets the message."""
    exclusive: bool = False
    durable: str | None = None
    """The name of a durable subscription to a topic."""
    headers: dict[str, str] = {}

    @property
    def is_lossy(self) -> bool:
        """What is sent while nobody is connected is lost."""
        return self.durable is None and self.destination.startswith(("/topic/", "/temp-topic/"))


@dataclass(slots=True, eq=False)
class Subscription:
    id: str
    """As it is called on the wire."""
    options: SubscriptionOptions
    buffer: ReceiveBuffer
    held_by_ack_id: dict[str, ReceivedMessage] = field(default_factory=dict)
    """Of this connection what the program has, by ack id, without what a transaction has acknowledged."""
    _heap: list[tuple[int, int, ReceivedMessage]] = field(default_factory=list, init=False)
    release_count_min: int = 0
    """What comes of an earlier round was given back."""
    requested_count: int = 0
    """Messages that were asked for, if it pulls, and have not come."""
    is_exhausted: bool = False
    """The broker had not as many as were asked for last."""
    pull_id: str = ""
    """The name of what was asked for last."""
    is_suspended: bool = False
    """The broker was told to send nothing until it is woken."""
    is_paused: bool = False
    """The program wants nothing of it for now."""
    is_release_due: bool = False
    """What has come is to be given back as soon as it is confirmed."""
    is_polled: bool = False
    """The program has asked for a message since somebody looked last."""
    is_subscribe_sent: bool = False
    """The broker of this connection has been told of it."""
    is_open: bool = False
    """... and has confirmed it."""
    is_closed: bool = False
    error: TruenextError | None = None
    """Why it has ended."""
    may_have_missed: bool = False
    """The next message is the first after a time without a connection, in which others may have been lost."""
    opened: Signal = field(default_factory=Signal)
    """It is open, or has ended."""

    @property
    def pulls(self) -> bool:
        return self.options.prefetch == 0

    def end(self, error: TruenextError | None) -> None:
        self.is_closed = True
        self.error = error
        self.opened.set()

    # ---- What has come and nobody has taken ----

    def push(self, received: ReceivedMessage) -> None:
        heappush(self._heap, (received.rank, received.sequence, received))

    def first(self) -> ReceivedMessage | None:
        """What may be handed out next."""
        return self._heap[0][2] if self._heap and not (self.is_paused or self.is_release_due) else None

    def pop(self) -> ReceivedMessage:
        """Take the first one out."""
        return heappop(self._heap)[2]

    def discard(self, received: ReceivedMessage) -> None:
        """Take one out, wherever it stands."""
        self._heap = [each for each in self._heap if each[2] is not received]
        heapify(self._heap)

    def clear(self) -> list[ReceivedMessage]:
        heap, self._heap = self._heap, []
        return [each[2] for each in heap]

    def __len__(self) -> int:
        return len(self._heap)

    def reset_for_connection(self) -> None:
        """Nothing of an earlier connection counts."""
        self.clear()
        self.held_by_ack_id.clear()
        self.release_count_min = self.requested_count = 0
        self.is_suspended = self.is_release_due = self.is_subscribe_sent = self.is_open = False
        if self.opened.is_set and not self.is_closed:
            # Whoever has not looked yet waits for the next.
            self.opened = Signal()


class ReceiveBuffer:
    """One for each session, or for all that handle what one `consume` gets."""

    is_shared = False
    """Its subscriptions are for several sessions."""

    def __init__(self) -> None:
        self.subscriptions: list[Subscription] = []
        self._waiters: dict[Signal, Subscription | None] = {}
        self.is_closed = False
        """Nothing is handed out any more, and who waits is told so."""

    def push(self, received: ReceivedMessage) -> None:
        subscription = received.subscription
        subscription.push(received)
        if self._waiters:
            self._wake_one(subscription)

    def first(self, subscription: Subscription | None = None) -> ReceivedMessage | None:
        """The next one, of one subscription or of all."""
        if subscription is not None:
            return subscription.first()
        if len(self.subscriptions) == 1:
            return self.subscriptions[0].first()
        firsts = [first for each in self.subscriptions if (first := each.first()) is not None]
        return min(firsts, key=key_of, default=None)

    def pop(self, received: ReceivedMessage) -> None:
        """What `first` has said is handed out."""
        received.subscription.pop()

    def on_settled(self, messages: Iterable[ReceivedMessage]) -> None:
        """The program is done with messages that were handed out."""

    def on_cleared(self) -> None:
        """Subscriptions have lost what they had."""

    def __len__(self) -> int:
        return sum(map(len, self.subscriptions))

    withheld_count = 0
    """Messages that have come and may not be handed out yet."""

    # ---- Who waits ----

    def add_waiter(self, subscription: Subscription | None) -> Signal:
        """Set when something has come, or everybody is to look again; to be given to `remove_waiter`."""
        signal = Signal()
        self._waiters[signal] = subscription
        return signal

    def remove_waiter(self, signal: Signal) -> None:
        """Whoever waited does not any more. What it may have been woken for is for the next one."""
        subscription = self._waiters.pop(signal)
        if signal.is_set and self._waiters and self.first(subscription) is not None:
            self._wake_one(subscription)

    def wait_until_woken(self, subscription: Subscription | None, deadline: float | None = None) -> Flow[bool]:
        """Wait as `add_waiter` says. False if nothing has come in time."""
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
        """Somebody would take what comes to it."""
        return any(awaited is None or awaited is subscription for awaited in self._waiters.values())


def key_of(received: ReceivedMessage) -> tuple[int, int]:
    return received.rank, received.sequence
