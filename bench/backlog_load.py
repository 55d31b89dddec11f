"""What does a backlog consist of, who piles it up and who takes it away, and did all of it come in order?

The messages are numbered. Priority and body of a number follow from the seed, in every process alike, so that what
arrives can be checked without keeping what was sent; no process keeps more than a byte per message.
"""

from __future__ import annotations

import random
import re
import select
import socket
import string
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from bench import frames
from bench.load import CHUNK, GROUP, NAP, SMALL, connect, send_confirmed
from bench.workers import Counter, Gate, processor_seconds

LATE_PRIORITY = 9
"""Of what is sent while all others wait; those have 0 to 8."""
SIZES = (512, 1536)
"""Bytes of the smallest and the largest body; all between are equally frequent."""
LAST = 1_000_000
"""Messages at the end whose rate is told apart from that of the whole."""
MESSAGES_PER_PROBE = 100
"""A backlog has at least so many messages for each probe, so that it does not run out meanwhile."""

_BETWEEN_PROBES = 100
"""Other messages that are taken before the next probe, at most."""
_KINDS = 10_000
"""After so many numbers priorities and bodies begin again."""
_IN_FLIGHT = 4
"""Groups that the producer has unconfirmed."""
_NUMBERS = 1 << 40
"""More than there are messages."""

_MESSAGE = re.compile(rb"\n*MESSAGE\n(?:[^\n]+\n)*?ack:([^\n]+)\n(?:[^\n]+\n)*?id:(\d+)\ncontent-length:(\d+)\n\n")


@dataclass(frozen=True)
class Backlog:
    """So many messages of a mixture, waiting in one queue."""

    queue: str
    persistent: bool
    messages: int
    seed: int

    @property
    def last(self) -> int:
        """How many messages at the end count as the last."""
        return min(LAST, self.messages)


class Pace(NamedTuple):
    """How fast messages went."""

    messages: int
    seconds: float
    last_messages: int
    last_seconds: float
    processor: float
    """Seconds of processor time of the load generator."""

    @property
    def rate(self) -> float:
        return self.messages / self.seconds

    @property
    def last_rate(self) -> float:
        return self.last_messages / self.last_seconds


class Probes(NamedTuple):
    """What came of messages of priority 9 sent while all others wait."""

    waits: list[tuple[bool, float]]
    """Persistent or not, and seconds from writing the SEND until the MESSAGE was read and acknowledged."""
    received: list[int]
    """Numbers of the others that were taken and acknowledged meanwhile, in order."""


class Mixture:
    """Priorities and bodies by number."""

    def __init__(self, seed: int) -> None:
        dice = random.Random(seed)
        text = "".join(dice.choices(string.ascii_letters + string.digits + " ", k=1 << 16)).encode()
        self.priorities = dice.choices(range(LATE_PRIORITY), k=_KINDS)
        self.bodies: list[bytes] = []
        """With the NUL that ends a frame."""
        for _ in range(_KINDS):
            size = dice.randint(*SIZES)
            first = dice.randrange(len(text) - size)
            self.bodies.append(text[first : first + size] + b"\0")

    def send(self, backlog: Backlog, number: int, *, receipt: int | None = None) -> bytes:
        """A SEND frame; one whose number is not in the backlog is late."""
        late = number >= backlog.messages
        priority = LATE_PRIORITY if late else self.priorities[number % _KINDS]
        # The first late one is transient, the next persistent, and so on.
        persistent = is_late_persistent(backlog, number) if late else backlog.persistent
        body = self.bodies[number % _KINDS]
        return b"SEND\ndestination:%b%b\npriority:%d\nid:%d\ncontent-length:%d%b\n\n%b" % (
            backlog.queue.encode(),
            b"\npersistent:true" if persistent else b"",
            priority,
            number,
            len(body) - 1,
            b"" if receipt is None else b"\nreceipt:%d" % receipt,
            body,
        )

    def groups(self, backlog: Backlog) -> Iterator[bytes]:
        """The SEND frames of a backlog in groups, made when they are asked for; the last of each wants a receipt."""
        for group, first in enumerate(range(0, backlog.messages, GROUP)):
            last = min(first + GROUP, backlog.messages) - 1
            sends = [self.send(backlog, number) for number in range(first, last)]
            yield b"".join(sends) + self.send(backlog, last, receipt=group)


def is_late_persistent(backlog: Backlog, number: int) -> bool:
    return bool((number - backlog.messages) % 2)


