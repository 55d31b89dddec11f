"""Views of services of stages: processes, stages with their queues, and flows."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from truenext.console.gathering import Member
from truenext.console.link import LOG_IN_AGAIN
from truenext.console.pages.links import address
from truenext.console.pages.overview import Figure
from truenext.console.pages.service_rows import flow_page, flow_row, queues_of, service_rows
from truenext.console.pages.stages import FlowPage, Flows, Stages
from truenext.console.visit import InvalidRequest, NotAllowed, NotFound, Visit
from truenext.model.control_answers import QueueReport, QueuesReport, StatusReport
from truenext.model.disk_level import DRAINED
from truenext.model.grants import Right, parse_pattern
from truenext.model.limits import QUEUE_NAMES_MAX
from truenext.model.process_report import STAGES_TOPIC
from truenext.model.seen_processes import SeenProcess

logger = logging.getLogger(__name__)

FLOWS = 100
ORDERS = {"given-up": "given up", "failed": "failed", "unended": "unended", "slowest": "slowest", "last": "last"}
IN_A_DRAIN = "the broker is being drained, so processes do not answer"
_NO_FLOWS = "this console reads no events: start it with --events DIR, the folder that a service has as its `events`"


async def gathered_processes(visit: Visit) -> tuple[list[SeenProcess], str]:
    """Return the processes that have answered, and a sentence on why none is asked at the moment; "" if they are."""
    if not _may_ask(visit):
        return [], ""
    gathering = visit.shared.stages
    gathering.join(Member(visit.login, visit.is_open))
    await gathering.ready()
    if not gathering.error:
        return gathering.processes(), ""
    broker = visit.gathering()
    await broker.ready()
    return gathering.processes(), _operators_words(gathering.error, broker.latest.status)


def _operators_words(error: str, status: StatusReport | None) -> str:
    """Return why processes are not asked. A drain is named as such, whatever it has refused.

    >>> _operators_words(f"the message is not confirmed: {DRAINED}", None)
    'the broker is being drained, so processes do not answer'
    >>> _operators_words("the broker does not answer in time", None)
    'the broker does not answer in time'
    """
    is_drained = DRAINED in error or (status is not None and not status.ready)
    if not error or not is_drained:
        return error
    return IN_A_DRAIN + (LOG_IN_AGAIN if error.endswith(LOG_IN_AGAIN) else "")


def _may_ask(visit: Visit) -> bool:
    return visit.rights.may_ask(Right.SEND, parse_pattern(STAGES_TOPIC))


async def stages(visit: Visit) -> Stages:
    processes, note = await gathered_processes(visit)
    if not _may_ask(visit):
        note = f"You may not send to {STAGES_TOPIC}: processes are not shown."
    elif not processes and not note:
        note = f"No process has answered: none runs, or their user may not take from {STAGES_TOPIC}"
    queues = await _reports(visit, queues_of(processes))
    return Stages(services=service_rows(processes, queues, may_dismiss=_may_dismiss(visit)), note=note)


def _may_dismiss(visit: Visit) -> bool:
    return _may_ask(visit) and visit.rights.may_ask(Right.MANAGE, parse_pattern(">"))


async def dismiss(visit: Visit) -> str:
    """Forget a silent process, for all logins, until it answers. Returns the address of the page to show."""
    if not _may_dismiss(visit):
        raise NotAllowed(
            f"user {visit.rights.name!r} may not dismiss processes: this needs the rights manage on '>' and send on "
            f"{STAGES_TOPIC}"
        )
    run = visit.required("run")
    if not visit.shared.stages.dismiss(run):
        raise NotFound("this process answers again, or was forgotten already")
    logger.info("process of stages dismissed", extra={"user": visit.rights.name, "run": run})
    return "/stages"


async def _reports(visit: Visit, names: Iterable[str]) -> dict[str, QueueReport]:
    """Return the reports of the queues of stages, and of their dead letters, by name."""
    found: dict[str, QueueReport] = {}
    rest = list(names)
    while rest:
        part, rest = rest[:QUEUE_NAMES_MAX], rest[QUEUE_NAMES_MAX:]
        answer = await visit.ask("queues", {"names": part}, QueuesReport)
        found |= {each.name: each for each in answer.queues}
    return found


# ---- Flows ----


def _check_may_see(visit: Visit) -> None:
    if not visit.may_see_flows:
        raise NotAllowed(f"user {visit.rights.name!r} may not see flows: they tell of all queues, and need monitor")


async def flows(visit: Visit) -> Flows:
    _check_may_see(visit)
    order, trace = visit.text("order", "given-up"), visit.text("trace")
    if order not in ORDERS:
        raise InvalidRequest(f"flows are ordered by {', '.join(ORDERS)}, not by {order[:50]!r}")
    shared = visit.shared.flows
    found, problems = await shared.find(trace) if trace else (await shared.list(order, FLOWS), shared.problems)
    notes = [*problems, *([] if shared.folders else [_NO_FLOWS])]
    return Flows(
        rows=[flow_row(each) for each in found[:FLOWS]],
        order=order,
        orders={each: address("/flows", order=each) for each in ORDERS},
        trace=trace,
        note=" ".join(f"{each}." if not each.endswith(".") else each for each in notes),
        figures=[Figure("flows in memory", len(shared.reader))],
    )


async def flow(visit: Visit) -> FlowPage:
    _check_may_see(visit)
    trace = visit.required("trace")
    shared = visit.shared.flows
    if not shared.folders:
        raise NotFound(_NO_FLOWS)
    found, problems = await shared.find(trace)
    if not found:
        raise NotFound(
            f"no flow has the trace or id {trace[:200]!r}: it may be older than the events that are still there, or "
            "its service records none"
        )
    chosen = visit.text("id")
    shown = next((each for each in found if each.id == chosen), found[0])
    return flow_page(shown, [each for each in found if each is not shown], problems)
