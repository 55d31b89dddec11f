"""A connection pooler between programs and PostgreSQL, like PgBouncer in transaction mode: each transaction of a client
gets the next free connection to the server, and the state of a session is not kept.

It does not support prepared statements, like PgBouncer before 1.21, or later with `max_prepared_statements` 0. Source:
PostgreSQL 18, chapter 54; https://www.pgbouncer.org/features.html
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

from tests.listening_proxy import ListeningProxy, shut_down

_SSL, _GSS, _CANCEL = 80877103, 80877104, 80877102
_VERSION = 3 << 16


class Pooler(ListeningProxy):
    """Pooler that listens on `port` of 127.0.0.1, for a database of the server whose socket is in `folder`."""

    def __init__(self, folder: Path, database: str, connections: int) -> None:
        super().__init__()
        self._path = str(folder / ".s.PGSQL.5432")
        self._database = database
        self.clients = 0
        self._free: SimpleQueue[_Server] = SimpleQueue()
        for _ in range(connections):
            self._free.put(_Server(self._path, database))
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    def _connect(self, client: socket.socket) -> None:
        self.clients += 1
        self._open.add(client)
        thread = threading.Thread(target=self._serve, args=(client,))
        self._threads.append(thread)
        thread.start()

    def _end_connections(self) -> None:
        for each in list(self._open):
            shut_down(each)
        for thread in self._threads:
            thread.join()
        while not self._free.empty():
            self._free.get().close()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), client, client.makefile("rb") as stream:
            if _greeted(client, stream):
                self._welcome(client)
                while self._transaction(client, stream):
                    pass
        self._open.discard(client)

    def _welcome(self, client: socket.socket) -> None:
        server = self._free.get()
        self._free.put(server)
        # The process and its secret are of the pooler's own making: clients cancel by them.
        key = b"K" + (12).to_bytes(4, "big") + secrets.token_bytes(8)
        client.sendall(b"R\0\0\0\x08\0\0\0\0" + server.parameters + key + b"Z\0\0\0\x05I")

    def _transaction(self, client: socket.socket, stream: BinaryIO) -> bool:
        """Forward one transaction of the client; False if the client has ended its session."""
        kind, message = _message(stream)
        if kind == b"X":
            return False
        server = self._free.get()
        is_over = False
        try:
            while not is_over:
                server.end.sendall(message)
                # All that is answered by one ReadyForQuery.
                while kind not in b"QS":
                    kind, message = _message(stream)
                    server.end.sendall(message)
                is_over = server.answer(client)
                if not is_over:
                    kind, message = _message(stream)
                    if kind == b"X":
                        return False
        finally:
            if not is_over:
                # What it has begun is not to be the next client's.
                server.close()
                server = _Server(self._path, self._database)
            self._free.put(server)
        return True


class _Server:
    """One connection to the server."""

    def __init__(self, path: str, database: str) -> None:
        self.end = socket.socket(socket.AF_UNIX)
        self.end.connect(path)
        self._stream = self.end.makefile("rb")
        start = f"user\0postgres\0database\0{database}\0\0".encode()
        self.end.sendall((len(start) + 8).to_bytes(4, "big") + _VERSION.to_bytes(4, "big") + start)
        self.parameters = b""
        """ParameterStatus messages of the server."""
        kind = b""
        while kind != b"Z":
            kind, message = _message(self._stream)
            assert kind != b"E", message
            if kind == b"S":
                self.parameters += message

    def answer(self, client: socket.socket) -> bool:
        """Forward the answer up to the next ReadyForQuery; True if the transaction is over."""
        gathered = bytearray()
        while True:
            kind, message = _message(self._stream)
            gathered += message
            if kind == b"Z":
                client.sendall(gathered)
                return message[5:] == b"I"

    def close(self) -> None:
        self._stream.close()
        self.end.close()


def _greeted(client: socket.socket, stream: BinaryIO) -> bool:
    """Answer the start of a connection; False if it is a request to cancel."""
    while True:
        length = int.from_bytes(_read(stream, 4), "big")
        code = int.from_bytes(_read(stream, length - 4)[:4], "big")
        if code not in (_SSL, _GSS):
            return code != _CANCEL
        client.sendall(b"N")


def _message(stream: BinaryIO) -> tuple[bytes, bytes]:
    """Return the type of a message, and the whole message."""
    head = _read(stream, 5)
    return head[:1], head + _read(stream, int.from_bytes(head[1:], "big") - 4)


def _read(stream: BinaryIO, size: int) -> bytes:
    """Raises: EOFError"""
    found = stream.read(size)
    if len(found) < size:
        raise EOFError
    return found
