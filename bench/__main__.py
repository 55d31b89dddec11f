"""Benchmark of the broker: rates under several loads, beside ActiveMQ on this machine and under the same load.

Truenext can also be compared with itself without history or without syncing, and with the bare disk.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench import floor, machine, report, sink
from bench.brokers import (
    ActiveMQ,
    Broker,
    BrokerError,
    Truenext,
    WithAWindowOf1000,
    WithoutHistory,
    WithoutSyncing,
    WithoutTls,
    WithoutUsers,
    WithTls,
    WithUsers,
    no_activemq_reason,
    no_memory_folder_reason,
)
from bench.load import AUTHORITY_VARIABLE, LOADS, Load, run
from bench.options import not_negative, positive
from bench.workers import WorkerError, end_in_order

# Pause between two runs, for work that a broker defers until it is idle: no run should pay for the one before.
_PAUSE = 0.5
_HEADROOM_MESSAGES = 300_000

_ONE_AT_A_TIME = tuple(load for load in LOADS if load.key == "5")
_ONE_BY_ONE = tuple(load for load in LOADS if load.individual)
_OF_ONE_PRODUCER = tuple(load for load in LOADS if load.producers == 1)
_IN_GROUPS = tuple(load for load in LOADS if load.key in ("3", "4"))
_BARE = "bare loop"
_ECHO = "bare loop behind sockets"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    compared_otherwise = (
        options.history_cost
        or options.sync_cost
        or options.users_cost
        or options.tls_cost
        or options.window_cost
        or options.floor
    )
    if options.only and compared_otherwise:
        parser.error("--only is for the comparison with ActiveMQ")
    if options.floor:
        if options.loads not in (None, _ONE_AT_A_TIME):
            parser.error("--floor is about load 5: there is no other that sends one message at a time")
        options.loads = _ONE_AT_A_TIME
    if options.loads is None:
        if options.sync_cost:
            options.loads = _IN_GROUPS
        elif options.window_cost:
            options.loads = _ONE_BY_ONE
        else:
            options.loads = _OF_ONE_PRODUCER if options.history_cost else LOADS
    end_in_order()
    if options.headroom:
        return _headroom(options.seed)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as folder:
        return _Bench(options, Path(folder)).measure()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    listed = "; ".join(f"{load.key}: {load.title} ({load.messages:,})" for load in LOADS)
    parser.add_argument("--runs", type=positive, default=5, metavar="N", help="runs per load and broker (default 5)")
    parser.add_argument(
        "--messages", type=positive, metavar="N", help="messages per run of every load, instead of each load's own"
    )
    parser.add_argument(
        "--loads",
        type=_loads,
        metavar="KEYS",
        help="which loads, such as 1,3 (default all; 1 to 5 with --history-cost, 3 and 4 with --sync-cost, 2 and 4"
        f" with --window-cost, 5 with --floor) - {listed}",
    )
    parser.add_argument(
        "--warmup",
        type=not_negative,
        default=200_000,
        metavar="N",
        help="messages that each broker carries before the first measured run, all loads together (default 200000)",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--history-cost", action="store_true", help="compare truenext with itself without history, not with ActiveMQ"
    )
    instead.add_argument(
        "--sync-cost",
        action="store_true",
        help="compare truenext with itself on a folder in memory, where syncing does nothing, not with ActiveMQ",
    )
    instead.add_argument(
        "--window-cost",
        action="store_true",
        help="compare truenext with automatic windows with itself with windows of 1000, not with ActiveMQ",
    )
    instead.add_argument(
        "--users-cost", action="store_true", help="compare truenext with itself with users, not with ActiveMQ"
    )
    instead.add_argument(
        "--tls-cost", action="store_true", help="compare truenext with itself with TLS, not with ActiveMQ"
    )
    instead.add_argument(
        "--floor",
        action="store_true",
        help="compare truenext with a bare loop that appends and syncs one message at a time, not with ActiveMQ",
    )
    parser.add_argument("--only", choices=("truenext", "activemq"), help="measure one of the two")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="for the order of the priorities")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the brokers' data goes (default: temp folder)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table to FILE")
    instead.add_argument(
        "--headroom", action="store_true", help="measure no broker but how fast the load generator alone is"
    )
    return parser


def _loads(text: str) -> tuple[Load, ...]:
    keys = set(text.replace(",", " ").split())
    if unknown := keys - {load.key for load in LOADS}:
        raise argparse.ArgumentTypeError(f"no such load: {', '.join(sorted(unknown))}")
    return tuple(load for load in LOADS if load.key in keys)


class _Bench:
    """Complete measurement: start of the brokers, warm-up, alternating runs, table."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._loads: tuple[Load, ...] = options.loads
        if options.history_cost:
            self._results = report.Results(WithoutHistory.name, report.HISTORY_TARGETS)
        elif options.sync_cost:
            self._results = report.Results(WithoutSyncing.name, report.SYNC_TARGETS)
        elif options.users_cost:
            self._results = report.Results(WithoutUsers.name, report.USERS_TARGETS)
        elif options.tls_cost:
            self._results = report.Results(WithoutTls.name, report.TLS_TARGETS)
        elif options.window_cost:
            self._results = report.Results(WithAWindowOf1000.name, report.WINDOW_TARGETS)
        elif options.floor:
            self._results = report.Results(_BARE, report.FLOOR_TARGETS)
        else:
            self._results = report.Results()
        self._peaks: list[tuple[str, str]] = []
        self._latencies: dict[tuple[str, str], list[tuple[float, float]]] = {}
        self._queues = 0

    def measure(self) -> int:
        notes = [*machine.facts(self._folder), ("seed", str(self._options.seed))]
        if self._results.peer == report.ACTIVEMQ:
            notes.append(machine.activemq())
        for name, value in notes:
            _print_line(f"{name}: {value}")
        described = len(notes)
        status = self._guarded()
        rows = report.table(self._results, self._loads, compared=self._options.only != "truenext")
        notes += self._peaks
        for (title, name), latencies in self._latencies.items():
            half, most = (statistics.median(each) * 1000 for each in zip(*latencies, strict=True))
            notes.append((f"from SEND to receipt, {title}, {name}", f"median {half:.2f} ms, 99 % below {most:.2f} ms"))
        if echoes := self._results.of(_ONE_AT_A_TIME[0], _ECHO):
            share = statistics.median(echoes) / statistics.median(self._results.of(_ONE_AT_A_TIME[0], _BARE))
            text = f"{report.spread(echoes)}, {share:.2f} of the {_BARE}"
            notes.append((f"for orientation, {_ECHO}, msg/s", text))
        print("\n" + report.plain(rows))
        print("messages a second, median (lowest-highest) of the runs; ratio of the medians")
        if self._options.history_cost and (ratio := report.median_ratio(self._results, self._loads)) is not None:
            print(f"ratio in the median over the loads: {ratio:.2f} (target {report.HISTORY_MEDIAN_TARGET:g})")
        for name, value in notes[described:]:
            print(f"{name}: {value}")
        if self._options.markdown and status == 0:
            self._options.markdown.parent.mkdir(parents=True, exist_ok=True)
            self._options.markdown.write_text(report.markdown(rows, notes))
        return status

    def _guarded(self) -> int:
        """Measure. If the measurement ends early, the brokers are removed, and the figures so far can be shown."""
        try:
            with ExitStack() as stack:
                self._all_runs([stack.enter_context(broker) for broker in self._brokers()])
        except KeyboardInterrupt:
            _print_line("interrupted")
            return 130
        except (BrokerError, WorkerError) as error:
            _print_line(f"failed: {error}")
            return 1
        return 0

    def _brokers(self) -> list[Broker]:
        brokers: list[Broker] = []
        if self._options.only != "activemq":
            brokers.append(Truenext(self._folder))
        if self._options.history_cost:
            brokers.append(WithoutHistory(self._folder))
        elif self._options.sync_cost:
            if reason := no_memory_folder_reason():
                _print_line(f"nothing to compare with: {reason}")
                self._options.only = "truenext"
            else:
                brokers.append(WithoutSyncing())
        elif self._options.users_cost:
            brokers = [WithUsers(self._folder), WithoutUsers(self._folder)]
        elif self._options.tls_cost:
            brokers = [WithTls(self._folder), WithoutTls(self._folder)]
        elif self._options.window_cost:
            brokers[0].prefetch = None
            brokers.append(WithAWindowOf1000(self._folder))
        elif not self._options.floor and self._options.only != "truenext":
            if reason := no_activemq_reason():
                _print_line(f"without ActiveMQ: {reason}")
                self._options.only = "truenext"
            else:
                brokers.append(ActiveMQ(self._folder))
        return brokers

    def _all_runs(self, brokers: list[Broker]) -> None:
        for broker in brokers:
            self._warm_up(broker)
        for load in self._loads:
            for turn in range(self._options.runs):
                for broker in brokers:
                    seed = self._options.seed + turn
                    rate = self._one_run(load, broker, self._options.messages or load.messages, seed, f"run {turn + 1}")
                    self._results.add(load, broker.name, rate)
                if self._options.floor:
                    self._floor_run(load, turn)
        for broker in brokers:
            peak = broker.peak_memory()
            self._peaks.append((f"peak memory {broker.name}", f"{peak / 1024:,.0f} MiB" if peak else "unknown"))

    def _floor_run(self, load: Load, turn: int) -> None:
        messages = self._options.messages or load.messages
        bare = floor.bare_rate(self._folder, messages)
        echoed = floor.echo_rate(self._folder, load, messages, self._options.seed + turn)
        for name, rate in ((_BARE, bare), (_ECHO, echoed)):
            self._results.add(load, name, rate)
            _print_line(f"{load.key}. {load.title}, {name}, run {turn + 1}: {rate:,.0f} msg/s ({messages:,})")

    def _warm_up(self, broker: Broker) -> None:
        shares = sum(load.warmup_share for load in self._loads)
        for load in self._loads:
            messages = int(self._options.warmup * load.warmup_share / shares)
            if messages:
                self._one_run(load, broker, messages, self._options.seed, "warm-up")

    def _one_run(self, load: Load, broker: Broker, messages: int, seed: int, label: str) -> float:
        self._queues += 1
        before = broker.processor_seconds()
        try:
            queue = f"/queue/bench.{load.key}.{self._queues}"
            # The workers inherit it.
            os.environ[AUTHORITY_VARIABLE] = str(broker.authority or "")
            outcome = run(load, broker.port, queue, messages, seed, prefetch=broker.prefetch)
        except WorkerError as error:
            state = "is still running" if broker.is_running() else "has died"
            raise WorkerError(f"{error}\n{broker.name} {state}; it printed:\n{broker.log()[-3000:]}") from error
        time.sleep(_PAUSE)
        used = (broker.processor_seconds() - before) / messages * 1e6
        own = outcome.generator_processor / messages * 1e6
        if outcome.latency is not None and label != "warm-up":
            self._latencies.setdefault((load.title, broker.name), []).append(outcome.latency)
        _print_line(
            f"{load.key}. {load.title}, {broker.name}, {label}: {outcome.rate:,.0f} msg/s ({messages:,} in"
            f" {outcome.seconds:.2f} s; processor time a message: broker {used:.1f} us, generator {own:.1f} us)"
        )
        return outcome.rate


def _headroom(seed: int) -> int:
    print("generator headroom, messages a second of the load generator with no broker in between:")
    print(f"  producer alone:                 {sink.producer_rate(_HEADROOM_MESSAGES, seed):>12,.0f}")
    print(f"  consumer alone, auto ack:       {sink.consumer_rate(_HEADROOM_MESSAGES, False):>12,.0f}")
    print(f"  consumer alone, individual ack: {sink.consumer_rate(_HEADROOM_MESSAGES, True):>12,.0f}")
    return 0


def _print_line(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
