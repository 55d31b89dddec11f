"""Tests of the protocol of inbox, outbox and numbers in every order of steps, and of the search with planted faults.
Source: docs/decisions/0067-once.md"""

import os
from typing import NamedTuple

import pytest

from tests.stages.outbox.protocol.rules import FAULTS, Violation
from tests.stages.outbox.protocol.search import Graph, search
from tests.stages.outbox.protocol.state import Bounds
from tests.stages.outbox.protocol.symmetry import Renamer

is_long = pytest.mark.skipif("TRUENEXT_SEARCH" not in os.environ, reason="minutes: make search")


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(messages=1, cuts=1, losses=1, deaths=1, claims=1),
        Bounds(messages=2, cuts=1, deaths=1),
        Bounds(messages=1, started=1, cuts=1, losses=1, deaths=1),
        Bounds(messages=0, started=2, cuts=1, losses=1, deaths=1, claims=1),
        Bounds(messages=1, losses=1, restores=1, producers=3),
        Bounds(messages=2, restores=1, resolved=2, producers=3),
        Bounds(messages=0, started=2, cuts=1, losses=1, refusals=1),
        Bounds(messages=0, started=2, deaths=1, claims=1, refusals=1),
    ],
    ids=str,
)
def test_protocol_loses_and_repeats_nothing_in_any_order_of_steps(bounds: Bounds) -> None:
    print(bounds, search(bounds), sep=": ")


@is_long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(messages=1, cuts=2, losses=1, deaths=1, claims=1),
        Bounds(messages=1, cuts=1, losses=1, deaths=1, claims=2),
        Bounds(messages=2, cuts=1, losses=1, deaths=1),
        Bounds(messages=2, cuts=1, losses=1, claims=1),
        Bounds(messages=1, started=1, cuts=1, losses=1, deaths=1, claims=1),
        Bounds(messages=1, started=2, cuts=1, losses=1),
        Bounds(messages=2, started=1, cuts=1, deaths=1),
        Bounds(messages=1, cuts=2, losses=2, deaths=1, claims=1),
        Bounds(messages=2, cuts=1, losses=1, deaths=1, claims=1),
        Bounds(messages=1, cuts=1, claims=1, restores=1, producers=3),
        Bounds(messages=1, cuts=1, losses=1, deaths=1, restores=1, producers=3),
        Bounds(messages=1, started=1, cuts=1, losses=1, restores=1, resolved=2, producers=3),
        Bounds(messages=2, cuts=1, restores=1, resolved=2, producers=3),
        Bounds(messages=2, claims=1, restores=1, resolved=2, producers=3),
        Bounds(messages=1, started=1, claims=1, restores=1, resolved=2, producers=3),
        Bounds(messages=1, cuts=1, losses=1, deaths=1, claims=1, restores=1, resolved=2, producers=3),
        Bounds(messages=0, started=2, cuts=1, losses=1, deaths=1, claims=1, refusals=1),
        Bounds(messages=1, started=1, cuts=1, losses=1, claims=1, refusals=1),
        Bounds(messages=0, started=2, cuts=1, deaths=1, claims=1, refusals=2),
    ],
    ids=str,
)
def test_protocol_loses_and_repeats_nothing_with_more_failures(bounds: Bounds) -> None:
    print(bounds, search(bounds), sep=": ")


@pytest.mark.parametrize(
    "bounds", [Bounds(2, cuts=1), Bounds(1, started=2, claims=1), Bounds(0, started=2, refusals=1)], ids=str
)
def test_states_that_differ_in_names_have_the_same_future(bounds: Bounds) -> None:
    """Otherwise the search would skip states that it must visit."""
    graph = Graph(bounds, "")
    graph.search()
    steps, renamer = graph.protocol.steps, Renamer(graph.layout)
    for state in graph.states:
        following = [after for _, _, after in steps(state)]
        for renaming in renamer.renamings:
            other = {after for _, _, after in steps(renamer.renamed(state, renaming))}
            assert other == {renamer.renamed(after, renaming) for after in following}


class Noticed(NamedTuple):
    bounds: Bounds
    how: str
    """Message of the violation."""


TWICE, LOST, STUCK = "is sent twice", "was not sent", "cannot end well"

# By as little as goes wrong.
NOTICED = {
    "a redelivered message counts its unit as sent": Noticed(Bounds(1, cuts=1), LOST),
    "a unit is sent again under a new number": Noticed(Bounds(1, cuts=1), TWICE),
    "a numbered unit gets another number": Noticed(Bounds(1, started=1), TWICE),
    "a unit after a gap is renumbered": Noticed(Bounds(2, restores=1, resolved=2, producers=3), TWICE),
    "a unit without an answer is renumbered": Noticed(Bounds(1, cuts=1, producers=4), TWICE),
    "all units of a producer are sent under its new number": Noticed(Bounds(1, started=1), TWICE),
    "a unit is deleted before the answer": Noticed(Bounds(1, cuts=1), STUCK),
    "a unit without an answer is deleted": Noticed(Bounds(1, cuts=1), LOST),
    "owner and number are not checked": Noticed(Bounds(1, deaths=1, claims=1), STUCK),
    "an unknown producer is not looked up": Noticed(Bounds(1, losses=1, deaths=1), STUCK),
    "a unit counts as sent without an answer": Noticed(Bounds(1, cuts=1), LOST),
    "a producer is claimed while a transaction uses it": Noticed(Bounds(1, deaths=1, claims=1), STUCK),
    "a producer is claimed while its own process uses it": Noticed(Bounds(1, cuts=1, deaths=1, claims=1), STUCK),
    "the inbox is not checked": Noticed(Bounds(1, cuts=1), "happens twice"),
    "the owner is not checked": Noticed(Bounds(1, deaths=1, claims=1), STUCK),
    "the relay frees a producer in doubt": Noticed(Bounds(1, cuts=1, deaths=1), STUCK),
    "a producer has two units under way": Noticed(Bounds(2), "leaves one out"),
    "units are read by the locking statement": Noticed(Bounds(1, deaths=1, claims=1), STUCK),
    "a producer in doubt is lent again": Noticed(Bounds(1, cuts=1), STUCK),
    "a unit whose number was given up counts as sent": Noticed(Bounds(0, started=1, losses=1, refusals=1), LOST),
    "a unit is split before its number is given up": Noticed(Bounds(0, started=1, cuts=1, refusals=1), TWICE),
}


def test_noticed_faults_are_the_faults_of_the_rules() -> None:
    assert sorted(NOTICED) == sorted(FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_search_notices_planted_fault(fault: str) -> None:
    bounds, how = NOTICED[fault]
    with pytest.raises(Violation, match=how) as violation:
        search(bounds, fault)
    print(violation.value)
