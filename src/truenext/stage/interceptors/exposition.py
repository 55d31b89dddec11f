"""Metrics in the text format of Prometheus.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/, "Text-based format"
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MetricKind: TypeAlias = Literal["counter", "gauge", "histogram"]


class Sample(NamedTuple):
    labels: Mapping[str, str]
    value: float


class HistogramSample(NamedTuple):
    labels: Mapping[str, str]
    bounds: Sequence[float]
    counts: Sequence[int]
    """Number of values in each bucket: those above the bound of the bucket before, up to the bucket's own bound. The
    last bucket has no bound."""
    total: float
    """Sum of all observed values."""


def format_metric(name: str, kind: MetricKind, about: str, metrics: Iterable[Sample | HistogramSample]) -> str:
    """Return the lines of one metric. `about` is its help text: one line without a backslash."""
    lines = [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
    for metric in metrics:
        lines += _histogram(name, metric) if isinstance(metric, HistogramSample) else [_line(name, metric)]
    return "".join(f"{line}\n" for line in lines)


def _histogram(name: str, histogram: HistogramSample) -> Iterator[str]:
    """Yield the lines of a histogram. In this format the count of a bucket includes the counts of all smaller
    buckets."""
    cumulated = list(accumulate(histogram.counts))
    bounds = [*map(repr, histogram.bounds), "+Inf"]
    for bound, count in zip(bounds, cumulated, strict=True):
        yield _line(f"{name}_bucket", Sample({**histogram.labels, "le": bound}, count))
    yield _line(f"{name}_sum", Sample(histogram.labels, histogram.total))
    yield _line(f"{name}_count", Sample(histogram.labels, cumulated[-1]))


def _line(name: str, sample: Sample) -> str:
    labels = ",".join(f'{label}="{_escaped(value)}"' for label, value in sample.labels.items())
    return f"{name}{{{labels}}} {sample.value!r}" if labels else f"{name} {sample.value!r}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