class DeliveryCheck:
    """Whether each message of a backlog comes exactly once, and in the order of the contract, whoever takes it.

    One consumer at a time and no sender: then the order of arrival is that of the keys.
    """

    def __init__(self, backlog: Backlog, mixture: Mixture) -> None:
        self._seen = bytearray(backlog.messages)
        self._ranks = [(LATE_PRIORITY - priority) * _NUMBERS for priority in mixture.priorities]
        self._last_key = -1

    def add(self, numbers: Iterable[int]) -> None:
        """Raises: ValueError"""
        seen, ranks, last_key = self._seen, self._ranks, self._last_key
        for number in numbers:
            if number >= len(seen):
                raise ValueError(f"message {number} came, which is not of this backlog")
            if seen[number]:
                raise ValueError(f"message {number} came twice")
            seen[number] = 1
            # Numbers are sent in order, so they stand for the sequence.
            key = ranks[number % _KINDS] + number
            if key < last_key:
                raise ValueError(
                    f"out of order: message {number} of priority {_priority(key)} came behind message"
                    f" {last_key % _NUMBERS} of priority {_priority(last_key)}"
                )
            last_key = key
        self._last_key = last_key

    def close(self) -> None:
        """Raises: ValueError if any has not come."""
        missing = self._seen.count(0)
        if missing:
            raise ValueError(f"{missing} messages have not come, the first of them is {self._seen.index(0)}")


def _priority(key: int) -> int:
    return LATE_PRIORITY - key // _NUMBERS


class Inbox:
    """MESSAGE frames of one connection, read into a buffer that is used again and again; each body is compared."""

    def __init__(self, sock: socket.socket, mixture: Mixture) -> None:
        self.receipts = 0
        self._sock = sock
        self._bodies = mixture.bodies
        self._buffer = bytearray(2 * CHUNK)
        self._view = memoryview(self._buffer)
        self._end = 0

    def read(self) -> tuple[int, list[tuple[bytes, int]]]:
        """Read once: how many bytes came, and ack value and number of each message that is complete now.

        Raises: ConnectionError, ValueError
        """
        got = self._sock.recv_into(self._view[self._end : self._end + CHUNK])
        if not got:
            raise ConnectionError("the broker hung up")
        end = self._end + got
        buffer, bodies = self._buffer, self._bodies
        messages: list[tuple[bytes, int]] = []
        at = 0
        while at < end:
            found = _MESSAGE.match(buffer, at, end)
            if found is None:
                stop = buffer.find(0, at, end)
                if stop < 0:
                    break
                self._count_receipt(bytes(buffer[at:stop]))
                at = stop + 1
                continue
            ack, number_text, size_text = found.groups()
            number, body_at = int(number_text), found.end()
            frame_end = body_at + int(size_text) + 1
            if frame_end > end:
                break
            if buffer[body_at:frame_end] != bodies[number % _KINDS]:
                raise ValueError(f"message {number} came with another body: {bytes(buffer[at:frame_end])[:500]!r}")
            messages.append((bytes(ack), number))
            at = frame_end
        self._end = end - at
        buffer[: self._end] = buffer[at:end]
        return got, messages

    def _count_receipt(self, frame: bytes) -> None:
        if not frame.lstrip(b"\n").startswith(b"RECEIPT\n"):
            raise ConnectionError(f"a frame that nobody expects: {frame[:500]!r}")
        self.receipts += 1


