"""Listener: accepts connections on a listening socket."""

import logging
import os
import socket
from asyncio import AbstractEventLoop, Event
from collections.abc import Callable
from contextlib import suppress

from truenext.broker.broker import Broker
from truenext.errors import Code, ConfigurationError
from truenext.model.limits import CONNECTIONS_MAX, CONTROL_ONLY_CONNECTIONS_MAX, LOGIN_BYTES_MAX
from truenext.model.url import Address, host_and_port
from truenext.server.connection import ServerConnection
from truenext.wire.stomp.frame import BROKER_FRAME_END, Frame, Version, encode

logger = logging.getLogger(__name__)

BACKLOG = 1024
SOCKET_CHECK_INTERVAL_S = 1.0
"""Time between two checks for broken sockets."""
ACCEPT_RETRY_S = 1.0
"""Pause after a failed accept, most likely for lack of file descriptors."""


class Listener:
    """Accepts STOMP clients on one address."""

    def __init__(
        self,
        address: Address,
        broker: Broker,
        loop: AbstractEventLoop,
        *,
        identity: str,
        server_name: str,
        connections_max: int = CONNECTIONS_MAX,
        make_connection: Callable[..., ServerConnection] = ServerConnection,
    ) -> None:
        """A few connections above `connections_max` are accepted as control-only. `make_connection` has the
        parameters of ServerConnection.

        Raises: ConfigurationError if the address cannot be listened on.
        """
        self._broker = broker
        self._loop = loop
        self._identity = identity
        self._server_name = server_name
        self._connections: set[ServerConnection] = set()
        self._control_only: set[ServerConnection] = set()
        """Connections above the limit, which may only send control requests."""
        self._connections_max = connections_max
        self._make_connection = make_connection
        self._limit_reason = f"the listener has {connections_max} connections, the most that it accepts"
        if connections_max < CONNECTIONS_MAX:
            self._limit_reason += " with the system's limit of open files (ulimit -n)"
        self._all_closed = Event()
        """Set when no connection is left; used by `close` only."""
        self._is_stopping = False
        try:
            family, _, _, _, where = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._sock = socket.create_server(where[:2], family=family, backlog=BACKLOG, reuse_port=False)
        except (OSError, UnicodeError) as error:
            reason = "it is not a host name"
            if isinstance(error, OSError):
                # The text of `create_server` repeats the address.
                reason = str(error.strerror or error)
                if error.errno and not isinstance(error, socket.gaierror):
                    reason = os.strerror(error.errno)
            raise ConfigurationError(
                f"cannot listen on {host_and_port(address.host, address.port)}: {reason}"
            ) from error
        self._sock.setblocking(False)
        loop.add_reader(self._sock, self._on_acceptable)
        self._check_timer = loop.call_later(SOCKET_CHECK_INTERVAL_S, self._check_sockets)

    @property
    def url(self) -> str:
        """URL of this listener, with the port that was picked."""
        host, port = self._sock.getsockname()[:2]
        return Address(host=host, port=port).url

    def stop_reading(self) -> None:
        """Accept no more connections, and stop reading the existing ones."""
        self._is_stopping = True
        self._check_timer.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for connection in self._connections:
            connection.stop_reading()

    async def close(self) -> None:
        """Close all connections; returns once the clients have closed theirs, or have had enough time to."""
        for connection in list(self._connections):
            connection.end()
        if self._connections:
            # There may have been no connection before, which sets the event.
            self._all_closed.clear()
            await self._all_closed.wait()

    def _check_sockets(self) -> None:
        for connection in list(self._connections):
            connection.check_socket()
        self._check_timer = self._loop.call_later(SOCKET_CHECK_INTERVAL_S, self._check_sockets)

    def _on_closed(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        self._control_only.discard(connection)
        if not self._connections:
            self._all_closed.set()

    def _on_acceptable(self) -> None:
        while True:
            try:
                sock, peer = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                logger.error("cannot accept connections", extra={"listener": self.url, "reason": str(error)})
                self._loop.remove_reader(self._sock)
                self._loop.call_later(ACCEPT_RETRY_S, self._resume_accepting)
                return
            client = host_and_port(peer[0], peer[1])
            is_above_limit = len(self._connections) - len(self._control_only) >= self._connections_max
            if is_above_limit and len(self._control_only) >= CONTROL_ONLY_CONNECTIONS_MAX:
                extra = {"client": client, "connections": self._connections_max}
                logger.error(
                    "connection refused: connections_max is reached, also for control requests",
                    extra=extra,
                )
                reason = (
                    f"{self._limit_reason}, and {CONTROL_ONLY_CONNECTIONS_MAX} more for control requests alone: "
                    "try again later"
                )
                sock.setblocking(False)
                refusal = Frame("ERROR", {"message": reason, "truenext-code": Code.LIMIT.value})
                with suppress(OSError):
                    sock.send(encode(refusal, Version.V1_0, BROKER_FRAME_END))
                    sock.shutdown(socket.SHUT_WR)
                    # Closing a socket with something unread resets the connection, and the frame is lost.
                    sock.recv(LOGIN_BYTES_MAX)
                sock.close()
                continue
            sock.setblocking(False)
            # Batches are joined before they are written: waiting for more would only add delay.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = self._make_connection(
                sock,
                client,
                self._broker,
                self._loop,
                identity=self._identity,
                server_name=self._server_name,
                on_closed=self._on_closed,
                on_upgrade=self._control_only.discard,
                control_only_reason=self._limit_reason if is_above_limit else "",
            )
            self._connections.add(connection)
            if is_above_limit:
                extra = {"client": client, "connections": self._connections_max}
                logger.warning("connection may only send control requests: connections_max is reached", extra=extra)
                self._control_only.add(connection)

    def _resume_accepting(self) -> None:
        if not self._is_stopping:
            self._loop.add_reader(self._sock, self._on_acceptable)
