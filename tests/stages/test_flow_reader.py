"""Tests of the reader that keeps flows of growing files in bounded memory."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.stages.recorded_events import (
    BEGINNING_US,
    PROCESSES,
    SECOND_US,
    Event,
    Recorder,
    decoded,
    line,
    opened,
    random_events,
    write_events,
)
from truenext.flows import event_files, reader
from truenext.flows.drawing import to_html, to_text
from truenext.flows.model import RecordedFlow, executions_of, flows_of
from truenext.flows.reader import FlowReader
from truenext.flows.search import find_flows
from truenext.history.stage_files import FORMAT, stage_file

RUN_EVENTS = "truenext stages run --events DIR"


def read_all(flows: FlowReader) -> FlowReader:
    while flows.read():
        pass
    return flows


def traces(flows: list[RecordedFlow]) -> list[str]:
    return [each.trace for each in flows]


def record(recorder: Recorder, flow: str, at: float, seconds: float = 1.0, outcome: str = "completed") -> None:
    """Record a flow of one message."""
    execution = recorder.start(f"{flow} 1", at, flow=flow)
    if outcome:
        reason = "rejected" if outcome == "rejected" else None
        recorder.end(execution, at + seconds, outcome, given_up_for=reason)


def test_reader_has_the_flows_of_all_folders_by_kind(tmp_path: Path) -> None:
    recorder = Recorder()
    for number, outcome in enumerate(("completed", "rejected", "failed", "", "completed", "rejected")):
        record(recorder, f"f{number}", at=number, seconds=10 - number, outcome=outcome)
    half = len(recorder.events) // 2
    write_events(tmp_path / "one", recorder.events[:half])
    write_events(tmp_path / "two", recorder.events[half:], number=2)
    flows = read_all(FlowReader([tmp_path / "one", tmp_path / "two"]))
    assert traces(flows.latest(3)) == ["order f5", "order f4", "order f3"]
    assert traces(flows.slowest(9)) == ["order f0", "order f1", "order f4", "order f5"]
    assert traces(flows.given_up(9)) == ["order f5", "order f1"]
    assert traces(flows.failed(9)) == ["order f2"]
    assert traces(flows.unended(9)) == ["order f2", "order f3"]
    assert traces(flows.find("order f1")) == traces(flows.find("f1")) == ["order f1"]
    assert not flows.find("order f")
    assert not flows.problems


def test_flows_that_a_stage_has_started_are_found_by_the_trace_before_theirs(tmp_path: Path) -> None:
    recorder = Recorder()
    for flow, trace in (("f1", "order 7"), ("f2", "order 7|mail"), ("f3", "order 70"), ("f4", "order 7")):
        recorder.start(f"{flow} 1", float(flow[1]), flow=flow, trace=trace)
    write_events(tmp_path, recorder.events)
    assert [each.id for each in read_all(FlowReader([tmp_path])).find("order 7")] == ["f4", "f2", "f1"]


def test_flows_of_random_events_read_piece_by_piece_are_those_of_all_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files grow and are followed by others while they are read. Clocks of processes go back at times."""
    seed = Random().randrange(1 << 30)
    random = Random(seed)
    monkeypatch.setattr(event_files, "CHUNK_BYTES", random.choice((700, 5000, 1 << 17)))
    events = sorted(random_events(random, 30), key=lambda each: (each["process"], each["number"]))
    folders = (tmp_path / "one", tmp_path / "two")
    flows = FlowReader(folders)
    file_numbers = dict.fromkeys(PROCESSES, 1)
    position = 0
    while position < len(events):
        some = events[position : position + random.randrange(1, 200)]
        position += len(some)
        for process in sorted({each["process"] for each in some}):
            file_numbers[process] += random.random() < 0.3
            number = file_numbers[process]
            write_events(folders[number % 2], (each for each in some if each["process"] == process), number=number)
        if random.random() < 0.5:
            flows.read(random.randrange(1, 5000))
    read_all(flows)
    expected = flows_of(executions_of(decoded(events)))
    assert sorted(flows.latest(100), key=lambda flow: (flow.started_at, flow.id)) == expected, seed


def test_ends_of_flows_are_read_as_the_file_grows(tmp_path: Path) -> None:
    recorder = Recorder()
    record(recorder, "f1", 1.0)
    start, end = map(line, recorder.events)
    path = stage_file(tmp_path, PROCESSES[0], 1)
    flows = FlowReader([tmp_path])
    path.write_bytes(b"")
    assert not flows.read(), "the service has not written yet"
    path.write_bytes(line(opened(PROCESSES[0])) + start)
    read_all(flows)
    assert traces(flows.unended(9)) == ["order f1"]
    with path.open("ab") as file:
        file.write(end[:20])
    read_all(flows)
    assert traces(flows.unended(9)) == ["order f1"]
    with path.open("ab") as file:
        file.write(end[20:])
    read_all(flows)
    assert traces(flows.slowest(9)) == ["order f1"]
    assert not flows.read() and not flows.problems


