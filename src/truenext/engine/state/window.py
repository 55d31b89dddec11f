"""How many messages a consumer may hold when nobody has said how many: measured by what it handles in a moment.

Too few, and it waits for the network; too many, and they wait behind it while others have nothing to do, or while
something more urgent comes. Both are known from what it did lately: its rate, and how long it kept a message that it
got when it held none. By Little's law rate x time is what it had in work at once, however many threads it has. It may
hold twice that, and what it handles in SLACK_MS.

A consumer may also wait for more than it was given (to acknowledge 200 together). So a full window from which nothing
came for a while doubles. Source: docs/decisions/0024-windows.md
"""

from __future__ import annotations

from truenext.engine.state.queue import Entry
from truenext.model.limits import WINDOW_DEFAULT

SIZE_INITIAL = 10
"""Messages, before anything is known."""
SIZE_MIN = 2
"""Messages: the next one is there when one is done."""
QUEUED_WORK_MS = 50
"""Work that may wait with a consumer for no other reason than that it is quick."""
MEASURE_MIN_MS = 20
"""Least time over which a rate is measured."""
STRETCH_AFTER_MS = 1000
"""Time without an answer after which a full window doubles, or PATIENCE_INTERVALS of the consumer's own, if longer."""
STRETCH_AFTER_INTERVALS = 10


class AutoWindow:
    __slots__ = (
        "_handling_ms",
        "_last_activity_ms",
        "_measured_since_ms",
        "_rate_per_ms",
        "_sampled_ms",
        "_sampled_sequence",
        "is_stretched",
        "settled_count",
        "size",
    )

    def __init__(self, now_ms: int) -> None:
        self.size = SIZE_INITIAL
        """Messages that the consumer may hold."""
        self.is_stretched = False
        """It has doubled since the consumer last answered: whoever answers is served before this one."""
        self._rate_per_ms = 0.0
        """Messages it handles in a millisecond; 0 is not known."""
        self._handling_ms = 0
        """How long it kept a message that it got when it held none."""
        self.settled_count = 0
        """Messages it has acknowledged or refused since the last look that changed anything; whoever sees it counts."""
        self._measured_since_ms = now_ms
        """When that was."""
        self._last_activity_ms = now_ms
        """When it last answered, or got a message while it held none."""
        self._sampled_sequence = 0
        """Sequence of the message by which `_handling_ms` is measured; 0 is none."""
        self._sampled_ms = 0

    def start_sample(self, sequence: int, now_ms: int) -> None:
        """It was given a message while it held none."""
        self._sampled_sequence, self._sampled_ms = sequence, now_ms
        if now_ms - self._last_activity_ms > MEASURE_MIN_MS:
            # That it did nothing while there was nothing to do says nothing.
            self.settled_count, self._measured_since_ms = 0, now_ms
        self._last_activity_ms = now_ms

    def reset(self, now_ms: int) -> None:
        """It holds less without having handled anything: what was being measured is no measure."""
        self.settled_count, self._measured_since_ms = 0, now_ms
        self._sampled_sequence = 0
        self._last_activity_ms = now_ms

    def update(self, held: dict[int, Entry], now_ms: int) -> None:
        """Make of what happened lately what it may hold from here on."""
        if not self.settled_count:
            return
        if self._sampled_sequence and self._sampled_sequence not in held:
            self._handling_ms = max(1, now_ms - self._sampled_ms)
            self._sampled_sequence = 0
        self._last_activity_ms = now_ms
        self.is_stretched = False
        elapsed_ms = now_ms - self._measured_since_ms
        if elapsed_ms < 0:
            # The clock was set back.
            self.settled_count, self._measured_since_ms = 0, now_ms
        elif elapsed_ms >= MEASURE_MIN_MS:
            self._rate_per_ms = self.settled_count / elapsed_ms
            target = int(self._rate_per_ms * (2 * self._handling_ms + QUEUED_WORK_MS)) + 1
            # Upwards at once; downwards by halves, as one slow moment says little.
            self.size = min(max(target, self.size // 2, SIZE_MIN), WINDOW_DEFAULT)
            self.settled_count, self._measured_since_ms = 0, now_ms

    def stretch(self, now_ms: int) -> bool:
        """To be called now and then while the window is full; True if it has doubled."""
        # What came since the last look counts, too: after a long silence that saw the first of many.
        per_ms = max(self._rate_per_ms, self.settled_count / max(1, now_ms - self._measured_since_ms))
        interval_ms = 1 / per_ms if per_ms else 0
        if now_ms - self._last_activity_ms < max(STRETCH_AFTER_MS, STRETCH_AFTER_INTERVALS * interval_ms):
            return False
        if self.size >= WINDOW_DEFAULT:
            return False
        self.size = min(2 * self.size, WINDOW_DEFAULT)
        self.is_stretched = True
        self._last_activity_ms = now_ms
        return True
