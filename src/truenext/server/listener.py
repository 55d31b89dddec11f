"""Where clients connect: listening sockets, and the connections made from them."""

import ipaddress
import logging
import socket
from asyncio import AbstractEventLoop
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from truenext.broker.broker import Broker
from truenext.errors import ConfigurationError
from truenext.limits import CONNECTIONS_MAX
from truenext.server.connection import Connection

logger = logging.getLogger(__name__)

STOMP_PORT = 61613
BACKLOG = 1024
RETRY_SECONDS = 1.0
"""Pause after an accept failed, for lack of file descriptors most likely."""
SCHEMES = ("stomp",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where to listen."""

    host: str
    port: int
    """0 picks a free one."""

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_url(url: str) -> Address:
    """The address in `stomp://HOST:PORT`; the port may be left out.

    >>> parse_url("stomp://127.0.0.1:0")
    Address(host='127.0.0.1', port=0)

    Raises: ConfigurationError if it is not one.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigurationError(f"cannot listen on {url!r}: {error}") from error
    if parts.scheme not in SCHEMES:
        raise ConfigurationError(f"cannot listen on {url!r}: it must begin with stomp://")
    if not parts.hostname or parts.path or parts.query or parts.username:
        raise ConfigurationError(f"cannot listen on {url!r}: it must be stomp://HOST:PORT")
    return Address(host=parts.hostname, port=STOMP_PORT if port is None else port)


class Listener:
    """Accepts STOMP clients on one address."""

    def __init__(
        self, address: Address, broker: Broker, loop: AbstractEventLoop, *, identity: str, version: str
    ) -> None:
        """Raises: ConfigurationError if the address cannot be listened on."""
        self._broker = broker
        self._loop = loop
        self._identity = identity
        self._server_name = f"truenext/{version}"
        self._connections: set[Connection] = set()
        self._is_stopping = False
        try:
            family, _, _, _, where = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._sock = socket.create_server(where[:2], family=family, backlog=BACKLOG, reuse_port=False)
        except OSError as error:
            raise ConfigurationError(f"cannot listen on {address.host}:{address.port}: {error.strerror}") from error
        self._sock.setblocking(False)
        loop.add_reader(self._sock, self._on_acceptable)

    @property
    def url(self) -> str:
        """Where clients find it, with the port that was picked."""
        host, port = self._sock.getsockname()[:2]
        return f"stomp://[{host}]:{port}" if ":" in host else f"stomp://{host}:{port}"

    def stop_reading(self) -> None:
        """Accept no one, and take nothing more from those who are there."""
        self._is_stopping = True
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for connection in self._connections:
            connection.stop_reading()

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._connections):
            connection.end()

    def _on_acceptable(self) -> None:
        while True:
            try:
                sock, peer = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                logger.error("cannot accept", extra={"reason": str(error)})
                self._loop.remove_reader(self._sock)
                self._loop.call_later(RETRY_SECONDS, self._accept_again)
                return
            if len(self._connections) >= CONNECTIONS_MAX:
                logger.error("connection refused", extra={"connections": CONNECTIONS_MAX})
                with suppress(OSError):
                    sock.send(f"ERROR\nmessage:more than {CONNECTIONS_MAX} connections\n\n\0".encode())
                sock.close()
                continue
            sock.setblocking(False)
            # Batches are joined before they are written: waiting for more would only add delay.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections.add(
                Connection(
                    sock,
                    f"{peer[0]}:{peer[1]}",
                    self._broker,
                    self._loop,
                    identity=self._identity,
                    server_name=self._server_name,
                    on_closed=self._connections.discard,
                )
            )

    def _accept_again(self) -> None:
        if not self._is_stopping:
            self._loop.add_reader(self._sock, self._on_acceptable)
