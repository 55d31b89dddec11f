"""Tests of the model of a flow, made of events alone."""

from __future__ import annotations

from random import Random

import pytest

from tests.stages.recorded_events import BEGINNING_US, Recorder, decoded, random_events
from truenext.flows import events as written
from truenext.flows.events import EventLine, decode_line, decode_lines
from truenext.flows.model import RecordedFlow, executions_of, flow_of, flows_of


def only_flow(recorder: Recorder) -> RecordedFlow:
    (flow,) = flows_of(executions_of(decoded(recorder.events)))
    return flow


def test_event_line_has_the_fields_of_all_events() -> None:
    fields = {name for kind in written.EVENTS for name in kind.__struct_fields__} | {"kind"}
    assert fields == set(EventLine.__struct_fields__)


def test_flow_counts_its_messages_executions_and_failures() -> None:
    recorder = Recorder()
    first = recorder.start("m1", 0.0)
    recorder.end(first, 1.0)
    for attempt, outcome in ((1, "failed"), (2, "completed")):
        execution = recorder.start("m2", 1.0 + attempt, attempt=attempt, parent="m1", process=1)
        recorder.end(execution, 1.5 + attempt, outcome, error="Busy" if outcome == "failed" else None)
    flow = only_flow(recorder)
    assert (flow.messages, flow.runs, flow.failures, flow.given_up, flow.in_progress) == (2, 3, 1, 0, 0)
    assert (flow.started_at, flow.seconds) == (BEGINNING_US, 3.5)
    assert flow.has_ended


def test_flow_begins_when_the_broker_accepted_its_first_message() -> None:
    recorder = Recorder()
    recorder.end(recorder.start("m1", 10.0, accepted_ms=BEGINNING_US // 1000 + 4000), 11.0)
    assert only_flow(recorder).started_at == BEGINNING_US + 4_000_000
    assert only_flow(recorder).seconds == 7.0
    # The clock of the broker is ahead of that of the process.
    recorder.end(recorder.start("m2", 3.0, accepted_ms=BEGINNING_US // 1000 + 3500), 3.1)
    assert only_flow(recorder).started_at == BEGINNING_US + 3_000_000


@pytest.mark.parametrize(
    ("outcome", "reason", "given_up", "in_progress"),
    [
        ("completed", None, 0, 0),
        ("already processed", None, 0, 0),
        ("failed", None, 0, 1),
        ("failed", "attempts exhausted", 1, 0),
        ("rejected", "rejected", 1, 0),
        # Of earlier versions, which recorded no reason.
        ("rejected", None, 1, 0),
        ("released", None, 0, 1),
        ("in doubt", None, 0, 1),
        (None, None, 0, 1),
    ],
)
def test_outcome_decides_whether_a_message_is_given_up_or_in_progress(
    outcome: str | None, reason: str | None, given_up: int, in_progress: int
) -> None:
    recorder = Recorder()
    execution = recorder.start("m1", 0.0)
    if outcome is not None:
        recorder.end(execution, 1.0, outcome, given_up_for=reason)
    flow = only_flow(recorder)
    assert (flow.given_up, flow.in_progress) == (given_up, in_progress)


def test_dead_letter_that_was_redriven_and_completed_is_not_given_up() -> None:
    recorder = Recorder()
    recorder.end(recorder.start("m1", 0.0), 1.0, "rejected", given_up_for="rejected")
    recorder.end(recorder.start("m1", 60.0, deliveries=1), 61.0)
    assert (only_flow(recorder).given_up, only_flow(recorder).has_ended) == (0, True)


def test_copies_of_events_and_their_order_change_nothing() -> None:
    random = Random(7)
    events = random_events(random, 50)
    flows = flows_of(executions_of(decoded(events)))
    random.shuffle(events)
    assert flows_of(executions_of(decoded(events))) == flows
    assert len({flow.given_up > 0 for flow in flows}) == len({flow.has_ended for flow in flows}) == 2


def test_event_without_a_recorded_start_is_left_out() -> None:
    recorder = Recorder()
    recorder.end((recorder.start("m1", 0.0)[0], 99), 1.0)
    assert only_flow(recorder).executions[0].outcome is None


def test_lines_that_are_no_events_are_none_and_unknown_fields_and_kinds_are_read() -> None:
    recorder = Recorder()
    recorder.start("m1", 0.0)
    event = decoded(recorder.events)[0]
    assert decode_line(b'{"kind":"star') is None
    assert decode_line(b'{"kind":1,"process":"p","number":1,"at":1}') is None
    assert decode_line(b"\xff\xfe") is None
    newer = b'{"kind":"paused","process":"p","number":1,"at":1,"color":"red"}'
    lines = decode_lines(b"[]\n" + newer + b"\n\x00\x00\n")
    assert [each and each.kind for each in lines] == [None, "paused", None]
    assert executions_of([each for each in lines if each]) == []
    assert flow_of(executions_of([event])).runs == 1


@pytest.mark.parametrize("name", ["at", "accepted_ms", "total_us", "run_us", "commit_us"])
@pytest.mark.parametrize("time", ["-1", "253402300800000000", "9223372036854775808", "1e999", "NaN"])
def test_line_with_an_impossible_time_is_no_event(name: str, time: str) -> None:
    possible = f'"process":"p","number":1,"at":1,"{name}":253402300799999'
    assert decode_line(f'{{"kind":"completed",{possible}}}'.encode()) is not None
    impossible = possible.replace("253402300799999", time)
    assert decode_line(f'{{"kind":"completed",{impossible}}}'.encode()) is None
