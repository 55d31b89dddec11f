"""Broker of the demos: `truenext serve` as a process of its own, which is killed and started again."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


class Broker:
    """Broker that listens on the same port after each start, so that its clients can reconnect."""

    def __init__(self, data: Path, *options: str, scheme: str = "stomp") -> None:
        self.data = data
        self._options = options
        self._scheme = scheme
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def start(self) -> None:
        serve = ["serve", "--data", str(self.data), "--listen", self.url, *self._options]
        command = [sys.executable, "-m", "truenext", *serve]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("listening on "):
            raise SystemExit(f"the broker did not start: {line!r}")
        self.port = int(line.rsplit(":", 1)[1])

    def kill(self) -> None:
        self._end(self._process.kill)

    def stop(self) -> None:
        self._end(self._process.terminate)

    def _end(self, send_signal: Callable[[], None]) -> None:
        if self._process.returncode is not None:
            return
        send_signal()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()
