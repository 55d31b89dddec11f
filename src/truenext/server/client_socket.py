"""Client socket: the socket of one client, with TLS if its listener has it, in the event loop.

The loop calls it directly, not through an asyncio transport. In auto mode a message counts as acknowledged once the
socket has taken its bytes. So the broker must know which bytes the socket has taken, even when the connection breaks.
"""

import socket
from asyncio import AbstractEventLoop
from collections.abc import Callable

from truenext.tls import TlsSocket


class ClientSocket:
    def __init__(self, sock: socket.socket, tls: TlsSocket | None, loop: AbstractEventLoop) -> None:
        """With `tls`, all bytes pass through the TLS object."""
        self._sock = sock
        self._loop = loop
        self.tls = tls
        channel = sock if tls is None else tls
        self.recv: Callable[[int], bytes] = channel.recv
        self.send: Callable[[bytes | bytearray | memoryview], int] = channel.send
        self.on_broken: Callable[[str], None] = lambda _: None
        """Called with a reason when the event loop reports that the socket has broken. `Ending.attach` sets it."""

    def watch_reads(self, action: Callable[[], None]) -> None:
        self._watch(self._loop.add_reader, action)

    def watch_writes(self, action: Callable[[], None]) -> None:
        self._watch(self._loop.add_writer, action)

    def _watch(self, add: Callable[[socket.socket, Callable[[], None]], object], action: Callable[[], None]) -> None:
        try:
            add(self._sock, action)
        except RuntimeError:
            # uvloop raises it after it has seen the socket break.
            self._loop.call_soon(self.on_broken, "connection broken")

    def unwatch_reads(self) -> None:
        self._loop.remove_reader(self._sock)

    def unwatch_writes(self) -> None:
        self._loop.remove_writer(self._sock)

    def is_broken(self) -> bool:
        return bool(self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def drop_tls(self) -> None:
        """Continue without TLS, because the client does not speak TLS."""
        self.tls = None
        self.recv = self._sock.recv
        self.send = self._sock.send

    def half_close(self) -> None:
        """Close our side of the socket. With TLS, the client is notified first.

        Raises: OSError if the socket has broken
        """
        if self.tls is not None:
            self.tls.close_notify()
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.unwatch_reads()
        self.unwatch_writes()
        self._sock.close()
