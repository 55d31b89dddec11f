"""Context that all parts of client/core share: the current link, and functions that the driver provides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from truenext.client.core.link import Link
from truenext.client.core.waiting import DelayedCall, DelayedCalls

CONNECTED_TEXT = "connected to %(url)s"
"""Text for `ClientContext.report`: the first attempt to connect has succeeded."""

ACK_DELAY_S = 0.001
"""Seconds that an ACK waits at most for a frame with which it is written."""

NO_SPACE_TEXT = "sends wait until %(url)s has space: %(error)s"
"""Text for `ClientContext.report`, at most once a minute: a broker has no space for sends outside transactions."""

DRAINING_TEXT = "waiting until the drain of %(url)s ends: %(error)s"
"""Text for `ClientContext.report`, at most once a minute: a broker that is being drained has refused the client."""

NOT_CONFIRMED_TEXT = (
    "%(count)s messages to %(url)s were not confirmed before the end of the connection; they may have arrived"
)


@dataclass(slots=True, eq=False, kw_only=True)
class ClientContext:
    clock: Callable[[], float]
    """Returns monotonic time in seconds."""
    random: Callable[[], float]
    """Returns a random number from 0 to 1."""
    flush: Callable[[], bool]
    """Writes pending bytes; returns whether the socket has accepted all of them."""
    flush_soon: Callable[[], None]
    flush_later: Callable[[], None]
    """Writes pending bytes within `ACK_DELAY_S`. In the driver for threads this is later than `flush_soon`, which
    writes at the end of the call."""
    report: Callable[[str, dict[str, object]], None]
    """Logs an event, from a constant text and fields by name. The text names some of the fields, such as `%(url)s`."""
    has_owner_ended: Callable[[object], bool]
    """Returns whether a task or thread has ended."""
    link: Link | None = None
    """Current connection to a broker, logged in or about to log in."""
    delayed_calls: DelayedCalls = field(default_factory=DelayedCalls)
    _names: count[int] = field(default_factory=lambda: count(1), init=False)

    def call_later(self, seconds: float, action: Callable[[], None]) -> DelayedCall:
        return self.delayed_calls.call_at(self.clock() + seconds, action)

    def next_unique_name(self) -> str:
        """Return a name that this client has not used before."""
        return str(next(self._names))
