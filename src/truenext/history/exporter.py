"""The process beside a broker that turns ended history files into Parquet.

It has the lowest priority, so that it works when the broker leaves processor time over, and it is a process, so that
it never takes the interpreter from the event loop. It lags behind a busy broker by files, never by data: what is not
exported yet is read from the broker's own files.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from threading import Lock
from typing import TYPE_CHECKING

from truenext.history.export import INSTALL_HINT, can_write_parquet
from truenext.limits import HISTORY_BYTES_MAX, HISTORY_DAYS_MAX

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)


class HistoryExporter:
    """`start` is for any thread."""

    def __init__(self, folder: Path, *, bytes_max: int = HISTORY_BYTES_MAX, days_max: int = HISTORY_DAYS_MAX) -> None:
        """What is kept of history is `delete_old_files`'s."""
        self._folder = folder
        self._limits = (bytes_max, days_max)
        self._process: subprocess.Popen[bytes] | None = None
        self._start_lock = Lock()
        if not can_write_parquet():
            # It is started nevertheless: what is too old or too much has to go.
            logger.info(
                "history stays in the broker's own files, for numpy and pyarrow are not installed",
                extra={"folder": str(folder), "install": INSTALL_HINT},
            )

    def set_limits(self, *, bytes_max: int, days_max: int) -> None:
        """From here on so much history is kept. What is too much goes at once, or, if a process is at it, the next
        time."""
        if self._limits != (bytes_max, days_max):
            self._limits = (bytes_max, days_max)
            self.start()

    def start(self) -> None:
        """See to the files that have ended, unless a process is at it; it will then see to them the next time."""
        with self._start_lock:
            if self._process is not None and self._process.poll() is None:
                return
            self._process = subprocess.Popen(
                [sys.executable, "-m", "truenext.history.export", str(self._folder), *map(str, self._limits)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                close_fds=True,
                start_new_session=True,
            )

    def close(self) -> None:
        """Leave no process behind; what it was at is done again the next time."""
        with self._start_lock:
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()
            if self._process is not None:
                self._process.wait()
