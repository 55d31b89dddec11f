"""Benchmark of a topic, also with subscribers that are slower than its producer.

One producer sends transient messages of 1 KiB as fast as the broker takes them. One process reads for all subscribers,
in auto mode, each with a connection of its own, and checks that each gets every message in order: at once, and once
more only after all were sent, so that they wait on disk. Output, for each number of subscribers: messages sent and
delivered a second, and peaks of the broker's own memory (RssAnon) and of its disk without the history.

python -m bench.topics --subscribers 1,10
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench import frames
from bench.brokers import Truenext
from bench.load import CHUNK, GROUP, await_frame, connect, receive_all
from bench.memory import MemoryWatch
from bench.options import positive, sizes
from bench.workers import Counter, Crew, Gate, Timing, counter, end_in_order

SENT = {1: 300_000, 10: 100_000, 100: 20_000}
"""Number of messages by the largest number of subscribers."""
SILENCE = 120.0
TOPIC = "/topic/bench"
_NUMBER = re.compile(rb"\nnumber:(\d+)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.topics", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--subscribers", type=sizes, default=[*SENT], metavar="N,N", help="how many there are")
    parser.add_argument("--messages", type=positive, metavar="N", help="sent; default: by the number of subscribers")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the broker's data goes (default: temp folder)")
    options = parser.parse_args(arguments)
    end_in_order()
    for subscribers in options.subscribers:
        fitting = [sent for most, sent in SENT.items() if subscribers <= most]
        messages = options.messages or (fitting or [min(SENT.values())])[0]
        with tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as folder:
            for reads_late in (False, True):
                _measure(Path(folder), subscribers, messages, reads_late=reads_late)
    return 0


def _measure(folder: Path, subscribers: int, messages: int, *, reads_late: bool) -> None:
    received, sent_all = counter(), counter()
    on_disk = 0

    def measure_disk() -> None:
        nonlocal on_disk
        on_disk = max(on_disk, _bytes_on_disk(folder))

    with Truenext(folder) as broker, MemoryWatch(broker) as memory, Crew() as crew:
        readers = crew.hire(_read, broker.port, subscribers, messages, received, sent_all if reads_late else None)
        producer = crew.hire(_produce, broker.port, subscribers, messages, received, sent_all)
        readers.await_ready()
        producer.await_ready()
        readers.start()
        producer.start()
        read, sent = crew.finish(SILENCE + subscribers * messages / 1000, measure_disk)
    print(
        f"{subscribers:,} subscribers, {messages:,} messages, read {'when all was sent' if reads_late else 'at once'}: "
        f"{messages / (sent.ended - sent.started):,.0f} sent and "
        f"{subscribers * messages / (read.ended - (read if reads_late else sent).started):,.0f} delivered a second; "
        f"{memory.peak / 1024:,.0f} MiB of memory, {on_disk / 2**20:,.0f} MiB of disk at most",
        flush=True,
    )


def _bytes_on_disk(folder: Path) -> int:
    """Return the bytes of journal and checkpoint, wherever they are in the folder."""
    used = 0
    for file in folder.rglob("*"):
        if file.suffix in (".journal", ".mdb"):
            try:
                used += file.stat().st_blocks * 512
            except FileNotFoundError:
                continue
    return used


def _produce(gate: Gate, port: int, subscribers: int, messages: int, received: Counter, sent_all: Counter) -> Timing:
    """Worker: write all SEND frames as fast as the broker takes them."""
    tails = [b"content-length:%d\n\n%b\0" % (len(body), body) for body in frames.bodies()]
    head = f"SEND\ndestination:{TOPIC}\nnumber:".encode()
    with connect(port) as sock:
        gate.ready()
        started = time.monotonic()
        for first in range(0, messages, GROUP):
            numbers = range(first, min(first + GROUP, messages))
            sock.sendall(b"".join(b"%b%d\n%b" % (head, each, tails[each % len(tails)]) for each in numbers))
        sock.sendall(b"SEND\ndestination:/topic/nobody\nreceipt:all\n\n\0")
        await_frame(sock, b"RECEIPT")
        ended = time.monotonic()
        sent_all.value = 1
        while received.value < subscribers * messages:
            time.sleep(0.005)
    return Timing(started, ended)


def _read(gate: Gate, port: int, subscribers: int, messages: int, received: Counter, start: Counter | None) -> Timing:
    """Worker: receive all messages of all subscribers, once `start` is not 0.

    Raises: ValueError if one is missing or out of order
    """
    inboxes = [_Inbox(port) for _ in range(subscribers)]
    gate.ready()
    while start is not None and not start.value:
        time.sleep(0.005)
    return receive_all(inboxes, subscribers * messages, received)


class _Inbox:
    """Connection with one subscription."""

    def __init__(self, port: int) -> None:
        self.sock = connect(port)
        self.sock.sendall(f"SUBSCRIBE\nid:0\ndestination:{TOPIC}\nack:auto\nreceipt:there\n\n\0".encode())
        await_frame(self.sock, b"RECEIPT")
        self._rest = b""
        self._next = 0

    def read(self) -> int:
        """Read once, and return the number of messages."""
        got = self.sock.recv(CHUNK)
        if not got:
            raise ConnectionError(f"the broker hung up; last words: {self._rest[-500:]!r}")
        read = self._rest + got
        complete = read.rfind(b"\0") + 1
        numbers = list(map(int, _NUMBER.findall(read, 0, complete)))
        self._rest = read[complete:]
        if numbers != list(range(self._next, self._next + len(numbers))):
            raise ValueError(f"behind {self._next - 1} came {numbers[:5]}: {read[:500]!r}")
        self._next += len(numbers)
        return len(numbers)


if __name__ == "__main__":
    raise SystemExit(main())
