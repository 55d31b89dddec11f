"""Tests of the state of a log as `store status` shows it, and of a new identity: `store accept-loss`, `store adopt`."""

from __future__ import annotations

from pathlib import Path
from sys import maxsize

import pytest

from tests.contract.postgresql.conftest import OpenWriter
from tests.contract.postgresql.log_writer import LogWriter, member_settings, rows_of, url_of
from tests.stages.postgres import PostgresServer
from truenext.engine.writing.event_log import EventLog
from truenext.errors import ConfigurationError, StoreFencedError
from truenext.model.batch import Batch
from truenext.store.changes import encode_batch
from truenext.store.log import EMPTY_PAYLOAD, Role
from truenext.store.postgresql.check import check_log
from truenext.store.postgresql.compaction import compact
from truenext.store.postgresql.initialization import connected
from truenext.store.postgresql.kept import ActiveBroker, encode_active, read_facts, write_later_origin
from truenext.store.postgresql.layout import Connection
from truenext.store.postgresql.member import write_member
from truenext.store.postgresql.renewal import (
    EPOCHS_SKIPPED,
    EVENTS_SKIPPED,
    RUNS_SKIPPED,
    SEQUENCES_SKIPPED,
    read_status,
    renew,
)

OTHER_SYSTEM = "overlay(value PLACING '\\x0102030405060708'::bytea FROM 1 FOR 8)"
OTHER_TIMELINE = "overlay(value PLACING '\\x00000063'::bytea FROM 9 FOR 4)"


@pytest.fixture
def writer(open_writer: OpenWriter) -> LogWriter:
    """Former active broker, which has appended a row."""
    writer = open_writer(take_over=True)
    writer.append(EMPTY_PAYLOAD)
    return writer


def stop(writer: LogWriter) -> None:
    writer.log.hand_over("")
    writer.log.close()


def set_origin(admin: Connection, schema: str, change: str) -> None:
    """Change the fact that names the origin, as if the database were another one."""
    assert admin.execute(f"UPDATE {schema}.fact SET value = {change} WHERE kind = 'origin'").rowcount == 1


def describe_member(server: PostgresServer, schema: str, name: str, number: int, role: Role = Role.STANDING_BY) -> None:
    with connected(url_of(server)) as connection:
        assert write_member(connection, schema, member_settings(name, Path("/data")), role, 1, number)


def renew_log(server: PostgresServer, schema: str, *, is_copy: bool = False) -> str:
    return renew(url_of(server), schema, is_copy=is_copy)


# ---- Status ----


def test_status_of_a_whole_log_has_its_members_and_lacks_nothing(
    log_server: PostgresServer, schema: str, writer: LogWriter
) -> None:
    """C28.2"""
    status = read_status(url_of(log_server), schema)
    assert (status.epoch, status.number) == (1, writer.position.number)
    assert [(each.name, each.role) for each in status.members] == [("here", Role.ACTIVE)]
    assert (status.missing, status.is_copy) == (None, False)


def test_status_names_rows_that_a_member_had_and_the_log_lacks(
    log_server: PostgresServer, schema: str, admin: Connection, writer: LogWriter
) -> None:
    """C28.13"""
    last = writer.position.number
    describe_member(log_server, schema, "a", last)
    assert read_status(url_of(log_server), schema).missing is None
    describe_member(log_server, schema, "b", last + 7)
    missing = read_status(url_of(log_server), schema).missing
    assert missing is not None and missing[:2] == (last + 1, last + 7)


def test_status_on_another_timeline_says_that_rows_may_be_missing(
    log_server: PostgresServer, schema: str, admin: Connection, writer: LogWriter
) -> None:
    """C28.14"""
    set_origin(admin, schema, OTHER_TIMELINE)
    status = read_status(url_of(log_server), schema)
    assert status.missing is not None and status.missing[:2] == (writer.position.number + 1, None)
    assert not status.is_copy


