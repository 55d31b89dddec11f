"""Rows about services of stages and their flows, from reports of processes and recorded flows. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from truenext.console.pages.attention import OUTBOX_OLD_S
from truenext.console.pages.links import address, queue_link
from truenext.console.pages.overview import Figure
from truenext.console.pages.stages import FlowPage, FlowRow, ProcessRow, ServiceRow, StageRow
from truenext.flows.drawing import to_html, to_text
from truenext.flows.model import RecordedFlow
from truenext.model.control_answers import QueueReport
from truenext.model.destination import DEAD_LETTER_PREFIX
from truenext.model.process_report import OutboxFigures, ProcessReport, StageFigures
from truenext.model.seen_processes import SeenProcess
from truenext.model.service_graph import ServiceGraph, StageNode

LINES_MAX = 500
"""Largest number of messages of a flow that are drawn as text."""


def queues_of(processes: Sequence[SeenProcess]) -> list[str]:
    """Return the queues of all stages, and those of their dead letters."""
    queues = {stage.queue for graph in _graphs(processes).values() for _, stage in _stages(graph) if stage.queue}
    return sorted(queues) + sorted(DEAD_LETTER_PREFIX + queue for queue in queues)


def service_rows(
    processes: Sequence[SeenProcess], queues: Mapping[str, QueueReport], *, may_dismiss: bool
) -> list[ServiceRow]:
    by_service: dict[str, list[SeenProcess]] = {}
    for process in processes:
        by_service.setdefault(process.report.service, []).append(process)
    graphs = _graphs(processes)
    return [
        _service_row(service, found, graphs.get(service), queues, may_dismiss=may_dismiss)
        for service, found in sorted(by_service.items())
    ]


def _graphs(processes: Iterable[SeenProcess]) -> dict[str, ServiceGraph]:
    """Return the graph of each service: that of the process which has reported last."""
    latest = sorted(processes, key=lambda each: each.report.at)
    return {each.report.service: each.report.graph for each in latest if each.report.graph is not None}


def _stages(graph: ServiceGraph) -> list[tuple[str, StageNode]]:
    return [(endpoint.name, stage) for endpoint in graph.endpoints for stage in endpoint.stages]


def _service_row(
    service: str,
    processes: list[SeenProcess],
    graph: ServiceGraph | None,
    queues: Mapping[str, QueueReport],
    *,
    may_dismiss: bool,
) -> ServiceRow:
    rows = [_process_row(each, may_dismiss=may_dismiss) for each in processes]
    figures = [each for process in processes for each in process.report.metrics or ()]
    outbox = next((each.report.outbox for each in processes if each.report.outbox is not None), None)
    states = {each.state for each in rows}
    return ServiceRow(
        name=service,
        level="bad" if "silent" in states or states == {"ended"} else "warn" if "not ready" in states else "",
        processes=rows,
        stages=[_stage_row(*each, figures, queues) for each in (() if graph is None else _stages(graph))],
        outbox=[] if outbox is None else _outbox_figures(outbox),
    )


def _process_row(process: SeenProcess, *, may_dismiss: bool) -> ProcessRow:
    report, metrics = process.report, process.report.metrics or []
    outcomes = _outcomes(metrics)
    return ProcessRow(
        service=report.service,
        version=report.version,
        instance=report.instance,
        state=_state(process),
        why="" if report.has_ended else "; ".join(report.health.reasons),
        answered_s=round(process.seen_s, 1),
        figures=[
            Figure("up for", _uptime_s(report), "seconds"),
            Figure("running", sum(each.running for each in metrics)),
            Figure("completed", outcomes["completed"]),
            Figure("failed", outcomes["failed"], "", "warn" if outcomes["failed"] else ""),
            Figure("given up", given_up := _given_up(metrics), "", "bad" if given_up else ""),
        ],
        run=report.run if may_dismiss and process.state != "answers" else "",
    )


def _uptime_s(report: ProcessReport) -> float:
    return max(0, report.at - report.started_at) / 1000


def _state(process: SeenProcess) -> str:
    if process.state == "answers":
        return "ready" if process.report.health.ready else "not ready"
    return process.state


def _outcomes(metrics: Iterable[StageFigures]) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for each in metrics:
        outcomes.update(each.outcomes)
    return outcomes


def _given_up(metrics: Iterable[StageFigures]) -> int:
    return sum(sum(each.given_up.values()) for each in metrics)


def _stage_row(
    endpoint: str, stage: StageNode, figures: Iterable[StageFigures], queues: Mapping[str, QueueReport]
) -> StageRow:
    own = [each for each in figures if (each.endpoint, each.stage) == (endpoint, stage.name)]
    outcomes, queue = _outcomes(own), queues.get(stage.queue)
    dead_letters = DEAD_LETTER_PREFIX + stage.queue
    has_dead_letters = dead_letters in queues and queues[dead_letters].waiting > 0
    return StageRow(
        endpoint=endpoint,
        stage=stage.name,
        queue=stage.queue,
        queue_link=queue_link(stage.queue) if stage.queue else "",
        waiting=None if queue is None else queue.waiting,
        oldest_s=None if queue is None else queue.oldest_s,
        consumers=None if queue is None else queue.consumers,
        completed=outcomes["completed"] if own else None,
        failed=outcomes["failed"] if own else None,
        given_up=_given_up(own) if own else None,
        dead_letters=address("/dead-letters", queue=dead_letters) if has_dead_letters else "",
        sends_to=[each.to for each in stage.references],
    )


def _outbox_figures(outbox: OutboxFigures) -> list[Figure]:
    is_old = outbox.oldest_s is not None and outbox.oldest_s >= OUTBOX_OLD_S
    return [
        Figure("unsent", outbox.unsent, "messages"),
        Figure("oldest", outbox.oldest_s, "seconds", "bad" if is_old else ""),
        Figure("already processed", outbox.already_processed, "messages"),
        Figure("refused", outbox.refused, "messages", "warn" if outbox.refused else ""),
    ]


# ---- Flows ----


def flow_row(flow: RecordedFlow) -> FlowRow:
    return FlowRow(
        trace=flow.trace,
        link=address("/flow", trace=flow.trace or flow.id, id=flow.id),
        state=_flow_state(flow),
        started_ms=flow.started_at // 1000,
        duration_s=flow.seconds,
        executions=flow.runs + flow.omitted,
        attempts=max((each.attempt for each in flow.executions), default=0),
        error=next((each.error for each in reversed(flow.executions) if each.error), ""),
    )


def _flow_state(flow: RecordedFlow) -> str:
    if flow.given_up:
        return "given up"
    if flow.in_progress:
        return "failed" if flow.failures else "open"
    return "ended"


def flow_page(flow: RecordedFlow, others: Sequence[RecordedFlow], problems: Sequence[str]) -> FlowPage:
    dead = sorted({each.queue for each in flow.executions if each.is_given_up and each.queue})
    return FlowPage(
        trace=flow.trace,
        state=_flow_state(flow),
        drawing=to_html(flow, is_open=True),
        text=to_text(flow, lines_max=LINES_MAX),
        note=" ".join(problems),
        dead_letters=[
            (DEAD_LETTER_PREFIX + queue, address("/dead-letters", queue=DEAD_LETTER_PREFIX + queue)) for queue in dead
        ],
        others=[
            (f"{each.trace} ({each.id})", address("/flow", trace=flow.trace or flow.id, id=each.id)) for each in others
        ],
    )
