"""What may differ from queue to queue: how failures are treated, and how much of it may be in memory.

    Policy      what holds for one queue
    Policies    which policy that is, by the queue's name

Names and patterns are of words with dots between them: `*` stands for one word, `>` at the end for one or more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from sys import maxsize

from truenext.destination import DEAD_LETTER_PREFIX
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


class WhileWaiting(Enum):
    """What the rest of a queue does while a failed message waits for its next try."""

    PASS = "pass"
    """It goes on."""
    HOLD = "hold"
    """What stands behind the failed message waits as well: the order is kept."""


INDIVIDUAL = "individual"
"""Each queue has a dead-letter queue of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    attempts_max: int = 7
    """Failures after which a message is dead-lettered: the first try and six more, as ActiveMQ's clients do."""
    first_delay_ms: int = 0
    """Milliseconds from the first failure to the next try. 0: most failures pass at once, and the order is kept."""
    delay_ms: int = 1000
    """The same from the second failure."""
    backoff: float = 1.0
    """How many times as long the delay is from each failure on to the next, 1.0 or more."""
    delay_max_ms: int = 300_000
    """The longest delay, before the jitter. Five minutes: nothing waits longer once the cause is gone, and a hundred
    thousand failing messages are tried 333 times a second, which a broker does beside its work."""
    jitter: float = 0.0
    """Share of the delay, 0 to 1, by which it is longer or shorter at random, so that what failed together is not tried
    together."""
    while_waiting: WhileWaiting = WhileWaiting.PASS
    dead_letters: str = INDIVIDUAL
    """INDIVIDUAL: `DLQ.` + the queue's name takes its dead letters. Else the name of a queue that takes them."""
    page_size: int = PAGE_SIZE
    """Messages read from the store at a time."""
    memory_limit: int = maxsize
    """Bytes of memory that the messages of the queue may take before some leave it."""
    store_and_dispatch: StoreAndDispatch = StoreAndDispatch.DURABLE


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

        policies = (default, *(by_pattern or {}).values())
        self._shared = {policy.dead_letters for policy in policies if policy.dead_letters != INDIVIDUAL}

    def holds_dead_letters(self, name: str) -> bool:
        """What fails in this queue stays there."""
        return name.startswith(DEAD_LETTER_PREFIX) or name in self._shared

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