def test_full_deleted_and_new_files_are_followed(tmp_path: Path) -> None:
    flows = FlowReader([tmp_path])
    recorder = Recorder()
    for number in range(1, 6):
        record(recorder, f"f{number}", number)
        (path,) = write_events(tmp_path, recorder.events, number=number)
        recorder.events.clear()
        read_all(flows)
        if number > 2:
            stage_file(tmp_path, PROCESSES[0], number - 2).unlink()
    assert len(flows.latest(9)) == 5
    path.unlink()
    assert not flows.read()
    assert not flows.problems
    stage_file(tmp_path, PROCESSES[0], 4).unlink()
    flows.read()
    assert not flows._files._files and not flows._files._finished


def make_missing(folder: Path) -> None:
    folder.rmdir()


def make_file(folder: Path) -> None:
    folder.rmdir()
    folder.write_text("")


def make_newer(folder: Path) -> None:
    (folder / "p-000001.jsonl").write_bytes(line(opened("p", format=FORMAT + 1)))


def make_older(folder: Path) -> None:
    (folder / "p-000001.jsonl").write_bytes(line({"kind": "opened", "process": "p", "number": 0, "at": 1, "format": 1}))


def make_first_format(folder: Path) -> None:
    (folder / "p-000001.jsonl").write_bytes(b'{"kind":"opened","process":"p","n":0,"at":1,"format":1}\n')


def make_headless(folder: Path) -> None:
    recorder = Recorder()
    record(recorder, "f1", 1.0)
    (folder / "p-000001.jsonl").write_bytes(line(recorder.events[0]))


def make_unreadable(folder: Path) -> None:
    os.mkfifo(folder / "p-000001.jsonl")


def make_torn(folder: Path) -> None:
    path = folder / "p-000001.jsonl"
    path.write_bytes(line(opened("p")) + b'{"kind":"started","proc')
    os.utime(path, (time.time() - 60, time.time() - 60))


def make_damaged(folder: Path) -> None:
    (folder / "p-000001.jsonl").write_bytes(line(opened("p")) + b"\x00" * 50 + b"\n" + b"[]\n")


def make_long_line(folder: Path) -> None:
    (folder / "p-000001.jsonl").write_bytes(line(opened("p")) + b"x" * 500_000 + b"\n")


def make_gap(folder: Path) -> None:
    recorder = Recorder()
    for number in range(3):
        record(recorder, f"f{number}", number)
    write_events(folder, recorder.events[:2] + recorder.events[4:])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            make_missing,
            "the events folder {folder} does not exist: name the DIR of a service's stages run --events DIR",
        ),
        (make_file, "{folder} cannot be read: Not a directory"),
        (
            lambda _: None,
            "no events of stages in {folder}: a service writes them with truenext stages run --events DIR",
        ),
        (make_newer, "{path} has events of format 3, and this truenext reads 2: update truenext"),
        (make_older, "{path} has events of format 1, and this truenext reads 2: use the version that wrote it"),
        (make_first_format, "{path} has events of format 1, and this truenext reads 2: use the version that wrote it"),
        (make_headless, "{path} does not begin as a file of events, and is left out: was it cut or overwritten?"),
        (make_unreadable, "{path} cannot be read: it is not a file"),
        (make_torn, "{path} ends in the middle of an event, which is left out: was its process killed?"),
        (make_damaged, "{path} has 2 lines that are not an event, and left out: was the file cut or overwritten?"),
        (make_long_line, "{path} has 4 lines that are not an event, and left out: was the file cut or overwritten?"),
        (make_gap, "2 events are missing of process {process}: flows may lack executions"),
    ],
)
def test_folder_or_file_with_a_fault_is_a_sentence_and_all_else_is_read(
    make: Callable[[Path], None], sentence: str, tmp_path: Path
) -> None:
    recorder = Recorder()
    record(recorder, "good", 1.0)
    write_events(tmp_path / "good", [each | {"process": PROCESSES[1]} for each in recorder.events])
    faulty = tmp_path / "faulty"
    faulty.mkdir()
    make(faulty)
    flows = read_all(FlowReader([faulty, tmp_path / "good"]))
    assert "order good" in traces(flows.latest(9))
    path = faulty / "p-000001.jsonl"
    assert flows.problems == [sentence.format(folder=faulty, path=path, process=PROCESSES[0])]


