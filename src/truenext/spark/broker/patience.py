"""Retries of a task or of the driver while the broker cannot be reached, or has no space."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from truenext.clock import monotonic
from truenext.errors import Code, ConnectionLost, Refused, TruenextError

_DELAY_FIRST_S = 0.05
_DELAY_MAX_S = 2.0

PASSING_CODES = frozenset({Code.NO_SPACE, Code.LIMIT, Code.TOO_SLOW, Code.STALE, Code.BUSY, Code.DRAINING})
"""Codes of refusals that may pass: no disk space, a drain, or too many transactions, connections or logins."""


class Patience:
    """Limit of the time for which attempts may fail, counted from the last success."""

    def __init__(self, seconds: float, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._seconds = seconds
        self._sleep = sleep
        self._failing_since: float | None = None
        self._failures = 0

    def on_success(self) -> None:
        self._failing_since = None
        self._failures = 0

    def wait(self, error: Exception) -> None:
        """Sleep until the next attempt.

        Raises: `error` if a retry cannot help; TruenextError, with `error` as its cause, if the time is over
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
                f"{error}; the query has tried for {self._seconds:g} s (option patience). Restart it when the broker "
                f"is available and has free space: it continues with the same rows"
            ) from error
        longest = min(_DELAY_FIRST_S * 2 ** min(self._failures, 10), _DELAY_MAX_S)
        self._failures += 1
        self._sleep(longest * (0.5 + random.random() / 2))
