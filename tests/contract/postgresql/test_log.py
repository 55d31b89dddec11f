"""Tests of appends and takeovers on a real PostgreSQL: all that an append may meet."""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg
import pytest

from tests.contract import disk
from tests.contract.postgresql.conftest import OpenWriter
from tests.contract.postgresql.log_writer import DURABLE, LogWriter, make_log, open_log, refuse_members, rows_of, url_of
from tests.contract.postgresql.rows import empty_state
from tests.stages.postgres import BINARIES, USER, PostgresServer, own_server
from truenext.errors import ConfigurationError, StoreBehindError, StoreError, StoreFencedError, StoreForgottenError
from truenext.model.disk_level import DiskLevel
from truenext.store.log import EMPTY_PAYLOAD, Awaited, LogPosition, Relation, next_digest
from truenext.store.postgresql import database as database_module
from truenext.store.postgresql import log_appender, log_reader, log_rows, log_standby, lookout, takeover
from truenext.store.postgresql.background import Background
from truenext.store.postgresql.compaction import Compactor, compact
from truenext.store.postgresql.connection import Connection, application_name
from truenext.store.postgresql.layout import PART_BYTES_MAX, PARTITION_ROWS, partitions_in
from truenext.store.postgresql.log_appender import LogAppender
from truenext.store.postgresql.log_standby import LogTakeover
from truenext.store.postgresql.outcome import NewRow, Row
from truenext.store.postgresql.renewal import read_status
from truenext.store.store import Pending, Progress

LOGGERS = (database_module.__name__, log_standby.__name__)


def backend_of(writer: LogWriter) -> int:
    """Return the process of the server that serves the writer's appends."""
    connection = writer.log._database.connection
    assert connection is not None
    return connection.info.backend_pid


def terminate(admin: psycopg.Connection[Any], process: int) -> None:
    """End a session, and wait until it is gone."""
    admin.execute("SELECT pg_terminate_backend(%s, 5000)", (process,))


def has_changes(payload: bytes) -> bool:
    return payload != EMPTY_PAYLOAD and b"takeover" not in payload


def payloads(admin: psycopg.Connection[Any], schema: str) -> list[bytes]:
    """Return all payloads but those of takeovers and of the first row."""
    return [payload for _, _, payload in rows_of(admin, schema) if has_changes(payload)]


class LostAnswers:
    """Appends whose answer is lost: the session ends when the row is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, server: PostgresServer, count: int = 1) -> None:
        self._server = server
        self._left = count
        self._append = log_rows.append_row
        monkeypatch.setattr(log_rows, "append_row", self._append_and_lose)
        self._advance = LogAppender.advance_append
        monkeypatch.setattr(LogAppender, "advance_append", lambda *arguments: self._advance_and_lose(*arguments))

    def _append_and_lose(self, connection: Connection, new: NewRow) -> bool | None:
        found = self._append(connection, new)
        if self._left == 0:
            return found
        self._lose(connection)
        raise psycopg.OperationalError("the answer is lost")

    def _advance_and_lose(self, appender: LogAppender, pending: Any) -> Progress:
        silent_from = appender._end.silent_from
        progress = self._advance(appender, pending)
        if self._left == 0 or progress is not Progress.APPLIED:
            return progress
        self._lose(pending.connection)
        pending.connection._answer = None
        appender._database.pending, appender._end.silent_from = pending, silent_from
        return Progress.IN_DOUBT

    def _lose(self, connection: Connection) -> None:
        self._left -= 1
        with self._server.connect() as admin:
            terminate(admin, connection.info.backend_pid)


@contextmanager
def later(seconds: float, action: Callable[[], object]) -> Iterator[None]:
    timer = threading.Timer(seconds, action)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@contextmanager
def stopped(process: int) -> Iterator[None]:
    """Stop a process until the end of the context."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        # The process may have ended.
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ---- Appending ----


def test_append_writes_rows_in_order(open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str) -> None:
    writer = open_writer()
    assert [writer.append(b"%d" % number) for number in range(3)] == [True] * 3
    rows = rows_of(admin, schema)
    assert [row for row in rows if row[0] != 1] == [
        (0, 0, EMPTY_PAYLOAD),
        (2, 1, b"0"),
        (3, 1, b"1"),
        (4, 1, b"2"),
    ]
    formats = admin.execute(f"SELECT format FROM {schema}.log ORDER BY number").fetchall()
    assert formats == [(None,), (14,), (None,), (None,), (None,)]
    assert writer.log.status.number == 4
    assert writer.log.status.epoch == 1


def test_append_before_the_takeover_is_refused(log_server: PostgresServer, schema: str) -> None:
    writer = LogWriter(open_log(url_of(log_server), schema), empty_state().position)
    with pytest.raises(StoreError, match="taken over"):
        writer.append()
    writer.log.close()


