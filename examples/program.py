"""Programs of the demos: processes that are killed and started again, and end with their demo."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import NoReturn

ROOT = Path(__file__).parents[1]


def exit_on_signals() -> None:
    """Let SIGTERM and SIGHUP end the demo as an exception does, so that the demo ends its processes."""

    def exit_demo(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(f"ended by {signal.Signals(number).name}")

    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, exit_demo)


class Program:
    """Process of one command line, which can be started again."""

    def __init__(self, log: Path, *command: str, environment: Mapping[str, str]) -> None:
        """`environment`: variables besides those of this process"""
        self._log = log
        self._environment = os.environ | environment
        self._command = [sys.executable, "-m", *command]
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    @property
    def status(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        """Kill the process and its child processes, such as the Java of a driver."""
        if self.status is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def stop(self) -> None:
        """Terminate the process. Raises: SystemExit if its exit status is not 0"""
        self._process.terminate()
        if self._process.wait(60):
            raise SystemExit(f"{' '.join(self._command)} has ended with {self.status}; its log is\n{self.log}")

    @property
    def log(self) -> str:
        return self._log.read_text()
