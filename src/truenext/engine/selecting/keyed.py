"""Which of a queue's selectors can want a message, told without comparing it with each.

A hundred consumers that each wait for a value of their own (`JMSCorrelationID = '17'`) have a hundred selectors, of
which one wants a message at most. What such a selector asks of one property is kept here by that; what a message says
of it is looked for once, however many selectors there are.
"""

from __future__ import annotations

from truenext.engine.selecting.scan import QueueScan
from truenext.model.message import SentMessage
from truenext.model.selector import HeaderProperty, Selector

KEYS_PER_SELECTOR_MAX = 8
"""Texts up to which a selector is kept by each: more take more memory in each queue than they save time."""


class KeyedScans:
    __slots__ = ("_by_property", "_unkeyed_scans")

    def __init__(self) -> None:
        self._by_property: dict[HeaderProperty, dict[str, dict[QueueScan, None]]] = {}
        """By the property that has to be one of certain texts, and by these."""
        self._unkeyed_scans: dict[QueueScan, None] = {}
        """Those of which no such thing is known."""

    def add(self, scan: QueueScan) -> None:
        required = _required_property(scan.selector)
        if required is None:
            self._unkeyed_scans[scan] = None
            return
        key, texts = required
        by_text = self._by_property.setdefault(key, {})
        for text in texts:
            by_text.setdefault(text, {})[scan] = None

    def remove(self, scan: QueueScan) -> None:
        required = _required_property(scan.selector)
        if required is None:
            del self._unkeyed_scans[scan]
            return
        key, texts = required
        by_text = self._by_property[key]
        for text in texts:
            del by_text[text][scan]
            if not by_text[text]:
                del by_text[text]
        if not by_text:
            del self._by_property[key]

    def clear(self) -> None:
        self._by_property.clear()
        self._unkeyed_scans.clear()

    def candidate_scans(self, message: SentMessage) -> list[QueueScan]:
        found = list(self._unkeyed_scans)
        for key, by_text in self._by_property.items():
            text = key.value_in(message.header)
            if text is not None:
                found += by_text.get(text, ())
        return found


def key_count(selector: Selector | None) -> int:
    """As how many texts it is kept."""
    required = _required_property(selector)
    return 0 if required is None else len(required[1])


def _required_property(selector: Selector | None) -> tuple[HeaderProperty, frozenset[str]] | None:
    required = None if selector is None else selector.required
    return None if required is None or len(required[1]) > KEYS_PER_SELECTOR_MAX else required
