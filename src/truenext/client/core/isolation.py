"""Which handlers run beside each other: with a message whose last attempt was a lost connection, nothing else does.

Such a message may be what ends processes. What has been handed out beside it would be charged with that, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

from truenext.client.core.buffer import ReceiveBuffer, ReceivedMessage, Subscription


class HandlerIsolation:
    """Of all handlers of a process: of each `consume`, and of each connection that may be asked in the same thread."""

    __slots__ = ("_buffers", "_is_isolated", "_isolated_next", "_running_count")

    def __init__(self) -> None:
        self._running_count = 0
        """Messages that handlers have."""
        self._is_isolated = False
        self._isolated_next: SharedReceiveBuffer | None = None
        """What it has next is to run alone, as soon as nothing else runs: so nothing else begins."""
        self._buffers: WeakSet[SharedReceiveBuffer] = WeakSet()

    def add_buffer(self, buffer: SharedReceiveBuffer) -> None:
        self._buffers.add(buffer)

    def may_start_handling(self, received: ReceivedMessage, buffer: SharedReceiveBuffer) -> bool:
        """It is the first of `buffer`."""
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
        # It was given back meanwhile.
        self._isolated_next = None
        return True

    def start_handling(self, received: ReceivedMessage, buffer: SharedReceiveBuffer) -> None:
        self._running_count += 1
        self._is_isolated = received.was_lost
        if self._isolated_next is buffer:
            self._isolated_next = None

    def on_settled(self, count: int) -> None:
        """So many handlers have no message any more."""
        others_wait = self._is_isolated or self._isolated_next is not None
        self._running_count -= count
        self._is_isolated = False
        if others_wait:
            for buffer in list(self._buffers):
                buffer.wake_all()


class SharedReceiveBuffer(ReceiveBuffer):
    """That of several handlers: never two messages of a group at once, and with a message whose last attempt was a lost
    connection nothing else, so that what ends a process takes no neighbour along."""

    is_shared = True

    def __init__(self, isolation: HandlerIsolation) -> None:
        """`isolation` is of all handlers of the process."""
        super().__init__()
        self._isolation = isolation
        isolation.add_buffer(self)
        self._busy_groups: set[str] = set()
        """Those of which a handler has a message."""
        self._withheld_by_group: dict[str, list[ReceivedMessage]] = {}
        """What waits for one of its group, by group."""

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
        # Each of those who wait may find something now.
        self._isolation.on_settled(count)
        self.wake_all()

    def on_cleared(self) -> None:
        self._withheld_by_group.clear()

    @property
    def withheld_count(self) -> int:  # type: ignore[override]
        return sum(map(len, self._withheld_by_group.values()))
