"""Ids: of messages, and those by which the inbox knows them. 32 hexadecimal digits.

The first 12 are milliseconds since the epoch, of when a flow was begun, and all ids that are made of an id have them,
too. So what happens at one time lies together in a database's index: at random places each row would change a page of
its own.

Source: docs/stages-wire.md
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Final

LENGTH: Final = 32
TIME_LENGTH: Final = 12
RANDOM_BYTES: Final = (LENGTH - TIME_LENGTH) // 2

_starts_with_time = re.compile(rf"[0-9a-f]{{{TIME_LENGTH}}}").match


def first_id(now_ms: int, random_bytes: bytes) -> str:
    """An id that is made of no other. `random_bytes` are RANDOM_BYTES random bytes."""
    return f"{now_ms:0{TIME_LENGTH}x}{random_bytes.hex()}"


def child_id(parent: str, ordinal: int) -> str:
    """The id of what a stage sends as number `ordinal` of all that it sends: the same however often it runs."""
    return _derive_id(parent, f"{parent} {ordinal}")


def inbox_id(service: str, queue: str, message_id: str) -> str:
    """By which the inbox knows a message, whatever others call theirs. One message may come to several queues, and
    several services may share a database."""
    return _derive_id(message_id, f"{service}\n{queue}\n{message_id}")


def _derive_id(source: str, text: str) -> str:
    digest = blake2b(text.encode(), digest_size=LENGTH // 2).hexdigest()
    return source[:TIME_LENGTH] + digest[TIME_LENGTH:] if _starts_with_time(source) else digest
