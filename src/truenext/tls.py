"""TLS on a non-blocking socket, with exact knowledge of which bytes the socket has taken.

The TLS object works in memory: bytes of the socket go in, and encrypted bytes come out. `ssl.SSLSocket` does not do:
after a blocked write it sends the old bytes, and reports others as taken.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from hashlib import sha256
from threading import Lock
from typing import cast

CHUNK_BYTES = 64 * 1024
"""Bytes that are encrypted at a time. They cannot be taken back any more, so they are few."""
_RECORD_BYTES = 16 * 1024
_HANDSHAKE = 0x16
"""First byte of a client that speaks TLS."""


class NoTlsError(OSError):
    """The client does not speak TLS."""


def reason_of(error: ssl.SSLError) -> str:
    """Return OpenSSL's reason for an error, in words."""
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{reason}: {error.verify_message}"
    return reason


class TlsSocket:
    """Connected socket with TLS. `send` and `recv` may be called by two threads at a time."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, host: str | None = None) -> None:
        """Begin as a client of `host`, or, without it, as a server."""
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=host is None, server_hostname=host)
        self._lock = Lock()
        """Held for the TLS object: it is not made for two threads, and some versions of it crash."""
        self._unsent = memoryview(b"")
        """Encrypted bytes that the socket has not taken."""
        self.encrypted_count = 0
        """Bytes of the next `send` that are encrypted already, and that the socket has not taken yet."""
        self._records: list[tuple[int, int]] = []
        """Encrypted records, in order: end in the bytes for the socket, and number of bytes that it encrypts."""
        self._taken_count = 0
        """Bytes for the socket that it has taken since the first of `_records` began."""
        self._untold_count = 0
        """Bytes that the socket had taken when a `send` failed."""
        self.is_ready = False
        """The handshake is done; bytes can be sent only now."""
        self._is_server = host is None
        self._is_first = True
        """True until the first bytes are received."""

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` must be called when the socket can be written to."""
        return bool(self._unsent) or self._outgoing.pending > 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def shake_hands(self, received: bytes = b"") -> bytes:
        """Go on with a client's handshake; nothing is received before the first call. Returns the bytes to send, also
        if the handshake is done (`is_ready`) with them.

        Raises: ssl.SSLError
        """
        with self._lock:
            self._incoming.write(received)
            self._shake_hands()
            return self._outgoing.read()

    def recv(self, size: int) -> bytes:
        """Read up to `size` bytes from the socket, and return all that they decrypt to; b"" at the end.

        Raises: BlockingIOError if that is nothing yet, NoTlsError, ssl.SSLError, OSError
        """
        with self._lock:
            data = self._sock.recv(size)
            if not data:
                return b""
            if self._is_first:
                self._is_first = False
                if self._is_server and data[0] != _HANDSHAKE:
                    raise NoTlsError("the client does not speak TLS")
            incoming = self._incoming
            incoming.write(data)
            parts: list[bytes] = []
            is_end = False
            try:
                if self.is_ready or self._shake_hands():
                    while part := self._tls.read(_RECORD_BYTES):
                        parts.append(part)
                        if not incoming.pending:
                            # A read returns a whole record, so none is left. Another read would only raise.
                            break
                    else:
                        is_end = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLZeroReturnError:
                is_end = True
            except ssl.SSLError:
                with suppress(OSError):
                    # The alert that tells the peer what is wrong.
                    self._flush()
                if not parts:
                    raise
                # Raised again by the next call, when the peer has closed the connection.
            if self._outgoing.pending:
                # Answers of the handshake.
                self._flush()
            if parts or is_end:
                return b"".join(parts)
            raise BlockingIOError

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """Encrypt and write the beginning of `data`. Returns the number of bytes that the socket has taken.

        The first `encrypted_count` bytes are those of the call before: a caller that got fewer than it gave must give
        the rest again, with whatever follows.

        Raises: OSError
        """
        with self._lock:
            if not self.is_ready or not self._flush():
                return 0
            taken = self._take_encrypted()
            size = len(data)
            view = memoryview(data)
            try:
                while taken < size:
                    self._encrypt(view[taken : taken + CHUNK_BYTES])
                    if not self._flush():
                        break
                    taken += self._take_encrypted()
            except OSError:
                self._untold_count = taken
                raise
            return taken

    def take_sent_records(self) -> int:
        """Return how many bytes the peer may have, though no `send` has returned them: of those that are encrypted, as
        the socket has taken their records whole, and of those before, if the last `send` failed. They count as returned
        by `send` then."""
        with self._lock:
            untold, self._untold_count = self._untold_count, 0
            taken = 0
            while self._records and self._records[0][0] <= self._taken_count:
                taken += self._records.pop(0)[1]
            self.encrypted_count -= taken
            return untold + taken

    def flush(self) -> None:
        """Write encrypted bytes that the socket has not taken yet. Raises: OSError"""
        with self._lock:
            self._flush()

    def shutdown(self, how: int) -> None:
        """Shut the socket down, without telling TLS. Raises: OSError"""
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()

    def close_notify(self) -> None:
        """Tell the peer that no more bytes follow, so that the end is not taken for a cut; after all is sent."""
        with self._lock:
            if self.is_ready:
                # The peer need not answer.
                with suppress(ssl.SSLError):
                    self._tls.unwrap()
                self._flush()

    def peer_names(self) -> frozenset[str]:
        """Return the names in the checked certificate of the peer, and its fingerprint, such as `DNS:shop.example` and
        `sha256:0f...`; none if it has sent no certificate."""
        with self._lock:
            certificate, encoded = self._tls.getpeercert(), self._tls.getpeercert(binary_form=True)
        if not encoded:
            return frozenset()
        alternatives = cast("tuple[tuple[str, str], ...]", (certificate or {}).get("subjectAltName", ()))
        names = {f"{kind}:{name}" for kind, name in alternatives}
        return frozenset(names | {f"sha256:{sha256(encoded).hexdigest()}"})

    def _shake_hands(self) -> bool:
        """Go on with the handshake. Returns whether it is done."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        self.is_ready = True
        return True

    def _encrypt(self, chunk: memoryview) -> None:
        """Encrypt bytes, now that the socket has taken all that was encrypted before."""
        self.encrypted_count = len(chunk)
        self._taken_count = 0
        while chunk:
            size = self._tls.write(chunk[:_RECORD_BYTES])
            self._records.append((self._outgoing.pending, size))
            chunk = chunk[size:]

    def _take_encrypted(self) -> int:
        """Return how many bytes were encrypted, now that the socket has taken all of them."""
        count, self.encrypted_count = self.encrypted_count, 0
        self._records.clear()
        return count

    def _flush(self) -> bool:
        """Write encrypted bytes. Returns whether the socket has taken all."""
        while True:
            if not self._unsent:
                if not self._outgoing.pending:
                    return True
                self._unsent = memoryview(self._outgoing.read())
            try:
                count = self._sock.send(self._unsent)
                self._unsent = self._unsent[count:]
                self._taken_count += count
            except (BlockingIOError, InterruptedError):
                return False
