"""Tests of audits whose queues are cut into sections: Spark finds the same as in whole queues.

TRUENEXT_DRAW=all TRUENEXT_AUDITS=5 pytest tests/spark/test_sections.py   longer
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from pyspark.sql import DataFrame

from tests.drawing import one_of
from tests.spark.histories import Event, RandomHistory, joined
from tests.spark.plain import outcomes_of
from tests.spark.test_audit import AUDITS, STUCK_SECONDS
from truenext.spark.audit import section_plan
from truenext.spark.audit.audit import audit
from truenext.spark.audit.broker_numbers import NUMBER_BITS
from truenext.spark.audit.section_plan import Grain, Section

Frame = Callable[[list[Event]], DataFrame]
SIZES = (3, 10, 40)

# Alone on two cores an audit takes 20 s. On a busy machine it takes minutes.
pytestmark = pytest.mark.timeout(900 * AUDITS)


@one_of("size", SIZES, [f"sections of {size}" for size in SIZES])
@pytest.mark.drawn
def test_audit_in_sections_finds_the_same_as_the_audits_of_whole_queues(frame: Frame, size: int) -> None:
    first = random.SystemRandom().randrange(2**31)
    print(f"first seed {first}")
    for seed in range(first, first + 8 * AUDITS, 8):
        history = joined(RandomHistory(each, 60, faults=0.3).events for each in range(seed, seed + 8))
        results = audit(frame(history), stuck_seconds=STUCK_SECONDS, section_events=size)
        outcomes = outcomes_of(history, STUCK_SECONDS)
        assert _found(results.tables) == sorted(
            (each["queue"], *(each[name] for name in _FOUND)) for each in outcomes if each["row"] == "finding"
        )
        depths = results.tables["depth"].select("queue", "event", "waiting", "held").collect()
        names = ("queue", "event", "waiting", "held")
        whole = [tuple(each[name] for name in names) for each in outcomes if each["row"] == "depth"]
        assert sorted(map(tuple, depths)) == sorted(whole)
        places = results.tables["positions"].select("queue", "sequence", "arrival", "delivery").collect()
        messages = [each for each in outcomes if each["row"] == "message" and each["delivery"] > 0]
        assert sorted(map(tuple, places)) == sorted(
            (each["queue"], each["sequence"], each["arrival"], each["delivery"]) for each in messages
        )
        results.unpersist()


_FOUND = ("event", "sequence", "kind")


def _found(tables: dict[str, DataFrame]) -> list[tuple[Any, ...]]:
    found = []
    for name, kind in {
        "violations": None,
        "lost": "lost",
        "duplicates": None,
        "consumers": None,
        "stuck": "stuck",
    }.items():
        for row in tables[name].collect():
            sequence = -1 if row["sequence"] is None else row["sequence"]
            found.append((row["queue"], row["event"], sequence, kind or row["kind"]))
    return sorted(found)


def grain(number: int, arrivals: int, ends: int, *, grouped: int = 0, paused: int = 0, resumed: int = 0) -> Grain:
    return Grain("q", number, 10, arrivals, grouped, ends, paused, resumed)


def test_section_of_a_queue_has_as_many_events_as_messages_of_groups_wait() -> None:
    """100 messages come, 100 more come and go with them in turn, and all go."""
    grains = [grain(number, 10, 0, grouped=10) for number in range(10)]
    grains += [grain(number, 5, 5, grouped=5) for number in range(10, 30)]
    grains += [grain(number, 0, 10) for number in range(30, 40)]
    sections = [*section_plan.queue_sections(grains, 4, section_events=20)]
    assert [(each.first, each.arrivals, each.ticks) for each in sections] == [
        (0, 0, 0),
        (2 << 4, 20, 20),
        (12 << 4, 110, 120),
        (22 << 4, 160, 220),
        (32 << 4, 200, 320),
    ]


def test_section_behind_a_saved_cut_has_as_many_events_as_saved_messages_of_groups_wait() -> None:
    """Fixed: ends of other messages were taken for theirs, so that sections became short at once."""
    grains = [grain(number, 0, 10) for number in range(40)]
    sections = [*section_plan.queue_sections(grains, 4, 20, 7, backlog=400, grouped=100)]
    assert [(each.first, each.ticks) for each in sections] == [(7, 0), *((at << 4, 10 * at) for at in (10, 20, 30))]


def test_sections_of_a_queue_without_groups_have_the_least_number_of_events() -> None:
    grains = [grain(number, 9, 1, paused=number == 2) for number in range(0, 20, 2)]
    sections = [*section_plan.queue_sections(grains, 0, section_events=25)]
    assert [each.ticks for each in sections] == [0, 30, 60]
    assert all(after.first > before.first for before, after in pairwise(sections))
    assert [each.paused for each in sections] == [0, 1, 1]


def test_sections_are_as_short_as_their_groups_allow() -> None:
    for seed in range(50):
        numbers = random.Random(seed)
        waves = numbers.choices([(10, 0), (0, 10), (5, 5)], [seed % 3, 1, 1], k=60)
        grouped = [numbers.randint(0, arrivals) for arrivals, _ in waves]
        grains = [grain(at, *wave, grouped=some) for at, (wave, some) in enumerate(zip(waves, grouped, strict=True))]
        # At the beginning of each grain, and at the end. More messages may go than the history knows of.
        waiting, backlogs = 0, [0]
        for at, (arrivals, ends) in enumerate(waves):
            waiting = max(waiting + arrivals - ends, 0)
            backlogs.append(min(waiting, sum(grouped[: at + 1])))
        firsts = [0]
        for at in range(1, 60):
            events, rest = 10 * (at - firsts[-1]), 10 * (60 - at)
            if events >= max(20, *backlogs[firsts[-1] : at + 1]) and rest > max(20, backlogs[at]) // 2:
                firsts.append(at)
        assert [each.first for each in section_plan.queue_sections(grains, 0, section_events=20)] == firsts


def test_section_has_the_last_pause_and_the_last_end_of_one_before_it() -> None:
    grains = [grain(at, 5, 5, paused=7 * (at == 1), resumed=9 * (at == 1)) for at in range(6)]
    sections = [*section_plan.queue_sections(grains, 0, section_events=10)]
    assert [(each.paused, each.resumed) for each in sections] == [(0, 0), (0, 0), (7, 9), (7, 9), (7, 9), (7, 9)]


def test_table_of_a_plan_has_the_section_of_each_event_once() -> None:
    bits, limits = 2, [(5, 39), (1, 22)]
    first = 1 << NUMBER_BITS
    sections = [
        Section(queue, event, 0, 0, 0, 0)
        for queue, event in (("0:a", 0), ("0:a", 16), ("0:b", 0), ("1:c", 0), ("1:c", first + 8), ("1:c", first + 12))
    ]
    brokers = {"0:a": 0, "0:b": 0, "1:c": 1}
    grains = {queue: section_plan._all_grains(limits[broker], broker, bits) for queue, broker in brokers.items()}
    rows = section_plan._table(sections, grains, bits).to_pylist()
    found = {(row["queue"], row["grain"]): row["section"] for row in rows}
    assert len(found) == len(rows)
    expected = {}
    for queue, broker in brokers.items():
        for event in range(limits[broker][0], limits[broker][1] + 2):
            number = event + (broker << NUMBER_BITS)
            before = [at for at, each in enumerate(sections) if each.queue == queue and each.first <= number]
            expected[queue, number >> bits] = before[-1]
    assert found == expected


def test_rest_of_a_queue_that_is_short_belongs_to_its_last_section() -> None:
    grains = [grain(number, 5, 5) for number in range(5)]
    assert [each.ticks for each in section_plan.queue_sections(grains, 0, section_events=20)] == [0, 20]
