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

from truenext.stage.pool import THREAD_NAME_PREFIX

logger = logging.getLogger("truenext.stage")

THREADS_TIMEOUT_S: Final = 1.0
"""For threads that are about to end."""


class ExitDeadline:
    """When it has passed the process ends, if it has not by then."""

    def __init__(self) -> None:
        self._requests: SimpleQueue[tuple[float, int] | None] = SimpleQueue()
        # It is there before it is needed: no thread can be started from within a signal.
        threading.Thread(target=self._run_timer, name="truenext deadline", daemon=True).start()

    def bring_forward(self, seconds: float, status: int) -> None:
        """From now on, with this exit status; of several the earliest counts. It may be called from within a signal,
        also one that has come within another: nothing else of Python's that wakes a thread may. Then the later call
        ends first, so that the last word would be the wrong one."""
        self._requests.put((time.monotonic() + seconds, status))

    def cancel(self) -> None:
        """There is none any more."""
        self._requests.put(None)

    def _run_timer(self) -> None:
        earliest, request = (math.inf, 0), self._requests.get()
        while request is not None:
            earliest = min(earliest, request)
            at, status = earliest
            try:
                request = self._requests.get(timeout=max(0.0, at - time.monotonic()))
            except Empty:
                exit_now(status, "the process ends without waiting for stages that do not")


def join_threads(status: int) -> None:
    """Whatever a plain function that never ends had was given back."""
    deadline = time.monotonic() + THREADS_TIMEOUT_S
    threads = [each for each in threading.enumerate() if each.name.startswith(THREAD_NAME_PREFIX)]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(each.is_alive() for each in threads):
        exit_now(status, "the process ends without waiting for functions that do not")


def exit_now(status: int, reason: str, error: BaseException | None = None) -> NoReturn:
    """As if it were killed, when it has said why; or has not been able to, for nobody may read that."""

    def log() -> None:
        logger.warning(reason, exc_info=error)
        logging.shutdown()
        sys.stdout.flush()

    thread = threading.Thread(target=log, name="truenext last words", daemon=True)
    thread.start()
    thread.join(THREADS_TIMEOUT_S)
    os._exit(status)
