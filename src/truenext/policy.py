"""What may differ between brokers: how often a failing message is tried."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    attempts_max: int = 7
    """Failures after which a message is dead-lettered: the first try and six more, as ActiveMQ's clients do."""


DEFAULT_POLICY = Policy()
