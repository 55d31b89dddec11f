"""Benchmark of millions of messages that become due later.

    scheduled   sends that become messages later, each at a time of its own
    expiring    messages that no consumer takes, each of which expires at a time of its own

All are persistent and of 200 bytes. While they wait, the broker is killed with -9 and started again. Then all times
come within a minute, in another order than that of the sends. Each scheduled message must come exactly once and not
before its time. Each expiring message must expire, and not before its time either.

python -m bench.due --messages 1000000,10000000
"""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import frames, machine, report
from bench.brokers import Truenext
from bench.load import GROUP, NAP, SMALL, connect, read, send_confirmed
from bench.memory import MEMORY_TARGET, MemoryWatch
from bench.options import positive, sizes
from bench.progress import guarded, mib, phase, print_line, work
from bench.workers import Counter, Gate, end_in_order
from truenext import blocking

KINDS = ("scheduled", "expiring")

_QUEUE = "bench.due"
_BODY = b"%010d" + b"x" * 190
_NUMBER = re.compile(rb"\n\n(\d{10})x{190}\0")
_ACK = re.compile(rb"\nack:([^\n]+)\n")
_SENT_PER_SECOND = 30_000
"""Least rate of sends; the first message is due when all are sent at that rate."""
_LEAST_SECONDS = 8
"""Additional seconds before the first time, for the start after kill -9."""
_SECONDS_PER_MESSAGE = 0.01
_PATIENCE = 600.0
_IN_FLIGHT = 4
_EVERY = 0.2
"""Seconds between two queries of the messages that are left."""


class Plan(NamedTuple):
    """Messages of a run, and their times."""

    kind: str
    messages: int
    first_ms: int
    spread_ms: int
    """Milliseconds from the first time to the last."""

    def due_ms(self, number: int) -> int:
        """Return the time of a message in milliseconds since the epoch, the same in every process; evenly spread."""
        return self.first_ms + ((number * 2654435761 % (1 << 32)) * self.spread_ms >> 32)

    def groups(self) -> Iterator[bytes]:
        """Yield the SEND frames; the last of each group requests a receipt."""
        for group, first in enumerate(range(0, self.messages, GROUP)):
            last = min(first + GROUP, self.messages) - 1
            now_ms = time.time() * 1000
            yield b"".join(self._send(number, now_ms) for number in range(first, last)) + self._send(
                last, now_ms, b"\nreceipt:%d" % group
            )

    def _send(self, number: int, now_ms: float, receipt: bytes = b"") -> bytes:
        due_ms = self.due_ms(number)
        when = (
            b"AMQ_SCHEDULED_DELAY:%d" % math.ceil(due_ms - now_ms)
            if self.kind == "scheduled"
            else b"expires:%d" % due_ms
        )
        head = b"SEND\ndestination:/queue/%b\npersistent:true\n%b%b\n\n" % (_QUEUE.encode(), when, receipt)
        return head + _BODY % number + b"\0"


