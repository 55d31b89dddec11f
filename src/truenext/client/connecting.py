"""Steps that connect a socket, with or without TLS. Each driver runs the steps and waits for the socket in its own
way."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import ssl
from collections.abc import Generator, Iterable
from typing import Any, TypeVar

from truenext.client.core.client import Client
from truenext.client.tls_context import make_context, reason_of
from truenext.model.limits import READ_BYTES
from truenext.model.url import Address
from truenext.tls import TlsSocket

T = TypeVar("T")

AddressInfo = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[Any, ...]]
"""One address of a host, as `socket.getaddrinfo` returns it."""

Steps = Generator[tuple[socket.socket, int], None, T]
"""Generator that yields a socket and an event of `selectors`. The driver resumes the generator after this event."""

_IN_PROGRESS = frozenset({errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EAGAIN, errno.EALREADY, errno.EINTR})


def connect_steps(client: Client, address: Address, infos: Iterable[AddressInfo]) -> Steps[socket.socket | TlsSocket]:
    """Connect a socket to the first of the host's addresses that answers.

    The driver may throw an error into the steps, such as a timeout. The error counts as a failure of the address being
    tried. If the driver closes the steps early, the socket is closed.

    Raises: OSError if no address answers; ConfigurationError if a file for TLS cannot be used
    """
    errors: list[OSError] = []
    for family, kind, protocol, _, sockaddr in infos:
        sock = socket.socket(family, kind, protocol)
        try:
            yield from _connect_socket(sock, sockaddr)
            client.is_listening = True
            return (yield from _shake_hands(client, sock, address)) if address.has_tls else sock
        except BaseException as error:
            sock.close()
            # An error of TLS says more than that of an address that does not answer.
            if client.is_listening or not isinstance(error, OSError):
                raise
            errors.append(error)
    raise errors[0] if errors else OSError(f"{address.host} has no address")


def _connect_socket(sock: socket.socket, sockaddr: tuple[Any, ...]) -> Steps[None]:
    sock.setblocking(False)
    # Small writes are sent without delay.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    code = sock.connect_ex(sockaddr)
    while code in _IN_PROGRESS:
        yield sock, selectors.EVENT_WRITE
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def _shake_hands(client: Client, sock: socket.socket, address: Address) -> Steps[TlsSocket]:
    tls = TlsSocket(sock, make_context(client.options.credentials), host=address.host)
    try:
        yield from handshake_steps(sock, tls)
    except ssl.SSLError as error:
        raise OSError(reason_of(error, client.options.credentials)) from error
    return tls


def handshake_steps(sock: socket.socket, tls: TlsSocket) -> Steps[None]:
    """Do the TLS handshake as the client, over a connected socket. With a blocking socket the steps themselves block.

    Raises: ssl.SSLError if the handshake fails; OSError if the connection fails
    """
    received = b""
    while not tls.is_ready:
        try:
            output = memoryview(tls.shake_hands(received))
        except ssl.SSLError:
            with contextlib.suppress(OSError):
                # The alert, by which the broker knows the reason.
                tls.flush()
            raise
        while output:
            try:
                output = output[sock.send(output) :]
            except (BlockingIOError, InterruptedError):
                yield sock, selectors.EVENT_WRITE
        if not tls.is_ready:
            received = yield from _receive(sock)


def _receive(sock: socket.socket) -> Steps[bytes]:
    while True:
        yield sock, selectors.EVENT_READ
        with contextlib.suppress(BlockingIOError, InterruptedError):
            if received := sock.recv(READ_BYTES):
                return received
            raise OSError("the broker has closed the connection during the TLS handshake")
