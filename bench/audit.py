"""Benchmark of `truenext audit`: its time and memory for N events.

python -m bench.audit --events 10000000 --queues 1
python -m bench.audit --events 100000000 --share 0.9 --waiting 10000000 --more 1000000    the last million, by --state
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from truenext.spark.audit.command import run_audit

_WINDOW = 64
"""Number of messages that are accepted before the first of them is dispatched."""
_FILE_ROWS = 1_000_000
_PEAKS_INTERVAL_S = 2.0
_EPOCH = 1_790_000_000_000_000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.audit", description=__doc__)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--queues", type=int, default=16)
    parser.add_argument("--share", type=float, help="share of the messages that the first queue gets")
    parser.add_argument("--waiting", type=int, default=0, help="of the events: messages that wait until the end")
    parser.add_argument("--singly", action="store_true", help="each message has a batch of its own")
    parser.add_argument("--more", type=int, default=0, help="audit so many further events from a state, and alone")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--dir", type=Path, help="keep the history here, or read it from here")
    parser.add_argument("--master")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    peaks = Peaks()
    with tempfile.TemporaryDirectory(prefix="bench-audit-") as temporary:
        folder = options.dir or Path(temporary)
        if not any(folder.glob("**/*.parquet")):
            started = time.perf_counter()
            share, waiting_share = options.share or 1 / options.queues, options.waiting / options.events
            load = Load(options.queues, share, waiting_share, options.singly)
            write_history(folder, options.events + options.more, load, options.seed)
            print(f"history written in {time.perf_counter() - started:.1f} s", flush=True)
        if options.more:
            measure_state(folder, Path(temporary), options.more, options.master)
        else:
            measure("audit, start of Spark and report included", folder, Path(temporary) / "out", options.master)
        for name, of_processes in peaks.of_programs().items():
            largest = ", ".join(f"{each / 1024:,.0f}" for each in of_processes[:4])
            print(f"peak memory of {name}, of the largest processes: {largest} MiB", flush=True)


def measure(name: str, folder: Path, out: Path, master: str | None, state: Path | None = None) -> None:
    started, processor = time.perf_counter(), processor_time()
    run_audit([folder], master=master, out=out, state=state)
    seconds, processor = time.perf_counter() - started, processor_time() - processor
    print(f"{name}: {seconds:.1f} s, {processor:.1f} s of processor time", flush=True)


def measure_state(folder: Path, temporary: Path, more: int, master: str | None) -> None:
    """Audit the history without its last files, these alone, and these from the state. The first audit has the start of
    Spark."""
    files = sorted(folder.glob("**/*.parquet"))
    first, events = len(files), 0
    while events < more and first > 1:
        first -= 1
        events += pq.read_metadata(files[first]).num_rows
    last = files[first:]
    alone = temporary / "alone" / "history" / "events" / last[0].parent.name
    alone.mkdir(parents=True)
    moved = [each.rename(alone / each.name) for each in last]
    out, state = temporary / "out", temporary / "state"
    measure("audit of the events before", folder, out, master, state)
    measure("audit of the last events alone", temporary / "alone", temporary / "out-alone", master, temporary / "new")
    for source, target in zip(moved, last, strict=True):
        source.rename(target)
    measure("audit of the last events from a state", folder, out, master, state)


class Peaks:
    """Peak resident memory of this process and its descendants, also of those that end before the measurement."""

    def __init__(self) -> None:
        self._kib: defaultdict[str, dict[int, int]] = defaultdict(dict)
        Thread(target=self._watch, daemon=True).start()

    def of_programs(self) -> dict[str, list[int]]:
        """Return the peaks in KiB by name of the program, the largest first. That of this process includes the writing
        of the history, if it was not there."""
        return {name: sorted(of_process.values(), reverse=True) for name, of_process in self._kib.items()}

    def _watch(self) -> None:
        while True:
            for pid in _own_processes():
                # It may have ended.
                with suppress(OSError, KeyError):
                    status = (Path("/proc") / str(pid) / "status").read_text()
                    found = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
                    name = "the driver in Python" if pid == os.getpid() else found["Name"].strip()
                    self._kib[name][pid] = int(found["VmHWM"].split()[0])
            time.sleep(_PEAKS_INTERVAL_S)


def processor_time() -> float:
    """Return the seconds of processor time of this process, its descendants, and those of them that have ended."""
    ticks = sum(sum(map(int, fields[11:15])) for fields in _own_processes().values())
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_processes() -> dict[int, list[str]]:
    """Return the fields of /proc/PID/stat behind the name, from the state on, of this process and its descendants."""
    fields: dict[int, list[str]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields[int(stat.parent.name)] = stat.read_text().rpartition(")")[2].split()
    own = {os.getpid()}
    while more := {pid for pid, each in fields.items() if int(each[1]) in own} - own:
        own |= more
    return {pid: fields[pid] for pid in own}


@dataclass
class Load:
    queues: int
    share: float
    """Share of the rounds that the first queue gets."""
    waiting_share: float
    """Share of the events that are messages that wait until the end. No other message has so low a priority."""
    is_singly: bool
    """Each message has a batch of its own, and is persistent."""

    @property
    def commits(self) -> int:
        """Number of batches of a round."""
        return self.messages if self.is_singly else 1

    @property
    def messages(self) -> int:
        """Number of messages of a round, those that wait included."""
        other_events = 4 * _WINDOW if self.is_singly else 3 * _WINDOW + 1
        per_message = 2 if self.is_singly else 1
        share = self.waiting_share
        return _WINDOW + round(share * other_events / (1 - per_message * share))

    @property
    def events(self) -> int:
        """Number of events of a round."""
        return self.messages + self.commits + 2 * _WINDOW


def write_history(folder: Path, events: int, load: Load, seed: int) -> None:
    """Write a history in which the contract held: rounds of messages in one queue, accepted, committed if persistent,
    and `_WINDOW` of them dispatched in the true order and acknowledged."""
    numbers = np.random.default_rng(seed)
    rounds = max(1, events // load.events)
    shares = np.full(load.queues, (1 - load.share) / max(1, load.queues - 1))
    shares[0] = load.share
    names = np.array([f"orders.{each:03d}" for each in range(load.queues)])
    target = folder / "history" / "events" / "date=2026-09-21"
    target.mkdir(parents=True)
    _write(target / "0000.parquet", _head(names))
    rounds_per_file = max(1, _FILE_ROWS // load.events)
    for part, first in enumerate(range(0, rounds, rounds_per_file)):
        count = min(rounds_per_file, rounds - first)
        queues = numbers.choice(load.queues, count, p=shares)
        _write(target / f"{part + 1:04d}.parquet", _rounds(numbers, names, queues, load, first))


def _head(names: np.ndarray) -> dict[str, object]:
    """Return the start of the broker, and the subscription of a consumer to each queue."""
    count = len(names) + 1
    event = np.arange(1, count + 1)
    return {
        "event": event,
        "run": np.ones(count, np.int32),
        "at": _EPOCH + event * 20,
        "kind": ["run-started"] + ["subscribed"] * len(names),
        "reason": ["clean"] + [None] * len(names),
        "queue": [None, *names],
        "mode": [None] + ["auto"] * len(names),
        "consumer": [None, *_consumers(np.arange(len(names)))],
    }


def _consumers(queues: np.ndarray) -> np.ndarray:
    """Return the number of each queue's consumer."""
    return queues + 7


