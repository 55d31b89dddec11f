"""Tests of the decision to take over: each rule of C28.4, at its bound."""

from __future__ import annotations

import pytest

from truenext.store.postgresql.outcome import Row
from truenext.store.postgresql.standing_by import (
    FREE_S,
    START_S,
    Decision,
    Look,
    Stop,
    Watch,
    decide,
    first_watch,
    next_watch,
    silent_from,
)

LAST = Row(100, 7, b"digest")
OTHER = Row(100, 7, b"other")
NEXT = Row(101, 7, b"next")
AFTER_S = 5.0
OWN, OWN_PLACE = "own", "own@here:/data"


def look(at: float, last: Row = LAST, **changed: object) -> Look:
    """Return a look that takes a tenth of a second."""
    fields = {"session": 1, "is_marked": False, "stop": None, "active": "other@there:/data", "failover_after_s": 0.0}
    return Look(began=at, ended=at + 0.1, last=last, **(fields | changed))  # type: ignore[arg-type]


def watched(*looks: Look) -> Watch:
    watch = first_watch(looks[0])
    for each in looks[1:]:
        watch = next_watch(watch, each)
    return watch


def decision(*looks: Look, needs_repair: bool = False) -> Decision:
    return decide(
        watched(*looks),
        looks[-1],
        name=OWN,
        place=OWN_PLACE,
        failover_after_s=AFTER_S,
        needs_repair=needs_repair,
    )


# ---- Handed over ----


@pytest.mark.parametrize("heir", ["", OWN])
def test_clean_stop_that_names_this_broker_or_none_hands_over_at_once(heir: str) -> None:
    assert decision(look(0, stop=Stop(100, heir))) is Decision.TAKE_OVER


def test_clean_stop_does_not_count_while_a_session_is_marked() -> None:
    assert decision(look(0, stop=Stop(100, ""), is_marked=True)) is Decision.WAIT


@pytest.mark.parametrize("active", ["other@there:/data", OWN_PLACE])
def test_clean_stop_for_another_heir_hands_over_after_the_time_of_a_dead_broker(active: str) -> None:
    stop = Stop(100, "other")
    assert decision(look(0), look(0.1 + FREE_S - 0.01, stop=stop, active=active)) is Decision.WAIT
    assert decision(look(0), look(0.1 + FREE_S, stop=stop, active=active)) is Decision.TAKE_OVER


@pytest.mark.parametrize("number", [99, 101])
def test_clean_stop_before_another_last_row_counts_no_more(number: int) -> None:
    assert decision(look(0, stop=Stop(number, ""))) is Decision.WAIT


# ---- Ended ----


def test_free_mark_and_no_row_for_a_second_is_the_end_of_a_broker() -> None:
    assert decision(look(0), look(1.09)) is Decision.WAIT
    assert decision(look(0), look(1.1)) is Decision.TAKE_OVER


def test_marked_session_is_that_of_a_living_broker() -> None:
    assert decision(look(0), look(4, is_marked=True)) is Decision.WAIT


@pytest.mark.parametrize("last", [NEXT, OTHER], ids=["next", "another with the number"])
def test_new_last_row_begins_the_time_anew(last: Row) -> None:
    assert decision(look(0), look(1, last), look(2, last)) is Decision.WAIT
    assert decision(look(0), look(1, last), look(2.1, last)) is Decision.TAKE_OVER


def test_lost_connection_begins_the_time_anew_and_makes_a_free_mark_no_proof() -> None:
    assert decision(look(0), look(0.5, session=2), look(5.5, session=2)) is Decision.WAIT
    assert decision(look(0), look(0.5, session=2), look(5.6, session=2)) is Decision.TAKE_OVER


def test_row_and_stop_that_came_with_a_new_connection_prove_nothing() -> None:
    assert decision(look(0), look(0.5, NEXT, session=2), look(1.7, NEXT, session=2)) is Decision.WAIT
    assert decision(look(0), look(0.5, session=2, stop=Stop(100, ""))) is Decision.WAIT
    assert decision(look(0), look(0.5, session=2, active=OWN_PLACE)) is Decision.WAIT


def test_mark_that_was_seen_after_a_lost_connection_is_a_proof_again_when_it_is_free() -> None:
    seen = look(0.5, session=2, is_marked=True)
    assert decision(look(0), look(0.3, session=2), seen, look(1.5, session=2)) is Decision.TAKE_OVER
    assert decision(look(0), seen, look(1.7, session=2)) is Decision.TAKE_OVER


