"""Tests of rows that the database has forgotten: brokers put them back, or say that they are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.contract.postgresql.conftest import OpenWriter
from tests.contract.postgresql.log_writer import LogWriter, member_settings, open_log, rows_of, url_of
from tests.contract.postgresql.rows import empty_state
from tests.contract.postgresql.test_log import backend_of, terminate
from tests.stages.postgres import PostgresServer
from truenext.errors import StoreFencedError, StoreForgottenError
from truenext.model.batch import Batch
from truenext.store.changes import RareChanges, encode_batch
from truenext.store.log import LogPosition, Role, next_digest
from truenext.store.postgresql import log_appender
from truenext.store.postgresql.connection import Connection
from truenext.store.postgresql.kept import ORIGIN, ActiveBroker, encode_active
from truenext.store.postgresql.layout import PART_BYTES_MAX, PARTITION_ROWS
from truenext.store.postgresql.member import write_member
from truenext.store.postgresql.outcome import Finding, NewRow
from truenext.store.postgresql.renewal import read_status

Admin = psycopg.Connection[Any]

OTHER = member_settings("b", Path("/b"))


def payload(number: int, size: int = 0) -> bytes:
    batch = Batch(0)
    batch.puts = {bytes(13): bytes(size)} if size else {}
    return b"".join(encode_batch(batch, RareChanges(sequence_limit=number)))


def all_rows(admin: Admin, schema: str) -> list[tuple[object, ...]]:
    return admin.execute(f"SELECT * FROM {schema}.log ORDER BY number, part").fetchall()


def forget(admin: Admin, schema: str, above: int) -> None:
    admin.execute(f"DELETE FROM {schema}.log WHERE number > %s", (above,))


# ---- An active broker ----


@pytest.mark.parametrize("last", [4, 2, 1, 0], ids=["one", "some", "all but the takeover", "the takeover too"])
def test_active_broker_puts_back_what_the_database_has_forgotten(
    open_writer: OpenWriter, admin: Admin, schema: str, last: int
) -> None:
    writer = open_writer()
    for number in range(2, 6):
        writer.append(payload(number))
    rows = all_rows(admin, schema)
    forget(admin, schema, last)
    assert writer.append(payload(6))
    assert all_rows(admin, schema)[:-1] == rows
    assert rows_of(admin, schema)[-1] == (6, 1, payload(6))


def test_large_rows_and_those_of_later_partitions_are_put_back(
    open_writer: OpenWriter, admin: Admin, schema: str
) -> None:
    writer = open_writer()
    writer.append(payload(2, PART_BYTES_MAX))
    for number in range(5 * PARTITION_ROWS):
        writer._add(payload(number))
    end = writer.position
    assert writer.append(payload(1))
    rows = rows_of(admin, schema)
    assert len(rows) == end.number + 3
    assert rows[-1] == (end.number + 1, 1, payload(1))
    forget(admin, schema, 1)
    assert writer.append(payload(1))
    assert rows_of(admin, schema)[:-1] == rows


@pytest.mark.parametrize("last", [1, 2, 3], ids=["with one before", "all", "one"])
def test_rows_that_were_not_certain_are_put_back_behind_the_folder(
    last: int, open_writer: OpenWriter, admin: Admin, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their frames come with that of the next certain row."""
    writer = open_writer()
    writer.append(payload(2))
    end = writer.position
    monkeypatch.setattr(writer.log._database, "is_replicated", True)
    monkeypatch.setattr(writer.log._database, "check_standbys", lambda _: None)
    monkeypatch.setattr(writer.log._appender, "_append", partial(append_in_doubt, writer.log._appender._append))
    assert not writer.append(payload(3))
    assert not writer.append(payload(4))
    rows = all_rows(admin, schema)
    before, writer.position = writer.position, end
    forget(admin, schema, last)
    monkeypatch.undo()
    digest = next_digest(before.digest, [payload(5)])
    assert writer.log.append(before.number + 1, before.digest, digest, [payload(5)])
    assert all_rows(admin, schema)[:-1] == rows
    assert writer.log._appender._uncertain == []


def append_in_doubt(append: Callable[[Connection, NewRow], bool], connection: Connection, new: NewRow) -> bool:
    append(connection, new)
    return False


def test_rows_behind_another_takeover_are_not_put_back(open_writer: OpenWriter, admin: Admin, schema: str) -> None:
    first = open_writer()
    first.append(payload(2))
    first.append(payload(3))
    forget(admin, schema, 2)
    open_writer(take_over=True)
    rows = all_rows(admin, schema)
    with pytest.raises(StoreFencedError):
        first.append(payload(4))
    assert all_rows(admin, schema) == rows


