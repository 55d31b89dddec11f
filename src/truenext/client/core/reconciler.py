"""Reconciler: releases idle buffers. It also compares the client's held messages with the broker's record of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from truenext.client.core.buffer import Subscription
from truenext.client.core.context import ClientContext
from truenext.client.core.link import Link
from truenext.client.core.pending_requests import ConnectionStatus, PendingRequests
from truenext.client.core.subscriptions import Subscriptions
from truenext.errors import ConnectionLost

RELEASE_IDLE_INTERVAL_S = 5.0
"""Seconds between two checks for idle buffers, whose messages are released for other consumers."""
CHECK_INTERVAL_S = 15.0
"""Seconds between two comparisons with the broker, as long as the numbers agree."""
RECHECK_INTERVAL_S = 1.0
CHECKS_MAX = 3
"""Number of repeated comparisons with the same difference after which the connection is closed."""


@dataclass(slots=True, eq=False)
class Reconciler:
    _context: ClientContext
    _subscriptions: Subscriptions
    _requests: PendingRequests
    _end_connection: Callable[[ConnectionLost], None]

    def __post_init__(self) -> None:
        self._context.call_later(RELEASE_IDLE_INTERVAL_S, self._release_idle)

    def _release_idle(self) -> None:
        self._context.call_later(RELEASE_IDLE_INTERVAL_S, self._release_idle)
        link = self._context.link
        if link is None or not link.is_truenext:
            return
        for subscription in self._subscriptions.by_id.values():
            buffer = subscription.buffer
            was_polled, subscription.is_polled = subscription.is_polled, False
            # A suspended subscription may have some, too: redeliveries of messages that the program no longer holds.
            if len(subscription) and not (was_polled or buffer.has_waiter(subscription)):
                self._subscriptions.release([subscription], suspend=True)

    def start_checks(self, link: Link) -> None:
        if link.is_truenext:
            differences: dict[str, tuple[int, int]] = {}
            self._context.call_later(CHECK_INTERVAL_S, lambda: self._compare_with_broker(link, differences, 0))

    def _compare_with_broker(
        self, link: Link, previous_differences: dict[str, tuple[int, int]], same_count: int
    ) -> None:
        """Compare the number of messages that each subscription holds with the broker's number.

        Messages on their way cause a short difference. A lasting difference means that a message was lost on the way;
        then only a new connection helps.
        """
        if self._context.link is not link:
            return

        def on_reply(status: ConnectionStatus) -> None:
            if self._context.link is not link:
                return
            held = {each.id: each.held for each in status.subscriptions}
            both = {
                each.id: (held.get(each.id, -1), _held_count(each))
                for each in self._subscriptions.by_id.values()
                if each.is_open and not each.is_closed
            }
            differences = {name: counts for name, counts in both.items() if counts[0] != counts[1]}
            same = {name: counts for name, counts in differences.items() if previous_differences.get(name) == counts}
            if same and same_count + 1 >= CHECKS_MAX:
                text = "broker and client differ in the number of held messages, by subscription (broker's, client's)"
                self._end_connection(ConnectionLost(f"{text}: {same}"))
                return
            self._context.call_later(
                RECHECK_INTERVAL_S if differences else CHECK_INTERVAL_S,
                lambda: self._compare_with_broker(link, same or differences, same_count + 1 if same else 0),
            )

        if any(not each.is_closed for each in self._subscriptions.by_id.values()):
            self._requests.send_control_request(link, "connection", None, ConnectionStatus, on_reply)
            self._context.flush_soon()
        else:
            self._context.call_later(CHECK_INTERVAL_S, lambda: self._compare_with_broker(link, {}, 0))


def _held_count(subscription: Subscription) -> int:
    """Return how many messages the subscription holds by the client's count: held, buffered or withheld."""
    return len(subscription.held_by_ack_id) + len(subscription) + subscription.buffer.withheld_count
