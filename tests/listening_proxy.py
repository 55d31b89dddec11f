"""Base of proxies in threads: a listener on a free port of 127.0.0.1, and its clients."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class ListeningProxy:
    """Proxy that listens on `port` for the duration of its `with` block."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept)

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shut_down(self._listener)
        self._accepting.join()
        self._listener.close()
        self._end_connections()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        """Begin to forward the bytes of a new client."""
        raise NotImplementedError

    def _end_connections(self) -> None:
        """End all connections and their threads; no new one comes."""
        raise NotImplementedError


def shut_down(end: socket.socket) -> None:
    """Shut a socket down in both directions, if it is connected or listens."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
