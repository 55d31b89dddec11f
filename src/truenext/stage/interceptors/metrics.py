"""Metrics of stages: executions by outcome, messages that were given up, attempts, sent messages, and durations."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import msgspec

from truenext.flows.events import ExecutionOutcome, GiveUpReason
from truenext.stage.interceptors.exposition import HistogramSample, MetricKind, Sample, format_metric
from truenext.stage.interceptors.interceptor import Execution, ExecutionResult, Interceptor, MessageToSend, PoolName

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Upper bounds of the buckets for durations, in seconds, as OpenTelemetry's conventions for messages recommend."""
WAIT_BUCKETS = (*BUCKETS, 30.0, 60.0, 300.0, 1800.0, 7200.0, 43200.0)
"""Upper bounds of the buckets for waiting, in seconds. Messages may wait in a queue for hours."""
ATTEMPT_BUCKETS = (1, 2, 3, 5, 7, 10, 20, 50, 100)
"""Upper bounds of the buckets for attempts."""


class Histogram(msgspec.Struct, frozen=True):
    """Histogram of durations in seconds, or of attempts."""

    sum: float
    """Sum of all measured values."""
    bounds: tuple[float, ...]
    """Upper bounds of the buckets. The last bucket has no bound."""
    buckets: tuple[int, ...]
    """Number of values in each bucket: above the bound before it, up to its own bound."""

    @property
    def count(self) -> int:
        """Number of measured values in all buckets."""
        return sum(self.buckets)


class StageMetrics(msgspec.Struct, frozen=True):
    """Metrics of one stage in one pool, counted since the interceptor was made."""

    running: int
    """Number of runs that are under way."""
    outcomes: dict[ExecutionOutcome, int]
    """Number of executions by outcome."""
    given_up: dict[GiveUpReason, int]
    """Number of messages that were given up, by reason (`ExecutionResult.given_up_for`)."""
    sent: int
    """Number of messages that the stage sent, including messages whose transaction was rolled back."""
    attempts: Histogram
    """Attempts that each message took until it was completed or given up."""
    waited: Histogram
    """Durations from a message's arrival in its queue until its execution began (`Execution.waited`), without messages
    that a process may have received before."""
    run: Histogram
    """Durations from the receipt of a message until its stage returned (`ExecutionResult.run`), including failed
    executions."""
    total: Histogram
    """Durations from the receipt of a message until its outcome was known (`ExecutionResult.total`)."""


class Metrics(Interceptor):
    """Interceptor that counts executions and durations in the memory of this process. Any thread may call its
    methods."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._stages: defaultdict[tuple[str, str, PoolName], _StageCounters] = defaultdict(_StageCounters)
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
            given_up_for = result.given_up_for
            if given_up_for is not None:
                counts.given_up[given_up_for] = counts.given_up.get(given_up_for, 0) + 1
            if given_up_for is not None or result.outcome == "completed":
                counts.attempts.add(execution.attempt)
            if execution.waited is not None:
                counts.waited.add(execution.waited)
            if result.run is not None:
                counts.run.add(result.run)
            counts.total.add(result.total)

    def _counts(self, execution: Execution) -> _StageCounters:
        return self._stages[execution.endpoint, execution.stage, execution.pool]

    def snapshot(self) -> dict[tuple[str, str, PoolName], StageMetrics]:
        """Return the metrics of each stage at one moment, by endpoint, stage and pool."""
        with self._lock:
            return {key: counts.metrics() for key, counts in self._stages.items()}

    @property
    def sent_outside_stages(self) -> int:
        """Number of messages that programs sent to start flows, outside of stages."""
        return self._sent_outside_stages

    def exposition(self) -> str:
        """Return the metrics as text for Prometheus. Its content type is `exposition.CONTENT_TYPE`."""
        stages = [
            ({"endpoint": endpoint, "stage": stage, "pool": pool}, each)
            for (endpoint, stage, pool), each in self.snapshot().items()
        ]
        running = [Sample(labels, each.running) for labels, each in stages]
        ended = [
            Sample({**labels, "outcome": outcome}, count)
            for labels, each in stages
            for outcome, count in each.outcomes.items()
        ]
        given_up = [
            Sample({**labels, "reason": reason}, count)
            for labels, each in stages
            for reason, count in each.given_up.items()
        ]
        sent = [Sample(labels, each.sent) for labels, each in stages]
        sent.append(Sample({"endpoint": "", "stage": "", "pool": ""}, self.sent_outside_stages))
        metrics: tuple[tuple[str, MetricKind, str, Sequence[Sample]], ...] = (
            ("truenext_stage_running", "gauge", "Runs of a stage in progress.", running),
            ("truenext_stage_messages_total", "counter", "Messages by their outcome.", ended),
            ("truenext_stage_given_up_total", "counter", "Messages that were given up, by reason.", given_up),
            (
                "truenext_stage_sent_total",
                "counter",
                "Messages that a stage sent; without a stage, those that initiated flows.",
                sent,
            ),
        )
        texts = [format_metric(*metric) for metric in metrics]
        for field_name, (name, about) in _HISTOGRAMS.items():
            histograms = [(labels, getattr(each, field_name)) for labels, each in stages]
            samples = [HistogramSample(labels, each.bounds, each.buckets, each.sum) for labels, each in histograms]
            texts.append(format_metric(name, "histogram", about, samples))
        return "".join(texts)


_HISTOGRAMS = {
    "attempts": ("truenext_stage_attempts", "Attempts of a message until it was completed or given up."),
    "waited": (
        "truenext_stage_wait_seconds",
        "Time from the arrival of a message in its queue until its stage started.",
    ),
    "run": ("truenext_stage_run_seconds", "Duration of a stage with its dependencies."),
    "total": (
        "truenext_stage_total_seconds",
        "Time from the delivery of a message to the service until its outcome was known.",
    ),
}
"""Name and meaning of each histogram, by the field of `StageMetrics`."""


class _HistogramCounter:
    __slots__ = ("bounds", "buckets", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def histogram(self) -> Histogram:
        return Histogram(self.sum, self.bounds, tuple(self.buckets))


@dataclass(slots=True, eq=False)
class _StageCounters:
    running: int = 0
    outcomes: dict[ExecutionOutcome, int] = field(default_factory=dict)
    given_up: dict[GiveUpReason, int] = field(default_factory=dict)
    sent: int = 0
    attempts: _HistogramCounter = field(default_factory=partial(_HistogramCounter, ATTEMPT_BUCKETS))
    waited: _HistogramCounter = field(default_factory=partial(_HistogramCounter, WAIT_BUCKETS))
    run: _HistogramCounter = field(default_factory=partial(_HistogramCounter, BUCKETS))
    total: _HistogramCounter = field(default_factory=partial(_HistogramCounter, BUCKETS))

    def metrics(self) -> StageMetrics:
        return StageMetrics(
            running=self.running,
            outcomes=dict(self.outcomes),
            given_up=dict(self.given_up),
            sent=self.sent,
            attempts=self.attempts.histogram(),
            waited=self.waited.histogram(),
            run=self.run.histogram(),
            total=self.total.histogram(),
        )