def test_broker_that_is_fenced_just_before_its_repair_says_so(
    open_writer: OpenWriter, admin: Admin, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_writer()
    first.append(payload(2))
    open_writer(take_over=True)
    monkeypatch.setattr(log_appender, "find", lambda *_: Finding.FORGOTTEN)
    with pytest.raises(StoreFencedError):
        first.append(payload(3))


def test_broker_whose_takeover_was_forgotten_is_fenced_by_another_one_of_the_same_epoch(
    open_writer: OpenWriter, admin: Admin, schema: str
) -> None:
    """The database was restored to a state before the takeover. The number of the other broker's last row does not
    matter."""
    open_writer().append(payload(2))
    zombie = open_writer(take_over=True)
    for number in (3, 4, 5):
        zombie.append(payload(number))
    forget(admin, schema, 2)
    other = open_writer(take_over=True)
    for number in range(6, 10):
        rows = all_rows(admin, schema)
        with pytest.raises(StoreFencedError, match=f"another broker has gone on .* \\(row {rows[-1][0]}, epoch 2\\)"):
            zombie.append(payload(9))
        assert all_rows(admin, schema) == rows
        assert other.append(payload(number))


def test_takeover_that_took_the_place_of_a_forgotten_one_is_another_row(
    open_writer: OpenWriter, admin: Admin, schema: str
) -> None:
    """Number, epoch and member are the same: with the same digest, two brokers would append."""
    first = open_writer()
    forget(admin, schema, 0)
    second = open_writer(take_over=True)
    with pytest.raises(StoreFencedError, match=r"another broker has gone on .* \(row 1, epoch 1\)"):
        first.append(payload(2))
    assert second.append(payload(2))


def test_rows_of_an_earlier_epoch_with_another_digest_are_not_continued(
    open_writer: OpenWriter, admin: Admin, schema: str
) -> None:
    writer = open_writer()
    writer.append(payload(2))
    writer.append(payload(3))
    forget(admin, schema, 2)
    admin.execute(f"UPDATE {schema}.log SET digest = %s WHERE number = 2", (bytes(16),))
    rows = all_rows(admin, schema)
    with pytest.raises(StoreFencedError, match=r"another broker has gone on .* \(row 2, epoch 1\)"):
        writer.append(payload(4))
    assert all_rows(admin, schema) == rows


def test_rows_that_the_folder_no_longer_has_are_named(open_writer: OpenWriter, admin: Admin, schema: str) -> None:
    writer = open_writer()
    for number in range(2, 6):
        writer.append(payload(number))
    forget(admin, schema, 2)
    writer.oldest_frame = 4
    writer.log._database.call(lambda connection: write_member(connection, schema, OTHER, Role.STANDING_BY, 1, 4))
    with pytest.raises(
        StoreForgottenError,
        match=r"has lost rows 3 to 5 .* the folder no longer has row 3; member 'b' had rows up to 4\.",
    ):
        writer.append(payload(6))


def test_rows_are_put_back_although_the_oldest_segment_is_freed_meanwhile(
    open_writer: OpenWriter, admin: Admin, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames that were begun can be read to their end, but not again."""
    writer = open_writer()
    for number in range(2, 6):
        writer.append(payload(number))
    forget(admin, schema, 2)
    frames_after = writer.frames_after

    def frames_once(number: int) -> Iterator[bytes]:
        monkeypatch.setattr(writer, "frames_after", None)
        return frames_after(number)

    monkeypatch.setattr(writer, "frames_after", frames_once)
    assert writer.append(payload(6))
    assert [number for number, _, _ in rows_of(admin, schema)] == list(range(7))


def test_rows_are_not_put_back_on_a_former_primary(open_writer: OpenWriter, admin: Admin, schema: str) -> None:
    writer = open_writer()
    writer.append(payload(2))
    forget(admin, schema, 1)
    origin = writer.log._end.origin
    assert origin is not None
    writer.log._end.followed = origin._replace(timeline=origin.timeline + 1)
    with pytest.raises(StoreForgottenError, match="is on timeline 1, and brokers have followed timeline 2"):
        writer.append(payload(3))


# ---- A broker that stands by or starts ----


def ahead(open_writer: OpenWriter, admin: Admin, schema: str) -> LogWriter:
    """Return a broker that has ended, and whose folder has two rows more than the log."""
    writer = open_writer(failover_after_s=2.0)
    for number in range(2, 5):
        writer.append(payload(number))
    writer.log.close()
    forget(admin, schema, 2)
    return writer


def reopened(writer: LogWriter, server: PostgresServer, schema: str, **options: object) -> LogWriter:
    again = LogWriter(open_log(url_of(server), schema, failover_after_s=2.0, **options), empty_state().position)
    for number in range(1, writer.position.number + 1):
        again._add(writer._payloads[number])
    return again


def test_broker_that_takes_over_puts_back_its_rows_in_the_same_transaction(
    open_writer: OpenWriter, admin: Admin, schema: str, log_server: PostgresServer
) -> None:
    writer = ahead(open_writer, admin, schema)
    again = reopened(writer, log_server, schema)
    again.take_over()
    rows = rows_of(admin, schema)
    assert [(number, epoch) for number, epoch, _ in rows] == [(0, 0), (1, 1), (2, 1), (3, 1), (4, 1), (5, 2)]
    assert admin.execute(f"SELECT count(DISTINCT xmin::text) FROM {schema}.log WHERE number > 2").fetchone() == (1,)
    assert again.append()
    again.log.close()


@pytest.mark.parametrize("is_told", [False, True])
def test_broker_that_is_ahead_waits_for_one_that_has_more(
    open_writer: OpenWriter, admin: Admin, schema: str, log_server: PostgresServer, is_told: bool
) -> None:
    """Although it was the last active one, and was told to take over."""
    again = reopened(ahead(open_writer, admin, schema), log_server, schema, take_over=is_told)
    assert again.log.stands_by(again.position)
    assert len(rows_of(admin, schema)) == 3
    again.log.close()


def test_takeover_on_another_timeline_says_that_rows_may_be_missing(
    open_writer: OpenWriter, admin: Admin, schema: str, log_server: PostgresServer
) -> None:
    """C28.12: what the folder has is put back all the same."""
    writer = ahead(open_writer, admin, schema)
    set_timeline(admin, schema, -1)
    again = reopened(writer, log_server, schema)
    with pytest.raises(StoreForgottenError, match=r"may have lost rows from 5 on .* changed from timeline 0 to 1"):
        again.take_over()
    assert [(number, epoch) for number, epoch, _ in rows_of(admin, schema)][3:] == [(3, 1), (4, 1)]
    again.log.close()


@pytest.mark.parametrize("forgotten", [0, 2], ids=["nothing", "rows"])
def test_folder_that_has_followed_a_later_timeline_refuses_a_former_primary(
    forgotten: int, open_writer: OpenWriter, admin: Admin, schema: str, log_server: PostgresServer, tmp_path: Path
) -> None:
    """Also after a restart, and if the log has all rows of the folder: another broker may serve on that timeline."""
    writer = open_writer()
    writer.append(payload(2))
    writer.append(payload(3))
    set_timeline(admin, schema, 1)
    standby = reopened(writer, log_server, schema, folder=tmp_path, name="standby")
    assert standby.log.stands_by(standby.position)
    standby.log.close()
    writer.log.close()
    set_timeline(admin, schema, -1)
    forget(admin, schema, 3 - forgotten)
    rows = all_rows(admin, schema)
    again = reopened(writer, log_server, schema, folder=tmp_path, name="standby")
    assert again.log.stands_by(again.position)
    with pytest.raises(StoreForgottenError, match="is on timeline 1, and brokers have followed timeline 2"):
        again.log.take_over(again.position)
    status = read_status(url_of(log_server), schema)
    assert status.missing is not None and "former primary that has come back" in status.missing.reason
    with pytest.raises(StoreForgottenError):
        again.log.relation(LogPosition(1, bytes(16)))
    assert all_rows(admin, schema) == rows
    again.log.close()


def test_takeover_on_another_timeline_of_a_log_that_was_replicated_is_right(
    open_writer: OpenWriter, admin: Admin, schema: str, log_server: PostgresServer
) -> None:
    """Also if it is not replicated any more: the only standby was promoted."""
    open_writer().log.close()
    set_timeline(admin, schema, -1)
    active = encode_active(ActiveBroker(5000, True, ""))
    admin.execute(f"UPDATE {schema}.fact SET value = %s WHERE kind = 'active'", (active,))
    writer = LogWriter(open_log(url_of(log_server), schema), empty_state().position)
    writer.take_over()
    writer.log.close()


def test_active_broker_that_finds_its_last_row_names_the_new_timeline(
    open_writer: OpenWriter, admin: Admin, schema: str
) -> None:
    writer = open_writer()
    set_timeline(admin, schema, -1)
    origin = writer.log._end.origin
    assert origin is not None
    writer.log._end.origin = origin._replace(timeline=0)
    terminate(admin, backend_of(writer))
    writer.append(payload(2))
    found = admin.execute(f"SELECT value FROM {schema}.fact WHERE kind = 'origin'").fetchone()
    assert found is not None
    assert ORIGIN.unpack(found[0]) == origin


def set_timeline(admin: Admin, schema: str, change: int) -> None:
    """Change the timeline that the last takeover has named."""
    found = admin.execute(f"SELECT value FROM {schema}.fact WHERE kind = 'origin'").fetchone()
    assert found is not None
    system, timeline = ORIGIN.unpack(found[0])
    value = ORIGIN.pack(system, timeline + change)
    admin.execute(f"UPDATE {schema}.fact SET value = %s WHERE kind = 'origin'", (value,))
