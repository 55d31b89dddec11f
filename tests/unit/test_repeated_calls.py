"""Tests of the calls that a log repeats until PostgreSQL answers."""

from unittest import mock

import pytest

from truenext.store.postgresql import database as database_module
from truenext.store.postgresql.connection import SILENCE_S, Connection, SilentServerError
from truenext.store.postgresql.database import Database

PATIENCE_S = 30.0


class Clock:
    """Clock that passes only while a call waits."""

    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(database_module, "monotonic", lambda: clock.now)
    monkeypatch.setattr("time.sleep", clock.sleep)
    return clock


class SlowStandby:
    """Server whose answers wait for its synchronous standby."""

    def __init__(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        self._clock = clock
        self.delay_s = 0.0
        self.cuts = 0
        monkeypatch.setattr(Database, "_waits_for_standby", lambda *_: True)
        self.database = Database({}, mock.Mock(), is_replicated=True, patience_s=PATIENCE_S)
        self.database.connection = mock.Mock(spec=Connection, closed=False)

    def append(self) -> None:
        self.database.call(self._answer, is_confirmed=bool)

    def _answer(self, connection: Connection) -> bool:
        if connection.silence_s <= self.delay_s:
            self.cuts += 1
            self._clock.sleep(connection.silence_s)
            raise SilentServerError("silent")
        self._clock.sleep(self.delay_s)
        return True


@pytest.mark.parametrize("delay_s", [SILENCE_S + 0.5, 6.0])
def test_append_to_a_standby_that_is_always_slow_is_confirmed(
    delay_s: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowStandby(clock, monkeypatch)
    slow.delay_s = delay_s
    slow.append()
    assert 1 <= slow.cuts <= 2
    for _ in range(5):
        cuts, began = slow.cuts, clock.now
        slow.append()
        assert slow.cuts == cuts
        assert clock.now - began == pytest.approx(delay_s)


def test_server_is_lost_after_the_usual_silence_once_its_standby_is_quick_again(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowStandby(clock, monkeypatch)
    for slow.delay_s in (6.0, 0.1):
        slow.append()
    slow.delay_s, before = SILENCE_S, slow.cuts
    slow.append()
    assert slow.cuts == before + 1


def test_answer_that_the_event_loop_has_read_ends_the_allowance_for_a_slow_standby(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowStandby(clock, monkeypatch)
    slow.delay_s = 6.0
    slow.append()
    slow.database.note_quick_answer()
    slow.delay_s, before = SILENCE_S, slow.cuts
    slow.append()
    assert slow.cuts == before + 1


def test_standby_that_is_away_ends_the_patience(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowStandby(clock, monkeypatch)
    slow.delay_s = 1000.0
    began = clock.now
    with pytest.raises(Exception, match="the synchronous standby of PostgreSQL at  has not confirmed for 30 seconds"):
        slow.append()
    assert PATIENCE_S <= clock.now - began <= PATIENCE_S + SILENCE_S
