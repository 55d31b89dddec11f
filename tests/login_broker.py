"""Broker that records the headers of each CONNECT, and refuses as many logins as a test says."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class LoginBroker:
    def __init__(self, listener: socket.socket) -> None:
        self.url = f"stomp://127.0.0.1:{listener.getsockname()[1]}"
        self.logins: list[dict[str, str]] = []
        """Headers of each CONNECT."""
        self.refusal_codes: deque[str] = deque()
        """Codes with which the next logins are refused."""
        self.logins_max: int | None = None
        """Number of logins after which no connection is accepted any more."""
        self._listener = listener
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def credentials(self) -> list[tuple[str | None, str | None]]:
        """Return user and password of each login."""
        return [(headers.get("login"), headers.get("passcode")) for headers in self.logins]

    def cut_connections(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        with suppress(OSError):
            while True:
                accepted = self._listener.accept()[0]
                self._sockets.append(accepted)
                serving = threading.Thread(target=self._serve, args=(accepted,))
                serving.start()
                # Only now: `close` joins what is in the list.
                self._threads.append(serving)

    def close(self) -> None:
        self._stop_listening()
        self.cut_connections()
        for each in self._threads:
            each.join()

    def _stop_listening(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _serve(self, accepted: socket.socket) -> None:
        data = b""
        with suppress(OSError), accepted:
            while received := accepted.recv(10_000):
                data += received
                while b"\0" in data:
                    frame, _, data = data.partition(b"\0")
                    self._answer(accepted, *frame.decode().lstrip("\n").split("\n"))

    def _answer(self, accepted: socket.socket, command: str, *lines: str) -> None:
        headers = dict(line.split(":", 1) for line in lines if ":" in line)
        if command == "DISCONNECT":
            accepted.sendall(f"RECEIPT\nreceipt-id:{headers['receipt']}\n\n\0".encode())
        elif command == "CONNECT":
            self.logins.append(headers)
            if len(self.logins) == self.logins_max:
                self._stop_listening()
            if self.refusal_codes:
                accepted.sendall(f"ERROR\ntruenext-code:{self.refusal_codes.popleft()}\n\nrefused here\0".encode())
                accepted.shutdown(socket.SHUT_RDWR)
            else:
                accepted.sendall(b"CONNECTED\nversion:1.2\ntruenext-store:s\nserver:truenext\n\n\0")


@contextmanager
def login_broker() -> Iterator[LoginBroker]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        broker = LoginBroker(listener)
        thread = threading.Thread(target=broker.run)
        thread.start()
        try:
            yield broker
        finally:
            broker.close()
            thread.join()
