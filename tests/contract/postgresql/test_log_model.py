"""Tests of the model of a log in all orders of steps, and of the search with planted faults."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.postgresql.log_model import FAULTS, LogModel, Violation
from tests.contract.postgresql.log_search import EXAMPLES, is_long, search, walk
from tests.contract.postgresql.log_state import Bounds


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(steps=6),
        Bounds(steps=4, failures=1, chores=1),
        Bounds(brokers=2, steps=5, failures=2, chores=1),
        Bounds(brokers=2, steps=5, failures=1, failovers=1),
        Bounds(brokers=2, steps=5, failures=1, losses=1),
        Bounds(brokers=2, steps=5, chores=2, damages=1),
    ],
    ids=str,
)
def test_brokers_that_share_a_log_keep_their_promises_in_any_order_of_steps(bounds: Bounds) -> None:
    print(bounds, search(bounds), sep=": ")


@is_long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(failures=2),
        Bounds(failures=1, chores=1),
        Bounds(chores=2),
        Bounds(failures=1, failovers=1),
        Bounds(losses=1),
        Bounds(damages=1),
        Bounds(brokers=2, failures=2, chores=2),
        Bounds(brokers=2, failures=2, failovers=1, losses=1),
        Bounds(brokers=2, chores=2, losses=1),
        Bounds(brokers=2, chores=2, damages=1),
    ],
    ids=str,
)
def test_brokers_that_share_a_log_keep_their_promises_with_more_failures(bounds: Bounds) -> None:
    print(bounds, search(bounds), sep=": ")


MANY = Bounds(brokers=4, steps=20, failures=12, chores=12, failovers=1, losses=1, damages=1)


@settings(max_examples=EXAMPLES)
@given(st.lists(st.integers(0, 1000), min_size=30, max_size=100))
def test_brokers_that_share_a_log_keep_their_promises_in_random_orders_of_many_steps(choices: list[int]) -> None:
    walk(LogModel().steps, MANY.initial_state(), choices)


FENCED, FORGOTTEN = "a fenced broker appends", "exits with status 4, and nothing of that kind"
OTHER_CONTENT, NO_PREFIX = "does not have the content", "is no prefix of the log"

# By as little as goes wrong.
NOTICED = {
    "a row is inserted without a comparison": (Bounds(2, 4, losses=1), "does not stand on row"),
    "the epoch is not compared": (Bounds(2, 4, failures=1), FORGOTTEN),
    "the digest is not compared": (Bounds(2, 5, losses=1), "does not stand on row"),
    "a row in doubt is repeated under a new number": (Bounds(1, 4, failures=1), "is in the log twice"),
    "a fenced broker appends its row after the last one": (Bounds(2, 4), FENCED),
    "a broker appends after the last row that PostgreSQL still has": (Bounds(1, 4, losses=1), FENCED),
    "a takeover whose answer was lost is not repeated": (Bounds(2, 4, failures=1), FORGOTTEN),
    "the frame comes before its row": (Bounds(1, 3, failures=1), "the log has no such row"),
    "a takeover does not lock the log": (Bounds(2, 3), "a takeover fails"),
    "a row that is found counts as replicated": (Bounds(1, 4, failures=1), "its standby may not have it"),
    "the warning is ignored": (Bounds(1, 3, failures=1), "its standby may not have it"),
    "the position moves without a comparison": (Bounds(2, 5, chores=2), "the position moves back"),
    "rows are read before the position": (Bounds(2, 6, chores=3), "what is kept is not"),
    "a partition above the position is dropped": (Bounds(1, 4, chores=1), "that is not compacted is dropped"),
    "the newest row is dropped": (Bounds(2, 5, chores=2), "the newest row is dropped"),
    "a folder drops transient messages by itself": (Bounds(2, 3), NO_PREFIX),
    "a folder is made in two snapshots": (Bounds(2, 6, chores=1), OTHER_CONTENT),
    "a folder has an identity of its own": (Bounds(1, 1), "another identity"),
    "the checkpoint is ahead of the journal": (Bounds(1, 7, failures=1, chores=1), OTHER_CONTENT),
    "a new folder counts events from 1": (Bounds(2, 5, chores=1), OTHER_CONTENT),
    "a gap is passed over": (Bounds(2, 4, damages=1), "a gap is passed over"),
    "a changed row is passed over": (Bounds(2, 4, damages=1), "a changed row is passed over"),
    "a changed row is compacted": (Bounds(1, 4, chores=1, damages=1), "is compacted, though"),
    "a folder that went another way counts as a prefix": (Bounds(2, 6, losses=1), NO_PREFIX),
    "a folder that is ahead is made anew": (Bounds(1, 5, losses=1), "and this is passed over"),
}


def test_noticed_faults_are_the_faults_of_the_model() -> None:
    assert sorted(NOTICED) == sorted(FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_search_notices_planted_fault(fault: str) -> None:
    bounds, how = NOTICED[fault]
    with pytest.raises(Violation, match=how) as violation:
        search(bounds, fault)
    print(violation.value)
