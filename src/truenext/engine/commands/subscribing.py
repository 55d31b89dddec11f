"""SUBSCRIBE and UNSUBSCRIBE: makes and ends consumers and browsers. Source: docs/contract.md

to a queue                a consumer of the queue
to a pattern of queues    a wildcard consumer, which joins all these queues (queues/wildcards.py)
to a topic                a consumer of a new queue, which ends with the consumer
to a topic, durably       a consumer of a queue that outlives the consumer
to browse a queue         a browser (background/browsing.py)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from truenext.engine.background.browsing import BrowseTask
from truenext.engine.lifecycle.pull_requests import PullRequests
from truenext.engine.lifecycle.settlement import Settlement, by_queue
from truenext.engine.queues.queues import Queues
from truenext.engine.queues.unused import consumer_memory_error
from truenext.engine.queues.wildcards import Wildcards
from truenext.engine.selecting.selections import Selections
from truenext.engine.state.consumer import BrokerConsumer, Browser, ConnectionState, QueueConsumer, Subscriber
from truenext.engine.state.memory import MemoryBudget, consumer_size
from truenext.engine.state.queue import Queue, RequeueReason
from truenext.engine.state.wildcard import Wildcard
from truenext.engine.writing.engine_state import EngineState
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import AckMode, Browse, Close, Subscribe, Unsubscribe
from truenext.model.destination import Destination, DestinationKind, durable_subscription
from truenext.model.limits import BROWSERS_MAX
from truenext.model.selector import are_equivalent


class DiscardedSubscription(NamedTuple):
    """Durable subscription whose messages were dropped because a SUBSCRIBE changed its topic or selector."""

    durable_key: str
    message_count: int
    old_destination: Destination
    """Destination of the discarded queue, with the old topic and selector."""
    new_destination: Destination


class Subscribing:
    def __init__(
        self,
        state: EngineState,
        selections: Selections,
        queues: Queues,
        wildcards: Wildcards,
        settlement: Settlement,
        pull_requests: PullRequests,
        browsing: BrowseTask,
    ) -> None:
        self._commit_state = state.commit_state
        self._events = state.commit_state.events
        self._memory = state.memory
        self._clients = state.clients
        self._selections = selections
        self._queues = queues
        self._wildcards = wildcards
        self._settlement = settlement
        self._pull_requests = pull_requests
        self._browsing = browsing
        self._discarded_subscription: DiscardedSubscription | None = None

    # ---- Consumers ----

    def subscribe(self, session: ConnectionState, subscribe: Subscribe) -> None:
        """Subscribe a connection as a consumer. Creates the queue if it is missing.

        Raises: RemoteProtocolError if the subscription exists, the queue is another connection's, the durable
        subscription is in use, or memory or another limit does not allow the subscription.
        """
        session.check_subscription(subscribe.subscription, subscribe.destination)
        if subscribe.destination.kind is DestinationKind.QUEUE_PATTERN and not subscribe.durable_key:
            self._subscribe_to_pattern(session, subscribe)
            return
        queue = self._get_or_create_queue(session, subscribe)
        self._queues.await_introduction(session, queue.destination)
        consumer = QueueConsumer(queue, session, subscribe, self._memory, **self._new_consumer_fields())
        # The queue of a topic subscription contains only messages that match its selector.
        selector = None if queue.destination.topic else subscribe.selector
        if selector is not None or queue.has_groups:
            self._selections.subscribe(consumer, queue, selector)
        self._events.subscribed(consumer, queue, has_selector=selector is not None)
        session.consumers[subscribe.subscription] = consumer
        self._add_memory_use(consumer)
        self._clients.add_consumer(consumer)
        self._commit_state.touched_queues[queue] = None

    def _get_or_create_queue(self, session: ConnectionState, subscribe: Subscribe) -> Queue:
        """Return the queue of a new subscription, and create it if it is missing.

        Raises: RemoteProtocolError if the durable subscription is in use, a temporary queue or topic of a JMS client is
        not there, or memory or another limit does not allow the subscription.
        """
        destination, selector = subscribe.destination, subscribe.selector
        is_to_topic = destination.kind is DestinationKind.TOPIC or destination.kind is DestinationKind.TOPIC_PATTERN
        existing = None if is_to_topic else self._queues.by_name.get(destination.name)
        size = 0 if selector is None or existing is None else self._selections.bytes_to_join(existing, selector)
        self._check_memory(subscribe, size)
        text = "" if selector is None else selector.text
        if subscribe.durable_key:
            return self._get_or_create_durable(subscribe.durable_key, destination, text)
        if is_to_topic:
            if destination.session and session.is_jms_client and destination.name not in session.temporary_topics:
                raise _no_temporary_error(destination)
            name = f"/{session.id}//{subscribe.subscription}"
            destination = Destination(
                DestinationKind.TEMPORARY, name, session.id, topic=destination.name, selector=text
            )
        queue = self._queues.get_or_create(destination)
        if queue is None:
            raise _no_temporary_error(destination)
        return queue

    def _subscribe_to_pattern(self, session: ConnectionState, subscribe: Subscribe) -> None:
        """Subscribe to all queues whose names match a pattern.

        Raises: RemoteProtocolError if there is no memory for the subscription.
        """
        wildcard = Wildcard(session, subscribe, self._memory, **self._new_consumer_fields())
        size = self._wildcards.join_bytes(wildcard)
        self._check_memory(subscribe, size)
        self._wildcards.subscribe(wildcard, size)
        session.consumers[subscribe.subscription] = wildcard
        self._add_memory_use(wildcard)
        self._wildcards.step()

    def _new_consumer_fields(self) -> dict[str, int]:
        """Return the arguments that all consumer classes' constructors take, with a new consumer number."""
        self._clients.last_consumer_number += 1
        return {
            "number": self._clients.last_consumer_number,
            "last_dispatch_number": self._clients.dispatch_count,
            "now_ms": self._commit_state.now_ms,
        }

    def _get_or_create_durable(self, key: str, destination: Destination, selector: str) -> Queue:
        """Return the queue of a durable subscription, and create it if it is missing. A queue for another topic or
        another selector is ended and replaced.

        Raises: RemoteProtocolError if the destination is no topic or a temporary one, the durable subscription is in
        use, or memory or another limit does not allow it.
        """
        if destination.session or destination.kind not in (DestinationKind.TOPIC, DestinationKind.TOPIC_PATTERN):
            raise RemoteProtocolError(
                f"{destination.address}: a durable subscription must be to a topic, and the topic must not be "
                "temporary",
                Code.DESTINATION,
            )
        queue = self._queues.durable_by_key.get(key)
        if queue is not None and self._clients.receivers_of(queue).consumers:
            raise RemoteProtocolError(f"the durable subscription {key!r} is in use by another consumer", Code.IN_USE)
        requested = durable_subscription(key, destination.name, selector)
        if queue is None or queue.destination.topic != requested.topic:
            self._queues.topics.check_can_add(requested)
        if queue is None:
            self._queues.check_queue_memory()
        elif not _is_same_subscription(queue.destination, requested):
            # No memory check: the new queue replaces the old one.
            count = self._queues.end_durable_subscription(queue)
            if count:
                self._discarded_subscription = DiscardedSubscription(key, count, queue.destination, requested)
            queue = None
        if queue is None:
            queue = self._queues.durable_by_key[key] = self._queues.create(requested)
        return queue

    def take_discarded_subscription(self) -> DiscardedSubscription | None:
        """Return and forget the subscription that the last SUBSCRIBE discarded. None if that SUBSCRIBE dropped no
        message."""
        discarded, self._discarded_subscription = self._discarded_subscription, None
        return discarded

    def durable_subscribers(self, key: str) -> list[ConnectionState]:
        """Return the connections that use a durable subscription: at most one."""
        queue = self._queues.durable_by_key.get(key)
        return [] if queue is None else [each.session for each in self._clients.receivers_of(queue).consumers]

    # ---- Browsers ----

    def browse(self, session: ConnectionState, browse: Browse) -> None:
        """Begin to browse a queue or a durable subscription. Browsing creates no queue.

        Raises: RemoteProtocolError if the subscription exists, the queue is another connection's, there is no such
        durable subscription, there are too many browsers, or there is no memory.
        """
        session.check_subscription(browse.subscription, browse.destination)
        if len(self._clients.active_browsers) >= BROWSERS_MAX:
            raise RemoteProtocolError(
                f"more than {BROWSERS_MAX} browsers at once; try again when some of them have ended", Code.LIMIT
            )
        self._check_memory(browse, 0)
        name = browse.destination.name
        queue: Queue | None
        if browse.destination.kind is DestinationKind.DURABLE:
            queue = self._queues.require_durable(name)
        else:
            # Browsing does not create a missing queue: an empty stand-in is browsed.
            queue = self._queues.by_name.get(name)
            queue = queue or Queue(browse.destination, 0, self._queues.policies.for_queue(name), MemoryBudget())
        browser = Browser(session, queue, browse, self._memory, last_sequence=self._commit_state.last_sequence)
        session.browsers[browse.subscription] = browser
        self._browsing.start(browser)
        self._add_memory_use(browser)

    def end_browser(self, browser: Browser) -> None:
        self._browsing.stop(browser)
        self._subtract_memory_use(browser)

    # ---- The end of a subscription ----

    def unsubscribe(self, session: ConnectionState, unsubscribe: Unsubscribe) -> None:
        """End a consumer, a browser or a durable subscription.

        Raises: RemoteProtocolError if there is no such subscription, or if another consumer uses the durable
        subscription.
        """
        if unsubscribe.durable_key:
            self._unsubscribe_durable(session, unsubscribe)
            return
        self._check_exists(session, unsubscribe.subscription)
        self._end_subscription(session, unsubscribe.subscription)

    def close(self, session: ConnectionState, close: Close) -> None:
        """End consumers and browsers of a JMS client in one step. The client's program got the message
        `close.last_delivered` last.

        Raises: RemoteProtocolError if there is no such subscription.
        """
        for subscription in close.subscriptions:
            self._check_exists(session, subscription)
        consumers = [session.consumers[name] for name in close.subscriptions if name in session.consumers]
        self.requeue_delivered(session, consumers, close.last_delivered)
        for subscription in dict.fromkeys(close.subscriptions):
            self._end_subscription(session, subscription)

    def requeue_delivered(
        self, session: ConnectionState, consumers: Iterable[BrokerConsumer], last_delivered: int | None
    ) -> None:
        """Requeue the messages that the program of a JMS client got from one of these consumers, which are about to
        end. These are the message `last_delivered` and all that its consumer got before and still holds. An attempt
        counts for each. Does nothing if no consumer holds that message."""
        for consumer in consumers:
            if last_delivered not in consumer.held or consumer.mode is AckMode.AUTO:
                continue
            sequences = consumer.sequences_up_to(last_delivered)
            for entry in by_queue([consumer.held.pop(sequence) for sequence in sequences]):
                self._settlement.requeue(entry, RequeueReason.CLOSED)
            session.last_batch = max(session.last_batch, self._commit_state.latest_batch)

    @staticmethod
    def _check_exists(session: ConnectionState, subscription: str) -> None:
        """Raise RemoteProtocolError if the connection has no such subscription."""
        if subscription not in session.consumers and subscription not in session.browsers:
            raise RemoteProtocolError(f"there is no subscription {subscription!r} on this connection", Code.NOT_FOUND)

    def _end_subscription(self, session: ConnectionState, subscription: str) -> None:
        """End a consumer or a browser, and remove the queue of a topic subscription that is not durable."""
        browser = session.browsers.pop(subscription, None)
        if browser is not None:
            self.end_browser(browser)
            return
        consumer = session.consumers.pop(subscription)
        self.end_consumer(consumer, is_exempt=True)
        queue = consumer.queue
        if queue is not None and queue.is_subscription:
            session.temporary_queues.remove(queue)
            self._queues.drop_temporary(queue, session)

    def _unsubscribe_durable(self, session: ConnectionState, unsubscribe: Unsubscribe) -> None:
        queue = self._queues.require_durable(unsubscribe.durable_key)
        consumer = session.consumers.get(unsubscribe.subscription)
        if any(other is not consumer for other in self._clients.receivers_of(queue).consumers):
            raise RemoteProtocolError(
                f"the durable subscription {unsubscribe.durable_key!r} is in use by another consumer", Code.IN_USE
            )
        if consumer is not None and consumer.queue is queue:
            del session.consumers[unsubscribe.subscription]
            self.end_consumer(consumer, is_exempt=True)
        self._queues.end_durable_subscription(queue)
        session.last_batch = self._commit_state.batch.number

    def end_consumer(self, consumer: BrokerConsumer, *, is_exempt: bool) -> None:
        """End a consumer, and requeue the messages that it holds.

        If `is_exempt`, no attempt counts. Else an attempt counts for each started message of a truenext client, or for
        the first message that the consumer of a plain client holds. In auto mode no attempt counts.
        """
        self._subtract_memory_use(consumer)
        if consumer.pull_request is not None:
            self._pull_requests.remove_consumer(consumer)
        queues = self._wildcards.unsubscribe(consumer) if isinstance(consumer, Wildcard) else consumer.all_queues()
        for queue in queues:
            self._clients.remove_consumer(consumer, queue)
            # Shrink now: without consumers, perhaps no dispatch frees the containers until the queue is removed.
            queue.shrink()
            self._selections.remove_consumer(consumer, queue)
        counts_attempt = not is_exempt and consumer.mode is not AckMode.AUTO
        is_truenext_client = consumer.session.is_truenext_client
        reports_started = consumer.reports_started
        held = consumer.held.values()
        first = next(iter(held), None)
        for entry in held if consumer.queue is not None else by_queue(held):
            is_attempt = counts_attempt and (entry.is_started if is_truenext_client else entry is first)
            if counts_attempt and not entry.attempts:
                entry.was_lost = True
            reason = RequeueReason.LOST if is_attempt else RequeueReason.RELEASED
            self._settlement.requeue(entry, reason, reports_started=reports_started)
        consumer.held.clear()
        consumer.session.served_consumers.pop(consumer, None)
        for queue in queues:
            self._events.unsubscribed(consumer, queue)
            # Most queues of a wildcard consumer have no other receiver that could get more now, and need no dispatch.
            has_no_others = not (
                self._clients.receivers_of(queue).consumers or queue.has_groups or consumer.is_exclusive
            )
            if not (has_no_others and isinstance(consumer, Wildcard)):
                self._commit_state.touched_queues[queue] = None

    # ---- Memory ----

    def _check_memory(self, subscribe: Subscribe | Browse, size: int) -> None:
        """Check that there is memory for a subscription. `size` is the number of bytes that the subscription takes in
        existing queues.

        Raises: RemoteProtocolError if there is no memory, even after unused queues were removed.
        """
        size += consumer_size(subscribe.subscription, subscribe.destination)
        size += self._memory.bytes_for_selector(subscribe.selector)
        if not self._memory.has_space_for_consumer(size):
            self._queues.free_queue_memory()
            if not self._memory.has_space_for_consumer(size):
                raise consumer_memory_error(size, self._memory)

    def _add_memory_use(self, subscriber: Subscriber) -> None:
        self._memory.queue_bytes += consumer_size(subscriber.subscription, subscriber.destination)
        self._memory.add_selector(subscriber.selector)

    def _subtract_memory_use(self, subscriber: Subscriber) -> None:
        self._memory.queue_bytes -= consumer_size(subscriber.subscription, subscriber.destination)
        self._memory.remove_selector(subscriber.selector)


def _no_temporary_error(destination: Destination) -> RemoteProtocolError:
    noun = "topic" if destination.kind is DestinationKind.TOPIC else "queue"
    return RemoteProtocolError(
        f"there is no temporary {noun} {destination.address}: create it before you subscribe to it", Code.NOT_FOUND
    )


def _is_same_subscription(existing: Destination, requested: Destination) -> bool:
    """Return whether both destinations are to the same topic with equivalent selectors."""
    return existing.topic == requested.topic and are_equivalent(existing.selector, requested.selector)
