"""Tests that the commands and statements of docs/postgresql.md do what the page says."""

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.postgresql.log_writer import DURABLE, url_of
from tests.integration.broker_process import PATIENCE_SECONDS
from tests.integration.forked import Forked, completed
from tests.integration.log_broker import delete_folder
from tests.stages.postgres import BINARIES, USER, PostgresServer, own_server
from truenext.broker.config import configure
from truenext.broker.settings import BrokerSettings

PAGE = (Path(__file__).parents[2] / "docs" / "postgresql.md").read_text()


def blocks(section: str, language: str = "", *, page: str = PAGE) -> list[list[str]]:
    """Return the lines of each code block of a section."""
    (text,) = re.findall(rf"^##+ {section}\n(.*?)(?=^##+ |\Z)", page, re.MULTILINE | re.DOTALL)
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [content.splitlines() for of_block, content in found if of_block == language]


class Reader:
    """Reader of the page, with two terminals in one folder."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._environment = environment
        self._out = folder / "out"
        self._broker: Forked | None = None
        self.output = ""
        """Output of the last command."""

    def run(self, line: str) -> None:
        match line.split():
            case ["truenext", "serve", *options]:
                self._serve(options)
            case ["truenext", *_]:
                self._run(line)
            case ["rm", "-r", path]:
                # The page says that Ctrl-\ ends the broker first.
                self.end_broker(signal.SIGQUIT)
                delete_folder(self._folder / path)
            case [program, *arguments]:
                subprocess.run([BINARIES / program, *arguments], env=os.environ | self._environment, check=True)

    def _serve(self, options: list[str]) -> None:
        command = ["serve", *options, "--listen", "stomp://127.0.0.1:0"]
        log = self._folder / "log"
        self._broker = Forked(command, stdout=self._out, stderr=log, folder=self._folder, environment=self._environment)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (self._out.exists() and (found := re.search("listening on (.*)\n", self._out.read_text()))):
            assert self._broker.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)
        self._environment["TRUENEXT_URL"] = found[1]

    def _run(self, line: str) -> None:
        words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", line)]
        done = completed(*words[1:], folder=self._folder, environment=self._environment)
        assert done.returncode == 0, (line, done.stderr)
        self.output = done.stdout.decode()

    def end_broker(self, by: signal.Signals) -> None:
        assert self._broker is not None
        self._broker.send_signal(by)
        assert self._broker.wait(PATIENCE_SECONDS) == (0 if by is signal.SIGTERM else -by)
        self._broker = None
        self._out.unlink()

    def clean_up(self) -> None:
        if self._broker is not None:
            self._broker.kill()
            self._broker.wait()


def without_numbers(text: str) -> str:
    return re.sub(r"\d[\d,]*", "N", text)


def test_first_start_goes_as_the_page_says(postgres: PostgresServer, tmp_path: Path) -> None:
    reader = Reader(tmp_path, {"PGHOST": str(postgres.folder), "PGUSER": "postgres"})
    try:
        for block in blocks("First start"):
            for line in block:
                if line.lstrip().startswith(("disk ", "log ", "on ")):
                    line = line.replace("/var/run/postgresql", str(postgres.folder))
                    assert f"{without_numbers(line)}\n" in without_numbers(reader.output)
                else:
                    reader.run(line)
                if line == "truenext receive orders":
                    assert reader.output == "stored in PostgreSQL\n"
        assert "has no damage" in reader.output
        ((warning, _),) = blocks("First start", "console")
        assert without_numbers(warning) in without_numbers((tmp_path / "log").read_text())
        reader.end_broker(signal.SIGTERM)
    finally:
        reader.clean_up()


def run_sql(server: PostgresServer, database: str, lines: list[str]) -> None:
    """Run statements and commands of psql as an administrator."""
    options = ["--no-psqlrc", "--set=ON_ERROR_STOP=1", f"--host={server.folder}", "--user=postgres"]
    subprocess.run(
        [BINARIES / "psql", *options, database],
        input="\n".join(lines),
        text=True,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def test_role_of_the_page_can_run_a_broker_and_another_can_check(postgres: PostgresServer, tmp_path: Path) -> None:
    administrator, auditor = blocks("Roles and rights", "sql")
    # It asks for a password, and logins are free here.
    script = [line.replace("messages", "roles") for line in administrator if not line.startswith("\\password")]
    run_sql(postgres, "postgres", script)
    reader = Reader(tmp_path, {"PGHOST": str(postgres.folder), "PGUSER": "truenext"})
    try:
        reader.run("truenext store init postgresql:///roles --schema main")
        run_sql(postgres, "roles", ["CREATE ROLE auditor LOGIN;", *auditor])
        reader.run(
            "truenext serve --store postgresql:///roles --schema main --database-limit 10GiB --durability local "
            "--data ./copy"
        )
        reader.run("truenext send orders 'one message'")
        reader.run("truenext store check postgresql:///roles?user=auditor --schema main")
        assert "1 message of" in reader.output
        reader.end_broker(signal.SIGTERM)
    finally:
        reader.clean_up()


@contextlib.contextmanager
def standby_of(primary: PostgresServer) -> Iterator[PostgresServer]:
    """Yield a running standby, made by the command of the page."""
    server = PostgresServer(Path(tempfile.mkdtemp(prefix="truenext-postgres-")), **DURABLE)
    ((line,),) = blocks("The standby is back")
    values = {"db2.example": primary.folder, "replicator": "postgres", "FOLDER": server.folder / "data"}
    for name, value in values.items():
        line = line.replace(name, str(value))
    program, *options = line.split()
    try:
        subprocess.run([BINARIES / program, *options, "--checkpoint=fast"], check=True, user=USER)
        server.start()
        yield server
    finally:
        server.clean_up()


@pytest.mark.alternates("outages of a log")
@pytest.mark.parametrize("failing", ["primary", "standby"])
def test_broker_goes_on_after_a_server_has_failed_as_the_page_says(failing: str, tmp_path: Path) -> None:
    with own_server(**DURABLE, wal_level="replica", max_wal_senders="5") as primary:
        (names_standby,) = blocks("Standby", "sql")
        run_sql(primary, "postgres", names_standby)
        with standby_of(primary) as standby:
            url = f"postgresql:///postgres?host={primary.folder},{standby.folder}"
            serve = f"truenext serve --store {url} --schema main --database-limit 10GiB --data ./data"
            reader = Reader(tmp_path, {"PGUSER": "postgres"})
            try:
                reader.run(f"truenext store init {url} --schema main")
                reader.run(serve)
                reader.run("truenext send orders 'a message'")
                lost, used = (primary, standby) if failing == "primary" else (standby, primary)
                lost.kill()
                reader.end_broker(signal.SIGKILL)
                (statements,) = blocks(f"The {failing} fails", "sql")
                run_sql(used, "postgres", statements)
                reader.run(f"{serve} --durability local")
                reader.run("truenext browse orders")
                assert "a message" in reader.output
                reader.end_broker(signal.SIGTERM)
                with standby_of(used):
                    (statements,) = blocks("The standby is back", "sql")
                    run_sql(used, "postgres", statements)
                    reader.run(serve)
                    reader.run("truenext status")
                    assert "; replicated" in reader.output
                    reader.end_broker(signal.SIGTERM)
            finally:
                reader.clean_up()


def test_configuration_file_of_the_page_has_no_faults(tmp_path: Path) -> None:
    (lines,) = blocks("Settings in a file", "toml")
    file = tmp_path / "truenext.toml"
    file.write_text("\n".join(lines))
    settings = configure(file).broker
    assert settings.schema == "main"
    # As the comments say.
    assert settings.durability is BrokerSettings().durability
    assert settings.database_patience_ms == BrokerSettings().database_patience_ms


def test_folder_moves_to_postgresql_and_back_as_the_page_says(postgres: PostgresServer, tmp_path: Path) -> None:
    """C27.10"""
    with postgres.connect() as connection:
        connection.execute("CREATE DATABASE moved")
    reader = Reader(tmp_path, {"PGHOST": str(postgres.folder), "PGUSER": "postgres"})
    try:
        reader.run("truenext serve --data ./data")
        reader.run("truenext send orders 'a message'")
        reader.end_broker(signal.SIGTERM)
        to, back = blocks("Move a broker")
        (empties,) = blocks("Move a broker", "sql")
        for line in (*to, "", *back):
            line = line.replace("postgresql://truenext@db.example/messages", url_of(postgres, "moved"))
            if line.startswith("truenext serve --store"):
                line += " --durability local"
            if line:
                reader.run(line)
            if line.startswith("truenext serve"):
                reader.run("truenext browse orders")
                assert "a message" in reader.output
                reader.end_broker(signal.SIGTERM)
        run_sql(postgres, "moved", empties)
        reader.run(f"truenext store init {url_of(postgres, 'moved')} --schema main")
    finally:
        reader.clean_up()
