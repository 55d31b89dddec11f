"""What may differ from queue to queue: how failures are treated, and how much of it may be in memory.

    Policy      what holds for one queue
    Policies    which policy that is, by the queue's name

Names and patterns are of words with dots between them: `*` stands for one word, `>` at the end for one or more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from sys import maxsize

from truenext.limits import PAGE_SIZE


class StoreAndDispatch(Enum):
    """When a persistent message outside a transaction becomes visible."""

    DURABLE = "durable"
    """Once it is durable."""
    CONCURRENT = "concurrent"
    """At once, while it is being written; one that is acknowledged first is not written at all."""


class WhenFull(Enum):
    """What happens to a connection that only sends, when room on the disk gets short."""

    SLOW = "slow"
    """It is not read any more until there is room again."""
    REFUSE = "refuse"
    """Its next send is answered with an ERROR."""


class Expired(Enum):
    """What becomes of a message when its time has come."""

    DROP = "drop"
    DEAD_LETTER = "dead-letter"
    """It moves to the dead-letter queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    attempts_max: int = 7
    """Failures after which a message is dead-lettered: the first try and six more, as ActiveMQ's clients do."""
    page_size: int = PAGE_SIZE
    """Messages read from the store at a time."""
    memory_limit: int = maxsize
    """Bytes of memory that the messages of the queue may take before some leave it."""
    store_and_dispatch: StoreAndDispatch = StoreAndDispatch.DURABLE
    expired: Expired = Expired.DROP


DEFAULT_POLICY = Policy()


class Policies:
    """Which policy a queue has. Of the patterns that its name matches the most specific one counts."""

    def __init__(self, default: Policy = DEFAULT_POLICY, by_pattern: Mapping[str, Policy] | None = None) -> None:
        self._default = default
        # Sorted once: the first that matches is the most specific one.
        self._by_pattern = sorted(
            ((pattern.split("."), policy) for pattern, policy in (by_pattern or {}).items()),
            key=lambda pair: _specificity(pair[0]),
            reverse=True,
        )

    def of(self, name: str) -> Policy:
        """
        >>> Policies(by_pattern={"orders.>": Policy(page_size=7)}).of("orders.new").page_size
        7
        """
        words = name.split(".")
        for pattern, policy in self._by_pattern:
            if matches(pattern, words):
                return policy
        return self._default


def matches(pattern: list[str], words: list[str]) -> bool:
    """
    >>> matches(["orders", ">"], ["orders", "new", "eu"]), matches(["orders", "*"], ["orders"])
    (True, False)
    """
    if pattern[-1] == ">":
        pattern = pattern[:-1]
        if len(words) <= len(pattern):
            return False
        words = words[: len(pattern)]
    return len(pattern) == len(words) and all(one in ("*", word) for one, word in zip(pattern, words, strict=True))


def _specificity(pattern: list[str]) -> tuple[tuple[int, ...], int]:
    """Word by word from the left: a word itself says more than `*`, and `*` more than `>`."""
    return tuple({"*": 1, ">": 0}.get(word, 2) for word in pattern), len(pattern)
