"""Java client of the benchmark: one process, which warms up once and then does each load."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from bench import brokers

_PROGRAM = Path(__file__).with_name("Loads.java")


class JavaError(RuntimeError):
    """The Java client has failed."""


class Outcome(NamedTuple):
    seconds: float
    processor_seconds: float
    """Processor time of the client."""
    median_latency_us: float
    """0 if the load does not measure it."""


def missing_reason() -> str | None:
    """Return the reason why the client cannot run here, or None."""
    if brokers.activemq_home() is None:
        return "the client of ActiveMQ is not installed (Debian: apt-get install activemq; elsewhere set ACTIVEMQ_HOME)"
    if shutil.which("java") is None or shutil.which("javac") is None:
        return "there is no JDK here, of Java 17 or later"
    return None


class JavaClient:
    """Running client, for the duration of a ``with`` block."""

    def __enter__(self) -> Self:
        home = brokers.activemq_home()
        java = shutil.which("java")
        assert home is not None and java is not None, "the caller has looked for a missing client"
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [java, "-Xmx1g", "-XX:+PerfDisableSharedMem", "-cp", f"{home}/lib/*", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # as for brokers, Ctrl-C must reach the bench only
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def run(self, load: str, url: str, queue: str, messages: int, seed: int) -> Outcome:
        """Do a load with a queue that is new.

        Raises: JavaError if the client has failed
        """
        assert self._process.stdin is not None and self._process.stdout is not None, "they are pipes"
        try:
            print(load, url, queue, messages, seed, file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._errors.seek(0)
            raise JavaError(f"the Java client failed at load {load}:\n{self._errors.read()[-3000:]}")
        return Outcome(*map(float, line.split()))
