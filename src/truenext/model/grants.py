"""Grants: which rights a user has on which queues and topics. Source: docs/security.md, "Rights", "Patterns"

A grant is a pattern. It allows a request if it covers all names that the request may reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from truenext.model.pattern import fault_of_pattern, is_pattern, matches

QUEUE_PREFIX, TOPIC_PREFIX = "/queue/", "/topic/"

_RESERVED_WORDS = frozenset({"DLQ", "Spark"})
"""First words of queues, with more words behind, that a first word * or > of a pattern does not stand for."""


class Right(Enum):
    SEND = "send"
    TAKE = "take"
    BROWSE = "browse"
    MANAGE = "manage"


class Pattern(NamedTuple):
    """Pattern of names, or a single name, which is a pattern without * and >."""

    is_topic: bool
    words: tuple[str, ...]

    def __str__(self) -> str:
        return (TOPIC_PREFIX if self.is_topic else QUEUE_PREFIX) + ".".join(self.words)

    @property
    def may_be_special(self) -> bool:
        """Whether a name of this pattern may be that of a dead-letter queue, of a queue of Spark, or of a queue of a
        virtual topic (`Consumer.NAME.VirtualTopic.TOPIC`): a first word * or > of a grant covers none of these."""
        words = self.words
        if self.is_topic or len(words) < 2:
            return False
        if words[0] != "Consumer":
            return words[0] in _RESERVED_WORDS
        is_open = words[-1] == ">"
        fixed = words[:-1] if is_open else words
        return (is_open or len(fixed) > 3) and (len(fixed) < 3 or fixed[2] in ("VirtualTopic", "*"))

    def covers(self, requested: Pattern) -> bool:
        """Return whether this pattern matches every name that `requested` matches.

        >>> parse_pattern("orders.>").covers(parse_pattern("orders.*.new"))
        True
        >>> parse_pattern("*").covers(parse_pattern(">"))
        False
        """
        if self.is_topic is not requested.is_topic:
            return False
        own, other = self.words, requested.words
        if own[0] in ("*", ">") and requested.may_be_special:
            return False
        # > stands for one word or more, and so does a > of the other.
        return matches(own, other) and ("*", ">") not in zip(own, other, strict=False)


def parse_pattern(text: str) -> Pattern:
    """Return the pattern of a grant: /queue/PATTERN, /topic/PATTERN, or a pattern of queues.

    Raises: ValueError with what is wrong; the text goes before that.
    """
    is_topic = text.startswith(TOPIC_PREFIX)
    words = text.removeprefix(TOPIC_PREFIX if is_topic else QUEUE_PREFIX)
    if words.startswith("/") or "," in words or "?" in words or not words.isprintable():
        raise ValueError("is not a pattern of queues or topics: write /queue/PATTERN, /topic/PATTERN or PATTERN")
    if is_pattern(words):
        fault = fault_of_pattern(words)
        if fault is not None:
            raise ValueError(f"is not a pattern: {fault}")
    elif not words:
        raise ValueError("is not a pattern: it has no name")
    return Pattern(is_topic, tuple(words.split(".")))


class User:
    """A user and what it may do; a reload makes new ones."""

    __slots__ = ("client_ids", "grants", "is_admin", "is_monitor", "name", "sendable_queues")

    def __init__(
        self,
        name: str,
        grants: Mapping[Right, Iterable[Pattern]],
        client_ids: Iterable[str] = (),
        *,
        is_monitor: bool = False,
        is_admin: bool = False,
    ) -> None:
        self.name = name
        self.grants = {right: frozenset(grants.get(right, ())) for right in Right}
        self.client_ids = frozenset(client_ids)
        self.is_monitor = is_monitor
        self.is_admin = is_admin
        self.sendable_queues: set[str] = set()
        """Names of queues to which the user was found to have the right to send, so that it is searched for once."""

    def may(self, right: Right, requested: Pattern) -> bool:
        """Return whether a grant allows all that `requested` names."""
        return any(pattern.covers(requested) for pattern in self.grants[right])

    def owns_client_id(self, client_id: str) -> bool:
        """Return whether durable subscriptions of this client id are the user's."""
        return client_id == self.name or client_id.startswith(f"{self.name}.") or client_id in self.client_ids

    def has_all_of(self, other: User) -> bool:
        """Return whether this user may do all that `other` may."""
        return (
            all(self.may(right, pattern) for right, patterns in other.grants.items() for pattern in patterns)
            and self.client_ids >= other.client_ids
            and self.is_monitor >= other.is_monitor
            and self.is_admin >= other.is_admin
        )
