"""Tests of brokers that stand by on a real server: when each of them takes over, and what it says of itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.contract.postgresql.conftest import OpenWriter
from tests.contract.postgresql.log_writer import LogWriter, open_log, refuse_members, rows_of, url_of
from tests.contract.postgresql.rows import empty_state
from tests.contract.postgresql.test_log import backend_of, terminate, wait_until
from tests.stages.postgres import PostgresServer
from truenext.clock import boottime
from truenext.errors import ConfigurationError, StoreBehindError, StoreError, StoreFencedError
from truenext.store.checkpoint_format import NUMBER
from truenext.store.log import EMPTY_PAYLOAD, Member, Relation, Role
from truenext.store.postgresql import connection, layout, log_standby
from truenext.store.postgresql import log as log_module
from truenext.store.postgresql.connection import Connection, parse_url
from truenext.store.postgresql.kept import ORIGIN
from truenext.store.postgresql.log import PostgresqlLog
from truenext.store.postgresql.member import read_members
from truenext.store.postgresql.standing_by import FREE_S, SILENT_SHARE

Admin = psycopg.Connection[Any]
FAILOVER_AFTER_S = 2.0


@pytest.fixture
def active(open_writer: OpenWriter) -> LogWriter:
    writer = open_writer(name="active", failover_after_s=FAILOVER_AFTER_S)
    writer.log.start()
    return writer


@pytest.fixture
def standby(active: LogWriter, log_server: PostgresServer, schema: str) -> Iterator[LogWriter]:
    writer = standing_by(log_server, schema)
    yield writer
    writer.log.close()


def standing_by(server: PostgresServer, schema: str, name: str = "standby", **options: object) -> LogWriter:
    log = open_log(url_of(server), schema, name=name, **({"failover_after_s": FAILOVER_AFTER_S} | options))
    return LogWriter(log, empty_state().position)


def take_over(writer: LogWriter) -> float:
    """Stand by until the log can be taken over, take it over, and return how many seconds that took."""
    started = time.monotonic()
    writer.take_over()
    return time.monotonic() - started


def members_of(writer: LogWriter) -> tuple[Member, ...]:
    with Connection.open(writer.log._database.parameters) as connection:
        return read_members(connection, writer.log._end.schema)


def look_for(writer: LogWriter, seconds: float) -> None:
    """Stand by for some time, and check that the broker does not take over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert writer.log.stands_by(writer.position)
        writer.follow()


def test_broker_stands_by_while_the_active_one_appends(active: LogWriter, standby: LogWriter) -> None:
    for _ in range(6):
        active.append()
        look_for(standby, 0.5)
    assert standby.position == active.position


def test_standby_takes_over_a_second_after_the_session_of_the_active_one_ended(
    active: LogWriter, standby: LogWriter
) -> None:
    active.append()
    look_for(standby, 0.5)
    active.log.close()
    assert FREE_S - 0.6 < take_over(standby) < FREE_S + 0.6
    assert standby.position.number == active.position.number + 1


def test_standby_ends_the_session_of_an_active_one_that_appends_nothing(active: LogWriter, standby: LogWriter) -> None:
    active.append()
    began = boottime()
    active.append()
    assert FAILOVER_AFTER_S - 0.1 < take_over(standby) < FAILOVER_AFTER_S + 1.5
    assert active.log.silent_from < began + FAILOVER_AFTER_S
    with pytest.raises(StoreFencedError):
        active.append()


def test_clean_stop_hands_over_to_its_heir_at_once_and_to_others_later(
    active: LogWriter, standby: LogWriter, log_server: PostgresServer, schema: str
) -> None:
    other = standing_by(log_server, schema, "other")
    look_for(other, 0.3)
    look_for(standby, 0.3)
    active.log.hand_over("standby")
    assert take_over(standby) < 0.8
    assert other.log.stands_by(other.position)
    other.log.close()


def test_clean_stop_without_an_heir_hands_over_to_any(active: LogWriter, standby: LogWriter) -> None:
    look_for(standby, 0.3)
    active.log.hand_over("")
    assert take_over(standby) < 0.8


