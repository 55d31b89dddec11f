"""What subscriptions that pull have asked for: when it begins, is spent, and has ended.

A wish that does not wait ends when nothing is ready; who finds that out is engine/turn.py. Source:
docs/contract.md, "Pulling"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from truenext.engine.state.consumer import BrokerConsumer
from truenext.engine.state.queue import Entry, Queue
from truenext.engine.writing.event_log import EventLog


class EndedPullRequest(NamedTuple):
    """What a client is told of a wish that has ended though not all has come, or was withdrawn."""

    consumer: BrokerConsumer
    unused: int
    """Messages that have not come."""
    correlation: str | None


class PullRequests:
    def __init__(self, events: EventLog) -> None:
        self._events = events
        self.open_consumers: dict[BrokerConsumer, None] = {}
        """Those that have asked for something that has not come."""
        self.no_wait_by_queue: dict[Queue | BrokerConsumer, dict[BrokerConsumer, None]] = {}
        """Those whose wish does not wait, by their queue; of those that take from many each by itself."""
        self.ended: list[EndedPullRequest] = []
        """Those of which the clients are to be told."""

    def add(self, consumer: BrokerConsumer) -> None:
        """It has asked for more."""
        pull_request = consumer.pull_request
        assert pull_request is not None, "it pulls"
        self._log_request(consumer, pull_request.remaining)
        self.open_consumers[consumer] = None
        if pull_request.waits_for_messages:
            self._remove_no_wait(consumer)
        else:
            self.no_wait_by_queue.setdefault(consumer.queue or consumer, {})[consumer] = None

    def end_with_notice(self, consumer: BrokerConsumer) -> None:
        """Nothing is ready for it, and its client is told so, behind what was dispatched."""
        self.ended.append(self.withdraw(consumer))

    def withdraw(self, consumer: BrokerConsumer) -> EndedPullRequest:
        """Nothing more comes of what it has asked for."""
        pull_request = consumer.pull_request
        assert pull_request is not None, "it pulls"
        ended = EndedPullRequest(consumer, pull_request.remaining, pull_request.correlation)
        self.end_without_notice(consumer)
        return ended

    def end_without_notice(self, consumer: BrokerConsumer) -> None:
        """The same, and its client knows."""
        pull_request = consumer.pull_request
        if pull_request is not None:
            pull_request.remaining = 0
            self.open_consumers.pop(consumer, None)
            # Else what it acknowledges from here on would look like credit to whoever counts by its window.
            consumer.adjust_window(0)
            self._remove_no_wait(consumer)
            self._log_request(consumer, 0)

    def remove_consumer(self, consumer: BrokerConsumer) -> None:
        """Its subscription has ended."""
        self.open_consumers.pop(consumer, None)
        self._remove_no_wait(consumer)

    def deduct_dispatched(self, deliveries: Mapping[BrokerConsumer, list[Entry]]) -> None:
        """This was dispatched."""
        for consumer, entries in deliveries.items():
            pull_request = consumer.pull_request
            if pull_request is not None:
                pull_request.remaining -= len(entries)
                if not pull_request.remaining:
                    self.open_consumers.pop(consumer, None)
                    self._remove_no_wait(consumer)

    def take_ended(self) -> list[EndedPullRequest]:
        """Those of subscriptions that are still there."""
        ended, self.ended = self.ended, []
        return [one for one in ended if one.consumer.is_subscribed]

    def _remove_no_wait(self, consumer: BrokerConsumer) -> None:
        """It is none of those whose wish does not wait, or not any more."""
        key = consumer.queue or consumer
        consumers = self.no_wait_by_queue.get(key)
        if consumers is not None:
            consumers.pop(consumer, None)
            if not consumers:
                del self.no_wait_by_queue[key]

    def _log_request(self, consumer: BrokerConsumer, count: int) -> None:
        if consumer.queue is not None:
            self._events.pull_requested(consumer, consumer.queue, count)
