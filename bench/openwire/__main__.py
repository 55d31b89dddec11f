"""Benchmark of OpenWire: loads of the unmodified ActiveMQ client, beside ActiveMQ under the same loads.

    loads       rates of the Java client on truenext and on ActiveMQ, in turns; of requests the median latency
    users       rates with users, divided by those without
    decoding    time from the bytes of a message to its command, beside STOMP's, in one process
    idle        memory of connections that do nothing, with ten consumers each
    topics      memory while ten consumers of a topic do not read, beside STOMP's

python -m bench.openwire --only loads --runs 3
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from bench import machine, report
from bench.brokers import ActiveMQ, Broker, BrokerError, Truenext, WithoutUsers, WithUsers, no_activemq_reason
from bench.openwire import decoding, idle, topics
from bench.openwire.java import JavaClient, JavaError, missing_reason
from bench.options import not_negative, positive
from bench.workers import WorkerError, end_in_order

_PAUSE = 0.5
"""Seconds between two runs, for work that a broker defers until it is idle."""
_PARTS = ("loads", "users", "decoding", "idle", "topics")
_USERS_TARGET = 0.98


class _Load(NamedTuple):
    key: str
    title: str
    messages: int
    aim: float
    """Ratio to ActiveMQ that we aim at."""
    target: float
    """Least ratio."""


_LOADS = (
    _Load("transient", "transient, auto ack", 60_000, 0.85, 0.75),
    _Load("persistent", "persistent, one at a time", 5_000, 1.2, 1.0),
    _Load("transacted-10", "persistent, commit per 10", 20_000, 1.3, 1.0),
    _Load("transacted-100", "persistent, commit per 100", 40_000, 1.3, 1.0),
    _Load("sessions", "ten sessions receive, send, commit", 10_000, 1.2, 1.0),
    _Load("request", "request and reply, by median latency", 5_000, 1.0, 1.0),
)
_OF_USERS = ("transient", "transacted-100")


class _Truenext(Truenext):
    scheme = "openwire"


class _ActiveMQ(ActiveMQ):
    scheme = "tcp"


class _WithUsers(WithUsers):
    scheme = "openwire"


class _WithoutUsers(WithoutUsers):
    scheme = "openwire"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    end_in_order()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as name:
        folder = Path(name)
        for fact, value in [*machine.facts(folder), machine.activemq(), ("seed", str(options.seed))]:
            _print_line(f"{fact}: {value}")
        try:
            for part in options.only:
                _measure(part, folder, options)
        except KeyboardInterrupt:
            _print_line("interrupted")
            return 130
        except (BrokerError, JavaError, WorkerError) as error:
            _print_line(f"failed: {error}")
            return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.openwire", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    listed = "; ".join(f"{load.key}: {load.title} ({load.messages:,})" for load in _LOADS)
    parser.add_argument(
        "--only", type=_names(_PARTS), default=_PARTS, metavar="PARTS", help=f"of {','.join(_PARTS)} (default: all)"
    )
    parser.add_argument(
        "--loads",
        type=_names([load.key for load in _LOADS]),
        metavar="KEYS",
        help=f"which loads (default: all; with users: {','.join(_OF_USERS)}) - {listed}",
    )
    parser.add_argument("--runs", type=positive, default=5, metavar="N", help="runs per load and broker (default 5)")
    parser.add_argument(
        "--messages", type=positive, metavar="N", help="messages per run of every load, instead of each load's own"
    )
    parser.add_argument(
        "--warmup", type=not_negative, default=2, metavar="N", help="runs of each load before those (default 2)"
    )
    parser.add_argument("--broker", choices=("truenext", "activemq"), help="measure one of the two")
    parser.add_argument("--connections", type=positive, default=1_000, metavar="N", help="that are idle (default 1000)")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="for the order of the priorities")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the brokers' data goes (default: temp folder)")
    return parser


class _names:  # noqa: N801
    """Parser of names with commas between them."""

    def __init__(self, known: Sequence[str]) -> None:
        self._known = known

    def __call__(self, text: str) -> tuple[str, ...]:
        if unknown := set(text.split(",")) - set(self._known):
            raise argparse.ArgumentTypeError(f"no such name: {', '.join(sorted(unknown))}")
        return tuple(each for each in self._known if each in text.split(","))


def _measure(part: str, folder: Path, options: argparse.Namespace) -> None:
    if part in ("loads", "users"):
        if reason := missing_reason():
            _print_line(f"without {part}: {reason}")
        elif part == "loads":
            _measure_loads(folder, options)
        else:
            _measure_users(folder, options)
    elif part == "decoding":
        decoding.measure()
    elif part == "idle":
        idle.measure(folder, options.connections)
    else:
        topics.measure(folder, options.messages)


def _measure_loads(folder: Path, options: argparse.Namespace) -> None:
    brokers: list[Broker] = []
    if options.broker != "activemq":
        brokers.append(_Truenext(folder))
    if options.broker != "truenext":
        if reason := no_activemq_reason():
            _print_line(f"without ActiveMQ: {reason}")
        else:
            brokers.append(_ActiveMQ(folder))
    loads = [load for load in _LOADS if options.loads is None or load.key in options.loads]
    figures = _run(brokers, loads, options)
    rows = [["load", *(broker.name for broker in brokers), "ratio", "aim", "least", "met"]]
    for load in loads:
        values = [figures[load.key, broker.name] for broker in brokers]
        ratio = _ratio(load, *values) if len(values) == 2 else None
        met = "-" if ratio is None else "aim" if ratio >= load.aim else "yes" if ratio >= load.target else "no"
        rows.append(
            [
                load.title,
                *map(report.spread, values),
                "-" if ratio is None else f"{ratio:.2f}",
                f"{load.aim:g}",
                f"{load.target:g}",
                met,
            ]
        )
    print("\n" + report.plain(rows))
    _print_line(
        "messages a second, of request and reply the median latency in us: median (lowest-highest) of the runs; ratio "
        "of the medians, above 1 if truenext is faster"
    )


def _measure_users(folder: Path, options: argparse.Namespace) -> None:
    loads = [load for load in _LOADS if load.key in (options.loads or _OF_USERS)]
    brokers = [_WithUsers(folder), _WithoutUsers(folder)]
    figures = _run(brokers, loads, options)
    print()
    for load in loads:
        ratio = _ratio(load, *(figures[load.key, broker.name] for broker in brokers))
        _print_line(f"users, {load.title}: {ratio:.2f} of the rate without users (at least {_USERS_TARGET})")


def _ratio(load: _Load, own: Sequence[float], peer: Sequence[float]) -> float:
    ratio = statistics.median(own) / statistics.median(peer)
    return 1 / ratio if load.key == "request" else ratio


def _run(
    brokers: Sequence[Broker], loads: Sequence[_Load], options: argparse.Namespace
) -> dict[tuple[str, str], list[float]]:
    """Let the brokers take turns under each load. Returns the figures of the runs, by load and broker."""
    figures: dict[tuple[str, str], list[float]] = {}
    queues = 0
    with ExitStack() as stack:
        for broker in brokers:
            stack.enter_context(broker)
        client = stack.enter_context(JavaClient())
        for turn in range(-options.warmup, options.runs):
            for load in loads:
                for broker in brokers:
                    queues += 1
                    queue = f"bench.{load.key}.{queues}"
                    figure = _run_once(client, broker, load, queue, turn, options)
                    if turn >= 0:
                        figures.setdefault((load.key, broker.name), []).append(figure)
    return figures


def _run_once(
    client: JavaClient, broker: Broker, load: _Load, queue: str, turn: int, options: argparse.Namespace
) -> float:
    messages = options.messages or load.messages
    before = broker.processor_seconds()
    try:
        outcome = client.run(load.key, f"tcp://127.0.0.1:{broker.port}", queue, messages, options.seed + turn)
    except JavaError as error:
        state = "is still running" if broker.is_running() else "has died"
        raise JavaError(f"{error}\n{broker.name} {state}; it printed:\n{broker.log()[-3000:]}") from error
    time.sleep(_PAUSE)
    used = (broker.processor_seconds() - before) / messages * 1e6
    rate = messages / outcome.seconds
    is_latency = outcome.median_latency_us > 0
    figure = outcome.median_latency_us if is_latency else rate
    unit = "us, median" if is_latency else "msg/s"
    _print_line(
        f"{load.title}, {broker.name}, {'warm-up' if turn < 0 else f'run {turn + 1}'}: {figure:,.0f} {unit}"
        f" ({messages:,} in {outcome.seconds:.2f} s; processor time a message: broker {used:.1f} us, client"
        f" {outcome.processor_seconds / messages * 1e6:.1f} us)"
    )
    return figure


def _print_line(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
