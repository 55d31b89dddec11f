"""Routing of topics: finds the queues that get a message sent to a topic.

A topic stores nothing. Each subscription to the topic has its own queue. A message sent to the topic is put into the
queue of each subscription whose selector matches; all these queues share one message object. A virtual topic
`VirtualTopic.NAME` also sends to the ordinary queues `Consumer.ANY.VirtualTopic.NAME`.

    Route         the subscriptions to one topic, kept for the next message
    RouteAhead    the queues that get one message, found before the message is accepted

Matching many patterns, or comparing many or large selectors, takes longer than one step should. In that case the broker
finds the queues *ahead*: before it accepts the message, in several steps. When the message is accepted, only
subscriptions made since are compared.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import chain

from truenext.engine.state.queue import Queue
from truenext.errors import Code, RemoteProtocolError
from truenext.model.destination import Destination, virtual_topic
from truenext.model.forms import comparison_ns
from truenext.model.limits import TOPIC_SUBSCRIPTIONS_MAX
from truenext.model.message import SentMessage
from truenext.model.pattern import is_pattern, matches
from truenext.model.selector import Selector, compile_stored_selector

CACHE_MAX = 65_536
"""Total cost of the kept routes above which all routes are dropped, so that routes of topics that get only one message
do not fill memory. Each subscription of a route costs 1."""

KEPT_ROUTE_COST = 16
"""Cost of a kept route, in addition to the cost of its subscriptions."""

QUICK_SUBSCRIPTIONS_MAX = 128
"""Number of topic subscriptions of the whole broker up to which, if none has a selector, the queues of a message are
found in one step. Otherwise the cost of the search is estimated, and a costly search is made ahead."""

PIECE_NS = 250_000
"""Nanoseconds that one step of a search for the queues of a message should take."""
MATCH_NS = 1500
"""Approximate longest time, in nanoseconds, of matching a topic with a pattern of a few words."""


class TopicSubscription:
    """Queue that gets the messages sent to a topic, or to the topics of a pattern."""

    __slots__ = ("number", "queue", "selector", "topic", "words")

    def __init__(self, number: int, queue: Queue, topic: str, selector: Selector | None) -> None:
        self.number = number
        """Number of the subscription, in order of registration."""
        self.queue = queue
        self.topic = topic
        self.words = topic.split(".") if is_pattern(topic) else None
        """Words of the pattern; None if `topic` is not a pattern."""
        self.selector = selector

    def is_to(self, topic: str, words: list[str]) -> bool:
        return self.topic == topic if self.words is None else matches(self.words, words)


class Route:
    """All subscriptions to one topic, with and without selectors."""

    __slots__ = ("as_of", "base_ns", "byte_ns", "queues", "selector_count", "subscriptions")

    def __init__(self, subscriptions: list[TopicSubscription], as_of: int) -> None:
        self.subscriptions = subscriptions
        self.as_of = as_of
        """Number of the last subscription registered before the route was found."""
        selectors = [each.selector for each in subscriptions if each.selector is not None]
        self.queues = None if selectors else [each.queue for each in subscriptions]
        """Queues of the subscriptions; None if any has a selector."""
        self.selector_count = len(selectors)
        self.base_ns = sum(selector.base_ns for selector in selectors)
        self.byte_ns = sum(selector.byte_ns for selector in selectors)


class TopicRouter:
    def __init__(self) -> None:
        self._subscriptions: dict[Queue, TopicSubscription] = {}
        """Subscriptions by queue, in the order of their numbers."""
        self._by_topic: dict[str, dict[Queue, TopicSubscription]] = {}
        self._by_pattern: dict[str, dict[Queue, TopicSubscription]] = {}
        """Subscriptions to patterns, by the pattern's first word."""
        self._pattern_count = 0
        self._selector_count = self._base_ns = self._byte_ns = 0
        """Number of the selectors of all subscriptions, and estimated nanoseconds of comparing one message with them: a
        fixed part, and a part for each byte of the message's header lines."""
        self.last_number = 0
        """Number of the subscription registered last."""
        self._routes: dict[str, Route] = {}
        self._routes_size = 0

    @property
    def may_take_long(self) -> bool:
        """Whether finding the queues of a message may take longer than one step may."""
        return self._base_ns > 0 or len(self._subscriptions) > QUICK_SUBSCRIPTIONS_MAX

    # ---- Subscriptions ----

    def check_can_add(self, destination: Destination) -> None:
        """Check that the topic or pattern may have one more subscription.

        Raises: RemoteProtocolError if it has the most subscriptions allowed.
        """
        topic = _topic_of(destination)
        if is_pattern(topic):
            count, of = self._pattern_count, "to patterns of topics"
        else:
            count, of = len(self._by_topic.get(topic, ())), f"to topic {topic!r}"
        if count >= TOPIC_SUBSCRIPTIONS_MAX:
            raise RemoteProtocolError(
                f"{TOPIC_SUBSCRIPTIONS_MAX} subscriptions {of}, the most allowed: end some, or use more topics",
                Code.LIMIT,
            )

    def add(self, queue: Queue) -> None:
        """Register a new queue, if it is the queue of a topic subscription or of a virtual topic."""
        topic = _topic_of(queue.destination)
        if not topic:
            return
        selector = None
        if queue.destination.selector:
            selector = compile_stored_selector(queue.destination.selector)
            queue.memory.add_selector(selector)
            self._selector_count += 1
            self._base_ns += selector.base_ns
            self._byte_ns += selector.byte_ns
        self.last_number += 1
        subscription = self._subscriptions[queue] = TopicSubscription(self.last_number, queue, topic, selector)
        if subscription.words is None:
            self._by_topic.setdefault(topic, {})[queue] = subscription
        else:
            self._by_pattern.setdefault(subscription.words[0], {})[queue] = subscription
            self._pattern_count += 1

    def remove(self, queue: Queue) -> None:
        subscription = self._subscriptions.pop(queue)
        queue.memory.remove_selector(subscription.selector)
        if subscription.selector is not None:
            self._selector_count -= 1
            self._base_ns -= subscription.selector.base_ns
            self._byte_ns -= subscription.selector.byte_ns
        if subscription.words is None:
            _remove_queue(self._by_topic, subscription.topic, queue)
            self._forget(subscription.topic)
        else:
            _remove_queue(self._by_pattern, subscription.words[0], queue)
            self._pattern_count -= 1
            self._routes.clear()
            self._routes_size = 0

    def has(self, queue: Queue) -> bool:
        return queue in self._subscriptions

    def added_since(self, number: int) -> list[TopicSubscription]:
        """Return the subscriptions registered after the one with this number."""
        added: list[TopicSubscription] = []
        for subscription in reversed(self._subscriptions.values()):
            if subscription.number <= number:
                break
            added.append(subscription)
        return added

    # ---- Messages ----

    def has_subscription(self, topic: str) -> bool:
        """Return whether there is a subscription to exactly this topic; patterns do not count."""
        return topic in self._by_topic

    def queues_of(self, topic: str, message: SentMessage) -> list[Queue]:
        """Return the queues that get a message sent to a topic."""
        route = self._route_of(topic)
        if route.queues is not None:
            return route.queues
        return [each.queue for each in route.subscriptions if each.selector is None or each.selector.matches(message)]

    def cost_ns(self, topic: str, message: SentMessage) -> int:
        """Return an upper estimate, in nanoseconds, of the comparisons of `queues_of`."""
        route = self._routes.get(topic)
        if route is None:
            # At most all subscriptions are to this topic.
            compared_ns = comparison_ns(message, self._base_ns, self._byte_ns, self._selector_count)
            return MATCH_NS * self._pattern_count + compared_ns
        added = min(self.last_number - route.as_of, len(self._subscriptions))
        return comparison_ns(message, route.base_ns, route.byte_ns, route.selector_count) + MATCH_NS * added

    def find_route(self, topic: str) -> Generator[None, None, Route]:
        """Find the subscriptions to a topic, a part of the search in each step."""
        as_of = self.last_number
        known = self._routes.get(topic)
        if known is None:
            found: list[TopicSubscription] = []
            candidates = list(self._by_topic.get(topic, {}).values())
            for first in (topic.partition(".")[0], "*", ">"):
                candidates += self._by_pattern.get(first, {}).values()
        elif known.as_of == as_of:
            return known
        else:
            candidates, found = self.added_since(known.as_of), list(known.subscriptions)
        words = words_of(topic)
        step = PIECE_NS // MATCH_NS
        for start in range(0, len(candidates), step):
            if start:
                yield
            found += [each for each in candidates[start : start + step] if each.is_to(topic, words)]
        # Some may have ended between the pieces.
        route = Route([each for each in found if self.has(each.queue)], as_of)
        self._forget(topic)
        if self._routes_size + _size(route) > CACHE_MAX:
            self._routes.clear()
            self._routes_size = 0
        self._routes[topic] = route
        self._routes_size += _size(route)
        return route

    def _route_of(self, topic: str) -> Route:
        route = self._routes.get(topic)
        if route is None or route.as_of != self.last_number:
            steps = self.find_route(topic)
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]
        return route

    def _forget(self, topic: str) -> None:
        route = self._routes.pop(topic, None)
        if route is not None:
            self._routes_size -= _size(route)


