"""Broker for tests: the `truenext` command in a process of its own, on a data folder.

The broker dies with the process that started it, whatever becomes of the test. Each end is checked: a clean stop must
exit 0, and no end may leave an error in the log.
"""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.drawing import one_of
from tests.integration import held_disk, over_tls
from tests.integration.forked import Forked, completed, completed_text
from tests.integration.private_memory import print_bytes_of_other_modules, private_bytes
from tests.integration.raw_client import RawClient
from truenext.model.disk_level import DiskLevel
from truenext.model.limits import UNSENT_BYTES_MAX
from truenext.wire.stomp.frame import Frame

TINY_LIMITS = ("--page-size", "1", "--queue-memory-limit", "1KB")
"""Pages of one message, and most messages leave memory at once."""
LIMITS = one_of("options", [(), TINY_LIMITS], ids=["default limits", "tiny limits"])
"""Order and return must not depend on how much of a queue is in memory."""

PATIENCE_SECONDS = 60.0
"""Longest time that a test waits for an expected event: a loaded machine is slow, not broken."""

TRUENEXT = str(Path(sys.executable).parent / "truenext")

_DIE_WITH_US = (
    "import ctypes, os, signal, sys\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    # A shell that runs tests in the background has them ignored, so has nohup, and ignored signals stay so.
    "for each in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT): signal.signal(each, signal.SIG_DFL)\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)


def dying_with_us(command: Sequence[str]) -> list[str]:
    """Return a command that is killed when this process ends."""
    return [sys.executable, "-ISc", _DIE_WITH_US, *command]


@cache
def _bytes_of_other_modules() -> int:
    return int(completed(run=print_bytes_of_other_modules).stdout)


QUIET_SECONDS = 0.3
"""Time without a message after which none is expected."""


class QueueFacts(NamedTuple):
    waiting: int
    unacknowledged: int
    consumers: int


class BrokerProcess:
    """Data folder, and the broker that runs on it."""

    def __init__(
        self,
        folder: Path,
        options: Sequence[str] = (),
        *,
        can_hold_disk: bool = False,
        policy: dict[str, Any] | None = None,
        files_max: str = "",
    ) -> None:
        """Prepare a broker with `options` of `truenext serve`.

        `can_hold_disk` is needed by `hold_disk` and the other methods of the disk. `policy` has settings for all
        queues. `files_max` are arguments of `ulimit` for the number of open files.
        """
        self.data = folder / "data"
        self.options = options
        self._out = folder / "broker.out"
        self._log = folder / "broker.log"
        self._hold = folder / "hold"
        self._break = folder / "break"
        self._hold_pages = folder / "hold-pages"
        self._disk_level = folder / "room"
        self._full = folder / "full"
        self._folder_of_held_disk = folder if can_hold_disk else None
        self._files_max = files_max
        if policy is not None:
            file = folder / "truenext.toml"
            file.write_text(
                "\n".join(["[policy]", *(f"{name} = {json.dumps(value)}" for name, value in policy.items())])
            )
            self.options = [*options, "--config", str(file)]
        self._log_checked = 0
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._clients: list[RawClient] = []
        self.port = 0

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def send_signal(self, number: signal.Signals) -> None:
        self._running().send_signal(number)

    # ---- Life ----

    def start(self, port: int = 0) -> None:
        """Start the broker, with port 0 at a free port."""
        self.begin_start(port)
        self.await_start()

    def begin_start(self, port: int = 0) -> None:
        """Start the broker, but do not wait until it listens: it may stand by."""
        assert self._process is None, "it runs already"
        self._out.unlink(missing_ok=True)
        self._log.unlink(missing_ok=True)
        self._log_checked = 0
        url = f"{over_tls.SCHEME}://127.0.0.1:{port}"
        serve = ["serve", "--data", str(self.data), "--listen", url, *over_tls.serve_options(), *self.options]
        self._process = self._started(serve)

    @property
    def health_url(self) -> str:
        """URL of the health server of a broker with --health."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := re.search(r"health at (.*)\n", self._out.read_text() if self._out.exists() else "")):
            assert self.is_running and time.monotonic() < deadline, self.log
            time.sleep(0.002)
        return found[1]

    @property
    def is_listening(self) -> bool:
        return self._out.exists() and "listening on" in self._out.read_text()

    def await_start(self) -> None:
        """Wait until the broker listens."""
        line = self._read_line()
        assert line.startswith(f"listening on {over_tls.SCHEME}://127.0.0.1:"), (
            f"broker said {line!r}, and in its log:\n{self.log}"
        )
        # Other listeners follow, each on a line.
        self.port = int(line.splitlines()[0].rpartition(":")[2])

    def _started(self, command: list[str]) -> subprocess.Popen[bytes] | Forked:
        if self._folder_of_held_disk is not None:
            held = [str(self._folder_of_held_disk), *command]
            return Forked(held, stdout=self._out, stderr=self._log, run=held_disk.main)
        if not self._files_max:
            return Forked(command, stdout=self._out, stderr=self._log)
        limited = ["/bin/sh", "-c", f'ulimit {self._files_max} && exec "$@"', "sh", TRUENEXT, *command]
        with self._out.open("wb") as out, self._log.open("wb") as log:
            return subprocess.Popen(dying_with_us(limited), stdin=subprocess.DEVNULL, stdout=out, stderr=log)

    def stop(self, by: signal.Signals = signal.SIGTERM) -> None:
        """Stop the broker cleanly, which must succeed."""
        self._running().send_signal(by)
        self._wait_for_clean_end()

    def _wait_for_clean_end(self) -> None:
        status = self._running().wait(PATIENCE_SECONDS)
        self._forget()
        assert status == 0, f"broker exited with {status}, log:\n{self.log}"
        self.check_log()

    def kill(self) -> None:
        """Kill the broker with SIGKILL. Clients are not closed."""
        process = self._running()
        process.kill()
        status = process.wait(PATIENCE_SECONDS)
        self._forget()
        assert status == -signal.SIGKILL, f"broker had ended by itself, with {status}, log:\n{self.log}"
        self.check_log()

    def restart(self, *, is_clean: bool) -> None:
        if is_clean:
            self._running().send_signal(signal.SIGTERM)
            # It gives those who do not hang up two seconds.
            for client in self._clients:
                client.close_at_end()
            self._wait_for_clean_end()
        else:
            self.kill()
        self.close_clients()
        self.start()

    @property
    def url(self) -> str:
        return f"{over_tls.SCHEME}://127.0.0.1:{self.port}"

    @property
    def openwire_url(self) -> str:
        """URL for clients of ActiveMQ, if `options` have a listener for these."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        # A line of its own, which may come a little later than that of STOMP.
        while (found := re.search(r"^listening on (openwire.*)\n", self._out.read_text(), re.MULTILINE)) is None:
            assert time.monotonic() < deadline, f"broker does not listen for OpenWire, log:\n{self.log}"
            time.sleep(0.002)
        url = found[1]
        scheme = "ssl" if url.startswith("openwire+ssl") else "tcp"
        # Certificates of tests are for both names of this machine; Java's client compares names only.
        host = "localhost" if scheme == "ssl" else "127.0.0.1"
        return f"{scheme}://{host}:{url.rpartition(':')[2]}"

    def start_on_same_port(self) -> None:
        """Start a broker that the test has killed by other means, at the port that its clients know."""
        status = self.wait_for_end()
        assert status == -signal.SIGKILL, f"broker had ended by itself, with {status}, log:\n{self.log}"
        self.start(self.port)

    def wait_for_end(self) -> int:
        """Return the exit status of a broker that ends by itself."""
        status = self._running().wait(PATIENCE_SECONDS)
        self._forget()
        return status

    def check_log(self) -> None:
        """Check that the log has no error since the last check."""
        log = self.log
        news, self._log_checked = log[self._log_checked :], len(log)
        for line in news.splitlines():
            assert not {"ERROR", "CRITICAL", "Traceback"} & set(line.split()), f"log of the broker:\n{news}"

    def clean_up(self) -> None:
        """Close all clients and kill the broker."""
        self.close_clients()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget()

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Run the broker in the block, and stop it cleanly at the end. After an error it is killed."""
        try:
            self.start()
            yield self
            self.stop()
        finally:
            self.clean_up()

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Suspend the process of the broker for the duration of the block."""
        self._running().send_signal(signal.SIGSTOP)
        try:
            self._await_stop()
            yield
        finally:
            self._running().send_signal(signal.SIGCONT)

    def _await_stop(self) -> None:
        """Wait until all threads are suspended. One of them gets the signal, and others go on until it has run."""
        if sys.platform != "linux":
            return
        deadline = time.monotonic() + PATIENCE_SECONDS
        threads = Path(f"/proc/{self.pid}/task")
        while any(_state(thread) != "T" for thread in threads.iterdir()):
            assert time.monotonic() < deadline, "the broker does not stop"
            time.sleep(0.001)

    # ---- Clients ----

    def connect(
        self,
        *,
        version: str = "1.2",
        heart_beat: str = "0,0",
        receive_buffer: int = 0,
        sends_connect: bool = True,
        headers: dict[str, str] | None = None,
    ) -> RawClient:
        """Return a client that is closed with the test; `headers` are added to CONNECT."""
        client = RawClient(self.port, receive_buffer=receive_buffer)
        self._clients.append(client)
        if sends_connect:
            client.send_connect(version, heart_beat, headers=headers)
        return client

    def close_clients(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()

    def truenext(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command with the URL of the broker."""
        return completed_text(*arguments, "--url", self.url)

    def output_of(self, *arguments: str) -> str:
        """Return the output of a command, which must succeed."""
        done = self.truenext(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def control_request(self, verb: str) -> Any:
        """Return the broker's answer to a control request."""
        client = RawClient(self.port)
        try:
            client.send_connect("1.2", "0,0")
            client.send_frame("SUBSCRIBE", {"id": "answers", "destination": "/temp-queue/answers"})
            client.send_frame("SEND", {"destination": f"/control/{verb}", "reply-to": "/temp-queue/answers"})
            answer = client.message()
            client.disconnect()
        finally:
            client.close()
        return json.loads(answer.body)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.control_request("status")
        return status

    def queues(self) -> dict[str, QueueFacts]:
        return {
            facts["name"]: QueueFacts(facts["waiting"], facts["unacknowledged"], facts["consumers"])
            for facts in self.control_request("queues")
        }

    def await_facts(self, queue: str, **expected: int) -> None:
        """Wait until the broker's facts of a queue include `expected`; for changes without a receipt."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            facts = self.queues().get(queue, QueueFacts(0, 0, 0))
            if expected.items() <= facts._asdict().items():
                return
            assert time.monotonic() < deadline, f"{queue} has {facts}, not {expected}"
            time.sleep(0.002)

    def await_full_sockets(self, count: int = 1) -> None:
        """Wait until `count` connections have unsent messages up to their limit, as their clients do not read."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (memory := self.status()["memory"])["unsent"] < count * UNSENT_BYTES_MAX:
            assert time.monotonic() < deadline, f"the sockets still take messages: {memory}"
            time.sleep(0.002)

    def remaining_messages(self, queue: str, *, once_durable: bool = False) -> list[Frame]:
        """Return the messages that wait in a queue, and leave them there.

        `once_durable` waits first for the earlier unconfirmed sends of other connections.
        """
        reader = self.connect()
        if once_durable:
            # Batches are written in order: once this is durable, so is all that was accepted before, and visible.
            reader.send("barrier", b"", persistent=True, confirmed=True)
        reader.subscribe(queue)
        messages = reader.arrived()
        # What waits in the store is read before it can arrive.
        deadline = time.monotonic() + QUIET_SECONDS
        while self.queues()[queue].waiting and time.monotonic() < deadline:
            if more := reader.arrived():
                messages += more
                deadline = time.monotonic() + QUIET_SECONDS
        messages += reader.arrived()
        reader.disconnect()
        return messages

    # ---- The disk ----

    def hold_disk(self) -> None:
        """Let no batch become durable until `resume_disk`."""
        self._hold.touch()

    def resume_disk(self) -> None:
        self._hold.unlink()

    def hold_pages(self) -> None:
        """Hold back pages read from the store until `resume_pages`."""
        self._hold_pages.touch()

    def resume_pages(self) -> None:
        self._hold_pages.unlink()

    def await_page_read(self) -> None:
        """Wait until a page is being read."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.status()["page_reads"]:
            assert time.monotonic() < deadline, "nothing is read"
            time.sleep(0.002)

    def break_disk(self) -> None:
        """Let writing of batches fail until `mend_disk`."""
        self._break.touch()

    def mend_disk(self) -> None:
        self._break.unlink()

    def fill_disk(self) -> None:
        """Let the history find no space until the ballast is deleted."""
        self._full.touch()

    def set_disk_level(self, level: DiskLevel) -> None:
        new = self._disk_level.with_suffix(".new")
        new.write_text(level.name)
        new.rename(self._disk_level)

    # ---- Memory ----

    @contextmanager
    def watched_memory(self) -> Iterator[list[int]]:
        """Sample the broker's private bytes of memory; the last sample is taken at the end of the block."""
        samples = [self._private_bytes()]
        is_over = threading.Event()

        def sample() -> None:
            while not is_over.wait(0.01):
                samples.append(self._private_bytes())

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield samples
        finally:
            is_over.set()
            thread.join()
        samples.append(self._private_bytes())

    def _private_bytes(self) -> int:
        inherited = _bytes_of_other_modules() if isinstance(self._process, Forked) else 0
        return private_bytes(self.pid) - inherited

    # ---- Inside ----

    def _running(self) -> subprocess.Popen[bytes] | Forked:
        assert self._process is not None, "it does not run"
        return self._process

    def _forget(self) -> None:
        self._process = None

    def _read_line(self) -> str:
        process = self._running()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            has_ended = process.poll() is not None
            output = self._out.read_bytes() if self._out.exists() else b""
            output = re.sub(rb"(standing by|health at) .*\n", b"", output)
            if output.endswith(b"\n") or has_ended:
                return output.decode().strip()
            assert time.monotonic() < deadline, f"broker said only {output!r}, log:\n{self.log}"
            time.sleep(0.002)


def _state(thread: Path) -> str:
    """Return the state of a thread, as a letter, by its folder in /proc. Its name may have any character but NUL."""
    return (thread / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
