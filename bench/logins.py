"""Benchmark of a thousand clients of 20 users that log in again after the broker has ended.

The broker is killed with -9 and started again. It remembers no login then, and hashes a password for each user. As soon
as it listens all clients connect at once, log in, and subscribe to a queue each; those that are refused try again.
Output: the time until all are back, and the longest time that the broker's event loop was held meanwhile. That is
measured in the broker, between two beats of a timer: by the clock, and by the processor time of the loop's thread,
which is the loop's own work. Round trips of a client that asks once a millisecond are measured as well. Where
processors are few, other processes make the first and the last longer.

python -m bench.logins --runs 5
"""

from __future__ import annotations

import argparse
import random
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bench.brokers import Truenext
from bench.load import await_frame
from bench.options import positive
from bench.workers import Counter, Crew, Gate, counter, end_in_order
from truenext.broker.passwords import hash_password

PATIENCE_S = 60.0
BACK_MAX_S = 5.0
HELD_MAX_MS = 20.0
RETRY_S = 0.1
"""Shortest pause of a client before it tries again; on average twice as long."""
_PROBE = "probe"


class Guarded(Truenext):
    """Broker with users, that notes how long its loop is held."""

    def __init__(self, parent: Path, users: int) -> None:
        super().__init__(parent)
        self._users = users

    @property
    def late_beats(self) -> Path:
        return self._require_folder() / "late"

    def prepare(self, folder: Path) -> list[str]:
        command = super().prepare(folder)
        users = folder / "users.toml"
        users.touch(mode=0o600)
        names = [_PROBE, *(_user(number) for number in range(self._users))]
        users.write_text(
            "".join(
                f'[user.{name}]\npasswords = ["{hash_password(_password(name))}"]\ntake = [">"]\n' for name in names
            )
        )
        serve = command[command.index("serve") :]
        return [sys.executable, "-m", "bench.loop_watch", str(folder / "late"), *serve, "--users", str(users)]


class Return(NamedTuple):
    """Times of a run, by `time.monotonic`."""

    started: float
    ended: float
    retries: int
    """Logins that were refused for the moment, or cut."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.logins", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=positive, default=1000, metavar="N", help="one of them is the probe")
    parser.add_argument("--users", type=positive, default=20, metavar="N", help="of the clients")
    parser.add_argument("--runs", type=positive, default=3, metavar="N", help="restarts")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the broker's data goes (default: temp folder)")
    options = parser.parse_args(arguments)
    end_in_order()
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as folder,
        Guarded(Path(folder), options.users) as broker,
    ):
        for _ in range(options.runs):
            _measure(broker, options.clients - 1, options.users)
    return 0


def _measure(broker: Guarded, clients: int, users: int) -> None:
    broker.end(signal.SIGKILL, PATIENCE_S)
    restarted = time.monotonic()
    broker.start(PATIENCE_S)
    listens = time.monotonic()
    are_back = counter()
    with Crew() as crew:
        probe = crew.hire(_probe, broker.port, are_back)
        crowd = crew.hire(_come_back, broker.port, clients, users, are_back)
        probe.await_ready()
        crowd.await_ready()
        probe.start()
        crowd.start()
        round_trip, back = crew.finish(PATIENCE_S)
    broker.end(signal.SIGTERM, PATIENCE_S)
    lines = [tuple(map(float, line.split())) for line in broker.late_beats.read_text().splitlines()]
    late = [(seconds, processor) for at, seconds, processor in lines if back.started <= at <= back.ended + 0.1]
    held, worked = (1000 * max((each[which] for each in late), default=0.0) for which in (0, 1))
    broker.start(PATIENCE_S)
    print(
        f"{clients + 1:,} clients of {users} users: back after {back.ended - back.started:.2f} s "
        f"(at most {BACK_MAX_S:g}) with {back.retries} more tries, listening {listens - restarted:.2f} s after the end;"
        f" loop held at most {held:.1f} ms by the clock, {worked:.1f} ms by its own work (at most {HELD_MAX_MS:g}); "
        f"longest round trip {1000 * round_trip:.1f} ms",
        flush=True,
    )


def _user(number: int) -> str:
    return f"user-{number}"


def _password(user: str) -> str:
    return f"password of {user}"


def _connect_frame(user: str) -> bytes:
    head = f"accept-version:1.2\nhost:localhost\nheart-beat:0,0\nlogin:{user}\npasscode:{_password(user)}"
    return f"CONNECT\n{head}\n\n\0".encode()


def _probe(gate: Gate, port: int, are_back: Counter) -> float:
    """Worker: return the longest round trip, in seconds, of requests once a millisecond, until all are back."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(_connect_frame(_PROBE))
        await_frame(sock, b"CONNECTED")
        gate.ready()
        longest = 0.0
        while not are_back.value:
            asked = time.monotonic()
            sock.sendall(b"BEGIN\ntransaction:t\n\n\0ABORT\ntransaction:t\nreceipt:r\n\n\0")
            await_frame(sock, b"RECEIPT")
            longest = max(longest, time.monotonic() - asked)
            time.sleep(0.001)
    return longest


