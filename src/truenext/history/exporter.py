"""The process beside a broker that turns ended history files into Parquet.

It has the lowest priority, so that it works when the broker leaves processor time over, and it is a process, so that
it never takes the interpreter from the event loop. It lags behind a busy broker by files, never by data: what is not
exported yet is read from the broker's own files.

Without numpy and pyarrow there is no such process: a thread of the broker deletes old files, some hundred at most.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from threading import Lock, Thread

from truenext.history.export import INSTALL_HINT, can_write_parquet, try_to_delete_old_files
from truenext.model.limits import HISTORY_BYTES_MAX, HISTORY_DAYS_MAX

logger = logging.getLogger(__name__)


class HistoryExporter:
    """`start` is for any thread."""

    def __init__(self, folder: Path, *, bytes_max: int = HISTORY_BYTES_MAX, days_max: int = HISTORY_DAYS_MAX) -> None:
        """What is kept of history is `delete_old_files`'s."""
        self._folder = folder
        self._retention = (bytes_max, days_max)
        self._can_export = can_write_parquet()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: Thread | None = None
        self._start_lock = Lock()
        if not self._can_export:
            logger.info(
                "history stays in the broker's own files, for numpy and pyarrow are not installed",
                extra={"folder": str(folder), "install": INSTALL_HINT},
            )

    @property
    def is_running(self) -> bool:
        process, thread = self._process, self._thread
        return (process is not None and process.poll() is None) or (thread is not None and thread.is_alive())

    def set_retention(self, *, bytes_max: int, days_max: int) -> None:
        """From here on so much history is kept. What is too much goes at once, or, if a run is under way, the next
        time."""
        if self._retention != (bytes_max, days_max):
            self._retention = (bytes_max, days_max)
            self.start()

    def start(self) -> None:
        """Export the closed files and delete old ones. While a run is under way nothing is started; the next run sees
        to what it misses."""
        with self._start_lock:
            if self.is_running:
                return
            if not self._can_export:
                # An event loop has no time for the disk.
                self._thread = Thread(
                    target=try_to_delete_old_files, args=(self._folder, *self._retention), daemon=True
                )
                self._thread.start()
                return
            self._process = subprocess.Popen(
                [sys.executable, "-m", "truenext.history.export", str(self._folder), *map(str, self._retention)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                close_fds=True,
                start_new_session=True,
            )

    def close(self) -> None:
        """Leave no process and no thread behind; what a process does not finish is done the next time."""
        with self._start_lock:
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()
            if self._process is not None:
                self._process.wait()
            if self._thread is not None:
                self._thread.join()
