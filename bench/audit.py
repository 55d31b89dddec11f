"""Benchmark of `truenext audit`: its time and memory for N events.

python -m bench.audit --events 10000000 --skew
python -m bench.audit --events 10000000 --more 1000000    the last million, by --state
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from truenext.spark.audit.command import run_audit

_WINDOW = 64
"""Number of messages that are accepted before the first of them is dispatched."""
_FILE_ROWS = 1_000_000
_EPOCH = 1_790_000_000_000_000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.audit", description=__doc__)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--queues", type=int, default=16)
    parser.add_argument("--skew", action="store_true", help="one queue gets half of the messages")
    parser.add_argument("--more", type=int, default=0, help="audit so many further events from a state, and alone")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--dir", type=Path, help="keep the history here, or read it from here")
    parser.add_argument("--master")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-audit-") as temporary:
        folder = options.dir or Path(temporary)
        if not any(folder.glob("**/*.parquet")):
            started = time.perf_counter()
            write_history(folder, options.events + options.more, options.queues, options.skew, options.seed)
            print(f"history written in {time.perf_counter() - started:.1f} s", flush=True)
        if options.more:
            measure_state(folder, Path(temporary), options.more, options.master)
        else:
            measure("audit, start of Spark and report included", folder, Path(temporary) / "out", options.master)
        print(f"peak memory: {peak_memory() / 1024:,.0f} MiB of all processes together", flush=True)


def measure(name: str, folder: Path, out: Path, master: str | None, state: Path | None = None) -> None:
    started, processor = time.perf_counter(), processor_time()
    run_audit([folder], master=master, out=out, state=state)
    seconds, processor = time.perf_counter() - started, processor_time() - processor
    print(f"{name}: {seconds:.1f} s, {processor:.1f} s of processor time", flush=True)


def measure_state(folder: Path, temporary: Path, more: int, master: str | None) -> None:
    """Audit the history without its last files, these alone, and these from the state. The first audit has the start of
    Spark."""
    files = sorted(folder.glob("**/*.parquet"))
    last = files[-max(1, more // _FILE_ROWS) :]
    alone = temporary / "alone" / "history" / "events" / last[0].parent.name
    alone.mkdir(parents=True)
    moved = [each.rename(alone / each.name) for each in last]
    out, state = temporary / "out", temporary / "state"
    measure("audit of the events before", folder, out, master, state)
    measure("audit of the last events alone", temporary / "alone", temporary / "out-alone", master, temporary / "new")
    for source, target in zip(moved, last, strict=True):
        source.rename(target)
    measure("audit of the last events from a state", folder, out, master, state)


def peak_memory() -> int:
    """Return the sum in KiB of the peak resident memory of this process and its running descendants."""
    peaks = 0
    for pid in _own_processes():
        with suppress(OSError):
            status = (Path("/proc") / str(pid) / "status").read_text()
            found = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            peaks += int(found.get("VmHWM", "0").split()[0])
    return peaks


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


def write_history(folder: Path, events: int, queues: int, skew: bool, seed: int) -> None:
    """Write a history in which the contract held: rounds of `_WINDOW` messages in one queue, accepted, committed if
    persistent, dispatched in the true order and acknowledged."""
    numbers = np.random.default_rng(seed)
    per_round = 3 * _WINDOW + 1
    rounds = max(1, events // per_round)
    shares = np.full(queues, 1 / queues)
    if skew:
        shares = np.full(queues, 0.5 / (queues - 1))
        shares[0] = 0.5
    names = np.array([f"orders.{each:03d}" for each in range(queues)])
    target = folder / "history" / "events" / "date=2026-09-21"
    target.mkdir(parents=True)
    _write(target / "0000.parquet", _head(names))
    rounds_per_file = max(1, _FILE_ROWS // per_round)
    for part, first in enumerate(range(0, rounds, rounds_per_file)):
        count = min(rounds_per_file, rounds - first)
        _write(target / f"{part + 1:04d}.parquet", _rounds(numbers, names, shares, first, count))


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
    numbers: np.random.Generator, names: np.ndarray, shares: np.ndarray, first: int, count: int
) -> dict[str, object]:
    wide, per_round = _WINDOW, 3 * _WINDOW + 1
    queue = numbers.choice(len(names), count, p=shares)
    priority = numbers.choice([9, 4, 0], (count, wide), p=[0.2, 0.6, 0.2])
    persistent = numbers.random((count, wide)) < 0.5
    batch = first + 1 + np.arange(count)
    sequence = first * wide + 1 + np.arange(count * wide).reshape(count, wide)
    order = np.lexsort((sequence, -priority), axis=1)
    served = np.take_along_axis(sequence, order, axis=1)
    nothing = np.full((count, wide), -1)
    one = np.full((count, 1), -1)
    # Dispatch and acknowledgement of each message, one after the other.
    dispatched = np.repeat(served, 2, axis=1)
    kind = np.tile(
        np.array(["accepted"] * wide + ["committed"] + ["dispatched", "acknowledged"] * wide), (count, 1)
    ).ravel()
    event = 2 + len(names) + first * per_round + np.arange(count * per_round)
    batches = np.hstack(
        [np.where(persistent, batch[:, None], 0), batch[:, None], np.hstack([nothing, nothing])]
    ).ravel()
    priorities = np.hstack([priority, one, nothing, nothing]).ravel()
    sequences = np.hstack([sequence, one, dispatched]).ravel()
    is_commit, is_accept = kind == "committed", kind == "accepted"
    is_delivery = ~(is_commit | is_accept)
    return {
        "event": event,
        "run": np.ones(len(event), np.int32),
        "at": _EPOCH + event * 20,
        "kind": kind,
        "queue": pa.array(np.repeat(names[queue], per_round), mask=is_commit),
        "sequence": pa.array(sequences, mask=is_commit),
        "priority": pa.array(priorities.astype(np.int8), mask=~is_accept),
        "persistent": pa.array(np.hstack([persistent, one > 0, nothing > 0, nothing > 0]).ravel(), mask=~is_accept),
        "size": pa.array(np.full(len(event), 1024, np.int32), mask=~is_accept),
        "batch": pa.array(batches, mask=is_delivery),
        "consumer": pa.array(np.repeat(_consumers(queue), per_round), mask=kind != "dispatched"),
        "deliveries": pa.array(np.ones(len(event), np.int32), mask=kind != "dispatched"),
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
