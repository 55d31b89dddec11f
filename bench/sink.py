"""Rates of the load generator alone, with no broker in between.

Stand-ins take the broker's place: one swallows the producer's frames, the other sends canned MESSAGE frames to the
consumer. A broker's rate must be well below these figures; otherwise the generator was measured.
"""

from __future__ import annotations

import socket
import threading
import time

from bench import frames
from bench.load import CHUNK, GROUP, LOADS, consume, produce
from bench.workers import Counter, Crew, Gate, Timing, counter

_QUEUE = "/queue/bench.headroom"
_CONNECTED = b"CONNECTED\nversion:1.2\nheart-beat:0,0\n\n\0\n"
_LIMIT = 300.0


def producer_rate(messages: int, seed: int) -> float:
    """Return the rate of the producer into a socket that is emptied without looking at the frames."""
    consumed = counter()
    with Crew() as crew:
        drain = crew.hire(swallow, messages, consumed)
        producer = crew.hire(produce, LOADS[0], drain.await_port(), _QUEUE, messages, seed, consumed)
        producer.await_ready()
        producer.start()
        timings: list[Timing] = crew.finish(_LIMIT)
    swallowed, sent = timings
    return messages / (swallowed.ended - sent.started)


def consumer_rate(messages: int, individual: bool) -> float:
    """Return the rate of the consumer from a canned stream; with ``individual`` it acknowledges each message."""
    with Crew() as crew:
        feeder = crew.hire(feed, messages, individual)
        consumer = crew.hire(consume, feeder.await_port(), _QUEUE, individual, messages, counter())
        consumer.await_ready()
        feeder.await_ready()
        consumer.start()
        feeder.start()
        timings: list[Timing] = crew.finish(_LIMIT)
    fed, consumed = timings
    return messages / (consumed.ended - fed.started)


def swallow(gate: Gate, messages: int, consumed: Counter) -> Timing:
    """Worker: be a broker that throws everything away."""
    with _accept(gate) as sock:
        scratch = bytearray(CHUNK)
        _read_frame(sock)
        sock.sendall(_CONNECTED)
        started = time.monotonic()
        count = 0
        while count < messages:
            got = sock.recv_into(scratch)
            if not got:
                raise ConnectionError("the producer hung up")
            count += scratch.count(0, 0, got)
            consumed.value = count
        return Timing(started, time.monotonic())


def feed(gate: Gate, messages: int, individual: bool) -> Timing:
    """Worker: be a broker that has all messages ready and takes the acknowledgements."""
    groups = frames.message_groups(_QUEUE, messages, GROUP, individual)
    with _accept(gate) as sock:
        _read_frame(sock)
        sock.sendall(_CONNECTED)
        _read_frame(sock)
        sock.sendall(b"RECEIPT\nreceipt-id:subscribed\n\n\0")
        acknowledged = threading.Thread(target=_read_acks, args=(sock, messages), daemon=True)
        gate.ready()
        started = time.monotonic()
        if individual:
            acknowledged.start()
        for group in groups:
            sock.sendall(group)
        if individual:
            acknowledged.join()
            sock.sendall(b"RECEIPT\nreceipt-id:acknowledged\n\n\0")
        return Timing(started, time.monotonic())


def _read_acks(sock: socket.socket, messages: int) -> None:
    scratch = bytearray(CHUNK)
    count = 0
    while count < messages and (got := sock.recv_into(scratch)):
        count += scratch.count(0, 0, got)


def _accept(gate: Gate) -> socket.socket:
    """Accept the one client; the bench gets the port through the gate."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_LIMIT)
        gate.announce(server.getsockname()[1])
        return server.accept()[0]


def _read_frame(sock: socket.socket) -> None:
    while not sock.recv(CHUNK).rstrip(b"\n").endswith(b"\0"):
        pass
