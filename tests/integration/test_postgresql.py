"""Tests of a broker whose messages are in PostgreSQL, as its operator sees it: commands, texts and exit statuses."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import psycopg
import pytest

from tests.contract.postgresql.log_writer import DURABLE, make_log, url_of
from tests.integration.broker_process import QUIET_SECONDS, BrokerProcess
from tests.integration.forked import Forked, completed_text
from tests.integration.log_broker import delete_folder, make_schema
from tests.integration.raw_client import TRUENEXT_CLIENT, bodies
from tests.stages.postgres import BINARIES, PostgresServer, own_server
from truenext.broker import write_time
from truenext.cli.main import main
from truenext.history.files import chunks_of_file, count_events, history_files
from truenext.store.postgresql.compaction import Compactor

SECRET = "s3cret"

NewBroker = Callable[..., BrokerProcess]


@pytest.fixture
def new_broker(postgres: PostgresServer, schema: str, tmp_path: Path) -> Iterator[NewBroker]:
    """Function that prepares a broker of the schema, with a folder and a member name of its own. It gets further
    options of `serve`."""
    brokers: list[BrokerProcess] = []

    def make(*options: str) -> BrokerProcess:
        folder = tmp_path / f"broker {len(brokers)}"
        folder.mkdir()
        name = f"broker-{len(brokers)}"
        broker = BrokerProcess(folder, serve_options(url_of(postgres), schema, "--member", name, *options))
        brokers.append(broker)
        return broker

    yield make
    for broker in brokers:
        broker.clean_up()


def serve_options(url: str, schema: str, *options: str) -> list[str]:
    in_postgresql = ["--store", url, "--schema", schema, "--database-limit", "2GiB"]
    return [*in_postgresql, *([] if "--durability" in options else ["--durability", "local"]), *options]


def serve(broker: BrokerProcess, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `truenext serve` as this broker, which must fail."""
    return completed_text("serve", "--data", broker.data, "--listen", "stomp://127.0.0.1:0", *broker.options, *options)


def send(broker: BrokerProcess, *numbers: int) -> None:
    client = broker.connect(headers=TRUENEXT_CLIENT)
    for number in numbers:
        client.send("orders", b"%d" % number, priority=number % 10, persistent=True, confirmed=True)
    client.disconnect()


def received(broker: BrokerProcess, count: int) -> list[str]:
    client = broker.connect()
    client.subscribe("orders", prefetch=count)
    found = bodies(client.messages(count))
    client.disconnect()
    return found


def store_name(broker: BrokerProcess) -> str:
    client = broker.connect(headers=TRUENEXT_CLIENT)
    client.disconnect()
    return client.connected.headers["truenext-store"]


# ---- Folders ----


@pytest.mark.parametrize("is_clean", [True, False], ids=["stopped", "killed"])
def test_broker_without_its_folder_delivers_the_same_messages(new_broker: NewBroker, is_clean: bool) -> None:
    """C27.2, C27.3, C27.10"""
    first = new_broker()
    first.start()
    send(first, *range(100))
    name = store_name(first)
    first.stop() if is_clean else first.kill()
    used = history_end(first)
    delete_folder(first.data)

    first.start()
    assert store_name(first) == name
    assert received(first, 100) == [f"{n + 10 * tens}" for n in range(9, -1, -1) for tens in range(10)]
    first.stop()
    run, event = history_start(first)
    assert run >= used[0] and event >= used[1]


def history_end(broker: BrokerProcess) -> tuple[int, int]:
    """Return the lowest run and the lowest event that the files of the history have not used."""
    *_, last = chunks_of_file(history_files(broker.data / "history")[-1])
    return last.run + 1, last.first_event + count_events(last)


def history_start(broker: BrokerProcess) -> tuple[int, int]:
    """Return the last run in the files of the history, and its first event."""
    first, *_ = chunks_of_file(history_files(broker.data / "history")[-1])
    return first.run, first.first_event


