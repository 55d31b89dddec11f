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
from collections.abc import Callable, Sequence
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

_LOADS = tuple(load for load in LOADS if load.key in ("3", "5", "7"))
_RATE_TARGET = 0.8
_P99_TARGET = 2.0
_RESTORE_TARGET = 1.3
_PATIENCE = 3600.0


class _BackedUp(Truenext):
    """Broker with a folder for backups, whose event loop is watched."""

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
    parser.add_argument("--messages", type=positive, metavar="N", help="messages per run of every load")
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
        before = runs.measure(lambda: True)
        size_before = _data_size(broker)
        started = time.monotonic()
        broker.request(rate=options.rate << 20)
        meanwhile = runs.measure(lambda: broker.request(action="show")["state"] == "running")
        report = _await_backup(broker)
        ended = time.monotonic()
        _print_loads(before, meanwhile)
        print_line(
            f"backup: {report['copied']:,} bytes in {ended - started:.1f} s; the checkpoint's file has grown by "
            f"{report['growth']:,} bytes, from {size_before:,}"
        )
        backup = Path(report["folder"])
        _restore(folder, backup, options.runs)
        broker.end(signal.SIGTERM, _PATIENCE)
        _print_loop(broker.late, started, ended)


class _Runs:
    """Runs of all loads, each in a queue of its own."""

    def __init__(self, broker: _BackedUp, options: argparse.Namespace) -> None:
        self._broker = broker
        self._options = options
        self._count = 0

    def measure(self, may_count: Callable[[], bool]) -> dict[Load, list[Outcome]]:
        """Return the outcomes of the runs of each load, for which `may_count` is true at the end."""
        outcomes: dict[Load, list[Outcome]] = {load: [] for load in _LOADS}
        for _ in range(self._options.runs):
            for load in _LOADS:
                outcome = self._run(load)
                if may_count():
                    outcomes[load].append(outcome)
        if not all(outcomes.values()):
            raise BrokerError("the backup was too short for a run of each load: more messages must wait (--waiting)")
        return outcomes

    def _run(self, load: Load) -> Outcome:
        self._count += 1
        messages = self._options.messages or load.messages
        return run(load, self._broker.port, f"/queue/bench.{self._count}", messages, self._options.seed)


def _data_size(broker: _BackedUp) -> int:
    return (broker.data / "lmdb/data.mdb").stat().st_size


def _await_backup(broker: _BackedUp) -> dict[str, Any]:
    while (report := broker.request(action="show"))["state"] == "running":
        time.sleep(0.5)
    if report["state"] != "done":
        raise BrokerError(f"the backup has failed: {report['error']}")
    return report


def _print_loads(before: dict[Load, list[Outcome]], meanwhile: dict[Load, list[Outcome]]) -> None:
    for load in _LOADS:
        rates = [statistics.median(each.rate for each in outcomes[load]) for outcomes in (before, meanwhile)]
        line = (
            f"{load.title}: {rates[1]:,.0f} messages a second during a backup, {rates[0]:,.0f} before, "
            f"{rates[1] / rates[0]:.2f} (at least {_RATE_TARGET})"
        )
        if load.group == 1:
            p99s = [
                statistics.median(each.latency[1] * 1000 for each in outcomes[load] if each.latency is not None)
                for outcomes in (before, meanwhile)
            ]
            line += f"; p99 {p99s[1]:.2f} ms and {p99s[0]:.2f} ms, {p99s[1] / p99s[0]:.2f} (at most {_P99_TARGET})"
        print_line(f"{line}; {len(meanwhile[load])} runs")


def _restore(folder: Path, backup: Path, runs: int) -> None:
    """Restore, and copy and hash the same files, in turns."""
    restored, copied = [], []
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


def _print_loop(late: Path, started: float, ended: float) -> None:
    beats = [tuple(map(float, line.split())) for line in late.read_text().splitlines()]
    meanwhile = [(seconds, own) for at, seconds, own in beats if started <= at <= ended]
    longest = max((seconds for seconds, _ in meanwhile), default=0.0)
    own = max((own for _, own in meanwhile), default=0.0)
    print_line(f"event loop during the backup: held for at most {longest * 1000:.0f} ms, {own * 1000:.0f} ms by itself")


if __name__ == "__main__":
    sys.exit(main())
