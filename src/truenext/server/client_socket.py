"""Client socket: the socket of one client, with TLS if its listener has it, in the event loop.

The socket is driven directly, not through a transport: in auto mode a message counts as acknowledged once the socket
has taken its bytes, so we must know exactly which bytes it has taken, at the moment the connection is lost too.
"""

import socket
from asyncio import AbstractEventLoop
from collections.abc import Callable

from truenext.tls import TlsSocket


class ClientSocket:
    def __init__(self, sock: socket.socket, tls: TlsSocket | None, loop: AbstractEventLoop) -> None:
        """With `tls`, all bytes pass through it."""
        self._sock = sock
        self._loop = loop
        self.tls = tls
        channel = sock if tls is None else tls
        self.recv: Callable[[int], bytes] = channel.recv
        self.send: Callable[[bytes | bytearray | memoryview], int] = channel.send
        self.on_broken: Callable[[str], None] = lambda _: None
        """Called with the reason when the loop finds the socket broken; set by the code that ends the connection."""

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
        """Go on without TLS, with a client that does not speak it."""
        self.tls = None
        self.recv = self._sock.recv
        self.send = self._sock.send

    def half_close(self) -> None:
        """Close our side. Raises: OSError"""
        if self.tls is not None:
            self.tls.close_notify()
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.unwatch_reads()
        self.unwatch_writes()
        self._sock.close()
