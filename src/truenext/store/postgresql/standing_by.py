"""Decision of a broker that stands by: when it takes over.

All functions are pure. A broker that stands by looks at the log every LOOK_S. Between two looks it remembers since when
the last row has been the same. All times are seconds of its own clock (`clock.boottime`): times of other machines
decide nothing.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from truenext.store.postgresql.outcome import Row

LOOK_S = 0.2
"""Pause between two looks of a broker that stands by."""

FREE_S = 1.0
"""Time without a row after which a broker is dead, if no session is marked as its own."""

START_S = 60.0
"""Time after which a broker that has appended nothing since its takeover counts as stopped, if its session is marked. A
start with many messages on a busy machine may take longer than `failover_after_ms`."""

SILENT_SHARE = 0.8
"""Share of `failover_after_ms` after which the active broker is silent, counted from the begin of its last confirmed
append."""

STALE_S = 2.0
"""Age of a broker's row in `member` from which on that broker counts as absent."""


class Origin(NamedTuple):
    """Origin of rows: a database server, and its timeline."""

    system: int
    timeline: int


class Stop(NamedTuple):
    """Clean stop of the last active broker."""

    number: int
    """Number of its last row."""
    heir: str
    """Member name of the broker that takes over; "" names none."""


class Look(NamedTuple):
    """State of the log, as one look has shown it."""

    began: float
    ended: float
    session: int
    """Number of the own connection. Each new connection has another number."""
    last: Row
    is_marked: bool
    """True if another session is marked as that of the active broker."""
    stop: Stop | None
    active: str
    """Place of the last active broker; "" if it is unknown, as for one of the first layout."""
    failover_after_s: float
    """Setting of the last active broker; 0.0 if it is unknown."""
    is_starting: bool = False
    """True if the last active broker has appended nothing since its takeover, but the row that drops transients."""
    waits_for_standby: bool = False
    """True if a session that has written to the log waits for PostgreSQL's synchronous standby."""


class Watch(NamedTuple):
    """Memory of a broker that stands by, between two looks."""

    last: Row
    since: float
    """End of the look that was the first one to show `last`, the first one of the connection, or the last one that
    has shown the active broker and a wait for the synchronous standby."""
    session: int
    is_trusted: bool
    """True if a free mark means a dead broker, and a stop the last one. After a lost connection they do not:
    PostgreSQL may be back before the active broker has its session again, and may have forgotten rows."""


def first_watch(look: Look) -> Watch:
    """Return the memory after the first look of a broker that has just started."""
    return Watch(look.last, look.ended, look.session, is_trusted=True)


def next_watch(before: Watch, look: Look) -> Watch:
    """Return the memory after a further look."""
    if look.session != before.session:
        # A row that is new may have been appended before the connection was lost.
        return Watch(look.last, look.ended, look.session, is_trusted=look.is_marked)
    if look.last != before.last:
        return Watch(look.last, look.ended, look.session, is_trusted=True)
    if look.waits_for_standby and look.is_marked:
        # The row of that session is shown only after the wait, and a takeover would wait, too.
        before = before._replace(since=look.ended)
    return before._replace(is_trusted=True) if look.is_marked else before


class Decision(Enum):
    """Decision of a broker that stands by, after a look."""

    WAIT = 1
    TAKE_OVER = 2
    END_AND_TAKE_OVER = 3
    """Take over after the end of the session that is marked as that of the active broker."""


def decide(watch: Watch, look: Look, *, name: str, place: str, failover_after_s: float, needs_repair: bool) -> Decision:
    """Return what the broker does after `look`; `watch` is its memory with that look.

    `name`, `place` and `failover_after_s` are its own. With `needs_repair` its folder has rows that the log has lost:
    then it waits for a broker that has more of them.
    """
    if look.is_marked and not look.active:
        # A broker of the first layout, which appends no row without need.
        return Decision.WAIT
    quiet_s = look.began - watch.since
    start_s = START_S if look.is_marked and look.is_starting else 0.0
    if quiet_s >= max(failover_after_s, look.failover_after_s, start_s):
        return Decision.END_AND_TAKE_OVER if look.is_marked else Decision.TAKE_OVER
    # In a new session the log may be a backup, whose stop or last broker is not the last one.
    if needs_repair or look.is_marked or not watch.is_trusted:
        return Decision.WAIT
    if look.stop is not None and look.stop.number == look.last.number:
        is_named = look.stop.heir in ("", name)
    else:
        is_named = look.active == place
    return Decision.TAKE_OVER if is_named or quiet_s >= FREE_S else Decision.WAIT


def silent_from(append_began: float, failover_after_s: float) -> float:
    """Return the time from which the active broker is silent, if its last confirmed append began at `append_began`."""
    return append_began + SILENT_SHARE * failover_after_s
