"""Loads of the benchmark, and the rate at which a broker carries messages end to end under one of them.

The generator must not be the bottleneck: SEND frames are made before the clock starts, received bytes are only
counted (or searched for ack headers) in large pieces, and checked after the clock has stopped.
"""

from __future__ import annotations

import os
import select
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from bench import frames
from bench.workers import Counter, Crew, Gate, Timing, counter, processor_seconds

AUTHORITY_VARIABLE = "TRUENEXT_BENCH_CA"
"""Environment variable that has the workers connect with TLS, to a broker with a certificate of this file's."""
CHUNK = 256 * 1024
GROUP = 200
# The producer waits when it is this far ahead, so that neither broker pages out a backlog.
AHEAD = 50_000
SILENCE = 60.0
# A broker that writes one message at a time would wake the consumer for each of them, and the consumer would compete
# with the broker for the processor. After a small read the consumer lets some more arrive.
SMALL = 32 * 1024
NAP = 0.0005
# Space for headers that a broker adds to a message; the whole stream is kept and checked after the clock has stopped.
BUFFER_BYTES_PER_MESSAGE = 2 * frames.BODY_SIZE


@dataclass(frozen=True)
class Load:
    """Way to use a broker, and the ratio to ActiveMQ that is truenext's target."""

    key: str
    title: str
    persistent: bool
    individual: bool
    group: int  # frames written at once; with receipts, the last one asks for a receipt
    in_flight: int  # groups that may be unconfirmed; 0: no receipts at all
    messages: int
    target: float
    warmup_share: float
    producers: int = 1  # each waits for its own receipts


LOADS = (
    Load("1", "transient, auto ack", False, False, GROUP, 0, 300_000, 2.5, 0.29),
    Load("2", "transient, individual ack", False, True, GROUP, 0, 300_000, 2.6, 0.29),
    Load("3", "persistent, receipt per 200, auto ack", True, False, GROUP, 2, 100_000, 5.0, 0.20),
    Load("4", "persistent, receipt per 200, individual ack", True, True, GROUP, 2, 100_000, 5.0, 0.19),
    Load("5", "persistent, one at a time", True, False, 1, 1, 20_000, 1.3, 0.1),
    Load("6", "persistent, 8 producers, each one at a time", True, False, 1, 1, 40_000, 3.0, 0.1, 8),
    Load("7", "persistent, 32 producers, each one at a time", True, False, 1, 1, 60_000, 4.5, 0.1, 32),
    Load("8", "persistent, 128 producers, each one at a time", True, False, 1, 1, 80_000, 5.0, 0.1, 128),
)


@dataclass(frozen=True)
class Outcome:
    """Result of one run."""

    messages: int
    seconds: float
    generator_processor: float
    latency: tuple[float, float] | None = None
    """See Timing."""

    @property
    def rate(self) -> float:
        return self.messages / self.seconds


def run(load: Load, port: int, queue: str, messages: int, seed: int, *, prefetch: int | None = 1000) -> Outcome:
    """Send ``messages`` through ``queue`` of the broker at ``port``; the queue must be new."""
    consumed = counter()
    with Crew() as crew:
        consumer = crew.hire(consume, port, queue, load.individual, messages, consumed, prefetch)
        producer = crew.hire(produce, load, port, queue, messages, seed, consumed)
        consumer.await_ready()
        producer.await_ready()
        consumer.start()
        producer.start()
        received, sent = crew.finish(SILENCE + messages / 50)
    ended = max(received.ended, sent.ended) if load.in_flight else received.ended
    return Outcome(messages, ended - sent.started, received.processor + sent.processor, sent.latency)


