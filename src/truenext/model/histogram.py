"""Histogram: counts measured values in buckets with fixed bounds."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

SHORT_TIME_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of the buckets for commits and delays of the event loop, in seconds."""


class HistogramCounter:
    __slots__ = ("bounds", "buckets", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        """Upper bounds of the buckets, in ascending order. The last bucket has no bound."""
        self.buckets = [0] * (len(bounds) + 1)
        """Number of values in each bucket: above the bound before it, up to its own bound."""
        self.sum = 0.0
        """Sum of all values."""

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.buckets)

    def add(self, value: float) -> None:
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.sum += value


def cumulative_buckets(bounds: Sequence[float], buckets: Iterable[int]) -> list[tuple[str, float]]:
    """Return the buckets of a histogram as Prometheus has them: each counts the values of all smaller buckets, too.

    >>> cumulative_buckets((0.5, 1), (1, 2, 3))
    [('0.5', 1), ('1', 3), ('+Inf', 6)]
    """
    return list(zip([*map(repr, bounds), "+Inf"], accumulate(buckets), strict=True))
