"""Report of this process, as a requester gets it: figures of the stages, and the limit of its size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from truenext.model.process_report import REPORT_BYTES_MAX, ProcessReport, StageFigures, Sum

if TYPE_CHECKING:
    from truenext.model.service_health import ServiceHealth
    from truenext.stage.interceptors.interceptor import PoolName
    from truenext.stage.interceptors.metrics import Histogram, StageMetrics

REASONS_MAX: Final = 20
"""Largest number of reasons in a health that is cut because of its size."""
TEXT_MAX: Final = 500
"""Largest number of characters of a text in a health that is cut because of its size."""

_encode = msgspec.json.Encoder().encode


def stage_figures(snapshot: Mapping[tuple[str, str, PoolName], StageMetrics]) -> list[StageFigures]:
    """Return the figures of the stages, sorted by endpoint, stage and pool, from `Metrics.snapshot`."""
    return [
        StageFigures(
            endpoint=endpoint,
            stage=stage,
            pool=pool,
            running=each.running,
            outcomes=_by_name(each.outcomes),
            given_up=_by_name(each.given_up),
            sent=each.sent,
            attempts=_sum(each.attempts),
            waited=_sum(each.waited),
            run=_sum(each.run),
            total=_sum(each.total),
        )
        for (endpoint, stage, pool), each in sorted(snapshot.items())
    ]


def _by_name(counts: Mapping[Any, int]) -> dict[str, int]:
    return dict(counts)


def _sum(histogram: Histogram) -> Sum:
    return Sum(histogram.count, histogram.sum)


def encode_report(report: ProcessReport) -> bytes:
    """Return a report as JSON of at most REPORT_BYTES_MAX bytes. If it is larger, its graph is left out; if it is still
    larger, also the figures of the stages; in the end the health is cut."""
    body = _encode(report)
    for without in _without_parts(report):
        if len(body) <= REPORT_BYTES_MAX:
            break
        body = _encode(without)
    return body


def _without_parts(report: ProcessReport) -> Iterable[ProcessReport]:
    report = replace(report, graph=None, omitted=["graph"])
    yield report
    report = replace(report, metrics=None, omitted=["graph", "metrics"])
    yield report
    yield replace(report, health=_cut(report.health), omitted=["graph", "metrics", "health"])


def _cut(health: ServiceHealth) -> ServiceHealth:
    reasons = [each[:TEXT_MAX] for each in health.reasons[:REASONS_MAX]]
    facts = health.facts
    broker = [replace(each, error=each.error[:TEXT_MAX]) for each in facts.broker]
    return replace(
        health, reasons=reasons, facts=replace(facts, stages=[], broker=broker, database=facts.database[:TEXT_MAX])
    )
