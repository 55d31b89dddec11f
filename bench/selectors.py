"""Benchmark of a selector whose message waits behind a million messages that do not match.

One queue holds messages of 1 KiB that no selector matches, and one at the end that matches; most of the queue has
left memory. Then a consumer with that selector comes:

    the scan      from its SUBSCRIBE until it has that message: messages compared a second
    latency       then matching messages are sent, one after the other: from each SEND until it is there
    the others    time of a message from SEND to MESSAGE in another queue, before and during the scan

python -m bench.selectors --messages 1000000
"""

from __future__ import annotations

import argparse
import re
import select
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import frames
from bench.brokers import Broker, Truenext
from bench.load import await_frame, connect, read, send_confirmed
from bench.options import positive

MATCHES = 500
"""Number of matching messages whose latency is measured."""
OTHERS_SECONDS = 3.0
"""Seconds of measuring the other queue before the scan."""
GROUP = 200
QUEUE = "/queue/bench.haystack"
OTHER = "/queue/bench.other"

_ID = re.compile(rb"\nack:([^\n]+)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.selectors", description=__doc__)
    parser.add_argument("--messages", type=positive, default=1_000_000, metavar="N", help="that do not match")
    parser.add_argument("--transient", action="store_true", help="send them transient")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the broker's data goes (default: temp folder)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as folder, Truenext(Path(folder)) as broker:
        _measure(broker, options.messages, persistent=not options.transient)
    return 0


def _measure(broker: Broker, messages: int, *, persistent: bool) -> None:
    with connect(broker.port) as sender, connect(broker.port) as receiver:
        send_confirmed(sender, _haystack(messages, persistent=persistent), in_flight=4)
        sender.sendall(_needle(persistent=persistent))
        await_frame(sender, b"RECEIPT")
        others = _Others(broker.port)
        before = others.measure(OTHERS_SECONDS)
        during: list[float] = []
        is_scanning = threading.Event()
        is_scanning.set()
        thread = threading.Thread(target=lambda: during.extend(others.measure_while(is_scanning)))
        thread.start()
        started = time.perf_counter()
        subscribe = frames.subscribe(QUEUE, individual=True, receipt="there")
        receiver.sendall(subscribe.replace(b"\n\n\0", b"\nselector:colour = 'red'\n\n\0"))
        acknowledged = _Receiver(receiver)
        acknowledged.receive()
        scan = time.perf_counter() - started
        is_scanning.clear()
        thread.join()
        latencies = []
        for _ in range(MATCHES):
            sent = time.perf_counter()
            sender.sendall(_needle(persistent=persistent, receipt=False))
            acknowledged.receive()
            latencies.append(time.perf_counter() - sent)
    kind = "persistent" if persistent else "transient"
    print(f"{messages:,} {kind} messages of 1 KiB that do not match")
    print(f"scan        {scan:.2f} s, {messages / scan:,.0f} messages a second")
    print(f"latency     {_describe(latencies)}")
    print(f"the others  {_describe(before)} before, {_describe(during)} during the scan")


def _describe(seconds: list[float]) -> str:
    if not seconds:
        return "nothing measured"
    ordered = sorted(seconds)
    p50, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return f"p50 {p50 * 1000:.2f} ms, p99 {p99 * 1000:.2f} ms ({len(ordered)})"


def _haystack(messages: int, *, persistent: bool) -> Iterator[bytes]:
    body = frames.bodies()[0]
    head = f"SEND\ndestination:{QUEUE}\ncolour:blue\npersistent:{str(persistent).lower()}\ncontent-length:{len(body)}"
    plain = head.encode() + b"\n\n" + body + b"\0"
    last = head.encode() + b"\nreceipt:r\n\n" + body + b"\0"
    for started in range(0, messages, GROUP):
        yield plain * (min(GROUP, messages - started) - 1) + last


def _needle(*, persistent: bool, receipt: bool = True) -> bytes:
    head = f"SEND\ndestination:{QUEUE}\ncolour:red\npersistent:{str(persistent).lower()}\ncontent-length:1"
    return head.encode() + (b"\nreceipt:n" if receipt else b"") + b"\n\nx\0"


class _Receiver:
    """Receiver that acknowledges one message after the other."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._read = b""

    def receive(self) -> None:
        while True:
            frame, end, rest = self._read.partition(b"\0")
            if not end:
                self._read += read(self._sock)
                continue
            self._read = rest
            if frame.lstrip(b"\n").startswith(b"MESSAGE"):
                found = _ID.search(frame)
                assert found is not None, frame
                self._sock.sendall(frames.acks([found[1]]))
                return


class _Others:
    """Producer and consumer of another queue, with one message at a time."""

    def __init__(self, port: int) -> None:
        self._sender, self._receiver = connect(port), connect(port)
        self._receiver.sendall(frames.subscribe(OTHER, individual=True, receipt="there"))
        await_frame(self._receiver, b"RECEIPT")
        self._consumer = _Receiver(self._receiver)

    def measure(self, seconds: float) -> list[float]:
        event = threading.Event()
        event.set()
        timer = threading.Timer(seconds, event.clear)
        timer.start()
        return self.measure_while(event)

    def measure_while(self, event: threading.Event) -> list[float]:
        latencies = []
        while event.is_set():
            started = time.perf_counter()
            self._sender.sendall(f"SEND\ndestination:{OTHER}\ncontent-length:1\n\nx\0".encode())
            self._consumer.receive()
            latencies.append(time.perf_counter() - started)
            # Slower than possible, to measure a waiting client and not a load.
            select.select([], [], [], 0.001)
        return latencies


if __name__ == "__main__":
    raise SystemExit(main())
