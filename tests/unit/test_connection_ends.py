"""Tests that ends of many connections at once are shared out among turns."""

from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import pytest

from truenext.broker.connection_ends import ConnectionEnds
from truenext.engine.state.consumer import ConnectionState
from truenext.model.limits import ENDS_NS_PER_TURN


class Setup:
    """Ends of connections, of which each takes `end_ns`."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.end_ns = ENDS_NS_PER_TURN // 2
        self.ended: list[str] = []
        self.schedule_turn = mock.Mock()
        self.ends = ConnectionEnds(
            mock.Mock(),
            {},
            mock.Mock(),
            tick=mock.Mock(),
            schedule_turn=self.schedule_turn,
            drop_answers=mock.Mock(),
            note_lost=mock.Mock(),
            monotonic_ns=lambda: self.now_ns,
        )

    def soon(self, *names: str) -> None:
        for name in names:
            self.ends.soon(session(name), self._end(name))

    def turn(self) -> list[str]:
        """Return the connections that have ended since the last turn, and in this one."""
        self.ends.run_due()
        ended, self.ended = self.ended, []
        return ended

    def _end(self, name: str) -> Callable[[], None]:
        def end() -> None:
            self.ended.append(name)
            self.now_ns += self.end_ns

        return end


def session(name: str) -> ConnectionState:
    return cast(ConnectionState, cast(Any, name))


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_connections_end_at_once_while_ends_have_time(setup: Setup) -> None:
    setup.soon("a", "b")
    assert setup.ended == ["a", "b"] and not setup.ends.due and not setup.schedule_turn.called


def test_connections_beyond_the_time_of_a_turn_end_in_the_next_turns_in_order(setup: Setup) -> None:
    setup.soon("a", "b", "c", "d", "e")
    assert setup.schedule_turn.called
    assert [setup.turn() for _ in range(3)] == [["a", "b", "c", "d"], ["e"], []]
    assert not setup.ends.due and not setup.ends.spent_ns


def test_each_turn_ends_a_connection_however_long_that_takes(setup: Setup) -> None:
    setup.end_ns = 20 * ENDS_NS_PER_TURN
    setup.soon("a", "b", "c")
    assert setup.ended == ["a"]
    assert [setup.turn() for _ in range(2)] == [["a", "b"], ["c"]]


def test_connection_does_not_end_before_those_that_wait(setup: Setup) -> None:
    setup.soon("a", "b", "c", "d", "e")
    setup.ends.spent_ns = 0
    setup.soon("f")
    assert [setup.turn() for _ in range(2)] == [["a", "b", "c", "d"], ["e", "f"]]


def test_connection_whose_end_waits_already_ends_once(setup: Setup) -> None:
    setup.soon("a", "b", "c", "c")
    assert setup.turn() == ["a", "b", "c"]
    assert setup.turn() == []


def test_connection_that_is_closed_meanwhile_does_not_end_again(setup: Setup) -> None:
    setup.soon("a", "b", "c", "d")
    setup.ends.closed(session("c"))
    assert setup.turn() == ["a", "b", "d"]


def test_no_end_waits_after_the_broker_has_stopped(setup: Setup) -> None:
    setup.soon("a", "b", "c")
    setup.ends.drop_due()
    assert setup.turn() == ["a", "b"]
