"""Tests of the packages in new environments of each Python that the machine has: `make packages`.

pip installs them from its index, and from wheels alone. Each environment must do what the README promises.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from tests.integration.broker_process import PATIENCE_SECONDS, dying_with_us
from tests.integration.environments import ROOT
from tools import dist
from truenext.version import VERSION

pytestmark = [
    pytest.mark.skipif(
        "TRUENEXT_PACKAGES" not in os.environ, reason="make packages: new environments take minutes, and a network"
    ),
    pytest.mark.timeout(600),
]

ENVIRONMENT_BYTES_MAX = 70_000_000
IMPORT_CPU_S_MAX = 0.060
STARTS = 7

SERVICE = """
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from truenext.stage import Service

app = Service("shop", database="sqlite+aiosqlite:///shop.db")


@app.single("shop.order", str, str, exactly_once=True)
async def order(item: str, session: AsyncSession) -> str:
    await session.execute(text("INSERT INTO orders VALUES (:item)"), {"item": item})
    return f"ordered {item}"
"""


def find_pythons() -> dict[str, str]:
    """Return the interpreters of this machine that truenext supports, one for each version, by version."""
    places = [Path(sys.executable), *sorted(Path.home().glob(".pyenv/versions/*/bin/python3"))]
    places += [Path(found) for minor in range(11, 20) if (found := shutil.which(f"python3.{minor}"))]
    by_version: dict[str, str] = {}
    program = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2]); sys.exit(sys.version_info < (3, 11))"
    for each in places:
        done = subprocess.run([each, "-c", program], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            by_version.setdefault(done.stdout.strip(), str(each))
    return by_version


PYTHONS = find_pythons() if "TRUENEXT_PACKAGES" in os.environ else {"this": sys.executable}


class Environment:
    def __init__(self, folder: Path, python: str) -> None:
        self.folder = folder
        subprocess.run([python, "-m", "venv", folder], check=True, env=clean_environment())

    def pip_install(self, *requirements: str) -> None:
        command = [str(self.folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, "--only-binary", ":all:", *requirements], check=True, env=clean_environment())

    @property
    def truenext(self) -> str:
        return str(self.folder / "bin" / "truenext")

    def bytes_without_pip(self) -> int:
        """Return the bytes on disk, without pip and setuptools, which a broker does not need."""
        files = [path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink()]
        of_pip = re.compile(r"site-packages/(pip|setuptools|_distutils_hack|distutils-precedence|pkg_resources)")
        return sum(path.stat().st_blocks * 512 for path in files if not of_pip.search(str(path)))


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRUENEXT_"))}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dist.build(ROOT, tmp_path_factory.mktemp("dist"), has_speedups=False)[1]


@pytest.fixture(scope="module", params=list(PYTHONS.values()), ids=list(PYTHONS))
def environment(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("environment") / "venv", request.param)
    environment.pip_install(str(wheel))
    return environment


class Reader:
    """Person who uses an environment, in a folder."""

    def __init__(self, environment: Environment, folder: Path) -> None:
        self._truenext = environment.truenext
        self._folder = folder
        self.variables: dict[str, str] = {}

    def run(self, *words: str, status: int = 0) -> str:
        done = subprocess.run(
            [self._truenext, *words],
            cwd=self._folder,
            env=clean_environment() | self.variables,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == status, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def running(self, *words: str, until: str) -> Iterator[str]:
        """Run a command for the duration of the block. Yields the line of its output that begins with `until`."""
        out, log = self._folder / f"{words[0]}.out", self._folder / f"{words[0]}.log"
        with out.open("wb") as stdout, log.open("wb") as stderr:
            process = subprocess.Popen(
                dying_with_us([self._truenext, *words]),
                cwd=self._folder,
                env=clean_environment() | self.variables,
                stdout=stdout,
                stderr=stderr,
            )
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not (found := re.search(rf"^({re.escape(until)}.*)\n", out.read_text(), re.MULTILINE)):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.01)
            yield found[1]
            process.terminate()
            assert process.wait(PATIENCE_SECONDS) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def reader(environment: Environment, tmp_path: Path) -> Reader:
    return Reader(environment, tmp_path)


def commands_of(reader: Reader, *path: str) -> Iterator[tuple[str, ...]]:
    """Yield all commands, by their help."""
    text = reader.run(*path, "--help")
    yield path
    listed = text.partition("\nCommands:\n")[2]
    for name in re.findall(r"^  ([a-z-]+)", listed, re.MULTILINE):
        yield from commands_of(reader, *path, name)


def test_environment_is_small_and_has_no_library_too_many(environment: Environment, reader: Reader) -> None:
    size = environment.bytes_without_pip()
    print(f"{environment.folder}: {size / 1e6:.1f} MB")
    assert size <= ENVIRONMENT_BYTES_MAX
    facts = json.loads(reader.run("--version", "--json"))
    assert facts["truenext"] == VERSION
    assert facts["formats"].keys() == {"data_folder", "history"}
    assert not {"sqlalchemy", "psycopg", "pyspark"} & facts["libraries"].keys()


def test_import_of_truenext_is_quick(environment: Environment) -> None:
    program = "import time; b = time.process_time(); import truenext; print(time.process_time() - b)"
    command = [str(environment.folder / "bin" / "python"), "-c", program]
    seconds = sorted(
        float(subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout)
        for _ in range(STARTS)
    )
    print(f"import truenext: {seconds[STARTS // 2] * 1000:.1f} ms of processor time")
    assert seconds[STARTS // 2] <= IMPORT_CPU_S_MAX


def test_each_command_prints_its_help(reader: Reader) -> None:
    assert len(list(commands_of(reader))) > 50


def test_first_broker_takes_and_hands_out_messages(reader: Reader) -> None:
    """The commands of the README."""
    with reader.running("serve", "--listen", "stomp://127.0.0.1:0", until="listening on ") as line:
        reader.variables["TRUENEXT_URL"] = line.removeprefix("listening on ")
        reader.run("send", "orders", "an ordinary one")
        reader.run("send", "orders", "an urgent one", "--priority", "9", "--transient")
        assert reader.run("receive", "orders", "--all") == "an urgent one\nan ordinary one\n"


def test_user_logs_in_over_tls(reader: Reader, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    (tmp_path / "broker.pem").touch(mode=0o600)
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "broker.pem")
    (tmp_path / "shop.password").touch(mode=0o600)
    added = ("user", "add", "shop", "--users", "users.toml", "--send", "orders.>", "--take", "orders.>", "--generate")
    (tmp_path / "shop.password").write_text(reader.run(*added))
    options = ("--users", "users.toml", "--certificate", "broker.pem", "--listen", "stomp+ssl://127.0.0.1:0")
    with reader.running("serve", *options, until="listening on ") as line:
        login = {"URL": line.removeprefix("listening on "), "CA": "ca.pem", "USER": "shop"}
        login["PASSWORD_FILE"] = "shop.password"
        reader.variables |= {f"TRUENEXT_{name}": value for name, value in login.items()}
        reader.run("send", "orders.new", "a book")
        assert reader.run("receive", "orders.new", "--all") == "a book\n"
        reader.run("purge", "orders.new", status=1)


def test_stage_works_in_sqlite(environment: Environment, wheel: Path, reader: Reader, tmp_path: Path) -> None:
    """The last test of an environment: it adds the extra `sql`."""
    environment.pip_install(f"{wheel}[sql]")
    (tmp_path / "shop.py").write_text(SERVICE)
    python = str(environment.folder / "bin" / "python")
    make = "import sqlite3; c = sqlite3.connect('shop.db'); c.execute('CREATE TABLE orders (item)'); c.commit()"
    subprocess.run([python, "-c", make], cwd=tmp_path, check=True)
    with reader.running("serve", "--listen", "stomp://127.0.0.1:0", until="listening on ") as line:
        reader.variables["TRUENEXT_URL"] = line.removeprefix("listening on ")
        reader.run("stages", "schema", "shop:app", "--apply")
        with reader.running("stages", "run", "shop:app", until="shop runs"):
            asked = ("shop.order", '"a book"', "--trace", "one", "--ask")
            assert reader.run("stages", "send", "shop:app", *asked) == '"ordered a book"\n'
    rows = "import sqlite3; print(sqlite3.connect('shop.db').execute('SELECT item FROM orders').fetchall())"
    done = subprocess.run([python, "-c", rows], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "[('a book',)]\n"
