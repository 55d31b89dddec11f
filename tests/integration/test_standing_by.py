"""Tests of brokers that stand by, on a log in memory and in PostgreSQL."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.contract.fake_log import FakeLog, LogRows
from tests.contract.naive_history import read_folder, read_parquet
from tests.contract.postgresql.log_writer import DURABLE, rows_of, url_of
from tests.contract.postgresql.test_log import Standby, set_globally
from tests.contract.test_history import chunks_of_run
from tests.integration.broker_process import PATIENCE_SECONDS, TRUENEXT, dying_with_us
from tests.integration.forked import completed_text
from tests.integration.log_broker import LogBroker, make_schema
from tests.integration.test_grants import PASSWORD, UserText
from tests.stages.postgres import PostgresServer, own_server
from truenext.broker.config import Configuration, with_files
from truenext.broker.reload import Reloader
from truenext.broker.settings import BrokerSettings
from truenext.cli import serve
from truenext.cli.broker_health import BrokerProcess
from truenext.cli.service_manager import ServiceManager
from truenext.errors import StoreBehindError
from truenext.history.export import EVENTS_FOLDER
from truenext.model.batch import Batch
from truenext.store.changes import encode_batch


class Opened:
    """Logs that a broker opens, one after the other, with the looks of each."""

    def __init__(self, rows: LogRows, *looks: list[Callable[[], bool]]) -> None:
        self.logs: list[FakeLog] = []
        self._rows = rows
        self._looks: Iterator[list[Callable[[], bool]]] = iter(looks)

    def __call__(self, *_: Any, **__: Any) -> FakeLog:
        log = FakeLog(self._rows)
        log.looks = next(self._looks)
        self.logs.append(log)
        return log


@pytest.fixture
def configuration(tmp_path: Path) -> Configuration:
    users = tmp_path / "users.toml"
    users.write_text("")
    settings = BrokerSettings(
        data=tmp_path / "data", store="postgresql://h/d", schema="s", database_limit=1 << 30, users=users, member="b"
    )
    return Configuration(broker=settings)


def open_and_recover(configuration: Configuration, resources: ExitStack) -> Any:
    manager, process = ServiceManager(), BrokerProcess()
    member = serve._member_settings(configuration, manager, process)
    return serve._open_and_recover(
        configuration, member, resources, take_over=False, reloader=None, manager=manager, process=process
    )


def too_far_behind() -> Any:
    raise StoreBehindError("row 7 is no longer there")


def test_broker_that_stands_by_too_far_behind_opens_its_store_anew(
    configuration: Configuration, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = Opened(LogRows(), [lambda: True, too_far_behind], [lambda: True])
    monkeypatch.setattr(serve, "open_log", opened)
    with ExitStack() as resources:
        store, _, recovered = open_and_recover(configuration, resources)
        assert [log.is_closed for log in opened.logs] == [True, False]
        assert store.log is opened.logs[1]
        assert recovered.identity == opened.logs[1].identity
    assert [log.is_closed for log in opened.logs] == [True, True]
    assert "the data folder is too far behind, and is made anew" in caplog.text


def test_history_of_followed_rows_can_be_read_before_the_takeover(
    configuration: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = LogRows()
    files: list[list[str]] = []

    def other_broker_appends() -> bool:
        if not rows.rows:
            batch = Batch(1)
            (batch.history,) = chunks_of_run(run=1, first_event=1, sizes=[10])
            rows.add(b"".join(encode_batch(batch, None)), 1)
        else:
            files.append([file.name for file in (configuration.broker.data or Path()).glob("history/*.history")])
        return len(files) == 0

    monkeypatch.setattr(serve, "open_log", Opened(rows, [other_broker_appends] * 2))
    with ExitStack() as resources:
        open_and_recover(configuration, resources)
    assert files == [["0000000000000001.history"]]


def test_member_has_a_digest_of_the_users_file_as_it_was_read(
    configuration: Configuration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "users.toml"
    read = []
    for name in "aab":
        file.write_text(f"[user.{name}]\ncertificates = ['DNS:{name}.example']\n")
        read.append(with_files(configuration))
    file.unlink()
    digests = [serve._member_settings(each, ServiceManager(), BrokerProcess()).users for each in read]
    assert digests[0] == digests[1] != digests[2]
    member = serve._member_settings(read[0], ServiceManager(), BrokerProcess())
    monkeypatch.setattr(serve, "logs", mock.Mock())
    serve._apply_settings(member, read[2])
    assert member.users == digests[2]


def test_reload_while_standing_by_is_applied_to_the_broker_that_takes_over(
    configuration: Configuration,
) -> None:
    read = [replace(configuration), replace(configuration)]
    applied: list[tuple[str, int]] = []

    def applier(name: str) -> Callable[[Configuration], None]:
        return lambda now: applied.append((name, [each is now for each in read].index(True)))

    reloader = Reloader(configuration, iter(read).__next__, apply=applier("standby"))
    reloader.also_apply(applier("unchanged"))
    assert applied == []
    reloader.reload()
    reloader.also_apply(applier("broker"))
    assert applied == [("standby", 0), ("unchanged", 0), ("broker", 0)]
    applied.clear()
    reloader.reload()
    assert applied == [("standby", 1), ("unchanged", 1), ("broker", 1)]


# ---- Processes ----


class CommandBroker(LogBroker):
    """Broker that is started by the command, which handles signals from its first line on."""

    def _started(self, command: list[str]) -> Any:
        with self._out.open("wb") as out, self._log.open("wb") as log:
            return subprocess.Popen(
                dying_with_us([TRUENEXT, *command]), stdin=subprocess.DEVNULL, stdout=out, stderr=log
            )


@contextmanager
def two_brokers(
    server: PostgresServer,
    folder: Path,
    schema: str,
    make: type[LogBroker] = LogBroker,
    *,
    options: Sequence[str] = (),
) -> Iterator[tuple[LogBroker, LogBroker]]:
    """Yield an active broker, and one with these options that stands by."""
    make_schema(server, schema)
    first = make(folder / "first", server, schema, ["--member", "first"])
    second = make(folder / "second", server, schema, ["--member", "second", *options])
    brokers = (first, second)
    try:
        first.start()
        second.begin_start()
        await_member(first, "second")
        yield first, second
    finally:
        for broker in brokers:
            broker.clean_up()


def await_member(broker: LogBroker, name: str) -> None:
    """Wait until a broker sees that another one stands by, and has all rows but those of the last seconds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    number = broker.status()["log"]["number"]
    while not any(
        each["name"] == name and each["role"] == "standing by" and each["number"] >= number
        for each in broker.status()["log"]["members"]
    ):
        assert time.monotonic() < deadline, f"{name} does not stand by"
        time.sleep(0.05)


