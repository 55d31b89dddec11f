"""Figures as the console's pages show them: counts, rates, sizes, durations, times."""

from datetime import UTC, datetime

from truenext.model.numerals import short_size

ABSENT = "-"
"""Stands for a value that is not known or does not apply."""


def format_count(count: int | None) -> str:
    """Return a whole number with separators of thousands.

    >>> format_count(1234567), format_count(None)
    ('1,234,567', '-')
    """
    return ABSENT if count is None else f"{count:,}"


def format_rate(rate: float | None) -> str:
    """Return a number for each second, with a decimal only below 10.

    >>> format_rate(0), format_rate(0.04), format_rate(3.14), format_rate(1234.5)
    ('0', '< 0.1', '3.1', '1,234')
    """
    if rate is None:
        return ABSENT
    if 0 < rate < 0.1:
        return "< 0.1"
    return f"{rate:,.1f}" if 0 < rate < 10 else f"{rate:,.0f}"


def format_bytes(size: int | None) -> str:
    """Return a number of bytes with three digits and a unit.

    >>> format_bytes(1536), format_bytes(None)
    ('1.5KiB', '-')
    """
    return ABSENT if size is None else short_size(size)


def format_duration(seconds: float | None) -> str:
    """Return a duration in its two largest units.

    >>> format_duration(0.0123), format_duration(1.5), format_duration(75), format_duration(7260)
    ('12 ms', '1.5 s', '1 min 15 s', '2 h 1 min')
    >>> format_duration(86400 * 3), format_duration(None)
    ('3 d 0 h', '-')
    """
    if seconds is None:
        return ABSENT
    if seconds < 0.9995:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def format_time(time_ms: float | None) -> str:
    """Return a time, in milliseconds since 1970, as text in UTC.

    >>> format_time(1_700_000_000_000), format_time(None), format_time(10**18)
    ('2023-11-14 22:13:20', '-', 'no time')
    """
    if time_ms is None:
        return ABSENT
    try:
        return f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        # A client has sent the number.
        return "no time"
