"""Rows that PostgreSQL has forgotten although it had confirmed them: which of them a folder can give back, and which
are lost.

All functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from truenext.errors import ConfigurationError
from truenext.store.changes import decode_changes, takeover_of
from truenext.store.log import LogPosition, Member, Role, next_digest
from truenext.store.postgresql.outcome import NewRow, Row
from truenext.store.postgresql.standing_by import STALE_S, Origin


class End(NamedTuple):
    """End of the log, and that of a folder."""

    last: Row
    """Last row of the log."""
    folder: LogPosition
    """Last frame of the folder."""
    oldest: int
    """Number of the oldest frame that the folder has as bytes."""


class Fault(NamedTuple):
    """Rows that are missing, and cannot be repaired."""

    first: int
    last: int | None
    """None if it is unknown."""
    reason: str
    advice: str = (
        "If another server has these rows, this one is a former primary that has come back, or a restored backup: "
        "stop this one, and name the other one in the URL. Otherwise start the broker that has the rows, or restore "
        "the database with them"
    )


def chain(last: Row, payloads: Iterable[bytes]) -> Iterator[NewRow]:
    """Yield the rows that have these payloads, and follow the row `last`.

    A row has the epoch of its takeover, or else that of the row before. Raises: ValueError if a payload is damaged
    """
    for payload in payloads:
        takeover = takeover_of(decode_changes(memoryview(payload)))
        epoch = last.epoch if takeover is None else takeover.epoch
        new = NewRow(last.number + 1, epoch, next_digest(last.digest, [payload]), last.digest, payload)
        yield new
        last = new.row


def went_other_way(end: End, payloads: Iterable[bytes]) -> bool:
    """Return whether the last row of the log is not in the folder that ends behind it: another broker has gone on.

    `payloads` are those of the folder's frames behind the number of that row. False if the folder no longer has all.
    """
    if end.folder.number <= end.last.number or end.oldest > end.last.number + 1:
        return False
    digest = end.last.digest
    for new in chain(end.last, payloads):
        digest = new.digest
    return digest != end.folder.digest


def fault_of_folder(end: End) -> Fault | None:
    """Return the rows behind the end of the log if the folder no longer has all of them; None if it has."""
    first = end.last.number + 1
    return Fault(first, end.folder.number, f"the folder no longer has row {first}") if end.oldest > first else None


def origin_fault(named: Origin | None, now: Origin | None, last: Row, *, is_replicated: bool) -> Fault | None:
    """Return the rows that may be missing because the database is on another timeline than the one `named` last; None
    if there are none. `last` is the last row of the log; `is_replicated` tells whether its rows were confirmed by a
    standby, too.

    A promoted standby of a replicated log is taken for the synchronous one. An origin that is unknown proves nothing.
    """
    if named is None or now is None or named == now or is_replicated:
        return None
    return Fault(
        last.number + 1,
        None,
        f"PostgreSQL has changed from timeline {named.timeline} to {now.timeline}, and the former primary alone may "
        "have had rows",
        "If the former primary can serve again, name it in --store. If not, first start each other broker that has "
        "its folder: it puts back the rows that it has, and ends, too",
    )


def former_primary_fault(known: Origin | None, now: Origin | None, last: int) -> Fault | None:
    """Return the rows that are missing because the database is on an earlier timeline than the one `known`, which a
    broker's folder has followed; None if it is not. `last` is the number of the last row of the log."""
    if known is None or now is None or known.system != now.system or known.timeline <= now.timeline:
        return None
    return Fault(
        last + 1,
        None,
        f"PostgreSQL is a former primary that has come back, or a restored backup: it is on timeline {now.timeline}, "
        f"and brokers have followed timeline {known.timeline}",
        "Stop this server, and name the present primary in the URL",
    )


def choose_heir(members: Sequence[Member], to: str | None, own: str, numbers: tuple[int, int]) -> str:
    """Return the name of the member that takes over: `to`, or the one that is least behind.

    `own` is the name of the active broker, `numbers` are those of its last row STALE_S ago and now. A member with more
    rows has gone another way.

    Raises: ConfigurationError if no broker stands by, `to` is not one of them, or each of them is further behind or
    ahead, or has not written for STALE_S
    """
    candidates = [each for each in members if each.role is Role.STANDING_BY and each.name != own]
    if not candidates:
        raise ConfigurationError("no broker stands by: start one with the same --store and --schema")
    if to is not None:
        candidates = [each for each in candidates if each.name == to]
        if not candidates:
            raise ConfigurationError(f"no broker with the member name {to!r} stands by: see `truenext store status`")
    obstacles = {each: _obstacle(each, *numbers) for each in candidates}
    heirs = [each for each, obstacle in obstacles.items() if obstacle is None]
    if not heirs:
        raise ConfigurationError("no broker can take over: " + "; ".join(filter(None, obstacles.values())))
    return max(heirs, key=lambda each: each.number).name


def _obstacle(member: Member, number_before: int, number: int) -> str | None:
    """Return why a member that stood by cannot take over, and what to do; None if it can."""
    if member.age_ms >= STALE_S * 1000:
        return f"{member.name!r} has not written for {member.age_ms // 1000:,} seconds: see its log, or start it"
    if member.number > number:
        return f"{member.name!r} has rows that the log has not: see its log, and stop it"
    if member.number < number_before:
        count = number - member.number
        rows = "1 row" if count == 1 else f"{count:,} rows"
        return f"{member.name!r} is {rows} and more than {STALE_S:.0f} seconds behind: wait, or see its log"
    return None
