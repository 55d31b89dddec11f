"""Commands of `truenext` in processes that are forked from a process that has loaded their modules.

Starting Python and loading a broker takes longer than most tests, and a thousand tests do so. In all else a forked
command is like a process that was started by its command line: process number, files, signals, end.
"""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from truenext.cli.main import COMMAND_MODULES, main

LOADED = [
    "truenext.cli.serve_command",
    "truenext.cli.serve",
    "tests.integration.private_memory",
    *sorted({f"truenext.cli.{module}" for module in COMMAND_MODULES.values()}),
    "aiosqlite",
    "psycopg",
    "sqlalchemy.ext.asyncio",
    "tests.integration.forked",
    "tests.integration.held_disk",
    "tests.integration.log_process",
    "truenext.cli.stages.run",
    "truenext.stage.sql",
    "truenext.store.postgresql.check",
    "truenext.store.postgresql.log",
    "tests.integration.frozen_heap",
]
"""Modules that are loaded once for each process of tests, in this order."""

SEGMENT_BYTES = 4 * 1024 * 1024
"""Size of a new journal's segments. Each broker writes two of them, full of zeros, at its start: 32 MiB each by
itself."""

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(LOADED)


def truenext(command: Sequence[str]) -> None:
    main(command)


class Forked:
    """Command in a forked process, which is killed when the process of the test ends. Methods as in
    `subprocess.Popen`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: Path,
        stderr: Path,
        stdin: Path = Path(os.devnull),
        run: Callable[[Sequence[str]], object] = truenext,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a command by calling `run` with it; `stdout` and `stderr` are truncated, and may be the same file."""
        settings = dict(os.environ) | dict(environment or {})
        self._process: ForkServerProcess = _server.Process(
            target=_run, args=(run, list(command), stdin, stdout, stderr, folder or Path.cwd(), settings), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises: subprocess.TimeoutExpired"""
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(
    run: Callable[[Sequence[str]], object],
    command: Sequence[str],
    stdin: Path,
    stdout: Path,
    stderr: Path,
    folder: Path,
    settings: Mapping[str, str],
) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    # A shell that runs tests in the background has them ignored, so has nohup.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(settings)
    written = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_APPEND if stdout == stderr else 0)
    for number, path, flags in ((0, stdin, os.O_RDONLY), (1, stdout, written), (2, stderr, written)):
        file = os.open(path, flags, 0o600)
        os.dup2(file, number)
        if file != number:
            os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.argv = ["truenext", *command]
    run(command)


def completed(
    *command: str,
    stdin_bytes: bytes = b"",
    folder: Path | None = None,
    run: Callable[[Sequence[str]], object] = truenext,
    seconds: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end, with `stdin_bytes` on its standard input. Raises: subprocess.TimeoutExpired"""
    with tempfile.TemporaryDirectory() as own:
        stdin, out, err = (Path(own) / name for name in ("in", "out", "err"))
        stdin.write_bytes(stdin_bytes)
        process = Forked(command, stdin=stdin, stdout=out, stderr=err, run=run, folder=folder, environment=environment)
        try:
            status = process.wait(seconds)
        finally:
            process.kill()
        return subprocess.CompletedProcess(["truenext", *command], status, out.read_bytes(), err.read_bytes())


def completed_text(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command without input to its end, and return its output as text."""
    done = completed(*map(str, command))
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