class Figures(NamedTuple):
    plan: Plan
    sent: float
    """Messages a second."""
    start: float
    """Seconds after kill -9 until the broker accepts connections."""
    done: float
    """Messages a second from the first time until the last has come or expired."""
    memory: int
    """Peak of RssAnon in KiB."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.due", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--messages",
        type=sizes,
        default=[1_000_000, 10_000_000],
        metavar="N,N",
        help="how many wait, one after the other (default 1000000,10000000)",
    )
    parser.add_argument(
        "--within",
        type=positive,
        default=60,
        metavar="SECONDS",
        help="their times come within so many seconds (default 60)",
    )
    parser.add_argument("--only", choices=KINDS, help="measure only this")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the broker's data goes (default: temp folder)")
    options = parser.parse_args(arguments)
    end_in_order()
    figures: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="bench-due-", dir=options.dir, ignore_cleanup_errors=True) as folder:
        for name, value in machine.facts(Path(folder)):
            print_line(f"{name}: {value}")

        def measure_all() -> None:
            for kind in KINDS if options.only is None else [options.only]:
                for count in options.messages:
                    figures.append(_measure(kind, count, options.within, Path(folder)))

        status = guarded(measure_all)
    if status == 0:
        print(f"\n{report.plain(table(figures))}")
    return status


def table(figures: list[Figures]) -> list[list[str]]:
    """Return headings and one row for each run."""
    rows = [["", "messages", "in, msg/s", "start after kill -9", "out, msg/s", "RssAnon at most", "target", "met"]]
    for each in figures:
        row = [each.plan.kind, f"{each.plan.messages:,}", f"{each.sent:,.0f}", f"{each.start:.2f} s"]
        row += [f"{each.done:,.0f}", mib(each.memory), f"<= {mib(MEMORY_TARGET)}"]
        rows.append([*row, "yes" if each.memory <= MEMORY_TARGET else "no"])
    return rows


def _measure(kind: str, messages: int, within: int, folder: Path) -> Figures:
    """Raises: BrokerError, WorkerError, OSError, ValueError"""
    print_line(f"\n{kind}, {messages:,} messages")
    broker = Truenext(folder)
    memory = MemoryWatch(broker)
    with broker, memory:
        seconds = _PATIENCE + messages * _SECONDS_PER_MESSAGE
        wait = _LEAST_SECONDS + messages / _SENT_PER_SECOND
        plan = Plan(kind, messages, int((time.time() + wait) * 1000), within * 1000)
        with phase("waiting", memory):
            sent = work("sent", messages, memory, seconds, send, plan, broker.port)
            print_line(
                f"  sent at {messages / sent:,.0f} msg/s; the first time comes in {_seconds_until_first(plan):.0f} s"
            )
        with phase("kill -9, restart", memory):
            broker.end(signal.SIGKILL, _PATIENCE)
            started = time.monotonic()
            broker.start(_PATIENCE)
            start = time.monotonic() - started
            print_line(f"  start: {start:.2f} s until it listens")
            if _seconds_until_first(plan) < 0:
                raise ValueError("the first time came before all were there: the machine is too busy, or too slow")
            if (waiting := count_of(plan, broker.port)) != messages:
                raise ValueError(f"{waiting} are there before the first time, not {messages}")
        with phase("their times come", memory):
            job = receive if kind == "scheduled" else watch
            done = work("done", messages, memory, seconds, job, plan, broker.port)
            print_line(f"  the last {done:.1f} s after the first time, each once and none too early")
        if remaining := count_of(plan, broker.port):
            raise ValueError(f"{remaining} are still there")
    return Figures(plan, messages / sent, start, messages / done, memory.peak)


def _seconds_until_first(plan: Plan) -> float:
    return plan.first_ms / 1000 - time.time()


def count_of(plan: Plan, port: int) -> int:
    """Return the number of messages that wait or are not due yet."""
    with blocking.connect(f"stomp://127.0.0.1:{port}", reconnect=False) as connection:
        queues = json.loads(connection.control_request("queues"))
    return sum(each["waiting"] + each["scheduled"] for each in queues if each["name"] == _QUEUE)


def send(gate: Gate, plan: Plan, port: int, done: Counter) -> float:
    """Worker: send all messages. Return the seconds."""

    def confirmed(groups: int) -> None:
        done.value = min(groups * GROUP, plan.messages)

    with connect(port) as sock:
        gate.ready()
        started = time.monotonic()
        answers = send_confirmed(sock, plan.groups(), _IN_FLIGHT, confirmed)
        ended = time.monotonic()
        frames.check_receipts(answers, -(-plan.messages // GROUP))
    return ended - started


def receive(gate: Gate, plan: Plan, port: int, done: Counter) -> float:
    """Worker: receive each message when it comes. Return the seconds since the first time.

    Raises: ValueError if a message comes twice, or before its time
    """
    seen = bytearray(plan.messages)
    count = 0
    partial = b""
    with connect(port) as sock:
        sock.settimeout(_PATIENCE)
        gate.ready()
        sock.sendall(frames.subscribe(f"/queue/{_QUEUE}", True, "subscribed"))
        while count < plan.messages:
            got = read(sock)
            now_ms = time.time() * 1000
            complete = (partial + got).rpartition(b"\0")
            partial = complete[2]
            received = complete[0] + complete[1]
            for number in map(int, _NUMBER.findall(received)):
                # The broker counts whole milliseconds from its acceptance of the send.
                early_ms = plan.due_ms(number) - 1 - now_ms
                if seen[number] or early_ms > 0:
                    raise ValueError(f"message {number} came {'twice' if seen[number] else f'{early_ms:.1f} ms early'}")
                seen[number] = 1
                count += 1
            done.value = count
            if acks := _ACK.findall(received):
                sock.sendall(frames.acks(acks[:-1]) + frames.ack_with_receipt(acks[-1], "a"))
            if len(got) < SMALL:
                time.sleep(NAP)
        ended = time.time()
    return ended - plan.first_ms / 1000


def watch(gate: Gate, plan: Plan, port: int, done: Counter) -> float:
    """Worker: poll until all messages have expired. Return the seconds since the first time.

    Raises: ValueError if more have expired than were due
    """
    gate.ready()
    while True:
        waiting = count_of(plan, port)
        now_ms = time.time() * 1000
        # Times are multiples of a fixed number, which are spread evenly: any part of the spread has about its share of
        # them.
        share = max(0.0, min(1.0, (now_ms - plan.first_ms) / plan.spread_ms))
        expired, due = plan.messages - waiting, share * plan.messages + 100
        if expired > due:
            raise ValueError(f"{expired} have gone, hardly {due:.0f} are due")
        done.value = plan.messages - waiting
        if not waiting:
            return time.time() - plan.first_ms / 1000
        time.sleep(_EVERY)


if __name__ == "__main__":
    raise SystemExit(main())
