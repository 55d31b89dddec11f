"""Events of stages as services record them, made at random and from a few words, for tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

from truenext.flows.events import EventLine, decode_line
from truenext.history.stage_files import FORMAT, stage_file

Event = dict[str, Any]

SECOND_US = 1_000_000
BEGINNING_US = 1_767_225_600 * SECOND_US
"""First of January 2026."""
PROCESSES = tuple(f"019b76{number:x}00000a1b2c3d4" for number in range(3))
OUTCOMES = (*("completed",) * 6, "already processed", "failed", "rejected", "released", "in doubt", "")
"""Outcomes of random executions; "" if none is recorded."""
STAGES = ("order.place", "price", "order.place.stage.reserve", "mail")


class Recorder:
    """Processes that record events. Times are in seconds since the beginning."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._numbers = dict.fromkeys(PROCESSES, 0)

    def start(self, message: str, at: float, *, flow: str = "f1", process: int = 0, **other: Any) -> tuple[str, int]:
        """Record the start of an execution, and return its process and number."""
        event: Event = {
            "stage": "order.place",
            "message": message,
            "flow": flow,
            "trace": f"order {flow}",
            "sender": "shop",
            "attempt": 1,
            "deliveries": 1,
            "queue": "order.place",
            "sequence": 1,
        }
        return self._add(PROCESSES[process], "started", at, event | other)

    def commit_sql(self, execution: tuple[str, int], at: float) -> None:
        self._add(execution[0], "SQL committed", at, {"execution": execution[1]})

    def end(self, execution: tuple[str, int], at: float, outcome: str = "completed", **other: Any) -> None:
        facts = {"execution": execution[1], "total_us": 1500, "run_us": 1000}
        self._add(execution[0], outcome, at, facts | other)

    def _add(self, process: str, kind: str, at: float, facts: Event) -> tuple[str, int]:
        self._numbers[process] += 1
        number = self._numbers[process]
        at_us = BEGINNING_US + round(at * SECOND_US)
        self.events.append({"kind": kind, "process": process, "number": number, "at": at_us, **facts})
        return process, number


def opened(process: str, format: int = FORMAT, at: int = BEGINNING_US) -> Event:
    facts = {"format": format, "service": "shop", "instance": "shop on web-1"}
    return {"kind": "opened", "process": process, "number": 0, "at": at, **facts}


def write_events(folder: Path, events: Iterable[Event], *, number: int = 1) -> list[Path]:
    """Write the events into one file for each process, after those that are there, and return the files."""
    folder.mkdir(exist_ok=True)
    paths: dict[str, Path] = {}
    for event in events:
        process = event["process"]
        path = paths.setdefault(process, stage_file(folder, process, number))
        with path.open("ab") as file:
            if not path.stat().st_size:
                file.write(line(opened(process, at=event["at"])))
            file.write(line(event))
    return list(paths.values())


def line(event: Event) -> bytes:
    """Return an event as a service writes it: without blanks."""
    return json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def decoded(events: Iterable[Event]) -> list[EventLine]:
    lines = [decode_line(line(each)) for each in events]
    return [each for each in lines if each is not None]


def random_events(random: Random, flows: int) -> list[Event]:
    """Return events of some flows, with failures, retries, handlers, subscribers, killed processes, copies of events,
    and starts that were deleted."""
    recorder = Recorder()
    for number in range(flows):
        _record_flow(recorder, random, f"{number:032x}", random.uniform(0, 1000))
    events = recorder.events
    random.shuffle(events)
    missing = set(random.sample(range(len(events)), len(events) // 40))
    events = [each for index, each in enumerate(events) if index not in missing]
    return [*events, *random.sample(events, len(events) // 40)]


def _record_flow(recorder: Recorder, random: Random, flow: str, at: float) -> None:
    trace = random.choice(("", f"order {flow[-3:]}", f"órder <{flow[-2:]}>|mail"))
    parents = [""]
    for number in range(random.choice((1, 1, 2, 3, 5, 9, 70))):
        message = f"{flow} {number}"
        stage = random.choice(STAGES)
        queue, sequence = random.choice(((None, None), (stage, random.randrange(1 << 40))))
        accepted_ms = random.choice((None, (BEGINNING_US + round(at * SECOND_US)) // 1000 + random.randrange(-50, 50)))
        for attempt in range(1, random.choice((2, 2, 2, 3, 5))):
            at += random.expovariate(10)
            process = random.randrange(len(PROCESSES))
            facts: Event = {"trace": trace, "stage": stage, "queue": queue, "sequence": sequence, "attempt": attempt}
            facts |= {"deliveries": attempt, "accepted_ms": accepted_ms, "parent": random.choice(parents)}
            execution = recorder.start(message, at, flow=flow, process=process, **facts)
            at = _record_end(recorder, random, execution, at)
        parents.append(message)


def _record_end(recorder: Recorder, random: Random, execution: tuple[str, int], at: float) -> float:
    if random.random() < 0.2:
        at += random.expovariate(10)
        recorder.commit_sql(execution, at)
    at += random.expovariate(10)
    outcome = random.choice(OUTCOMES)
    if outcome in ("failed", "rejected"):
        reason = (
            random.choice((None, "attempts exhausted")) if outcome == "failed" else random.choice((None, "rejected"))
        )
        recorder.end(execution, at, outcome, error="Busy", given_up_for=reason)
    elif outcome:
        recorder.end(execution, at, outcome, commit_us=random.choice((None, 500)))
    return at
