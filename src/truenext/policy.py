"""What may differ between brokers: how often a failing message is tried, and how much of what may be in memory."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    attempts_max: int = 7
    """Failures after which a message is dead-lettered: the first try and six more, as ActiveMQ's clients do."""
    page_size: int = PAGE_SIZE
    """Messages read from the store at a time."""
    queue_memory_limit: int = maxsize
    """Bytes of memory that the messages of one queue may take before some leave it."""
    store_and_dispatch: StoreAndDispatch = StoreAndDispatch.DURABLE
    when_full: WhenFull = WhenFull.SLOW


DEFAULT_POLICY = Policy()