def test_folder_of_a_broker_is_no_folder_of_a_broker_without_the_log(new_broker: NewBroker) -> None:
    """C27.10: `store detach` makes it one, with an identity of its own."""
    broker = new_broker()
    broker.start()
    send(broker, 1, 2)
    name = store_name(broker)
    assert completed_text("store", "detach", broker.data).returncode == 2
    broker.stop()
    broker.options = ()
    refused = serve(broker)
    assert refused.returncode == 2
    assert "`truenext store detach" in refused.stderr

    done = completed_text("store", "detach", broker.data)
    assert (done.returncode, done.stderr) == (0, "")
    assert "DROP SCHEMA NAME CASCADE" in done.stdout
    identity = re.search("with the identity ([0-9a-f]{8}): ", done.stdout)
    assert identity is not None
    broker.start()
    assert store_name(broker) == identity[1] != name
    assert received(broker, 2) == ["2", "1"]
    broker.stop()
    again = completed_text("store", "detach", broker.data)
    assert again.returncode == 2 and again.stderr.startswith("truenext: ")
    assert completed_text("store", "check", broker.data).returncode == 0


# ---- Two brokers ----


def test_second_broker_stands_by_until_the_first_one_stops(new_broker: NewBroker) -> None:
    """C27.5, C28.1, C28.4"""
    first, second = new_broker(), new_broker()
    first.start()
    second.begin_start()
    time.sleep(QUIET_SECONDS)
    assert second.is_running and not second.is_listening
    send(first, 1)
    first.stop()
    second.await_start()
    assert received(second, 1) == ["1"]


def test_broker_that_was_taken_over_exits_with_status_3_and_confirms_nothing(new_broker: NewBroker) -> None:
    """C27.4"""
    first, second = new_broker(), new_broker("--take-over")
    first.start()
    send(first, 1)
    client = first.connect()
    with first.asleep():
        second.start()
        send(second, 2)
        client.send_frame("SEND", {"destination": "/queue/orders", "persistent": "true", "receipt": "r"}, b"3")
    assert first.wait_for_end() == 3
    with pytest.raises(EOFError):
        client.next_frame()
    line = first.log.splitlines()[-1]
    assert line.startswith("truenext: another broker has taken over")
    assert received(second, 2) == ["2", "1"]
    assert second.status()["log"]["epoch"] == 2
    second.stop()


def test_broker_that_was_taken_over_exits_without_a_write(new_broker: NewBroker) -> None:
    first, second = new_broker(), new_broker("--take-over")
    first.start()
    second.start()
    # Its consumers would wait for ever otherwise.
    assert first.wait_for_end() == 3
    second.stop()


@pytest.mark.parametrize("is_running", [True, False], ids=["running", "killed"])
def test_rows_that_the_database_has_lost_are_put_back(
    new_broker: NewBroker, postgres: PostgresServer, schema: str, is_running: bool
) -> None:
    """C28.12"""
    broker = new_broker()
    broker.start()
    send(broker, 1, 2, 3)
    if not is_running:
        broker.kill()
    with postgres.connect() as connection:
        connection.execute(f"DELETE FROM {schema}.log WHERE number > (SELECT max(number) - 2 FROM {schema}.log)")
    if not is_running:
        broker.start()
    send(broker, 4)
    assert "rows that the database had forgotten were put back" in broker.log
    assert received(broker, 4) == ["4", "3", "2", "1"]
    broker.stop()
    check = completed_text("store", "check", url_of(postgres), "--schema", schema)
    assert check.returncode == 0, check.stdout


@pytest.mark.alternates("silence of PostgreSQL")
def test_broker_serves_its_clients_while_postgresql_is_silent(own_postgres: PostgresServer, tmp_path: Path) -> None:
    """C27.7: no write to the log is quick, however quick the writes before were."""
    make_schema(own_postgres, "main")
    broker = HastyBroker(tmp_path, serve_options(url_of(own_postgres), "main"))
    broker.start()
    try:
        send(broker, *range(100))
        client = broker.connect()
        with frozen(own_postgres):
            client.send_frame("SEND", {"destination": "/queue/q", "persistent": "true", "receipt": "r"}, b"")
            assert broker.queues()["orders"].waiting == 100
            with pytest.raises(TimeoutError):
                client.next_frame(0.5)
            assert broker.status()["log"]["epoch"] == 1
        client.await_receipt("r")
        client.disconnect()
        broker.stop()
    finally:
        broker.clean_up()


