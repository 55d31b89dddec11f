"""Security log: logins, refusals and control requests, with user and address. Source: docs/security.md, "The log"

A client can cause any number of these events. So only EVENTS_PER_SECOND_MAX events of each address are logged in a
second; further events are only counted. No text that a client has sent before its login is logged.
"""

import logging
from collections import Counter
from collections.abc import Callable

logger = logging.getLogger("truenext.security")

EVENTS_PER_SECOND_MAX = 10
"""Events of one address that are logged in a second."""


class SecurityLog:
    def __init__(self, time: Callable[[], float]) -> None:
        """`time` returns seconds of a clock that does not jump."""
        self._time = time
        self._second = 0
        self._counts: Counter[str] = Counter()
        """Events of each address in the current second."""
        self.totals: Counter[str] = Counter()
        """Number of all events by their text, also of those that are not logged."""

    def log(self, level: int, text: str, *, address: str, user: str, **fields: object) -> None:
        """Log an event. `user` is "" if the client has named no user, and "unknown" if the broker has no such user."""
        self.totals[text] += 1
        if not logger.isEnabledFor(level):
            return
        self.flush()
        self._counts[address] += 1
        if self._counts[address] <= EVENTS_PER_SECOND_MAX:
            logger.log(level, text, extra={"user": user, "client": address} | fields)

    def flush(self) -> None:
        """Log how many events of earlier seconds were only counted; called once a second, or more often."""
        second = int(self._time())
        if second == self._second or not self._counts:
            return
        self._second = second
        counts, self._counts = self._counts, Counter()
        for address, count in counts.items():
            if count > EVENTS_PER_SECOND_MAX:
                extra = {"client": address, "events": count - EVENTS_PER_SECOND_MAX}
                logger.warning("more events of this address were not logged", extra=extra)
