"""End of a service's process in time, whatever its stages do.

A plain function that never returns holds its thread. An `async` function that ignores its cancellation holds the end of
the event loop. A function that blocks the event loop holds everything. In each of these cases this module ends the
process.
"""

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
"""Seconds for which the process waits for threads that are about to end."""


RESTART: Final = -1
"""Exit status of a process that does not end, but is replaced by a new one with the same command line."""


class ExitDeadline:
    """Timer with its own thread. It ends the process at the earliest of its deadlines."""

    def __init__(self) -> None:
        self._requests: SimpleQueue[tuple[float, int] | None] = SimpleQueue()
        # Started in advance: a signal handler cannot start a thread.
        threading.Thread(target=self._run_timer, name="truenext deadline", daemon=True).start()

    def bring_forward(self, seconds: float, status: int) -> None:
        """End the process in `seconds` with this exit status. If an earlier deadline is set, that one counts.

        Signal handlers may call this. The earliest deadline counts, not the one that was set last: a signal may
        interrupt the handler of another signal, and then the handler of the later signal finishes first. After a signal
        the process ends, even if it was about to restart.
        """
        self._requests.put((time.monotonic() + seconds, status))

    def cancel(self) -> None:
        """Remove all deadlines, and end the timer."""
        self._requests.put(None)

    def _run_timer(self) -> None:
        earliest, request = (math.inf, RESTART), self._requests.get()
        while request is not None:
            ending = [each for each in (earliest, request) if each[1] != RESTART]
            at, status = min(earliest, request)[0], min(ending, default=(0.0, RESTART))[1]
            earliest = at, status
            try:
                request = self._requests.get(timeout=max(0.0, at - time.monotonic()))
            except Empty:
                exit_now(status, "the process ends without waiting for stages that do not end")


def join_threads(status: int) -> None:
    """Wait up to THREADS_TIMEOUT_S for the threads of plain functions. If a thread still runs, end the process with
    `status`. The message of such a thread was released before."""
    deadline = time.monotonic() + THREADS_TIMEOUT_S
    threads = [each for each in threading.enumerate() if each.name.startswith(THREAD_NAME_PREFIX)]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(each.is_alive() for each in threads):
        exit_now(status, "the process ends without waiting for functions that do not end")


def exit_now(status: int, reason: str, error: BaseException | None = None) -> NoReturn:
    """Log the reason, and end the process as if it were killed. If the log is not read, the process ends after
    THREADS_TIMEOUT_S."""

    def log() -> None:
        logger.warning(reason, exc_info=error)
        logging.shutdown()
        sys.stdout.flush()

    thread = threading.Thread(target=log, name="truenext last words", daemon=True)
    thread.start()
    thread.join(THREADS_TIMEOUT_S)
    if status == RESTART:
        restart()
    os._exit(status)


def restart() -> NoReturn:
    """Replace this process by a new one with the same command line. All other threads end."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
