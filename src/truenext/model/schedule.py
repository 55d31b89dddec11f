"""Schedules: compute when a scheduled send becomes a message, and how often. Times are those of the wall clock, in
milliseconds since the epoch. Cron expressions use UTC, in which every day has 24 hours, or the local time of a zone.

A zone's local time may skip an hour, or show it twice. So a local time is reached when the zone's clock first shows
this time or a later one (docs/contract.md, C14.11).
"""

from bisect import bisect_left
from calendar import monthrange
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from cronsim import CronSim, CronSimError
from msgspec.structs import replace

from truenext.errors import RemoteProtocolError
from truenext.model.limits import CRON_LENGTH_MAX, SCHEDULE_MS_MAX

FOR_EVER = -1
"""Value of `repeat` for a send that repeats without an end."""

_CRON_YEARS = 50
"""Years in which the next time of a cron expression is searched for. The times of most cron expressions repeat within
28 years, and of all within 40."""

_CRON_FIELDS = {
    "minute": "0 to 59",
    "hour": "0 to 23",
    "day of the month": "1 to 31",
    "month": "1 to 12",
    "day of the week": "0 to 7",
}
"""Valid values of each field of a cron expression, by the field's name."""


class Schedule(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Times of a scheduled send that are still to come: the next one, and how often it repeats after that."""

    delay_ms: int = 0
    """Milliseconds from the SEND to the first message; with `cron`, from each time of the cron expression."""
    period_ms: int = 0
    """Milliseconds from one message to the next; above 0 if the send repeats."""
    repeat: int = 0
    """Number of messages after the first one, or FOR_EVER."""
    cron: str = ""
    """Cron expression of five fields; "" if there is none."""
    to: str = ""
    """Address to send to, if that is a topic or a composite destination; "" if it is one queue."""
    ttl_ms: int = 0
    """Time to live of each message in milliseconds; 0 if the message states its expiry, or never expires."""
    due_ms: int = 0
    """Time at which the send is due next. Before the send is accepted: the time in AMQ_SCHEDULED_TIME, or 0."""
    number: int = 0
    """Number by which the send is known, if it has been due before; else 0."""
    zone: str = ""
    """Time zone of the cron expression; "" is UTC."""


def check_schedule(schedule: Schedule) -> Schedule:
    """Check a schedule that a client requests, and return it.

    Raises: RemoteProtocolError if the schedule is invalid, or parts of it contradict each other
    """
    if max(schedule.delay_ms, schedule.period_ms) > SCHEDULE_MS_MAX:
        raise RemoteProtocolError(f"scheduled more than {SCHEDULE_MS_MAX} milliseconds (100 years) from now")
    if schedule.repeat and not schedule.period_ms:
        raise RemoteProtocolError("AMQ_SCHEDULED_REPEAT needs AMQ_SCHEDULED_PERIOD of 1 or more")
    if schedule.due_ms:
        other = "AMQ_SCHEDULED_DELAY" if schedule.delay_ms else "AMQ_SCHEDULED_CRON" if schedule.cron else None
        if other is not None:
            raise RemoteProtocolError(f"AMQ_SCHEDULED_TIME and {other} both set the due time; use one of them")
    if schedule.cron:
        if schedule.repeat == FOR_EVER:
            raise RemoteProtocolError(
                "AMQ_SCHEDULED_REPEAT:-1 with AMQ_SCHEDULED_CRON: each time of the cron would start an endless repeat"
            )
        if len(schedule.cron) > CRON_LENGTH_MAX or len(schedule.cron.split()) != 5:
            raise RemoteProtocolError(
                f"AMQ_SCHEDULED_CRON {schedule.cron[:CRON_LENGTH_MAX]!r} is not five fields of {CRON_LENGTH_MAX} "
                "characters in all, such as 0 8 * * 1-5"
            )
        _check_cron(schedule.cron)
    if schedule.zone:
        if not schedule.cron:
            raise RemoteProtocolError("AMQ_SCHEDULED_ZONE is for AMQ_SCHEDULED_CRON, which is missing")
        if find_zone(schedule.zone) is None:
            raise RemoteProtocolError(
                f"AMQ_SCHEDULED_ZONE {schedule.zone[:100]!r} is not a time zone that this machine knows: "
                "use a name of the IANA database, such as Europe/Oslo, or leave it out for UTC"
            )
    return schedule


def find_zone(name: str) -> tzinfo | None:
    """Return the time zone of the IANA database with this name; None if there is none. The first call for a zone reads
    it from the machine's database, or from the package tzdata."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        # Names such as "Europe" and ".." are folders or no names.
        return None


def _check_cron(cron: str) -> None:
    """Check that a cron expression of five fields is valid, and that a time matches it.

    Raises: RemoteProtocolError, with the faulty field, otherwise
    """
    # The search may start at any time, because the times of a cron expression repeat within 40 years.
    if _next_hit(cron, "", 0) is not None:
        return
    fields = cron.split()
    for number, (name, values) in enumerate(_CRON_FIELDS.items()):
        if _next_hit(" ".join(field if at == number else "*" for at, field in enumerate(fields)), "", 0) is None:
            raise RemoteProtocolError(
                f"AMQ_SCHEDULED_CRON {cron!r} is not a cron expression: its {name} is {fields[number]!r}; "
                f"use * or {values}, and lists, ranges and steps of these"
            )
    raise RemoteProtocolError(
        f"AMQ_SCHEDULED_CRON {cron!r} has no next time: its months have no such day; change its day of the month, "
        "its month or its day of the week"
    )


def start_schedule(schedule: Schedule, now_ms: int) -> Schedule | None:
    """Return the schedule of a send that is accepted now, with the time at which the send is due first. A time in the
    past counts as now. Returns None if the send never becomes due."""
    if schedule.cron:
        due_ms = _next_hit(schedule.cron, schedule.zone, now_ms)
    else:
        due_ms = max(now_ms + schedule.delay_ms, schedule.due_ms)
    return None if due_ms is None else replace(schedule, due_ms=due_ms)


def fire_schedule(schedule: Schedule, now_ms: int) -> tuple[bool, list[Schedule]]:
    """Return whether a schedule that is due sends a message now, and the schedules for later. If several times have
    passed, for example while the broker was down, only one message is sent.

    >>> fire_schedule(Schedule(period_ms=10, repeat=2, due_ms=100), 135)
    (True, [Schedule(delay_ms=0, period_ms=10, repeat=1, cron='', to='', ttl_ms=0, due_ms=140, number=0, zone='')])
    """
    following: list[Schedule] = []
    is_sent = True
    due_ms, period_ms, repeat = schedule.due_ms, schedule.period_ms, schedule.repeat
    if schedule.cron:
        if schedule.delay_ms:
            is_sent = False
            delayed_ms = due_ms + schedule.delay_ms
            following.append(replace(schedule, delay_ms=0, cron="", zone="", due_ms=delayed_ms))
        hit_ms = _next_hit(schedule.cron, schedule.zone, max(due_ms, now_ms))
        if hit_ms is not None:
            following.append(replace(schedule, due_ms=hit_ms))
    if is_sent and repeat:
        left = repeat if repeat == FOR_EVER else repeat - 1
        next_ms = due_ms + period_ms * max(1, (now_ms - due_ms) // period_ms + 1)
        following.append(replace(schedule, delay_ms=0, repeat=left, cron="", zone="", due_ms=next_ms))
    return is_sent, following


def _next_hit(cron: str, zone: str, now_ms: int) -> int | None:
    """Return the first time after `now_ms` that matches a cron expression in a time zone; None if there is none within
    50 years, or the expression is invalid. If the zone is not known any more, UTC is used, so that the send is not
    lost."""
    known = find_zone(zone) if zone else None
    try:
        shown = datetime.fromtimestamp(now_ms // 60_000 * 60, UTC).astimezone(known or UTC)
        # In local time, because the zone's clock may skip the next minute.
        start = shown.replace(tzinfo=None, second=0) + timedelta(minutes=1)
        fields = CronSim(cron, start)
    except (CronSimError, ValueError, OverflowError):
        return None
    # Not by CronSim, which tries day after day: a rare date takes it a hundred times as long.
    for hit in _hits_from(fields, start):
        hit_ms = int((_first_shown(hit, known) if known else hit.replace(tzinfo=UTC)).timestamp()) * 1000
        # A local time that the clock shows twice counts the first time, which may be in the past.
        if hit_ms > now_ms:
            return hit_ms
    return None


def _first_shown(local: datetime, zone: tzinfo) -> datetime:
    """Return the first moment at which a zone's clock shows a local time or a later one."""
    shown = local.replace(tzinfo=zone)
    moment = shown.astimezone(UTC)
    if moment.astimezone(zone).replace(tzinfo=None) == local:
        return moment
    # The clock skips `local`. The skip is between the moments that the offsets before and after it give for `local`.
    before, after = sorted((moment, shown.replace(fold=1).astimezone(UTC)))
    offset_before = before.astimezone(zone).utcoffset()
    seconds = int((after - before).total_seconds())
    skip = bisect_left(range(seconds), True, key=lambda each: _offset(before, each, zone) != offset_before)
    return before + timedelta(seconds=skip)


def _offset(moment: datetime, seconds: int, zone: tzinfo) -> timedelta | None:
    return (moment + timedelta(seconds=seconds)).astimezone(zone).utcoffset()


def _hits_from(fields: CronSim, start: datetime) -> Iterator[datetime]:
    """Yield the local times that match a cron expression, from `start` on."""
    for day in _days_from(fields, start.date()):
        first = (start.hour, start.minute) if day == start.date() else (0, 0)
        for hour in sorted(each for each in fields.hours if each >= first[0]):
            for minute in sorted(fields.minutes):
                if (hour, minute) >= first:
                    yield datetime(day.year, day.month, day.day, hour, minute)


def _days_from(fields: CronSim, start: date) -> Iterator[date]:
    """Yield the days that match a cron expression, from `start` on."""
    # In months that are equally long and begin with the same day of the week, the same days match.
    days_by_kind: dict[tuple[int, int], list[int]] = {}
    for number in range(start.year * 12 + start.month - 1, (start.year + _CRON_YEARS + 1) * 12):
        year, month = number // 12, number % 12 + 1
        if month not in fields.months:
            continue
        kind = monthrange(year, month)
        days = days_by_kind.get(kind)
        if days is None:
            days = [day for day in range(1, kind[1] + 1) if fields.match_day(date(year, month, day))]
            days_by_kind[kind] = days
        first = start.day if (year, month) == (start.year, start.month) else 1
        yield from (date(year, month, day) for day in days if day >= first)
