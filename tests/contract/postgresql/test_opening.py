"""Tests of connections to a log: bad input, sessions, and texts without a password."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.contract.postgresql.log_writer import LogWriter, make_log, open_log, rows_of, url_of
from tests.contract.postgresql.rows import empty_state
from tests.stages.pooler import Pooler
from tests.stages.postgres import USER, PostgresServer
from truenext.errors import ConfigurationError, StoreError
from truenext.store.postgresql import connection as connection_module
from truenext.store.postgresql.connection import CONNECT_TIMEOUT_S, Connection, application_name, parse_url
from truenext.store.postgresql.initialization import initialize
from truenext.store.postgresql.kept import HISTORY
from truenext.store.postgresql.takeover import lock_hint

SECRET = "s3cret"


def check_refused(url: str, schema: str, error: type[Exception], match: str) -> None:
    """Check that the log cannot be opened, and that the error is one line."""
    with pytest.raises(error, match=match) as found:
        open_log(url, schema)
    assert "\n" not in str(found.value)


# ---- URLs ----


@pytest.mark.parametrize(
    ("url", "match"),
    [
        (f"postgresql://user:{SECRET}@host/shop", "must have no password"),
        (f"postgresql://host/shop?password={SECRET}", "must have no password"),
        (f"postgresql://host/shop?sslpassword={SECRET}", "must have no password"),
        (f"postgresql://user:{SECRET}@[::1/shop", "must have no password"),
        (f"postgresql://[::1{SECRET}/shop", "must have a number as port"),
        (f"postgresql://host/shop?{SECRET}=1", "cannot be read"),
        (f"mysql://user:{SECRET}@host/shop", "must begin with postgresql://"),
        (f"host=localhost password={SECRET}", "must begin with postgresql://"),
    ],
)
def test_url_with_a_fault_is_refused_without_its_text(url: str, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match) as found:
        open_log(url, "main")
    text = "".join(traceback.format_exception(found.value))
    # The line of the test's own source is in the traceback, not its value.
    assert SECRET not in text


def test_url_with_several_hosts_takes_the_one_that_can_be_written_to() -> None:
    assert parse_url("postgresql://a,b/shop")["target_session_attrs"] == "read-write"
    assert "target_session_attrs" not in parse_url("postgresql://a/shop")
    assert parse_url("postgresql://a,b/shop?target_session_attrs=any")["target_session_attrs"] == "any"


def test_application_name_fits_into_the_limit_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "höst" * 40)
    name = application_name()
    assert len(name) == 63
    assert name.startswith("truenext h?st")
    assert name.endswith(f" {os.getpid()}")


def test_password_is_in_no_text_of_a_failure(
    log_server: PostgresServer,
    schema: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    passfile = tmp_path / "passfile"
    passfile.write_text(f"*:*:*:*:{SECRET}\n")
    passfile.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(passfile))
    monkeypatch.setenv("PGPASSWORD", SECRET)
    with caplog.at_level(logging.DEBUG), pytest.raises(ConfigurationError) as found:
        open_log(url_of(log_server, "missing"), schema)
    assert SECRET not in "".join(traceback.format_exception(found.value))
    assert SECRET not in caplog.text


# ---- Servers ----


def test_opening_a_server_that_does_not_listen_fails(tmp_path: Path) -> None:
    check_refused(f"postgresql://postgres@/shop?host={tmp_path}", "main", StoreError, "cannot connect to PostgreSQL at")


def test_opening_a_silent_server_fails_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"postgresql://postgres@127.0.0.1:{listener.getsockname()[1]}/shop?connect_timeout=2"
        started = time.monotonic()
        check_refused(url, "main", StoreError, "timeout")
        assert 1.9 < time.monotonic() - started < 4
    assert CONNECT_TIMEOUT_S == 10


def test_opening_a_stopped_server_fails_in_time(own_log_server: PostgresServer) -> None:
    """A Unix socket accepts connections although the server is stopped."""
    os.kill(own_log_server.pid, signal.SIGSTOP)
    try:
        check_refused(url_of(own_log_server, connect_timeout=2), "main", StoreError, "timeout")
    finally:
        os.kill(own_log_server.pid, signal.SIGCONT)


def test_opening_an_old_server_fails(log_server: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "VERSION_MIN", 99)
    check_refused(url_of(log_server), schema, ConfigurationError, r"is version \d+: truenext needs version 99")


def test_opening_a_read_only_server_fails(log_server: PostgresServer, schema: str) -> None:
    url = url_of(log_server, options="-c%20default_transaction_read_only%3Don")
    check_refused(url, schema, ConfigurationError, "read-only")


def test_opening_a_server_without_fsync_fails(postgres: PostgresServer) -> None:
    check_refused(url_of(postgres), "main", ConfigurationError, "fsync = off")


def test_opening_over_a_pooler_in_transaction_mode_fails(
    log_server: PostgresServer, schema: str, admin: psycopg.Connection[Any]
) -> None:
    with Pooler(log_server.folder, "postgres", 1) as pooler:
        url = f"postgresql://postgres@127.0.0.1:{pooler.port}/postgres"
        check_refused(url, schema, ConfigurationError, "pooler")


def test_initialization_over_a_pooler_leaves_no_mark_of_an_active_broker(log_server: PostgresServer) -> None:
    with Pooler(log_server.folder, "postgres", 1) as pooler:
        url = f"postgresql://postgres@127.0.0.1:{pooler.port}/postgres"
        with pytest.raises(ConfigurationError, match="pooler"):
            initialize(url, "pooled", None, lambda *_: None)
        with log_server.connect() as admin:
            assert lock_hint(admin, "pooled")  # type: ignore[arg-type]


def test_lowest_history_is_that_of_the_last_compaction_not_of_the_opening(
    log_server: PostgresServer, schema: str, admin: psycopg.Connection[Any]
) -> None:
    """Until it is taken over, another broker may go on, and compact its rows."""
    log = open_log(url_of(log_server), schema)
    try:
        assert log.next_history == (1, 1)
        admin.execute(f"UPDATE {schema}.fact SET value = %s WHERE kind = 'history'", (HISTORY.pack(7, 300),))
        assert log.next_history == (7, 300)
    finally:
        log.close()


# ---- Schemas and rights ----


def test_opening_a_missing_schema_fails(log_server: PostgresServer) -> None:
    check_refused(url_of(log_server), "missing", ConfigurationError, "no schema 'missing'")


def test_opening_a_schema_with_an_impossible_name_fails(log_server: PostgresServer) -> None:
    check_refused(url_of(log_server), 'a"b', ConfigurationError, "cannot be the schema of a log")


def test_opening_a_newer_layout_fails(log_server: PostgresServer, schema: str, admin: psycopg.Connection[Any]) -> None:
    admin.execute(f"UPDATE {schema}.fact SET value = '\\x00000003' WHERE kind = 'layout'")
    check_refused(url_of(log_server), schema, ConfigurationError, "layout 3; this truenext reads layout 2")


@pytest.fixture
def role(admin: psycopg.Connection[Any], schema: str) -> Iterator[str]:
    """A role without rights."""
    name = f"role_of_{schema}"
    admin.execute(f"CREATE ROLE {name} LOGIN")
    yield name
    admin.execute(f"REASSIGN OWNED BY {name} TO postgres; DROP OWNED BY {name}; DROP ROLE {name}")


def test_opening_without_rights_names_them(log_server: PostgresServer, schema: str, role: str) -> None:
    url = url_of(log_server).replace("postgres@", f"{role}@")
    check_refused(url, schema, ConfigurationError, rf"the role '{role}' lacks rights .*USAGE on schema '{schema}'")


def own_tables(admin: psycopg.Connection[Any], schema: str, role: str) -> None:
    """Let `role` own the schema and its tables, as if it had made them."""
    admin.execute(f"ALTER SCHEMA {schema} OWNER TO {role}")
    tables = admin.execute(
        "SELECT relname FROM pg_class WHERE relnamespace = %s::regnamespace AND relkind IN ('r', 'p')", (schema,)
    )
    for (table,) in tables.fetchall():
        admin.execute(f"ALTER TABLE {schema}.{table} OWNER TO {role}")


def test_role_with_rights_in_its_schema_alone_can_serve(
    log_server: PostgresServer, schema: str, role: str, admin: psycopg.Connection[Any]
) -> None:
    own_tables(admin, schema, role)
    writer = LogWriter(open_log(url_of(log_server).replace("postgres@", f"{role}@"), schema), empty_state().position)
    writer.take_over()
    writer.log.start()
    assert writer.append()
    time.sleep(0.5)
    assert writer.append()
    writer.log.close()


def test_takeover_names_a_session_that_the_role_may_not_end(
    log_server: PostgresServer, schema: str, role: str, admin: psycopg.Connection[Any]
) -> None:
    own_tables(admin, schema, role)
    writer = LogWriter(open_log(url_of(log_server).replace("postgres@", f"{role}@"), schema), empty_state().position)
    with log_server.connect() as blocking:
        blocking.execute("SET application_name = 'nightly job'")
        blocking.execute("BEGIN")
        blocking.execute(f"LOCK TABLE {schema}.log IN ROW EXCLUSIVE MODE")
        with pytest.raises(StoreError, match=r"the session \d+ \(nightly job\) .* pg_signal_backend"):
            writer.take_over()
        blocking.execute("ROLLBACK")
    writer.log.close()
    assert len(rows_of(admin, schema)) == 1


# ---- Sessions ----


def setting(connection: Connection, name: str) -> object:
    row = connection.execute("SELECT current_setting(%s)", (name,)).fetchone()
    assert row is not None
    return row[0]


@pytest.mark.parametrize(
    ("configured", "used"),
    [("off", "on"), ("local", "on"), ("remote_write", "on"), ("on", "on"), ("remote_apply", "remote_apply")],
)
def test_session_never_lowers_synchronous_commit(log_server: PostgresServer, configured: str, used: str) -> None:
    url = url_of(log_server, options=f"-c%20synchronous_commit%3D{configured}")
    with Connection.open(parse_url(url)) as connection:
        assert setting(connection, "synchronous_commit") == used


def test_session_depends_on_no_default_of_the_role(log_server: PostgresServer) -> None:
    defaults = (
        "-c%20default_transaction_isolation%3Dserializable%20-c%20statement_timeout%3D900%20-c%20lock_timeout%3D900"
    )
    with Connection.open(parse_url(url_of(log_server, options=defaults))) as connection:
        assert setting(connection, "default_transaction_isolation") == "read committed"
        assert setting(connection, "statement_timeout") == "0"
        assert setting(connection, "lock_timeout") == "0"
        assert setting(connection, "application_name") == application_name()
        assert setting(connection, "search_path") == "pg_catalog"


def test_session_gets_warnings_whatever_the_role_says(log_server: PostgresServer) -> None:
    url = url_of(log_server, options="-c%20client_min_messages%3Derror")
    with Connection.open(parse_url(url)) as connection:
        connection.execute("DO $$ BEGIN RAISE WARNING 'canceling wait for synchronous replication'; END $$")
        assert connection.has_warned


def test_opening_a_database_without_an_encoding_finds_the_log(log_server: PostgresServer) -> None:
    with log_server.connect() as admin:
        admin.execute("CREATE DATABASE ascii ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    try:
        initialize(url_of(log_server, "ascii"), "main", None, lambda *_: None)
        log = open_log(url_of(log_server, "ascii"), "main")
        assert len(log.identity) == 8
        log.close()
    finally:
        with log_server.connect() as admin:
            admin.execute("DROP DATABASE ascii WITH (FORCE)")


def test_session_to_a_silent_server_is_lost(log_server: PostgresServer) -> None:
    with Connection.open(parse_url(url_of(log_server))) as connection:
        connection.silence_s = 0.5
        started = time.monotonic()
        with pytest.raises(connection_module.SilentServerError):
            connection.execute("SELECT pg_sleep(3)")
        assert time.monotonic() - started < 1


def test_session_to_a_slow_server_that_sends_is_not_lost(log_server: PostgresServer) -> None:
    with Connection.open(parse_url(url_of(log_server))) as connection:
        connection.silence_s = 0.5
        rows = connection.execute("SELECT repeat('x', 100000), pg_sleep(0.1) FROM generate_series(1, 15)").fetchall()
        assert len(rows) == 15


# ---- A real pooler ----

PGBOUNCER = shutil.which("pgbouncer")


@pytest.mark.skipif(PGBOUNCER is None, reason="PgBouncer is not installed")
@pytest.mark.parametrize("mode", ["session", "transaction"])
def test_opening_over_pgbouncer_fails(own_log_server: PostgresServer, tmp_path: Path, mode: str) -> None:
    with own_log_server.connect() as admin:
        make_log(admin)
    with pgbouncer(own_log_server, mode) as port:
        check_refused(f"postgresql://postgres@127.0.0.1:{port}/postgres", "main", ConfigurationError, "pooler")


@contextmanager
def pgbouncer(server: PostgresServer, mode: str) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = server.folder
    (folder / "users").write_text('"postgres" ""\n')
    (folder / "pgbouncer.ini").write_text(
        f"[databases]\n* = host={folder}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n"
        f"auth_type = trust\nauth_file = {folder / 'users'}\npool_mode = {mode}\nunix_socket_dir =\n"
        "ignore_startup_parameters = extra_float_digits\n"
    )
    process = subprocess.Popen(
        [str(PGBOUNCER), str(folder / "pgbouncer.ini")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        user=USER,
    )
    try:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait()