def history_of(broker: LogBroker) -> list[dict[str, Any]]:
    """Return the events in the files of a broker, which turns them into Parquet meanwhile."""
    folder = broker.data / "history"
    events = [*read_folder(folder), *read_parquet(folder / EVENTS_FOLDER)]
    return [event for _, event in sorted({event["event"]: event for event in events}.items())]


def test_broker_that_stands_by_ends_with_status_0_by_a_signal(postgres: PostgresServer, tmp_path: Path) -> None:
    # C28.1
    with two_brokers(postgres, tmp_path, "signalled", CommandBroker) as (first, second):
        second.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert second.is_running
        second.stop()
        assert first.is_running
        shown = completed_text("store", "status", url_of(postgres), "--schema", "signalled").stdout
        (line,) = [each for each in shown.splitlines() if "second on" in each]
        assert ": stopped, row " in line


def test_broker_that_stands_by_with_another_users_file_warns_of_it_once(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    users = UserText()
    users.add("shop", ["send >"])
    users.write(tmp_path / "users.toml")
    options = ["--users", str(tmp_path / "users.toml")]
    with two_brokers(postgres, tmp_path, "guarded", options=options) as (_, second):
        time.sleep(2.2)
        assert second.log.count("the active broker has another users file") == 1


def test_broker_that_stands_by_reloads_its_files_on_sighup(postgres: PostgresServer, tmp_path: Path) -> None:
    # C27.12
    users = UserText()
    users.add("shop", ["send >"])
    users.write(tmp_path / "users.toml")
    options = ["--users", str(tmp_path / "users.toml"), "--log-level", "info"]
    with two_brokers(postgres, tmp_path, "reloaded", CommandBroker, options=options) as (first, second):
        users.add("till", ["send >"])
        users.write(tmp_path / "users.toml")
        second.send_signal(signal.SIGHUP)
        await_text(second, "user till: added")
        (tmp_path / "users.toml").write_text("wrong")
        second.send_signal(signal.SIGHUP)
        await_text(second, "configuration not reloaded")
        first.kill()
        second.await_start()
        assert second.log.count("configuration reloaded") == 1
        # Of the file as it was when it was reloaded.
        second.connect(headers={"login": "till", "passcode": PASSWORD}).disconnect()


def await_text(broker: LogBroker, text: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while text not in broker.log:
        assert broker.is_running and time.monotonic() < deadline, broker.log
        time.sleep(0.05)


@pytest.mark.alternates("silence of PostgreSQL")
def test_brokers_without_the_synchronous_standby_end_after_their_patience_and_never_fence_each_other(
    tmp_path: Path,
) -> None:
    # C27.7, C28.4
    with own_server(**DURABLE, wal_level="replica", max_wal_senders="5") as server, ExitStack() as resources:
        receiver = Standby(server, server.folder / "received")
        (server.folder / "received").mkdir(mode=0o777)
        (server.folder / "received").chmod(0o777)
        make_schema(server, "waiting")
        with server.connect() as admin:
            set_globally(admin, "synchronous_standby_names", "pg_receivewal")
        receiver.start()
        resources.callback(receiver.stop)
        brokers = [
            LogBroker(
                tmp_path / name,
                server,
                "waiting",
                ["--member", name],
                patience_ms=5000,
                failover_after_ms=2000,
                durability="replicated",
            )
            for name in ("first", "second")
        ]
        for each in brokers:
            resources.callback(each.clean_up)
        first, second = brokers
        first.start()
        second.begin_start()
        await_member(first, "second")
        receiver.stop()
        for each in brokers:
            assert each.wait_for_end() == 1
            assert "the synchronous standby of PostgreSQL" in each.log
            assert "available again" not in each.log and "ended a session" not in each.log
        shown = completed_text("store", "status", url_of(server), "--schema", "waiting").stdout
        assert "standby  of PostgreSQL has not confirmed since" in shown
        receiver.start()
        second.start()
        with server.connect() as admin:
            assert {epoch for _, epoch, _ in rows_of(admin, "waiting")} == {0, 1, 2}


def test_failover_hands_over_and_back(postgres: PostgresServer, tmp_path: Path) -> None:
    # C28.7
    with two_brokers(postgres, tmp_path, "handed") as (active, heir):
        client = active.connect()
        for number in range(20):
            client.send("q", b"%d" % number, persistent=number % 2 == 0, confirmed=True)
        for turn in range(2):
            done = active.truenext("failover")
            assert done.returncode == 0, done.stderr
            heir.await_start()
            assert active.wait_for_end() == 3
            active.begin_start()
            await_member(heir, ("first", "second")[turn])
            active, heir = heir, active
        assert [each.body for each in active.remaining_messages("q")] == [b"%d" % number for number in range(20)]
        one, other = (history_of(broker) for broker in (active, heir))
        known = min(len(one), len(other))
        assert one[:known] == other[:known]
        assert [event["epoch"] for event in one if event["kind"] == "run-started"] == [1, 2, 3]
        numbers = [event["event"] for event in one]
        assert numbers == [*range(1, len(numbers) + 1)], "a planned takeover leaves no gap"
