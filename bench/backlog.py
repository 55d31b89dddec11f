"""Benchmark of a backlog: millions of messages that no consumer takes for a while.

python -m bench.backlog --messages 1000000,10000000
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import machine, report
from bench.backlog_load import LAST, MESSAGES_PER_PROBE, SIZES, Backlog, Pace, Probes, drain, fill, first, probe
from bench.brokers import BrokerError, Truenext
from bench.memory import MEMORY_TARGET, MemoryWatch
from bench.options import positive, sizes
from bench.progress import guarded, phase, print_line, work
from bench.workers import Job, WorkerError, end_in_order

RATE_TARGET = 0.8
"""Share of the rate with the smallest backlog that is left with the largest, at least."""
WAIT_TARGET = 0.010
"""Seconds in which 99 of 100 messages of priority 9 must come that are sent while all others wait."""
START_TARGET = 5.0
"""Longest time in seconds from the start of the process until it accepts connections, with all messages waiting."""

MESSAGE_BYTES = 2.4 * 1024
"""Bytes of disk for a waiting message of 1 KiB, in checkpoint and journal together."""
EVENT_BYTES = 32
"""Bytes of disk for an event of the history: half in the broker's files, and half in Parquet for a while."""
EVENTS_PER_MESSAGE = 3
"""Accepted, dispatched and acknowledged; the history keeps these events after the message is deleted."""
LEAST_BYTES = 128 << 20
"""Four segments of the journal: disk space of a broker before its first message, and in reserve."""

_PATIENCE = 1200.0
"""Limit in seconds of a start or a clean stop: far above the target, so that a miss is still measured."""
_SECONDS_PER_MESSAGE = 0.01
"""Limit of a phase (100 messages a second)."""


@dataclass
class Figures:
    """Figures of one backlog; None if not measured."""

    backlog: Backlog
    enqueue: Pace | None = None
    probes: Probes | None = None
    stop: float | None = None
    """Seconds from SIGTERM to the end of the process."""
    start: float | None = None
    """Seconds from the start of the process until it accepts connections, after a clean stop."""
    start_first: float | None = None
    """Seconds from the start of the process until a new consumer has its first message."""
    crash_start: float | None = None
    """Seconds as `start`, but after kill -9; `crash_first` is the same for `start_first`."""
    crash_first: float | None = None
    drain: Pace | None = None
    memory: dict[str, int] = field(default_factory=dict)
    """Peak of RssAnon in KiB, by phase."""

    def percentile(self, share: float) -> float | None:
        """Return the seconds in which this share of the late messages came."""
        return None if self.probes is None else _percentile([seconds for _, seconds in self.probes.waits], share)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if min(options.messages) < options.probes * MESSAGES_PER_PROBE:
        parser.error(f"--probes: at most one for {MESSAGES_PER_PROBE} messages, or the backlog may run out meanwhile")
    end_in_order()
    kinds = [True] * options.persistent + [False] * options.transient or [True, False]
    with tempfile.TemporaryDirectory(prefix="bench-backlog-", dir=options.dir, ignore_cleanup_errors=True) as folder:
        return _Bench(options, kinds, Path(folder)).measure()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.backlog", description=__doc__)
    parser.add_argument(
        "--messages",
        type=sizes,
        default=[1_000_000, 10_000_000],
        metavar="N,N",
        help="sizes of the backlog, one after the other (default 1000000,10000000)",
    )
    parser.add_argument(
        "--persistent", action="store_true", help="only persistent messages, unless --transient is said"
    )
    parser.add_argument("--transient", action="store_true", help="only transient messages, unless --persistent is said")
    parser.add_argument(
        "--probes",
        type=positive,
        default=200,
        metavar="N",
        help="messages of priority 9 sent while all others wait (default 200)",
    )
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="for priorities, bodies, moments")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the broker's data goes (default: temp folder)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table to FILE")
    return parser


def disk_bytes(messages: int) -> int:
    """Return the largest size of the data folder, history included."""
    return int(messages * (MESSAGE_BYTES + EVENT_BYTES * EVENTS_PER_MESSAGE)) + LEAST_BYTES


