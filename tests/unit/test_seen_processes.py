"""Tests of the processes of stages that a requester has seen. Source: docs/contract.md, C34.7 and C34.8"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from truenext.model import seen_processes
from truenext.model.process_report import REPORT_BYTES_MAX, ProcessReport
from truenext.model.seen_processes import ENDED_KEPT_S, SILENT_AFTER_S, SILENT_KEPT_S, SeenProcesses
from truenext.model.service_graph import ServiceGraph
from truenext.model.service_health import ServiceHealth, ServiceStatus


def report(run: str, **fields: Any) -> ProcessReport:
    facts = ServiceStatus(service="shop", state="running", broker=[], database="", stages=[])
    values: dict[str, Any] = {
        "service": "shop",
        "version": "1",
        "instance": f"shop on a pid {run}",
        "run": run,
        "started_at": 0,
        "at": 0,
        "health": ServiceHealth(live=True, ready=True, reasons=[], facts=facts),
        "graph": ServiceGraph("shop", [], [], []),
        "metrics": [],
        "outbox": None,
    }
    return ProcessReport(**(values | fields))


def body(run: str, **fields: Any) -> bytes:
    return msgspec.json.encode(report(run, **fields))


def states(seen: SeenProcesses, now: float) -> dict[str, str]:
    return {each.report.run: each.state for each in seen.processes(now)}


# ---- Silence ----

RUNS = st.sampled_from(["a", "b", "c"])
STEPS = st.one_of(
    st.tuples(st.just("report"), RUNS),
    st.tuples(st.just("end"), RUNS),
    st.tuples(st.just("dismiss"), RUNS),
    st.tuples(st.just("request"), st.none()),
    st.tuples(st.just("lost"), st.none()),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 3.0, SILENT_AFTER_S, 30.0])),
)


def naive_state(steps: list[tuple[float, str, Any]], run: str, now: float) -> str | None:
    """Return the state of a process after these steps, judged from all of them; None if it has not answered, or is
    forgotten."""
    own = [number for number, (_, kind, of) in enumerate(steps) if kind in ("report", "end") and of == run]
    if not own:
        return None
    seen_at = steps[own[-1]][0]
    if steps[own[-1]][1] == "end":
        return "ended" if now - seen_at <= ENDED_KEPT_S else None
    later = [*steps[own[-1] + 1 :], (now, "shown", None)]
    unanswered: float | None = None
    for at, kind, _ in later:
        # All processes are shown after each step.
        if unanswered is not None and at - unanswered >= SILENT_AFTER_S:
            break
        if kind == "request" and unanswered is None:
            unanswered = at
        elif kind == "lost":
            unanswered = None
    else:
        return "answers"
    return "silent" if now - seen_at <= SILENT_KEPT_S else None


@given(st.lists(STEPS, max_size=40))
def test_states_of_processes_are_those_of_all_requests_and_reports(drawn: list[tuple[str, Any]]) -> None:
    """C34.7."""
    seen, now = SeenProcesses(), 0.0
    steps: list[tuple[float, str, Any]] = []
    forgotten: dict[str, bool] = {}
    for kind, value in drawn:
        if kind == "wait":
            now += value
        elif kind == "request":
            seen.request_sent(now)
        elif kind == "lost":
            seen.connection_lost()
        elif kind == "dismiss":
            is_dismissed = states(seen, now).get(value, "answers") != "answers"
            assert seen.dismiss(value, now) is is_dismissed
            if is_dismissed:
                forgotten[value] = True
        else:
            assert seen.add_report(body(value, has_ended=kind == "end"), now)
            forgotten[value] = False
        steps.append((now, kind, value))
        expected = {run: naive_state(steps, run, now) for run in ("a", "b", "c")}
        # A process that was once forgotten stays so until its next report.
        forgotten |= {run: True for run, state in expected.items() if state is None}
        assert states(seen, now) == {run: state for run, state in expected.items() if not forgotten.get(run, True)}


def test_process_that_was_silent_stays_so_when_the_connection_is_lost() -> None:
    seen = SeenProcesses()
    seen.add_report(body("a"), 0.0)
    seen.add_report(body("b"), 0.0)
    seen.request_sent(1.0)
    seen.add_report(body("b"), 1.0)
    assert states(seen, 20.0) == {"a": "silent", "b": "answers"}
    seen.connection_lost()
    assert states(seen, 21.0) == {"a": "silent", "b": "answers"}
    seen.add_report(body("a"), 22.0)
    assert states(seen, 22.0) == {"a": "answers", "b": "answers"}


def test_silent_process_is_forgotten_after_an_hour() -> None:
    seen = SeenProcesses()
    seen.add_report(body("a"), 0.0)
    seen.request_sent(1.0)
    assert states(seen, SILENT_KEPT_S) == {"a": "silent"}
    assert states(seen, SILENT_KEPT_S + 1) == {}


def test_processes_are_sorted_by_service_instance_and_run() -> None:
    seen = SeenProcesses()
    for run, service in (("c", "till"), ("b", "shop"), ("a", "till")):
        seen.add_report(body(run, service=service, instance=f"{service} on a"), 0.0)
    assert [each.report.run for each in seen.processes(1.0)] == ["b", "a", "c"]
    assert {each.seen_s for each in seen.processes(1.0)} == {1.0}


# ---- Bounds ----

NO_REPORTS = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"service":"shop"}',
    b"[" * 100_000,
    b'{"a":' * 40_000,
    msgspec.json.encode(msgspec.to_builtins(report("a")) | {"run": 1}),
    msgspec.json.encode(msgspec.to_builtins(report("a")) | {"metrics": [{}]}),
    body("a", instance="x" * REPORT_BYTES_MAX),
]


@pytest.mark.parametrize("answer", NO_REPORTS, ids=range(len(NO_REPORTS)))
def test_answer_that_is_no_report_is_ignored(answer: bytes) -> None:
    seen = SeenProcesses()
    assert not seen.add_report(answer, 0.0)
    assert (seen.processes(0.0), seen.ignored_count) == ([], 1)


def test_report_with_an_impossible_time_is_ignored() -> None:
    """Fixed: such a report made pages and commands fail for an hour."""
    seen = SeenProcesses()
    for name in (b'"at":', b'"started_at":'):
        assert not seen.add_report(body("1").replace(name + b"0", name + b"1" + b"0" * 400), 0.0)
    assert (seen.processes(0.0), seen.ignored_count) == ([], 2)


def test_report_with_unknown_fields_is_added() -> None:
    seen = SeenProcesses()
    assert seen.add_report(msgspec.json.encode(msgspec.to_builtins(report("a")) | {"new": 1}), 0.0)


def test_further_process_replaces_a_silent_one_or_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """C34.8."""
    monkeypatch.setattr(seen_processes, "PROCESSES_MAX", 2)
    seen = SeenProcesses()
    assert seen.add_report(body("a"), 0.0) and seen.add_report(body("b"), 0.0)
    assert not seen.add_report(body("c"), 1.0)
    assert seen.add_report(body("a"), 1.0), "a known process needs no space"
    seen.request_sent(2.0)
    assert seen.add_report(body("a"), 2.5)
    assert seen.add_report(body("c"), 2.0 + SILENT_AFTER_S)
    assert states(seen, 12.0) == {"a": "answers", "c": "answers"}
    assert seen.ignored_count == 1


def test_reports_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(body("a"))
    monkeypatch.setattr(seen_processes, "BYTES_MAX", 3 * size)
    seen = SeenProcesses()
    assert [seen.add_report(body(run), 0.0) for run in "abcd"] == [True, True, True, False]
    for _ in range(10):
        assert seen.add_report(body("a"), 0.0)


def test_equal_graphs_of_a_service_are_kept_once() -> None:
    seen = SeenProcesses()
    for run in "abc":
        seen.add_report(body(run), 0.0)
    assert len({id(each.report.graph) for each in seen.processes(0.0)}) == 1
