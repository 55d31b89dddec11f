"""A service that runs in a process of its own in a test."""

import signal
import time
from collections.abc import Mapping
from pathlib import Path

from tests.integration.broker_process import PATIENCE_SECONDS
from tests.integration.forked import Forked


class ServiceProcess:
    """Process of `truenext stages run`, for one service of `tests.stages.services`."""

    def __init__(
        self, folder: Path, service: str, broker: str, *options: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """`service` is MODULE:NAME, such as tests.stages.services.killing:app."""
        self._log = folder / f"service-{id(self)}.log"
        command = ["stages", "run", service, "--url", broker, *options]
        self._process = Forked(command, stdout=self._log, stderr=self._log, folder=_ROOT, environment=environment)

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def lines(self, what: str) -> list[str]:
        """Return the parts of log lines that begin with this text, of each line that has it."""
        return [what + line.partition(what)[2] for line in self.log.splitlines() if what in line]

    def await_lines(self, what: str, count: int = 1) -> list[str]:
        """Wait for `count` such lines, and return them."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(found := self.lines(what)) < count:
            assert time.monotonic() < deadline, f"{what!r} is not in its log:\n{self.log}"
            time.sleep(0.005)
        return found[:count]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def status(self) -> int | None:
        """Exit status, as in subprocess: a negative number is the signal that killed the process. None while it
        runs."""
        return self._process.poll()

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Wait for the end of the process, and return its exit status."""
        return self._process.wait(seconds)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def stop(self) -> int:
        """Stop the process as an orchestrator does, and return its exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


_ROOT = Path(__file__).parents[2]