def test_clean_stop_waits_for_the_database_only_shortly(active: LogWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "HAND_OVER_PATIENCE_S", 0.2)

    def fail(*_: object, **arguments: object) -> None:
        raise psycopg.OperationalError("gone")

    monkeypatch.setattr(active.log, "_hand_over", fail)
    started = time.monotonic()
    with pytest.raises(StoreError, match=r"not available for 0\.2 seconds"):
        active.log.hand_over("")
    assert time.monotonic() - started < 5


def test_heir_that_is_gone_is_replaced_after_a_second(active: LogWriter, standby: LogWriter) -> None:
    look_for(standby, 0.3)
    active.log.hand_over("gone")
    assert FREE_S - 0.6 < take_over(standby) < FREE_S + 0.6


def test_broker_that_has_just_taken_over_may_take_long_until_it_appends(
    open_writer: OpenWriter, log_server: PostgresServer, schema: str
) -> None:
    """Meanwhile it recovers its state, which may take long."""
    open_writer(name="active", failover_after_s=FAILOVER_AFTER_S)
    standby = standing_by(log_server, schema)
    look_for(standby, FAILOVER_AFTER_S + 0.5)
    standby.log.close()


def test_last_active_broker_takes_over_again_at_once(
    active: LogWriter, log_server: PostgresServer, schema: str
) -> None:
    active.log.close()
    again = standing_by(log_server, schema, "active")
    assert take_over(again) < 0.8
    again.log.close()


