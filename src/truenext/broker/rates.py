"""Rates: every few seconds computes how many messages each queue has had acknowledged in a second.

A rate needs two counts of different times. They are taken here, so that a message costs nothing more, and so that the
answers to many clients agree.
"""

from collections.abc import Callable

from truenext.broker.event_loop import Steps
from truenext.broker.queues_request import chunks
from truenext.engine.engine import Engine

RATE_S = 5.0
"""Seconds between two counts of a queue."""

QUEUES_PER_STEP = 1000
"""Number of queues that one step counts."""


class Rates:
    def __init__(self, engine: Engine, monotonic_ns: Callable[[], int]) -> None:
        self._engine = engine
        self._monotonic_ns = monotonic_ns
        self._counted_ns = monotonic_ns()
        """Time of the last counts."""
        self._is_counting = False

    @property
    def are_due(self) -> bool:
        """Whether `count` must be run."""
        return not self._is_counting and self._monotonic_ns() - self._counted_ns >= RATE_S * 1e9

    def count(self) -> Steps:
        """Compute the rates of all queues that are not temporary, in steps."""
        self._is_counting = True
        now_ns = self._monotonic_ns()
        seconds, self._counted_ns = (now_ns - self._counted_ns) / 1e9, now_ns
        for queues in chunks(list(self._engine.queues.by_name.values()), QUEUES_PER_STEP):
            for queue in queues:
                acknowledged = queue.counts.acknowledged
                if acknowledged != queue.counted:
                    queue.rate = round((acknowledged - queue.counted) / seconds, 1)
                    queue.counted = acknowledged
                elif queue.rate:
                    queue.rate = 0.0
            yield
        self._is_counting = False
