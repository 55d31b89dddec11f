"""Base class of both drivers. It has the client, its socket, and the bytes that the socket has not accepted yet."""

from __future__ import annotations

import os
import random
import socket
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from truenext.client.core.buffer import ReceivedMessage
from truenext.client.core.client import Client, ConnectOptions
from truenext.client.core.context import ClientContext
from truenext.client.core.link import Link
from truenext.client.password_file import current_password
from truenext.client.tls_context import check_files, reason_of
from truenext.model.url import Address
from truenext.tls import TlsSocket


class BaseDriver(ABC):
    def __init__(
        self,
        options: ConnectOptions,
        name: str,
        make_message: type[ReceivedMessage],
        *,
        clock: Callable[[], float],
        report: Callable[[str, dict[str, object]], None],
        has_owner_ended: Callable[[object], bool],
    ) -> None:
        """Check that the client can read the files of its credentials, and make the client.

        Raises: ConfigurationError if a file cannot be used
        """
        current_password(options.credentials)
        check_files(options.credentials, options.addresses)
        self.process_id = os.getpid()
        context = ClientContext(
            clock=clock,
            random=random.random,
            flush=self.flush,
            flush_soon=self._flush_soon,
            flush_later=self._flush_later,
            report=report,
            has_owner_ended=has_owner_ended,
        )
        self.client = Client(options, name, context, make_message)
        self._sock: socket.socket | TlsSocket | None = None
        self._link: Link | None = None
        """Link whose bytes go through the socket."""
        self._unwritten: memoryview | None = None
        self._write_error: OSError | None = None
        self._write_lock = threading.Lock() if options.heartbeat_thread else None
        """Lock that guards the socket's writes and `_unwritten`. None without a heart-beat thread, which writes,
        too."""
        self._is_flush_due = False
        """True if `flush` must be called at the end of the current step."""

    def _start_link(self, sock: socket.socket | TlsSocket, address: Address, password: str | None) -> None:
        self._link = None
        self._sock = sock
        self._unwritten = None
        self._write_error = None
        self.client.on_socket_connected(address, password)
        self._link = self.client.link

    def _on_socket_lost(self, error: Exception) -> None:
        if isinstance(error, ssl.SSLError):
            error = OSError(reason_of(error))
        if self.client.link is self._link:
            self.client.on_connection_lost(error)

    def flush(self) -> bool:
        """Write pending bytes; return whether the socket has accepted all of them."""
        self._is_flush_due = False
        sock, unwritten = self._sock, self._unwritten
        if sock is None or unwritten is not None:
            return False
        out = self.client.data_to_send()
        if not out:
            return True
        data = out[0] if len(out) == 1 else b"".join(out)
        lock = self._write_lock
        if lock is not None:
            lock.acquire()
        try:
            if self._unwritten is not None:
                # The heart-beat thread has begun a heart-beat that the socket has not accepted.
                data = b"".join([self._unwritten, data])
            # The same as `_send`, without the cost of a call for each message.
            try:
                written = sock.send(data)
            except (BlockingIOError, InterruptedError):
                written = 0
            except OSError as error:
                self._write_error = error
            else:
                if written == len(data):
                    self._unwritten = None
                    return True
            if self._write_error is None:
                self._unwritten = memoryview(data)[written:]
        finally:
            if lock is not None:
                lock.release()
        self._on_not_written(sock)
        return False

    @abstractmethod
    def _on_not_written(self, sock: socket.socket | TlsSocket) -> None:
        """Arrange that the loop or the thread writes the unwritten bytes later, or handles the error of the write."""

    def _send(self, sock: socket.socket | TlsSocket, data: bytes | memoryview) -> None:
        """Write bytes to the socket. Store bytes that the socket does not accept in `_unwritten`, an error in
        `_write_error`."""
        try:
            written = sock.send(data)
        except (BlockingIOError, InterruptedError):
            written = 0
        except OSError as error:
            self._write_error = error
            return
        self._unwritten = memoryview(data)[written:] if written < len(data) else None

    @abstractmethod
    def _flush_soon(self) -> None: ...

    def _flush_later(self) -> None:
        self._flush_soon()

    def disconnect_nowait(self) -> None:
        """Send DISCONNECT, and return without waiting for the answer."""
        flow = self.client.close(None)
        for _ in flow:
            self.flush()
            flow.close()
