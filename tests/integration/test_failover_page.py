"""Tests that the commands of docs/failover.md do what the page says."""

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.contract.postgresql.log_writer import DURABLE, make_log
from tests.integration.broker_process import PATIENCE_SECONDS
from tests.integration.forked import Forked, completed
from tests.integration.test_postgresql_page import blocks, without_numbers
from tests.stages.postgres import PostgresServer, own_server
from truenext.broker.config import configure
from truenext.broker.settings import BrokerSettings

PAGE = (Path(__file__).parents[2] / "docs" / "failover.md").read_text()


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with own_server(**DURABLE) as server:
        with server.connect() as connection:
            connection.execute("CREATE DATABASE messages")
        with server.connect("messages") as connection:
            make_log(connection, schema="main")
        yield server


class Terminal:
    """Terminal of the page in which one broker runs."""

    def __init__(self, line: str, folder: Path, environment: Mapping[str, str]) -> None:
        """Start the broker of this command line, but on a free port."""
        line, _, _ = line.removeprefix("truenext ").partition(" --listen ")
        self._command = [*line.split(), "--listen", "stomp://127.0.0.1:0"]
        self._folder = folder
        self._environment = environment
        self._out, self.log = folder / f"out {id(self)}", folder / f"log {id(self)}"
        self.start()

    def start(self) -> None:
        self.broker = Forked(
            self._command, stdout=self._out, stderr=self.log, folder=self._folder, environment=self._environment
        )

    @property
    def output(self) -> str:
        return self._out.read_text()

    @property
    def is_listening(self) -> bool:
        return self._out.exists() and "listening on " in self.output

    def url(self) -> str:
        """Wait until the broker listens, and return its address."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.is_listening:
            assert self.broker.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)
        return self.output.split()[-1]


def run(line: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Run a command of the page, and return its output."""
    words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", line)]
    done = completed(*words[1:], folder=folder, environment=environment)
    assert done.returncode == 0, (line, done.stderr)
    return done.stdout.decode()


def form_of(text: str) -> str:
    """Return an output without numbers, and without the names of hosts and sockets."""
    return without_numbers(re.sub(r"(?<= on )[^:]*", "", text))


def await_output(expected: str, line: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Run a command until its output has the form that is expected."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while form_of(found := run(line, folder, environment)) != form_of(expected):
        assert time.monotonic() < deadline, (found, expected)
        time.sleep(0.1)


def test_first_failover_goes_as_the_page_says(postgres: PostgresServer, tmp_path: Path) -> None:
    """C28.1, C28.2, C28.4, C28.7"""
    environment = {"PGHOST": str(postgres.folder), "PGUSER": "postgres"}
    (first_line, second_line), (send, status), shown, (receive,), (failover,) = blocks("First failover", page=PAGE)
    members = "".join(f"{each}\n" for each in shown)
    first = Terminal(first_line, tmp_path, environment)
    url = first.url()
    second = Terminal(second_line, tmp_path, environment)
    try:
        run(f"{send} --url {url}", tmp_path, environment)
        await_output(members, status, tmp_path, environment)
        assert second.output == "standing by for a\n" and "`standing by for a`" in PAGE

        first.broker.kill()
        url = second.url()
        received = run(receive.replace("stomp://127.0.0.1:61614", url), tmp_path, environment)
        assert received == "outlives its broker\n"

        first.start()
        roles = {"active": "standing by", "standing by": "active"}
        swapped = re.sub("active|standing by", lambda found: roles[found[0]], members)
        await_output(swapped, status, tmp_path, environment)
        # The active broker reads the members once a second.
        deadline = time.monotonic() + PATIENCE_SECONDS
        while "standing by" not in run(f"truenext status --url {url}", tmp_path, environment):
            assert time.monotonic() < deadline, "the active broker sees no standby"
            time.sleep(0.1)
        answer = run(failover.replace("stomp://127.0.0.1:61614", url), tmp_path, environment)
        assert answer == "a is to take over.\n" and "`a is to take over.`" in PAGE
        assert second.broker.wait(PATIENCE_SECONDS) == 3
        first.url()
    finally:
        for terminal in (first, second):
            terminal.broker.kill()
            terminal.broker.wait()


def test_settings_of_the_page_have_no_faults(tmp_path: Path) -> None:
    (failover,) = blocks("When another broker takes over", "toml", page=PAGE)
    (patroni,) = blocks("PostgreSQL with Patroni", "toml", page=PAGE)
    file = tmp_path / "truenext.toml"
    file.write_text("\n".join([*failover, *patroni[1:], 'schema = "main"', 'database_limit = "9GiB"']))
    settings = configure(file).broker
    # As the comments say.
    assert settings.failover_after_ms == BrokerSettings().failover_after_ms
