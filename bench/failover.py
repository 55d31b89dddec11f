"""Benchmark of a broker that stands by: how long a takeover takes, and what it costs the active broker.

    takeovers   seconds from the end of the active broker to the first delivery of the other one, with many messages
                waiting: planned, killed, and stopped; and seconds from a restart of PostgreSQL to the next receipt
    standby     rates of a broker with one that stands by, beside those of a broker without; the broker that stands by
                has processors of its own, all others share one
    idle        processor time of a broker that stands by while nothing happens

python -m bench.failover --only takeovers --waiting 1000000
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg

from bench import frames
from bench.backlog_load import Backlog, fill
from bench.brokers import BrokerError, Truenext, free_port
from bench.load import LOADS, await_frame, connect
from bench.memory import MemoryWatch
from bench.options import not_negative, positive
from bench.postgresql import InPostgresql, measure_in_folder, new_schema, print_ratios, take_turns
from bench.postgresql_server import Postgresql
from bench.progress import print_line, work

_PARTS = ("takeovers", "standby", "idle")
_LOADS = tuple(load for load in LOADS if load.key in ("3", "5", "7"))
_QUEUE = "bench.failover"
_AFTER_S = 5.0
"""`failover_after_ms` of all brokers, as by default."""
_TARGETS_S = {"planned": 1.5, "killed": 3.0, "stopped": _AFTER_S + 2}
_RESTART_TARGET_S = 1.0
_STANDBY_TARGET = 0.97
_IDLE_TARGET = 0.01
_IDLE_S = 20.0
_PATIENCE = 1200.0
_ALL_PROCESSORS = os.sched_getaffinity(0)


class _Member(Truenext):
    """Broker that takes over when the other one ends."""

    def __init__(self, parent: Path, server: Postgresql, schema: str, name: str, *, is_active: bool) -> None:
        super().__init__(parent)
        self.name = name
        self.is_active = is_active
        place = ("--store", server.log_url, "--schema", schema, "--member", name)
        self.options = (*place, "--durability", "local", "--database-limit", "200GiB")

    def _await_start(self, process: subprocess.Popen[bytes], patience: float) -> None:
        if self.is_active:
            super()._await_start(process, patience)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "it runs"
        self._process.send_signal(number)

    def move_to(self, processors: set[int]) -> None:
        assert self._process is not None, "it runs"
        for thread in Path(f"/proc/{self._process.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), processors)

    def await_takeover(self) -> None:
        assert self._process is not None, "it runs"
        self.is_active = True
        self._await_start(self._process, _PATIENCE)


class _Both:
    """Active broker, and one that stands by."""

    def __init__(self, parent: Path, server: Postgresql) -> None:
        self._schema = new_schema(server)
        self._server = server
        self.active = _Member(parent, server, self._schema, "first", is_active=True)
        self.heir = _Member(parent, server, self._schema, "second", is_active=False)

    def __enter__(self) -> _Both:
        self.active.__enter__()
        self.heir.__enter__()
        self.await_heir()
        return self

    def __exit__(self, *_: object) -> None:
        self.heir.stop()
        self.active.stop()

    def await_heir(self) -> None:
        """Wait until the heir stands by, and has all rows but those of a second."""
        deadline = time.monotonic() + _PATIENCE
        query = f"SELECT min(number) FROM {self._schema}.member WHERE role = 'standing by'"
        with psycopg.connect(self._server.log_url, autocommit=True) as connection:
            last = connection.execute(f"SELECT max(number) FROM {self._schema}.log").fetchone()
            while (found := connection.execute(query).fetchone()) is None or (found[0] or 0) < (last or (0,))[0]:
                if time.monotonic() > deadline:
                    raise BrokerError(f"no broker stands by:\n{self.heir.log()[-3000:]}")
                time.sleep(0.1)
        # The active broker reads once a second which brokers stand by.
        time.sleep(2.0)

    def swap(self) -> None:
        """Let the former broker stand by, after the other one has taken over."""
        self.active, self.heir = self.heir, self.active
        self.heir.is_active = False
        self.heir.start(_PATIENCE)
        self.await_heir()


def main(arguments: Sequence[str] | None = None) -> int:
    return measure_in_folder(_parser().parse_args(arguments), _measure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.failover", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=_parts, default=_PARTS, metavar="PARTS", help=f"of {','.join(_PARTS)}")
    parser.add_argument("--runs", type=positive, default=5, metavar="N", help="runs of each (default 5)")
    parser.add_argument("--messages", type=positive, metavar="N", help="messages per run of every load")
    parser.add_argument(
        "--warmup", type=not_negative, default=1, metavar="N", help="runs of each load before those (default 1)"
    )
    parser.add_argument(
        "--waiting", type=positive, default=1_000_000, metavar="N", help="messages that wait (default 1,000,000)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the messages (default 1)")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="parent folder of all data (default: temporary)")
    return parser


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := set(parts) - set(_PARTS):
        raise argparse.ArgumentTypeError(f"unknown parts: {', '.join(sorted(unknown))}")
    return parts


def _measure(folder: Path, options: argparse.Namespace) -> None:
    parts = {"takeovers": _measure_takeovers, "standby": _measure_standby, "idle": _measure_idle}
    for name in options.only:
        with ExitStack() as stack:
            if name == "standby":
                stack.enter_context(_on_one_processor())
            server = stack.enter_context(Postgresql(folder, free_port()))
            print_line(f"\n{name}: {server.version}")
            parts[name](server, folder, options)


@contextmanager
def _on_one_processor() -> Iterator[None]:
    """Let all processes that are started in the block share one processor."""
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, processors)


# ---- Takeovers ----


def _measure_takeovers(server: Postgresql, folder: Path, options: argparse.Namespace) -> None:
    backlog = Backlog(_QUEUE, persistent=True, messages=options.waiting, seed=options.seed)
    ends: dict[str, Callable[[_Member], None]] = {"planned": _hand_over, "killed": _kill, "stopped": _suspend}
    with _Both(folder, server) as both:
        with MemoryWatch(both.active) as memory:
            memory.enter("waiting")
            work("sent", backlog.messages, memory, _PATIENCE, fill, backlog, both.active.port)
        both.await_heir()
        for kind, end in ends.items():
            seconds = [_take_over(both, end) for _ in range(options.runs)]
            print_line(
                f"{kind}: {statistics.median(seconds):.2f} s to the first delivery, {max(seconds):.2f} at most "
                f"(target {_TARGETS_S[kind]:g})"
            )
        seconds = [_restart(server, both.active.port) for _ in range(options.runs)]
        print_line(
            f"PostgreSQL restarted: {statistics.median(seconds):.2f} s to the next receipt, {max(seconds):.2f} at most "
            f"(target {_RESTART_TARGET_S:g})"
        )


def _take_over(both: _Both, end: Callable[[_Member], None]) -> float:
    """Return the seconds from the end of the active broker to the first delivery of the other one."""
    started = time.monotonic()
    end(both.active)
    both.heir.await_takeover()
    with connect(both.heir.port) as sock:
        sock.sendall(frames.subscribe(_QUEUE, True, "subscribed", 1))
        await_frame(sock, b"RECEIPT")
        await_frame(sock, b"MESSAGE")
        seconds = time.monotonic() - started
    _end(both.active)
    both.swap()
    return seconds


def _hand_over(broker: _Member) -> None:
    command = [sys.executable, "-m", "truenext", "failover", "--url", f"stomp://127.0.0.1:{broker.port}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BrokerError(f"failover failed: {done.stderr}")


def _kill(broker: _Member) -> None:
    broker.signal(signal.SIGKILL)


def _suspend(broker: _Member) -> None:
    broker.signal(signal.SIGSTOP)


def _end(broker: _Member) -> None:
    """End a broker that was taken over, whatever state it is in."""
    broker.end(signal.SIGKILL, _PATIENCE)


def _restart(server: Postgresql, port: int) -> float:
    """Return the seconds from the end of a restart of PostgreSQL to the receipt of a message."""
    with connect(port) as sock:
        server.restart()
        started = time.monotonic()
        sock.sendall(b"SEND\ndestination:bench.later\npersistent:true\nreceipt:1\n\n\0")
        await_frame(sock, b"RECEIPT")
        return time.monotonic() - started


# ---- Costs ----


def _measure_standby(server: Postgresql, folder: Path, options: argparse.Namespace) -> None:
    with _Both(folder, server) as both, InPostgresql(folder, server) as alone:
        both.heir.move_to(_ALL_PROCESSORS - os.sched_getaffinity(0) or _ALL_PROCESSORS)
        both.active.name, alone.name = "with a broker that stands by", "alone"
        brokers = [both.active, alone]
        rates = take_turns(brokers, _LOADS, options)
    print_ratios(_LOADS, brokers, rates, dict.fromkeys((load.key for load in _LOADS), _STANDBY_TARGET))


def _measure_idle(server: Postgresql, folder: Path, options: argparse.Namespace) -> None:
    with _Both(folder, server) as both:
        before = both.heir.processor_seconds()
        time.sleep(_IDLE_S)
        share = (both.heir.processor_seconds() - before) / _IDLE_S
    print_line(f"standing by: {share:.2%} of a processor (at most {_IDLE_TARGET:.0%})")


if __name__ == "__main__":
    sys.exit(main())
