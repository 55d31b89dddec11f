"""Tests of `truenext backup` and `truenext restore` with a real broker: chapter 29 of docs/contract.md."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.integration.backup_broker import BackupBroker
from tests.integration.forked import Forked, completed_text
from tests.integration.raw_client import UnexpectedError
from truenext.cli.backup import POLL_S, backup

SLOW = ("--rate", "1MiB")


@pytest.fixture
def make_broker(tmp_path: Path) -> Iterator[Callable[..., BackupBroker]]:
    brokers: list[BackupBroker] = []

    def make(settings: str = 'backup_dir = "backups"', options: tuple[str, ...] = ()) -> BackupBroker:
        brokers.append(BackupBroker(tmp_path, options, settings))
        brokers[-1].start()
        return brokers[-1]

    yield make
    for broker in brokers:
        broker.clean_up()


def fill(broker: BackupBroker, size: int) -> None:
    """Store messages of `size` bytes together."""
    client = broker.connect()
    for _ in range(0, size, 100_000):
        client.send("q", bytes(100_000), persistent=True)
    client.send("q", b"last", persistent=True, confirmed=True)
    client.disconnect()


def await_state(broker: BackupBroker, state: str) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while (report := broker.request_backup(action="show"))["state"] != state:
        assert time.monotonic() < deadline, report
        time.sleep(0.01)
    return report


def test_restored_broker_has_what_the_original_had_and_another_identity(
    make_broker: Callable[..., BackupBroker], tmp_path: Path
) -> None:
    # C29.1, C29.2, C29.4, C29.8
    broker = make_broker()
    client = broker.connect()
    client.send("q", b"one", persistent=True)
    client.send("q", b"gone with a crash")
    client.send("q", b"two", persistent=True, priority=9, confirmed=True)
    done = broker.truenext("backup", "--history")
    folder = done.stdout.removesuffix("\n")
    figures = re.fullmatch(r"[\d,]+ bytes, the state after batch (\d+)\n", done.stderr)
    assert figures is not None, done.stderr
    batch = figures[1]
    client.send("q", b"later", persistent=True, confirmed=True)
    assert Path(folder).parent == broker.backups
    new = tmp_path / "new"
    restored = completed_text("restore", folder, str(new))
    assert restored.returncode == 0, restored.stderr
    of = r"of \d{4}-.*Z\. Its identity is "
    assert re.search(rf"new has the state after batch {batch}, {of}", restored.stdout)
    assert restored.stdout.endswith(f"`truenext serve --data {new}` starts a broker with it.\n")
    # Beside the original.
    (tmp_path / "other").mkdir()
    other = BackupBroker(tmp_path / "other")
    other.data = new
    try:
        other.start()
        assert [message.body for message in other.remaining_messages("q")] == [b"two", b"one"]
        stores = [
            each.connect(headers={"truenext-client": "2"}).connected.headers["truenext-store"]
            for each in (broker, other)
        ]
        assert stores[0] != stores[1]
        assert (new / "history").is_dir()
        other.check_log()
    finally:
        other.clean_up()
    assert [message.body for message in broker.remaining_messages("q")][:2] == [b"two", b"one"]
    again = completed_text("restore", folder, str(new))
    assert (again.returncode, again.stderr) == (2, f"truenext: {new} is not empty: name a new folder\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_restore_by_root_names_the_owner_of_the_backup(
    make_broker: Callable[..., BackupBroker], tmp_path: Path
) -> None:
    folder = make_broker().output_of("backup").removesuffix("\n")
    new = tmp_path / "new"
    assert completed_text("restore", folder, str(new)).stderr == ""
    os.chown(folder, 2**31 - 2, 0)
    done = completed_text("restore", folder, str(tmp_path / "other"))
    owner = 2**31 - 2
    assert done.stderr == (
        f"note: {tmp_path / 'other'} belongs to root, and the backup to {owner}: if the broker runs as {owner}, "
        f"`chown -R {owner} {tmp_path / 'other'}`\n"
    )


def test_restore_names_the_users_file_if_there_were_users(
    make_broker: Callable[..., BackupBroker], tmp_path: Path
) -> None:
    # C29.4
    (tmp_path / "password").write_text("secret")
    (tmp_path / "password").chmod(0o600)
    (tmp_path / "users.toml").write_text('[user.root]\npassword_file = "password"\nadmin = true\n')
    (tmp_path / "users.toml").chmod(0o600)
    broker = make_broker(options=("--users", str(tmp_path / "users.toml")))
    done = broker.output_of("backup", "--user", "root", "--password-file", str(tmp_path / "password"))
    folder = done.removesuffix("\n")
    restored = completed_text("restore", folder, str(tmp_path / "new"))
    assert "The broker had users: name a copy of its users file" in restored.stdout
    assert f"`truenext serve --data {tmp_path / 'new'} --users FILE`" in restored.stdout
    assert not any("secret" in path.read_text(errors="replace") for path in Path(folder).rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("settings", "options", "error"),
    [
        ("", (), "this broker has no folder for backups: set backup_dir in [broker]"),
        ('backup_dir = "nowhere"', (), "/nowhere is not there: make this folder"),
        ('backup_dir = "data/backups"', (), "is inside the data folder"),
        ('backup_dir = "open"', (), "other users of this machine can write to backup_dir"),
        ('backup_dir = "others"', (), "belongs to another user, who could change backups"),
    ],
    ids=["none", "missing", "inside", "open", "others"],
)
def test_backup_without_a_good_folder_is_refused(
    make_broker: Callable[..., BackupBroker], tmp_path: Path, settings: str, options: tuple[str, ...], error: str
) -> None:
    # C29.9
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "others").mkdir(0o700)
    if "others" in settings:
        if os.geteuid():
            pytest.skip("only root can give a folder away")
        os.chown(tmp_path / "others", 1, 1)
    broker = make_broker(settings, options)
    (broker.data / "backups").mkdir()
    done = broker.truenext("backup")
    assert done.returncode == 1
    assert error in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(broker.backups.iterdir()) + list((tmp_path / "open").iterdir())


def test_one_backup_runs_at_a_time_and_can_be_stopped(make_broker: Callable[..., BackupBroker]) -> None:
    # C29.1, C29.9
    broker = make_broker()
    done = broker.truenext("backup", "--stop")
    assert (done.returncode, done.stderr) == (1, "truenext: no backup runs, so there is none to stop\n")
    fill(broker, 4_000_000)
    first = broker.request_backup(rate=1 << 20)
    assert first["state"] == "running"
    second = broker.truenext("backup")
    assert second.returncode == 1
    assert "a backup runs already: wait until it has ended, or stop it" in second.stderr
    assert broker.output_of("backup", "--stop") == "The backup was stopped.\n"
    assert not list(broker.backups.iterdir())
    assert broker.request_backup(action="show")["state"] == "stopped"
    broker.output_of("backup")


def test_stop_of_the_broker_stops_its_backup(make_broker: Callable[..., BackupBroker]) -> None:
    # C29.3
    broker = make_broker()
    fill(broker, 4_000_000)
    command = Forked(
        ["backup", *SLOW, "--url", broker.url], stdout=broker.data.parent / "out", stderr=broker.data.parent / "err"
    )
    await_state(broker, "running")
    started = time.monotonic()
    broker.stop()
    assert time.monotonic() - started < 5
    assert command.wait(30) == 1
    assert (broker.data.parent / "err").read_text().startswith("truenext: no backup was made yet: ")
    assert not list(broker.backups.iterdir())


def test_command_names_what_a_killed_broker_may_have_left(make_broker: Callable[..., BackupBroker]) -> None:
    broker = make_broker()
    fill(broker, 4_000_000)
    err = broker.data.parent / "err"
    command = Forked(["backup", *SLOW, "--url", broker.url], stdout=broker.data.parent / "out", stderr=err)
    await_state(broker, "running")
    while not (cut := list(broker.backups.iterdir())):
        time.sleep(0.01)
    # The command has asked by then.
    time.sleep(3 * POLL_S)
    broker.kill()
    assert command.wait(30) == 1
    assert "if the broker still runs, its backup goes on, and if it was killed, delete " in err.read_text()
    assert str(cut[0]) in err.read_text()


def test_start_warns_of_a_folder_in_which_no_backup_can_be_made(make_broker: Callable[..., BackupBroker]) -> None:
    log = make_broker('backup_dir = "nowhere"').log
    assert "WARNING no backup can be made" in log
    assert "/nowhere is not there: make this folder" in log


def test_start_with_a_good_folder_for_backups_warns_of_nothing(make_broker: Callable[..., BackupBroker]) -> None:
    assert "no backup can be made" not in make_broker().log


def test_polls_of_a_backup_are_not_logged_and_its_end_is(make_broker: Callable[..., BackupBroker]) -> None:
    broker = make_broker(options=("--log-level", "info"))
    fill(broker, 1_500_000)
    broker.output_of("backup", *SLOW)
    assert broker.log.count("control request") == 1
    assert "WARNING backup made" in broker.log


def test_interrupted_command_stops_its_backup(make_broker: Callable[..., BackupBroker]) -> None:
    broker = make_broker()
    fill(broker, 4_000_000)
    err = broker.data.parent / "err"
    command = Forked(["backup", *SLOW, "--url", broker.url], stdout=broker.data.parent / "out", stderr=err)
    await_state(broker, "running")
    command.send_signal(signal.SIGINT)
    assert command.wait(30) == 130
    assert err.read_text() == "truenext: the backup was stopped, and its folder removed\n"
    assert not list(broker.backups.iterdir())


class InterruptedConnection:
    """Connection to a broker that has begun a backup, but has not answered yet when Ctrl-C comes."""

    state = "none"

    def control_request(self, verb: str, request: dict[str, Any]) -> bytes:
        if request.get("action") == "stop":
            self.state = "stopped"
        elif "rate" in request:
            self.state = "running"
            signal.raise_signal(signal.SIGINT)
        return json.dumps({"state": self.state, "folder": "", "copied": 0, "total": 0}).encode()


def test_command_that_is_interrupted_before_the_answer_stops_its_backup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed: the backup went on."""
    connection = InterruptedConnection()
    monkeypatch.setattr("truenext.cli.backup.connected", lambda _: nullcontext(connection))
    done = CliRunner().invoke(backup, ["--url", "stomp://127.0.0.1:1"])
    assert (done.exit_code, connection.state) == (130, "stopped")
    assert done.stderr == "truenext: the backup was stopped, and its folder removed\n"


