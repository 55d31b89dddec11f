"""What the rooms of the core share: the connection that is there, and what whoever has the socket does for them."""

from __future__ import annotations

from collections.abc import Callable
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


class ClientContext:
    __slots__ = (
        "_names",
        "clock",
        "delayed_calls",
        "flush",
        "flush_soon",
        "has_owner_ended",
        "link",
        "random",
        "report",
    )

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        random: Callable[[], float],
        flush: Callable[[], bool],
        flush_soon: Callable[[], None],
        report: Callable[[str, dict[str, object]], None],
        has_owner_ended: Callable[[object], bool],
    ) -> None:
        self.clock = clock
        """Seconds, of a clock that does not jump."""
        self.random = random
        """Numbers from 0 to 1."""
        self.flush = flush
        """Writes what is to be written; whether all of it went."""
        self.flush_soon = flush_soon
        """The same, before long."""
        self.report = report
        """Tells the log of the program what has happened: a constant text, and facts by name. The text has some of them
        (`%(url)s`)."""
        self.has_owner_ended = has_owner_ended
        """Whether a task or thread will do nothing any more."""
        self.link: Link | None = None
        """The connection that is there, up or about to be."""
        self.delayed_calls = DelayedCalls()
        self._names = count(1)

    def next_unique_name(self) -> str:
        """One that nothing else of this client has."""
        return str(next(self._names))
