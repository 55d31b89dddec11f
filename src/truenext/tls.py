"""TLS on a non-blocking socket that tells exactly which bytes the socket has taken.

The TLS object works in memory: bytes from the socket go in, and encrypted bytes come out. `ssl.SSLSocket` is not exact:
after a blocked write it sends the bytes of that write, and reports the bytes of the next call as taken.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from hashlib import sha256
from threading import Lock
from typing import cast

CHUNK_BYTES = 64 * 1024
"""Maximum number of bytes that are encrypted at a time. Encrypted bytes must be sent, and cannot be cancelled, so the
number is low."""
_RECORD_BYTES = 16 * 1024
_HANDSHAKE = 0x16
"""First byte that a client with TLS sends."""


NO_PEM = "there is no certificate, or no private key, in PEM"
"""Reason for which files of a certificate and its key are unusable, where OpenSSL gives none."""
KEY_HINT = "; if its private key is in another file, set key (--key)"
"""End of the reason for which a file of a certificate is unusable without a file of its key."""


class NoTlsError(OSError):
    """The client does not speak TLS."""


def reason_of(error: ssl.SSLError) -> str:
    """Return the reason that OpenSSL gives for an error, in words."""
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{reason}: {error.verify_message}"
    return reason


def fault_of_files(error: ssl.SSLError, *, has_key: bool) -> str:
    """Return why a certificate's file, and its key's if it has one (`has_key`), cannot be used, in words."""
    reason = reason_of(error) if error.reason else NO_PEM
    return reason if has_key else reason + KEY_HINT


class TlsSocket:
    """Connected socket with TLS. One thread may call `send` while another calls `recv`."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, host: str | None = None) -> None:
        """Wrap a connected socket in TLS: as a client of `host`, or as a server if `host` is None."""
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=host is None, server_hostname=host)
        self._lock = Lock()
        """Held while the TLS object is used. Two threads must not use the object at once: some versions of OpenSSL
        would crash."""
        self._unsent = memoryview(b"")
        """Encrypted bytes that the socket has not taken."""
        self.encrypted_count = 0
        """Number of bytes at the beginning of the next `send` that are encrypted already, and that the socket has not
        taken yet."""
        self._records: list[tuple[int, int]] = []
        """Encrypted records, in order. For each: the offset of its end, counted from the start of the first record; and
        the number of bytes that were encrypted in it."""
        self._taken_count = 0
        """Number of encrypted bytes that the socket has taken, counted from the start of the first of `_records`."""
        self._untold_count = 0
        """Number of bytes that the socket had taken from a `send` that failed. The failed call could not return this
        number."""
        self.is_ready = False
        """True once the handshake is done, so that bytes can be sent."""
        self._is_server = host is None
        self._is_first = True
        """True until the first bytes are received."""

    @property
    def has_unsent(self) -> bool:
        """True if encrypted bytes are unsent. The caller must then call `flush` when the socket can be written to."""
        return bool(self._unsent) or self._outgoing.pending > 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def shake_hands(self, received: bytes = b"") -> bytes:
        """Continue a client's handshake with the bytes received since the last call; the first call passes no bytes.
        Returns the bytes to send. Send these even if the handshake is done (`is_ready`).

        Raises: ssl.SSLError if the handshake fails
        """
        with self._lock:
            self._incoming.write(received)
            self._shake_hands()
            return self._outgoing.read()

    def recv(self, size: int) -> bytes:
        """Read up to `size` bytes from the socket, and return the decrypted bytes; b"" at the end of the connection.

        Raises: BlockingIOError if no decrypted bytes are there yet; NoTlsError if a client does not speak TLS;
        ssl.SSLError if TLS fails; OSError if the socket has broken"""
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
                    self._flush_notices()
                if not parts:
                    raise
                # Raised again by the next call, when the peer has closed the connection.
            # Answers of the handshake.
            self._flush_notices()
            if parts or is_end:
                return b"".join(parts)
            raise BlockingIOError

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """Encrypt and write `data`, as much as the socket takes. Returns the number of bytes that the socket has taken.

        If that is less than all, the next call must begin with the remaining bytes: the first `encrypted_count` of them
        are encrypted already.

        Raises: OSError if the socket has broken
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
        """Return the number of bytes that the peer may have received, and that no `send` has counted: bytes in records
        that the socket has taken whole, and bytes that it had taken when the last `send` failed. From now on these
        bytes count as sent."""
        with self._lock:
            untold, self._untold_count = self._untold_count, 0
            taken = 0
            while self._records and self._records[0][0] <= self._taken_count:
                taken += self._records.pop(0)[1]
            self.encrypted_count -= taken
            return untold + taken

    def flush(self) -> None:
        """Write encrypted bytes that the socket has not taken yet.

        Raises: OSError if the socket has broken
        """
        with self._lock:
            self._flush()

    def shutdown(self, how: int) -> None:
        """Shut the socket down, without a notice of TLS to the peer.

        Raises: OSError if the socket has broken
        """
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()

    def close_notify(self) -> None:
        """Send TLS's notice that no more bytes follow, so that the peer does not take the end for an attack or a broken
        connection. Does nothing if bytes of a `send` are unsent."""
        with self._lock:
            if self.is_ready:
                # The peer need not answer.
                with suppress(ssl.SSLError):
                    self._tls.unwrap()
                self._flush_notices()

    @property
    def version(self) -> str | None:
        """Version of TLS, such as `TLSv1.3`; None before the handshake is done."""
        with self._lock:
            return self._tls.version()

    def peer_names(self) -> frozenset[str]:
        """Return the names in the peer's checked certificate, and the certificate's fingerprint, such as
        `DNS:shop.example` and `sha256:0f...`. The result is empty if the peer has sent no certificate."""
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
        """Encrypt bytes. Must be called only when the socket has taken all bytes that were encrypted before."""
        self.encrypted_count = len(chunk)
        self._taken_count = 0
        while chunk:
            size = self._tls.write(chunk[:_RECORD_BYTES])
            self._records.append((self._outgoing.pending, size))
            chunk = chunk[size:]

    def _take_encrypted(self) -> int:
        """Return the number of bytes that were encrypted, and note that the socket has taken all of them."""
        count, self.encrypted_count = self.encrypted_count, 0
        self._records.clear()
        return count

    def _flush_notices(self) -> None:
        """Write bytes that TLS itself generates. Behind bytes of a `send` they wait for the next `send`, which a silent
        broker does not call (C28.9)."""
        if not self.encrypted_count:
            self._flush()

    def _flush(self) -> bool:
        """Write encrypted bytes. Returns whether the socket has taken all of them."""
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
