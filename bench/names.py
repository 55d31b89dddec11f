"""Memory and disk space for many queues, existing or deleted.

memory    a persistent message of one byte goes to each of N queues, and waits there names     N names are used once
each: a message is sent to it, received and acknowledged
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from bench.brokers import Truenext
from bench.load import GROUP, await_frame, connect, read
from bench.memory import MemoryWatch

PATIENCE = 120.0
"""Limit in seconds of a start or an end."""
SAMPLING_S = 1.0
"""Seconds until a sample of the memory is available."""


def memory(count: int, folder: Path) -> str:
    """Measure the memory of queues with a message each, while they are made and after kill -9."""
    with Truenext(folder) as broker, MemoryWatch(broker) as watch:
        with connect(broker.port) as sock:
            for group in _groups(count):
                _send(sock, group)
        broker.end(signal.SIGKILL, PATIENCE)
        before_kill = watch.peak
        watch.enter("after kill -9")
        broker.start(PATIENCE)
        time.sleep(SAMPLING_S)
        with connect(broker.port) as sock:
            _receive(sock, range(count - 1, count))
        after_kill = watch.peaks["after kill -9"]
    return f"{count:,} queues with a message each: {before_kill >> 10} MiB, {after_kill >> 10} MiB after kill -9"


def names(count: int, folder: Path) -> str:
    """Measure the peaks of memory and disk until half of the names were used, and until all were."""
    broker = Truenext(folder)
    with broker, MemoryWatch(broker) as watch, connect(broker.port) as sender, connect(broker.port) as receiver:
        used, first = 0, ""
        started = time.monotonic()
        for group in _groups(count):
            _send(sender, group)
            _receive(receiver, group)
            used += len(group)
            if not first and used * 2 >= count:
                first = f"{watch.peak >> 10} MiB, {_store(broker.data) >> 20} MiB of disk"
        rate = count / (time.monotonic() - started)
        last = f"{watch.peak >> 10} MiB, {_store(broker.data) >> 20} MiB of disk"
    return f"{count:,} names used once each, {rate:,.0f} a second: {first} after half of them, {last} in the end"


def _groups(count: int) -> Iterator[range]:
    return (range(first, min(first + GROUP, count)) for first in range(0, count, GROUP))


def _send(sock: socket.socket, numbers: range) -> None:
    """Send a persistent message to each of these queues, and await the receipt."""
    sends = [f"SEND\ndestination:{_address(number)}\npersistent:true\n\nx\0" for number in numbers[:-1]]
    sends.append(f"SEND\ndestination:{_address(numbers[-1])}\npersistent:true\nreceipt:there\n\nx\0")
    sock.sendall("".join(sends).encode())
    await_frame(sock, b"RECEIPT")


def _receive(sock: socket.socket, numbers: range) -> None:
    """Receive the message of each of these queues."""
    frames = [f"SUBSCRIBE\nid:{number}\ndestination:{_address(number)}\nack:auto\n\n\0" for number in numbers]
    sock.sendall("".join(frames).encode())
    got = b""
    while got.count(b"MESSAGE\n") < len(numbers) or not got.rstrip(b"\n").endswith(b"\0"):
        got += read(sock)
    frames = [f"UNSUBSCRIBE\nid:{number}\n\n\0" for number in numbers]
    frames[-1] = f"UNSUBSCRIBE\nid:{numbers[-1]}\nreceipt:gone\n\n\0"
    sock.sendall("".join(frames).encode())
    await_frame(sock, b"RECEIPT")


def _address(number: int) -> str:
    return f"/queue/orders.customer.{number}"


def _store(data: Path) -> int:
    """Return the bytes of the store without the history, which has limits of its own."""
    files = [path for part in ("journal", "lmdb") for path in (data / part).iterdir()]
    return sum(path.stat().st_blocks * 512 for path in files)
