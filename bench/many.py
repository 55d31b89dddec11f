"""Benchmark of large numbers: queues, consumers of one queue, selectors, durable subscriptions.

    queues          messages go to N queues in turn, each of which has a consumer
    consumers       messages go to one queue that has N consumers
    selectors       messages go to one queue that has N consumers, each with a selector of its own; each message
                    matches one of them
    subscriptions   persistent messages go to one topic that has N durable subscriptions
    memory          a message waits in each of N queues: the broker's own memory, also after kill -9
    names           N names are used once each: the broker's own memory, and the store's disk

All are acknowledged one by one. Each of the first four is compared with one: as many messages are delivered, by
alternating runs on the same broker, medians.

python -m bench.many --only queues
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import frames, names
from bench.brokers import Truenext
from bench.load import AHEAD, CHUNK, GROUP, await_frame, connect, receive_all
from bench.options import positive
from bench.workers import Counter, Crew, Gate, Timing, counter, end_in_order

CONNECTIONS = 50
"""Largest number of connections over which the consumers are spread."""
SILENCE = 120.0


@dataclass(frozen=True)
class Shape:
    """Number of queues, consumers, selectors or subscriptions of a run."""

    kind: str
    count: int

    @property
    def destinations(self) -> int:
        return self.count if self.kind == "queues" else 1

    @property
    def copies(self) -> int:
        """Number of deliveries of each message."""
        return self.count if self.is_topic else 1

    @property
    def colours(self) -> int:
        """Number of values that selectors distinguish; 0 without selectors."""
        return self.count if self.kind == "selectors" else 0

    @property
    def is_topic(self) -> bool:
        return self.kind == "subscriptions"


KINDS = {"queues": [1, 10_000], "consumers": [1, 1_000], "selectors": [1, 10, 100], "subscriptions": [1, 10, 100]}
OF_NAMES: dict[str, tuple[list[int], Callable[[int, Path], str]]] = {
    "memory": ([10_000, 50_000, 100_000], names.memory),
    "names": ([100_000], names.names),
}
"""Default numbers of queues, and the function that measures each."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.many", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=[*KINDS, *OF_NAMES], help="measure only this")
    parser.add_argument("--count", type=positive, metavar="N", help="how many there are")
    parser.add_argument("--messages", type=positive, default=200_000, metavar="N", help="delivered in each run")
    parser.add_argument("--runs", type=positive, default=3, metavar="N", help="of each kind")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the broker's data goes (default: temp folder)")
    options = parser.parse_args(arguments)
    end_in_order()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as folder:
        for kind, (numbers, measure) in OF_NAMES.items():
            if options.only in (None, kind):
                for number in numbers if options.count is None else [options.count]:
                    print(measure(number, Path(folder)), flush=True)
        for kind in KINDS if options.only is None else [options.only]:
            if kind in OF_NAMES:
                continue
            counts = KINDS[kind] if options.count is None else [1, options.count]
            rates: dict[Shape, list[float]] = {Shape(kind, count): [] for count in counts}
            with Truenext(Path(folder)) as broker:
                for number in range(options.runs):
                    for shape, measured in rates.items():
                        measured.append(_run(shape, broker.port, f"{kind}.{number}.{shape.count}", options.messages))
                        print(f"  {shape.count:,} {kind}: {measured[-1]:,.0f}/s", flush=True)
            one, *others = (statistics.median(measured) for measured in rates.values())
            for count, rate in zip(counts[1:], others, strict=True):
                print(f"{count:,} {kind}: {rate:,.0f} messages a second, {rate / one:.2f} of one's {one:,.0f}")
    return 0


def _run(shape: Shape, port: int, name: str, messages: int) -> float:
    """Return the messages delivered a second, from the first SEND until the last has come."""
    messages -= messages % shape.copies
    consumed = counter()
    with Crew() as crew:
        consumer = crew.hire(_consume, shape, port, name, messages, consumed)
        producer = crew.hire(_produce, shape, port, name, messages, consumed)
        producer.await_ready()
        consumer.await_ready()
        consumer.start()
        producer.start()
        received, sent = crew.finish(SILENCE + messages / 50)
    seconds: float = received.ended - sent.started
    return messages / seconds


def _destination(shape: Shape, name: str, number: int) -> str:
    return f"/{'topic' if shape.is_topic else 'queue'}/bench.{name}.{number}"


def _produce(gate: Gate, shape: Shape, port: int, name: str, messages: int, consumed: Counter) -> Timing:
    groups = list(_groups(shape, name, messages))
    with connect(port) as sock:
        gate.ready()
        started = time.monotonic()
        sent = 0
        for group in groups:
            while sent * shape.copies - consumed.value > AHEAD:
                time.sleep(0.001)
            sock.sendall(group)
            sent += GROUP
        while consumed.value < messages:
            time.sleep(0.005)
    return Timing(started, time.monotonic())


def _groups(shape: Shape, name: str, messages: int) -> Iterator[bytes]:
    kind = "persistent:true\n" if shape.is_topic else ""
    heads = [
        f"SEND\ndestination:{_destination(shape, name, number)}\n{kind}".encode()
        for number in range(shape.destinations)
    ]
    if shape.colours:
        heads = [heads[0] + b"colour:c%d\n" % colour for colour in range(shape.colours)]
    tails = [b"content-length:%d\n\n%b\0" % (len(body), body) for body in frames.bodies()]
    sends = messages // shape.copies
    for first in range(0, sends, GROUP):
        numbers = range(first, min(first + GROUP, sends))
        yield b"".join(heads[each % len(heads)] + tails[each % len(tails)] for each in numbers)


def _consume(gate: Gate, shape: Shape, port: int, name: str, messages: int, consumed: Counter) -> Timing:
    inboxes = [_Inbox(port, f"{name}.{number}") for number in range(min(CONNECTIONS, shape.count))]
    for number in range(shape.count):
        inboxes[number % len(inboxes)].subscribe(shape, number, _destination(shape, name, number % shape.destinations))
    gate.ready()
    return receive_all(inboxes, messages, consumed)


class _Inbox:
    """Connection with consumers, which acknowledges each message."""

    def __init__(self, port: int, client_id: str) -> None:
        self.sock = connect(port, client_id)
        self._rest = b""

    def subscribe(self, shape: Shape, number: int, destination: str) -> None:
        head = f"id:{number}\ndestination:{destination}\nack:client-individual\nactivemq.prefetchSize:100"
        if shape.is_topic:
            head += "\ndurable:true"
        if shape.colours:
            head += f"\nselector:colour = 'c{number}'"
        self.sock.sendall(f"SUBSCRIBE\n{head}\nreceipt:there\n\n\0".encode())
        await_frame(self.sock, b"RECEIPT")

    def read(self) -> int:
        """Read once, and return the number of messages."""
        got = self.sock.recv(CHUNK)
        if not got:
            raise ConnectionError(f"the broker hung up; last words: {self._rest[-500:]!r}")
        read = self._rest + got
        complete = read.rfind(b"\0") + 1
        values = frames.ACK_VALUE.findall(read, 0, complete)
        self._rest = read[complete:]
        if values:
            self.sock.sendall(frames.acks(values))
        return len(values)


if __name__ == "__main__":
    raise SystemExit(main())