def fill(gate: Gate, backlog: Backlog, port: int, done: Counter) -> Pace:
    """Worker: send the whole backlog; a receipt for every group of 200, four groups unconfirmed at most."""
    mixture = Mixture(backlog.seed)
    before_last = backlog.messages - backlog.last
    lap_count, lap_at = 0, 0.0

    def confirmed(groups: int) -> None:
        nonlocal lap_count, lap_at
        done.value = count = min(groups * GROUP, backlog.messages)
        if not lap_at and count >= before_last:
            lap_count, lap_at = count, time.monotonic()

    with connect(port) as sock:
        gate.ready()
        processor = processor_seconds()
        started = time.monotonic()
        if not before_last:
            lap_at = started
        answers = send_confirmed(sock, mixture.groups(backlog), _IN_FLIGHT, confirmed)
        ended = time.monotonic()
        processor = processor_seconds() - processor
        frames.check_receipts(answers, -(-backlog.messages // GROUP))
    return Pace(backlog.messages, ended - started, backlog.messages - lap_count, ended - lap_at, processor)


def probe(gate: Gate, backlog: Backlog, port: int, probes: int, done: Counter) -> Probes:
    """Worker: take the backlog one by one, each acknowledged when it comes, and send a late message now and then."""
    dice = random.Random(backlog.seed + 1)
    mixture = Mixture(backlog.seed)
    check = DeliveryCheck(backlog, mixture)
    most_between = min(_BETWEEN_PROBES, backlog.messages // (4 * probes))
    waits: list[tuple[bool, float]] = []
    received: list[int] = []
    with connect(port) as producer, connect(port) as consumer:
        inbox = Inbox(consumer, mixture)

        def receive(receipt: str | None = None) -> list[int]:
            """What one read brings, acknowledged; the late ones are told, the others are noted down."""
            late: list[int] = []
            for ack, number in inbox.read()[1]:
                consumer.sendall(frames.acks([ack]) if receipt is None else frames.ack_with_receipt(ack, receipt))
                if number >= backlog.messages:
                    late.append(number)
                else:
                    check.add([number])
                    received.append(number)
            return late

        gate.ready()
        consumer.sendall(frames.subscribe(backlog.queue, True, "subscribed", prefetch=1))
        for number in range(backlog.messages, backlog.messages + probes):
            until = len(received) + dice.randint(0, most_between)
            while len(received) < until:
                receive()
            # Not always just behind an acknowledgement: anywhere between two messages.
            moment = time.monotonic() + dice.uniform(0, 0.002)
            while (remaining := moment - time.monotonic()) > 0:
                if select.select([consumer], [], [], remaining)[0]:
                    receive()
            frame = mixture.send(backlog, number)
            started = time.perf_counter()
            producer.sendall(frame)
            while not (late := receive()):
                pass
            waits.append((is_late_persistent(backlog, number), time.perf_counter() - started))
            if late != [number]:
                raise ValueError(f"late messages {late} came when {number} was to come")
            done.value += 1
        # The receipt for the last one says that a kill -9 brings none of them back.
        until = len(received) + 1
        while len(received) < until:
            receive(receipt="acknowledged")
        while inbox.receipts < 2:
            inbox.read()
        consumer.sendall(frames.unsubscribe("unsubscribed"))
        while inbox.receipts < 3:
            inbox.read()
    return Probes(waits, received)


def first(port: int, backlog: Backlog) -> int:
    """Number of the first message that a new consumer gets; it stays where it was."""
    with connect(port) as sock:
        inbox = Inbox(sock, Mixture(backlog.seed))
        sock.sendall(frames.subscribe(backlog.queue, True, "subscribed", prefetch=1))
        while not (messages := inbox.read()[1]):
            pass
        number = messages[0][1]
        sock.sendall(frames.unsubscribe("unsubscribed"))
        while inbox.receipts < 2:
            inbox.read()
    return number


def drain(gate: Gate, backlog: Backlog, port: int, received: list[int], done: Counter) -> Pace:
    """Worker: take and acknowledge all that is not ``taken`` yet; every message one by one, prefetch 1000."""
    mixture = Mixture(backlog.seed)
    check = DeliveryCheck(backlog, mixture)
    check.add(received)
    total = backlog.messages - len(received)
    before_last = max(0, total - backlog.last)
    lap_count, lap_at = 0, 0.0
    with connect(port) as sock:
        inbox = Inbox(sock, mixture)
        gate.ready()
        processor = processor_seconds()
        started = time.monotonic()
        if not before_last:
            lap_at = started
        sock.sendall(frames.subscribe(backlog.queue, True, "subscribed"))
        count = 0
        while True:
            try:
                got, messages = inbox.read()
            except TimeoutError:
                check.close()
                raise
            check.add([number for _, number in messages])
            count += len(messages)
            done.value = count
            if not lap_at and count >= before_last:
                lap_count, lap_at = count, time.monotonic()
            values = [ack for ack, _ in messages]
            if count >= total:
                break
            sock.sendall(frames.acks(values))
            if got < SMALL:
                time.sleep(NAP)
        sock.sendall(frames.acks(values[:-1]) + frames.ack_with_receipt(values[-1], "acknowledged"))
        while inbox.receipts < 2:
            more = inbox.read()[1]
            if more:
                raise ValueError(f"message {more[0][1]} came when all had come")
        ended = time.monotonic()
        processor = processor_seconds() - processor
        check.close()
    return Pace(total, ended - started, total - lap_count, ended - lap_at, processor)
