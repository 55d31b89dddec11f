"""Benchmark of backups: what a backup costs a busy broker, how much its files grow, and how long a restore takes.

    meanwhile   rates and p99 of loads while a backup runs, beside the same loads before it
    loop        the longest time for which the event loop was held meanwhile, and how much of that was its own work
    restore     seconds of `truenext restore`, beside `cp` and `sha256sum` of the same files

python -m bench.backup --waiting 1000000 --runs 5
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench import machine
from bench.backlog_load import Backlog, fill
from bench.brokers import BrokerError, Truenext
from bench.load import LOADS, Load, Outcome, run
from bench.memory import MemoryWatch
from bench.options import positive
from bench.progress import guarded, print_line, work
from bench.workers import end_in_order
from truenext.blocking import connect

_MESSAGES = {"3": 40_000, "5": 1_000, "7": 10_000}
"""Number of messages of each run, by the key of its load. A run is to end before a backup does."""
_LOADS = tuple(load for load in LOADS if load.key in _MESSAGES)
_ADDED = 20_000
"""Number of messages that come to stay at once during the whole backup."""
_RATE_TARGET = 0.8
_P99_TARGET = 2.0
_RESTORE_TARGET = 1.3
_PATIENCE = 3600.0


class _BackedUp(Truenext):
    """Broker with a folder for backups, whose event loop is watched."""

    backup = Path()
    """Folder of the last whole backup."""

    def prepare(self, folder: Path) -> list[str]:
        self.backups = folder / "backups"
        self.backups.mkdir(mode=0o700)
        self.late = folder / "late"
        file = folder / "truenext.toml"
        file.write_text(f'[broker]\nbackup_dir = "{self.backups}"\n')
        serve = super().prepare(folder)[3:]
        return [sys.executable, "-m", "bench.loop_watch", str(self.late), *serve, "--config", str(file)]

    def request(self, **body: Any) -> dict[str, Any]:
        with connect(f"stomp://127.0.0.1:{self.port}") as connection:
            answer: dict[str, Any] = msgspec.json.decode(connection.control_request("backup", body))
        return answer


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    end_in_order()
    with tempfile.TemporaryDirectory(prefix="bench-backup-", dir=options.dir, ignore_cleanup_errors=True) as name:
        for fact, value in [*machine.facts(Path(name)), ("seed", str(options.seed))]:
            print_line(f"{fact}: {value}")
        return guarded(lambda: _measure(Path(name), options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.backup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--waiting", type=positive, default=1_000_000, metavar="N", help="messages that wait (default 1,000,000)"
    )
    parser.add_argument("--rate", type=positive, default=50, metavar="N", help="MiB a second of a backup (default 50)")
    parser.add_argument("--runs", type=positive, default=5, metavar="N", help="runs of each (default 5)")
    parser.add_argument("--share", type=float, default=1.0, metavar="X", help="length of a run (default 1.0)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the messages (default 1)")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="parent folder of all data (default: temporary)")
    return parser


def _measure(folder: Path, options: argparse.Namespace) -> None:
    with _BackedUp(folder) as broker, MemoryWatch(broker) as memory:
        backlog = Backlog("/queue/bench.waiting", True, options.waiting, options.seed)
        work("filled", options.waiting, memory, _PATIENCE, fill, backlog, broker.port)
        # The checkpointer has then moved what it can.
        time.sleep(2.0)
        runs = _Runs(broker, options)
        runs.measure_in_turns()
        runs.print_ratios()
        _measure_whole_backup(broker, memory, runs.spans, options)
        _restore(folder, broker, options.runs)
        broker.end(signal.SIGTERM, _PATIENCE)
        _print_loop(broker.late, runs.spans)


class _Runs:
    """Runs of all loads, each in a queue of its own, in turns without a backup and during one."""

    def __init__(self, broker: _BackedUp, options: argparse.Namespace) -> None:
        self._broker = broker
        self._options = options
        self._count = 0
        self._pairs: dict[Load, list[tuple[Outcome, Outcome]]] = {load: [] for load in _LOADS}
        """Outcomes of runs without a backup, and during one."""
        self.spans: list[tuple[float, float]] = []
        """Begin and end of each backup."""

    def measure_in_turns(self) -> None:
        """Raises: BrokerError if backups are too short"""
        for _ in range(self._options.runs):
            for load in _LOADS:
                alone = self.run(load)
                started = time.monotonic()
                self._broker.request(rate=self._options.rate << 20)
                meanwhile = self.run(load)
                is_long_enough = self._broker.request(action="show")["state"] == "running"
                if is_long_enough:
                    self._broker.request(action="stop")
                    self._pairs[load].append((alone, meanwhile))
                self._await_end()
                self.spans.append((started, time.monotonic()))
        if not all(self._pairs.values()):
            raise BrokerError("backups were shorter than runs: more messages must wait (--waiting)")

    def run(self, load: Load) -> Outcome:
        self._count += 1
        messages = max(200, int(_MESSAGES[load.key] * self._options.share))
        return run(load, self._broker.port, f"/queue/bench.{self._count}", messages, self._options.seed)

    def _await_end(self) -> None:
        while self._broker.request(action="show")["state"] == "running":
            time.sleep(0.1)

    def print_ratios(self) -> None:
        for load, pairs in self._pairs.items():
            ratio = statistics.median(meanwhile.rate / alone.rate for alone, meanwhile in pairs)
            rates = [statistics.median(each.rate for each in outcomes) for outcomes in zip(*pairs, strict=True)]
            line = (
                f"{load.title}: {rates[1]:,.0f} messages a second during a backup, {rates[0]:,.0f} without; "
                f"{ratio:.2f} (at least {_RATE_TARGET})"
            )
            if load.group == 1:
                p99s = [
                    [each.latency[1] * 1000 for each in outcomes if each.latency]
                    for outcomes in zip(*pairs, strict=True)
                ]
                ratio = statistics.median(after / before for before, after in zip(*p99s, strict=True))
                line += (
                    f"; p99 {statistics.median(p99s[1]):.2f} ms and {statistics.median(p99s[0]):.2f} ms; {ratio:.2f} "
                    f"(at most {_P99_TARGET})"
                )
            print_line(f"{line}; {len(pairs)} pairs")


def _measure_whole_backup(
    broker: _BackedUp, memory: MemoryWatch, spans: list[tuple[float, float]], options: argparse.Namespace
) -> None:
    """Make a whole backup while messages come to stay, and print how much the checkpoint's file grows."""
    size = _data_size(broker)
    started = time.monotonic()
    broker.request(rate=options.rate << 20)
    added = 0
    while broker.request(action="show")["state"] == "running":
        more = Backlog(f"/queue/bench.more.{added}", True, _ADDED, options.seed)
        work("added", _ADDED, memory, _PATIENCE, fill, more, broker.port)
        added += _ADDED
    report = broker.request(action="show")
    if report["state"] != "done":
        raise BrokerError(f"the backup has failed: {report['error']}")
    broker.backup = Path(report["folder"])
    spans.append((started, time.monotonic()))
    print_line(
        f"backup: {report['copied']:,} bytes in {time.monotonic() - started:.1f} s, while {added:,} messages came to "
        f"stay; the checkpoint's file has grown by {report['growth']:,} bytes, from {size:,}"
    )


