"""Isolation of handlers: a message whose last attempt ended with a lost connection is processed alone.

Such a message may crash the process, which would count an attempt for each message that is processed at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

from truenext.client.core.buffer import ReceiveBuffer, ReceivedMessage, Subscription


class HandlerIsolation:
    """Ensures that a message whose last attempt ended with a lost connection is processed alone. One object serves the
    handlers of one event loop, or of one connection of `truenext.blocking`."""

    def __init__(self) -> None:
        self._running_count = 0
        """Number of messages that handlers hold now."""
        self._is_isolated = False
        self._isolated_next: SharedReceiveBuffer | None = None
        """Buffer whose next message must be processed alone. Until then no other buffer starts a handler."""
        self.buffers: WeakSet[SharedReceiveBuffer] = WeakSet()

    def may_start_handling(self, received: ReceivedMessage, buffer: SharedReceiveBuffer) -> bool:
        """Return whether a handler may get `received` now. `received` is the first message of `buffer`."""
        if self._is_isolated:
            return False
        if received.was_lost:
            if self._running_count and self._isolated_next is None:
                self._isolated_next = buffer
            return not self._running_count
        waiting = self._isolated_next
        if waiting is None or waiting is buffer:
            return True
        if waiting.waits_for_isolation:
            return False
        # The message was released meanwhile.
        self._isolated_next = None
        return True

    def start_handling(self, received: ReceivedMessage, buffer: SharedReceiveBuffer) -> None:
        self._running_count += 1
        self._is_isolated = received.was_lost
        if self._isolated_next is buffer:
            self._isolated_next = None

    def on_settled(self, count: int) -> None:
        """Note that `count` handlers have settled their messages."""
        others_wait = self._is_isolated or self._isolated_next is not None
        self._running_count -= count
        self._is_isolated = False
        if others_wait:
            for buffer in list(self.buffers):
                buffer.wake_all()


class SharedReceiveBuffer(ReceiveBuffer):
    """Buffer for several handlers. It never delivers two messages of one group at the same time. A message whose last
    attempt ended with a lost connection is processed alone."""

    is_shared = True

    def __init__(self, isolation: HandlerIsolation) -> None:
        """Make a buffer. All buffers of an event loop, or of a connection for threads, share one `isolation`."""
        super().__init__()
        self._isolation = isolation
        isolation.buffers.add(self)
        self._busy_groups: set[str] = set()
        """Groups of the messages that handlers hold now."""
        self._withheld_by_group: dict[str, list[ReceivedMessage]] = {}
        """Messages, by group, that wait because a handler holds another message of their group."""

    @property
    def waits_for_isolation(self) -> bool:
        first = super().first()
        return first is not None and first.was_lost and not self.is_closed

    def first(self, subscription: Subscription | None = None) -> ReceivedMessage | None:
        while (first := super().first(subscription)) is not None:
            if not self._isolation.may_start_handling(first, self):
                return None
            group = first.group
            if not group or group not in self._busy_groups:
                return first
            first.subscription.pop()
            self._withheld_by_group.setdefault(group, []).append(first)
        return None

    def pop(self, received: ReceivedMessage) -> None:
        super().pop(received)
        self._isolation.start_handling(received, self)
        if received.group:
            self._busy_groups.add(received.group)

    def on_settled(self, messages: Iterable[ReceivedMessage]) -> None:
        count = 0
        for received in messages:
            count += 1
            if received.group:
                self._busy_groups.discard(received.group)
                for withheld in self._withheld_by_group.pop(received.group, ()):
                    withheld.subscription.push(withheld)
        # Each waiting caller may find a message now.
        self._isolation.on_settled(count)
        self.wake_all()

    def on_cleared(self) -> None:
        self._withheld_by_group.clear()

    @property
    def withheld_count(self) -> int:  # type: ignore[override]
        return sum(map(len, self._withheld_by_group.values()))
