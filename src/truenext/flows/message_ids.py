"""Ids of messages between stages, and their ids in the inbox: 32 hexadecimal digits. Source: docs/protocol.md

The first 12 digits are milliseconds since the epoch, of the start of a flow; all ids derived from an id have them, too.
So rows of one time are together in a database's index: at random places each row would change a page of its own.
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
    """Return a new id, made of the time and of `random_bytes`, which are RANDOM_BYTES random bytes."""
    return f"{now_ms:0{TIME_LENGTH}x}{random_bytes.hex()}"


def child_id(parent: str, ordinal: int) -> str:
    """Return the id of a sent message, derived from `parent` and the message's number `ordinal`. So a repeated run
    gives its messages the same ids."""
    return _derive_id(parent, f"{parent} {ordinal}")


def output_seed(message_id: str, queue: str) -> str:
    """Return the text from which the ids of the messages are derived that the stage of `queue` sends for a message: the
    same in each run of the stage, and different in different stages that get the same message."""
    return f"{message_id} {queue}"


def occurrence_id(schedule: str, due_ms: int) -> str:
    """Return the id of one occurrence of a schedule, made of the schedule's id and the due time."""
    return _derive_id(f"{due_ms:0{TIME_LENGTH}x}", f"{schedule} due {due_ms}")


def cron_id(service: str, name: str) -> str:
    """Return the id of the schedule that a service calls `name`. It stays the same if its times change."""
    return _derive_id("", f"{service} cron {name}")


def inbox_id(service: str, queue: str, message_id: str) -> str:
    """Return the id of a message in the inbox. The id also depends on service and queue, since one message may come to
    several queues, and several services may share a database."""
    return _derive_id(message_id, f"{service}\n{queue}\n{message_id}")


def key_id(service: str, key: str) -> str:
    """Return the id of a key: a hash of the service's name and of the text under which a program starts flows once."""
    return inbox_id(service, " key", key)


def _derive_id(source: str, text: str) -> str:
    digest = blake2b(text.encode(), digest_size=LENGTH // 2).hexdigest()
    return source[:TIME_LENGTH] + digest[TIME_LENGTH:] if _starts_with_time(source) else digest
