"""Health of a connection and of its consumers, which a program can show to operators."""

from __future__ import annotations

import msgspec

from truenext.client.core.buffer import Subscription
from truenext.client.core.client import Client
from truenext.errors import ClosedError


class ConsumerHealth(msgspec.Struct, frozen=True):
    destination: str
    """Destination of the consumer."""
    buffered: int
    """Number of buffered messages."""
    held: int
    """Number of messages that the program holds. Messages that an open transaction has acknowledged do not count."""
    state: str
    """`open`, `opening`, `paused`, `suspended` or `ended`. `suspended`: the program has requested no message for a
    while."""


class Health(msgspec.Struct, frozen=True):
    state: str
    """State of the connection: `connected`, `connecting` or `closed`."""
    since_s: float
    """Seconds since the connection came up or was lost."""
    reconnects: int
    """Number of times that the connection was lost and opened again."""
    silent_s: float
    """Seconds since the broker has last sent a byte; 0 without a connection."""
    unconfirmed: int
    """Number of sends that are not confirmed."""
    transactions: int
    """Number of transactions that are open, or whose outcome is not known."""
    consumers: list[ConsumerHealth]
    """Consumers that are not closed."""
    error: str
    """Reason why the connection is closed; empty while it is open, or if the program has closed it."""
    control_only: bool
    """True if the broker takes only control requests on this connection, such as on one that began in a drain."""


def make_health(client: Client) -> Health:
    now = client.clock()
    link = client.link
    is_up = link is not None and link.is_up
    return Health(
        state="closed" if client.error is not None else "connected" if is_up else "connecting",
        since_s=now - client.connection_state_since,
        reconnects=max(0, client.reconnect_count),
        silent_s=0.0 if link is None else now - link.read_at,
        unconfirmed=client.send_buffer.unconfirmed_count,
        transactions=len(client.transactions),
        consumers=[
            ConsumerHealth(
                each.options.destination,
                len(each) + each.buffer.withheld_count,
                len(each.held_by_ack_id),
                _consumer_state(each),
            )
            for each in client.subscriptions.by_id.values()
        ],
        error="" if client.error is None or isinstance(client.error, ClosedError) else str(client.error),
        control_only=is_up and link is not None and link.is_control_only,
    )


def _consumer_state(subscription: Subscription) -> str:
    if subscription.is_closed:
        return "ended"
    if subscription.is_paused:
        return "paused"
    if not subscription.is_open:
        return "opening"
    return "suspended" if subscription.is_suspended else "open"
