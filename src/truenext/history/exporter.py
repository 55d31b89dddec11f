"""The process beside a broker that turns ended history files into Parquet.

It has the lowest priority, so that it works when the broker leaves processor time over, and it is a process, so that
it never takes the interpreter from the event loop. It lags behind a busy broker by files, never by data: what is not
exported yet is read from the broker's own files.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Exporter:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """See to the files that have ended, unless a process is at it; it will then see to them the next time."""
        if self._process is not None and self._process.poll() is None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "truenext.history.export", str(self._folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            close_fds=True,
            start_new_session=True,
        )

    def close(self) -> None:
        """Leave no process behind; what it was at is done again the next time."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
        if self._process is not None:
            self._process.wait()