def test_sentence_about_a_file_goes_with_the_file_or_once_its_last_event_is_complete(tmp_path: Path) -> None:
    make_newer(tmp_path)
    flows = read_all(FlowReader([tmp_path]))
    assert "has events of format 3" in flows.problems[0]
    (tmp_path / "p-000001.jsonl").unlink()
    read_all(flows)
    assert flows.problems == [f"no events of stages in {tmp_path}: a service writes them with {RUN_EVENTS}"]
    make_torn(tmp_path)
    read_all(flows)
    assert [each.partition(" ends in the middle")[1] != "" for each in flows.problems] == [True]
    with (tmp_path / "p-000001.jsonl").open("ab") as file:
        file.write(b'ess":"p","number":1,"at":1}\n')
    read_all(flows)
    assert not flows.problems


def test_file_of_a_process_that_has_shut_down_is_not_looked_at_again(tmp_path: Path) -> None:
    recorder = Recorder()
    record(recorder, "f1", 1.0)
    closed = {"kind": "closed", "process": PROCESSES[0], "number": 3, "at": BEGINNING_US}
    write_events(tmp_path, [*recorder.events, closed])
    flows = read_all(FlowReader([tmp_path]))
    assert not flows._files._files and len(flows) == 1


def test_path_that_is_not_utf8_is_escaped_in_sentences(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    flows = read_all(FlowReader([folder]))
    for problems in (flows.problems, find_flows([folder], "order 7").problems):
        assert [rf"{tmp_path}/\udcff does not exist" in each for each in problems] == [True]


def test_folder_that_appears_later_is_read(tmp_path: Path) -> None:
    flows = FlowReader([tmp_path / "later"])
    assert not flows.read() and flows.problems
    recorder = Recorder()
    record(recorder, "f1", 1.0)
    write_events(tmp_path / "later", recorder.events)
    assert flows.read() and not flows.problems


def test_damaged_files_stop_nothing(tmp_path: Path) -> None:
    seed = Random().randrange(1 << 30)
    random = Random(seed)
    events = sorted(random_events(random, 8), key=lambda each: (each["process"], each["number"]))
    for path in write_events(tmp_path, events):
        content = bytearray(path.read_bytes())
        for _ in range(random.choice((1, 10, 500))):
            at = random.randrange(len(content))
            content[at : at + random.randrange(3)] = random.choice((b"\n", b'"', b"\x00", b"9" * 400, b"\xff", b"{}"))
        path.write_bytes(content)
    flows = read_all(FlowReader([tmp_path]))
    found = find_flows([tmp_path], random.choice(events).get("trace", "")).flows
    assert all(to_text(each) and to_html(each) for each in (*flows.latest(100), *found)), seed


def test_file_that_became_shorter_is_a_sentence_and_its_new_events_are_read(tmp_path: Path) -> None:
    recorder = Recorder()
    record(recorder, "f1", 1.0)
    (path,) = write_events(tmp_path, recorder.events)
    flows = read_all(FlowReader([tmp_path]))
    os.truncate(path, path.stat().st_size - 10)
    read_all(flows)
    assert flows.problems == [f"{path} became shorter while it was read: its events may be incomplete"]
    with path.open("ab") as file:
        file.write(b"\n")
    recorder.events.clear()
    record(recorder, "f2", 2.0)
    write_events(tmp_path, recorder.events)
    assert traces(read_all(flows).latest(1)) == ["order f2"]


def test_first_read_leaves_out_old_files_beyond_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    for number in range(1, 5):
        record(recorder, f"f{number}", number)
        (path,) = write_events(tmp_path, recorder.events, number=number)
        recorder.events.clear()
        os.utime(path, (number, number))
    size = path.stat().st_size
    monkeypatch.setattr(reader, "FIRST_BYTES_MAX", 2 * size + 10)
    flows = read_all(FlowReader([tmp_path]))
    assert traces(flows.latest(9)) == ["order f4", "order f3"]
    assert abs(flows.skipped_bytes - 2 * size) < 20
    # The limit is for the first read alone.
    for number in range(5, 8):
        record(recorder, f"f{number}", number)
        write_events(tmp_path, recorder.events, number=number)
        recorder.events.clear()
    assert traces(read_all(flows).latest(3)) == ["order f7", "order f6", "order f5"]
    # A file that is too large by itself is read nevertheless, as the latest.
    monkeypatch.setattr(reader, "FIRST_BYTES_MAX", 10)
    assert traces(read_all(FlowReader([tmp_path])).latest(9)) == ["order f7"]


def test_flows_that_failed_or_have_not_ended_are_not_pushed_out_by_ended_ones(tmp_path: Path) -> None:
    recorder = Recorder()
    for number, outcome in enumerate(("rejected", "failed", "", "completed")):
        record(recorder, f"early {number}", number, 1000.0, outcome)
    for number in range(3000):
        record(recorder, f"f{number}", 10 + number, 0.5)
    write_events(tmp_path, recorder.events)
    flows = read_all(FlowReader([tmp_path], bytes_max=200_000))
    assert len(flows) < 200
    assert traces(flows.given_up(9)) == ["order early 0"]
    assert traces(flows.failed(9)) == ["order early 1"]
    assert traces(flows.unended(9)) == ["order early 1", "order early 2"]
    # It is one of the slowest.
    assert traces(flows.slowest(1)) == ["order early 0"] or traces(flows.slowest(2))[1] == "order early 3"
    assert "order early 3" in traces(flows.slowest(2))
    assert traces(flows.latest(1)) == ["order f2999"]
    assert not flows.find("order f7")


@pytest.mark.parametrize("outcome", ["rejected", "failed", "", "completed"])
def test_each_kind_of_flow_is_bounded_the_oldest_go_first(outcome: str, tmp_path: Path) -> None:
    recorder = Recorder()
    for number in range(2000):
        record(recorder, f"f{number}", number, 0.5, outcome)
    write_events(tmp_path, recorder.events)
    flows = read_all(FlowReader([tmp_path], bytes_max=200_000))
    assert 10 < len(flows) < 250
    assert traces(flows.latest(1)) == ["order f1999"]
    assert not flows.find("order f1000")


@pytest.mark.parametrize(
    ("count", "messages", "repeats"), [(90, 1, 1), (20, 12, 1), (5, 12, 30)], ids=["small", "large", "long ids"]
)
def test_memory_is_bounded_whatever_is_read(count: int, messages: int, repeats: int, tmp_path: Path) -> None:
    random = Random(5)
    bytes_max = 512 * 1024
    for number in range(1, 9):
        recorder = Recorder()
        for flow in range(count):
            id = f"{number} {flow}".ljust(32, "x")
            for message in range(messages):
                text = f"{id} {message}" * repeats
                facts: Event = {"parent": text, "stage": f"stage {random.randrange(50)}"}
                execution = recorder.start(text, flow, flow=id, trace="ü" * random.randrange(200), **facts)
                if outcome := ("completed", "rejected", "failed", "")[flow % 4]:
                    recorder.end(execution, flow + 1, outcome)
        write_events(tmp_path, (each | {"process": f"{PROCESSES[0]}{number}"} for each in recorder.events))
    tracemalloc.start()
    try:
        flows = read_all(FlowReader([tmp_path], bytes_max=bytes_max))
        traced = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    shares = sum(share.bytes for share in flows._shares.values())
    assert shares > bytes_max * 0.5, "the memory is used"
    # The names of stages, and the positions in the files, are beyond it.
    assert traced < bytes_max + 50_000


def test_large_flow_keeps_its_first_executions_and_all_that_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "EXECUTIONS_MAX", 10)
    recorder = Recorder()
    for number in range(100):
        execution = recorder.start(f"m{number}", number)
        recorder.end(execution, number + 0.5, "rejected" if number == 50 else "completed")
    recorder.start("m100", 100)
    write_events(tmp_path, recorder.events)
    (flow,) = read_all(FlowReader([tmp_path])).latest(9)
    assert len(flow.executions) + flow.omitted == 101
    assert len(flow.executions) <= 13
    assert {"m0", "m50", "m100"} <= {each.message for each in flow.executions}
    assert (flow.given_up, flow.in_progress) == (1, 1)


