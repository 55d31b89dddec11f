"""Index of a queue's selectors by required property values, so that a message is not compared with each selector.

A hundred consumers may each wait for a value of their own (`JMSCorrelationID = '17'`). Of these hundred selectors at
most one matches a message. Such a selector is indexed by the property and the value that it requires. The message's
value of that property is looked up once, however many selectors there are.
"""

from __future__ import annotations

from truenext.engine.selecting.scan import QueueScan
from truenext.model.message import SentMessage
from truenext.model.selector import HeaderProperty, Selector

KEYS_PER_SELECTOR_MAX = 8
"""Maximum number of values by which one selector is indexed. With more, the index would take too much memory in each
queue."""


class KeyedScans:
    __slots__ = ("_by_property", "_unkeyed_scans")

    def __init__(self) -> None:
        self._by_property: dict[HeaderProperty, dict[str, dict[QueueScan, None]]] = {}
        """Scans by the property that the scan's selector requires, and by the property's value."""
        self._unkeyed_scans: dict[QueueScan, None] = {}
        """Scans that are not indexed: their selectors require no property to have one of a few values."""

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

    def candidate_scans(self, message: SentMessage, *, with_unkeyed: bool = True) -> list[QueueScan]:
        """Return the scans whose selectors may match the message."""
        found = list(self._unkeyed_scans) if with_unkeyed else []
        for key, by_text in self._by_property.items():
            text = key.text_of(message)
            if text is not None:
                found += by_text.get(text, ())
        return found


def key_count(selector: Selector | None) -> int:
    """Return the number of values by which the selector is indexed."""
    required = _required_property(selector)
    return 0 if required is None else len(required[1])


def _required_property(selector: Selector | None) -> tuple[HeaderProperty, frozenset[str]] | None:
    required = None if selector is None else selector.required
    return None if required is None or len(required[1]) > KEYS_PER_SELECTOR_MAX else required
