"""A connection that a test can cut or freeze, and its socket."""

import socket
import struct
from asyncio import AbstractEventLoop
from collections.abc import Callable
from typing import Any, cast

from truenext.broker.broker import Broker
from truenext.model.answers import Answer, CloseConnection
from truenext.server.connection import ServerConnection
from truenext.testing.clock import AdvanceableLoop

_RESET = struct.pack("ii", 1, 0)
"""Value of SO_LINGER: closing discards unsent bytes and resets the connection."""


class CloseAfterCommit(CloseConnection):
    """Answer that cuts the connection once the COMMIT before is durable: nothing that follows is sent."""


class FreezableSocket(socket.socket):
    """Socket that transfers nothing while frozen; the other side does not see a close before the thaw."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self.setblocking(False)
        self.is_frozen = False
        self._is_close_due = False

    def thaw(self) -> None:
        self.is_frozen = False
        if self._is_close_due:
            super().close()

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        if self.is_frozen:
            raise BlockingIOError
        return super().recv(size, flags)

    def send(self, data: Any, flags: int = 0, /) -> int:
        if self.is_frozen:
            raise BlockingIOError
        return super().send(data, flags)

    def shutdown(self, how: int, /) -> None:
        # A close follows each shutdown soon.
        if not self.is_frozen:
            super().shutdown(how)

    def close(self) -> None:
        if self.is_frozen:
            self._is_close_due = True
        else:
            super().close()


class CuttableConnection(ServerConnection):
    def __init__(
        self,
        sock: socket.socket,
        peer_name: str,
        broker: Broker,
        loop: AbstractEventLoop,
        *,
        on_closed: Callable[[ServerConnection], None],
        on_close_seen: Callable[["CuttableConnection"], None],
        **others: Any,
    ) -> None:
        """`loop` is an `AdvanceableLoop`; `on_close_seen` is called once the client can see the close."""
        self._broker_loop = cast(AdvanceableLoop, loop)
        self._socket = FreezableSocket(sock)
        self._forward_closed = on_closed
        self._on_close_seen = on_close_seen
        super().__init__(self._socket, peer_name, broker, loop, on_closed=self._on_connection_closed, **others)

    @property
    def session_id(self) -> str:
        return self._session.id

    def drop(self, reason: str) -> None:
        """Cut the connection as a network does: bytes that are not sent or not read yet are lost."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        if self._is_closed:
            # Closed while it was frozen: the thaw closes the socket.
            self.thaw()
            return
        self._socket.is_frozen = False
        self._on_socket_broken(reason)
        self._broker_loop.watch(self._socket)

    def freeze(self) -> None:
        if not self._socket.is_frozen:
            self._socket.is_frozen = True
            self._broker_loop.unwatch(self._socket)

    def thaw(self) -> None:
        if self._socket.is_frozen:
            self._socket.thaw()
            self._broker_loop.watch(self._socket)
            if self._is_closed:
                self._on_close_seen(self)

    def count_as_heart_beat(self) -> None:
        """Count the client's heart-beats as received: its own clock did not advance with the broker's."""
        if not self._socket.is_frozen:
            self._last_received_at = self._loop.time()

    def close_socket(self) -> None:
        """Close the socket as the system does for a killed process."""
        self._socket.is_frozen = False
        self._socket.close()

    def check_socket(self) -> None:
        if not self._socket.is_frozen:
            super().check_socket()

    def answer(self, answer: Answer) -> None:
        if isinstance(answer, CloseAfterCommit):
            # Frames before this answer are sent. The drop comes later: a turn must not lose the connection half-way.
            self.flush()
            self.freeze()
            self._broker_loop.call_soon(self.drop, "dropped after a COMMIT, by a test")
        else:
            super().answer(answer)

    def _close_socket(self) -> None:
        super()._close_socket()
        # Reported here, not in `on_closed`: the broker may park the session. A frozen socket is closed at its thaw.
        if not self._socket.is_frozen:
            self._on_close_seen(self)

    def _on_connection_closed(self, connection: ServerConnection) -> None:
        self._forward_closed(connection)
