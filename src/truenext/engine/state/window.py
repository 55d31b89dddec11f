"""Automatic window: how many messages a consumer may hold if its client has set no window.

If the window is too small, the consumer waits for the network. If it is too large, messages wait at the consumer while
other consumers are idle, or while a more urgent message arrives.

The broker measures two figures: the rate at which the consumer settles messages, and the time for which it holds a
message that it got while it held none. By Little's law, rate x time is the number of messages that the consumer
processes at once, however many threads it has. The window is twice that number, plus the messages that the consumer
processes in QUEUED_WORK_MS.

A consumer may also wait for more messages than it holds, for instance to acknowledge 200 together. So a full window
doubles if nothing was settled for a while. Source: docs/decisions/0024-windows.md
"""

from __future__ import annotations

from truenext.engine.state.queue import Entry
from truenext.model.limits import WINDOW_DEFAULT

SIZE_INITIAL = 10
"""Initial size in messages, before anything is measured."""
SIZE_MIN = 2
"""Smallest size in messages. With 2, a consumer that has finished a message already has the next one."""
QUEUED_WORK_MS = 50
"""Milliseconds of processing for which messages are kept ready at a consumer. The window has space for these messages,
and for twice as many as the consumer processes at once."""
MEASURE_MIN_MS = 20
"""Shortest time over which a rate is measured."""
STRETCH_AFTER_MS = 1000
"""Shortest time without a settled message after which a full window doubles, in ms."""
STRETCH_AFTER_INTERVALS = 10
"""Number of average intervals between settled messages after which a full window doubles, if that takes longer than
STRETCH_AFTER_MS."""


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
        """Number of messages that the consumer may hold."""
        self.is_stretched = False
        """True if the window has doubled since the consumer last settled a message."""
        self._rate_per_ms = 0.0
        """Messages processed in a millisecond; 0 if not known."""
        self._handling_ms = 0
        """Milliseconds for which the consumer held the last measured message; 0 before the first measurement. Only a
        message that it gets while it holds no other is measured."""
        self.settled_count = 0
        """Number of messages acknowledged or nacked since the last measurement; counted by the callers."""
        self._measured_since_ms = now_ms
        self._last_activity_ms = now_ms
        """Time when the consumer last settled a message, or got one while it held none."""
        self._sampled_sequence = 0
        """Sequence of the message that measures `_handling_ms`; 0 if none does."""
        self._sampled_ms = 0

    def start_sample(self, sequence: int, now_ms: int) -> None:
        """Note that the consumer got a message while it held none."""
        self._sampled_sequence, self._sampled_ms = sequence, now_ms
        if now_ms - self._last_activity_ms > MEASURE_MIN_MS:
            # It was idle because there was no work: that time must not count.
            self.settled_count, self._measured_since_ms = 0, now_ms
        self._last_activity_ms = now_ms

    def reset(self, now_ms: int) -> None:
        """Restart the measurement, after messages left the consumer unprocessed."""
        self.settled_count, self._measured_since_ms = 0, now_ms
        self._sampled_sequence = 0
        self._last_activity_ms = now_ms

    def update(self, held: dict[int, Entry], now_ms: int) -> None:
        """Fit the window to recent acknowledgements and NACKs."""
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
        """Double a full window if nothing was settled for long. Returns whether it was doubled."""
        # Messages settled since the last measurement count too: after a long silence, that saw only the first of many.
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