def test_append_of_a_large_payload_is_in_parts(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    writer = open_writer()
    payload = os.urandom(2 * PART_BYTES_MAX + 1)
    position = writer.position
    assert writer.append(payload)
    assert writer.append(b"next")
    sizes = admin.execute(f"SELECT part, length(payload) FROM {schema}.log WHERE number = 2 ORDER BY part").fetchall()
    assert sizes == [(0, PART_BYTES_MAX), (1, PART_BYTES_MAX), (2, 1)]
    assert list(writer.log.rows_after(position)) == [payload, b"next"]


def test_append_after_the_session_was_ended_is_repeated(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    writer = open_writer()
    terminate(admin, backend_of(writer))
    with caplog.at_level(logging.INFO):
        assert writer.append(b"one")
    assert payloads(admin, schema) == [b"one"]
    assert [record.message for record in caplog.records if record.name in LOGGERS] == [
        "connection to PostgreSQL lost: nothing is confirmed until it is back",
        "PostgreSQL is available again",
    ]
    again = caplog.records[-1]
    assert again.levelno == logging.WARNING
    assert 0 <= again.__dict__["seconds"] < 5


@pytest.mark.parametrize("size", [3, PART_BYTES_MAX + 1])
def test_append_whose_answer_is_lost_is_found(
    open_writer: OpenWriter,
    admin: psycopg.Connection[Any],
    schema: str,
    log_server: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
) -> None:
    writer = open_writer()
    LostAnswers(monkeypatch, log_server)
    assert writer.append(bytes(size))
    assert writer.append(b"two")
    assert b"".join(payloads(admin, schema)) == bytes(size) + b"two"


def test_append_to_a_silent_session_is_repeated_and_the_late_row_has_no_effect(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    writer = open_writer()
    process = backend_of(writer)
    started = time.monotonic()
    with stopped(process):
        # With the time that a large row takes.
        assert writer.append(b"one" * 100)
        assert 2 <= time.monotonic() - started < 5
        assert backend_of(writer) != process
    wait_until(lambda: admin.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", (process,)).fetchone() is None)
    assert writer.append(b"two")
    assert payloads(admin, schema) == [b"one" * 100, b"two"]
    (lost,) = (each for each in caplog.records if each.message.startswith("connection to PostgreSQL lost"))
    assert lost.__dict__["reason"] == "the server has not answered for 2 seconds"


def test_appends_while_sessions_are_ended_again_and_again_are_there_once(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str, log_server: PostgresServer
) -> None:
    writer = open_writer()
    is_over = threading.Event()
    pause_s = first_pause_s = 0.05

    def end_sessions() -> None:
        nonlocal pause_s
        with log_server.connect() as other:
            while not is_over.wait(random.uniform(0, pause_s)):
                # On a busy machine, there must be time for an append at last.
                pause_s *= 1.5
                other.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s",
                    (application_name(),),
                )

    thread = threading.Thread(target=end_sessions)
    thread.start()
    try:
        written = [b"%d" % number for number in range(30)]
        for payload in written:
            assert writer.append(payload)
            pause_s = first_pause_s
    finally:
        is_over.set()
        thread.join()
    assert payloads(admin, schema) == written


def test_append_while_the_server_is_read_only_waits(own_log_server: PostgresServer, open_writer: OpenWriter) -> None:
    with own_log_server.connect() as admin:
        make_log(admin, schema="own")
        writer = open_writer(own_log_server, "own")
        set_globally(admin, "default_transaction_read_only", "on")
        with later(1.0, lambda: set_globally(admin, "default_transaction_read_only", "off")):
            started = time.monotonic()
            assert writer.append(b"one")
        assert time.monotonic() - started > 0.9
        assert payloads(admin, "own") == [b"one"]


def test_append_over_a_crash_of_the_server_is_repeated(own_log_server: PostgresServer, open_writer: OpenWriter) -> None:
    with own_log_server.connect() as admin:
        make_log(admin, schema="own")
    writer = open_writer(own_log_server, "own", patience_s=30)
    writer.append(b"zero")
    own_log_server.kill()
    waits = []

    def start() -> None:
        waits.append(writer.log.status.wait)
        own_log_server.start()

    with later(0.5, start):
        assert writer.append(b"one")
    assert [wait.awaited for wait in waits if wait] == [Awaited.DATABASE]
    assert writer.log.status.wait is None
    assert writer.log.status.server == f"{own_log_server.folder}:5432"
    with own_log_server.connect() as admin:
        assert payloads(admin, "own") == [b"zero", b"one"]


def test_append_to_a_server_that_stays_away_fails_after_the_patience(
    own_log_server: PostgresServer, open_writer: OpenWriter
) -> None:
    with own_log_server.connect() as admin:
        make_log(admin, schema="own")
    writer = open_writer(own_log_server, "own", patience_s=1.0)
    own_log_server.stop()
    started = time.monotonic()
    with pytest.raises(StoreError, match="not available for 1 seconds"):
        writer.append()
    assert 0.9 < time.monotonic() - started < 3


@pytest.mark.parametrize("rows_left", [0, 1, 3])
def test_row_without_a_partition_attaches_it(
    admin: psycopg.Connection[Any], schema: str, log_server: PostgresServer, rows_left: int
) -> None:
    """The row is that of the takeover, or of a later append."""
    before = LogPosition(PARTITION_ROWS - 1 - rows_left, bytes(16))
    name = f"{schema}_boundary"
    make_log(admin, empty_state(before.number), schema=name)
    for partition in set(partitions_in(admin, name)) - {0}:
        admin.execute(f"DROP TABLE {name}.log_{partition}")
    writer = LogWriter(open_log(url_of(log_server), name), before)
    writer.take_over()
    for number in range(4):
        assert writer.append(b"%d" % number)
    assert [number for number, _, _ in rows_of(admin, name)][-1] == before.number + 5
    writer.log.close()
    admin.execute(f"DROP SCHEMA {name} CASCADE")


# ---- Appends that were begun ----


@pytest.fixture
def begun_writer(open_writer: OpenWriter) -> LogWriter:
    writer = open_writer()
    if not writer.begins:
        pytest.skip("for appends that are begun")
    return writer


@pytest.fixture
def any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no append be too slow: other processes may keep the server from answering in time."""
    monkeypatch.setattr(log_appender, "SLOW_S", 60.0)
    monkeypatch.setattr(disk, "ANSWER_S", 60.0)


@pytest.mark.usefixtures("any_speed")
def test_append_that_was_begun_ends_without_waiting(
    begun_writer: LogWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    for number in range(20):
        assert begun_writer.append(b"%d" % number)
    assert begun_writer.begun_count == 20
    assert payloads(admin, schema) == [b"%d" % number for number in range(20)]


LARGE = bytes(2 * 1024 * 1024)
"""Payload that no socket takes at once."""


@pytest.mark.usefixtures("any_speed")
def test_append_that_was_begun_is_sent_as_the_server_takes_it(
    begun_writer: LogWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    for _ in range(20):
        assert begun_writer.append(LARGE)
    assert begun_writer.begun_count == 20
    assert payloads(admin, schema) == [LARGE] * 20


def begin(writer: LogWriter, payload: bytes) -> tuple[LogPosition, Pending]:
    new = writer._next(payload)
    pending = writer.log.begin_append(new.number, writer.position.digest, new.digest, [payload])
    assert pending is not None
    return new, pending


def test_append_that_was_begun_is_sent_before_its_answer(
    begun_writer: LogWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    with admin.transaction():
        admin.execute(f"LOCK TABLE {schema}.log IN SHARE ROW EXCLUSIVE MODE")
        new, pending = begin(begun_writer, LARGE)
        assert not pending.is_sent
        wait_until(lambda: pending.advance() is Progress.WAITING and pending.is_sent)
    assert begun_writer.log.append(new.number, begun_writer.position.digest, new.digest, [LARGE])
    assert payloads(admin, schema) == [LARGE]


def test_answer_that_is_read_late_is_in_doubt(begun_writer: LogWriter, admin: psycopg.Connection[Any]) -> None:
    """As if this process was stopped while the answer was on its way."""
    new, pending = begin(begun_writer, b"one")
    time.sleep(log_appender.SLOW_S)
    assert pending.advance() is Progress.IN_DOUBT
    assert begun_writer.log.append(new.number, begun_writer.position.digest, new.digest, [b"one"])


@pytest.mark.parametrize("payload", [b"one", LARGE], ids=["sent", "unsent"])
@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "silent"])
def test_append_that_was_begun_is_taken_over_before_its_answer(
    begun_writer: LogWriter,
    admin: psycopg.Connection[Any],
    schema: str,
    caplog: pytest.LogCaptureFixture,
    is_cut: bool,
    payload: bytes,
) -> None:
    process = backend_of(begun_writer)
    with stopped(process), later(0.3, lambda: os.kill(process, signal.SIGCONT)):
        new, pending = begin(begun_writer, payload)
        assert pending.is_sent is (payload is not LARGE)
        if is_cut:
            with socket.socket(fileno=os.dup(pending.socket)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        assert pending.advance() is (Progress.IN_DOUBT if is_cut else Progress.WAITING)
        assert begun_writer.log.append(new.number, begun_writer.position.digest, new.digest, [payload])
    assert payloads(admin, schema) == [payload]
    records = [record for record in caplog.records if record.name in LOGGERS]
    lost = ["connection to PostgreSQL lost: nothing is confirmed until it is back", "PostgreSQL is available again"]
    assert [record.message for record in records] == (lost if is_cut else [])
    assert not is_cut or "closed" in records[0].__dict__["reason"]


def test_append_is_not_begun_on_a_connection_that_must_be_made_ready(begun_writer: LogWriter) -> None:
    log = begun_writer.log
    connection = log._database.connection
    assert connection is not None
    connection.has_prepared_append = False
    assert log.begin_append(2, b"", b"", [b"one"]) is None
    connection.has_prepared_append = True
    assert log.begin_append(2, b"", b"", [bytes(PART_BYTES_MAX + 1)]) is None
    connection.close()
    assert log.begin_append(2, b"", b"", [b"one"]) is None
    assert begun_writer.append()


def test_append_is_not_begun_once_the_background_work_has_failed(begun_writer: LogWriter) -> None:
    background_of(begun_writer).failure = StoreFencedError("taken over")
    assert begun_writer.log.begin_append(2, b"", b"", [b"one"]) is None
    with pytest.raises(StoreFencedError):
        begun_writer.append()


# ---- Errors of the server ----


def plant_error(admin: psycopg.Connection[Any], schema: str, sqlstate: str, part: int = 0) -> None:
    """Let the server refuse each row, by its `part`, with this SQLSTATE."""
    admin.execute(
        f"CREATE FUNCTION {schema}.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF NEW.part = {part} THEN RAISE EXCEPTION 'planted error' USING ERRCODE = '{sqlstate}'; END IF; "
        "RETURN NEW; END $$"
    )
    admin.execute(
        f"CREATE TRIGGER refuse BEFORE INSERT ON {schema}.log FOR EACH ROW EXECUTE FUNCTION {schema}.refuse()"
    )


def remove_error(admin: psycopg.Connection[Any], schema: str) -> None:
    admin.execute(f"DROP FUNCTION {schema}.refuse() CASCADE")


def test_append_to_a_full_disk_waits_longer_than_the_patience(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    writer = open_writer(patience_s=0.5)
    plant_error(admin, schema, "53100")
    levels = []

    def free_disk() -> None:
        levels.append(writer.log.disk_level)
        remove_error(admin, schema)

    with later(2.0, free_disk):
        started = time.monotonic()
        assert writer.append(b"one")
    assert time.monotonic() - started > 1.9
    assert levels == [DiskLevel.NONE]
    assert writer.log.disk_level is DiskLevel.PLENTY
    assert payloads(admin, schema) == [b"one"]
    full = [record for record in caplog.records if record.message.startswith("PostgreSQL's disk is full")]
    assert len(full) == 1


def test_append_to_a_full_disk_ends_when_the_broker_stops(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    writer = open_writer(patience_s=0.5)
    plant_error(admin, schema, "53100")
    with later(1.5, writer.log.begin_stop):
        started = time.monotonic()
        with pytest.raises(StoreError, match="not available"):
            writer.append(b"one")
    assert 1.4 < time.monotonic() - started < 5


def test_append_of_a_large_payload_to_a_full_disk_leaves_no_part(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    writer = open_writer()
    plant_error(admin, schema, "53100", part=1)
    counts = []

    def free_disk() -> None:
        counts.append(len(payloads(admin, schema)))
        remove_error(admin, schema)

    with later(1.0, free_disk):
        assert writer.append(bytes(PART_BYTES_MAX + 1))
    assert counts == [0]
    assert list(map(len, payloads(admin, schema))) == [PART_BYTES_MAX, 1]


def test_refused_row_is_not_in_the_error(open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str) -> None:
    writer = open_writer()
    admin.execute(f"ALTER TABLE {schema}.log ADD CONSTRAINT planted CHECK (epoch <> 1) NOT VALID")
    with pytest.raises(StoreError, match="planted") as error:
        writer.append(b"secret")
    assert b"secret".hex() not in str(error.value)


@pytest.mark.parametrize("sqlstate", ["40P01", "57014"])
def test_append_that_was_interrupted_is_repeated(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str, sqlstate: str
) -> None:
    writer = open_writer()
    plant_error(admin, schema, sqlstate)
    with later(0.5, lambda: remove_error(admin, schema)):
        assert writer.append(b"one")
    assert payloads(admin, schema) == [b"one"]


def test_append_that_is_refused_fails_with_the_text_of_the_server(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    writer = open_writer()
    plant_error(admin, schema, "XX000")
    with pytest.raises(StoreError, match="planted error"):
        writer.append()
    assert payloads(admin, schema) == []


# ---- The fence ----


def test_append_after_a_takeover_is_fenced(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    first = open_writer()
    first.append(b"one")
    second = open_writer(take_over=True)
    with pytest.raises(StoreFencedError, match=r"epoch 2; this broker's is 1"):
        first.append(b"late")
    assert second.append(b"two")
    with pytest.raises(StoreFencedError):
        first.append(b"late")
    assert payloads(admin, schema) == [b"one", b"two"]


def test_append_of_an_empty_row_at_the_number_of_a_takeover_is_fenced(open_writer: OpenWriter) -> None:
    """The row of the takeover has the number and the digest of the row that the fenced broker appends."""
    first = open_writer()
    open_writer(take_over=True)
    with pytest.raises(StoreFencedError):
        first.append(EMPTY_PAYLOAD)


def test_append_of_a_fenced_broker_that_has_followed_the_log_is_fenced(open_writer: OpenWriter) -> None:
    first = open_writer()
    open_writer(take_over=True)
    first.follow()
    with pytest.raises(StoreFencedError):
        first.append()


def test_append_that_arrives_after_a_takeover_is_fenced(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    first = open_writer()
    with stopped(backend_of(first)):
        errors: list[StoreError] = []

        def append_late() -> None:
            try:
                first.append(b"late")
            except StoreError as error:
                errors.append(error)

        thread = threading.Thread(target=append_late)
        thread.start()
        time.sleep(0.2)
        second = open_writer(take_over=True)
        assert second.append(b"two")
    thread.join()
    assert [type(error) for error in errors] == [StoreFencedError]
    assert payloads(admin, schema) == [b"two"]


def test_append_to_a_log_that_has_dropped_its_rows_is_fenced(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    first = open_writer()
    second = open_writer(take_over=True)
    admin.execute(f"DELETE FROM {schema}.log WHERE number <= %s", (first.position.number,))
    with pytest.raises(StoreFencedError):
        first.append()
    assert second.append()


def test_slow_append_that_returns_after_a_takeover_is_fenced(
    open_writer: OpenWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if this process was stopped while the answer was on its way."""
    first = open_writer()
    finish_append = log_rows.finish_append

    def finish_slowly(connection: Connection) -> bool | None:
        found = finish_append(connection)
        monkeypatch.setattr(log_rows, "finish_append", finish_append)
        open_writer(take_over=True)
        time.sleep(log_appender.SLOW_S)
        return found

    monkeypatch.setattr(log_rows, "finish_append", finish_slowly)
    with pytest.raises(StoreFencedError):
        first.append()


def test_append_to_a_log_with_another_last_row_is_fenced(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    writer = open_writer()
    writer.append()
    admin.execute(f"UPDATE {schema}.log SET digest = %s WHERE number = 2", (bytes(16),))
    with pytest.raises(StoreFencedError, match="another broker has gone on"):
        writer.append()


def test_append_to_an_empty_log_is_forgotten(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    writer = open_writer()
    admin.execute(f"DELETE FROM {schema}.log")
    with pytest.raises(StoreForgottenError, match="has no row"):
        writer.append()


# ---- Takeover ----


def test_takeover_of_a_broker_that_ended_needs_no_option(open_writer: OpenWriter) -> None:
    open_writer().log.close()
    assert open_writer().log.status.epoch == 2


def test_takeover_ends_a_session_that_is_in_the_way(
    open_writer: OpenWriter, schema: str, log_server: PostgresServer
) -> None:
    """It appends."""
    with log_server.connect() as blocking:
        blocking.execute("BEGIN")
        blocking.execute(f"LOCK TABLE {schema}.log IN ROW EXCLUSIVE MODE")
        started = time.monotonic()
        writer = open_writer()
        assert 1.9 < time.monotonic() - started < 6
        assert writer.append()
        with pytest.raises(psycopg.OperationalError):
            blocking.execute("SELECT 1")


def test_takeover_ends_another_takeover_or_a_repair_only_late(
    log_server: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repair may take long, and confirmed rows would be lost with it."""
    writer = LogWriter(open_log(url_of(log_server), schema, take_over=True), empty_state().position)
    monkeypatch.setattr(takeover, "LOCK_TIMEOUT_S", 0.1)
    with log_server.connect() as blocking:
        blocking.execute("BEGIN")
        blocking.execute(f"LOCK TABLE {schema}.log IN SHARE ROW EXCLUSIVE MODE")
        blocking.execute(f"LOCK TABLE {schema}.log IN ROW EXCLUSIVE MODE")
        assert not writer.log.stands_by(writer.position)
        assert not writer.log.take_over(writer.position)
        blocking.execute("SELECT 1")
        monkeypatch.setattr(takeover, "REPAIR_SILENCE_S", 0.1)
        writer.take_over()
        with pytest.raises(psycopg.OperationalError):
            blocking.execute("SELECT 1")
    writer.log.close()


def test_takeover_beside_a_reader_does_not_wait(
    open_writer: OpenWriter, schema: str, log_server: PostgresServer
) -> None:
    with log_server.connect() as reader:
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        reader.execute(f"SELECT count(*) FROM {schema}.log")
        writer = LogWriter(open_log(url_of(log_server), schema), empty_state().position)
        writer.take_over()
        assert writer.append()
        writer.log.close()
        # A session that keeps a takeover waiting is ended.
        reader.execute("SELECT 1")


def test_takeover_whose_answer_is_lost_is_repeated_with_the_next_epoch(
    open_writer: OpenWriter,
    admin: psycopg.Connection[Any],
    schema: str,
    log_server: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_over = LogTakeover._take_over
    lost: list[int] = []

    def take_over_and_lose(log: LogTakeover, connection: Connection, **arguments: Any) -> tuple[Row | None, bool]:
        taken = take_over(log, connection, **arguments)
        if not lost:
            lost.append(connection.info.backend_pid)
            terminate(admin, lost[0])
            raise psycopg.OperationalError("the answer is lost")
        return taken

    monkeypatch.setattr(LogTakeover, "_take_over", take_over_and_lose)
    writer = open_writer()
    assert writer.log.status.epoch == 2
    assert writer.append()
    assert [epoch for _, epoch, _ in rows_of(admin, schema)] == [0, 1, 2, 2]


def test_takeover_of_a_log_in_a_newer_format_is_refused(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    open_writer().log.close()
    admin.execute(f"UPDATE {schema}.log SET format = 15 WHERE number = 1")
    rows = rows_of(admin, schema)
    with pytest.raises(StoreError, match="format 15; this truenext reads format 14"):
        open_writer()
    assert rows_of(admin, schema) == rows


def test_log_of_the_format_before_is_taken_over_as_it_is_and_then_refused_by_the_version_before(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C30.6."""
    before = open_writer()
    assert before.append(b"of the version before")
    rows = rows_of(admin, schema)
    with monkeypatch.context() as patch:
        for module in (log_reader, takeover):
            patch.setattr(module, "LOG_FORMAT", 16)
        after = open_writer()
        assert after.append(b"of this version")
        assert len(list(after.log.rows_after(empty_state().position))) == len(rows) + 1
    assert rows_of(admin, schema)[: len(rows)] == rows
    formats = admin.execute(f"SELECT format FROM {schema}.log ORDER BY number").fetchall()
    assert formats == [(None,), (14,), (None,), (16,), (None,)]
    with pytest.raises(StoreError, match="format 16"):
        list(before.log.rows_after(empty_state().position))
    after.log.close()
    with pytest.raises(StoreError, match="has rows of format 16; this truenext reads format 14"):
        open_writer()


def test_rows_in_a_newer_format_are_not_read(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    writer = open_writer()
    admin.execute(f"UPDATE {schema}.log SET format = 15 WHERE number = 1")
    with pytest.raises(StoreError, match="format 15"):
        list(writer.log.rows_after(empty_state().position))


def test_takeovers_by_two_brokers_that_append_lose_no_confirmed_row(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookout, "LOOK_S", 0.0)
    takeovers = 60
    confirmed: list[bytes] = []
    lock = threading.Lock()
    left = iter(range(takeovers))

    def serve(name: str) -> None:
        writer = open_writer(take_over=True)
        for number in left:
            count = 0
            try:
                while count < 50:
                    payload = b"%s %d %d" % (name.encode(), number, count)
                    writer.append(payload)
                    with lock:
                        confirmed.append(payload)
                    count += 1
            except StoreFencedError:
                pass
            writer.take_over()

    threads = [threading.Thread(target=serve, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = rows_of(admin, schema)
    epochs = [epoch for _, epoch, _ in rows]
    assert epochs == sorted(epochs)
    assert epochs[-1] == takeovers + 2
    assert [number for number, _, _ in rows] == list(range(len(rows)))
    found = [payload for _, _, payload in rows if has_changes(payload)]
    assert len(set(found)) == len(found)
    assert set(confirmed) <= set(found)
    # Rows that were not confirmed may be there; each broker appends one at a time.
    assert len(found) - len(confirmed) <= takeovers


# ---- Replication ----


def new_writer(server: PostgresServer, **options: object) -> LogWriter:
    return LogWriter(open_log(url_of(server), "own", **options), empty_state().position)


def set_globally(admin: psycopg.Connection[Any], name: str, value: str) -> None:
    admin.execute(f"ALTER SYSTEM SET {name} = '{value}'")
    admin.execute("SELECT pg_reload_conf()")


class Standby:
    """Synchronous standby: stores the write-ahead log, and confirms it."""

    def __init__(self, server: PostgresServer, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        places = [f"--host={self._server.folder}", f"--directory={self._folder}"]
        self._process = subprocess.Popen(
            [BINARIES / "pg_receivewal", *places, "--username=postgres", "--synchronous", "--no-loop"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=USER,
        )
        with self._server.connect() as admin:
            wait_until(lambda: admin.execute("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'").fetchone())

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def server_for_standbys() -> Iterator[PostgresServer]:
    with own_server(**DURABLE, wal_level="replica", max_wal_senders="5") as server:
        yield server


@pytest.fixture
def replicated(server_for_standbys: PostgresServer) -> Iterator[PostgresServer]:
    """PostgreSQL that names a synchronous standby, with an empty log in the schema `own`."""
    server = server_for_standbys
    with server.connect() as admin:
        make_log(admin, schema="own")
        set_globally(admin, "synchronous_standby_names", "pg_receivewal")
        yield server
        set_globally(admin, "synchronous_standby_names", "")
        admin.execute("DROP SCHEMA own CASCADE")


@pytest.fixture
def standby(replicated: PostgresServer) -> Iterator[Standby]:
    folder = Path(tempfile.mkdtemp(dir=replicated.folder))
    folder.chmod(0o777)
    standby = Standby(replicated, folder)
    standby.start()
    yield standby
    standby.stop()


@pytest.fixture
def replicated_writer(replicated: PostgresServer, standby: Standby, open_writer: OpenWriter) -> LogWriter:
    return open_writer(replicated, "own", is_replicated=True)


def cancel_waits(server: PostgresServer) -> bool:
    """Cancel the waits of all sessions for the standby. Return whether there were any."""
    with server.connect() as admin:
        found = admin.execute("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
        return bool(found.fetchall())


def test_append_to_a_replicated_log_is_certain(replicated_writer: LogWriter) -> None:
    assert replicated_writer.append()
    assert replicated_writer.log.status.is_replicated


def test_append_whose_wait_for_the_standby_is_cancelled_is_uncertain(
    replicated_writer: LogWriter, replicated: PostgresServer, standby: Standby
) -> None:
    standby.stop()
    with later(0.5, lambda: wait_until(lambda: cancel_waits(replicated))):
        assert not replicated_writer.append(b"one")
    standby.start()
    assert replicated_writer.append(EMPTY_PAYLOAD)
    with replicated.connect() as admin:
        assert payloads(admin, "own") == [b"one"]


def test_append_to_a_local_log_whose_wait_is_cancelled_is_certain(
    replicated: PostgresServer, standby: Standby, open_writer: OpenWriter
) -> None:
    writer = open_writer(replicated, "own")
    standby.stop()
    with later(0.5, lambda: wait_until(lambda: cancel_waits(replicated))):
        assert writer.append(b"one")


def test_append_that_is_found_after_a_doubt_is_uncertain(
    replicated_writer: LogWriter, replicated: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    LostAnswers(monkeypatch, replicated)
    assert not replicated_writer.append(b"one")
    assert replicated_writer.append(EMPTY_PAYLOAD)


def test_append_with_a_warning_is_uncertain_and_does_not_put_silence_off(
    replicated_writer: LogWriter, replicated: PostgresServer
) -> None:
    """C27.7, C28.9"""
    log = replicated_writer.log
    silent_from = log.silent_from
    with replicated.connect() as admin:
        admin.execute(
            "CREATE FUNCTION own.warn() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE WARNING 'planted'; RETURN NEW; END $$"
        )
        admin.execute("CREATE TRIGGER warn BEFORE INSERT ON own.log FOR EACH ROW EXECUTE FUNCTION own.warn()")
        assert not replicated_writer.append()
        admin.execute("DROP FUNCTION own.warn() CASCADE")
    assert log.silent_from == silent_from
    assert replicated_writer.append()
    assert log.silent_from > silent_from


def test_append_without_the_standby_waits_for_it(
    replicated_writer: LogWriter, replicated: PostgresServer, standby: Standby, caplog: pytest.LogCaptureFixture
) -> None:
    waits = []

    def start_standby() -> None:
        waits.append(replicated_writer.log.status.wait)
        standby.start()

    standby.stop()
    begun_ms = time.time() * 1000
    with later(4.0, start_standby):
        started = time.monotonic()
        is_certain = replicated_writer.append(b"one")
    assert time.monotonic() - started > 3.9
    assert is_certain or replicated_writer.append(EMPTY_PAYLOAD)
    (wait,) = waits
    assert wait is not None and wait.awaited is Awaited.STANDBY
    assert begun_ms <= wait.since_ms < begun_ms + 4000
    assert replicated_writer.log.status.wait is None
    assert [record.message for record in caplog.records] == [
        "the synchronous standby does not confirm: nothing is confirmed until it does",
        "PostgreSQL is available again",
    ]
    with replicated.connect() as admin:
        assert payloads(admin, "own") == [b"one"]


def test_append_without_the_standby_fails_after_the_patience_and_names_the_standby(
    replicated: PostgresServer, standby: Standby, open_writer: OpenWriter
) -> None:
    writer = open_writer(replicated, "own", is_replicated=True, patience_s=4.0)
    standby.stop()
    with pytest.raises(
        StoreError, match=rf"standby of PostgreSQL at {replicated.folder}:5432 has not confirmed for 4 s"
    ):
        writer.append()


@pytest.mark.alternates("silence of PostgreSQL")
def test_takeover_without_the_standby_names_the_standby_also_at_the_second_attempt(
    replicated: PostgresServer, standby: Standby
) -> None:
    """The session of the first attempt still waits for the standby, under the lock of the takeover."""
    standby.stop()
    for _ in range(2):
        writer = new_writer(replicated, is_replicated=True, patience_s=7.0)
        with pytest.raises(StoreError, match="the synchronous standby of PostgreSQL"):
            writer.take_over()
        writer.log.close()
    standby.start()
    writer = new_writer(replicated, is_replicated=True)
    writer.take_over()
    writer.log.close()


def waiting_sessions(server: PostgresServer) -> list[int]:
    """Return the processes of all sessions that wait for the standby."""
    with server.connect() as admin:
        found = admin.execute("SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' ORDER BY pid")
        return [int(str(process)) for (process,) in found]


def test_takeover_ends_no_session_while_one_waits_for_the_standby(
    replicated_writer: LogWriter, replicated: PostgresServer, standby: Standby, caplog: pytest.LogCaptureFixture
) -> None:
    """C28.4: its row would be there without a confirmation, and two brokers would end each other's sessions."""
    standby.stop()
    with later(0.0, replicated_writer.append):
        wait_until(lambda: waiting_sessions(replicated))
        before = waiting_sessions(replicated)
        taker = new_writer(replicated, is_replicated=True, patience_s=4.0, take_over=True, name="taker")
        with pytest.raises(StoreError, match="the synchronous standby of PostgreSQL"):
            taker.take_over()
        taker.log.close()
        assert waiting_sessions(replicated) == before
        with replicated.connect() as admin:
            assert [epoch for _, epoch, _ in rows_of(admin, "own")] == [0, 1]
        standby.start()
    assert "ended a session that kept a takeover waiting" not in caplog.messages


def append_in_vain(writer: LogWriter) -> None:
    with pytest.raises(StoreError):
        writer.append()


def test_broker_stands_by_on_while_the_active_one_waits_for_the_standby(
    replicated: PostgresServer, standby: Standby, open_writer: OpenWriter, caplog: pytest.LogCaptureFixture
) -> None:
    """C28.4: and its time counts anew after the wait."""
    active = open_writer(replicated, "own", is_replicated=True, name="active", patience_s=4.0, failover_after_s=2.0)
    for _ in range(2):
        # Before its second row it counts as starting, which may take a minute.
        active.append()
    other = new_writer(replicated, is_replicated=True, name="other", failover_after_s=2.0)
    standby.stop()
    end = time.monotonic() + 4
    with later(0.0, partial(append_in_vain, active)):
        while time.monotonic() < end:
            assert other.log.stands_by(other.position)
            other.follow()
    # It hangs, and a session waits on.
    assert waiting_sessions(replicated)
    assert caplog.messages.count("the synchronous standby does not confirm: no broker can take over until it does") == 1
    standby.start()
    started = time.monotonic()
    other.take_over()
    assert 1.5 < time.monotonic() - started < 4
    assert caplog.messages.count("the synchronous standby confirms again") == 1
    other.log.close()


def test_slow_append_is_checked_once_if_each_check_is_slow(
    open_writer: OpenWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_writer()
    checks: list[NewRow] = []
    is_appended = writer.log._appender._is_appended

    def check_slowly(connection: Any, new: NewRow) -> bool:
        checks.append(new)
        time.sleep(0.02)
        return is_appended(connection, new)

    monkeypatch.setattr(writer.log._appender, "_is_appended", check_slowly)
    monkeypatch.setattr(log_appender, "SLOW_S", -1.0)
    assert writer.append(b"one")
    assert len(checks) == 1


def test_append_that_is_found_without_the_standby_does_not_end_the_patience(
    replicated: PostgresServer, standby: Standby, open_writer: OpenWriter, caplog: pytest.LogCaptureFixture
) -> None:
    """C27.7: one patience for the row and the empty ones behind it."""
    writer = open_writer(replicated, "own", is_replicated=True, patience_s=6.0)
    standby.stop()
    started = time.monotonic()
    with later(3.5, lambda: terminate_waiting(replicated)):
        assert not writer.append(b"one")
    assert writer.log.status.wait is not None
    with pytest.raises(StoreError, match=r"the synchronous standby of PostgreSQL .* has not confirmed for 6 seconds"):
        writer.append(EMPTY_PAYLOAD)
    assert time.monotonic() - started < 9
    assert "PostgreSQL is available again" not in caplog.messages


def test_status_of_a_log_shows_since_when_rows_wait_for_the_standby(
    replicated_writer: LogWriter, replicated: PostgresServer, standby: Standby
) -> None:
    replicated_writer.append()
    assert read_status(url_of(replicated), "own").waiting_since_ms is None
    standby.stop()
    began_ms = time.time() * 1000
    with later(0.0, replicated_writer.append):
        wait_until(lambda: read_status(url_of(replicated), "own").waiting_since_ms)
        since_ms = read_status(url_of(replicated), "own").waiting_since_ms
        assert since_ms is not None
        assert began_ms - 100 <= since_ms < began_ms + 1000 <= time.time() * 1000 + 100
        standby.start()


def terminate_waiting(server: PostgresServer) -> None:
    with server.connect() as admin:
        for process in waiting_sessions(server):
            terminate(admin, process)


def test_append_without_names_of_standbys_fails(replicated_writer: LogWriter, replicated: PostgresServer) -> None:
    with replicated.connect() as admin:
        set_globally(admin, "synchronous_standby_names", "")
    time.sleep(0.5)
    with pytest.raises(StoreError, match="synchronous_standby_names"):
        replicated_writer.append()


def test_opening_a_server_that_waits_for_no_standby_fails() -> None:
    with own_server(**DURABLE, wal_level="replica", max_wal_senders="0") as server:
        with server.connect() as admin:
            make_log(admin)
            set_globally(admin, "synchronous_standby_names", "*")
        with pytest.raises(ConfigurationError, match="max_wal_senders"):
            open_log(url_of(server), is_replicated=True)


def test_connection_to_another_server_is_checked_again(open_writer: OpenWriter, log_server: PostgresServer) -> None:
    writer = open_writer()
    with own_server(**(DURABLE | {"fsync": "off"})) as other, log_server.connect() as admin:
        writer.log._database.parameters["host"] = str(other.folder)
        terminate(admin, backend_of(writer))
        with pytest.raises(StoreError, match="fsync = off"):
            writer.append()


def test_takeover_without_names_of_standbys_is_undone(replicated: PostgresServer) -> None:
    writer = new_writer(replicated, is_replicated=True)
    with replicated.connect() as admin:
        rows = rows_of(admin, "own")
        set_globally(admin, "synchronous_standby_names", "")
        time.sleep(0.5)
        with pytest.raises(StoreError, match="synchronous_standby_names"):
            writer.take_over()
        assert rows_of(admin, "own") == rows
    writer.log.close()


def test_append_that_ends_because_the_names_of_standbys_are_removed_fails(
    replicated_writer: LogWriter, replicated: PostgresServer, standby: Standby
) -> None:
    """PostgreSQL ends the wait without a WARNING."""
    standby.stop()

    def remove_names() -> None:
        with replicated.connect() as admin:
            set_globally(admin, "synchronous_standby_names", "")

    with later(1.3, remove_names), pytest.raises(StoreError, match="synchronous_standby_names"):
        replicated_writer.append()


def test_takeover_whose_wait_for_the_standby_is_cancelled_is_repeated(
    replicated: PostgresServer, standby: Standby, open_writer: OpenWriter
) -> None:
    standby.stop()

    def cancel_and_start() -> None:
        wait_until(lambda: cancel_waits(replicated))
        standby.start()

    with later(0.2, cancel_and_start):
        writer = open_writer(replicated, "own", is_replicated=True)
    assert writer.append()
    assert writer.log.status.epoch >= 2


def test_opening_a_replicated_log_without_names_of_standbys_fails(
    log_server: PostgresServer, schema: str, admin: psycopg.Connection[Any]
) -> None:
    rows = rows_of(admin, schema)
    with pytest.raises(ConfigurationError, match="synchronous_standby_names"):
        open_log(url_of(log_server), schema, is_replicated=True)
    assert rows_of(admin, schema) == rows


# ---- Reading ----


def test_relation_of_a_folder_to_the_log(open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str) -> None:
    writer = open_writer()
    first = writer.position
    writer.append()
    log = writer.log
    assert log.relation(first) is Relation.PREFIX
    assert log.relation(writer.position) is Relation.PREFIX
    assert log.relation(LogPosition(first.number, bytes(16))) is Relation.OTHER_WAY
    assert log.relation(LogPosition(writer.position.number + 1, bytes(16))) is Relation.AHEAD
    admin.execute(f"DELETE FROM {schema}.log WHERE number <= 1")
    with pytest.raises(StoreError, match="row 1 is missing or changed"):
        log.relation(first)
    admin.execute(f"UPDATE {schema}.position SET number = 1, digest = %s", (first.digest,))
    assert log.relation(first) is Relation.PREFIX
    assert log.relation(empty_state().position) is Relation.OLD
    admin.execute(f"DELETE FROM {schema}.log")
    with pytest.raises(StoreError, match="no row"):
        log.relation(first)


def test_rows_after_a_position_are_read_in_pieces(open_writer: OpenWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_rows, "PIECE_BYTES", 1000)
    monkeypatch.setattr(log_rows, "PART_BYTES_MAX", 700)
    writer = open_writer()
    position = writer.position
    written = [os.urandom(size) for size in [1, 699, 700, 701, 3000, 0, 5, 1400, 999] * 3]
    for payload in written:
        writer.append(payload)
    pieces = []
    read_piece = log_rows.read_piece

    def read_and_note(*args: Any, **kwargs: Any) -> Any:
        piece = read_piece(*args, **kwargs)
        pieces.append(sum(len(row[4]) for row in piece))
        return piece

    monkeypatch.setattr(log_rows, "read_piece", read_and_note)
    assert list(writer.log.rows_after(position)) == written
    assert max(pieces) <= 1700
    assert list(writer.log.rows_after(writer.position)) == []


def test_rows_after_a_position_are_read_over_lost_connections(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_rows, "PIECE_ROWS", 10)
    writer = open_writer()
    position = writer.position
    written = [b"%d" % number for number in range(30)]
    for payload in written:
        writer.append(payload)
    found = []
    for payload in writer.log.rows_after(position):
        found.append(payload)
        if len(found) % 25 == 0:
            terminate(admin, backend_of(writer))
    assert found == written


@pytest.mark.parametrize(
    "harm",
    [
        "DELETE FROM {}.log WHERE number = 3",
        "DELETE FROM {}.log WHERE number = 2",
        "UPDATE {}.log SET payload = 'x' WHERE number = 3",
        "UPDATE {}.log SET payload = 'x' WHERE number = 4",
        "UPDATE {}.log SET digest = 'x' WHERE number = 4",
        "UPDATE {}.log SET part = 1 WHERE number = 3",
    ],
)
def test_rows_with_a_gap_or_a_changed_row_are_rejected(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str, harm: str
) -> None:
    writer = open_writer()
    position = writer.position
    for _ in range(3):
        writer.append()
    admin.execute(harm.format(schema).encode())
    with pytest.raises(StoreError, match=r"is damaged: row \d( \(part \d\))? is missing or changed"):
        list(writer.log.rows_after(position))


def test_rows_that_the_database_forgets_while_they_are_read_are_no_damage(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby that is promoted lacks rows, which the former primary has named as the last ones (C28.12)."""
    monkeypatch.setattr(log_rows, "PIECE_ROWS", 2)
    writer = open_writer()
    position = writer.position
    for number in range(6):
        writer.append(b"%d" % number)
    rows = writer.log.rows_after(position)
    found = [next(rows), next(rows)]
    admin.execute(f"DELETE FROM {schema}.log WHERE number > %s", (position.number + 2,))
    assert found + list(rows) == [b"0", b"1"]


def test_rows_that_are_put_back_while_they_are_read_are_no_damage(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_writer()
    position = writer.position
    for number in range(3):
        writer.append(b"%d" % number)
    read_piece = log_rows.read_piece
    has_failed = False

    def read_before_the_repair(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_failed
        if has_failed:
            return read_piece(*args, **kwargs)
        has_failed = True
        writer.append(b"3")
        return []

    monkeypatch.setattr(log_rows, "read_piece", read_before_the_repair)
    assert list(writer.log.rows_after(position)) == [b"0", b"1", b"2", b"3"]


def test_rows_that_another_broker_has_compacted_meanwhile_are_no_damage(
    open_writer: OpenWriter, log_server: PostgresServer, admin: psycopg.Connection[Any], schema: str
) -> None:
    first = open_writer()
    second = open_log(url_of(log_server), schema, take_over=True)
    assert second.relation(empty_state().position) is Relation.PREFIX
    first.append(EMPTY_PAYLOAD)
    compact(admin, schema, first.position.number)
    admin.execute(f"DELETE FROM {schema}.log WHERE number < %s", (first.position.number,))
    with pytest.raises(StoreBehindError, match="the rows from 1 on, which this broker's folder lacks, are compacted"):
        list(second.rows_after(empty_state().position))
    second.close()


def test_snapshot_of_a_log_is_that_of_its_position(open_writer: OpenWriter) -> None:
    writer = open_writer()
    writer.append()
    with writer.log.snapshot() as snapshot:
        assert snapshot.position == empty_state().position
        assert snapshot.recovered.identity == writer.log.identity == empty_state().recovered.identity
        assert list(snapshot.messages()) == []
    assert writer.log.next_history == (1, 1)


# ---- Background ----


def background_of(writer: LogWriter) -> Background:
    return writer.log._background


def test_background_marks_the_active_broker_again_after_a_lost_connection(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    writer = open_writer()
    writer.log.start()
    connection = background_of(writer)._connection
    assert connection is not None
    terminate(admin, connection.info.backend_pid)
    wait_until(lambda: takeover.describe_active_broker(admin, schema))  # type: ignore[arg-type]
    assert writer.append()


def test_broker_that_takes_over_is_marked_at_once(open_writer: OpenWriter) -> None:
    """The session that it ends may keep the mark for a moment."""
    open_writer()
    for _ in range(5):
        assert background_of(open_writer(take_over=True))._has_hint


def test_broker_that_takes_over_waits_for_its_background_only_shortly(
    open_writer: OpenWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until that ends, no row comes."""
    silences: list[float] = []

    def measure(background: Background) -> None:
        assert background._connection is not None
        silences.append(background._connection.silence_s)

    monkeypatch.setattr(Background, "_measure", measure)
    connection = background_of(open_writer())._connection
    assert connection is not None
    assert silences == [log_standby.TAKEOVER_SILENCE_S]
    assert connection.silence_s > log_standby.TAKEOVER_SILENCE_S


def test_background_of_an_idle_broker_notices_that_the_database_is_gone(
    own_log_server: PostgresServer, open_writer: OpenWriter
) -> None:
    with own_log_server.connect() as admin:
        make_log(admin, schema="own")
    writer = open_writer(own_log_server, "own")
    writer.log.start()
    own_log_server.stop()
    wait_until(lambda: writer.log.status.wait)
    own_log_server.start()
    wait_until(lambda: writer.log.status.wait is None)


def test_background_of_a_fenced_broker_ends_and_fails_its_next_append(open_writer: OpenWriter) -> None:
    first = open_writer()
    first.log.start()
    second = open_writer(take_over=True)
    second.log.start()
    wait_until(lambda: bool(first.log.failure))
    assert isinstance(first.log.failure, StoreFencedError)
    wait_until(lambda: background_of(second)._has_hint)
    with pytest.raises(StoreFencedError):
        first.append()
    assert second.append()


def test_background_ends_the_session_of_a_fenced_broker_that_does_nothing(open_writer: OpenWriter) -> None:
    open_writer()
    second = open_writer(take_over=True)
    second.log.start()
    wait_until(lambda: background_of(second)._has_hint)


def test_background_that_finds_damage_fails_the_next_append(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    writer = open_writer()
    admin.execute(f"DELETE FROM {schema}.position")
    writer.log.start()
    wait_until(lambda: background_of(writer).failure)
    with pytest.raises(StoreError, match="position"):
        writer.append()


def test_background_forgets_members_that_have_not_written_for_a_day(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    """C28.2: but not one with rows that the log has lost."""
    writer = open_writer()
    for name, number, hours in (("old", 0, 25), ("late", 0, 23), ("ahead", 1 << 20, 25)):
        admin.execute(
            f"INSERT INTO {schema}.member (name, host, place, role, epoch, number, users, at)"
            f" VALUES ('{name}', 'h', '', 'standing by', 1, {number}, '', now() - interval '{hours} hours')"
        )
    writer.log.start()
    wait_until(lambda: writer.log.status.members)
    assert [each.name for each in writer.log.status.members if each.age_ms > 3_600_000] == ["ahead", "late"]


@pytest.mark.parametrize("is_started", [True, False])
def test_broker_says_what_to_do_once_the_table_is_gone(
    is_started: bool, open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    writer = open_writer()
    admin.execute(f"DROP TABLE {schema}.log")
    if is_started:
        writer.log.start()
        wait_until(lambda: background_of(writer).failure)
    with pytest.raises(
        StoreError, match=r"does not exist: restore the schema from a backup, or .* `truenext store init"
    ):
        writer.append()


def test_background_that_fails_in_an_unknown_way_fails_the_next_append(
    open_writer: OpenWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Compactor, "step", mock.Mock(side_effect=ValueError("a fault")))
    writer = open_writer()
    writer.log.start()
    wait_until(lambda: background_of(writer).failure)
    with pytest.raises(StoreError, match="ValueError"):
        writer.append()


def test_disk_level_follows_the_limit_of_the_database(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    writer = open_writer(database_limit=2_000_000)
    assert writer.log.disk_level is DiskLevel.PLENTY
    writer.append(os.urandom(2_000_000))
    writer.log.start()
    wait_until(lambda: writer.log.disk_level is DiskLevel.NONE)
    sizes = writer.log.disk_level_bytes
    assert sizes["database_limit"] == 2_000_000
    assert sizes["database_used"] > 2_000_000


def test_background_compacts_rows_and_drops_their_partitions_if_the_disk_is_short(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    writer = open_writer(database_limit=100_000)
    for _ in range(PARTITION_ROWS):
        writer.append(EMPTY_PAYLOAD)
    writer.log.start()
    wait_until(lambda: writer.log.status.position == writer.position.number)
    wait_until(lambda: admin.execute("SELECT to_regclass(%s)", (f"{schema}.log_0",)).fetchone() == (None,))
    assert writer.append(EMPTY_PAYLOAD)


def test_background_does_all_else_if_the_database_has_no_space_for_members(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    writer = open_writer()
    background = background_of(writer)
    background._disconnect()
    refuse_members(admin, schema)
    writer.log.start()
    # Then compaction goes on, too.
    wait_until(lambda: background._checked_at > 0)
    assert background._has_hint and not background._is_lost


def test_closing_a_log_does_not_wait_for_a_silent_server(open_writer: OpenWriter) -> None:
    writer = open_writer()
    writer.log.start()
    connection = background_of(writer)._connection
    assert connection is not None
    with stopped(connection.info.backend_pid):
        time.sleep(1.2)
        started = time.monotonic()
        writer.log.close()
        assert time.monotonic() - started < 2


def test_digest_of_rows_is_a_chain(open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str) -> None:
    writer = open_writer()
    writer.append(b"one")
    digest = bytes(16)
    for number, _, payload in rows_of(admin, schema)[1:]:
        digest = next_digest(digest, [payload])
        assert admin.execute(f"SELECT digest FROM {schema}.log WHERE number = {number}").fetchone() == (digest,)
