"""How a connection is, for whoever runs the program."""

from __future__ import annotations

import msgspec

from truenext.client.core.client import Client
from truenext.errors import ClosedError


class ConsumerHealth(msgspec.Struct, frozen=True):
    destination: str
    """Where it takes from."""
    buffered: int
    """Messages that have come and nobody has taken."""
    held: int
    """Messages that the program has, without those that open transactions have acknowledged."""
    state: str
    """`open`, `opening`, `paused`, `suspended` (nobody has asked for a while), or `ended`."""


class Health(msgspec.Struct, frozen=True):
    state: str
    """`connected`, `connecting` or `closed`."""
    since_s: float
    """For so many seconds."""
    reconnects: int
    """How often a connection that was lost was connected anew."""
    silent_s: float
    """Seconds since anything came from the broker."""
    unconfirmed: int
    """Sends that are not confirmed."""
    transactions: int
    """That have not ended."""
    consumers: list[ConsumerHealth]
    """Those that are not closed."""
    error: str
    """Why it is closed, if something else than the program has closed it."""


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
                _consumer_state(each.is_closed, each.is_open, each.is_paused, each.is_suspended),
            )
            for each in client.subscriptions.by_id.values()
        ],
        error="" if client.error is None or isinstance(client.error, ClosedError) else str(client.error),
    )


def _consumer_state(is_closed: bool, is_open: bool, is_paused: bool, is_suspended: bool) -> str:
    if is_closed:
        return "ended"
    if is_paused:
        return "paused"
    if not is_open:
        return "opening"
    return "suspended" if is_suspended else "open"