def test_status_says_since_when_a_broker_waits_for_postgresql(own_postgres: PostgresServer, tmp_path: Path) -> None:
    """C27.7: until the broker is silent."""
    make_schema(own_postgres, "main")
    broker = BrokerProcess(tmp_path, serve_options(url_of(own_postgres), "main"))
    broker.start()
    try:
        own_postgres.stop()
        while broker.status()["log"]["awaited"] is None:
            time.sleep(0.1)
        line = rf"\n +on {own_postgres.folder}:5432; waiting for PostgreSQL since 20.* UTC, nothing "
        assert re.search(line, broker.output_of("status"))
        own_postgres.start()
        send(broker, 1)
        while "waiting for" in broker.output_of("status"):
            time.sleep(0.1)
        broker.stop()
    finally:
        broker.clean_up()


class HastyBroker(BrokerProcess):
    """Broker for which a write is quick unless it took a minute."""

    def _started(self, command: list[str]) -> Forked:
        return Forked(command, stdout=self._out, stderr=self._log, run=serve_hastily)


def serve_hastily(command: Sequence[str]) -> None:
    with (
        mock.patch.object(write_time, "INLINE_SMALL_WRITE_SECONDS_MAX", 60),
        mock.patch.object(write_time, "INLINE_WRITE_SECONDS_MAX", 60),
    ):
        main(command)


@contextmanager
def frozen(server: PostgresServer) -> Iterator[None]:
    """Suspend all processes of the server for the duration of the block."""
    with server.connect() as connection:
        backends = connection.execute("SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()").fetchall()
    processes = [server.pid, *(int(str(number)) for (number,) in backends)]
    try:
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        yield
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)


# ---- Durability ----


def test_broker_does_not_start_without_the_standby_that_its_durability_needs(new_broker: NewBroker) -> None:
    """C27.6"""
    refused = serve(new_broker("--durability", "replicated"))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith('truenext: durability = "replicated" needs a synchronous standby')
    assert "--durability local" in refused.stderr


def test_log_and_status_name_a_durability_that_is_local(new_broker: NewBroker) -> None:
    """C27.6"""
    broker = new_broker()
    broker.start()
    send(broker, 1)
    assert "messages are confirmed by one database alone" in broker.log
    log = broker.status()["log"]
    assert (log["epoch"], log["replicated"]) == (1, False)
    assert log["number"] > log["position"] >= 0
    sizes = broker.status()["disk_bytes"]
    assert sizes["database_limit"] == 2 << 30
    assert 0 < sizes["database_used"] < 1 << 20 < sizes["free"]
    printed = broker.output_of("status")
    # Rows come each half second, and each may take space.
    assert re.search(r"\nlog        epoch 1, row \d+, compacted up to row \d+; not replicated: ", printed)
    assert re.search(r"; [\d,]+ of 2,147,483,648 bytes used in the database; ", printed)
    broker.stop()


def test_broker_with_a_standby_says_that_messages_are_replicated(tmp_path: Path) -> None:
    """C27.6: the standby receives the write-ahead log only."""
    with own_server(**DURABLE) as server, standby_of(server):
        make_schema(server, "main")
        broker = BrokerProcess(tmp_path, serve_options(url_of(server), "main", "--durability", "replicated"))
        broker.start()
        try:
            send(broker, 1)
            assert "one database alone" not in broker.log
            assert broker.status()["log"]["replicated"] is True
            assert "; replicated\n" in broker.output_of("status")
            broker.stop()
        finally:
            broker.clean_up()


