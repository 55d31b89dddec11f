"""Queries of Spark in processes of their own: start, signals, end, and the rows of their sink.

All processes of a query are one session of the operating system: the driver, its Java, executors and Python workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

QUERY_SECONDS = 1800
"""Longest time of a run. A loaded machine takes minutes for what takes seconds on an idle one."""


class QueryProcess:
    """A query that runs until it is killed or finds nothing more; its context manager kills the rest of it. Its
    output is appended to `query.log`."""

    def __init__(self, folder: Path, module: str, *arguments: str, package: str = "tests.spark.source") -> None:
        """Start `python -m PACKAGE.MODULE` with these arguments."""
        command = [sys.executable, "-m", f"{package}.{module}", *arguments]
        self._log = folder / "query.log"
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def __enter__(self) -> QueryProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.poll()

    @property
    def log(self) -> str:
        """Output of this process, and of the processes that it has started."""
        return self._log.read_bytes()[self._log_start :].decode(errors="replace")

    def kill_driver(self) -> None:
        """Kill the driver's Python alone."""
        self._process.kill()

    def wait(self) -> int:
        """Return the exit status, once the query has ended by itself."""
        return self._process.wait(QUERY_SECONDS)

    def processes(self, words: str = "") -> list[int]:
        """Return the processes of the query whose command has these words."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
            except OSError:
                continue
            if session == self._process.pid and words in command:
                found.append(int(folder.name))
        return found

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to every process of the query."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def end(self) -> None:
        """Kill the rest of the query's processes."""
        self.send_signal(signal.SIGKILL)
        self._process.wait()


def written_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows in the sink's folder: those of files in Spark's own log, without those of killed tasks."""
    logs = (folder / "_spark_metadata").glob("[0-9]*")
    lines = [line for log in logs for line in log.read_text().splitlines()[1:]]
    files = sorted({json.loads(line)["path"].removeprefix("file://") for line in lines})
    columns = ["sequence", "attempts", "headers"]
    return [row for file in files for row in pq.read_table(file, columns=columns).to_pylist()]


def check_each_once(rows: list[dict[str, Any]], count: int) -> None:
    """Assert that rows numbered from 0 are all there, once, and without an attempt."""
    numbers = Counter(int(dict(row["headers"])["number"]) for row in rows)
    assert [number for number, times in numbers.items() if times > 1] == []
    assert sorted(set(range(count)) - numbers.keys()) == []
    assert len(numbers) == count
    assert {row["attempts"] for row in rows} == {0}
