"""Security log: logins, refusals and control requests, with user and address. Source: docs/security.md, "The log"

A client can cause any number of these events. So only EVENTS_PER_SECOND_MAX events of each address are logged in a
second; further events are only counted. No text that a client has sent before its login is logged.

Beside the log, the last events are remembered for the control request `security`, whatever the level of the log is;
but not requests that only read, which tools make in great numbers.
"""

import logging
from collections import Counter
from collections.abc import Callable
from operator import attrgetter

import msgspec

from truenext.model.control_answers import SecurityEvent
from truenext.model.limits import SECURITY_EVENTS_MAX

logger = logging.getLogger("truenext.security")

VERB = "security"

EVENTS_PER_SECOND_MAX = 10
"""Events of one address that are logged in a second."""


TEXT_LENGTH_MAX = 1000
"""Characters of a text that is remembered."""

_KINDS = {
    "request refused": "refusal",
    "connection ended": "refusal",
    "login failed": "failed login",
    "TLS failed": "failed login",
    "control request": "control request",
}
"""Kind of each event that is remembered: as many of each kind as if there were no other."""


class RecentEvents:
    """Last events of each kind. Equal ones are one, so that many of them push no others out."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        """`now_ms` returns milliseconds since the epoch."""
        self._now_ms = now_ms
        self._events: dict[str, dict[tuple[str, str, str, str], SecurityEvent]] = {
            kind: {} for kind in dict.fromkeys(_KINDS.values())
        }
        """Events of each kind, the latest last."""

    def add(self, event: str, user: str, address: str, text: str) -> None:
        """Add an event of one of the kinds; others are ignored."""
        kind = _KINDS.get(event)
        if kind is None:
            return
        events, now_ms, key = self._events[kind], self._now_ms(), (event, user, address, text[:TEXT_LENGTH_MAX])
        found = events.pop(key, None)
        if found is None:
            found = SecurityEvent(now_ms, *key, 0, now_ms)
            if len(events) == SECURITY_EVENTS_MAX:
                del events[next(iter(events))]
        found.at = now_ms
        found.count += 1
        events[key] = found

    def report(self) -> bytes:
        """Report the last refusals, failed logins and requested changes.

        Returns a list of SecurityEvent as JSON, the latest first.
        """
        events = [event for kind in self._events.values() for event in reversed(kind.values())]
        return msgspec.json.encode(sorted(events, key=attrgetter("at"), reverse=True))


class SecurityLog:
    def __init__(self, time: Callable[[], float], now_ms: Callable[[], int]) -> None:
        """`time` returns seconds of a clock that does not jump, `now_ms` milliseconds since the epoch."""
        self._time = time
        self.recent = RecentEvents(now_ms)
        self._second = 0
        self._counts: Counter[str] = Counter()
        """Events of each address in the current second."""
        self.totals: Counter[str] = Counter()
        """Number of all events by their text, also of those that are not logged."""

    def log(self, level: int, text: str, *, address: str, user: str, **fields: object) -> None:
        """Log and remember an event. `user` is "" if the client has named no user, and "unknown" if the broker has no
        such user."""
        self.recent.add(text, user, address, _describe(fields))
        self.log_only(level, text, address=address, user=user, **fields)

    def log_only(self, level: int, text: str, *, address: str, user: str, **fields: object) -> None:
        """Log an event as `log` does, but do not remember the event."""
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


def _describe(fields: dict[str, object]) -> str:
    """Return the reason among the fields of an event; else the values of all fields that are not empty."""
    return str(fields.get("reason") or " ".join(str(value) for value in fields.values() if value))
