"""Tests of signals that arrive while a broker or a service starts, at named points and at random moments.

`sitecustomize.py`, which Python imports before the first line of the command, holds the start at a function: it makes
the file `held-N`, and waits until the FIFO `go-N` is opened for writing. It also makes the file `listens` once the
command has set its first handlers.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.drawing import one_of
from tests.integration.broker_process import PATIENCE_SECONDS, dying_with_us
from tests.integration.test_grants import UserText
from truenext.cli import early_signals

SITECUSTOMIZE = """
import os, sys

points = [point.split(":") for point in os.environ.get("HOLD_AT", "").split()]
number = 0

def hook(frame, event, argument):
    global number
    if event not in ("call", "return"):
        return
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if event == "return" and name == "listen" and file.endswith("/cli/early_signals.py"):
        open("listens", "w").close()
        if not points:
            sys.setprofile(None)
    elif event == "call" and number < len(points) and name == points[number][1] and file.endswith(points[number][0]):
        open(f"held-{number}", "w").close()
        open(f"go-{number}").read()
        number += 1
        if number == len(points):
            sys.setprofile(None)

sys.setprofile(hook)
"""

BEFORE_IMPORTS = "/click/__init__.py:<module>"
BROKER_POINTS = [
    BEFORE_IMPORTS,
    "/cli/serve_command.py:<module>",
    "/broker/config.py:with_files",
    "/store/folder.py:lock",
    "/broker/recovery.py:recover",
    "/cli/serve.py:_run",
    "/broker/broker.py:start",
]
WITHOUT_FILES = [*BROKER_POINTS, "/server/listener.py:__init__"]
# The event loop hears of each signal by now, but does not carry out SIGHUP yet.
WITH_FILES = [*BROKER_POINTS, "/broker/reload.py:also_apply"]
SERVICE_POINTS = [
    BEFORE_IMPORTS,
    "/cli/stages/run.py:<module>",
    "/shop.py:<module>",
    "/cli/stages/run.py:_listen_to_signals",
    "/stage/service_run.py:connect",
]
ENDS = [signal.SIGTERM, signal.SIGINT]
RANDOM_STARTS = 4


class Start:
    """Start of a command in a process of its own, held at points."""

    def __init__(self, folder: Path, command: Sequence[str], *, points: Sequence[str] = (), shell: str = "") -> None:
        """`shell` is a command that a shell executes before."""
        self._folder = folder
        self._points = points
        (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
        for path in [folder / "listens", *folder.glob("held-*"), *folder.glob("go-*")]:
            path.unlink(missing_ok=True)
        for number in range(len(points)):
            os.mkfifo(folder / f"go-{number}")
        whole = [sys.executable, "-m", "truenext", *command]
        if shell:
            whole = ["/bin/sh", "-c", f'{shell}; exec "$@"', "sh", *whole]
        search = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": search, "HOLD_AT": " ".join(points)}
        with (folder / "out").open("wb") as out, (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                dying_with_us(whole),
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
            )

    def __enter__(self) -> "Start":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def out(self) -> str:
        return (self._folder / "out").read_text()

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    def await_handlers(self) -> None:
        """Wait until the command has set its first handlers. An earlier signal has Python's effect, which may be none:
        a shell that runs tests in the background has SIGINT ignored."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (self._folder / "listens").exists():
            assert time.monotonic() < deadline and self.process.poll() is None, f"no handlers are set: {self.log}"
            time.sleep(0.001)

    def await_text(self, name: str, text: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text not in (self._folder / name).read_text():
            assert time.monotonic() < deadline and self.process.poll() is None, f"no {text!r} in {name}: {self.log}"
            time.sleep(0.01)

    def await_point(self, number: int = 0) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (self._folder / f"held-{number}").exists():
            reached = f"{self._points[number]} was not reached: {self.log}"
            assert time.monotonic() < deadline and self.process.poll() is None, reached
            time.sleep(0.01)

    def release(self, number: int = 0) -> None:
        """Let the start go on, unless a signal has ended it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.process.poll() is None:
            # Nobody reads the FIFO for a moment before the process waits, and after it has ended.
            with contextlib.suppress(OSError):
                os.close(os.open(self._folder / f"go-{number}", os.O_WRONLY | os.O_NONBLOCK))
                return
            assert time.monotonic() < deadline, "the start does not wait"
            time.sleep(0.01)

    def signal_while_held(self, number: signal.Signals) -> None:
        self.await_point()
        self.process.send_signal(number)
        self.release()

    def ended(self) -> int:
        """Return the exit status."""
        return self.process.wait(PATIENCE_SECONDS)


def serve_options(folder: Path, *, has_files: bool) -> list[str]:
    options = ["serve", "--data", str(folder / "data"), "--listen", "stomp://127.0.0.1:0", "--log-level", "info"]
    if has_files:
        users = UserText()
        users.add("shop", ["send >"])
        users.write(folder / "users.toml")
        options += ["--users", str(folder / "users.toml")]
    return options


def run_options(folder: Path) -> list[str]:
    """Return the command of a service, whose broker does not exist."""
    (folder / "shop.py").write_text(
        "from truenext.stage import Service\n\napp = Service('shop')\n\n\n"
        "@app.terminator('shop.order', str)\nasync def order(text: str) -> None:\n    pass\n"
    )
    return ["stages", "run", "shop:app", "--url", "stomp://127.0.0.1:1"]


@one_of("point", WITHOUT_FILES, ids=WITHOUT_FILES)
@one_of("number", ENDS, ids=["SIGTERM", "SIGINT"])
def test_broker_that_starts_ends_with_status_0(tmp_path: Path, point: str, number: signal.Signals) -> None:
    with Start(tmp_path, serve_options(tmp_path, has_files=False), points=[point]) as start:
        start.signal_while_held(number)
        assert start.ended() == 0, start.log
        assert "Traceback" not in start.log


@one_of("point", SERVICE_POINTS, ids=SERVICE_POINTS)
@one_of("number", ENDS, ids=["SIGTERM", "SIGINT"])
def test_service_that_starts_ends_with_status_0(tmp_path: Path, point: str, number: signal.Signals) -> None:
    with Start(tmp_path, run_options(tmp_path), points=[point]) as start:
        start.signal_while_held(number)
        assert start.ended() == 0, start.log
        assert "Traceback" not in start.log


@one_of("point", WITH_FILES, ids=WITH_FILES)
def test_sighup_of_a_broker_that_starts_with_files_reloads_them_once_it_listens(tmp_path: Path, point: str) -> None:
    options = serve_options(tmp_path, has_files=True)
    with Start(tmp_path, options, points=[point, "/broker/reload.py:reload"]) as start:
        start.await_point()
        start.process.send_signal(signal.SIGHUP)
        start.process.send_signal(signal.SIGHUP)
        start.release()
        start.await_point(1)
        port = int(start.out.rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port)).close()
        changed = UserText()
        changed.add("shop", ["send >"])
        changed.add("till", ["take >"])
        changed.write(tmp_path / "users.toml")
        start.release(1)
        start.await_text("log", "user till: added")
        start.process.send_signal(signal.SIGTERM)
        assert start.ended() == 0
        assert start.log.count("configuration reloaded") == 1


@one_of("point", WITHOUT_FILES, ids=WITHOUT_FILES)
def test_sighup_ends_a_broker_that_starts_without_files(tmp_path: Path, point: str) -> None:
    with Start(tmp_path, serve_options(tmp_path, has_files=False), points=[point]) as start:
        start.signal_while_held(signal.SIGHUP)
        assert start.ended() == -signal.SIGHUP
        assert start.out == ""


class NotedLate(list[int]):
    """Noted signals, of which one more comes just after a look whether there are any."""

    def __bool__(self) -> bool:
        are_there = len(self) > 0
        self.append(signal.SIGHUP)
        return are_there


def test_sighup_that_comes_while_another_one_is_looked_for_is_taken_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_signals, "_noted", NotedLate())
    assert [early_signals.take_noted_sighup() for _ in range(2)] == [False, True]


def test_ignored_sighup_does_not_end_a_broker_that_starts_without_files(tmp_path: Path) -> None:
    options = serve_options(tmp_path, has_files=False)
    with Start(tmp_path, options, points=[BEFORE_IMPORTS], shell="trap '' HUP") as start:
        start.signal_while_held(signal.SIGHUP)
        start.await_text("out", "listening on")
        start.process.send_signal(signal.SIGTERM)
        assert start.ended() == 0


def test_transient_messages_survive_a_start_that_a_signal_ends_after_recovery(tmp_path: Path) -> None:
    options = serve_options(tmp_path, has_files=False)
    with Start(tmp_path, options) as first:
        first.await_text("out", "listening on")
        send = ["send", "orders", "transient", "--transient", "--url", first.out.split()[-1]]
        subprocess.run([sys.executable, "-m", "truenext", *send], check=True, capture_output=True)
        first.process.send_signal(signal.SIGTERM)
        assert first.ended() == 0
    with Start(tmp_path, options, points=["/cli/serve.py:_run"]) as second:
        second.signal_while_held(signal.SIGTERM)
        assert second.ended() == 0
    with Start(tmp_path, options) as third:
        third.await_text("out", "listening on")
        browse = ["browse", "orders", "--url", third.out.split()[-1]]
        shown = subprocess.run([sys.executable, "-m", "truenext", *browse], check=True, capture_output=True)
        assert shown.stdout == b"transient\n"


@one_of("number", [*ENDS, signal.SIGHUP], ids=["SIGTERM", "SIGINT", "SIGHUP"])
def test_signal_to_a_broker_at_a_random_moment_of_its_start_has_its_effect(
    tmp_path: Path, number: signal.Signals
) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    dice = random.Random(seed)
    options = serve_options(tmp_path, has_files=True)
    for is_measured in (True, *[False] * RANDOM_STARTS):
        with Start(tmp_path, options) as start:
            start.await_handlers()
            began = time.monotonic()
            if is_measured:
                start.await_text("out", "listening on")
                usual = time.monotonic() - began
            else:
                time.sleep(dice.uniform(0, usual))
            start.process.send_signal(number)
            if number == signal.SIGHUP:
                start.await_text("log", "configuration reloaded")
                start.process.send_signal(signal.SIGTERM)
                assert start.ended() == 0
                assert start.log.count("configuration reloaded") == 1
            else:
                assert start.ended() == 0, start.log


@one_of("number", ENDS, ids=["SIGTERM", "SIGINT"])
def test_signal_to_a_service_at_a_random_moment_of_its_start_ends_it_with_status_0(
    tmp_path: Path, number: signal.Signals
) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    dice = random.Random(seed)
    options = run_options(tmp_path)
    for is_measured in (True, *[False] * RANDOM_STARTS):
        with Start(tmp_path, options) as start:
            start.await_handlers()
            began = time.monotonic()
            if is_measured:
                start.await_text("log", "cannot connect")
                usual = time.monotonic() - began
            else:
                time.sleep(dice.uniform(0, usual))
            start.process.send_signal(number)
            assert start.ended() == 0, start.log


def test_installed_command_handles_signals_from_its_first_line_on() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"truenext": "truenext.__main__:main"}
