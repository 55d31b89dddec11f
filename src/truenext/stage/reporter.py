"""Reporter: makes the report of one run of a service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from truenext.clock import monotonic, time_ns
from truenext.model.process_report import OutboxFigures, ProcessReport
from truenext.model.service_graph import ServiceGraph
from truenext.stage.core.health import assess_health
from truenext.stage.introspection.graph import graph_of
from truenext.stage.report import encode_report, stage_figures
from truenext.version import VERSION

if TYPE_CHECKING:
    from truenext.model.service_health import ServiceStatus
    from truenext.stage.context import ServiceContext
    from truenext.stage.definition import Definition
    from truenext.stage.outbox.exactly_once import ExactlyOnceProcessing

OUTBOX_PERIOD_S: Final = 5.0
"""Least time in seconds between two queries for the unsent messages of the outbox."""


def _now_ms() -> int:
    return time_ns() // 1_000_000


@dataclass(eq=False)
class Reporter:
    _definition: Definition
    _context: ServiceContext
    _status: Callable[[], ServiceStatus]
    _stalled_after_s: float
    _exactly_once: ExactlyOnceProcessing | None
    _started_at: int = field(default_factory=_now_ms)
    _graph: ServiceGraph | None = None
    _outbox: OutboxFigures | None = None
    _outbox_at: float = float("-inf")

    async def make_report(self, has_ended: bool) -> bytes:
        """Return the report as JSON. `has_ended` is True in the last report of a process."""
        definition = self._definition
        if self._graph is None:
            # In a thread, since it reads the source code of all stages.
            self._graph = await asyncio.to_thread(_read_graph, definition)
        if not has_ended:
            await self._refresh_outbox()
        report = ProcessReport(
            service=definition.name,
            version=VERSION,
            instance=self._context.instance,
            run=self._context.run_id,
            started_at=self._started_at,
            at=_now_ms(),
            has_ended=has_ended,
            health=assess_health(self._status(), self._stalled_after_s),
            graph=self._graph,
            metrics=stage_figures(definition.metrics.snapshot()),
            outbox=self._outbox,
        )
        return encode_report(report)

    async def _refresh_outbox(self) -> None:
        if self._exactly_once is not None and monotonic() - self._outbox_at >= OUTBOX_PERIOD_S:
            self._outbox = await self._exactly_once.figures()
            self._outbox_at = monotonic()


def _read_graph(definition: Definition) -> ServiceGraph:
    return graph_of(
        definition.name, definition.endpoints.values(), definition.remotes.values(), definition.topics.values()
    )