def produce(gate: Gate, load: Load, port: int, queue: str, messages: int, seed: int, consumed: Counter) -> Timing:
    """Worker: write all SEND frames, as fast as the broker, the receipts and the consumer allow."""
    groups = frames.send_groups(queue, load.persistent, messages, load.group, load.in_flight > 0, seed)
    with ExitStack() as connected:
        socks = [connected.enter_context(connect(port)) for _ in range(load.producers)]
        gate.ready()
        processor = processor_seconds()
        started = time.monotonic()
        latencies: list[float] = []
        answers = b""
        if not load.in_flight:
            _send_freely(socks[0], groups, load.group, consumed)
        elif load.group > 1:
            answers = send_confirmed(socks[0], groups, load.in_flight)
        elif load.producers > 1:
            answers, latencies = _send_by_many(socks, groups)
        else:
            answers, latencies = _send_one_at_a_time(socks[0], groups)
        ended = time.monotonic()
        processor = processor_seconds() - processor
        if load.in_flight:
            frames.check_receipts(answers, len(groups))
        while consumed.value < messages:  # stay connected until the consumer has everything
            time.sleep(0.005)
    latencies.sort()
    latency = (latencies[len(latencies) // 2], latencies[len(latencies) * 99 // 100]) if latencies else None
    return Timing(started, ended, processor, latency)


def _send_one_at_a_time(sock: socket.socket, groups: list[bytes]) -> tuple[bytes, list[float]]:
    """Return the bytes of the receipts, and the latency of each."""
    answers: list[bytes] = []
    latencies: list[float] = []
    for group in groups:
        sent = time.perf_counter()
        sock.sendall(group)
        answer = read(sock)
        while not answer.count(0):
            answer += read(sock)
        latencies.append(time.perf_counter() - sent)
        answers.append(answer)
    return b"".join(answers), latencies


def _send_by_many(socks: Sequence[socket.socket], groups: list[bytes]) -> tuple[bytes, list[float]]:
    """Send from several producers that do not wait for each other; return as `_send_one_at_a_time`."""
    answers: dict[socket.socket, list[bytes]] = {sock: [] for sock in socks}
    latencies: list[float] = []
    to_send = iter(groups)
    sent: dict[socket.socket, float] = {}

    def send_next(sock: socket.socket) -> None:
        group = next(to_send, None)
        if group is None:
            selector.unregister(sock)
        else:
            sent[sock] = time.perf_counter()
            sock.sendall(group)

    with selectors.DefaultSelector() as selector:
        for sock in socks:
            selector.register(sock, selectors.EVENT_READ, sock)
            send_next(sock)
        while selector.get_map():
            for key, _ in selector.select(SILENCE):
                one: socket.socket = key.data
                answer = read(one)
                answers[one].append(answer)
                # ActiveMQ ends a frame with an additional line feed, which may come by itself.
                if answer.count(0):
                    latencies.append(time.perf_counter() - sent[one])
                    send_next(one)
    return b"".join(b"".join(of_one) for of_one in answers.values()), latencies


def _send_freely(sock: socket.socket, groups: list[bytes], size: int, consumed: Counter) -> None:
    sent = 0
    for group in groups:
        while sent - consumed.value > AHEAD:
            time.sleep(0.001)
        sock.sendall(group)
        sent += size


def send_confirmed(
    sock: socket.socket, groups: Iterable[bytes], in_flight: int, confirmed_so_far: Callable[[int], None] | None = None
) -> bytes:
    """Send the groups, with at most ``in_flight`` of them unconfirmed; return the bytes of the receipts.

    ``confirmed_so_far`` is called with the number of confirmed groups whenever it grows.
    """
    answers: list[bytes] = []
    sent = confirmed = 0

    def await_fewer_than(unconfirmed: int) -> None:
        nonlocal confirmed
        while sent - confirmed >= unconfirmed:
            answers.append(read(sock))
            confirmed += answers[-1].count(0)
            if confirmed_so_far is not None:
                confirmed_so_far(confirmed)

    for group in groups:
        await_fewer_than(in_flight)
        sock.sendall(group)
        sent += 1
    await_fewer_than(1)
    return b"".join(answers)


def consume(
    gate: Gate, port: int, queue: str, individual: bool, messages: int, consumed: Counter, prefetch: int | None = 1000
) -> Timing:
    """Worker: subscribe, receive all messages, and acknowledge each of them where requested."""
    with connect(port) as sock:
        inbox = _Inbox(sock, messages)
        sock.sendall(frames.subscribe(queue, individual, "subscribed", prefetch))
        await_frame(sock, b"RECEIPT")
        gate.ready()
        processor = processor_seconds()
        started = time.monotonic()
        if individual:
            _receive_and_acknowledge(sock, inbox, messages, consumed)
        else:
            _receive(inbox, messages, consumed)
        ended = time.monotonic()
        processor = processor_seconds() - processor
        frames.check_messages(inbox.buffer, inbox.end, messages)
    return Timing(started, ended, processor)


class _Inbox:
    """Buffer of all bytes received since the subscription, allocated before the clock starts."""

    def __init__(self, sock: socket.socket, messages: int) -> None:
        self._sock = sock
        self.buffer = bytearray(messages * BUFFER_BYTES_PER_MESSAGE + 2 * CHUNK)
        self._view = memoryview(self.buffer)
        self.end = 0

    def read(self) -> int:
        got = self._sock.recv_into(self._view[self.end : self.end + CHUNK])
        if isinstance(self._sock, ssl.SSLSocket):
            # A read returns one record, of 16 KiB at the most; others may have come with it.
            while 0 < got < CHUNK and select.select([self._sock], [], [], 0)[0]:
                more = self._sock.recv_into(self._view[self.end + got : self.end + CHUNK])
                if not more:
                    break
                got += more
        if self.end >= len(self.buffer):
            raise ConnectionError("the broker sent far more than these messages can take")
        if not got:
            raise ConnectionError(f"the broker hung up; last words: {bytes(self.buffer[: self.end][-500:])!r}")
        self.end += got
        return got


def _receive(inbox: _Inbox, messages: int, consumed: Counter) -> None:
    count = 0
    while True:
        got = inbox.read()
        count += inbox.buffer.count(0, inbox.end - got, inbox.end)
        consumed.value = count
        if count >= messages:
            return
        if got < SMALL:
            time.sleep(NAP)


def _receive_and_acknowledge(sock: socket.socket, inbox: _Inbox, messages: int, consumed: Counter) -> None:
    count = done = 0
    while True:
        got = inbox.read()
        complete = inbox.buffer.rfind(0, done, inbox.end) + 1
        if complete:
            values = frames.ACK_VALUE.findall(inbox.buffer, done, complete)
            done = complete
            count += len(values)
            consumed.value = count
            if count >= messages:
                break
            sock.sendall(frames.acks(values))
        if got < SMALL:
            time.sleep(NAP)
    sock.sendall(frames.acks(values[:-1]) + frames.ack_with_receipt(values[-1], "acknowledged"))
    await_frame(sock, b"RECEIPT")


def connect(port: int, client_id: str | None = None) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), SILENCE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if authority := os.environ.get(AUTHORITY_VARIABLE):
        sock = ssl.create_default_context(cafile=authority).wrap_socket(sock, server_hostname="localhost")
    sock.sendall(frames.connect(client_id))
    await_frame(sock, b"CONNECTED")
    return sock


def await_frame(sock: socket.socket, command: bytes) -> None:
    """Read exactly one frame, which must be a ``command``; no other frame may be on its way."""
    answer = b""
    while not answer.rstrip(b"\r\n").endswith(b"\0"):
        answer += read(sock)
    if not answer.lstrip(b"\r\n").startswith(command):
        raise ConnectionError(f"expected {command.decode()}, got {answer[:500]!r}")


def read(sock: socket.socket) -> bytes:
    answer = sock.recv(CHUNK)
    if not answer:
        raise ConnectionError("the broker hung up")
    return answer


class Inbox(Protocol):
    """Connection that receives messages."""

    sock: socket.socket

    def read(self) -> int:
        """Read the data that is there, and return the number of messages."""


def receive_all(inboxes: Sequence[Inbox], messages: int, received: Counter) -> Timing:
    """Receive this number of messages over all inboxes together, and close them."""
    with selectors.DefaultSelector() as selector:
        for inbox in inboxes:
            selector.register(inbox.sock, selectors.EVENT_READ, inbox.read)
        started = time.monotonic()
        count = 0
        while count < messages:
            for key, _ in selector.select(SILENCE):
                read_inbox: Callable[[], int] = key.data
                count += read_inbox()
            received.value = count
        ended = time.monotonic()
    for inbox in inboxes:
        inbox.sock.close()
    return Timing(started, ended)
