"""Tests of the event files of stages: they are readable after crashes of the process and on a full disk."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from truenext.client.core.message import Content
from truenext.errors import ConfigurationError
from truenext.flows.envelope import EMPTY, VERSION, Envelope, FlowContext
from truenext.flows.events import TRACE_MAX
from truenext.history.stage_files import FORMAT, delete_old_files, stage_file, stage_files
from truenext.stage import Flow, Reject, Service
from truenext.stage.core.definitions import StageSettings
from truenext.stage.events import StageEvents
from truenext.stage.interceptors.interceptor import ExecutionResult
from truenext.testing import broker

DAY_S = 24 * 3600.0


def message(sequence: int, destination: str = "/queue/order.place", attempts: int = 0) -> Any:
    headers = {"message-id": str(sequence), "truenext-sequence": str(sequence), "destination": destination}
    headers |= {"truenext-deliveries": str(attempts + 1), "truenext-attempts": str(attempts)}
    return Content(headers, b"", 1)


def envelope(id: str = "m1", trace: str = "web o1") -> Envelope:
    facts = FlowContext(id="f1", trace=trace, started_ms=1, started_by="web")
    return Envelope(VERSION, id, facts, "send", "web", EMPTY, parent="p1")


class FakeStage:
    """Attributes of a stage that its events need."""

    queue = "order.place"
    settings = StageSettings("order.place")


STAGE: Any = FakeStage()


@contextmanager
def opened_events(folder: Path) -> Iterator[StageEvents]:
    events = StageEvents(folder, "shop", "shop on web-1 pid 7")
    try:
        yield events
    finally:
        events.close()


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the events of all files, one file after the other."""
    return [json.loads(line) for path in stage_files(folder) for line in path.read_bytes().splitlines()]


def kinds(folder: Path) -> list[str]:
    return [each["kind"] for each in lines(folder)]


