"""History exporter: runs a process that turns complete history files into Parquet, and deletes old history.

The process has the lowest priority, so that it uses only processor time that the broker leaves. A thread would have to
share the interpreter with the event loop. If the broker is busy, files may wait for their export; readers can read such
files as they are.

Without numpy and pyarrow there is no process. Then a thread of the broker deletes old files.
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
    """Exporter of one history folder. `start` may be called on any thread."""

    def __init__(self, folder: Path, *, bytes_max: int = HISTORY_BYTES_MAX, days_max: int = HISTORY_DAYS_MAX) -> None:
        """History beyond `bytes_max` bytes, or older than `days_max` days, is deleted."""
        self._folder = folder
        self._retention = (bytes_max, days_max)
        self._can_export = can_write_parquet()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: Thread | None = None
        self._start_lock = Lock()
        if not self._can_export:
            logger.info(
                "history stays in the broker's own files, as numpy and pyarrow are not installed",
                extra={"folder": str(folder), "install": INSTALL_HINT},
            )

    @property
    def is_running(self) -> bool:
        process, thread = self._process, self._thread
        return (process is not None and process.poll() is None) or (thread is not None and thread.is_alive())

    def set_retention(self, *, bytes_max: int, days_max: int) -> None:
        """Change how much history is kept, and delete the rest at once; if the process is running, its next run does
        so."""
        if self._retention != (bytes_max, days_max):
            self._retention = (bytes_max, days_max)
            self.start()

    def start(self) -> None:
        """Start the process, which exports the complete files and deletes old ones. Does nothing while it runs: its
        next run exports what is left."""
        with self._start_lock:
            if self.is_running:
                return
            if not self._can_export:
                # The event loop must not wait for the disk.
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
        """Stop the process, and wait for the thread. The next run of the broker does the unfinished work."""
        with self._start_lock:
            if self._process is not None:
                self._process.terminate()
                self._process.wait()
            if self._thread is not None:
                self._thread.join()
