"""What is sent: the part of a message that never changes."""

import msgspec
from msgspec.structs import replace


class SentMessage(msgspec.Struct, gc=False):
    """One message as its producer sent it.

    Made once per message on the hot path, hence a struct without garbage collection: it refers to nothing that could
    refer back to it.
    """

    priority: int
    """0 to 9; 9 is served first."""
    persistent: bool
    """Survives a crash of the broker."""
    expires_ms: int
    """Milliseconds since the epoch after which it is not dispatched; 0 is never."""
    header: bytes
    """The producer's headers as UTF-8 `name:value` lines, each ended by a line feed and escaped as in STOMP 1.2
    ("Value Encoding"); `content-length` is always among them."""
    body: bytes
    arrived_ms: int = 0
    """Milliseconds since the epoch when the broker accepted it; for people, never for order."""
    group: str = ""
    """What `header` says of it (envelope.group_of); empty is none."""
    redrive_queue: str = ""
    """Of a dead letter the name of the queue that it goes back to, if its headers, which clients see, do not say it;
    empty otherwise."""


def with_ttl(message: SentMessage, ttl_ms: int, now_ms: int) -> SentMessage:
    """The same message as it is accepted now, with so many milliseconds to live: its header says when it expires.

    >>> with_ttl(SentMessage(4, True, 0, b"a:b\\n", b""), 10, 1000).header
    b'expires:1010\\na:b\\n'
    """
    expires_ms = now_ms + ttl_ms
    return replace(message, expires_ms=expires_ms, header=b"expires:%d\n%b" % (expires_ms, message.header))