def until(condition: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_events_of_a_stage_are_one_line_each_without_contents(tmp_path: Path) -> None:
    with opened_events(tmp_path / "new" / "folder") as events:
        started = events.add_started(STAGE, message(17, attempts=2), envelope(trace="x" * 1000))
        events.add_sql_committed(started)
        ending = ExecutionResult(
            outcome="failed",
            error=ValueError("secret"),
            given_up_for="attempts exhausted",
            run=0.25,
            commit=None,
            total=0.5,
        )
        events.add_ended(started, ending)
    opened, first, second, third, closed = lines(tmp_path / "new" / "folder")
    process = opened["process"]
    assert {each["process"] for each in (first, second, third, closed)} == {process}
    assert [each["number"] for each in (opened, first, second, third, closed)] == [0, 1, 2, 3, 4]
    assert opened | {"at": 0} == {
        "kind": "opened",
        "process": process,
        "number": 0,
        "at": 0,
        "format": FORMAT,
        "service": "shop",
        "instance": "shop on web-1 pid 7",
    }
    assert first | {"at": 0} == {
        "kind": "started",
        "process": process,
        "number": 1,
        "at": 0,
        "stage": "order.place",
        "queue": "order.place",
        "sequence": 17,
        "message": "m1",
        "parent": "p1",
        "flow": "f1",
        "trace": "x" * TRACE_MAX,
        "sender": "web",
        "attempt": 3,
        "deliveries": 3,
    }
    assert abs(first["at"] / 1e6 - time.time()) < 60, "microseconds since the epoch"
    assert (second["kind"], second["execution"]) == ("SQL committed", 1)
    assert {name: value for name, value in third.items() if name not in ("process", "number", "at")} == {
        "kind": "failed",
        "given_up_for": "attempts exhausted",
        "execution": 1,
        "run_us": 250_000,
        "total_us": 500_000,
        "error": "ValueError",
    }
    assert closed["kind"] == "closed"
    assert (stage_files(tmp_path / "new" / "folder")[0].stat().st_mode & 0o777) == 0o600


def test_event_of_a_published_message_has_no_queue_and_sequence(tmp_path: Path) -> None:
    with opened_events(tmp_path) as events:
        events.add_started(STAGE, message(17, "/topic/news"), envelope())
    assert not {"queue", "sequence"} & lines(tmp_path)[1].keys()


def test_event_has_the_time_at_which_the_broker_accepted_the_message_if_the_broker_sends_it(tmp_path: Path) -> None:
    with opened_events(tmp_path) as events:
        accepted = message(17)
        events.add_started(STAGE, accepted, envelope())
        accepted.headers["timestamp"] = "1767225600123"
        events.add_started(STAGE, accepted, envelope())
    assert [each.get("accepted_ms") for each in lines(tmp_path)[1:3]] == [None, 1767225600123]


def test_a_file_that_is_full_is_followed_by_another_and_the_oldest_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truenext.stage.events.FILE_BYTES_MAX", 1000)
    monkeypatch.setattr("truenext.stage.events.delete_old_files", partial(delete_old_files, bytes_max=3000))
    with opened_events(tmp_path) as events:
        for number in range(1, 31):
            events.add_started(STAGE, message(number), envelope())
            path = stage_files(tmp_path)[-1]
            until(lambda number=number: f'"number":{number},' in stage_files(tmp_path)[-1].read_text())
            # Files that are made within one tick of the disk's clock have one time.
            os.utime(path, (time.time() - 100 + number, time.time() - 100 + number))
    remaining = stage_files(tmp_path)
    assert sum(path.stat().st_size for path in remaining) < 4500
    assert len(remaining) > 1
    for path in remaining:
        first, *others = path.read_bytes().splitlines()
        assert json.loads(first)["kind"] == "opened"
        assert others
    numbers = [each["number"] for each in lines(tmp_path) if each["kind"] != "opened"]
    assert numbers == list(range(numbers[0], 32)), "what is left has no hole"
    assert numbers[0] > 1


def test_old_event_files_are_deleted_and_a_process_with_one_open_starts_another(tmp_path: Path) -> None:
    with opened_events(tmp_path) as events:
        old = stage_files(tmp_path)[0]
        os.utime(old, (time.time() - 31 * DAY_S, time.time() - 31 * DAY_S))
        with opened_events(tmp_path):
            assert not old.exists()
        events.add_started(STAGE, message(1), envelope())
    second = stage_file(tmp_path, events.process, 2)
    assert second in stage_files(tmp_path)
    assert [json.loads(line)["kind"] for line in second.read_bytes().splitlines()] == ["opened", "started", "closed"]


def test_files_of_30_days_are_kept(tmp_path: Path) -> None:
    for number in (1, 2):
        path = stage_file(tmp_path, f"p{number}", 1)
        path.write_text("")
        os.utime(path, (time.time() - 29 * DAY_S, time.time() - 29 * DAY_S))
    assert not delete_old_files(tmp_path)


def test_two_processes_write_into_one_folder(tmp_path: Path) -> None:
    with opened_events(tmp_path) as one, opened_events(tmp_path) as other:
        for number in range(100):
            one.add_started(STAGE, message(2 * number), envelope())
            other.add_started(STAGE, message(2 * number + 1), envelope())
    started = [each for each in lines(tmp_path) if each["kind"] == "started"]
    assert sorted(each["sequence"] for each in started) == list(range(200))
    for process, rest in ((one.process, 0), (other.process, 1)):
        assert [each["number"] for each in started if each["process"] == process] == list(range(1, 101))
        assert all(each["sequence"] % 2 == rest for each in started if each["process"] == process)


KILLED = """
import sys, time
from pathlib import Path
from tests.stages.test_events import STAGE, envelope, message
from truenext.stage.events import StageEvents

events = StageEvents(Path(sys.argv[1]), "shop", "shop")
number = 0
while True:
    number += 1
    events.add_started(STAGE, message(number), envelope())
    if not number % 100:
        time.sleep(0.001)
"""


def test_a_process_that_is_killed_leaves_what_can_be_read(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{root}"}
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], cwd=root, env=environment)
    try:
        until(lambda: sum(path.stat().st_size for path in stage_files(tmp_path)) > 1_000_000)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    content = b"".join(path.read_bytes() for path in stage_files(tmp_path))
    *whole, _torn = content.split(b"\n")
    numbers = [json.loads(line)["number"] for line in whole]
    assert numbers == list(range(len(numbers)))


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="events of stages cannot be written"):
        StageEvents(tmp_path / "file", "shop", "shop")


