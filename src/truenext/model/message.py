"""Sent message: the part of a message that never changes."""

import msgspec
from msgspec.structs import replace


class SentMessage(msgspec.Struct, gc=False):
    """Message as its producer sent it.

    One is made per message on the hot path, therefore a struct without garbage collection: it refers to nothing that
    could refer back to it.
    """

    priority: int
    """Priority from 0 to 9; 9 is served first."""
    persistent: bool
    """True if the message survives a crash of the broker."""
    expires_ms: int
    """Milliseconds since the epoch after which the message is not dispatched; 0 is never."""
    header: bytes
    """The producer's headers as UTF-8 `name:value` lines, each ended by a line feed and escaped as in STOMP 1.2
    ("Value Encoding"); `content-length` is always among them."""
    body: bytes
    arrived_ms: int = 0
    """Milliseconds since the epoch when the broker accepted the message; for people, never for order."""
    group: str = ""
    """Group named in `header` (header_lines.group_of); "" is none."""
    redrive_queue: str = ""
    """Queue to re-drive a dead letter to, if its headers, which clients see, do not name it; "" otherwise."""


def with_ttl(message: SentMessage, ttl_ms: int, now_ms: int) -> SentMessage:
    r"""Return a copy of a message accepted now that expires after `ttl_ms`: its header states when.

    >>> with_ttl(SentMessage(4, True, 0, b"a:b\n", b""), 10, 1000).header
    b'expires:1010\na:b\n'
    """
    expires_ms = now_ms + ttl_ms
    return replace(message, expires_ms=expires_ms, header=b"expires:%d\n%b" % (expires_ms, message.header))