@contextmanager
def standby_of(server: PostgresServer) -> Iterator[None]:
    """Run a synchronous standby of the server."""
    folder = server.folder / "received"
    folder.mkdir()
    command = ["pg_receivewal", "--synchronous", "--host", str(server.folder), "--username", "postgres"]
    process = subprocess.Popen([BINARIES / command[0], *command[1:], "--directory", folder], stderr=subprocess.DEVNULL)
    try:
        with server.connect() as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'")
            connection.execute("SELECT pg_reload_conf()")
            connection.execute("SET synchronous_commit = local")
            while not connection.execute("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'quorum'").fetchone():
                assert process.poll() is None
                time.sleep(0.01)
            yield
    finally:
        process.kill()
        process.wait()


# ---- Space and users ----


class FullDatabaseBroker(BrokerProcess):
    """Broker whose database has no space, as it believes."""

    def _started(self, command: list[str]) -> Forked:
        return Forked(command, stdout=self._out, stderr=self._log, run=serve_full_database)


def serve_full_database(command: Sequence[str]) -> None:
    with mock.patch.object(Compactor, "used_bytes", return_value=2 << 30):
        main(command)


def test_broker_without_space_in_its_database_refuses_sends(
    postgres: PostgresServer, schema: str, tmp_path: Path
) -> None:
    """C27.11: the disk of the folder has space."""
    broker = FullDatabaseBroker(tmp_path, serve_options(url_of(postgres), schema, "--when-full", "refuse"))
    broker.start()
    try:
        status = broker.status()
        assert status["disk_level"] == "none"
        assert status["disk_bytes"]["free"] > 2 * status["disk_bytes"]["needed"]
        assert "database_used_bytes=2147483648" in broker.log
        client = broker.connect()
        client.send_frame("SEND", {"destination": "/queue/orders", "persistent": "true"}, b"1")
        assert "--disk-limit or --database-limit is reached" in client.error().headers["message"]
        broker.stop()
    finally:
        broker.clean_up()


def test_each_broker_of_a_log_has_its_own_users(new_broker: NewBroker, tmp_path: Path) -> None:
    """C27.12"""
    users = tmp_path / "users.toml"
    first, second = new_broker(), new_broker("--users", str(users))
    first.start()
    send(first, 1)
    first.stop()
    password = completed_text("user", "add", "shop", "--users", users, "--take", "orders", "--generate").stdout.strip()
    second.start()
    anonymous = second.connect(sends_connect=False)
    anonymous.send_frame("CONNECT", {"accept-version": "1.2", "host": "test"})
    assert anonymous.next_frame().command == "ERROR"
    client = second.connect(headers={"login": "shop", "passcode": password})
    client.subscribe("orders")
    assert client.message().body == b"1"
    client.disconnect()
    second.stop()


# ---- Commands ----


def test_init_of_a_schema_with_a_log_changes_nothing(postgres: PostgresServer, schema: str) -> None:
    done = completed_text("store", "init", url_of(postgres), "--schema", schema)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"truenext: schema '{schema}' has a log already: ") and done.stderr.count("\n") == 1


def test_init_from_a_folder_in_use_changes_nothing(postgres: PostgresServer, own_broker: BrokerProcess) -> None:
    done = completed_text("store", "init", url_of(postgres), "--schema", "unused", "--from", own_broker.data)
    assert (done.returncode, done.stdout) == (2, "")
    assert str(own_broker.data) in done.stderr and done.stderr.count("\n") == 1
    with postgres.connect() as connection:
        assert connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = 'unused'").fetchone() is None


def test_check_of_a_log_names_a_changed_row_and_exits_with_status_1(
    new_broker: NewBroker, postgres: PostgresServer, schema: str
) -> None:
    broker = new_broker()
    broker.start()
    send(broker, 1, 2)
    command = ("store", "check", url_of(postgres), "--schema", schema)
    undamaged = completed_text(*command)
    assert undamaged.returncode == 0
    assert re.search(r"^ orders +2 +0 ", undamaged.stdout, re.MULTILINE)
    assert undamaged.stdout.endswith(f"{url_of(postgres)}, schema {schema} has no damage.\n")
    broker.stop()
    with postgres.connect() as connection:
        connection.execute(f"UPDATE {schema}.log SET payload = payload || 'x' WHERE number = 4")
    damaged = completed_text(*command)
    assert damaged.returncode == 1
    assert re.search(r"^damaged: .*row 4\b", damaged.stdout, re.MULTILINE)
    assert f"{url_of(postgres)}, schema {schema} is damaged: " in damaged.stdout


