"""Policies: settings of queues, such as the treatment of failures, and the memory that a queue may use.

Policy      settings of one queue
Policies    all policies; finds the policy of a queue by the queue's name
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
    """The message becomes visible when it is durable."""
    CONCURRENT = "concurrent"
    """The message is visible at once, while it is being written. A message that is acknowledged before its write begins
    is never written."""


class WhenFull(Enum):
    """Treatment of connections that only send, while disk space is short."""

    SLOW = "slow"
    """Such a connection is not read until there is space again."""
    REFUSE = "refuse"
    """The next SEND of such a connection is refused with an ERROR."""


class ExpiryAction(Enum):
    """Treatment of an expired message."""

    DROP = "drop"
    DEAD_LETTER = "dead-letter"
    """The message moves to the dead-letter queue."""


class WhileWaiting(Enum):
    """Treatment of the other messages of a queue while a failed message waits for its next try."""

    SKIP = "skip"
    """All other messages are dispatched while the failed message waits."""
    BLOCK = "block"
    """Messages after the failed one wait, too, so that the order is kept."""


INDIVIDUAL_DEAD_LETTERS = "individual"
"""Value of `Policy.dead_letters`: each queue has its own dead-letter queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Settings of one queue. Each field has the name of its setting in the configuration file."""

    attempts_max: int = setting(
        7,
        "Number of failures after which a message is dead-lettered. A new value applies at once to messages that "
        "wait, and to messages that a consumer holds once they are requeued.",
        unit="attempts",
        least=1,
        most=ATTEMPTS_MAX,
        reason="The first try and six further tries, as with ActiveMQ's clients.",
    )
    first_delay_ms: int = setting(
        0,
        "Delay between the first failure of a message and its next try.",
        unit="milliseconds",
        least=0,
        most=DELAY_MS_MAX,
        reason="Most causes of failures are over at once, and without a delay the order is kept.",
    )
    delay_ms: int = setting(
        1000,
        "Delay between the second failure of a message and its next try.",
        unit="milliseconds",
        least=0,
        most=DELAY_MS_MAX,
        reason="A cause of failures that is still there at the second try needs time to end. ActiveMQ's clients wait "
        "as long.",
    )
    backoff: float = setting(
        1.0,
        "Factor by which the delay grows with each further failure.",
        least=1,
        most=100,
        reason="ActiveMQ's clients try once a second, five times.",
    )
    delay_max_ms: int = setting(
        300_000,
        "Maximum of the delay, before the jitter.",
        unit="milliseconds",
        least=0,
        most=DELAY_MS_MAX,
        reason="A message waits at most five minutes once the cause is over, and a hundred thousand failing messages "
        "make 333 tries a second, a small load for a broker.",
    )
    jitter: float = setting(
        0.0,
        "Largest share by which a delay is made longer or shorter at random, so that messages that failed "
        "together are not tried together.",
        least=0,
        most=1,
        reason="Exact times are easier to reason about; few messages fail together.",
    )
    while_waiting: WhileWaiting = setting(
        WhileWaiting.SKIP,
        'While a failed message waits for its next try, later messages are dispatched ("skip"), or wait as '
        'well ("block"), so that the order is kept. With both values a failed message of a group holds back the other '
        "messages of its group, and no others. A new value applies to messages that fail later.",
        reason="A message that fails need not hold back others.",
    )
    dead_letters: str = setting(
        INDIVIDUAL_DEAD_LETTERS,
        'Queue for dead letters: "individual" is DLQ. + the name of the message\'s queue, any other value is the name '
        "of a queue. A new value applies to messages that are dead-lettered later.",
        reason="The operator of a queue finds the failures of that queue alone.",
    )
    page_size: int = setting(
        PAGE_SIZE,
        "Number of messages that are read from disk at a time, as a page. A new value applies from the next page on.",
        unit="messages",
        least=1,
        most=PAGE_SIZE_MAX,
        reason="A page of messages of 1 KiB has 1 MiB then, the most that a page may have.",
    )
    memory_limit: int = setting(
        maxsize,
        "Memory for the messages of one queue; messages beyond it are evicted. A lower value evicts at once, or "
        "as soon as the messages are durable. If a subscription that ends with its connection grows beyond this "
        "limit, in memory or on disk, the broker ends the connection.",
        unit="bytes",
        least=1,
        none=maxsize,
        reason="All queues share the broker's memory_limit, and the largest is evicted first.",
    )
    stalled_subscriber_ms: int = setting(
        60_000,
        "Time after which a connection that reads nothing and acknowledges nothing is ended, if other clients "
        "need the space of the messages that wait for its subscription to a topic. Durable subscriptions are exempt; "
        '"none" means never.',
        unit="milliseconds",
        least=1000,
        none=maxsize,
        reason="A connection that reads anything, however slowly, is kept. A connection that reads and "
        "acknowledges nothing for a minute is ended, and may miss messages of its topics.",
    )
    store_and_dispatch: StoreAndDispatch = setting(
        StoreAndDispatch.DURABLE,
        'Dispatch a persistent message once it is durable ("durable"), or while it is being written ("concurrent"). A '
        "new value applies to messages that are sent later.",
        reason="A message that a consumer has seen is still there after a crash.",
    )
    expired: ExpiryAction = setting(
        ExpiryAction.DROP,
        'An expired message is dropped ("drop"), or moves to the dead-letter queue ("dead-letter"). A '
        "new value applies to messages that expire later.",
        reason="A producer that sets an expiry has no use for the message afterwards.",
    )


DEFAULT_POLICY = Policy()


def delay_before_jitter_ms(
    failures: int, first_delay_ms: int, delay_ms: int, backoff: float, delay_max_ms: int
) -> float:
    """Return the milliseconds from a message's last failure to its next try, without the jitter. `failures` includes
    that failure. The other parameters have the names of the settings."""
    if failures <= 1:
        return min(first_delay_ms, delay_max_ms)
    try:
        return min(delay_ms * backoff ** (failures - 2), delay_max_ms)
    except OverflowError:
        return delay_max_ms


class Policies:
    """Policies of all queues. The most specific pattern that matches a queue's name decides on the policy."""

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
        """Return whether a queue is a dead-letter queue: messages that fail in it stay there."""
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
    """Return the sort key of a pattern. Patterns are compared word by word from the left: a plain word is more specific
    than `*`, and `*` more specific than `>`."""
    return tuple({"*": 1, ">": 0}.get(word, 2) for word in pattern), len(pattern)
