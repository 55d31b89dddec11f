"""Metrics of stages: executions by outcome, messages that were given up, attempts, sent messages, and durations."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

import msgspec

from truenext.flows.events import ExecutionOutcome, GiveUpReason
from truenext.model.histogram import HistogramCounter, cumulative_buckets
from truenext.stage.interceptors.interceptor import (
    Execution,
    ExecutionResult,
    Interceptor,
    MessageToSend,
    PoolName,
)

if TYPE_CHECKING:
    from prometheus_client import Metric

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
    methods. Each service has one."""

    def __init__(self) -> None:
        self.counters = ServiceCounters()
        """Counters, with which a service counts directly, as hooks would take six times as long."""

    def around(self, execution: Execution) -> AbstractContextManager[object]:
        return _Running(self._counts(execution))

    def sending(self, execution: Execution | None, send: MessageToSend) -> None:
        if execution is None:
            self.counters.add_sent_outside(1)
        else:
            self._counts(execution).add_sent(1)

    def ended(self, execution: Execution, result: ExecutionResult) -> None:
        self._counts(execution).add_ended(execution.attempt, execution.waited, result)

    def _counts(self, execution: Execution) -> StageCounters:
        return self.counters.of_stage(execution.endpoint, execution.stage, execution.pool)

    def snapshot(self) -> dict[tuple[str, str, PoolName], StageMetrics]:
        """Return the metrics of each stage at one moment, by endpoint, stage and pool."""
        return self.counters.snapshot()

    @property
    def sent_outside_stages(self) -> int:
        """Number of messages that programs sent to start flows, outside of stages."""
        return self.counters.sent_outside_stages

    def collect(self) -> list[Metric]:
        """Return the metrics as those of `prometheus_client`, whose registries call this method: a program with metrics
        of its own registers this interceptor, `prometheus_client.REGISTRY.register(metrics)`."""
        # Imported here, because it takes 30 ms, and most processes show no metrics.
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        running = GaugeMetricFamily("truenext_stage_running", "Runs of a stage in progress.", labels=_LABELS)
        ended = CounterMetricFamily(
            "truenext_stage_messages_total", "Messages by their outcome.", labels=(*_LABELS, "outcome")
        )
        given_up = CounterMetricFamily(
            "truenext_stage_given_up_total", "Messages that were given up, by reason.", labels=(*_LABELS, "reason")
        )
        sent = CounterMetricFamily(
            "truenext_stage_sent_total",
            "Messages that a stage sent; without a stage, those that initiated flows.",
            labels=_LABELS,
        )
        histograms = {
            field_name: HistogramMetricFamily(name, about, labels=_LABELS)
            for field_name, (name, about) in _HISTOGRAMS.items()
        }
        for labels, stage in self.snapshot().items():
            running.add_metric(labels, stage.running)
            sent.add_metric(labels, stage.sent)
            for outcome, count in stage.outcomes.items():
                ended.add_metric((*labels, outcome), count)
            for reason, count in stage.given_up.items():
                given_up.add_metric((*labels, reason), count)
            for field_name, family in histograms.items():
                histogram: Histogram = getattr(stage, field_name)
                family.add_metric(labels, cumulative_buckets(histogram.bounds, histogram.buckets), histogram.sum)
        sent.add_metric(("", "", ""), self.sent_outside_stages)
        return [running, ended, given_up, sent, *histograms.values()]

    def exposition(self) -> str:
        """Return the metrics as text for Prometheus. Its content type is `text/plain; version=0.0.4`."""
        from prometheus_client import generate_latest

        return generate_latest(self).decode()


_LABELS = ("endpoint", "stage", "pool")

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


class ServiceCounters:
    """Counters of all stages of a service. Any thread may call the methods."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._stages: defaultdict[tuple[str, str, PoolName], StageCounters] = defaultdict(
            partial(StageCounters, self._lock)
        )
        self.sent_outside_stages = 0

    def of_stage(self, endpoint: str, stage: str, pool: PoolName) -> StageCounters:
        with self._lock:
            return self._stages[endpoint, stage, pool]

    def add_sent_outside(self, count: int) -> None:
        """Count messages that a program sends outside of stages."""
        with self._lock:
            self.sent_outside_stages += count

    def snapshot(self) -> dict[tuple[str, str, PoolName], StageMetrics]:
        with self._lock:
            return {key: counts.metrics() for key, counts in self._stages.items()}


class _Running:
    """Block of one run. It is no generator, as each message has one."""

    __slots__ = ("_counters",)

    def __init__(self, counters: StageCounters) -> None:
        self._counters = counters

    def __enter__(self) -> None:
        self._counters.add_running(1)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._counters.add_running(-1)


@dataclass(slots=True, eq=False)
class StageCounters:
    """Counters of one stage in one pool. Any thread may call the methods."""

    lock: Lock
    running: int = 0
    outcomes: dict[ExecutionOutcome, int] = field(default_factory=dict)
    given_up: dict[GiveUpReason, int] = field(default_factory=dict)
    sent: int = 0
    attempts: HistogramCounter = field(default_factory=partial(HistogramCounter, ATTEMPT_BUCKETS))
    waited: HistogramCounter = field(default_factory=partial(HistogramCounter, WAIT_BUCKETS))
    run: HistogramCounter = field(default_factory=partial(HistogramCounter, BUCKETS))
    total: HistogramCounter = field(default_factory=partial(HistogramCounter, BUCKETS))

    def add_running(self, count: int) -> None:
        with self.lock:
            self.running += count

    def add_sent(self, count: int) -> None:
        with self.lock:
            self.sent += count

    def add_ended(self, attempt: int, waited_s: float | None, result: ExecutionResult) -> None:
        outcome, given_up_for = result.outcome, result.given_up_for
        with self.lock:
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
            if given_up_for is not None:
                self.given_up[given_up_for] = self.given_up.get(given_up_for, 0) + 1
            if given_up_for is not None or outcome == "completed":
                self.attempts.add(attempt)
            if waited_s is not None:
                self.waited.add(waited_s)
            if result.run is not None:
                self.run.add(result.run)
            self.total.add(result.total)

    def metrics(self) -> StageMetrics:
        """Return the metrics at this moment. The caller holds the lock."""
        return StageMetrics(
            running=self.running,
            outcomes=dict(self.outcomes),
            given_up=dict(self.given_up),
            sent=self.sent,
            attempts=_histogram(self.attempts),
            waited=_histogram(self.waited),
            run=_histogram(self.run),
            total=_histogram(self.total),
        )


def _histogram(counter: HistogramCounter) -> Histogram:
    return Histogram(counter.sum, counter.bounds, tuple(counter.buckets))
