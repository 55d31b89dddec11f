"""Benchmark of flows read from events: how long `truenext stages flow` takes to find a flow among a million events, and
how quickly, and in how much memory, the console's reader reads them.

Each flow is three messages in three stages of four processes; one in 500 messages is rejected. Times are processor time
of a new process, and by the clock; the files are in the page cache.

python -m bench.waterfalls --events 1000000 --runs 5
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.options import positive
from truenext.flows.events import ExecutionEnded, ExecutionStarted, FileOpened, ProcessClosed, StageEvent
from truenext.history.stage_files import FILE_BYTES_MAX, FORMAT, stage_file

STAGES = ("order.place", "price", "order.place.stage.reserve")
PROCESSES = 4
REJECTED = 0.002
FIND_MAX_S = 5.0
MEMORY_MAX_MIB = 64
_READ = """
import gc, resource, sys, time
from pathlib import Path
from truenext.flows import reader
reader.FIRST_BYTES_MAX = 1 << 40
flows = reader.FlowReader([Path(sys.argv[1])])
page = resource.getpagesize()
def rss(): return int(Path("/proc/self/statm").read_text().split()[1]) * page
before = rss()
begun, longest = time.process_time(), 0.0
while True:
    step = time.process_time()
    if not flows.read():
        break
    longest = max(longest, time.process_time() - step)
seconds = time.process_time() - begun
print(seconds, longest, (rss() - before) / 2**20, len(flows))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.waterfalls", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=positive, default=1_000_000, metavar="N", help="number of events")
    parser.add_argument("--runs", type=positive, default=5, metavar="N", help="runs of each kind")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the events go (default: temp folder)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as name:
        folder = Path(name)
        flows = write_events(folder, options.events)
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{options.events:,} events of {flows:,} flows, {size / 1e6:,.0f} MB")
        middle = f"order {flows // 2}"
        for what, trace in (("found", middle), ("not found, similar traces named", middle.replace("order", "ordr"))):
            times = [_find(folder, trace) for _ in range(options.runs)]
            print(f"{what}: {_described(times)} (at most {FIND_MAX_S:.0f} s)")
        seconds, longest, memory_mib, kept = _read(folder)
        print(
            f"read as files grow: {options.events / seconds:,.0f} events/s, the longest step {longest * 1e3:.0f} ms; "
            f"{kept:.0f} flows kept in {memory_mib:.0f} MiB (at most {MEMORY_MAX_MIB})"
        )
    return 0


def write_events(folder: Path, events: int) -> int:
    """Write about this number of events, and return the number of flows."""
    writers = [_Writer(folder, f"019b76{number:x}00000a1b2c3d4") for number in range(PROCESSES)]
    chance = random.Random(1)
    at = 1_767_225_600_000_000
    flow = 0
    while sum(writer.number for writer in writers) < events:
        flow += 1
        id = message = f"{at // 1000:012x}{flow:020x}"
        parent = ""
        for number, stage in enumerate(STAGES):
            writer = chance.choice(writers)
            execution = writer.number + 1
            writer.write(
                ExecutionStarted(
                    writer.process,
                    execution,
                    at,
                    stage=stage,
                    message=message,
                    flow=id,
                    trace=f"order {flow}",
                    sender="shop order.place",
                    attempt=1,
                    deliveries=1,
                    parent=parent,
                    queue=stage,
                    sequence=3 * flow + number,
                    accepted_ms=at // 1000 - 5,
                )
            )
            at += chance.randrange(2000)
            is_rejected = chance.random() < REJECTED
            writer.write(
                ExecutionEnded(
                    writer.process,
                    execution + 1,
                    at,
                    kind="rejected" if is_rejected else "completed",
                    execution=execution,
                    total_us=1500,
                    run_us=1000,
                    commit_us=None if is_rejected else 500,
                    error="OutOfStock" if is_rejected else None,
                    given_up_for="rejected" if is_rejected else None,
                )
            )
            if is_rejected:
                break
            parent, message = message, f"{id[:12]}{flow:016x}{number + 1:04x}"
    for writer in writers:
        writer.close(at)
    return flow


class _Writer:
    """Files of one process."""

    def __init__(self, folder: Path, process: str) -> None:
        self.process = process
        self.number = 0
        """Number of the last event."""
        self._folder = folder
        self._files = 0
        self._lines = bytearray()
        self._encoder = msgspec.json.Encoder()

    def write(self, event: StageEvent) -> None:
        if not self._lines:
            self._add(FileOpened(self.process, 0, event.at, FORMAT, "shop", "shop on web-1"))
        self.number = event.number
        self._add(event)
        if len(self._lines) >= FILE_BYTES_MAX:
            self._flush()

    def close(self, at: int) -> None:
        self.write(ProcessClosed(self.process, self.number + 1, at))
        self._flush()

    def _add(self, event: StageEvent) -> None:
        self._encoder.encode_into(event, self._lines, -1)
        self._lines += b"\n"

    def _flush(self) -> None:
        if self._lines:
            self._files += 1
            stage_file(self._folder, self.process, self._files).write_bytes(self._lines)
            self._lines.clear()


def _find(folder: Path, trace: str) -> tuple[float, float]:
    """Return the processor time and the time by the clock of the command, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "truenext", "stages", "flow", trace, "--events", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    seconds = time.monotonic() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, seconds


def _read(folder: Path) -> tuple[float, float, float, float]:
    """Return processor seconds, those of the longest step, MiB that were added, and the number of flows kept."""
    done = subprocess.run([sys.executable, "-c", _READ, str(folder)], capture_output=True, check=True)
    seconds, longest, memory_mib, kept = map(float, done.stdout.split())
    return seconds, longest, memory_mib, kept


def _described(times: Sequence[tuple[float, float]]) -> str:
    processor, clock = (statistics.median(column) for column in zip(*times, strict=True))
    return f"{processor:.2f} s of processor time, {clock:.2f} s by the clock"


if __name__ == "__main__":
    sys.exit(main())
