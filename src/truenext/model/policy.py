"""Policies: settings per queue, such as the treatment of failures and how much of the queue may be in memory.

Policy      settings of one queue
Policies    policy of each queue, by its name
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from sys import maxsize

from truenext.model.destination import DEAD_LETTER_PREFIX
from truenext.model.limits import ATTEMPTS_MAX, DELAY_MS_MAX, PAGE_SIZE, PAGE_SIZE_MAX
from truenext.model.pattern import matches
from truenext.model.setting import setting


class StoreAndDispatch(Enum):
    """Time at which a persistent message outside a transaction becomes visible."""

    DURABLE = "durable"
    """Visible once the message is durable."""
    CONCURRENT = "concurrent"
    """Visible at once, while the message is being written; one that is acknowledged first is not written at all."""


class WhenFull(Enum):
    """Treatment of a connection that only sends, when disk space is short."""

    SLOW = "slow"
    """The connection is not read until there is space again."""
    REFUSE = "refuse"
    """The connection's next send is answered with an ERROR."""


class ExpiryAction(Enum):
    """Treatment of an expired message."""

    DROP = "drop"
    DEAD_LETTER = "dead-letter"
    """The message moves to the dead-letter queue."""


class WhileWaiting(Enum):
    """Treatment of a queue's other messages while a failed one waits for its retry."""

    SKIP = "skip"
    """The queue's other messages skip the failed one."""
    BLOCK = "block"
    """Messages after the failed one wait as well: the order is kept."""


INDIVIDUAL_DEAD_LETTERS = "individual"
"""Value of `Policy.dead_letters`: each queue has its own dead-letter queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Settings of one queue. Each field is a setting of the configuration file, under the same name."""

    attempts_max: int = setting(
        7,
        "Failures after which a message is dead-lettered. What waits and has failed so often goes with a change, "
        "what a consumer holds when it comes back.",
        unit="attempts",
        least=1,
        most=ATTEMPTS_MAX,
        reason="The first try and six more, as ActiveMQ's clients do.",
    )
    first_delay_ms: int = setting(
        0,
        "From the first failure of a message to its next try.",
        unit="milliseconds",
        least=0,
        most=DELAY_MS_MAX,
        reason="Most failures pass at once, and the order is kept.",
    )
    delay_ms: int = setting(
        1000,
        "The same from its second failure.",
        unit="milliseconds",
        least=0,
        most=DELAY_MS_MAX,
        reason="What was not there twice has to be given time; ActiveMQ's clients wait as long.",
    )
    backoff: float = setting(
        1.0,
        "How many times as long the delay is from each failure on to the next.",
        least=1,
        most=100,
        reason="A try a second, five times, is what ActiveMQ's clients do.",
    )
    delay_max_ms: int = setting(
        300_000,
        "The longest delay, before the jitter.",
        unit="milliseconds",
        least=0,
        most=DELAY_MS_MAX,
        reason="Nothing waits longer than five minutes once the cause is gone, and a hundred thousand failing messages "
        "are tried 333 times a second, which a broker does beside its work.",
    )
    jitter: float = setting(
        0.0,
        "Share of a delay by which it is longer or shorter at random: what failed together is not tried together.",
        least=0,
        most=1,
        reason="Times that are known beforehand are easier to reason about; few messages fail together.",
    )
    while_waiting: WhileWaiting = setting(
        WhileWaiting.SKIP,
        'While a failed message waits for its next try, the others pass it ("skip"), or what stands behind it waits as '
        'well ("block"), so that the order is kept. One of a message group holds back its group, and that alone, '
        "either way. A change holds for what fails from then on.",
        reason="One message that fails need not hold back those that do not.",
    )
    dead_letters: str = setting(
        INDIVIDUAL_DEAD_LETTERS,
        'Where what is given up goes: "individual" is DLQ. + the name of its queue, anything else the name of a queue. '
        "A change holds for what is given up from then on.",
        reason="Whoever looks after a queue finds its failures, and nobody else's.",
    )
    page_size: int = setting(
        PAGE_SIZE,
        "Messages read from disk at a time; the next page that is asked for is of the new size.",
        unit="messages",
        least=1,
        most=PAGE_SIZE_MAX,
        reason="Of 1 KiB each they are the 1 MiB that a page may be at most.",
    )
    memory_limit: int = setting(
        maxsize,
        "Memory that the messages of one queue may take before some leave it; with a change they leave at once, or as "
        "soon as they are durable.",
        unit="bytes",
        least=1,
        none=maxsize,
        reason="The broker's memory_limit is shared by all queues, and the largest gives first.",
    )
    stalled_subscriber_ms: int = setting(
        60_000,
        "A connection whose socket takes nothing, and that acknowledges nothing, for so long is ended when others need "
        'the room of what waits for its subscription to a topic, if that is not a durable one; "none" is never.',
        unit="milliseconds",
        least=1000,
        none=maxsize,
        reason="Who reads at all, however slowly, is not meant; who is away for a minute may miss what is sent then.",
    )
    store_and_dispatch: StoreAndDispatch = setting(
        StoreAndDispatch.DURABLE,
        'Dispatch a persistent message once it is durable ("durable"), or while it is being written ("concurrent"). A '
        "change holds for what is sent from then on.",
        reason="What a consumer saw is then still there after a crash.",
    )
    expired: ExpiryAction = setting(
        ExpiryAction.DROP,
        'A message whose time has come is dropped ("drop"), or moves to the dead-letter queue ("dead-letter"). A '
        "change holds for what expires from then on.",
        reason="Whoever says how long a message is good for has no use for it afterwards.",
    )


DEFAULT_POLICY = Policy()


class Policies:
    """Policies by queue name: the most specific pattern that matches the name decides."""

    def __init__(self, default: Policy = DEFAULT_POLICY, by_pattern: Mapping[str, Policy] | None = None) -> None:
        self.default = default
        self.by_pattern = dict(by_pattern or {})
        # Sorted once: the first pattern that matches is the most specific one.
        self._patterns = sorted(
            ((pattern.split("."), pattern) for pattern in self.by_pattern),
            key=lambda pair: _specificity(pair[0]),
            reverse=True,
        )
        policies = (default, *self.by_pattern.values())
        self._shared_dead_letter_queues = {
            policy.dead_letters for policy in policies if policy.dead_letters != INDIVIDUAL_DEAD_LETTERS
        }

    def holds_dead_letters(self, name: str) -> bool:
        """Whether messages that fail in this queue stay there."""
        return name.startswith(DEAD_LETTER_PREFIX) or name in self._shared_dead_letter_queues

    def for_queue(self, name: str) -> Policy:
        """Return the policy of the queue with this name.

        >>> Policies(by_pattern={"orders.>": Policy(page_size=7)}).for_queue("orders.new").page_size
        7
        """
        pattern = self.pattern_of(name)
        return self.default if pattern is None else self.by_pattern[pattern]

    def pattern_of(self, name: str) -> str | None:
        """Return the most specific pattern that a queue's name matches; None if there is none."""
        words = name.split(".")
        return next((pattern for pattern_words, pattern in self._patterns if matches(pattern_words, words)), None)


def _specificity(pattern: list[str]) -> tuple[tuple[int, ...], int]:
    """Sort key, word by word from the left: a plain word is more specific than `*`, and `*` than `>`."""
    return tuple({"*": 1, ">": 0}.get(word, 2) for word in pattern), len(pattern)
