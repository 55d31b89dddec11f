"""Grants: which rights a user has on which queues and topics. Source: docs/security.md, "Rights", "Patterns"

A grant is a right and a pattern. It allows a request if the pattern covers all names of queues or topics that the
request may reach."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

from truenext.model.pattern import fault_of_pattern, fault_of_uri, is_pattern, matches

QUEUE_PREFIX, TOPIC_PREFIX = "/queue/", "/topic/"

_RESERVED_WORDS = frozenset({"DLQ", "Spark"})
"""First words of special queues, such as `DLQ.orders`. A first word * or > of a grant does not cover these queues."""


class Right(Enum):
    SEND = "send"
    TAKE = "take"
    BROWSE = "browse"
    MANAGE = "manage"


class Pattern(NamedTuple):
    """Pattern of names of queues or topics. A pattern without * and > is a single name."""

    is_topic: bool
    words: tuple[str, ...]

    def __str__(self) -> str:
        return (TOPIC_PREFIX if self.is_topic else QUEUE_PREFIX) + ".".join(self.words)

    @property
    def may_be_special(self) -> bool:
        """True if this pattern may match names of special queues: dead-letter queues, queues of Spark, and queues of
        virtual topics (`Consumer.NAME.VirtualTopic.TOPIC`). A first word * or > of a grant covers no special queue."""
        words = self.words
        if self.is_topic or len(words) < 2:
            return False
        if words[0] != "Consumer":
            return words[0] in _RESERVED_WORDS
        is_open = words[-1] == ">"
        fixed = words[:-1] if is_open else words
        return (is_open or len(fixed) > 3) and (len(fixed) < 3 or fixed[2] in ("VirtualTopic", "*"))

    def covers(self, requested: Pattern) -> bool:
        """Return whether this pattern, as a grant, covers every name that `requested` matches.

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
        # A * of the grant stands for one word, so it does not cover a >, which stands for one word or more.
        return matches(own, other) and ("*", ">") not in zip(own, other, strict=False)


def parse_pattern(text: str) -> Pattern:
    """Parse the pattern of a grant: /queue/PATTERN, /topic/PATTERN, or PATTERN, which is of queues.

    Raises: ValueError if the text is no pattern; the error continues a sentence that begins with the text.
    """
    if fault := fault_of_uri(text):
        raise ValueError(fault)
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


def known_patterns(texts: Iterable[str]) -> list[Pattern]:
    """Parse patterns that a broker reports, without those that only a later version knows.

    >>> [str(pattern) for pattern in known_patterns(["orders.>", "/newer/a"])]
    ['/queue/orders.>']
    """
    patterns = []
    for text in texts:
        with suppress(ValueError):
            patterns.append(parse_pattern(text))
    return patterns


def subscription_topic(name: str) -> Pattern:
    """Return the topic, or pattern of topics, of the durable subscription whose queue has this name.

    >>> str(subscription_topic("subscription,billing,orders,orders.>,total > 99"))
    '/topic/orders.>'
    """
    topic = name.split(",", 4)[3:4] or [""]
    return Pattern(True, tuple(topic[0].split(".")))


class User:
    """User with grants. A reload makes new objects for all users."""

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
        """Cache: names of queues for which a grant of the right to send was found."""

    def may(self, right: Right, requested: Pattern) -> bool:
        """Return whether a single grant of this right covers all names that `requested` matches."""
        return any(pattern.covers(requested) for pattern in self.grants[right])

    def owns_client_id(self, client_id: str) -> bool:
        """Return whether the user may use durable subscriptions of this client id."""
        return client_id == self.name or client_id.startswith(f"{self.name}.") or client_id in self.client_ids

    def has_all_of(self, other: User) -> bool:
        """Return whether this user may do everything that `other` may do."""
        return (
            all(self.may(right, pattern) for right, patterns in other.grants.items() for pattern in patterns)
            and self.client_ids >= other.client_ids
            and self.is_monitor >= other.is_monitor
            and self.is_admin >= other.is_admin
        )