def test_interrupted_executions_do_not_stay_when_their_flows_are_forgotten(tmp_path: Path) -> None:
    recorder = Recorder()
    for number in range(3000):
        record(recorder, f"f{number}", number, outcome="")
    write_events(tmp_path, recorder.events)
    flows = read_all(FlowReader([tmp_path], bytes_max=200_000))
    assert len(flows._running) == len(flows) < 200


def test_files_of_several_processes_are_read_in_the_order_of_their_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_files, "CHUNK_BYTES", 2000)
    recorder = Recorder()
    for number in range(300):
        # The flow's stages run in different processes, one after the other.
        for process in range(3):
            execution = recorder.start(f"{number} {process}", number, flow=f"f{number}", process=process)
            recorder.end(execution, number + 0.5)
    write_events(tmp_path, recorder.events)
    flows = read_all(FlowReader([tmp_path], bytes_max=200_000))
    complete = [each for each in flows.latest(20) if each.messages == 3]
    assert len(complete) == 20
    assert flows.latest(1)[0].started_at == BEGINNING_US + 299 * SECOND_US


def test_more_problems_than_a_page_can_show_are_not_kept(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"p{number}-000001.jsonl").write_bytes(line(opened(f"p{number}", format=9)))
    flows = read_all(FlowReader([tmp_path]))
    assert len(flows.problems) == event_files.PROBLEMS_MAX
