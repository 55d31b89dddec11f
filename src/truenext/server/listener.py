"""Listener: accepts connections on a listening socket."""

import errno
import logging
import os
import socket
import ssl
from asyncio import AbstractEventLoop, Event
from collections.abc import Callable, Mapping
from typing import NamedTuple

from truenext.broker.broker import Broker
from truenext.errors import Code, ConfigurationError, RemoteProtocolError
from truenext.model.limits import CONNECTIONS_BEFORE_LOGIN_MAX, CONNECTIONS_MAX, CONTROL_ONLY_CONNECTIONS_MAX
from truenext.model.restriction import Restriction
from truenext.model.url import Address, WireProtocol, host_and_port
from truenext.server.connection import ServerConnection
from truenext.server.session_factories import make_session_factories
from truenext.tls import TlsSocket
from truenext.wire.session import SessionFactory

logger = logging.getLogger(__name__)

BACKLOG = 1024
SOCKET_CHECK_INTERVAL_S = 1.0
"""Time between two checks for broken sockets."""
ACCEPT_RETRY_S = 1.0
"""Pause after a failed accept. The usual cause is a lack of file descriptors."""
BEFORE_LOGIN_SECONDS_MIN = 0.25
"""Time after its accept in which a connection is not ended in favour of a newer one, because its login may be on the
way."""
PLACE_CHECK_INTERVAL_S = 0.02
"""Pause before the next accept while the limit of connections before login is reached."""


class Places(NamedTuple):
    """Limits of the connections of one listener."""

    connections: int
    """Maximum number of connections that have logged in. A few more may log in, but may then only send control
    requests."""
    before_login: int
    """Maximum number of connections that have not logged in yet."""


ALL_PLACES = Places(CONNECTIONS_MAX, CONNECTIONS_BEFORE_LOGIN_MAX)


