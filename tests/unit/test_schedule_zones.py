"""Tests of cron expressions in a time zone, against a naive oracle that looks at the zone's clock each minute."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.mutation import mutated
from truenext.errors import RemoteProtocolError
from truenext.model import schedule as schedule_module
from truenext.model.schedule import Schedule, check_schedule, fire_schedule, start_schedule

MINUTE = timedelta(minutes=1)
ZONES = [
    *("Europe/Oslo", "America/New_York", "Asia/Kolkata", "UTC"),
    "America/Santiago",  # skips midnight
    "Australia/Lord_Howe",  # by half an hour
    "Antarctica/Troll",  # by two hours
    "Pacific/Apia",  # skipped 30 December 2011
    "Africa/Casablanca",  # twice a year around Ramadan
]


@cache
def _changes(zone: str) -> list[datetime]:
    """Return the hours from 2005 to 2036 in which the zone's clock is set, and two others."""
    at, found = datetime(2005, 1, 1, tzinfo=UTC), [datetime(2007, 7, 1, tzinfo=UTC), datetime(2035, 12, 31, tzinfo=UTC)]
    while at.year < 2037:
        later = at + timedelta(hours=6)
        if at.astimezone(ZoneInfo(zone)).utcoffset() != later.astimezone(ZoneInfo(zone)).utcoffset():
            found.append(at)
        at = later
    return found


class Cron:
    """Cron expression of minutes, hours and days of the week, each a set of numbers."""

    def __init__(self, minutes: set[int], hours: set[int], weekdays: set[int]) -> None:
        self._minutes, self._hours, self._weekdays = minutes, hours, weekdays
        self.text = f"{_field(minutes, 60)} {_field(hours, 24)} * * {_field(weekdays, 7)}"

    def is_met(self, local: datetime) -> bool:
        return (
            local.minute in self._minutes
            and local.hour in self._hours
            and (not self._weekdays or local.isoweekday() % 7 in self._weekdays)
        )


def _field(numbers: set[int], count: int) -> str:
    return "*" if len(numbers) in (0, count) else ",".join(map(str, sorted(numbers)))


def _minutes_after(start: datetime, zone: str) -> Iterator[tuple[datetime, list[datetime]]]:
    """Yield each minute after `start`, and the local times that have come with it: those up to what the zone's clock
    shows, but for those that came before."""
    at = start.replace(second=0, microsecond=0) - timedelta(hours=50)
    latest = at.astimezone(ZoneInfo(zone)).replace(tzinfo=None)
    while True:
        at += MINUTE
        shown = at.astimezone(ZoneInfo(zone)).replace(tzinfo=None)
        come = []
        while latest < shown:
            latest += MINUTE
            come.append(latest)
        if at > start:
            yield at, come


def _expected(cron: Cron, zone: str, start: datetime, until: datetime) -> list[datetime]:
    hits: list[datetime] = []
    for at, come in _minutes_after(start, zone):
        if at > until:
            return hits
        if any(map(cron.is_met, come)):
            hits.append(at)
    raise AssertionError("minutes have no end")


def _actual(cron: Cron, zone: str, start: datetime, until: datetime) -> list[datetime]:
    hits: list[datetime] = []
    following = start_schedule(check_schedule(Schedule(cron=cron.text, zone=zone)), int(start.timestamp() * 1000))
    while following is not None and (at := datetime.fromtimestamp(following.due_ms / 1000, UTC)) <= until:
        hits.append(at)
        is_sent, (following,) = fire_schedule(following, following.due_ms)
        assert is_sent and following.zone == zone
    return hits


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Cron, str, datetime]:
    cron = Cron(
        draw(
            st.sampled_from([set(range(60)), set(range(0, 60, 15))])
            | st.sets(st.integers(0, 59), min_size=1, max_size=3)
        ),
        draw(st.just(set(range(24))) | st.sets(st.integers(0, 4) | st.integers(0, 23), min_size=1, max_size=4)),
        draw(st.just(set()) | st.sets(st.integers(0, 6), min_size=1, max_size=6)),
    )
    zone = draw(st.sampled_from(ZONES))
    start = draw(st.sampled_from(_changes(zone))) + timedelta(seconds=draw(st.integers(-30 * 3600, 10 * 3600)))
    return cron, zone, start


def _check(case: tuple[Cron, str, datetime]) -> None:
    cron, zone, start = case
    until = start + timedelta(hours=40)
    assert _actual(cron, zone, start, until) == _expected(cron, zone, start, until), (cron.text, zone, start)