def test_next_backup_names_those_that_were_cut_short(make_broker: Callable[..., BackupBroker], tmp_path: Path) -> None:
    # C29.3
    broker = make_broker()
    fill(broker, 4_000_000)
    broker.request_backup(rate=1 << 20)
    await_state(broker, "running")
    while not (cut := list(broker.backups.iterdir())):
        time.sleep(0.01)
    broker.kill()
    broker.start()
    # As a broker leaves it that is killed before it has made a file, and folders that are not a broker's.
    empty = broker.backups / "20991130T000000Z-00ff"
    for path in (empty, broker.backups / "mine"):
        path.mkdir()
    (broker.backups / "mine" / "manifest-new").touch()
    lines = broker.truenext("backup").stderr.splitlines()
    assert lines[:-1] == [
        f"note: {each} is no backup: it was cut short, and can be deleted" for each in (cut[0].name, empty.name)
    ]
    refused = completed_text("restore", str(cut[0]), str(tmp_path / "new"))
    assert refused.returncode == 2
    assert "it was cut short, and has no manifest" in refused.stderr
    assert not (tmp_path / "new").exists()


def test_broker_with_messages_in_memory_makes_no_backup(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    from tests.integration.broker_process import BrokerProcess

    class InMemory(BrokerProcess):
        def _started(self, command: list[str]) -> Forked:
            kept = [*command[:1], "--memory", *command[3:]]
            return Forked(kept, stdout=self._out, stderr=self._log)

    broker = InMemory(tmp_path / "memory")
    try:
        broker.start()
        done = broker.truenext("backup")
        assert (done.returncode, done.stderr) == (1, "truenext: a broker with --memory has nothing to back up\n")
    finally:
        broker.clean_up()


@pytest.mark.parametrize("body", [{"rate": 1000}, {"rate": "fast"}, {"path": "/tmp/x"}, {"action": "go"}])
def test_invalid_request_is_refused(make_broker: Callable[..., BackupBroker], body: dict[str, Any]) -> None:
    broker = make_broker()
    with pytest.raises((UnexpectedError, AssertionError, EOFError)):
        broker.request_backup(**body)
    assert not list(broker.backups.iterdir())
