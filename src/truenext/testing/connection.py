"""A connection of the broker that a test can cut or freeze, and its socket."""

import socket
import struct
from asyncio import AbstractEventLoop
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from truenext.broker.broker import Broker
from truenext.model.answers import Answer, CloseConnection
from truenext.server.connection import ServerConnection
from truenext.server.life import WITHOUT_SOCKET
from truenext.testing.clock import AdvanceableLoop

_RESET = struct.pack("ii", 1, 0)
"""Value of the socket option SO_LINGER with which `close` discards unsent bytes and resets the connection."""


class CloseAfterCommit(CloseConnection):
    """Answer that cuts the connection in place of the RECEIPT of a COMMIT. The broker gives this answer once the COMMIT
    is durable; after it, nothing more is sent."""


class FreezableSocket(socket.socket):
    """Socket that sends and receives nothing while it is frozen. If it is closed while it is frozen, the client sees
    the close after the thaw."""

    def __init__(self, sock: socket.socket, on_close_seen: Callable[[], None]) -> None:
        """Take over the connection of `sock`. `on_close_seen` is called when the client can see that the socket is
        closed."""
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self._on_close_seen = on_close_seen
        self.setblocking(False)
        self.is_frozen = False
        self._is_close_due = False

    def thaw(self) -> None:
        self.is_frozen = False
        if self._is_close_due:
            self.close()

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
            self._on_close_seen()


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
        """Create the connection. `loop` is an `AdvanceableLoop`. `on_close_seen` is called when the client can see that
        the socket is closed."""
        self._broker_loop = cast(AdvanceableLoop, loop)
        # `on_closed` does not tell when the client sees the close: the broker may park the session, and a frozen socket
        # is closed at its thaw.
        self._freezable = FreezableSocket(sock, partial(on_close_seen, self))
        super().__init__(self._freezable, peer_name, broker, loop, on_closed=on_closed, **others)
        self.answer = self._answer_or_cut

    @property
    def session_id(self) -> str:
        return self._session.id

    def drop(self, reason: str) -> None:
        """Cut the connection as a broken network does: bytes that were not sent or not read yet are lost."""
        self._freezable.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        if self._life.state in WITHOUT_SOCKET:
            # Closed while it was frozen: the thaw closes the socket.
            self.thaw()
            return
        self._freezable.is_frozen = False
        self._ending.on_socket_broken(reason)
        self._broker_loop.watch(self._freezable)

    def freeze(self) -> None:
        if not self._freezable.is_frozen:
            self._freezable.is_frozen = True
            self._broker_loop.unwatch(self._freezable)

    def thaw(self) -> None:
        if self._freezable.is_frozen:
            self._freezable.thaw()
            self._broker_loop.watch(self._freezable)

    def count_as_heart_beat(self) -> None:
        """Treat the client as if it had just sent a heart-beat. Advancing the broker's clock does not advance the
        client's, so real heart-beats would come too late."""
        if not self._freezable.is_frozen:
            self._input.count_as_heard()

    def close_socket(self) -> None:
        """Close the socket as the operating system does when it kills a process."""
        self._freezable.is_frozen = False
        self._freezable.close()

    def check_socket(self) -> None:
        if not self._freezable.is_frozen:
            super().check_socket()

    def _answer_or_cut(self, answer: Answer) -> None:
        if isinstance(answer, CloseAfterCommit):
            # Frames before this answer are sent. The drop comes later: a turn must not lose the connection half-way.
            self.flush()
            self.freeze()
            self._broker_loop.call_soon(self.drop, "dropped after a COMMIT, by a test")
        else:
            self._output.answer(answer)