def test_status_on_another_timeline_after_replicated_rows_lacks_nothing(
    log_server: PostgresServer, schema: str, admin: Connection, writer: LogWriter
) -> None:
    """C28.14"""
    set_origin(admin, schema, OTHER_TIMELINE)
    replicated = encode_active(ActiveBroker(5000, is_replicated=True, place="here"))
    admin.execute(f"UPDATE {schema}.fact SET value = %s WHERE kind = 'active'", (replicated,))
    assert read_status(url_of(log_server), schema).missing is None


def test_status_of_a_former_primary_says_so_until_its_loss_is_accepted(
    log_server: PostgresServer, schema: str, admin: Connection, writer: LogWriter
) -> None:
    """C28.14: also if members had rows, which do not tell why they are missing."""
    stop(writer)
    origin = read_facts(admin, schema).origin
    assert origin is not None
    describe_member(log_server, schema, "b", writer.position.number + 7)
    for timeline, is_former in ((origin.timeline, False), (origin.timeline + 1, True)):
        with connected(url_of(log_server)) as connection:
            write_later_origin(connection, schema, origin._replace(timeline=timeline))
        missing = read_status(url_of(log_server), schema).missing
        assert missing is not None and ("former primary" in missing.reason) == is_former
    damages: list[object] = []
    check_log(url_of(log_server), schema, damages.append, lambda *_: None)
    assert damages == []
    renew_log(log_server, schema)
    assert read_status(url_of(log_server), schema).missing is None


def test_status_of_another_system_is_that_of_a_copy(
    log_server: PostgresServer, schema: str, admin: Connection, writer: LogWriter
) -> None:
    """C28.15"""
    set_origin(admin, schema, OTHER_SYSTEM)
    status = read_status(url_of(log_server), schema)
    assert (status.missing, status.is_copy) == (None, True)


def test_status_of_a_log_without_members_can_be_read(
    log_server: PostgresServer, schema: str, admin: Connection
) -> None:
    """Layout 1 has no table for them."""
    admin.execute(f"DROP TABLE {schema}.member")
    admin.execute(f"UPDATE {schema}.fact SET value = '\\x00000001' WHERE kind = 'layout'")
    assert read_status(url_of(log_server), schema).members == ()


# ---- Renewal ----


@pytest.mark.parametrize("is_copy", [True, False])
def test_renewed_log_skips_all_numbers_that_a_lost_row_can_have_used(
    is_copy: bool, log_server: PostgresServer, schema: str, admin: Connection, writer: LogWriter
) -> None:
    """C28.13, C28.15"""
    stop(writer)
    before = read_facts(admin, schema)
    set_origin(admin, schema, OTHER_SYSTEM if is_copy else OTHER_TIMELINE)

    identity = renew_log(log_server, schema, is_copy=is_copy)
    status = read_status(url_of(log_server), schema)
    assert (status.missing, status.is_copy) == (None, False)
    assert (status.epoch, status.number) == (1 + EPOCHS_SKIPPED, writer.position.number + 1)
    assert status.members == ()
    compact(admin, schema, maxsize)
    facts = read_facts(admin, schema)
    assert facts.recovered.identity == identity
    limit = before.recovered.sequence_limit + SEQUENCES_SKIPPED
    assert (facts.recovered.sequence_limit, facts.recovered.redelivered_below) == (limit, limit)
    run, event = before.next_history
    assert facts.next_history == (run + RUNS_SKIPPED, event + EVENTS_SKIPPED)
    assert facts.earlier == {before.recovered.identity: writer.position.number}
    damages: list[object] = []
    check_log(url_of(log_server), schema, damages.append, lambda *_: None)
    assert damages == []


def test_renewal_loses_no_transient_message_of_a_clean_stop(
    log_server: PostgresServer, schema: str, admin: Connection, writer: LogWriter
) -> None:
    """C28.15: nothing is lost by it."""
    stop(writer)
    before = read_facts(admin, schema)
    assert before.recovered.clean_stop
    set_origin(admin, schema, OTHER_SYSTEM)
    renew_log(log_server, schema, is_copy=True)
    compact(admin, schema, maxsize)
    after = read_facts(admin, schema)
    assert (after.recovered.clean_stop, after.generation) == (True, before.generation)