class ListenerTls:
    """TLS of all listeners. A reload replaces `context`; connections that exist already keep the old context."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self.context = context

    def wrap(self, sock: socket.socket) -> TlsSocket:
        assert self.context is not None, "a listener with TLS has a certificate"
        return TlsSocket(sock, self.context)


class Listener:
    """Accepts the clients of one address, which speak the protocol of its scheme."""

    def __init__(
        self,
        address: Address,
        broker: Broker,
        loop: AbstractEventLoop,
        *,
        identity: str,
        server_name: str,
        session_factories: Mapping[WireProtocol, SessionFactory] | None = None,
        places: Places = ALL_PLACES,
        tls: ListenerTls | None = None,
        make_connection: Callable[..., ServerConnection] = ServerConnection,
    ) -> None:
        """Listen on `address`. `session_factories` are those of the broker; None makes some for this listener
        alone. `make_connection` takes the arguments of ServerConnection, and returns one.

        Raises: ConfigurationError if the address cannot be listened on.
        """
        self._broker = broker
        self._loop = loop
        self._identity = identity
        self._server_name = server_name
        self._connections: set[ServerConnection] = set()
        self._control_only: set[ServerConnection] = set()
        """Connections beyond `places.connections`, which may only send control requests."""
        self._before_login: dict[ServerConnection, float] = {}
        """Connections that have not logged in, the oldest first, with the loop time of their accept."""
        self._places = places
        self._tls = tls
        self._protocol = address.protocol
        self._make_session = (session_factories or make_session_factories())[address.protocol]
        self._make_connection = make_connection
        self._limit_reason = f"the listener has {places.connections} connections, the most that it accepts"
        if places.connections < CONNECTIONS_MAX:
            self._limit_reason += " with the system's limit of open files (ulimit -n)"
        self._all_closed = Event()
        """Set when the last connection is closed; only `close` waits for it."""
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
                if error.errno == errno.EADDRINUSE:
                    reason += "; stop the program that listens there, perhaps another broker, or choose another port"
            raise ConfigurationError(
                f"cannot listen on {host_and_port(address.host, address.port)}: {reason}"
            ) from error
        self._sock.setblocking(False)
        loop.add_reader(self._sock, self._on_acceptable)
        self._check_timer = loop.call_later(SOCKET_CHECK_INTERVAL_S, self._check_sockets)

    @property
    def url(self) -> str:
        """URL of this listener, with the port that the system has chosen if port 0 was asked for."""
        host, port = self._sock.getsockname()[:2]
        return Address(host=host, port=port, has_tls=self._tls is not None, protocol=self._protocol).url

    def stop_reading(self) -> None:
        """Accept no more connections, and stop reading the existing ones."""
        self._is_stopping = True
        self._check_timer.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for connection in self._connections:
            connection.stop_reading()

    async def close(self) -> None:
        """Close all connections. Returns once every client has closed its side, or the time for that is over."""
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
        self._before_login.pop(connection, None)
        if not self._connections:
            self._all_closed.set()

    def _on_acceptable(self) -> None:
        if len(self._before_login) >= self._places.before_login and not self._free_place_before_login():
            # Meanwhile the connections before their login may send it.
            self._pause_accepting(PLACE_CHECK_INTERVAL_S)
            return
        while True:
            try:
                sock, peer = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                logger.error("cannot accept connections", extra={"listener": self.url, "reason": str(error)})
                self._pause_accepting(ACCEPT_RETRY_S)
                return
            sock.setblocking(False)
            # Batches are joined before they are written: waiting for more would only add delay.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = self._make_connection(
                sock,
                host_and_port(peer[0], peer[1]),
                self._broker,
                self._loop,
                identity=self._identity,
                server_name=self._server_name,
                on_login=self._assign_place,
                tls=None if self._tls is None else self._tls.wrap(sock),
                on_closed=self._on_closed,
                make_session=self._make_session,
            )
            self._connections.add(connection)
            self._before_login[connection] = self._loop.time()
            if len(self._before_login) >= self._places.before_login:
                # The loop calls again if another client waits.
                return

    def _free_place_before_login(self) -> bool:
        """End the oldest connection that has sent no login, unless that connection is younger than
        BEFORE_LOGIN_SECONDS_MIN. Returns whether one more connection may be accepted."""
        for connection, accepted_at in self._before_login.items():
            if self._loop.time() - accepted_at < BEFORE_LOGIN_SECONDS_MIN:
                return False
            if not connection.has_sent_login:
                connection.end_before_login(self._places.before_login)
                return True
        return False

    def _assign_place(
        self, connection: ServerConnection, may_exceed: bool, restriction: Restriction | None
    ) -> Restriction | None:
        """Give a connection one of the places (`connections` of `_places`) at its login. Returns None if the connection
        got a place. If all are taken, a connection that `may_exceed` the limit is still admitted if its protocol has
        control requests, but for these alone, and only while few such connections are open. Then the reason is
        returned. With a `restriction` a connection that gets a place is treated so, too.

        Raises: RemoteProtocolError if the connection is not admitted
        """
        self._before_login.pop(connection, None)
        place_count = len(self._connections) - len(self._before_login) - len(self._control_only) - 1
        is_full = place_count >= self._places.connections
        if not (is_full or restriction):
            return None
        # A drain comes first: a client waits for its end, but not for fewer connections.
        restriction = restriction or Restriction(self._limit_reason, Code.LIMIT)
        reason, code = restriction
        is_beyond = is_full and len(self._control_only) >= CONTROL_ONLY_CONNECTIONS_MAX
        extra = {"client": connection.client_info.address, "connections": self._places.connections}
        has_control_requests = connection.has_control_requests
        may_exceed = may_exceed and has_control_requests
        if not may_exceed or is_beyond:
            # Counted as before its login until it has ended.
            self._before_login[connection] = self._loop.time()
        if not has_control_requests:
            raise RemoteProtocolError(f"{reason}: try again later", code)
        if not may_exceed:
            allowed = "exceed it" if code is Code.LIMIT else "log in now"
            raise RemoteProtocolError(
                f"{reason}, and only users with the right monitor or admin may {allowed}: try again later", code
            )
        if is_beyond:
            logger.error("connection refused: connections_max is reached, also for control requests", extra=extra)
            raise RemoteProtocolError(
                f"{self._limit_reason}, and {CONTROL_ONLY_CONNECTIONS_MAX} more for control requests alone: "
                "try again later",
                Code.LIMIT,
            )
        if is_full:
            logger.warning("connection may only send control requests: connections_max is reached", extra=extra)
            self._control_only.add(connection)
        return restriction

    def _pause_accepting(self, seconds: float) -> None:
        self._loop.remove_reader(self._sock)
        self._loop.call_later(seconds, self._resume_accepting)

    def _resume_accepting(self) -> None:
        if not self._is_stopping:
            self._loop.add_reader(self._sock, self._on_acceptable)
