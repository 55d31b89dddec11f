"""Tests of the states of a message, and of the table of their transitions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest

from truenext.flows.events import ExecutionOutcome
from truenext.stage import message_state
from truenext.stage.interceptors.chain import InterceptorChain
from truenext.stage.message_life import MessageLife
from truenext.stage.message_state import TRANSITIONS, MessageState

UNDONE = {"failed", "rejected", "released", "in doubt"}
ALLOWED = {
    "received": UNDONE | {"running", "already processed"},
    "running": UNDONE | {"running", "returned", "abandoned", "already processed"},
    "returned": UNDONE | {"running", "sending", "acknowledging", "abandoned", "already processed"},
    # Output that was sent can only be rolled back with the message: the stage does not run again.
    "sending": UNDONE | {"committing", "abandoned"},
    # A COMMIT without output has no number.
    "acknowledging": UNDONE | {"committed"},
    "committing": UNDONE | {"committed", "repeated"},
    "committed": {"completed"},
    "repeated": {"released"},
    # The abandoned thread may have committed SQL.
    "abandoned": {"acknowledging", "committing", "released"},
    **{outcome: set[str]() for outcome in get_args(ExecutionOutcome)},
}
"""States that may follow each state, written from docs/stages.md and docs/stages-database.md."""


def life_in(state: MessageState) -> MessageLife:
    """Return the life of a message, brought into a state by the shortest way that the table has."""
    context: Any = SimpleNamespace(chain=InterceptorChain([]), events=None, counters=None)
    unknown: Any = None
    ways: list[list[MessageState]] = [[MessageState.RECEIVED]]
    while ways[0][-1] is not state:
        way = ways.pop(0)
        ways += [[*way, each] for each in sorted(TRANSITIONS[way[-1]], key=str) if each not in way]
    life = MessageLife(context, unknown, "other", unknown)
    for each in ways[0][1:]:
        life.enter(each)
    return life


@pytest.mark.parametrize("state", MessageState)
def test_state_has_a_constant_of_its_name(state: MessageState) -> None:
    assert getattr(message_state, state.name) is state


@pytest.mark.parametrize("after", MessageState)
@pytest.mark.parametrize("before", MessageState)
def test_message_enters_a_state_exactly_when_the_table_allows_it(before: MessageState, after: MessageState) -> None:
    life = life_in(before)
    if after.value in ALLOWED[before.value]:
        life.enter(after)
        assert life.state is after
    else:
        with pytest.raises(AssertionError, match=f"a message cannot become {after.value} while it is {before.value}"):
            life.enter(after)
        assert life.state is before


@pytest.mark.parametrize("outcome", get_args(ExecutionOutcome))
def test_message_that_has_an_outcome_gets_no_other(outcome: ExecutionOutcome) -> None:
    life = life_in(MessageState(outcome))
    for other in get_args(ExecutionOutcome):
        with pytest.raises(AssertionError, match=f"while it is {outcome}"):
            life.end(other, None)


def test_message_cannot_be_released_once_the_broker_has_committed_it() -> None:
    with pytest.raises(AssertionError, match="a message cannot become released while it is committed"):
        life_in(MessageState.COMMITTED).end("released", None)