class _Client:
    """Client that connects, logs in and subscribes, without blocking."""

    def __init__(self, number: int, users: int) -> None:
        self.number = number
        self._user = _user(number % users)
        self.sock: socket.socket
        self._answer: bytes

    def connect(self, port: int) -> None:
        self.sock = socket.socket()
        self.sock.setblocking(False)
        self._answer = b""
        with suppress(BlockingIOError):
            self.sock.connect(("127.0.0.1", port))

    def log_in(self) -> None:
        """Raises: OSError"""
        self.sock.sendall(_connect_frame(self._user))

    def read(self) -> bool:
        """Read once. Returns whether the client is back. Raises: ConnectionError if it must try again"""
        received = self.sock.recv(4096)
        if not received:
            raise ConnectionError(self._answer)
        self._answer += received
        if not self._answer.rstrip(b"\n").endswith(b"\0"):
            return False
        answer, self._answer = self._answer.lstrip(b"\n"), b""
        if answer.startswith(b"RECEIPT"):
            return True
        if not answer.startswith(b"CONNECTED"):
            raise ConnectionError(answer)
        self.sock.sendall(f"SUBSCRIBE\nid:0\ndestination:/queue/q{self.number}\nreceipt:there\n\n\0".encode())
        return False


def _come_back(gate: Gate, port: int, clients: int, users: int, are_back: Counter) -> Return:
    """Worker: let all clients connect at once, until all have logged in and subscribed."""
    everyone = [_Client(number, users) for number in range(clients)]
    dice = random.Random(1)
    retries: list[tuple[float, _Client]] = []
    retry_count = back_count = 0
    gate.ready()
    started = time.monotonic()
    with selectors.DefaultSelector() as selector:

        def begin(client: _Client) -> None:
            client.connect(port)
            selector.register(client.sock, selectors.EVENT_WRITE, client)

        for client in everyone:
            begin(client)
        while back_count < clients:
            for key, events in selector.select(0.01):
                client = key.data
                try:
                    if events & selectors.EVENT_WRITE:
                        client.log_in()
                        selector.modify(client.sock, selectors.EVENT_READ, client)
                    elif client.read():
                        back_count += 1
                        selector.unregister(client.sock)
                except OSError:
                    retry_count += 1
                    selector.unregister(client.sock)
                    client.sock.close()
                    retries.append((time.monotonic() + RETRY_S * dice.uniform(1, 3), client))
            now = time.monotonic()
            for at, client in [each for each in retries if each[0] <= now]:
                retries.remove((at, client))
                begin(client)
    ended = time.monotonic()
    are_back.value = 1
    for client in everyone:
        client.sock.close()
    return Return(started, ended, retry_count)


if __name__ == "__main__":
    raise SystemExit(main())
