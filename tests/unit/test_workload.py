"""Tests that the workloads of a recording have the messages their names promise."""

import random
from collections import Counter

import pytest

from truenext.spark.recorder import WORKLOADS, WorkloadMessage, make_mix, make_persistence_alternation, make_production


def test_production_is_the_batch_first_and_then_the_interactive_ones() -> None:
    assert (
        make_production(4000, random.Random(0))
        == [WorkloadMessage(4, True)] * 3000 + [WorkloadMessage(9, False)] * 1000
    )


def test_alternation_differs_in_persistence_alone() -> None:
    assert make_persistence_alternation(3, random.Random(0)) == [
        WorkloadMessage(4, True),
        WorkloadMessage(4, False),
        WorkloadMessage(4, True),
    ]


def test_mix_is_determined_by_its_seed() -> None:
    assert make_mix(500, random.Random(7)) == make_mix(500, random.Random(7)) != make_mix(500, random.Random(8))
    assert len(Counter(make_mix(500, random.Random(7)))) == 20


@pytest.mark.parametrize("case", WORKLOADS)
@pytest.mark.parametrize("count", [1, 2, 5, 4001])
def test_workload_has_the_requested_number_of_messages(case: str, count: int) -> None:
    assert len(WORKLOADS[case](count, random.Random(1))) == count