def _data_size(broker: _BackedUp) -> int:
    return (broker.data / "lmdb/data.mdb").stat().st_size


def _restore(folder: Path, broker: _BackedUp, runs: int) -> None:
    """Restore, and copy and hash the same files, in turns."""
    restored, copied = [], []
    backup = broker.backup
    files = sorted(str(path) for path in backup.rglob("*") if path.is_file())
    for _ in range(runs):
        copied.append(_timed(["cp", "-r", str(backup), str(folder / "copy")]) + _timed(["sha256sum", *files]))
        shutil.rmtree(folder / "copy")
        restored.append(_timed([sys.executable, "-m", "truenext", "restore", str(backup), str(folder / "restored")]))
        shutil.rmtree(folder / "restored")
    restore, copy = statistics.median(restored), statistics.median(copied)
    print_line(
        f"restore: {restore:.2f} s, cp and sha256sum {copy:.2f} s, {restore / copy:.2f} (at most {_RESTORE_TARGET})"
    )


def _timed(command: list[str]) -> float:
    started = time.monotonic()
    subprocess.run([*command], stdout=subprocess.DEVNULL, check=True)
    # What is not on the disk yet, `restore` has synced.
    subprocess.run(["sync"], check=True)
    return time.monotonic() - started


def _print_loop(late: Path, spans: list[tuple[float, float]]) -> None:
    beats = [tuple(map(float, line.split())) for line in late.read_text().splitlines()]
    for name, is_meanwhile in (("during backups", True), ("without", False)):
        found = [(s, own) for at, s, own in beats if any(a <= at <= b for a, b in spans) is is_meanwhile]
        longest = max((seconds for seconds, _ in found), default=0.0)
        own = max((own for _, own in found), default=0.0)
        print_line(f"event loop {name}: held for at most {longest * 1000:.0f} ms, {own * 1000:.0f} ms by itself")


if __name__ == "__main__":
    sys.exit(main())
