"""Proxy between a program and PostgreSQL that loses the answer to a COMMIT, or the COMMIT itself.

It reads the client's side of the protocol just enough to see a COMMIT pass: in a Query, or in a Parse or Bind that is
executed. Source: PostgreSQL 18, chapter 54.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from enum import Enum
from pathlib import Path

from tests.listening_proxy import ListeningProxy, shut_down


class Lose(Enum):
    """Loss of the next COMMIT."""

    NOTHING = "nothing"
    ANSWER = "answer"
    """The server executes it and answers, and then the connection is cut: it happened."""
    COMMIT = "commit"
    """The connection is cut before the server receives it: it did not happen."""
    ALL_FROM_NOW = "all from now"
    """The server receives it, and the connection stalls: nothing more passes, and nothing is cut."""


class CommitProxy(ListeningProxy):
    """Proxy that listens on `port` of 127.0.0.1, for the server whose socket is in `folder`.

    `lose` is the loss of the next COMMIT, once; `has_lost` is set when it has happened.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._path = str(folder / ".s.PGSQL.5432")
        self.lose = Lose.NOTHING
        self.has_lost = threading.Event()
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []

    def _connect(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._path)
        self._sockets += (client, server)
        link = _Link(self, client, server)
        for way in (link.up, link.down):
            thread = threading.Thread(target=way)
            self._threads.append(thread)
            thread.start()

    def _end_connections(self) -> None:
        for each in self._sockets:
            shut_down(each)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()


class _Link:
    def __init__(self, proxy: CommitProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._is_lost = False
        self._is_answer_lost = False
        self._is_stopped = False

    def up(self) -> None:
        """Forward the client's messages to the server, one by one."""
        stream = self._client.makefile("rb")
        with contextlib.suppress(OSError), stream:
            is_started = False
            while True:
                # Only the first message has no type, but for the request for encryption before it.
                kind = stream.read(1) if is_started else b""
                length = stream.read(4)
                if len(length) < 4:
                    break
                body = stream.read(int.from_bytes(length, "big") - 4)
                # A request for encryption is answered with one byte, and the start follows.
                is_started = is_started or body[:4] not in (b"\x04\xd2\x16\x2f", b"\x04\xd2\x16\x30")
                if kind in (b"Q", b"P") and b"COMMIT" in body.upper() and self._proxy.lose is not Lose.NOTHING:
                    lose, self._proxy.lose = self._proxy.lose, Lose.NOTHING
                    self._is_lost = True
                    if lose is Lose.COMMIT:
                        break
                    self._is_answer_lost = lose is Lose.ANSWER
                    self._is_stopped = lose is Lose.ALL_FROM_NOW
                    self._server.sendall(kind + length + body)
                    if self._is_stopped:
                        self._proxy.has_lost.set()
                elif not self._is_stopped:
                    self._server.sendall(kind + length + body)
        self._end()

    def down(self) -> None:
        """Forward the server's bytes to the client, until an answer is to be lost."""
        with contextlib.suppress(OSError):
            while data := self._server.recv(65536):
                if self._is_answer_lost:
                    # The server answers a COMMIT when it is done.
                    break
                if not self._is_stopped:
                    self._client.sendall(data)
        self._end()

    def _end(self) -> None:
        if self._is_lost:
            self._proxy.has_lost.set()
        shut_down(self._client)
        shut_down(self._server)
