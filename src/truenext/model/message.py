"""Sent message: the part of a message that never changes while it is in its queue."""

import msgspec
from msgspec.structs import replace

STOMP_FORM, OPENWIRE_FORM = 0, 1
"""Forms of a message: the protocol in whose bytes `header` and `body` are."""


class SentMessage(msgspec.Struct, gc=False):
    """Message as its producer sent it.

    So that it is made quickly, it is a struct without garbage collection. It refers to no object that could refer back
    to it.
    """

    priority: int
    """Priority from 0 to 9; 9 is served first."""
    persistent: bool
    """True if the message survives a crash of the broker."""
    expires_ms: int
    """Milliseconds since the epoch after which the message is not dispatched; 0 is never."""
    header: bytes
    """The producer's headers as UTF-8 `name:value` lines, each ended by a line feed and escaped as in STOMP 1.2
    ("Value Encoding"); `content-length` is always among them. In OPENWIRE_FORM only the lines that the broker has
    added: `header_lines` (openwire_message.py) returns all lines of a message of either form."""
    body: bytes
    """The producer's body. In OPENWIRE_FORM the whole message, without the fields that belong to the broker
    (openwire_message.py)."""
    arrived_ms: int = 0
    """Milliseconds since the epoch when the broker accepted the message. Shown to people; never used for the order of
    messages."""
    group: str = ""
    """Group that `header` names; "" if it names none."""
    redrive_queue: str = ""
    """Queue to which a dead letter is moved when it is re-driven; "" if the dead letter's headers name this queue, or
    the message is no dead letter."""
    form: int = STOMP_FORM
    is_text: bool = False
    """True in STOMP_FORM if the producer has sent no `content-length`: JMS clients get text if `body` is UTF-8."""
    growth: int = 0
    """Bytes by which `body` grows for clients that get it decompressed. They count as unsent bytes of each dispatch."""


def with_due(message: SentMessage, due_ms: int) -> SentMessage:
    r"""Return a copy of a message that was scheduled for `due_ms`. Its header `truenext-due` says so.

    >>> with_due(SentMessage(4, True, 0, b"a:b\n", b""), 1000).header
    b'truenext-due:1000\na:b\n'
    """
    return replace(message, header=b"truenext-due:%d\n%b" % (due_ms, message.header))


def with_ttl(message: SentMessage, ttl_ms: int, now_ms: int) -> SentMessage:
    r"""Return a copy of a message that is accepted now. The copy expires after `ttl_ms`; its header `expires` says so.

    >>> with_ttl(SentMessage(4, True, 0, b"a:b\n", b""), 10, 1000).header
    b'expires:1010\na:b\n'
    """
    expires_ms = now_ms + ttl_ms
    return replace(message, expires_ms=expires_ms, header=b"expires:%d\n%b" % (expires_ms, message.header))