class RouteAhead:
    """Queues that get a message sent to topics, found before the message is accepted."""

    __slots__ = ("_found", "_router")

    def __init__(self, router: TopicRouter) -> None:
        self._router = router
        self._found: dict[str, tuple[list[Queue], int]] = {}
        """By topic: the queues found, and the number of the last subscription that was compared."""

    @property
    def count(self) -> int:
        """Number of queues found so far that are still subscribed."""
        queues = set(chain.from_iterable(queues for queues, _ in self._found.values()))
        return sum(map(self._router.has, queues))

    def find(self, topic: str, message: SentMessage) -> Iterator[None]:
        """Search for the queues that get the message from one topic, a part in each step. The result is in `count` and
        `queues_of`. A second call searches only the subscriptions made since the first."""
        queues, as_of = self._found.get(topic, ([], -1))
        if as_of < 0:
            route = yield from self._router.find_route(topic)
            if route.queues is not None:
                self._found[topic] = (route.queues, route.as_of)
                return
            candidates, as_of = route.subscriptions, route.as_of
        else:
            candidates = self._added_since(topic, as_of)
            as_of = self._router.last_number
        found: list[Queue] = []
        spent_ns = 0
        for subscription in candidates:
            selector = subscription.selector
            if selector is not None:
                cost_ns = selector.cost_ns(message)
                if spent_ns and spent_ns + cost_ns > PIECE_NS:
                    yield
                    spent_ns = 0
                spent_ns += cost_ns
                if not selector.matches(message):
                    continue
            found.append(subscription.queue)
        self._found[topic] = (queues + found, as_of)

    def cost_ns(self, topic: str, message: SentMessage) -> int:
        """Return an upper estimate, in nanoseconds, of the comparisons that are left for `queues_of`."""
        if topic not in self._found:
            return self._router.cost_ns(topic, message)
        added = self._router.added_since(self._found[topic][1])
        selectors = [each.selector for each in added if each.selector is not None]
        return MATCH_NS * len(added) + sum(selector.cost_ns(message) for selector in selectors)

    def queues_of(self, topic: str, message: SentMessage) -> list[Queue]:
        """Return the queues that get the message from one topic now."""
        if topic not in self._found:
            return self._router.queues_of(topic, message)
        queues, as_of = self._found[topic]
        return [queue for queue in queues if self._router.has(queue)] + [
            each.queue
            for each in self._added_since(topic, as_of)
            if each.selector is None or each.selector.matches(message)
        ]

    def _added_since(self, topic: str, number: int) -> list[TopicSubscription]:
        words = words_of(topic)
        return [each for each in self._router.added_since(number) if each.is_to(topic, words)]


def _size(route: Route) -> int:
    """Return the cost of a kept route, which CACHE_MAX limits."""
    return KEPT_ROUTE_COST + len(route.subscriptions)


def words_of(topic: str) -> list[str]:
    """Return the words of a topic that a pattern may match. A temporary topic has none: it is private to its
    connection."""
    return [] if topic.startswith("/") else topic.split(".")


def _topic_of(destination: Destination) -> str:
    """Return the topic or pattern from which the queue of a destination gets messages; "" if there is none."""
    return destination.topic or virtual_topic(destination.name)


def _remove_queue(subscriptions: dict[str, dict[Queue, TopicSubscription]], key: str, queue: Queue) -> None:
    del subscriptions[key][queue]
    if not subscriptions[key]:
        del subscriptions[key]