def test_gap_in_the_history_stays_when_rows_from_before_it_are_compacted(
    log_server: PostgresServer, schema: str, admin: Connection, writer: LogWriter
) -> None:
    """C28.13: else events and a run of lost rows could be given again."""
    events = EventLog(run=3, first_event=1000)
    events.run_started(after_clean_stop=True)
    batch = Batch(0)
    batch.history = events.close_chunk()
    writer.append(b"".join(encode_batch(batch, None)))
    stop(writer)
    set_origin(admin, schema, OTHER_TIMELINE)
    renew_log(log_server, schema)
    before = read_facts(admin, schema).next_history
    compact(admin, schema, maxsize)
    assert read_facts(admin, schema).next_history == before


def test_renewed_log_is_taken_over_by_the_next_broker(
    log_server: PostgresServer, schema: str, admin: Connection, writer: LogWriter, open_writer: OpenWriter
) -> None:
    stop(writer)
    set_origin(admin, schema, OTHER_TIMELINE)
    renew_log(log_server, schema)
    assert open_writer(take_over=True).log.status.epoch == 2 + EPOCHS_SKIPPED


def test_log_can_be_renewed_twice(
    log_server: PostgresServer, schema: str, admin: Connection, writer: LogWriter
) -> None:
    stop(writer)
    first = writer.log.identity
    set_origin(admin, schema, OTHER_TIMELINE)
    second = renew_log(log_server, schema)
    set_origin(admin, schema, OTHER_TIMELINE)
    renew_log(log_server, schema)
    assert set(read_facts(admin, schema).earlier) == {first, second}


def test_broker_that_wakes_up_after_a_renewal_is_fenced(
    log_server: PostgresServer, schema: str, admin: Connection, writer: LogWriter
) -> None:
    writer.log._background.close()
    admin.execute(f"UPDATE {schema}.member SET at = at - interval '2 s'")
    set_origin(admin, schema, OTHER_TIMELINE)
    renew_log(log_server, schema)
    with pytest.raises(StoreFencedError):
        writer.append(EMPTY_PAYLOAD)


@pytest.mark.parametrize("change", [None, OTHER_TIMELINE], ids=["snapshot", "restored base backup"])
def test_copy_with_the_same_system_identifier_can_be_adopted(
    change: str | None, log_server: PostgresServer, schema: str, admin: Connection, writer: LogWriter
) -> None:
    """C28.15"""
    stop(writer)
    if change is not None:
        set_origin(admin, schema, change)
    identity = renew_log(log_server, schema, is_copy=True)
    status = read_status(url_of(log_server), schema)
    assert (status.missing, status.is_copy) == (None, False)
    assert read_facts(admin, schema).recovered.identity == identity != writer.log.identity


@pytest.mark.parametrize("change", [None, OTHER_SYSTEM])
def test_log_of_which_no_row_is_missing_keeps_its_identity(
    change: str | None,
    log_server: PostgresServer,
    schema: str,
    admin: Connection,
    writer: LogWriter,
) -> None:
    """C28.18"""
    stop(writer)
    if change is not None:
        set_origin(admin, schema, change)
    before = rows_of(admin, schema)
    with pytest.raises(ConfigurationError, match=r"no row is missing .*: nothing was changed"):
        renew_log(log_server, schema)
    assert rows_of(admin, schema) == before
    assert read_facts(admin, schema).recovered.identity == writer.log.identity


@pytest.mark.parametrize("is_marked", [True, False])
def test_log_is_not_renewed_while_a_broker_is_active(
    is_marked: bool, log_server: PostgresServer, schema: str, admin: Connection, writer: LogWriter
) -> None:
    """C28.18: its mark is enough, and so is its description, for example while it has no connection."""
    if is_marked:
        writer.log.start()
        describe_member(log_server, schema, "here", 0, Role.STANDING_BY)
    else:
        stop(writer)
        describe_member(log_server, schema, "b", 0, Role.ACTIVE)
    set_origin(admin, schema, OTHER_TIMELINE)
    before = rows_of(admin, schema)
    with pytest.raises(ConfigurationError, match=r"a broker is active .*: stop "):
        renew_log(log_server, schema)
    assert rows_of(admin, schema) == before
