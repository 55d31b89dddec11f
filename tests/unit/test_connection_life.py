"""Tests of the states of a connection: the table as it should be, written anew, and each step that it forbids."""

import pytest

from truenext.server.life import (
    CLOSES_WHEN_SENT,
    TRANSITIONS,
    WITHOUT_SOCKET,
    WITHOUT_WRITER,
    ConnectionLife,
    Life,
    LifeEvent,
)

STEPS = {
    "open": {"discard": "discarding", "park": "parked", "stop": "stopping"},
    "discarding": {"last-answer": "closing", "half-close": "lingering", "close": "closed", "stop": "stopping"},
    "closing": {"half-close": "lingering", "close": "closed", "stop": "stopping"},
    "lingering": {"close": "closed", "stop": "stopping"},
    "parked": {"close": "closed", "stop": "parked"},
    "stopping": {"last-answer": "stopping-closing", "half-close": "lingering", "close": "closed", "stop": "stopping"},
    "stopping-closing": {"half-close": "lingering", "close": "closed", "stop": "stopping-closing"},
    "closed": {"stop": "closed"},
}


def life_in(state: Life) -> ConnectionLife:
    life = ConnectionLife()
    life.state = state
    return life


@pytest.mark.parametrize("state", Life)
@pytest.mark.parametrize("event", LifeEvent)
def test_event_in_a_state_leads_to_the_next_one_or_raises(state: Life, event: LifeEvent) -> None:
    life = life_in(state)
    after = STEPS[state.value].get(event.value)
    if after is None:
        with pytest.raises(AssertionError, match=f"{event.name} cannot happen to a connection that is {state.value}"):
            life.enter_after(event)
        assert life.state is state
    else:
        life.enter_after(event)
        assert life.state is Life(after)


def test_connection_is_open_at_first_and_can_reach_each_state() -> None:
    found = [ConnectionLife().state]
    assert found == [Life.OPEN]
    for state in found:
        found += [after for after in TRANSITIONS[state].values() if after not in found]
    assert set(found) == set(Life)


@pytest.mark.parametrize("state", Life)
def test_connection_in_a_state_can_be_closed_within_two_steps(state: Life) -> None:
    after = {state, *TRANSITIONS[state].values()}
    assert Life.CLOSED in after.union(*(TRANSITIONS[each].values() for each in after))


def test_closed_connection_stays_closed() -> None:
    assert set(TRANSITIONS[Life.CLOSED].values()) == {Life.CLOSED}


def test_groups_of_states_agree_with_the_table() -> None:
    # Nothing is sent by a connection without a socket, and only one without a last answer may get one.
    assert set(WITHOUT_SOCKET) < set(WITHOUT_WRITER)
    assert all(LifeEvent.HALF_CLOSE not in TRANSITIONS[state] for state in WITHOUT_SOCKET)
    after_last = {steps[LifeEvent.LAST_ANSWER] for steps in TRANSITIONS.values() if LifeEvent.LAST_ANSWER in steps}
    assert set(CLOSES_WHEN_SENT) == after_last
    assert all(LifeEvent.HALF_CLOSE in TRANSITIONS[state] for state in CLOSES_WHEN_SENT)
