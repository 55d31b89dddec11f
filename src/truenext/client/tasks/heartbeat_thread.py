"""Heart-beat thread: keeps a connection alive while its event loop is blocked.

Twice in each interval the thread checks whether the loop has written anything since the last check. If not, the thread
writes the rest of a frame that the loop has begun, or a heart-beat. The thread ends with the connection, with the loop,
and with the process. A forked child has no such thread.
"""

from __future__ import annotations

import threading
from asyncio import AbstractEventLoop
from typing import Protocol
from weakref import ref

CHECKS_PER_INTERVAL = 2
"""Number of checks in each interval. With two checks, no more than one interval passes between two writes."""
STOP_TIMEOUT_S = 1.0
"""Seconds that `stop` waits for the end of the thread."""


class HeartbeatTarget(Protocol):
    """Driver for which the thread sends heart-beats."""

    loop: AbstractEventLoop

    def send_heart_beat_if_idle(self, last_written_at: float) -> float:
        """Send a heart-beat if nothing was written since `last_written_at`. Return the argument for the next call."""


class HeartbeatThread:
    def __init__(self, driver: HeartbeatTarget, heart_beat_s: float) -> None:
        # The thread does not keep an abandoned driver alive.
        self._driver = ref(driver)
        self._interval_s = heart_beat_s / CHECKS_PER_INTERVAL
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="truenext heart-beat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_stopped.set()
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        last_written_at = 0.0
        while not self._is_stopped.wait(self._interval_s):
            driver = self._driver()
            if driver is None or driver.loop.is_closed():
                return
            last_written_at = driver.send_heart_beat_if_idle(last_written_at)
            del driver
