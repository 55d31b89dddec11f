"""Upper bounds of the rate of persistent messages, one at a time, if a broker were nothing but its disk.

`bare_rate` appends and syncs one message after the other: nothing that keeps the promise can be faster. `echo_rate`
does the same behind sockets, with the producer and the consumer of the real load. That is the rate that they, Python
and the loopback interface allow a broker that does not read its frames.
"""

from __future__ import annotations

import os
import select
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import frames
from bench.load import SILENCE, Load, await_frame, read, run
from bench.workers import Crew, Gate, Timing

_SLOT = 2048
"""Bytes of the file for each message of the echo; a SEND frame of the load has about 1,150."""
_ZEROS = bytes(1 << 20)


def bare_rate(folder: Path, messages: int) -> float:
    """Return the rate of appending messages of 1 KiB to a zeroed file in ``folder``, each synced by itself."""
    body = frames.bodies()[0]
    with _zeroed(folder, messages * len(body)) as file:
        started = time.monotonic()
        for offset in range(0, messages * len(body), len(body)):
            os.pwrite(file, body, offset)
            os.fdatasync(file)
        return messages / (time.monotonic() - started)


def echo_rate(folder: Path, load: Load, messages: int, seed: int) -> float:
    """Return the rate of ``load`` through a server that does the same with each frame and forwards it unread."""
    with Crew() as crew:
        server = crew.hire(echo, str(folder), messages)
        outcome = run(load, server.await_port(), "/queue/bench.echo", messages, seed)
        crew.finish(SILENCE)
    return outcome.rate


def echo(gate: Gate, folder: str, messages: int) -> Timing:
    """Worker: be a broker for one producer, which waits for each receipt, and one consumer in auto mode."""
    with (
        _zeroed(Path(folder), messages * _SLOT) as file,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        server.settimeout(SILENCE)
        gate.announce(server.getsockname()[1])
        with _client(server) as one, _client(server) as other:
            # The producer waits until the consumer has subscribed.
            consumer = select.select([one, other], [], [], SILENCE)[0][0]
            producer = other if consumer is one else one
            await_frame(consumer, b"SUBSCRIBE")
            consumer.sendall(b"RECEIPT\nreceipt-id:subscribed\n\n\0")
            started = time.monotonic()
            for number in range(messages):
                frame = read(producer)
                while frame[-1]:
                    frame += read(producer)
                os.pwrite(file, frame, number * _SLOT)
                os.fdatasync(file)
                producer.sendall(b"RECEIPT\nreceipt-id:%d\n\n\0" % number)
                consumer.sendall(b"MESSAGE" + frame[len(b"SEND") :])
            return Timing(started, time.monotonic())


def _client(server: socket.socket) -> socket.socket:
    client = server.accept()[0]
    client.settimeout(SILENCE)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    await_frame(client, b"CONNECT")
    client.sendall(b"CONNECTED\nversion:1.2\nheart-beat:0,0\n\n\0")
    return client


@contextmanager
def _zeroed(folder: Path, size: int) -> Iterator[int]:
    """Open a file of zeros that are on the disk already, so that a write changes only data."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for offset in range(0, size, len(_ZEROS)):
            file.write(_ZEROS[: size - offset])
        os.fsync(file.fileno())
        yield file.fileno()
