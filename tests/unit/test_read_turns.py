"""Tests of the time that connections have to be read in one pass of the event loop."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from truenext.broker.read_turns import ReadTurns
from truenext.engine.state.consumer import ConnectionState
from truenext.model.limits import LONG_READ_NS, READ_NS_PER_PASS, SET_BACK_NS


class Setup:
    """Connections named "user-number", or "-number" without a user; each read takes `read_ns`."""

    def __init__(self) -> None:
        self.now_ns = 1
        self.read_ns = READ_NS_PER_PASS
        self.resumed: list[str] = []
        self.scheduled_turns = 0
        self._soon: list[Callable[[], object]] = []
        self.turns = ReadTurns(
            cast(Any, SimpleNamespace(call_soon=self._soon.append)),
            lambda: self.now_ns,
            user_name_of=lambda session: str(session).partition("-")[0],
            resume=self._resume,
            schedule_turn=self._schedule_turn,
        )

    def wait(self, *names: str) -> None:
        for name in names:
            self.turns.wait(cast(ConnectionState, name))

    def has_time(self, name: str = "new-1") -> bool:
        return self.turns.has_time(cast(ConnectionState, name))

    def set_back(self, name: str) -> None:
        """Execute a long command of a connection that did not wait."""
        assert self.has_time(name)
        self.now_ns += LONG_READ_NS
        self.turns.wait_for_others(cast(ConnectionState, name))

    def remove(self, name: str) -> None:
        self.turns.remove(cast(ConnectionState, name))

    def turn(self) -> list[str]:
        """Return the connections that are read after a turn."""
        self.turns.on_turn_done()
        return self.resume()

    def resume(self) -> list[str]:
        """Return the connections that are resumed now."""
        calls = self._soon[:]
        self._soon.clear()
        for call in calls:
            call()
        resumed, self.resumed = self.resumed, []
        return resumed

    def _resume(self, session: ConnectionState) -> None:
        assert self.turns.has_time(session), "it is read now"
        self.resumed.append(str(session))
        self.now_ns += self.read_ns

    def _schedule_turn(self) -> None:
        self.scheduled_turns += 1


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_pass_has_time_for_reads_until_they_have_taken_their_share_and_again_after_a_turn(setup: Setup) -> None:
    assert setup.has_time()
    setup.now_ns += READ_NS_PER_PASS - 1
    assert setup.has_time()
    setup.now_ns += 1
    assert not setup.has_time()
    setup.turn()
    assert setup.has_time()


def test_pass_after_an_idle_time_has_its_whole_share(setup: Setup) -> None:
    setup.turn()
    setup.now_ns += 100 * READ_NS_PER_PASS
    assert setup.has_time() and setup.has_time()


def test_connection_that_waits_schedules_a_turn_and_is_resumed_after_it(setup: Setup) -> None:
    setup.wait("a-1")
    assert setup.scheduled_turns == 1 and not setup.resumed
    assert setup.turn() == ["a-1"]
    assert setup.turn() == []


def test_users_take_turns_however_many_connections_one_of_them_has(setup: Setup) -> None:
    setup.wait("a-1", "a-2", "a-3", "b-1", "-1", "-2")
    resumed = [setup.turn() for _ in range(6)]
    assert resumed == [["a-1"], ["b-1"], ["-1"], ["-2"], ["a-2"], ["a-3"]]


def test_user_that_waits_again_is_behind_those_that_wait(setup: Setup) -> None:
    setup.wait("a-1", "b-1", "c-1")
    assert setup.turn() == ["a-1"]
    setup.wait("a-2")
    assert [setup.turn() for _ in range(3)] == [["b-1"], ["c-1"], ["a-2"]]


def test_connections_that_take_little_time_are_resumed_after_one_turn(setup: Setup) -> None:
    setup.read_ns = READ_NS_PER_PASS // 2
    setup.wait("a-1", "b-1", "c-1", "d-1")
    assert setup.turn() == ["a-1", "b-1"]
    assert setup.has_time(), "others have their own time"
    assert setup.turn() == ["c-1", "d-1"]


def test_long_command_of_a_connection_that_waited_leaves_others_no_time_in_its_pass(setup: Setup) -> None:
    setup.read_ns = 2 * READ_NS_PER_PASS
    setup.wait("a-1")
    assert setup.turn() == ["a-1"]
    assert not setup.has_time()


def test_removed_connection_is_not_resumed(setup: Setup) -> None:
    setup.wait("a-1", "a-2", "b-1")
    setup.remove("a-1")
    setup.remove("b-1")
    setup.remove("c-1")
    assert setup.turn() == ["a-2"] and setup.turn() == []


def test_connection_that_waits_twice_is_resumed_once(setup: Setup) -> None:
    setup.wait("a-1", "a-1")
    assert setup.turn() == ["a-1"] and not setup.turns.has_waiting


def test_user_with_a_long_command_is_read_in_passes_of_its_own_as_often_as_others(setup: Setup) -> None:
    setup.read_ns = 1
    setup.set_back("a-1")
    setup.wait("a-2", "a-3", "b-1")
    setup.read_ns = LONG_READ_NS
    assert setup.turn() == ["b-1"], "b has a long command, too"
    setup.wait("c-1")
    setup.read_ns = 1
    assert setup.turn() == ["c-1"]
    setup.read_ns = LONG_READ_NS
    assert [setup.turn() for _ in range(4)] == [["a-1"], ["a-2"], ["a-3"], []]


def test_waiting_connections_of_a_user_are_set_back_by_a_long_command_of_the_first(setup: Setup) -> None:
    setup.wait("a-1", "a-2")
    setup.read_ns = LONG_READ_NS
    assert setup.turn() == ["a-1"]
    setup.wait("b-1")
    setup.read_ns = 1
    assert [setup.turn() for _ in range(2)] == [["b-1"], ["a-2"]]


def test_turn_answers_others_between_two_long_commands_of_a_user(setup: Setup) -> None:
    setup.set_back("a-1")
    setup.wait("a-2", "a-3", "a-4")
    setup.read_ns = LONG_READ_NS
    assert setup.turn() == ["a-1"] and not setup.has_time(), "the long command has used up the pass"
    setup.turns.on_turn_done()
    assert setup.has_time(), "a connection that does not wait is read after the turn"
    assert setup.resume() == [], "the next turn answers it first"
    assert setup.turn() == ["a-2"]


def test_user_with_a_long_command_is_not_shut_out_by_others(setup: Setup) -> None:
    setup.set_back("a-1")
    setup.read_ns = 1
    resumed = []
    for number in range(4):
        setup.wait(f"b-{number}")
        resumed.append(setup.turn())
        setup.wait("a-1")
    assert resumed == [["b-0"], ["b-1", "a-1"], ["b-2"], ["b-3", "a-1"]]


def test_user_with_a_long_command_does_not_follow_a_long_command_of_another_in_one_pass(setup: Setup) -> None:
    setup.set_back("a-1")
    setup.wait("b-1")
    setup.read_ns = 1
    assert setup.turn() == ["b-1"]
    setup.wait("c-1")
    setup.read_ns = 2 * READ_NS_PER_PASS
    assert setup.turn() == ["c-1"]
    assert setup.turn() == ["a-1"]


def test_other_connections_of_a_user_with_a_long_command_wait_until_it_is_forgotten(setup: Setup) -> None:
    setup.set_back("a-1")
    setup.turn()
    assert not setup.has_time("a-2") and setup.has_time("b-1")
    setup.now_ns += SET_BACK_NS - LONG_READ_NS
    setup.wait("a-2", "a-3")
    setup.remove("a-3")
    setup.turns.on_turn_done()
    assert not setup.has_time("a-4")
    setup.now_ns += LONG_READ_NS
    setup.turns.on_turn_done()
    assert setup.has_time("a-4")
    assert setup.resume() == ["a-2"]


def test_end_that_takes_long_sets_back_its_user(setup: Setup) -> None:
    def end() -> None:
        setup.now_ns += LONG_READ_NS

    setup.turns.end(cast(ConnectionState, "a-1"), lambda: None)
    assert setup.has_time("a-2")
    setup.turns.end(cast(ConnectionState, "a-1"), end)
    assert not setup.has_time("a-2")


def test_connections_are_resumed_once_after_two_turns(setup: Setup) -> None:
    setup.set_back("a-1")
    setup.turns.on_turn_done()
    assert setup.has_time("b-1")
    setup.turns.on_turn_done()
    assert setup.has_time("b-1")
    assert setup.resume() == []
    assert setup.turn() == ["a-1"]
