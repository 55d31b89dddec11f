"""Tests that a real broker does what its configuration file says, at its start and after a reload."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, TRUENEXT, BrokerProcess, dying_with_us
from tests.integration.forked import completed_text
from tests.integration.raw_client import RawClient
from truenext.history.export import EVENTS_FOLDER
from truenext.history.exporter import HistoryExporter
from truenext.version import VERSION

MIB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "truenext.toml"
    path.write_text("[policy]\nattempts_max = 3\n")
    return path


@pytest.fixture
def options(file: Path) -> Sequence[str]:
    return ("--config", str(file), "--log-level", "info")


def truenext(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return completed_text(*arguments)


def reload(broker: BrokerProcess) -> subprocess.CompletedProcess[str]:
    return truenext("reload", "--url", f"stomp://127.0.0.1:{broker.port}")


def hang_up_on(broker: BrokerProcess, log_text: str) -> None:
    """Send SIGHUP, and wait until the log has `log_text` once more."""
    before = broker.log.count(log_text)
    broker.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while broker.log.count(log_text) == before:
        assert time.monotonic() < deadline, f"{log_text!r} is not in the log:\n{broker.log}"
        time.sleep(0.01)


@contextmanager
def running(broker: BrokerProcess) -> Iterator[BrokerProcess]:
    try:
        broker.start()
        yield broker
        broker.close_clients()
        broker.stop()
    finally:
        broker.clean_up()


def fail(client: RawClient, times: int) -> None:
    for _ in range(times):
        client.nack(client.message(), confirmed=True)


def tries(broker: BrokerProcess, queue: str) -> int:
    """Return the number of failures after which a new message of the queue is dead-lettered."""
    client = broker.connect()
    client.send(queue, b"", persistent=True, confirmed=True)
    client.subscribe(queue)
    before = broker.queues().get(f"DLQ.{queue}")
    for count in range(1, 20):
        fail(client, 1)
        if broker.queues().get(f"DLQ.{queue}") != before:
            client.disconnect()
            return count
    raise AssertionError("it is never dead-lettered")


# ---- At the start ----


def test_a_broker_starts_with_a_file_alone(tmp_path: Path, file: Path) -> None:
    """The data folder is relative to the file, wherever the broker is started."""
    file.write_text('[broker]\ndata = "kept/here"\nlisten = ["stomp://127.0.0.1:0"]\nlog_level = "info"\n')
    (tmp_path / "kept").mkdir()
    (tmp_path / "elsewhere").mkdir()
    with subprocess.Popen(
        dying_with_us([TRUENEXT, "serve", "--config", str(file)]),
        cwd=tmp_path / "elsewhere",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        first_line = process.stdout.readline()
        process.terminate()
        more, log = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert re.fullmatch(r"listening on stomp://127\.0\.0\.1:\d+\n", first_line + more)
    assert (tmp_path / "kept/here/journal").is_dir()
    # Without pyarrow a second line says that nothing is exported.
    (line,) = (line for line in log.splitlines() if "configuration" in line)
    assert line.endswith(f"INFO configuration read file='{file}'")


def test_an_option_goes_before_the_file_and_the_file_before_the_default(tmp_path: Path, file: Path) -> None:
    file.write_text('[broker]\nmemory_limit = "200MiB"\n[policy]\nattempts_max = 2\n')
    limits: list[tuple[int, int]] = []
    for options in ([], ["--config", str(file)], ["--config", str(file), "--memory-limit", "400MiB"]):
        folder = tmp_path / str(len(limits))
        folder.mkdir()
        with running(BrokerProcess(folder, options)) as broker:
            limits.append((broker.status()["memory"]["limit"] // MIB, tries(broker, "q")))
    assert limits == [(64, 7), (50, 2), (100, 2)]


def test_a_queue_has_the_policy_of_its_pattern(own_broker: BrokerProcess, file: Path) -> None:
    file.write_text('[policy]\nattempts_max = 3\n[policy."orders.>"]\nattempts_max = 1\n')
    assert reload(own_broker).returncode == 0
    assert [tries(own_broker, queue) for queue in ("orders.new", "orders")] == [1, 3]


def test_a_faulty_file_is_refused_before_anything_is_made(tmp_path: Path, file: Path) -> None:
    file.write_text('[policy]\npage_size = 0\n[policy."a..b"]\n[broker]\ndata = "data"\nlisten = ["http://a"]\n')
    ended = truenext("serve", "--config", file)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"truenext: {file}: [policy] page_size must be 1 to 100,000 messages, not 0\n"
        f'{file}: [policy."a..b"] is not a pattern of queue names: it has an empty word\n'
        f"{file}: [broker] listen has an address that cannot be listened on: 'http://a' is not the address of a broker"
        ": it must be stomp://HOST:PORT or openwire://HOST:PORT, or with TLS stomp+ssl://HOST:PORT or "
        "openwire+ssl://HOST:PORT\n"
    )
    assert not (tmp_path / "data").exists()


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    ended = truenext("serve", "--memory", "--config", tmp_path / "nothing")
    assert ended.returncode == 2
    assert "nothing' does not exist" in ended.stderr


# ---- Reload ----


def test_sighup_changes_how_often_a_message_of_a_live_queue_may_fail(own_broker: BrokerProcess, file: Path) -> None:
    client = own_broker.connect()
    client.send("q", b"", persistent=True, confirmed=True)
    client.subscribe("q")
    fail(client, 1)
    file.write_text("[policy]\nattempts_max = 2\n")
    hang_up_on(own_broker, "configuration reloaded")
    fail(client, 1)
    own_broker.await_facts("DLQ.q", waiting=1)
    own_broker.await_facts("q", waiting=0, unacknowledged=0)


def test_messages_that_failed_too_often_by_a_new_policy_are_dead_lettered_at_once(
    own_broker: BrokerProcess, file: Path
) -> None:
    client = own_broker.connect()
    client.send("q", b"", persistent=True, confirmed=True)
    client.subscribe("q")
    fail(client, 2)
    client.message()
    client.unsubscribe()
    own_broker.await_facts("q", waiting=1)
    file.write_text("[policy]\nattempts_max = 2\n")
    assert reload(own_broker).returncode == 0
    own_broker.await_facts("DLQ.q", waiting=1)


def test_a_smaller_limit_makes_a_waiting_queue_leave_memory(own_broker: BrokerProcess, file: Path) -> None:
    client = own_broker.connect()
    for number in range(50):
        client.send("q", b"%d" % number + bytes(1000), persistent=True, confirmed=number == 49)
    assert own_broker.status()["in_memory"] == 50
    file.write_text('[policy.q]\nmemory_limit = "20KB"\n')
    assert reload(own_broker).returncode == 0
    deadline = time.monotonic() + PATIENCE_SECONDS
    while own_broker.status()["in_memory"] > 20:
        assert time.monotonic() < deadline
    client.subscribe("q")
    assert [int(message.body.split(b"\0")[0]) for message in client.messages(50)] == list(range(50))


def test_reload_reports_the_changes(own_broker: BrokerProcess, file: Path) -> None:
    file.write_text(
        '[broker]\nhistory_days_max = 3\n[policy]\nattempts_max = 5\n[policy."a.*"]\nmemory_limit = "1MiB"\n'
    )
    ended = reload(own_broker)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == (
        "[broker] history_days_max: 30 -> 3\n"
        "[policy] attempts_max: 3 -> 5\n"
        '[policy."a.*"] attempts_max: 3 -> 5\n'
        '[policy."a.*"] memory_limit: "none" -> "1MiB"\n'
        f"{file} is in force.\n"
    )
    assert reload(own_broker).stdout == f"{file} is in force, and changes nothing.\n"


def test_reload_of_settings_that_need_a_restart_is_refused_and_changes_nothing(
    own_broker: BrokerProcess, file: Path
) -> None:
    file.write_text(
        '[broker]\nmemory_limit = "512MiB"\nlog_level = "debug"\nhistory = false\nschema = "main"\n'
        "[policy]\nattempts_max = 1\n"
    )
    ended = reload(own_broker)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        "truenext: nothing was changed:\n"
        'broker.schema cannot change from nothing to "main" while the broker runs: the messages stay where they are '
        "stored; restart the broker\n"
        'broker.memory_limit cannot change from "256MiB" to "512MiB" while the broker runs: this setting is fixed '
        "when the broker starts; restart the broker\n"
        "broker.history cannot change from true to false while the broker runs: a run of the broker has a "
        "complete history or none; restart the broker\n"
    )
    assert tries(own_broker, "q") == 3
    # The last reload was refused: the next one is compared with what is in force.
    file.write_text("[policy]\nattempts_max = 1\n")
    assert reload(own_broker).stdout.startswith("[policy] attempts_max: 3 -> 1\n")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("[policy]\nattempts_max = 1\npage_size = 0\n", "[policy] page_size must be"),
        ("[policy", "Expected"),
        (None, ""),
    ],
)
def test_a_file_that_became_bad_is_refused_and_the_log_says_why(
    own_broker: BrokerProcess, file: Path, content: str | None, fault: str
) -> None:
    file.unlink() if content is None else file.write_text(content)
    hang_up_on(own_broker, "configuration not reloaded")
    (line,) = (line for line in own_broker.log.splitlines() if "not reloaded" in line)
    assert "WARNING" in line
    assert (f"cannot read {file}" if content is None else f"{file}: {fault}") in line
    assert tries(own_broker, "q") == 3


def test_reload_of_a_file_that_became_a_fifo_is_refused_and_the_broker_goes_on(
    own_broker: BrokerProcess, file: Path
) -> None:
    file.unlink()
    os.mkfifo(file)
    reason = f"cannot read {file}: it is a FIFO, not a regular file: copy its content to one"
    hang_up_on(own_broker, "configuration not reloaded")
    assert reason in own_broker.log
    ended = reload(own_broker)
    assert (ended.returncode, ended.stderr) == (1, f"truenext: nothing was changed:\n{reason}\n")
    assert tries(own_broker, "q") == 3
    own_broker.close_clients()
    own_broker.stop()


@pytest.mark.parametrize("command", [("config", "check"), ("serve", "--memory", "--config")], ids=["check", "serve"])
def test_command_that_is_given_a_fifo_as_configuration_refuses_it(tmp_path: Path, command: tuple[str, ...]) -> None:
    fifo = tmp_path / "truenext.toml"
    os.mkfifo(fifo)
    ended = truenext(*command, fifo)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"truenext: cannot read {fifo}: it is a FIFO, not a regular file: copy its content to one\n"
    )


def test_reload_changes_the_log_level_unless_the_command_line_sets_it(tmp_path: Path, file: Path) -> None:
    for options, has_changed in (([], True), (["--log-level", "warning"], False)):
        folder = tmp_path / str(has_changed)
        folder.mkdir()
        file.write_text("")
        with running(BrokerProcess(folder, ["--config", str(file), *options])) as broker:
            assert broker.log == ""
            file.write_text('[broker]\nlog_level = "info"\n')
            ended = reload(broker)
            assert ended.returncode == 0
            assert ('log_level: "warning" -> "info"' in ended.stdout) is has_changed
            assert ("INFO configuration reloaded" in broker.log) is has_changed


def test_log_in_json_tells_of_start_reload_and_stop(tmp_path: Path, file: Path) -> None:
    # C33.6
    file.write_text('[broker]\nlog_format = "json"\nlog_level = "info"\n')
    with running(BrokerProcess(tmp_path, ["--config", str(file)])) as broker:
        file.write_text('[broker]\nlog_format = "text"\nlog_level = "info"\n')
        assert reload(broker).returncode == 0
        lines = broker.log.splitlines()
    assert "INFO broker stops" in broker.log
    started = [json.loads(line) for line in lines if line.startswith("{")]
    (listens,) = (each for each in started if each["message"] == "broker listens")
    facts = {name: listens[name] for name in ("level", "logger", "health", "version", "folder", "users")}
    assert facts == {
        "level": "info",
        "logger": "truenext.cli.serve",
        "health": None,
        "version": VERSION,
        "folder": str(broker.data),
        "users": None,
    }
    assert listens["listen"] == [broker.url]
    assert not lines[-1].startswith("{"), "the reload itself is logged as text"


@pytest.mark.parametrize("options", [()])
def test_reload_without_a_file_is_refused(own_broker: BrokerProcess) -> None:
    ended = reload(own_broker)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "was started without --config and --users: it has no file to reload" in ended.stderr


def test_reload_without_a_broker_fails() -> None:
    assert truenext("reload", "--url", "stomp://127.0.0.1:1").returncode == 2


def test_shorter_history_is_cut_at_once(tmp_path: Path) -> None:
    day = datetime.now(UTC) - timedelta(days=10)
    kept = tmp_path / EVENTS_FOLDER / f"date={day:%Y-%m-%d}" / "1.parquet"
    kept.parent.mkdir(parents=True)
    kept.touch()
    exporter = HistoryExporter(tmp_path, bytes_max=1000, days_max=20)
    exporter.set_retention(bytes_max=1000, days_max=11)
    wait_for(exporter)
    assert kept.exists()
    exporter.set_retention(bytes_max=1000, days_max=9)
    wait_for(exporter)
    assert not kept.exists()


def wait_for(exporter: HistoryExporter) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while exporter.is_running:
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ---- truenext config check ----


def test_check_reports_a_valid_file_and_the_policy_of_a_queue(file: Path) -> None:
    file.write_text('[broker]\ndata = "d"\n[policy]\nattempts_max = 3\n[policy."orders.>"]\npage_size = 10\n')
    ended = truenext("config", "check", file, "--queue", "orders.new")
    assert (ended.returncode, ended.stderr) == (0, "")
    memory, files, disk, last, head, *rows = (line.split() for line in ended.stdout.splitlines())
    assert [memory[0], files[0], disk[0]] == ["memory:", "files:", "disk:"]
    assert last == [str(file), "has", "no", "faults."]
    assert head == ["policy", "of", "orders.new", "value", "from"]
    assert ["attempts_max", "3", "[policy]"] in rows
    assert ["page_size", "10", '[policy."orders.>"]'] in rows
    assert ["store_and_dispatch", '"durable"', "default"] in rows


def test_check_names_options_that_the_command_line_still_needs(file: Path) -> None:
    file.write_text('[broker]\nlisten = ["stomp://0.0.0.0:61613"]\n')
    ended = truenext("config", "check", file)
    assert ended.returncode == 0
    assert [line.split("`")[1] for line in ended.stdout.splitlines() if line.startswith("note: ")] == [
        "truenext serve"
    ] * 2


def test_check_refuses_a_store_without_its_limit(file: Path) -> None:
    content = '[broker]\ndata = "d"\nstore = "postgresql:///truenext"\nschema = "main"\n'
    file.write_text(content)
    ended = truenext("config", "check", file)
    assert ended.returncode == 1
    assert ended.stdout == (
        f"{file}: [broker] store needs database_limit, too\n"
        f"{file} has 1 fault; no broker starts with it or reloads it.\n"
    )
    file.write_text(content + 'database_limit = "2GiB"\n')
    assert truenext("config", "check", file).stdout.endswith(f" free\n{file} has no faults.\n")


def test_check_notes_a_schema_without_the_store_that_the_command_line_must_name(file: Path) -> None:
    file.write_text('[broker]\ndata = "d"\nschema = "main"\n')
    ended = truenext("config", "check", file)
    assert ended.returncode == 0
    note, *_, last = ended.stdout.splitlines()
    assert note == (
        "note: `truenext serve` refuses this file without more options: --schema is for a broker with --store."
    )
    assert last == f"{file} has no faults."


def test_check_notes_that_the_disk_is_smaller_than_its_limit_and_the_history(file: Path) -> None:
    file.write_text('[broker]\ndata = "d"\ndisk_limit = "900TiB"\n')
    ended = truenext("config", "check", file)
    assert ended.returncode == 0
    assert ended.stdout.startswith("note: disk_limit (900TiB) and the history (8GiB) are together more than the")


def test_check_reports_all_faults_of_a_file(file: Path) -> None:
    file.write_text("[policy]\nattempts_max = 0\npagesize = 1\n")
    ended = truenext("config", "check", file)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert ended.stdout == (
        f"{file}: [policy] attempts_max must be 1 to 1,000,000 attempts, not 0\n"
        f"{file}: [policy]: there is no setting 'pagesize'; is 'page_size' meant?\n"
        f"{file} has 2 faults; no broker starts with it or reloads it.\n"
    )


def test_check_of_a_file_that_cannot_be_read_gives_no_answer(tmp_path: Path) -> None:
    ended = truenext("config", "check", tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"truenext: cannot read {tmp_path}: Is a directory\n"


def test_a_connection_may_have_as_many_open_transactions_as_the_file_says(
    own_broker: BrokerProcess, file: Path
) -> None:
    file.write_text("[broker]\ntransactions_max = 100\ntransaction_bytes_max = 2000\ntransaction_messages_max = 3\n")
    own_broker.restart(is_clean=True)
    client = own_broker.connect()
    for number in range(100):
        client.begin(str(number))
    for _ in range(3):
        client.send("q", b"", transaction="99")
    client.commit("99")
    client.begin("99")
    client.begin("one too many")
    error = client.error()
    assert error.body.decode() == "more than 100 open transactions on one connection (transactions_max)"
    assert error.headers["truenext-code"] == "limit"
    client = own_broker.connect()
    client.begin("t")
    client.send("q", bytes(1000), transaction="t")
    client.send("q", bytes(1000), transaction="t")
    assert "more than 2000 bytes" in client.error().body.decode()
    client = own_broker.connect()
    client.begin("t")
    for _ in range(4):
        client.send("q", b"", transaction="t")
    assert "more than 3 sends" in client.error().body.decode()