@settings(deadline=None)
@given(_cases())
def test_cron_in_a_zone_fires_as_the_naive_oracle_says(case: tuple[Cron, str, datetime]) -> None:
    # C14.11
    _check(case)


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        # A time that is skipped comes as much later as the clock was set forward.
        ("_first_shown", "if moment.astimezone(zone).replace(tzinfo=None) == local:", "if True:"),
        # A time that is shown twice comes the second time.
        ("_first_shown", "local.replace(tzinfo=zone)", "local.replace(tzinfo=zone, fold=1)"),
        # A time that is shown twice comes both times.
        (
            "_next_hit",
            "if hit_ms > now_ms:",
            "hit_ms = max(hit_ms, now_ms // 60_000 * 60_000 + 60_000)\n        if True:",
        ),
        # Times that are skipped are left out.
        ("_next_hit", "+ timedelta(minutes=1)", "+ timedelta(minutes=61)"),
        ("_next_hit", "find_zone(zone) if zone else None", "None"),
    ],
)
def test_planted_fault_in_the_time_zone_is_caught(
    function: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_module, function, mutated(getattr(schedule_module, function), old, new))
    every_minute = Cron(set(range(60)), set(range(24)), set())
    nightly = Cron({30}, {0, 1, 2, 3}, set())
    with pytest.raises(AssertionError):
        for cron in (nightly, every_minute):
            for change in _changes("Europe/Oslo")[:6]:
                for hours in (-20, 0, 1.25, 7):
                    _check((cron, "Europe/Oslo", change + timedelta(hours=hours)))


@pytest.mark.parametrize(
    ("cron", "zone", "start", "hits"),
    [
        # Set forward from 2 to 3 at 01:00 UTC.
        ("30 2 * * *", "Europe/Oslo", "2026-03-28T12:00", ["2026-03-29T01:00", "2026-03-30T00:30"]),
        ("*/30 2,3 * * *", "Europe/Oslo", "2026-03-28T12:00", ["2026-03-29T01:00", "2026-03-29T01:30"]),
        # Set back from 3 to 2 at 01:00 UTC.
        ("30 2 * * *", "Europe/Oslo", "2026-10-24T12:00", ["2026-10-25T00:30", "2026-10-26T01:30"]),
        ("30 2 * * *", "Europe/Oslo", "2026-10-25T00:45", ["2026-10-26T01:30"]),
        ("0 * * * *", "Europe/Oslo", "2026-10-24T23:30", ["2026-10-25T00:00", "2026-10-25T02:00"]),
        # Midnight is skipped, so the day begins at 1.
        ("0 0 * * *", "America/Santiago", "2026-09-05T12:00", ["2026-09-06T04:00", "2026-09-07T03:00"]),
        # 30 December 2011 did not come there: what it would have had comes once.
        ("0 12 * * *", "Pacific/Apia", "2011-12-30T00:00", ["2011-12-30T10:00", "2011-12-30T22:00"]),
    ],
)
def test_skipped_or_repeated_local_time_fires_once(cron: str, zone: str, start: str, hits: list[str]) -> None:
    # C14.11
    following = start_schedule(Schedule(cron=cron, zone=zone), _ms(start))
    for hit in hits:
        assert following is not None and following.due_ms == _ms(hit)
        _, (following,) = fire_schedule(following, following.due_ms)


def _ms(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


def test_hits_of_a_zone_that_passed_meanwhile_send_one_message() -> None:
    # C14.5
    first = start_schedule(Schedule(cron="30 12 * * *", zone="Asia/Tokyo"), _ms("2026-01-01T00:00"))
    assert first is not None and first.due_ms == _ms("2026-01-01T03:30")
    is_sent, rest = fire_schedule(first, _ms("2026-01-05T00:00"))
    assert is_sent and [each.due_ms for each in rest] == [_ms("2026-01-05T03:30")]


@pytest.mark.parametrize("name", ["Europe/Olso", "Europe", "../../etc/passwd", "zone.tab", "\0", "é", "x" * 1000])
def test_unknown_zone_is_refused_by_name(name: str) -> None:
    # C14.11
    with pytest.raises(RemoteProtocolError, match=r"AMQ_SCHEDULED_ZONE .* is not a time zone") as error:
        check_schedule(Schedule(cron="0 3 * * *", zone=name))
    assert repr(name[:100]) in str(error.value)


def test_zone_without_a_cron_expression_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="AMQ_SCHEDULED_ZONE is for AMQ_SCHEDULED_CRON"):
        check_schedule(Schedule(delay_ms=5, zone="Europe/Oslo"))


def test_zone_that_a_restarted_broker_does_not_know_is_utc() -> None:
    """The send is not lost."""
    first = start_schedule(Schedule(cron="30 12 * * *", zone="Mars/Olympus"), _ms("2026-01-01T00:00"))
    assert first is not None and first.due_ms == _ms("2026-01-01T12:30")
