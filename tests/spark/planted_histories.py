"""One history with every fault that the audit's tests plant in histories: in an engine, in the order of a queue, in
stories of consumers, at starts, and at random."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest

from tests.contract.test_history import busy
from tests.property import planted_faults
from tests.spark import test_client_history, test_consumers, test_engine_history
from tests.spark.busy_clients import BusyClients
from tests.spark.histories import EPOCH, Event, RandomHistory, joined
from tests.spark.plain import outcomes_of
from tests.spark.policies import alternating_buckets, serve, three_classes, two_buckets
from tests.spark.test_audit import restored_in_place
from tests.spark.test_consumers import STUCK_SECONDS, Story
from tests.spark.test_engine_history import GROUPS, OF_MANY, ORDERS, events_of

Plant = Callable[[pytest.MonkeyPatch], None]
SEEDS = 60
"""Largest number of histories of an engine until a fault must have shown."""
WITHOUT_DOUBT = range(3, 7)
"""Seeds of random histories in which no later start shows that a message was durable."""


def planted_history(dice: random.Random) -> list[Event]:
    """Return a history: first one run, in which all faults show side by side, then runs one after the other, with
    gaps."""
    histories = [*engine_histories(), *(serve(each, 1, messages=60)[0] for each in POLICIES), *stories()]
    alike = [each for each in histories if is_one_run(each)]
    others = [each for each in histories if not is_one_run(each)]
    at_random = [RandomHistory(seed, 60, faults=0.3).events for seed in WITHOUT_DOUBT]
    return joined([side_by_side(alike, dice), *others, restored_in_place("0000000a"), *at_random])


POLICIES = (two_buckets, alternating_buckets, three_classes)


def findings_of(events: list[Event]) -> list[dict[str, Any]]:
    """Return the findings of an audit without cuts."""
    return [each for each in outcomes_of(events, STUCK_SECONDS) if each["row"] == "finding"]


# ---- Faults of the engine ----


def engine_histories() -> Iterator[list[Event]]:
    """Yield for each fault that tests plant in the engine the first history that shows it."""
    for plant, kind in _parameters(test_engine_history.test_a_fault_planted_in_the_engine_is_seen_in_its_history):
        yield _first_with(plant, kind, lambda seed: busy(random.Random(seed), 120, ("",), ORDERS, ORDERS))
    group_fault = planted_faults.a_group_is_overtaken_by_later_messages_of_it
    yield _first_with(group_fault, "order", lambda seed: busy(random.Random(seed), 120, GROUPS, ORDERS, ORDERS))
    yield _first_with(
        test_engine_history.wildcard_consumers_get_the_lowest_priority_first,
        "inversion",
        lambda seed: busy(random.Random(seed), 120, ("",), OF_MANY["addresses"], OF_MANY["sent_to"]),
    )
    for plant, kind in _parameters(test_client_history.test_a_fault_planted_in_the_engine_is_seen_in_its_history):
        yield _first_with(plant, kind, lambda seed: BusyClients(seed, 200).recorded)


def _first_with(plant: Plant, kind: str, record: Callable[[int], Any]) -> list[Event]:
    with pytest.MonkeyPatch.context() as patched:
        plant(patched)
        for seed in range(SEEDS):
            events = events_of(record(seed))
            if any(each["kind"] == kind for each in findings_of(events)):
                return events
    raise AssertionError(f"no history has a finding {kind} with this fault: {plant}")


def _parameters(test: Any) -> list[Any]:
    """Return the values with which a test is parametrized."""
    marks = [each for each in getattr(test, "pytestmark", ()) if each.name == "parametrize"]
    return [values for each in marks for values in each.args[1]]


# ---- Stories ----


def stories() -> list[list[Event]]:
    """Return the stories of test_consumers.py that have a finding, by running its tests."""
    told: list[list[Event]] = []

    def tell(story: Story) -> list[tuple[str, int | None, str]]:
        told.append([*story.events])
        return [(each["kind"], each["sequence"], each["detail"]) for each in findings_of(story.events)]

    with patch.object(Story, "found", property(tell)):
        for name, test in inspect.getmembers(test_consumers, inspect.isfunction):
            if name.startswith("test_"):
                # A story goes on after it was judged: each test has stories of its own.
                for arguments in _arguments(test):
                    test(**arguments)
    return [each for each in told if findings_of(each)]


def _arguments(test: Any) -> list[dict[str, Any]]:
    names = [*inspect.signature(test).parameters]
    if not names:
        return [{}]
    values = [each if isinstance(each, tuple) else (each,) for each in _parameters(test)]
    return [dict(zip(names, each, strict=True)) for each in values]


# ---- Several histories as one run ----


def is_one_run(events: Sequence[Event]) -> bool:
    """Return whether a history has one start, and no gap."""
    numbers = [each["event"] for each in events]
    starts = [each for each in events if each["kind"] == "run-started"]
    return len(starts) == 1 and all(after == before + 1 for before, after in pairwise(numbers))


def side_by_side(histories: Iterable[list[Event]], dice: random.Random) -> list[Event]:
    """Return histories of one run each as one run, each with queues of its own, all mixed from beginning to end. No
    time between two events of a history becomes shorter."""
    parts = [_Part(number, events) for number, events in enumerate(histories, 1)]
    turns = [part for part in parts for _ in part.events[1:]]
    dice.shuffle(turns)
    merged = [parts[0].events[0] | {"event": 1, "run": 1, "at": EPOCH}]
    commits = 0
    for part in turns:
        event = part.next(merged[-1])
        if event["kind"] == "committed":
            commits += 1
            part.commit(event, commits)
        merged.append(event)
    for part in parts:
        part.commit({"batch": LAST_BATCH}, commits + 1)
    return merged


OFFSET = 100_000
"""Distance between the sequences, and the consumers, of two histories."""
LAST_BATCH = 10**9


class _Part:
    """History that becomes a part of another one."""

    def __init__(self, number: int, events: list[Event]) -> None:
        self.events = events
        self._number = number
        self._left = iter(events[1:])
        self._last: datetime = events[0]["at"]
        self._now = EPOCH
        self._open: list[Event] = []
        """Messages that are not durable yet."""

    def next(self, previous: Event) -> Event:
        """Return the next event, as it is behind `previous`."""
        own = next(self._left)
        self._now = max(previous["at"], self._now + (own["at"] - self._last))
        self._last = own["at"]
        event = own | {"event": previous["event"] + 1, "run": 1, "at": self._now}
        for name in ("queue", "target_queue"):
            event[name] = event[name] and f"{event[name]}.{self._number}"
        for name in ("sequence", "target_sequence", "consumer"):
            event[name] = event[name] and event[name] + self._number * OFFSET
        if event["kind"] == "accepted" and event["batch"]:
            self._open.append(event)
        return event

    def commit(self, event: Event, number: int) -> None:
        """Make messages up to the batch of an event durable by the commit with this number."""
        durable = [each for each in self._open if each["batch"] <= event["batch"]]
        self._open = [each for each in self._open if each["batch"] > event["batch"]]
        for each in (*durable, event):
            each["batch"] = number
