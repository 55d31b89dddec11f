"""How the process of a service ends in time, whatever its stages do: a plain function that never returns holds its
thread, an `async` one that swallows its cancellation holds the event loop's end, and one that blocks the event loop
holds everything."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from queue import Empty, SimpleQueue
from typing import Final, NoReturn

from truenext.stage.pool import THREADS

logger = logging.getLogger("truenext.stage")

THREADS_S: Final = 1.0
"""For threads that are about to end."""


class Deadline:
    """When it has passed the process ends, if it has not by then."""

    def __init__(self) -> None:
        self._told: SimpleQueue[tuple[float, int] | None] = SimpleQueue()
        # It is there before it is needed: no thread can be started from within a signal.
        threading.Thread(target=self._wait, name="truenext deadline", daemon=True).start()

    def set(self, seconds: float, status: int) -> None:
        """From now on, with this exit status; of several the earliest counts. It may be called from within a signal,
        also one that has come within another: nothing else of Python's that wakes a thread may. Then the later call
        ends first, so that the last word would be the wrong one."""
        self._told.put((time.monotonic() + seconds, status))

    def lift(self) -> None:
        """There is none any more."""
        self._told.put(None)

    def _wait(self) -> None:
        earliest, told = (math.inf, 0), self._told.get()
        while told is not None:
            earliest = min(earliest, told)
            at, status = earliest
            try:
                told = self._told.get(timeout=max(0.0, at - time.monotonic()))
            except Empty:
                end_at_once(status, "the process ends without waiting for stages that do not")


def leave_threads(status: int) -> None:
    """Whatever a plain function that never ends had was given back."""
    deadline = time.monotonic() + THREADS_S
    ours = [each for each in threading.enumerate() if each.name.startswith(THREADS)]
    for thread in ours:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(each.is_alive() for each in ours):
        end_at_once(status, "the process ends without waiting for functions that do not")


def end_at_once(status: int, why: str, error: BaseException | None = None) -> NoReturn:
    """As if it were killed, when it has said why; or has not been able to, for nobody may read that."""

    def say() -> None:
        logger.warning(why, exc_info=error)
        logging.shutdown()
        sys.stdout.flush()

    saying = threading.Thread(target=say, name="truenext last words", daemon=True)
    saying.start()
    saying.join(THREADS_S)
    os._exit(status)
