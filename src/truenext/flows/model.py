"""Executions and flows, made of events of stages. The audit of stages makes the same of the same events with Spark
(`spark/stages/flows.py`), and adds what the broker's history tells.

All times are microseconds since the epoch. Those of an execution are by the clock of its process, unless a field says
otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from truenext.flows.events import OUTCOMES, SQL_COMMITTED, STARTED, EventLine

DONE = frozenset({"completed", "already processed"})
"""Outcomes of an execution after which the broker has confirmed that the message is acknowledged."""
LOST = frozenset({"dead-lettered", "expired", "removed"})
"""Events of the history by which a message ends, and no stage has processed it."""


class RecordedExecution(msgspec.Struct, gc=False):
    """Execution as recorded: its start, and its end if there is one. The fields are the columns of the audit's table
    `stage_runs`."""

    flow: str
    trace: str
    message: str
    parent: str
    """Id of the message whose stage sent this message; empty if no stage sent it."""
    sender: str
    stage: str
    queue: str | None
    sequence: int | None
    attempt: int
    deliveries: int
    process: str
    execution: int
    """Number of the execution's `started` event within its process."""
    started_at: int
    accepted_at: int | None = None
    """Time at which the broker accepted the message, by the clock of the broker; None if it is not known."""
    dispatched_at: int | None = None
    """Time at which the broker dispatched the message to this execution, by the clock of the broker. Only the history
    has it; None without."""
    sql_at: int | None = None
    ended_at: int | None = None
    outcome: str | None = None
    """Outcome; None if none is recorded: the execution runs, or was interrupted."""
    error: str | None = None
    """Class of the exception that caused the outcome."""
    run_us: int | None = None
    commit_us: int | None = None
    total_us: int | None = None
    given_up_for: str | None = None
    """Reason why the message was given up (`GiveUpReason`); None if it was not."""
    end_kind: str | None = None
    """Event by which the message ended. Only the history has it; None without."""

    @property
    def is_done(self) -> bool:
        """True if the message is acknowledged, even if its process was killed before it recorded that."""
        return self.outcome in DONE or self.end_kind == "acknowledged"

    @property
    def is_given_up(self) -> bool:
        """True if the message became a dead letter, expired or was removed. False if a stage handles its failure."""
        if self.end_kind in LOST:
            return True
        return (self.outcome == "rejected" or self.given_up_for is not None) and self.end_kind != "handled"


class RecordedFlow(msgspec.Struct):
    """Flow as recorded. The fields are the columns of the audit's table `flows`, with the executions."""

    id: str
    trace: str
    started_at: int
    """Time at which the broker accepted the first message, or, if that is not known, at which a stage started first."""
    seconds: float
    """Seconds from `started_at` until the last recorded event."""
    messages: int
    runs: int
    """Number of executions."""
    failures: int
    """Number of executions that failed."""
    given_up: int
    """Number of messages that were given up."""
    in_progress: int
    """Number of messages that have neither ended nor been given up."""
    executions: list[RecordedExecution]
    """Executions in the order of their starts."""
    omitted: int = 0
    """Number of executions that a reader left out of a large flow. They are in none of the other numbers."""

    @property
    def has_ended(self) -> bool:
        """True if no message is in progress. The flow may go on nevertheless: a message that no stage has received yet
        is in no event."""
        return not self.in_progress


def start_execution(event: EventLine) -> RecordedExecution:
    """Return the execution of an event `started`."""
    return RecordedExecution(
        flow=event.flow,
        trace=event.trace,
        message=event.message,
        parent=event.parent,
        sender=event.sender,
        stage=event.stage,
        queue=event.queue,
        sequence=event.sequence,
        attempt=event.attempt,
        deliveries=event.deliveries,
        process=event.process,
        execution=event.number,
        started_at=event.at,
        accepted_at=None if event.accepted_ms is None else event.accepted_ms * 1000,
    )


def continue_execution(execution: RecordedExecution, event: EventLine) -> None:
    """Add a later event of the execution: the commit of its SQL, or its outcome. A copy of an event changes
    nothing."""
    if event.kind == SQL_COMMITTED:
        execution.sql_at = event.at
    elif event.kind in OUTCOMES:
        execution.ended_at = event.at
        execution.outcome = event.kind
        execution.error = event.error
        execution.run_us = event.run_us
        execution.commit_us = event.commit_us
        execution.total_us = event.total_us
        execution.given_up_for = event.given_up_for


def executions_of(events: Iterable[EventLine]) -> list[RecordedExecution]:
    """Return the executions that are started in `events`, in any order of events."""
    found: dict[tuple[str, int], RecordedExecution] = {}
    later = []
    for event in events:
        if event.kind == STARTED:
            found.setdefault((event.process, event.number), start_execution(event))
        elif event.execution:
            later.append(event)
    for event in later:
        execution = found.get((event.process, event.execution))
        if execution is not None:
            continue_execution(execution, event)
    return list(found.values())


def flows_of(executions: Iterable[RecordedExecution]) -> list[RecordedFlow]:
    """Return the flows of these executions, in the order of their starts."""
    by_flow: dict[str, list[RecordedExecution]] = {}
    for each in executions:
        by_flow.setdefault(each.flow, []).append(each)
    return sorted(map(flow_of, by_flow.values()), key=lambda flow: (flow.started_at, flow.id))


def flow_of(executions: Iterable[RecordedExecution]) -> RecordedFlow:
    """Return the flow of these executions, which are at least one, and all of one flow."""
    in_order = sorted(executions, key=lambda each: (each.started_at, each.process, each.execution))
    done: set[str] = set()
    given_up: set[str] = set()
    messages: set[str] = set()
    for each in in_order:
        messages.add(each.message)
        if each.is_done:
            done.add(each.message)
        if each.is_given_up:
            given_up.add(each.message)
    started_at = min(first_time(each) for each in in_order)
    last_at = max(max(each.started_at, each.ended_at or 0) for each in in_order)
    return RecordedFlow(
        id=in_order[0].flow,
        trace=min(each.trace for each in in_order),
        started_at=started_at,
        seconds=(last_at - started_at) / 1e6,
        messages=len(messages),
        runs=len(in_order),
        failures=sum(each.outcome == "failed" for each in in_order),
        given_up=len(given_up - done),
        in_progress=len(messages - done - given_up),
        executions=in_order,
    )


def first_time(execution: RecordedExecution) -> int:
    """Return the earliest known time of an execution's message: its acceptance, or the execution's start."""
    if execution.accepted_at is None:
        return execution.started_at
    return min(execution.accepted_at, execution.started_at)
