"""Tests of the model of a failover in all orders of steps, and of the search with planted faults."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.postgresql.failover_model import FAULTS, FailoverModel
from tests.contract.postgresql.failover_state import Bounds
from tests.contract.postgresql.log_model import Violation
from tests.contract.postgresql.log_search import EXAMPLES, Found, Search, is_long, walk

FAST = (90, 110)
"""Rates with which broker B finds broker A quiet after one step of time."""


def search(bounds: Bounds, fault: str = "") -> Found:
    """Search all states of a failover. Raises: Violation, with the shortest way to it"""
    model = FailoverModel(fault)
    return Search(model.steps, model.begin(bounds)).run()


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(steps=7, times=2),
        Bounds(FAST, steps=6, times=1, failures=1),
        Bounds(steps=7, times=1, losses=1),
        Bounds(FAST, steps=5, times=1, failures=1, losses=1, is_replicated=True),
    ],
    ids=str,
)
def test_brokers_that_stand_by_keep_their_promises_in_any_order_of_steps(bounds: Bounds) -> None:
    print(bounds, search(bounds), sep=": ")


@is_long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(steps=9, times=3),
        Bounds(steps=7, times=2, failures=1),
        Bounds(rates=(90, 110), steps=8, times=2, failures=1),
        Bounds(steps=8, times=2, losses=1),
        Bounds(steps=6, times=2, failures=1, losses=1),
        Bounds(rates=(110, 90, 100), failover_after=(2000, 4000, 2000), steps=4, times=2, failures=1),
    ],
    ids=str,
)
def test_brokers_that_stand_by_keep_their_promises_with_more_failures(bounds: Bounds) -> None:
    print(bounds, search(bounds), sep=": ")


MANY = Bounds((110, 90, 100), (2000, 5000, 2000), steps=60, times=40, failures=8, losses=3)
TIMES_MS = (50, 200, 450, 900, 1100, 1800, 5000)


@settings(max_examples=EXAMPLES)
@given(st.booleans(), st.lists(st.integers(0, 1000), min_size=30, max_size=200))
def test_brokers_that_stand_by_keep_their_promises_in_random_orders_of_many_steps(
    is_replicated: bool, choices: list[int]
) -> None:
    model = FailoverModel(times_ms=TIMES_MS)
    walk(model.steps, model.begin(MANY._replace(is_replicated=is_replicated)), choices)


WRONGED, ALIKE = "which lives and reaches PostgreSQL", "in the epoch of another broker"
SILENCE, AFTERWARDS = "writes to a socket in silence", "after another broker has taken over"
ANOTHER_ROW, WITHOUT = "is repaired, and is another row", "without rows that it or the active broker has"

# By as little as goes wrong.
NOTICED = {
    "a takeover row is like any other": (Bounds(times=0, losses=1), ALIKE),
    "a takeover does not compare the last row": (Bounds(times=0), WRONGED),
    "a decision outlives its connection": (Bounds(steps=7, times=0, losses=1), WITHOUT),
    "a free mark is trusted in a new session": (Bounds(FAST, steps=7, times=1, failures=1), WRONGED),
    "the own failover_after counts": (Bounds(FAST, (4000, 2000), steps=7, times=1), AFTERWARDS),
    "time counts from the begin of a look": (Bounds(FAST, steps=7, times=1), WRONGED),
    "repaired rows have the epoch of the last row": (Bounds(steps=8, times=0, losses=1), ANOTHER_ROW),
    "a socket is written to in silence": (Bounds(steps=2, times=1), SILENCE),
    "silence counts from the end of an append": (Bounds(steps=4, times=1), SILENCE),
    "the clock stops with the process": (Bounds(steps=3, times=1, failures=1), SILENCE),
    "the identity is kept": (Bounds(FAST, steps=7, times=1, losses=1), "under the identity that they had"),
    "rows are repaired after another broker has gone on": (Bounds(steps=10, times=0, losses=1), ANOTHER_ROW),
    "a folder that is ahead takes over at once": (Bounds(steps=9, times=0, failures=1, losses=1), "may have more"),
    "rows that are ahead are dropped": (Bounds(FAST, steps=10, times=1, losses=1), WITHOUT),
    "another timeline is passed over": (Bounds(FAST, steps=7, times=1, losses=1), "on another timeline without"),
    "a beat comes late": (Bounds(steps=4, times=1, failures=1), WRONGED),
}


def test_noticed_faults_are_the_faults_of_the_model() -> None:
    assert sorted(NOTICED) == sorted(FAULTS)


@pytest.mark.alternates("faults of a failover")
@pytest.mark.parametrize("fault", FAULTS)
def test_search_notices_planted_fault(fault: str) -> None:
    bounds, how = NOTICED[fault]
    with pytest.raises(Violation, match=how) as violation:
        search(bounds, fault)
    print(violation.value)