def _rounds(
    numbers: np.random.Generator, names: np.ndarray, queues: np.ndarray, load: Load, first: int
) -> dict[str, object]:
    """Return the columns of a round for each of the `queues`, the first of which is round `first` of the history."""
    count, messages, commits = len(queues), load.messages, load.commits
    priority = numbers.choice([9, 4, 1], (count, messages), p=[0.2, 0.6, 0.2])
    priority[:, _WINDOW:] = 0
    persistent = (numbers.random((count, messages)) < 0.5) | load.is_singly
    batch = 1 + np.arange(first * commits, (first + count) * commits).reshape(count, commits)
    sequence = 1 + np.arange(first * messages, (first + count) * messages).reshape(count, messages)
    order = np.lexsort((sequence[:, :_WINDOW], -priority[:, :_WINDOW]), axis=1)
    served = np.take_along_axis(sequence, order, axis=1)
    # Dispatch and acknowledgement of each message, one after the other.
    delivered = np.repeat(served, 2, axis=1)

    def column(of_accepts: Any, of_commits: Any, of_deliveries: Any) -> np.ndarray:
        """Return one value for each event, from an array of each kind's shape, or from one value for all."""
        accepts = np.broadcast_to(of_accepts, (count, messages))
        ends = np.broadcast_to(of_commits, (count, commits))
        deliveries = np.broadcast_to(of_deliveries, (count, 2 * _WINDOW))
        if load.is_singly:
            accepts, ends = np.stack([accepts, ends], axis=2).reshape(count, -1), np.empty((count, 0), ends.dtype)
        return np.hstack([accepts, ends, deliveries]).ravel()

    kind = column("accepted", "committed", np.tile(["dispatched", "acknowledged"], _WINDOW))
    event = 2 + len(names) + first * load.events + np.arange(count * load.events)
    is_commit, is_accept, is_dispatch = kind == "committed", kind == "accepted", kind == "dispatched"
    is_delivery = ~(is_commit | is_accept)
    return {
        "event": event,
        "run": np.ones(len(event), np.int32),
        "at": _EPOCH + event * 20,
        "kind": kind,
        "queue": pa.array(np.repeat(names[queues], load.events), mask=is_commit),
        "sequence": pa.array(column(sequence, 0, delivered), mask=is_commit),
        "priority": pa.array(column(priority, 0, 0).astype(np.int8), mask=~is_accept),
        "persistent": pa.array(column(persistent, False, False), mask=~is_accept),
        "size": pa.array(np.full(len(event), 1024, np.int32), mask=~is_accept),
        "batch": pa.array(column(np.where(persistent, batch, 0), batch, 0), mask=is_delivery),
        "consumer": pa.array(np.repeat(_consumers(queues), load.events), mask=~is_dispatch),
        "deliveries": pa.array(np.ones(len(event), np.int32), mask=~is_dispatch),
    }


_TYPES = {
    "event": pa.int64(),
    "run": pa.int32(),
    "at": pa.timestamp("us", "UTC"),
    "kind": pa.string(),
    "queue": pa.string(),
    "sequence": pa.int64(),
    "priority": pa.int8(),
    "persistent": pa.bool_(),
    "size": pa.int32(),
    "batch": pa.int64(),
    "consumer": pa.int64(),
    "deliveries": pa.int32(),
    "reason": pa.string(),
    "mode": pa.string(),
}


def _write(path: Path, columns: dict[str, object]) -> None:
    arrays = {
        name: pa.array(values, kind) if name == "at" else pa.array(values).cast(kind)
        for name, kind in _TYPES.items()
        if (values := columns.get(name)) is not None
    }
    pq.write_table(pa.table(arrays), path)


if __name__ == "__main__":
    main()
