"""How much of the broker's memory messages take, and when some of them have to leave it."""

from __future__ import annotations

from sys import maxsize
from typing import TYPE_CHECKING

from truenext.limits import UNSENT_BYTES_MAX

if TYPE_CHECKING:
    from truenext.message import Message

ENTRY_BYTES = 400
"""What a message costs beside its header and body, roughly: objects of this language, and their places in lists."""

UNSENT_MARK_MIN = 4 * UNSENT_BYTES_MAX
"""Bytes that all sockets together may have waiting, however small the limit."""


class Memory:
    __slots__ = ("leaving", "limit", "open", "unsent", "unsent_mark", "unsent_max", "used")

    def __init__(self, limit: int = maxsize) -> None:
        self.limit = limit
        """Bytes that messages may take before some leave; those of open transactions and sockets count too."""
        self.used = 0
        """Bytes of messages in queues and windows."""
        self.leaving = 0
        """How much of that goes by itself as soon as a write under way is durable."""
        self.unsent = 0
        """Bytes of messages that sockets have not taken."""
        self.unsent_mark = max(limit // 4, UNSENT_MARK_MIN)
        """So much of that is enough: from there on each connection gets one message at a time."""
        self.unsent_max = UNSENT_BYTES_MAX
        """Bytes that one connection's socket may have waiting before its windows shut."""
        self.open = 0
        """Bytes of sends in open transactions."""

    @property
    def excess(self) -> int:
        """Bytes over the limit; they have to leave."""
        return self.used - self.leaving + self.unsent + self.open - self.limit

    @property
    def open_max(self) -> int:
        """Bytes that sends in open transactions may take, unless it is one."""
        return self.limit // 4

    def has_room_to_open(self, size: int) -> bool:
        """An open transaction may grow by a send of `size` bytes."""
        return not self.open or self.open + size <= self.open_max


def size_of(message: Message) -> int:
    """Bytes of memory that a waiting message takes, roughly."""
    return len(message.body) + len(message.header) + ENTRY_BYTES
