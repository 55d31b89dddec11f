"""TLS of a blocking connection, with the methods of a blocking socket.

One thread reads and another one writes heart-beats, but two threads must not use a TLS object at the same time. With a
blocking `ssl.SSLSocket` and a lock, a reader that waits for the broker would delay the heart-beats. So the stream uses
a TlsSocket, which locks but never blocks, and waits for the socket without that lock.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import ssl

from truenext.client.connecting import handshake_steps
from truenext.clock import monotonic
from truenext.tls import TlsSocket

WRITE_SECONDS = 60.0
"""Seconds for which a write may wait until the broker reads more."""
# With poll, unlike with epoll, a thread that waits for a socket is woken when another one shuts it down and closes it.
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)


class TlsStream:
    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str) -> None:
        """Do the TLS handshake with `host` over a connected socket. Each step may take the socket's timeout.

        Raises: ssl.SSLError if the handshake fails; OSError if the connection fails
        """
        self._sock = sock
        self._tls = TlsSocket(sock, context, host=host)
        self._timeout_s = sock.gettimeout() or 0.0
        for _ in handshake_steps(sock, self._tls):
            # The step itself has waited for the socket.
            pass
        sock.setblocking(False)

    def settimeout(self, seconds: float) -> None:
        """Set the seconds for which `recv` waits for a byte."""
        self._timeout_s = seconds

    def recv(self, size: int) -> bytes:
        """Return received bytes, at least one; b"" if the broker has closed the connection.

        Raises: TimeoutError after the timeout; ssl.SSLError, OSError if the connection fails
        """
        deadline = monotonic() + self._timeout_s
        while True:
            try:
                return self._tls.recv(size)
            except (BlockingIOError, InterruptedError):
                self._wait(selectors.EVENT_READ, deadline - monotonic())

    def sendall(self, data: bytes) -> None:
        """Write all of `data`. Only one thread at a time may call this.

        Raises: TimeoutError if the broker does not read; ssl.SSLError, OSError if the connection fails
        """
        unsent = memoryview(data)
        while unsent:
            sent = self._tls.send(unsent)
            unsent = unsent[sent:]
            if not sent:
                self._wait(selectors.EVENT_WRITE, WRITE_SECONDS)

    def shutdown(self, how: int) -> None:
        self._tls.shutdown(how)

    def close(self) -> None:
        self._tls.close()

    def _wait(self, event: int, seconds: float) -> None:
        """Wait until the socket is ready for `event`: reading or writing.

        Raises: TimeoutError after `seconds`; OSError if the socket is closed
        """
        with _Selector() as selector:
            try:
                selector.register(self._sock, event)
            except ValueError:
                # Another thread has closed the socket.
                raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None
            if not selector.select(max(0.0, seconds)):
                raise TimeoutError("timed out")