class _Bench:
    """Measurement of several backlogs, each with a broker of its own, and their table."""

    def __init__(self, options: argparse.Namespace, kinds: list[bool], folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._backlogs = [
            Backlog("/queue/bench.backlog", persistent, messages, options.seed)
            for persistent in kinds
            for messages in options.messages
        ]

    def measure(self) -> int:
        notes = [*machine.facts(self._folder), ("seed", str(self._options.seed)), ("disk", self._need())]
        for name, value in notes:
            print_line(f"{name}: {value}")
        if (reason := self._no_space_reason()) is not None:
            print_line(f"failed: {reason}")
            return 1
        all_figures: list[Figures] = []
        status = guarded(lambda: self._measure_all(all_figures))
        tables = [(_title(kind), table(kind)) for kind in _by_kind(all_figures)]
        for title, rows in tables:
            print(f"\n{title}\n{report.plain(rows)}")
        if self._options.markdown and status == 0:
            self._options.markdown.parent.mkdir(parents=True, exist_ok=True)
            texts = [f"{title}\n\n{report.markdown(rows, [])}" for title, rows in tables]
            self._options.markdown.write_text("\n".join([*texts, report.bullets(notes), ""]))
        return status

    def _need(self) -> str:
        most = max(self._options.messages)
        history = most * EVENT_BYTES * EVENTS_PER_MESSAGE
        return (
            f"needs {_gib(disk_bytes(most))} in {self._folder} ({MESSAGE_BYTES / 1024:g} KiB a message, journal"
            f" included, and {_gib(history)} of history); {_gib(shutil.disk_usage(self._folder).free)} are free"
        )

    def _no_space_reason(self) -> str | None:
        need, free = disk_bytes(max(self._options.messages)), shutil.disk_usage(self._folder).free
        if need <= free:
            return None
        return f"{_gib(need)} of disk are needed in {self._folder}, {_gib(free)} are free: make room, or say --dir"

    def _measure_all(self, all_figures: list[Figures]) -> None:
        """Measure. If the measurement ends early, broker and data are removed."""
        for backlog in self._backlogs:
            all_figures.append(Figures(backlog))
            _BacklogRun(all_figures[-1], self._folder, self._options.probes).measure()


class _BacklogRun:
    """Measurement of one backlog, from its first message to its last."""

    def __init__(self, figures: Figures, folder: Path, probes: int) -> None:
        self._figures = figures
        self._backlog = figures.backlog
        self._probes = probes
        self._broker = Truenext(folder)
        self._memory = MemoryWatch(self._broker)
        self._figures.memory = self._memory.peaks

    def measure(self) -> None:
        """Raises: BrokerError, WorkerError, OSError, ValueError"""
        print_line(f"\n{_kind(self._backlog)}, {self._backlog.messages:,} messages")
        with self._broker, self._memory:
            try:
                self._run_phases(self._figures)
            except (WorkerError, OSError, ValueError) as error:
                state = "is still running" if self._broker.is_running() else "has died"
                raise WorkerError(f"{error}\ntruenext {state}; it printed:\n{self._broker.log()[-3000:]}") from error

    def _run_phases(self, figures: Figures) -> None:
        backlog = self._backlog
        with phase("enqueue", self._memory):
            figures.enqueue = self._work("enqueued", backlog.messages, fill, backlog, self._broker.port)
            print_line(_describe_pace(figures.enqueue))
            print_line(f"  disk: {self._describe_disk(1)}")
        with phase("late messages", self._memory):
            figures.probes = self._work("late messages", self._probes, probe, backlog, self._broker.port, self._probes)
            print_line(_describe_waits(figures.probes))
        with phase("clean restart", self._memory):
            figures.stop = self._stop_cleanly()
            figures.start, figures.start_first = self._start()
        if backlog.persistent:
            # By contract, transient messages are lost after this.
            with phase("kill -9, restart", self._memory):
                self._broker.end(signal.SIGKILL, _PATIENCE)
                figures.crash_start, figures.crash_first = self._start()
        with phase("drain", self._memory):
            received = figures.probes.received
            remaining = backlog.messages - len(received)
            figures.drain = self._work("drained", remaining, drain, backlog, self._broker.port, received)
            print_line(_describe_pace(figures.drain))
            print_line(f"  all {backlog.messages:,} came exactly once and in order")
            print_line(f"  disk: {self._describe_disk(EVENTS_PER_MESSAGE)}")
        with phase("end", self._memory):
            self._stop_cleanly()

    def _work(self, done: str, total: int, job: Job, *arguments: object) -> Any:
        seconds = 60 + self._backlog.messages * _SECONDS_PER_MESSAGE
        return work(done, total, self._memory, seconds, job, *arguments)

    def _stop_cleanly(self) -> float:
        started = time.monotonic()
        status = self._broker.end(signal.SIGTERM, _PATIENCE)
        seconds = time.monotonic() - started
        print_line(f"  clean stop: {seconds:.2f} s, exit status {status}")
        if status:
            raise BrokerError(f"truenext exited with {status}; it printed:\n{self._broker.log()[-3000:]}")
        return seconds

    def _start(self) -> tuple[float, float]:
        """Return the seconds until the broker accepts connections, and until a new consumer has its first message."""
        started = time.monotonic()
        self._broker.start(_PATIENCE)
        listening = time.monotonic() - started
        first(self._broker.port, self._backlog)
        message = time.monotonic() - started
        print_line(f"  start: {listening:.2f} s until it listens, {message:.2f} s until the first message")
        return listening, message

    def _describe_disk(self, events: int) -> str:
        """Describe the disk space. `events` is the number of events of each message so far."""
        history = _bytes_in(self._broker.data / "history")
        stored = _bytes_in(self._broker.data) - history
        messages = self._backlog.messages
        return (
            f"checkpoint and journal {_gib(stored)} ({stored / messages / 1024:.2f} KiB a message), history"
            f" {_gib(history)} ({history / messages / events:.0f} bytes an event)"
        )


def table(figures: list[Figures]) -> list[list[str]]:
    """Return headings and one row for each figure, with a column for each backlog of one kind, the smallest first."""
    ordered = sorted(figures, key=lambda each: each.backlog.messages)
    headings = ["", *(f"{each.backlog.messages:,}" for each in ordered), "ratio", "target", "met"]
    rows = [headings]
    enqueues, drains = [each.enqueue for each in ordered], [each.drain for each in ordered]
    for title, paces in (("enqueue", enqueues), ("drain", drains)):
        rows.append(_rates(f"{title}, msg/s", [None if pace is None else pace.rate for pace in paces]))
        lasts = [None if pace is None else pace.last_rate for pace in paces]
        rows.append(_rates(f"{title}, the last {LAST:,} at most, msg/s", lasts))
    milliseconds = "{:,.2f} ms"
    for title, share, target in (("median", 0.5, None), ("99 %", 0.99, WAIT_TARGET), ("longest", 1.0, None)):
        waits = [each.percentile(share) for each in ordered]
        rows.append(_limits(f"late priority 9, {title}", waits, target, milliseconds, 1000))
    seconds = "{:,.2f} s"
    rows.append(_limits("clean stop", [each.stop for each in ordered], None, seconds))
    rows.append(_limits("start until it listens", [each.start for each in ordered], START_TARGET, seconds))
    rows.append(_limits("start until the first message", [each.start_first for each in ordered], None, seconds))
    if ordered[0].backlog.persistent:
        crashed = [each.crash_start for each in ordered]
        rows.append(_limits("after kill -9, until it listens", crashed, START_TARGET, seconds))
        rows.append(_limits("after kill -9, first message", [each.crash_first for each in ordered], None, seconds))
    peaks = [max(each.memory.values(), default=0) or None for each in ordered]
    rows.append(_limits("RssAnon at most", peaks, MEMORY_TARGET, "{:,.0f} MiB", 1 / 1024))
    return rows


def _rates(title: str, rates: list[float | None]) -> list[str]:
    first_rate, last_rate = rates[0], rates[-1]
    ratio = last_rate / first_rate if first_rate and last_rate and len(rates) > 1 else None
    return [
        title,
        *("-" if rate is None else f"{rate:,.0f}" for rate in rates),
        "-" if ratio is None else f"{ratio:.2f}",
        f">= {RATE_TARGET:g}",
        "-" if ratio is None else _yes(ratio >= RATE_TARGET),
    ]


def _limits(
    title: str, values: Sequence[float | None], target: float | None, shape: str, scale: float = 1.0
) -> list[str]:
    """Return a row of the table. `shape` and `scale` format a value."""
    measured = [value for value in values if value is not None]
    return [
        title,
        *("-" if value is None else shape.format(value * scale) for value in values),
        "-",
        "-" if target is None else f"<= {shape.format(target * scale)}",
        "-" if target is None or not measured else _yes(max(measured) <= target),
    ]


def _yes(is_met: bool) -> str:
    return "yes" if is_met else "no"


def _by_kind(all_figures: list[Figures]) -> list[list[Figures]]:
    kinds = dict.fromkeys(figures.backlog.persistent for figures in all_figures)
    return [[figures for figures in all_figures if figures.backlog.persistent is kind] for kind in kinds]


def _title(figures: list[Figures]) -> str:
    return f"{_kind(figures[0].backlog)}, {SIZES[0]} to {SIZES[1]} bytes, priorities 0 to 8"


def _kind(backlog: Backlog) -> str:
    return "persistent" if backlog.persistent else "transient"


def _describe_pace(pace: Pace) -> str:
    return (
        f"  {pace.messages:,} in {pace.seconds:.1f} s: {pace.rate:,.0f} msg/s, the last {pace.last_messages:,}"
        f" {pace.last_rate:,.0f} msg/s (load generator: {pace.processor / pace.messages * 1e6:.1f} us of processor"
        " time a message)"
    )


def _describe_waits(probes: Probes) -> str:
    lines = []
    for name, kind in (("transient", False), ("persistent", True)):
        waits = [seconds * 1000 for persistent, seconds in probes.waits if persistent is kind]
        if waits:
            half, most, longest = (_percentile(waits, share) for share in (0.5, 0.99, 1.0))
            lines.append(
                f"  late messages of priority 9, {len(waits)} {name}: median {half:.2f} ms, 99 % within {most:.2f} ms,"
                f" longest {longest:.2f} ms"
            )
    lines.append(f"  {len(probes.received):,} others taken one by one meanwhile")
    return "\n".join(lines)


def _percentile(values: list[float], share: float) -> float:
    """Return the smallest value that at least this share of all values does not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)]


def _bytes_in(folder: Path) -> int:
    """Return the disk space of the files in a folder; files that are deleted meanwhile do not count."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_blocks * 512
    return total


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


if __name__ == "__main__":
    sys.exit(main())