def test_events_that_a_full_disk_does_not_take_are_lost_and_leave_a_gap_of_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_full = False
    failures = 0
    write = os.write

    def half(file: int, data: Any) -> int:
        nonlocal failures
        if not is_full or len(data) < 100:
            return write(file, data)
        write(file, bytes(data)[: len(data) // 2])
        failures += 1
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("truenext.stage.events.os.write", half)
    monkeypatch.setattr("truenext.stage.events.RETRY_S", 0.01)
    caplog.set_level(logging.WARNING, "truenext.stage")
    with opened_events(tmp_path) as events:
        events.add_started(STAGE, message(1), envelope())
        until(lambda: '"number":1,' in stage_files(tmp_path)[0].read_text())
        is_full = True
        events.add_started(STAGE, message(2), envelope())
        until(lambda: "cannot be written" in caplog.text)
        assert vars(caplog.records[0])["folder"] == str(tmp_path)
        # What waits now is tried with a new file.
        events.add_started(STAGE, message(3), envelope())
        until(lambda: failures >= 2)
        is_full = False
        until(lambda: len(events._unwritten) == 0)
        events.add_started(STAGE, message(4), envelope())
        until(lambda: "are written again" in caplog.text)
    first, second = (path.read_bytes().split(b"\n") for path in stage_files(tmp_path))
    assert [json.loads(line)["number"] for line in first[:-1]] == [0, 1]
    assert first[-1].startswith(b"{"), "half a line, which is the last"
    assert [json.loads(line)["number"] for line in second[:-1]] == [0, 4, 5]


def test_unwritten_events_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truenext.stage.events.UNWRITTEN_BYTES_MAX", 10_000)
    with opened_events(tmp_path) as events:
        for number in range(1000):
            events.add_started(STAGE, message(number), envelope())
            assert len(events._unwritten) < 11_000


class Failed(Exception):
    pass


def test_a_service_tells_what_its_stages_do(tmp_path: Path) -> None:
    asyncio.run(run_a_service(tmp_path))
    started: dict[int, dict[str, Any]] = {}
    story = []
    for each in lines(tmp_path):
        if each["kind"] == "started":
            started[each["number"]] = each
        elif "execution" in each:
            story.append(
                (
                    started[each["execution"]]["stage"],
                    started[each["execution"]]["attempt"],
                    each["kind"],
                    each.get("error"),
                )
            )
    assert sorted(story) == [
        ("place", 1, "failed", "Failed"),
        ("place", 2, "completed", None),
        ("place.stage.last", 1, "SQL committed", None),
        ("place.stage.last", 1, "completed", None),
        ("refuse", 1, "rejected", "Reject"),
    ]
    first, again, last = (each for each in started.values() if each["stage"] != "refuse")
    assert first["message"] == again["message"] == first["flow"] == last["flow"] == last["parent"]
    assert first["sequence"] == again["sequence"] < last["sequence"]
    # On a busy machine the service may have released it once in between.
    assert first["deliveries"] == 1 and again["deliveries"] >= 2
    assert last["sender"] == "shop place"
    assert kinds(tmp_path)[-1] == "closed"


async def run_a_service(folder: Path) -> None:
    sqlite3.connect(folder / "shop.db").close()
    async with broker() as here:
        app = Service("shop", broker=here.url, database=f"sqlite:///{folder / 'shop.db'}", events=folder)
        place = app.endpoint("place", str, int)
        refuse = app.endpoint("refuse", str)

        @place.stage
        async def first(message: str, flow: Flow) -> None:
            if flow.attempt == 1:
                raise Failed
            flow.next(1)

        @place.stage
        def last(message: int, sql: Session) -> int:
            return int(sql.execute(text("SELECT :said"), {"said": message}).scalar_one())

        @refuse.stage
        async def only(message: str) -> None:
            raise Reject("no")

        async with app.running():
            assert await app.ask(place, "tea", trace="o1") == 1
            await app.send(refuse, "tea", trace="o2")
            while '"rejected"' not in "".join(path.read_text() for path in stage_files(folder)):
                await asyncio.sleep(0.01)
