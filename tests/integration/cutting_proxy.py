"""Proxy between clients and a broker that cuts connections at any byte, in either direction."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import NamedTuple

from tests.listening_proxy import ListeningProxy

ENDLESS = 1 << 60


class Cut(NamedTuple):
    """Plan for the end of one connection."""

    up: int = ENDLESS
    """Bytes of the client after which none passes any more."""
    down: int = ENDLESS
    """Bytes of the broker after which none passes any more."""
    delay_s: float = 0.0
    """Time from then to the cut, in which the sockets fill."""
    is_reset: bool = False
    """Whether both sides see a reset, and not an end."""


class _Link:
    """Connection through the proxy."""

    def __init__(self, client: socket.socket, broker: socket.socket, cut: Cut) -> None:
        self._sockets = (client, broker)
        self._cut = cut
        self._has_ended = False
        self._pumps_left = 2
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._pump, args=(client, broker, cut.up)),
            threading.Thread(target=self._pump, args=(broker, client, cut.down)),
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def end(self, *, is_reset: bool) -> None:
        """End both sides."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    if is_reset:
                        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        # Wakes the other thread, and sends nothing; closing sends the reset.
                        each.shutdown(socket.SHUT_RD)
                    else:
                        each.shutdown(socket.SHUT_RDWR)

    def _pump(self, source: socket.socket, target: socket.socket, passing: int) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(min(65536, passing)):
                target.sendall(data)
                passing -= len(data)
                if not passing:
                    time.sleep(self._cut.delay_s)
                    self.end(is_reset=self._cut.is_reset)
                    break
        self.end(is_reset=False)
        with self._lock:
            self._pumps_left -= 1
            if not self._pumps_left:
                for each in self._sockets:
                    each.close()


class CuttingProxy(ListeningProxy):
    """Proxy that listens on `port`, for one broker and one client at a time."""

    def __init__(self, broker_port: int) -> None:
        super().__init__()
        self._broker_port = broker_port
        self._cut = Cut()
        self._link: _Link | None = None

    def expect(self, cut: Cut) -> None:
        """Set the plan for the next connection."""
        self._cut = cut

    def _connect(self, client: socket.socket) -> None:
        self._end_connections()
        broker = socket.socket()
        # Little is on its way, so that the socket of the broker fills up.
        broker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        broker.connect(("127.0.0.1", self._broker_port))
        for end in (client, broker):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._link = _Link(client, broker, self._cut)

    def _end_connections(self) -> None:
        if self._link is not None:
            self._link.end(is_reset=False)
            self._link.join()
            self._link = None
