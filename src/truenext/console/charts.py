"""Series of figures of the last hour, for charts. Each series is a ring of fixed size, so that memory is bounded.

Pure: callers pass the time.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

STEP_S = 5
"""Seconds between two values of a series."""
POINTS = 720
"""Number of values of a series: those of an hour."""
BYTES_MAX = 8 * 1024 * 1024
"""Largest number of bytes of all series. The series that was written longest ago goes first. Series of queues do not
push out one that is still written: otherwise each of many would go before its second value."""
_EMPTY = array("f", [math.nan]) * POINTS
_SERIES_BYTES = POINTS * 4 + 400
"""Bytes of one series in memory, without its name."""
_GAP_S = 60.0
"""Seconds without a value after which no rate is made of two values of a counter."""

Name = tuple[str, str, str]
"""Scope, queue and figure. The queue "" stands for all queues."""


class _Series:
    __slots__ = ("before", "last_tick", "values", "written_s")

    def __init__(self, tick: int) -> None:
        self.values = array("f", _EMPTY)
        self.last_tick = tick
        self.written_s = 0.0
        self.before: tuple[float, float] | None = None
        """Time and value of a counter when it was noted last."""

    def set(self, tick: int, value: float) -> None:
        for skipped in range(max(self.last_tick + 1, tick - POINTS + 1), tick):
            self.values[skipped % POINTS] = math.nan
        self.values[tick % POINTS] = value
        self.last_tick = max(tick, self.last_tick)


class Charts:
    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._series: OrderedDict[Name, _Series] = OrderedDict()

    @property
    def bytes(self) -> int:
        """Number of bytes of all series, about."""
        return self._bytes

    def set(self, name: Name, value: float, now_s: float) -> None:
        """Note the value of a figure."""
        series = self._touch(name, now_s)
        if series is not None:
            series.set(int(now_s // STEP_S), value)

    def count(self, name: Name, value: float, now_s: float) -> float | None:
        """Note the value of a counter: the series has its rate, in a second. Return the rate; None if it is unknown,
        because this is the first value, the last one is too old, or the counter has begun anew."""
        series = self._touch(name, now_s)
        if series is None:
            return None
        before, series.before = series.before, (now_s, value)
        if before is None or not 0 < now_s - before[0] <= _GAP_S or value < before[1]:
            return None
        rate = (value - before[1]) / (now_s - before[0])
        series.set(int(now_s // STEP_S), rate)
        return rate

    def read(self, names: Sequence[Name], now_s: float) -> tuple[list[int], list[list[float | None]]]:
        """Return the times of the last hour, in seconds, and the values of each series at these times."""
        last = int(now_s // STEP_S)
        ticks = range(last - POINTS + 1, last + 1)
        return [tick * STEP_S for tick in ticks], [self._values(name, ticks) for name in names]

    def increase_since(self, name: Name, seconds: float, now_s: float) -> float:
        """Return by how much the values of a series have increased within the last `seconds`. The series is of a
        counter that was noted with `set`: where a value is lower than the one before, the counter has begun anew."""
        last = int(now_s // STEP_S)
        values = self._values(name, range(last - int(seconds // STEP_S), last + 1))
        known = [value for value in values if value is not None]
        return sum(after - before if after >= before else after for before, after in pairwise(known))

    def ago(self, name: Name, seconds: float, now_s: float) -> float | None:
        """Return the value of a series some time ago; None if it is not known."""
        tick = int((now_s - seconds) // STEP_S)
        return self._values(name, range(tick, tick + 1))[0]

    def _values(self, name: Name, ticks: range) -> list[float | None]:
        series = self._series.get(name)
        if series is None:
            return [None] * len(ticks)
        first = series.last_tick - POINTS
        values = series.values
        return [
            None if not first < tick <= series.last_tick or math.isnan(value := values[tick % POINTS]) else value
            for tick in ticks
        ]

    def _touch(self, name: Name, now_s: float) -> _Series | None:
        """Return the series, which is made if there is none; None if there is no place for it."""
        series = self._series.get(name)
        if series is None:
            if not self._make_place(name, now_s):
                return None
            series = self._series[name] = _Series(int(now_s // STEP_S))
            self._bytes += _size(name)
        series.written_s = now_s
        self._series.move_to_end(name)
        return series

    def _make_place(self, name: Name, now_s: float) -> bool:
        is_of_a_queue = name[1] != ""
        while self._series and self._bytes + _size(name) > self._bytes_max:
            oldest = next(iter(self._series))
            if is_of_a_queue and now_s - self._series[oldest].written_s < _GAP_S:
                return False
            del self._series[oldest]
            self._bytes -= _size(oldest)
        return True


def _size(name: Name) -> int:
    return _SERIES_BYTES + sum(map(len, name)) * 4