# ---- Bad input ----


@pytest.mark.parametrize("is_right", [True, False], ids=["right", "wrong"])
def test_password_of_a_passfile_is_in_no_text(
    is_right: bool, postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = "with_right_password" if is_right else "with_wrong_password"
    with postgres.connect() as connection, login_required(postgres, role):
        connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{SECRET if is_right else 'another'}'")
        connection.execute(f"GRANT CREATE ON DATABASE postgres TO {role}")
        connection.execute(f"SET ROLE {role}")
        make_log(connection, schema=role)
        passfile = tmp_path / "pgpass"
        passfile.touch(mode=0o600)
        passfile.write_text(f"*:*:*:{role}:{SECRET}\n")
        monkeypatch.setenv("PGPASSFILE", str(passfile))
        url = f"postgresql://{role}@/postgres?host={postgres.folder}"
        broker = BrokerProcess(tmp_path, serve_options(url, role, "--log-level", "debug"))
        if not is_right:
            done = serve(broker)
            assert done.returncode == 2 and "the password is wrong" in done.stderr.splitlines()[-1]
            assert SECRET not in done.stdout + done.stderr
            return
        broker.start()
        try:
            send(broker, 1)
            assert SECRET not in Path(f"/proc/{broker.pid}/cmdline").read_text()
            with postgres.connect() as other:
                other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", (role,))
            send(broker, 2)
            assert SECRET not in broker.output_of("status")
            broker.stop()
            assert SECRET not in broker.log
        finally:
            broker.clean_up()


@contextmanager
def login_required(server: PostgresServer, role: str) -> Iterator[None]:
    """Let a role log in with its password only."""
    file = server.folder / "data" / "pg_hba.conf"
    before = file.read_text()
    file.write_text(f"local all {role} scram-sha-256\n{before}")
    with server.connect() as connection:
        connection.execute("SELECT pg_reload_conf()")
    while "no password supplied" not in error_of_login(server, role):
        time.sleep(0.01)
    yield
    file.write_text(before)


def error_of_login(server: PostgresServer, role: str) -> str:
    """Return the error of a login without a password."""
    try:
        psycopg.connect(host=str(server.folder), user=role, dbname="postgres").close()
    except psycopg.OperationalError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("command", ["serve", "check"])
def test_command_on_a_schema_without_log_says_what_to_do(
    command: str, postgres: PostgresServer, tmp_path: Path
) -> None:
    url = url_of(postgres)
    if command == "serve":
        done = completed_text(
            "serve", "--data", tmp_path / "data", "--listen", "stomp://127.0.0.1:0", *serve_options(url, "nowhere")
        )
    else:
        done = completed_text("store", "check", url, "--schema", "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    advice = {
        "serve": "run `truenext store init URL --schema nowhere`, or name another schema",
        # A new log would have nothing to check.
        "check": "name the database and the schema of a broker (its --store and --schema)",
    }
    assert done.stderr.splitlines()[-1] == f"truenext: the database has no schema 'nowhere': {advice[command]}"


@pytest.mark.parametrize("place", ["/nowhere?host=/nowhere", "127.0.0.1:1/truenext"])
def test_broker_without_a_database_fails_in_one_sentence(place: str, tmp_path: Path) -> None:
    done = completed_text(
        "serve",
        "--data",
        tmp_path / "data",
        "--listen",
        "stomp://127.0.0.1:0",
        *serve_options(f"postgresql://{place}", "main"),
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith("truenext: cannot connect to PostgreSQL at ")
    assert "Traceback" not in done.stderr