def test_two_brokers_that_decide_at_the_same_time_do_not_both_take_over(
    active: LogWriter, standby: LogWriter, log_server: PostgresServer, schema: str, admin: Admin
) -> None:
    other = standing_by(log_server, schema, "other")
    active.log.close()
    for each in (standby, other):
        while each.log.stands_by(each.position):
            each.follow()
    results: list[bool] = []
    barrier = threading.Barrier(2)

    def try_to_take_over(writer: LogWriter) -> None:
        barrier.wait()
        results.append(writer.log.take_over(writer.position))

    threads = [threading.Thread(target=try_to_take_over, args=(each,)) for each in (standby, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, True]
    assert [epoch for _, epoch, _ in rows_of(admin, schema)] == [0, 1, 2]
    other.log.close()


def test_takeover_after_a_row_that_no_look_has_shown_is_refused(active: LogWriter, standby: LogWriter) -> None:
    assert standby.log.stands_by(standby.position)
    active.append()
    assert not standby.log.take_over(standby.position)
    active.append()


def test_takeover_over_another_connection_than_that_of_the_look_is_refused(
    active: LogWriter, standby: LogWriter, admin: Admin
) -> None:
    assert standby.log.stands_by(standby.position)
    terminate(admin, backend_of(standby))
    assert not standby.log.take_over(standby.position)
    active.append()


def test_lost_connection_makes_the_standby_wait_for_longer(
    active: LogWriter, standby: LogWriter, admin: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    """PostgreSQL may just be back, and the active broker without its session."""
    look_for(standby, 0.3)
    active.log.close()
    terminate(admin, backend_of(standby))
    look_for(standby, FREE_S + 0.4)
    assert "connection to PostgreSQL lost: cannot follow the log until it is back" in caplog.messages
    assert take_over(standby) < FAILOVER_AFTER_S


def test_folder_that_went_another_way_is_opened_anew(active: LogWriter, standby: LogWriter) -> None:
    active.append(b"one")
    standby._add(b"other")
    standby._add(b"other")
    with pytest.raises(StoreBehindError, match="another way"):
        standby.log.stands_by(standby.position)


def test_folder_that_is_ahead_of_a_log_that_went_on_is_opened_anew(
    active: LogWriter, standby: LogWriter, caplog: pytest.LogCaptureFixture
) -> None:
    """C27.3: its rows cannot be put back any more."""
    standby.follow()
    for _ in range(3):
        standby._add(EMPTY_PAYLOAD)
    assert standby.log.relation(standby.position, standby) is Relation.AHEAD
    assert standby.log.stands_by(standby.position)
    assert "this broker's folder has rows that the database has not" in caplog.messages
    active.append(b"other")
    assert standby.log.relation(standby.position, standby) is Relation.OTHER_WAY
    with pytest.raises(StoreBehindError, match="another way"):
        standby.log.stands_by(standby.position)


def test_log_that_got_another_identity_is_opened_anew(
    active: LogWriter, standby: LogWriter, schema: str, admin: Admin
) -> None:
    admin.execute(f"UPDATE {schema}.fact SET value = '89abcdef' WHERE kind = 'identity'")
    with pytest.raises(StoreBehindError, match="another identity"):
        standby.log.stands_by(standby.position)


def test_log_that_gets_another_identity_just_before_a_takeover_is_opened_anew(
    log_server: PostgresServer, schema: str, admin: Admin
) -> None:
    told = standing_by(log_server, schema, take_over=True)
    assert not told.log.stands_by(told.position)
    admin.execute(f"UPDATE {schema}.fact SET value = '89abcdef' WHERE kind = 'identity'")
    with pytest.raises(StoreBehindError, match="another identity"):
        told.log.take_over(told.position)
    told.log.close()


def test_rows_that_follow_another_row_are_no_damage_but_another_way(active: LogWriter, standby: LogWriter) -> None:
    active.append()
    active.append()
    standby._add(b"other")
    with pytest.raises(StoreBehindError, match="another way"):
        standby.follow()


def test_active_broker_is_silent_when_its_last_append_began_long_ago(active: LogWriter) -> None:
    before = boottime()
    active.append()
    share = SILENT_SHARE * FAILOVER_AFTER_S
    assert before + share <= active.log.silent_from <= boottime() + share


def test_slow_append_leaves_less_time_until_the_silence(active: LogWriter, schema: str, admin: Admin) -> None:
    before = boottime()
    with admin.transaction():
        admin.execute(f"LOCK TABLE {schema}.log IN SHARE MODE")
        thread = threading.Thread(target=active.append)
        thread.start()
        time.sleep(1.0)
    thread.join()
    assert active.log.silent_from < before + SILENT_SHARE * FAILOVER_AFTER_S + 0.1


# ---- Members ----


def test_members_describe_themselves(
    active: LogWriter, standby: LogWriter, log_server: PostgresServer, admin: Admin
) -> None:
    end = time.monotonic() + 10
    while [each.number > 2 for each in active.log.status.members] != [True, True]:
        assert time.monotonic() < end
        active.append()
        look_for(standby, 0.1)
    first, second = active.log.status.members
    assert (first.name, first.role, first.epoch) == ("active", Role.ACTIVE, 1)
    assert (second.name, second.role, second.epoch) == ("standby", Role.STANDING_BY, 1)
    assert max(first.age_ms, second.age_ms) < 2000
    assert active.log.choose_heir(None) == "standby"
    active.log.hand_over("standby")
    with Connection.open(parse_url(url_of(log_server))) as connection:
        stopped = read_members(connection, active.log._end.schema)[0]
    assert (stopped.role, stopped.number) == (Role.STOPPED, active.position.number)
    found = admin.execute(f"SELECT value FROM {active.log._end.schema}.fact WHERE kind = 'stop'").fetchone()
    assert found == (NUMBER.pack(stopped.number) + b"standby",)


def test_first_description_of_a_broker_has_the_row_of_its_folder(active: LogWriter, standby: LogWriter) -> None:
    """C28.2: with row 0 it would count as far behind, and `failover` would refuse it."""
    for _ in range(3):
        active.append()
    standby.follow()
    assert standby.log.stands_by(standby.position)
    found = {each.name: each for each in members_of(standby)}
    assert (found["standby"].role, found["standby"].number) == (Role.STANDING_BY, active.position.number)


def test_broker_that_stands_by_and_leaves_is_shown_as_stopped(active: LogWriter, standby: LogWriter) -> None:
    """C28.2"""
    active.append()
    look_for(standby, 0.3)
    standby.log.leave()
    found = {each.name: each for each in members_of(active)}
    assert (found["standby"].role, found["standby"].epoch) == (Role.STOPPED, 1)


def test_broker_that_never_stood_by_or_is_active_leaves_without_a_word(
    active: LogWriter, log_server: PostgresServer, schema: str
) -> None:
    active.log.leave()
    other = standing_by(log_server, schema, "other")
    other.log.leave()
    other.log.close()
    assert [(each.name, each.role) for each in members_of(active)] == [("active", Role.ACTIVE)]


def test_ages_of_members_count_on_while_they_cannot_be_read(active: LogWriter) -> None:
    wait_until(lambda: active.log.status.members)
    active.log._background.close()
    (before,) = active.log.status.members
    time.sleep(0.3)
    (after,) = active.log.status.members
    assert 300 <= after.age_ms - before.age_ms < 2000
    assert after == replace(before, age_ms=after.age_ms)


def test_first_broker_of_a_log_does_not_say_that_it_stands_by(
    log_server: PostgresServer, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C28.5: it waits for a second, but for no other broker."""
    caplog.set_level("INFO")
    first = standing_by(log_server, schema, failover_after_s=60.0)
    assert FREE_S - 0.3 < take_over(first) < 60.0
    first.log.close()
    assert "standing by" not in caplog.messages


def test_broker_says_once_that_it_stands_by_for_the_active_one(
    active: LogWriter, standby: LogWriter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    told: list[str] = []
    standby.log._end.member.on_standing_by = told.append
    assert standby.log.stands_by(standby.position)
    assert told == ["active"]
    active.append()
    look_for(standby, 0.5)
    assert told == ["active"]


def test_active_broker_whose_sessions_are_ended_by_a_takeover_names_the_takeover(
    active: LogWriter, log_server: PostgresServer, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    active.append()
    other = standing_by(log_server, schema, "other", take_over=True)
    connection = active.log._background._connection
    assert connection is not None
    with connection.lock:
        # Not in the middle of a step, which might see the takeover first.
        other.take_over()
    wait_until(lambda: active.log.failure)
    other.log.close()
    assert isinstance(active.log.failure, StoreFencedError)
    assert not [each for each in caplog.records if each.message.startswith("background work on PostgreSQL failed")]


def test_standby_follows_although_the_database_has_no_space_for_members(
    active: LogWriter, standby: LogWriter, admin: Admin, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_members(admin, schema)
    active.append()
    look_for(standby, 1.2)
    assert standby.position == active.position
    assert not [record for record in caplog.records if record.message.startswith("PostgreSQL's disk is full")]


@pytest.mark.parametrize(("users", "count"), [("", 0), ("other", 1)])
def test_standby_with_another_users_file_warns_once(
    active: LogWriter,
    standby: LogWriter,
    users: str,
    count: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    standby.log._end.member.users = users
    for _ in range(2):
        # It compares once a second.
        look_for(standby, 1.2)
        active.append()
    assert sum("another users file" in record.message for record in caplog.records) == count


def test_standby_whose_users_file_was_corrected_says_so_once(
    active: LogWriter, standby: LogWriter, caplog: pytest.LogCaptureFixture
) -> None:
    for users in ("other", "", ""):
        standby.log._end.member.users = users
        look_for(standby, 1.2)
        active.append()
    assert sum("the same users file again" in record.message for record in caplog.records) == 1


def test_second_broker_with_a_member_name_is_refused(
    active: LogWriter, log_server: PostgresServer, schema: str
) -> None:
    second = standing_by(log_server, schema, "active", folder=Path("/other"))
    with pytest.raises(ConfigurationError, match="another broker has the member name 'active'"):
        second.log.stands_by(second.position)
    second.log.close()


def test_opening_leaves_the_description_of_a_broker_with_the_same_folder(
    active: LogWriter, log_server: PostgresServer, schema: str, admin: Admin
) -> None:
    """Its folder may still be that broker's, and then it ends."""
    active.log.hand_over("heir")
    standing_by(log_server, schema, "active").log.close()
    (member,) = read_members(admin, schema)  # type: ignore[arg-type]
    assert member.role is Role.STOPPED


def test_member_name_of_a_broker_that_has_died_is_free_soon(
    active: LogWriter, log_server: PostgresServer, schema: str
) -> None:
    active.log.close()
    other = standing_by(log_server, schema, "active", folder=Path("/other"))
    other.log.stands_by(other.position)
    other.log.close()


def test_broker_whose_member_name_was_taken_while_it_was_stopped_is_refused(
    active: LogWriter, log_server: PostgresServer, schema: str, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_standby, "DESCRIPTION_INTERVAL_S", 0.0)
    first = standing_by(log_server, schema, "name")
    first.log.stands_by(first.position)
    admin.execute(f"UPDATE {schema}.member SET at = at - interval '1 minute' WHERE name = 'name'")
    second = standing_by(log_server, schema, "name", folder=Path("/other"))
    second.log.stands_by(second.position)
    with pytest.raises(ConfigurationError, match="another broker has the member name 'name'"):
        first.log.stands_by(first.position)
    second.log.stands_by(second.position)
    for each in (first, second):
        each.log.close()


# ---- Opening ----


def test_copy_of_the_database_is_refused(
    active: LogWriter, log_server: PostgresServer, schema: str, admin: Admin
) -> None:
    set_origin(admin, schema, system=42)
    with pytest.raises(ConfigurationError, match=r"is a copy: .* written in 42; .* `truenext store adopt URL --schema"):
        standing_by(log_server, schema)


def test_active_broker_does_not_go_on_in_a_copy(active: LogWriter, admin: Admin) -> None:
    origin = active.log._end.origin
    assert origin is not None
    active.log._end.origin = origin._replace(system=42)
    terminate(admin, backend_of(active))
    with pytest.raises(Exception, match="is a copy"):
        active.append()


def test_log_of_the_first_layout_gets_the_members_when_a_broker_opens_it(
    log_server: PostgresServer, schema: str, admin: Admin
) -> None:
    admin.execute(f"DROP TABLE {schema}.member")
    admin.execute(f"UPDATE {schema}.fact SET value = '\\x00000001' WHERE kind = 'layout'")
    layout.check_readable_layout(admin, schema)
    opened: list[PostgresqlLog] = []
    thread = threading.Thread(target=lambda: opened.append(standing_by(log_server, schema).log))
    with admin.transaction():
        # Another broker does the same at the same time.
        layout.upgrade_layout(admin, schema)
        thread.start()
        time.sleep(0.5)
    thread.join()
    assert layout.read_layout(admin, schema) == layout.LAYOUT_VERSION
    opened[0].close()


def test_role_that_may_not_read_the_origin_serves_without_it(
    log_server: PostgresServer, schema: str, admin: Admin
) -> None:
    admin.execute("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM public")
    admin.execute(f"CREATE ROLE {schema}_app LOGIN; GRANT postgres TO {schema}_app WITH INHERIT FALSE")
    try:
        with Connection.open(parse_url(url_of(log_server).replace("postgres@", f"{schema}_app@"))) as connection:
            assert connection.origin is None
    finally:
        admin.execute("GRANT EXECUTE ON FUNCTION pg_control_system() TO public")
        admin.execute(f"DROP ROLE {schema}_app")


@pytest.mark.parametrize(
    "refused", ["SELECT pg_absent()", "SELECT relname FROM pg_class GROUP BY relname FOR UPDATE"], ids=["no", "managed"]
)
def test_server_that_does_not_tell_its_origin_is_used_with_a_warning(
    refused: str,
    log_server: PostgresServer,
    schema: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C28.14, C28.15: neither holds then."""
    session = f"SELECT session.*, ({refused}), NULL FROM ({connection._SET_SYNCHRONOUS_COMMIT}) AS session"
    monkeypatch.setattr("truenext.store.postgresql.connection._BEGIN_SESSION", session)
    log = standing_by(log_server, schema).log
    log.close()
    assert [each.levelname for each in caplog.records if "system identifier" in each.message] == ["WARNING"]


def set_origin(admin: Admin, schema: str, system: int) -> None:
    value = ORIGIN.pack(system, 1)
    admin.execute(f"UPDATE {schema}.fact SET value = %s WHERE kind = 'origin'", (value,))
