"""Proxy between a broker and PostgreSQL that does harm at one message of the protocol, in either direction.

Source: PostgreSQL 18, chapter 54. Messages are counted over all connections, in the order in which they arrive here.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from tests.listening_proxy import ListeningProxy, shut_down

_ENCRYPTION_REQUESTS: Final = (b"\x04\xd2\x16\x2f", b"\x04\xd2\x16\x30")
"""Codes of a request for encryption, which the server answers with a single byte."""


class Harm(Enum):
    CUT = "cut"
    """The connection is cut, and the message is lost."""
    FREEZE = "freeze"
    """Nothing passes for `freeze_s` seconds, in either direction. Then all passes, late."""
    DELAY = "delay"
    """The message is late by `delay_s` seconds."""


class Plan(NamedTuple):
    """Harm to the message with this number; the first message has number 0."""

    harm: Harm
    number: int
    freeze_s: float = 3.0
    delay_s: float = 0.3


class ProtocolProxy(ListeningProxy):
    """Proxy that listens on `port` of 127.0.0.1, for the server whose socket is in `folder`."""

    def __init__(self, folder: Path, plan: Plan | None = None) -> None:
        super().__init__()
        self._path = str(folder / ".s.PGSQL.5432")
        self._plan = plan
        self._lock = threading.Lock()
        self._links: list[_Link] = []
        self.count = 0
        """Number of messages so far."""
        self.harmed = ""
        """Description of the message that was harmed."""
        self.is_over = threading.Event()
        """Set when the harm was done, and all late messages have passed."""

    def harm_of(self, description: str) -> Harm | None:
        """Count a message, and return the harm to do to it."""
        with self._lock:
            number, self.count = self.count, self.count + 1
            if self._plan is None or number != self._plan.number:
                return None
            self.harmed = f"{number}: {description}"
            return self._plan.harm

    def wait(self, harm: Harm) -> None:
        assert self._plan is not None
        time.sleep(self._plan.freeze_s if harm is Harm.FREEZE else self._plan.delay_s)

    def _connect(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(self._path)
        except OSError:
            server.close()
            client.close()
            return
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links.append(_Link(self, client, server))

    def _end_connections(self) -> None:
        for link in self._links:
            link.end()
        for link in self._links:
            link.join()


class _Link:
    """Connection through the proxy."""

    def __init__(self, proxy: ProtocolProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._expects_byte = False
        """True if the next answer of the server is a single byte."""
        self._thawed = threading.Event()
        self._thawed.set()
        self._threads = [
            threading.Thread(target=self._run, args=(self._forward_requests, client, server)),
            threading.Thread(target=self._run, args=(self._forward_answers, server, client)),
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        shut_down(self._client)
        shut_down(self._server)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        self._client.close()
        self._server.close()

    def _run(
        self, forward: Callable[[socket.socket, socket.socket], None], source: socket.socket, target: socket.socket
    ) -> None:
        with contextlib.suppress(OSError, EOFError):
            forward(source, target)
        # Late messages pass before the end does.
        self._thawed.wait()
        shut_down(target)

    def _forward_requests(self, source: socket.socket, target: socket.socket) -> None:
        is_started = False
        while True:
            kind = _read(source, 1) if is_started else b""
            length = _read(source, 4)
            body = _read(source, int.from_bytes(length) - 4)
            self._expects_byte = not is_started and body[:4] in _ENCRYPTION_REQUESTS
            is_started = is_started or not self._expects_byte
            description = f"request {kind.decode()}" if kind else "request without a type"
            self._pass(description, kind + length + body, target)

    def _forward_answers(self, source: socket.socket, target: socket.socket) -> None:
        while True:
            kind = _read(source, 1)
            if self._expects_byte:
                self._expects_byte = False
                self._pass("answer about encryption", kind, target)
                continue
            length = _read(source, 4)
            body = _read(source, int.from_bytes(length) - 4)
            self._pass(f"answer {kind.decode()}", kind + length + body, target)

    def _pass(self, description: str, message: bytes, target: socket.socket) -> None:
        harm = self._proxy.harm_of(description)
        if harm is None:
            self._thawed.wait()
            target.sendall(message)
            return
        try:
            self._pass_late(harm, message, target)
        finally:
            self._proxy.is_over.set()

    def _pass_late(self, harm: Harm, message: bytes, target: socket.socket) -> None:
        if harm is Harm.CUT:
            self.end()
            raise EOFError
        if harm is Harm.FREEZE:
            self._thawed.clear()
        self._proxy.wait(harm)
        try:
            target.sendall(message)
        finally:
            self._thawed.set()


def _read(source: socket.socket, size: int) -> bytes:
    """Raises: EOFError"""
    data = b""
    while len(data) < size:
        piece = source.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data
