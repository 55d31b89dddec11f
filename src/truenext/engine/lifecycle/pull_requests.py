"""Pull requests of subscriptions: from the request until it is satisfied, withdrawn or ended.

engine/turn.py ends a request that does not wait, when no message is ready. Source: docs/contract.md, "Pull"
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from truenext.engine.state.consumer import BrokerConsumer
from truenext.engine.state.queue import Entry, Queue
from truenext.engine.writing.commit_state import CommitState
from truenext.model.limits import PULL_ENDS_PER_TURN

_ENDED_MAX = 64
"""Number of ended requests that may be in the heap of times beside as many as are open."""


class EndedPullRequest(NamedTuple):
    """Notice to a client that a pull request ended or was withdrawn before all messages had come."""

    consumer: BrokerConsumer
    unused: int
    """Number of requested messages that have not come."""
    correlation: str | None


class PullRequests:
    def __init__(self, commit_state: CommitState) -> None:
        self._commit_state = commit_state
        self._events = commit_state.events
        self.open_consumers: dict[BrokerConsumer, None] = {}
        self.no_wait_by_queue: dict[Queue | BrokerConsumer, dict[BrokerConsumer, None]] = {}
        """Consumers whose open request does not wait, by queue. The key of a wildcard consumer is the consumer."""
        self._ends_us: dict[BrokerConsumer, int] = {}
        """Times at which open requests are withdrawn, for those that have one."""
        self._end_heap: list[tuple[int, int, BrokerConsumer]] = []
        """Heap by these times. Requests that have ended, or have another time now, may still be in it."""
        self._heap_tie_breaker = 0
        self.ended: list[EndedPullRequest] = []
        """Notices that are still to be sent to the clients."""

    @property
    def next_end_us(self) -> int | None:
        """Time at which a request is withdrawn next, or an earlier time of a request that has ended since; None if
        there is none."""
        return self._end_heap[0][0] if self._end_heap else None

    def add(self, consumer: BrokerConsumer, wait_ms: int = 0) -> None:
        """Open a request of a consumer, or increase its open request. With `wait_ms` the request is withdrawn after so
        many milliseconds."""
        pull_request = consumer.pull_request
        assert pull_request is not None, "it pulls"
        self._log_request(consumer, pull_request.remaining)
        self.open_consumers[consumer] = None
        if wait_ms:
            end_us = self._ends_us[consumer] = self._commit_state.now_us + 1000 * wait_ms
            self._heap_tie_breaker += 1
            heappush(self._end_heap, (end_us, self._heap_tie_breaker, consumer))
            self._commit_state.active_work[self] = None
            self._shrink_heap()
        elif self._ends_us:
            self._forget_end(consumer)
        if pull_request.waits_for_messages:
            self._remove_no_wait(consumer)
        else:
            self.no_wait_by_queue.setdefault(consumer.queue or consumer, {})[consumer] = None

    def end_with_notice(self, consumer: BrokerConsumer) -> None:
        """End a request because no message is ready. The client is notified after all messages dispatched before."""
        self.ended.append(self.withdraw(consumer))

    def end_overdue(self) -> None:
        """End requests whose time is over, at most PULL_ENDS_PER_TURN."""
        now_us, heap = self._commit_state.now_us, self._end_heap
        for _ in range(PULL_ENDS_PER_TURN):
            if not heap or heap[0][0] > now_us:
                break
            end_us, _, consumer = heappop(heap)
            if self._ends_us.get(consumer) == end_us:
                self.end_with_notice(consumer)

    def _forget_end(self, consumer: BrokerConsumer) -> None:
        if self._ends_us.pop(consumer, None) is not None:
            self._shrink_heap()

    def _shrink_heap(self) -> None:
        """Rebuild the heap if most requests in it have ended."""
        if len(self._end_heap) > 2 * len(self._ends_us) + _ENDED_MAX:
            self._end_heap[:] = [(end_us, number, each) for number, (each, end_us) in enumerate(self._ends_us.items())]
            heapify(self._end_heap)

    def withdraw(self, consumer: BrokerConsumer) -> EndedPullRequest:
        """End a request. Returns the notice, with the number of messages that have not come."""
        pull_request = consumer.pull_request
        assert pull_request is not None, "it pulls"
        ended = EndedPullRequest(consumer, pull_request.remaining, pull_request.correlation)
        self.end_without_notice(consumer)
        # It may have been the last consumer with credit: others may get express dispatch now.
        self._commit_state.touch(consumer)
        return ended

    def end_without_notice(self, consumer: BrokerConsumer) -> None:
        """End a consumer's request, if it has one, without a notice: the client knows of the end already."""
        pull_request = consumer.pull_request
        if pull_request is not None:
            pull_request.remaining = 0
            # Else acknowledgements from now on would look like credit, to code that compares with the window.
            consumer.adjust_window(0)
            self.remove_consumer(consumer)
            self._log_request(consumer, 0)

    def remove_consumer(self, consumer: BrokerConsumer) -> None:
        """Forget a consumer whose request or subscription has ended."""
        self.open_consumers.pop(consumer, None)
        if self._ends_us:
            self._forget_end(consumer)
        self._remove_no_wait(consumer)

    def deduct_dispatched(self, deliveries: Mapping[BrokerConsumer, list[Entry]]) -> None:
        for consumer, entries in deliveries.items():
            pull_request = consumer.pull_request
            if pull_request is not None:
                pull_request.remaining -= len(entries)
                if not pull_request.remaining:
                    self.remove_consumer(consumer)

    def take_ended(self) -> list[EndedPullRequest]:
        """Return the notices since the last call, for subscriptions that still exist."""
        ended, self.ended = self.ended, []
        return [one for one in ended if one.consumer.is_subscribed]

    def _remove_no_wait(self, consumer: BrokerConsumer) -> None:
        key = consumer.queue or consumer
        consumers = self.no_wait_by_queue.get(key)
        if consumers is not None:
            consumers.pop(consumer, None)
            if not consumers:
                del self.no_wait_by_queue[key]

    def _log_request(self, consumer: BrokerConsumer, count: int) -> None:
        if consumer.queue is not None:
            self._events.pull_requested(consumer, consumer.queue, count)
