"""What the rooms of the core share: the connection that is there, and what whoever has the socket does for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from truenext.client.core.link import Link
from truenext.client.core.waiting import DelayedCalls

CONNECTED_TEXT = "connected to %(url)s"
"""Reported when a first attempt to connect succeeds. Texts of reports name the facts that they say."""

NO_SPACE_TEXT = "messages wait until %(url)s takes them: %(error)s"
"""Reported once a minute while a broker has no room for what is sent outside transactions."""

NOT_CONFIRMED_TEXT = (
    "%(count)s messages to %(url)s were not confirmed before the end of the connection; they may have arrived"
)


@dataclass(slots=True, eq=False, kw_only=True)
class ClientContext:
    clock: Callable[[], float]
    """Seconds, of a clock that does not jump."""
    random: Callable[[], float]
    """Numbers from 0 to 1."""
    flush: Callable[[], bool]
    """Writes what is to be written; whether all of it went."""
    flush_soon: Callable[[], None]
    """The same, before long."""
    report: Callable[[str, dict[str, object]], None]
    """Tells the log of the program what has happened: a constant text, and facts by name. The text has some of them
    (`%(url)s`)."""
    has_owner_ended: Callable[[object], bool]
    """Whether a task or thread will do nothing any more."""
    link: Link | None = None
    """The connection that is there, up or about to be."""
    delayed_calls: DelayedCalls = field(default_factory=DelayedCalls)
    _names: count[int] = field(default_factory=lambda: count(1), init=False)

    def next_unique_name(self) -> str:
        """One that nothing else of this client has."""
        return str(next(self._names))
