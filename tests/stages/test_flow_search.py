"""Tests of the search for the flows of one trace in files with events, and of `truenext stages flow`."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner, Result

from tests.stages.recorded_events import PROCESSES, Event, Recorder, decoded, line, opened, random_events, write_events
from truenext.cli.main import main
from truenext.flows import search
from truenext.flows.model import executions_of, flows_of
from truenext.flows.search import find_flows, similar_traces
from truenext.history.stage_files import FORMAT, stage_file


def record(recorder: Recorder, flow: str, at: float, trace: str, process: int = 0) -> None:
    recorder.end(recorder.start(f"{flow} 1", at, flow=flow, trace=trace, process=process), at + 1)


def flow_command(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["stages", "flow", *arguments, "--events", str(folder)])


@pytest.mark.parametrize("block_bytes", [200, 3000, 1 << 24], ids=["less than a line", "some lines", "all"])
def test_search_finds_the_same_as_the_model_of_all_events(
    block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "BLOCK_BYTES", block_bytes)
    seed = Random().randrange(1 << 30)
    events = random_events(Random(seed), 30)
    events.sort(key=lambda each: (each["process"], each["number"]))
    half = len(events) // 2
    write_events(tmp_path / "one", events[:half])
    write_events(tmp_path / "two", events[half:], number=2)
    all_flows = flows_of(executions_of(decoded(events)))
    for trace in {flow.trace for flow in all_flows}:
        expected = [each for each in all_flows if each.trace == trace or each.trace.startswith(f"{trace}|")]
        found = find_flows([tmp_path / "one", tmp_path / "two"], trace)
        assert (found.flows, found.omitted, found.problems) == (expected, 0, []), seed
    for flow in all_flows[:5]:
        assert find_flows([tmp_path / "one", tmp_path / "two"], flow.id).flows == [flow]


def test_traces_that_only_begin_or_look_alike_are_not_found(tmp_path: Path) -> None:
    recorder = Recorder()
    for number, trace in enumerate(
        ("order 7", "order 71", "my order 7", "order 7|mail", "ORDER 7", 'order "7"', "ordér")
    ):
        record(recorder, f"f{number}", number, trace)
    # The text is in other fields.
    recorder.start("order 7", 9.0, flow="f9", trace="x", sender="order 7", parent="order 7")
    write_events(tmp_path, recorder.events)
    assert [each.id for each in find_flows([tmp_path], "order 7").flows] == ["f0", "f3"]
    assert [each.id for each in find_flows([tmp_path], 'order "7"').flows] == ["f5"]
    assert [each.id for each in find_flows([tmp_path], "ordér").flows] == ["f6"]


def test_trace_that_is_recorded_in_part_is_found_by_all_of_it(tmp_path: Path) -> None:
    recorder = Recorder()
    record(recorder, "f1", 1.0, "x" * 200)
    write_events(tmp_path, recorder.events)
    assert len(find_flows([tmp_path], "x" * 300).flows) == 1
    assert not find_flows([tmp_path], "x" * 199).flows


def test_latest_flows_of_a_trace_that_many_have_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "FLOWS_MAX", 5)
    recorder = Recorder()
    for number in range(100):
        # Each flow has executions in two processes.
        for process in range(2):
            record(recorder, f"f{number}", number, "nightly", process)
    write_events(tmp_path, recorder.events)
    found = find_flows([tmp_path], "nightly")
    assert [each.id for each in found.flows] == [f"f{number}" for number in range(95, 100)]
    assert found.omitted == 95
    assert all(each.runs == 2 for each in found.flows)


def test_flow_that_was_left_out_does_not_come_again_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "FLOWS_MAX", 5)
    recorder = Recorder()
    record(recorder, "long", 0.0, "nightly")
    for number in range(20):
        record(recorder, f"f{number}", 1.0 + number, "nightly")
    record(recorder, "long", 100.0, "nightly", process=1)
    write_events(tmp_path, recorder.events)
    found = find_flows([tmp_path], "nightly")
    assert "long" not in [each.id for each in found.flows] and len(found.flows) == 5
    assert found.omitted == 16


def test_large_flow_is_found_whole_and_earlier_ones_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "EXECUTIONS_MAX", 10)
    recorder = Recorder()
    record(recorder, "f1", 1.0, "nightly")
    for number in range(20):
        recorder.start(f"m{number}", 2.0 + number, flow="f2", trace="nightly")
    write_events(tmp_path, recorder.events)
    found = find_flows([tmp_path], "nightly")
    assert [(each.id, each.runs) for each in found.flows] == [("f2", 20)]
    assert found.omitted == 1


def test_large_flow_is_cut_if_the_caller_says_how_much_is_kept(tmp_path: Path) -> None:
    recorder = Recorder()
    for number in range(20):
        record(recorder, "large", number, "nightly")
    write_events(tmp_path, recorder.events)
    found = find_flows([tmp_path], "nightly", 7)
    assert [each.runs for each in found.flows] == [7]
    assert found.problems == ["a flow of this trace has more than 7 executions, and later ones are left out"]
    assert find_flows([tmp_path], "nightly", 20).problems == []


def test_files_with_faults_are_told_and_the_rest_is_found(tmp_path: Path) -> None:
    recorder = Recorder()
    record(recorder, "f1", 1.0, "order 7")
    (path,) = write_events(tmp_path, recorder.events)
    with path.open("ab") as file:
        file.write(b'{"kind":"started"')
    newer = tmp_path / "p-000001.jsonl"
    newer.write_bytes(line(opened("p", format=FORMAT + 1)) + line(recorder.events[0]))
    found = find_flows([tmp_path, tmp_path / "missing"], "order 7")
    assert [each.runs for each in found.flows] == [1]
    missing = (
        f"the events folder {tmp_path / 'missing'} does not exist: name the DIR of a service's stages run --events DIR"
    )
    assert sorted(found.problems) == sorted(
        [
            missing,
            f"{path} ends in the middle of an event, which is left out: was its process killed?",
            f"{newer} has events of format 3, and this truenext reads 2: update truenext",
        ]
    )


def test_file_of_several_processes_that_a_user_has_made_is_searched(tmp_path: Path) -> None:
    recorder = Recorder()
    executions = [
        recorder.start(f"{process}", 1.0, process=process, trace="order 7") for process in range(len(PROCESSES))
    ]
    for execution in reversed(executions):
        recorder.end(execution, 2.0, "failed" if execution[0] == PROCESSES[0] else "completed")
    all_events: list[Event] = [opened(PROCESSES[0]), *recorder.events]
    stage_file(tmp_path, "all", 1).write_bytes(b"".join(map(line, all_events)))
    (flow,) = find_flows([tmp_path], "order 7").flows
    assert (flow.runs, flow.failures, flow.in_progress) == (3, 1, 1)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("ordr 17", "order 17"),
        ("Order 17", "order 17"),
        ("17", "order 17"),
        ("order 99", "order 9"),
        ("nightly", None),
    ],
)
def test_similar_traces_are_named(text: str, first: str | None, tmp_path: Path) -> None:
    recorder = Recorder()
    for number in range(20):
        record(recorder, f"f{number}", number, f"order {number}")
    write_events(tmp_path, recorder.events)
    similar = similar_traces([tmp_path], text)
    assert similar[:1] == ([] if first is None else [first])
    assert len(similar) <= search.SIMILAR_MAX


def test_command_prints_the_waterfall(tmp_path: Path) -> None:
    recorder = Recorder()
    record(recorder, "f1", 1.0, "order 7")
    write_events(tmp_path, recorder.events)
    done = flow_command(tmp_path, "order 7")
    assert done.exit_code == 0, done.output
    first, axis, row, empty, legend = done.stdout.splitlines()
    assert first == "order 7: 1 s, 1 message"
    assert axis.split() == ["waited", "worked", "0", "1", "s"]
    assert row.split() == ["order.place", "1.5", "ms", "=" * row.count("="), "completed"] and row.count("=") > 20
    assert not empty and legend.startswith(". waited")


def test_command_draws_an_end_before_its_start_and_times_that_are_far_apart(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.end(recorder.start("f1 1", 5.0, trace="order 7"), 1.0)
    recorder.end(recorder.start("f1 2", 1e9, trace="order 7"), 2e9)
    recorder.end(recorder.start("f1 3", -1.7e9, trace="order 7"), -1.7e9, total_us=0)
    write_events(tmp_path, recorder.events)
    done = flow_command(tmp_path, "order 7")
    assert done.exit_code == 0 and not done.stderr
    first, axis, *rows, _, _ = done.stdout.splitlines()
    assert first == "order 7: 1,027,778 h, 3 messages" and axis.endswith("1,027,778 h")
    assert len({len(row.rpartition("  ")[0]) for row in rows}) <= 3
    assert [row.count("=") > 0 and row.endswith("completed") for row in rows] == [True] * 3


def test_command_tells_of_lines_with_impossible_times_and_draws_the_rest(tmp_path: Path) -> None:
    recorder = Recorder()
    record(recorder, "f1", 1.0, "order 7")
    recorder.end(recorder.start("f1 2", 2.0, trace="order 7"), 3.0, total_us=-1)
    recorder.start("f1 3", -1.8e9, trace="order 7")
    (path,) = write_events(tmp_path, recorder.events)
    done = flow_command(tmp_path, "order 7")
    assert f"{path} has 2 lines that are not an event, and left out" in done.stderr
    first, second = done.stdout.splitlines()[2:4]
    assert first.endswith("  completed") and second.endswith("  not ended")


def test_command_prints_json_for_programs(tmp_path: Path) -> None:
    recorder = Recorder()
    record(recorder, "f1", 1.0, "order 7")
    write_events(tmp_path, recorder.events)
    (flow,) = json.loads(flow_command(tmp_path, "order 7", "--json").stdout)
    assert (flow["trace"], flow["seconds"], flow["messages"]) == ("order 7", 1.0, 1)
    assert flow["executions"][0]["outcome"] == "completed"
    assert flow["lines"][0]["worked_ms"] == 1.5


def test_command_draws_the_latest_flows_of_a_trace_and_counts_the_others(tmp_path: Path) -> None:
    recorder = Recorder()
    for number in range(15):
        record(recorder, f"f{number}", number, "nightly")
    write_events(tmp_path, recorder.events)
    output = flow_command(tmp_path, "nightly").stdout
    assert output.count("nightly: 1 s") == 10
    assert output.splitlines()[-1] == "5 earlier flows of this trace: give a flow's id to see one"


def test_command_without_such_a_flow_names_similar_traces_or_says_what_to_give(tmp_path: Path) -> None:
    recorder = Recorder()
    record(recorder, "f1", 1.0, "order 7\x1b[31m")
    write_events(tmp_path, recorder.events)
    done = flow_command(tmp_path, "order 8")
    assert done.exit_code == 1 and not done.stdout
    assert done.stderr == "truenext: no flow has the trace 'order 8'; similar ones: 'order 7\\x1b[31m'\n"
    done = flow_command(tmp_path, "nightly")
    assert "no flow has the trace 'nightly', nor a similar one: give the trace that" in done.stderr


def test_command_on_a_folder_that_is_missing_or_empty_says_so(tmp_path: Path) -> None:
    done = flow_command(tmp_path / "missing", "order 7")
    assert done.exit_code == 2 and "does not exist" in done.stderr
    done = flow_command(tmp_path, "order 7")
    assert done.exit_code == 1
    assert done.stderr.startswith(f"no events of stages in {tmp_path}: a service writes them with truenext stages run")