def test_row_that_came_after_a_lost_connection_makes_a_free_mark_a_proof_again() -> None:
    second = (look(0.3, session=2), look(0.5, NEXT, session=2))
    assert decision(look(0), *second, look(1.7, NEXT, session=2)) is Decision.TAKE_OVER


def test_last_active_broker_itself_does_not_wait() -> None:
    """C28.5"""
    assert decision(look(0, active=OWN_PLACE)) is Decision.TAKE_OVER
    assert decision(look(0, active=OWN_PLACE, is_marked=True)) is Decision.WAIT


# ---- Stopped, or cut off ----


def test_marked_session_is_ended_when_no_row_came_for_too_long() -> None:
    assert decision(look(0), look(5.09, is_marked=True)) is Decision.WAIT
    assert decision(look(0), look(5.1, is_marked=True)) is Decision.END_AND_TAKE_OVER


def test_longer_setting_of_the_active_broker_counts() -> None:
    assert decision(look(0), look(8, is_marked=True, failover_after_s=9.0)) is Decision.WAIT
    assert decision(look(0), look(8, is_marked=True, failover_after_s=2.0)) is Decision.END_AND_TAKE_OVER


def test_broker_that_was_stopped_itself_takes_over_from_no_other_one() -> None:
    assert decision(look(0), look(100, NEXT, is_marked=True)) is Decision.WAIT
    slow = Look(0.0, 100.0, 1, LAST, True, None, "", 0.0)
    assert decision(slow, look(100.1, is_marked=True)) is Decision.WAIT


def test_broker_of_the_first_layout_may_append_nothing_for_any_time() -> None:
    assert decision(look(0), look(100, is_marked=True, active="")) is Decision.WAIT
    assert decision(look(0), look(100, active="")) is Decision.TAKE_OVER


# ---- The synchronous standby does not confirm ----


def test_wait_of_the_active_broker_for_the_synchronous_standby_begins_the_time_anew() -> None:
    waiting = look(100, is_marked=True, waits_for_standby=True)
    assert decision(look(0), waiting) is Decision.WAIT
    assert decision(look(0), waiting, look(105.09, is_marked=True)) is Decision.WAIT
    assert decision(look(0), waiting, look(105.11, is_marked=True)) is Decision.END_AND_TAKE_OVER


def test_broker_that_has_died_is_dead_although_its_session_waits_for_the_synchronous_standby() -> None:
    """The takeover waits, too, and ends the broker after its patience, with a text that names the standby."""
    assert decision(look(0), look(1.11, waits_for_standby=True)) is Decision.TAKE_OVER
    assert decision(look(0, active=OWN_PLACE, waits_for_standby=True)) is Decision.TAKE_OVER


# ---- Repair ----


def test_broker_with_rows_that_the_log_has_lost_waits_for_one_with_more() -> None:
    for each in ({"stop": Stop(100, OWN)}, {"active": OWN_PLACE}, {}):
        assert decision(look(0), look(5, **each), needs_repair=True) is Decision.WAIT
        assert decision(look(0), look(5.1, **each), needs_repair=True) is Decision.TAKE_OVER


# ---- Silence ----


def test_active_broker_is_silent_before_any_standby_takes_over() -> None:
    """Also if two clocks run apart by a tenth."""
    assert silent_from(100.0, 5.0) == 104.0
    # The standby has seen the row only after the append began.
    assert (silent_from(100.0, AFTER_S) - 100.0) * 1.1 < AFTER_S * 0.9


# ---- A start that takes long ----


def test_broker_that_starts_after_its_takeover_is_fenced_only_after_the_time_of_a_start() -> None:
    for seconds, expected in ((START_S - 0.01, Decision.WAIT), (START_S, Decision.END_AND_TAKE_OVER)):
        looks = [look(at, is_marked=True, is_starting=True) for at in (0, 0.1 + seconds)]
        assert decision(*looks) is expected


def test_broker_that_dies_while_it_starts_is_dead_as_any_other() -> None:
    looks = look(0, is_marked=True, is_starting=True), look(0.1 + FREE_S, is_starting=True)
    assert decision(*looks) is Decision.TAKE_OVER
