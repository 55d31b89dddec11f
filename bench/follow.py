"""Benchmark of `truenext audit --follow`: what a followed broker does for it at half of its rate, how soon a planted
inversion is told, and what an idle query takes.

    python -m bench.follow --seconds 120

The broker runs with a fault: in the queue `planted` its history names another message than the one that it dispatches.
The load is a client that sends persistent messages to a queue, and receives them from there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.options import positive
from truenext import blocking

_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE_SECONDS = 60.0
_PAUSE_SECONDS = 5.0
_BUSY_SHARE = 0.2
"""Share of a core above which a query works through a micro-batch."""
_QUIET_SECONDS = 20.0
"""Seconds without work after which no micro-batch is left: between two of them are few seconds."""
_CATCH_UP_SECONDS = 300.0
_BATCH = 500
_PLANTED = """
import sys
from truenext.engine.writing import event_log

dispatched = event_log.EventLog.dispatched


def dispatched_wrongly(self, queue, entries, consumers):
    if queue.name == "planted" and entries:
        entries = [max(queue.lanes[-1].arrived, default=entries[0], key=lambda each: each.sequence)]
    dispatched(self, queue, entries, consumers)


event_log.EventLog.dispatched = dispatched_wrongly
from truenext.cli.main import main

main(sys.argv[1:])
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.follow", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=positive, default=120, help="length of each measurement")
    parser.add_argument("--dir", type=Path, help="for the broker's data")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder, _broker(Path(folder)) as (url, broker):
        full = _rate(url, options.seconds, None)
        print(f"broker alone: {full:,.0f} messages a second")
        with _cost_of(broker) as alone:
            alone.messages = options.seconds * _rate(url, options.seconds, full / 2)
        print(f"at half of that: {alone.us:.1f} us of the broker's processor time a message")
        with _followed(Path(folder), url) as query:
            with _cost_of(broker) as followed:
                rate, delays = _delays(query, url, full / 2, options.seconds)
                followed.messages = options.seconds * rate
            print(
                f"while it is followed: {followed.us:.1f} ({followed.us / alone.us - 1:+.1%}), at {rate:,.0f} a second"
            )
            p95 = statistics.quantiles(delays, n=20)[-1] if len(delays) > 1 else max(delays, default=float("nan"))
            print(
                f"planted inversion at half of the rate: told after {statistics.median(delays):.1f} s, p95 {p95:.1f} s"
            )
            began = time.monotonic()
            while _share(query, _QUIET_SECONDS) > _BUSY_SHARE and time.monotonic() - began < _CATCH_UP_SECONDS:
                pass
            waited = time.monotonic() - began
            print(f"{'caught up' if waited < _CATCH_UP_SECONDS else 'still busy'} after {waited:.0f} s without load")
            print(f"idle query: {_share(query, _IDLE_SECONDS):.2%} of a core")


@contextmanager
def _broker(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the URL and the process id of a broker."""
    command = [sys.executable, "-c", _PLANTED, "serve", "--data", str(folder / "data")]
    command += ["--listen", "stomp://127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1], process.pid
    finally:
        process.terminate()
        process.wait()


class _Query:
    """Query that follows the broker, and the times at which it has told of findings."""

    def __init__(self, folder: Path, url: str) -> None:
        command = [sys.executable, "-m", "truenext", "audit", "--follow", "--url", url]
        command += ["--state", str(folder / "state"), "--out", str(folder / "out")]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        self.told: dict[int, float] = {}
        """Time at which an inversion was told, by the sequence of the overtaken message."""
        self.is_running = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.is_running.set()
            kind, _, finding = line.partition(": ")
            if kind == "finding":
                found = json.loads(finding)
                if found.get("kind") == "inversion":
                    self.told[found["overtaken_sequence"]] = time.monotonic()


@contextmanager
def _followed(folder: Path, url: str) -> Iterator[_Query]:
    query = _Query(folder, url)
    query.is_running.wait(300)
    try:
        yield query
    finally:
        query.process.terminate()
        query.process.wait()


def _rate(url: str, seconds: float, rate: float | None) -> float:
    """Send messages, and receive them, for some seconds. Return how many a second."""
    count, began = 0, time.monotonic()
    with blocking.connect(url) as connection, connection.consumer("/queue/load", ack="individual") as consumer:
        while (passed := time.monotonic() - began) < seconds:
            if rate is not None and count > rate * passed:
                time.sleep(0.01)
                continue
            connection.send_many("/queue/load", [b"x" * 1024] * _BATCH)
            left = _BATCH
            while left:
                for message in consumer.receive_many(left, 60.0):
                    message.ack()
                    left -= 1
            count += _BATCH
    return count / (time.monotonic() - began)


@dataclass
class _Cost:
    seconds: float = 0.0
    messages: float = 0.0

    @property
    def us(self) -> float:
        """Microseconds of processor time a message."""
        return self.seconds / self.messages * 1e6


@contextmanager
def _cost_of(pid: int) -> Iterator[_Cost]:
    """Measure the processor time of a process that leads a session, and of the session, inside the block, which counts
    the messages."""
    cost, before = _Cost(), _processor_s(pid)
    yield cost
    cost.seconds = _processor_s(pid) - before


def _delays(query: _Query, url: str, rate: float, seconds: float) -> tuple[float, list[float]]:
    """Plant inversions under load. Return the rate of the load, and the seconds until each inversion was told."""
    load = ThreadPoolExecutor().submit(_rate, url, seconds, rate)
    planted: dict[int, float] = {}
    while not load.done():
        with blocking.connect(url) as connection:
            for priority in (4, 9):
                connection.send("/queue/planted", b"x", priority=priority)
            with connection.consumer("/queue/planted", ack="individual", prefetch=1) as consumer:
                for _ in range(2):
                    message = consumer.receive(60.0)
                    assert message is not None
                    if message.priority == 9:
                        planted[int(message.headers["truenext-sequence"])] = time.monotonic()
                    message.ack()
        wait([load], _PAUSE_SECONDS)
    ends_at = time.monotonic() + 60.0
    while planted.keys() - query.told.keys() and time.monotonic() < ends_at:
        time.sleep(0.1)
    return load.result(), [query.told.get(each, float("inf")) - at for each, at in planted.items()]


def _share(query: _Query, seconds: float) -> float:
    """Return the share of a core that the query takes in some seconds."""
    before, began = _processor_s(query.process.pid), time.monotonic()
    time.sleep(seconds)
    return (_processor_s(query.process.pid) - before) / (time.monotonic() - began)


def _processor_s(pid: int) -> float:
    """Return the seconds of processor time of a process that leads a session, and of the session."""
    total = 0.0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(path.parent.name) == pid or int(fields[2]) == os.getpgid(pid):
            total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total


if __name__ == "__main__":
    main()
