"""How long a task or the driver does without a broker, or without room in it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from truenext.clock import monotonic
from truenext.errors import Code, ConnectionLost, Refused, TruenextError

_DELAY_FIRST_S = 0.05
_DELAY_MAX_S = 2.0

PASSING_CODES = frozenset({Code.NO_SPACE, Code.LIMIT, Code.TOO_SLOW, Code.STALE})
"""Refusals that end by themselves: room on the disk, in memory for transactions, among connections and browsers."""


class Patience:
    """Counts from the last success on."""

    def __init__(self, seconds: float, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._seconds = seconds
        self._sleep = sleep
        self._failing_since: float | None = None
        self._failures = 0

    def on_success(self) -> None:
        self._failing_since = None
        self._failures = 0

    def wait(self, error: Exception) -> None:
        """Sleep until the next try.

        Raises: `error` if trying again does not help; TruenextError with it as the cause when patience ends
        """
        if not isinstance(error, (ConnectionLost, Refused)) or (
            isinstance(error, Refused) and error.code not in PASSING_CODES
        ):
            raise error
        now = monotonic()
        if self._failing_since is None:
            self._failing_since = now
        if now - self._failing_since >= self._seconds:
            raise TruenextError(
                f"{error}; so it was for {self._seconds:g} s (option patience). Start the query again when the broker "
                f"is there: it goes on with the same rows"
            ) from error
        longest = min(_DELAY_FIRST_S * 2 ** min(self._failures, 10), _DELAY_MAX_S)
        self._failures += 1
        self._sleep(longest * (0.5 + random.random() / 2))
