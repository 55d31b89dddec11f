"""Routing of topics: finds the queues that get a message sent to a topic.

A topic stores nothing. Each of its subscriptions has a queue of its own, and a message sent to the topic is in all
of them, as one object: from there on a subscription's queue is like any other, but contains only messages that its
selector matches. A virtual topic also sends to ordinary queues, those called `Consumer.*.` and its name.
"""

from __future__ import annotations

from typing import TypeVar

from truenext.engine.state.queue import Queue
from truenext.model.destination import virtual_topic
from truenext.model.message import SentMessage
from truenext.model.pattern import is_pattern, matches
from truenext.model.selector import Selector, compile_stored_selector

_T = TypeVar("_T")

CACHE_MAX = 65_536
"""Queues in cached results: topics that are sent to once must not fill memory."""

CACHED_TOPIC_COST = 16
"""Cost of a cached topic itself, in queues."""


class TopicRouter:
    def __init__(self) -> None:
        self._by_topic: dict[str, dict[Queue, None]] = {}
        self._by_pattern: dict[str, dict[Queue, list[str]]] = {}
        """Queues subscribed to patterns, with the words of each pattern, by the pattern's first word."""
        self._selectors: dict[Queue, Selector] = {}
        """Selectors of the subscriptions that have one."""
        self._cache: dict[str, list[Queue]] = {}
        self._cache_size = 0

    def add(self, queue: Queue) -> None:
        """Register a new queue, if it is of a topic."""
        topic = queue.destination.topic or virtual_topic(queue.name)
        if not topic:
            return
        if queue.destination.selector:
            selector = self._selectors[queue] = compile_stored_selector(queue.destination.selector)
            queue.memory.add_selector(selector)
        if is_pattern(topic):
            words = topic.split(".")
            self._by_pattern.setdefault(words[0], {})[queue] = words
        else:
            self._by_topic.setdefault(topic, {})[queue] = None
        self._clear_cache()

    def remove(self, queue: Queue) -> None:
        """Remove the queue of an ended subscription."""
        topic = queue.destination.topic
        queue.memory.remove_selector(self._selectors.pop(queue, None))
        if is_pattern(topic):
            _remove_queue(self._by_pattern, topic.split(".")[0], queue)
        else:
            _remove_queue(self._by_topic, topic, queue)
        self._clear_cache()

    def has_subscription(self, topic: str) -> bool:
        """Return whether there is a subscription to this topic by its name."""
        return topic in self._by_topic

    def queues_of(self, topic: str, message: SentMessage) -> list[Queue]:
        """Return the queues that get a message sent to a topic."""
        queues = self._cache.get(topic)
        if queues is None:
            queues = [*self._by_topic.get(topic, ()), *self._match_patterns(topic)]
            size = CACHED_TOPIC_COST + len(queues)
            if self._cache_size + size > CACHE_MAX:
                self._clear_cache()
            self._cache[topic] = queues
            self._cache_size += size
        selectors = self._selectors
        if not selectors:
            return queues
        return [queue for queue in queues if queue not in selectors or selectors[queue].matches(message)]

    def _clear_cache(self) -> None:
        self._cache.clear()
        self._cache_size = 0

    def _match_patterns(self, topic: str) -> list[Queue]:
        if topic.startswith("/"):
            # A temporary topic is private to its connection.
            return []
        words = topic.split(".")
        found: list[Queue] = []
        for first in (words[0], "*", ">"):
            found += [queue for queue, pattern in self._by_pattern.get(first, {}).items() if matches(pattern, words)]
        return found


def _remove_queue(queues: dict[str, dict[Queue, _T]], key: str, queue: Queue) -> None:
    del queues[key][queue]
    if not queues[key]:
        del queues[key]
