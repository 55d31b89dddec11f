"""What keeps a connection alive while its event loop is blocked: a thread that beats in its place.

The thread looks twice in each interval whether the loop has written anything since its last look. If it has not, the
thread writes what the loop has left over of a frame, or a heart-beat. It ends with the connection, with the loop, and
with the process; a forked child has none.
"""

from __future__ import annotations

import threading
from asyncio import AbstractEventLoop
from typing import Protocol
from weakref import ref

CHECKS_PER_INTERVAL = 2
"""In each interval: then it is never longer than the interval from one byte to the next."""
STOP_TIMEOUT_S = 1.0
"""Seconds that the end waits for the thread, which does nothing that waits."""


class HeartbeatTarget(Protocol):
    """What a heart beats for."""

    loop: AbstractEventLoop

    def send_heart_beat_if_idle(self, last_written_at: float) -> float:
        """If nothing was written since `last_written_at`, beat. Returns what to say the next time."""


class HeartbeatThread:
    def __init__(self, driver: HeartbeatTarget, heart_beat_s: float) -> None:
        # A driver that nobody has any more is not kept alive.
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
