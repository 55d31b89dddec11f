"""Metrics of stages: executions by outcome, sent messages, and durations."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

import msgspec

from truenext.stage.interceptors.exposition import HistogramSample, MetricKind, Sample, format_metric
from truenext.stage.interceptors.interceptor import (
    Execution,
    ExecutionOutcome,
    ExecutionResult,
    Interceptor,
    MessageToSend,
)

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Upper bounds of the buckets for durations, in seconds, as OpenTelemetry's conventions for messages recommend."""


class DurationHistogram(msgspec.Struct, frozen=True):
    """Histogram of durations: their sum, and the number of durations in each bucket of BUCKETS."""

    seconds: float
    """Sum of the durations in seconds."""
    buckets: tuple[int, ...]
    """Number of durations in each bucket: above the bound before it, up to its own bound. The last bucket has no
    bound."""

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.buckets)


class StageMetrics(msgspec.Struct, frozen=True):
    """Metrics of one stage, counted since the interceptor was made."""

    running: int
    """Number of runs that are under way."""
    outcomes: dict[ExecutionOutcome, int]
    """Number of executions by outcome."""
    sent: int
    """Number of messages that the stage sent, including messages whose transaction was rolled back."""
    run: DurationHistogram
    """Durations `ExecutionResult.run` of all executions, including failed executions."""
    total: DurationHistogram
    """Durations `ExecutionResult.total` of all executions."""


class Metrics(Interceptor):
    """Interceptor that counts executions and durations in the memory of this process. Any thread may call its
    methods."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._stages: defaultdict[tuple[str, str], _StageCounters] = defaultdict(_StageCounters)
        self._sent_outside_stages = 0

    @contextmanager
    def around(self, execution: Execution) -> Iterator[None]:
        with self._lock:
            self._counts(execution).running += 1
        try:
            yield
        finally:
            with self._lock:
                self._counts(execution).running -= 1

    def sending(self, execution: Execution | None, send: MessageToSend) -> None:
        with self._lock:
            if execution is None:
                self._sent_outside_stages += 1
            else:
                self._counts(execution).sent += 1

    def ended(self, execution: Execution, result: ExecutionResult) -> None:
        with self._lock:
            counts = self._counts(execution)
            counts.outcomes[result.outcome] = counts.outcomes.get(result.outcome, 0) + 1
            if result.run is not None:
                counts.run.add(result.run)
            counts.total.add(result.total)

    def _counts(self, execution: Execution) -> _StageCounters:
        return self._stages[execution.endpoint, execution.stage]

    def snapshot(self) -> dict[tuple[str, str], StageMetrics]:
        """Return the metrics of each stage at one moment, by endpoint and stage."""
        with self._lock:
            return {key: counts.metrics() for key, counts in self._stages.items()}

    @property
    def sent_outside_stages(self) -> int:
        """Number of messages that programs sent to start flows, outside of stages."""
        return self._sent_outside_stages

    def exposition(self) -> str:
        """Return the metrics as text for Prometheus. Its content type is `exposition.CONTENT_TYPE`."""
        stages = [({"endpoint": endpoint, "stage": stage}, each) for (endpoint, stage), each in self.snapshot().items()]
        running = [Sample(labels, each.running) for labels, each in stages]
        ended = [
            Sample({**labels, "outcome": outcome}, count)
            for labels, each in stages
            for outcome, count in each.outcomes.items()
        ]
        sent = [Sample(labels, each.sent) for labels, each in stages]
        sent.append(Sample({"endpoint": "", "stage": ""}, self.sent_outside_stages))
        run = [HistogramSample(labels, BUCKETS, each.run.buckets, each.run.seconds) for labels, each in stages]
        total = [HistogramSample(labels, BUCKETS, each.total.buckets, each.total.seconds) for labels, each in stages]
        metrics: tuple[tuple[str, MetricKind, str, Sequence[Sample | HistogramSample]], ...] = (
            ("truenext_stage_running", "gauge", "Runs of a stage in progress.", running),
            ("truenext_stage_messages_total", "counter", "Messages by their outcome.", ended),
            (
                "truenext_stage_sent_total",
                "counter",
                "Messages that a stage sent; without a stage, those that initiated flows.",
                sent,
            ),
            ("truenext_stage_run_seconds", "histogram", "Duration of a stage with its dependencies.", run),
            (
                "truenext_stage_total_seconds",
                "histogram",
                "Time from the delivery of a message to the service until its outcome was known.",
                total,
            ),
        )
        return "".join(format_metric(*metric) for metric in metrics)


class _DurationCounter:
    __slots__ = ("buckets", "seconds")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BUCKETS) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.buckets[bisect_left(BUCKETS, seconds)] += 1
        self.seconds += seconds

    def histogram(self) -> DurationHistogram:
        return DurationHistogram(self.seconds, tuple(self.buckets))


@dataclass(slots=True, eq=False)
class _StageCounters:
    running: int = 0
    outcomes: dict[ExecutionOutcome, int] = field(default_factory=dict)
    sent: int = 0
    run: _DurationCounter = field(default_factory=_DurationCounter)
    total: _DurationCounter = field(default_factory=_DurationCounter)

    def metrics(self) -> StageMetrics:
        return StageMetrics(self.running, dict(self.outcomes), self.sent, self.run.histogram(), self.total.histogram())
