"""Load of a backlog: its messages, the workers that send and receive them, and a check of their order.

The messages are numbered. The seed determines priority and body of a number, in every process alike, so that a
receiver can check messages without a copy of what was sent. No process keeps more than a byte for each message.
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
"""Priority of messages that are sent while all others wait; those have 0 to 8."""
SIZES = (512, 1536)
"""Bytes of the smallest and the largest body; all sizes between are equally frequent."""
LAST = 1_000_000
"""Number of messages at the end whose rate is reported apart from the total."""
MESSAGES_PER_PROBE = 100
"""Least number of messages for each probe, so that the backlog does not run out meanwhile."""

_BETWEEN_PROBES = 100
"""Largest number of other messages that are received before the next probe."""
_KINDS = 10_000
"""Period after which priorities and bodies repeat."""
_IN_FLIGHT = 4
"""Number of the producer's unconfirmed groups."""
_NUMBERS = 1 << 40
"""Upper bound of the messages' numbers."""

_MESSAGE = re.compile(rb"\n*MESSAGE\n(?:[^\n]+\n)*?ack:([^\n]+)\n(?:[^\n]+\n)*?id:(\d+)\ncontent-length:(\d+)\n\n")


@dataclass(frozen=True)
class Backlog:
    """Messages of a mixture that wait in one queue."""

    queue: str
    persistent: bool
    messages: int
    seed: int

    @property
    def last(self) -> int:
        """Number of messages at the end whose rate is reported apart."""
        return min(LAST, self.messages)


class Pace(NamedTuple):
    """Time of a phase, for all messages and for the last ones."""

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
    """Results for messages of priority 9 that were sent while all others waited."""

    waits: list[tuple[bool, float]]
    """Whether a message is persistent, and seconds from its SEND until the MESSAGE was read and acknowledged."""
    received: list[int]
    """Numbers of other messages that were received and acknowledged meanwhile, in order."""


class Mixture:
    """Priorities and bodies by number."""

    def __init__(self, seed: int) -> None:
        dice = random.Random(seed)
        text = "".join(dice.choices(string.ascii_letters + string.digits + " ", k=1 << 16)).encode()
        self.priorities = dice.choices(range(LATE_PRIORITY), k=_KINDS)
        self.bodies: list[bytes] = []
        """Bodies, each with the NUL that ends a frame."""
        for _ in range(_KINDS):
            size = dice.randint(*SIZES)
            first = dice.randrange(len(text) - size)
            self.bodies.append(text[first : first + size] + b"\0")

    def send(self, backlog: Backlog, number: int, *, receipt: int | None = None) -> bytes:
        """Return a SEND frame. A number beyond the backlog makes a late message."""
        late = number >= backlog.messages
        priority = LATE_PRIORITY if late else self.priorities[number % _KINDS]
        # Late messages are transient and persistent by turns.
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
        """Yield the SEND frames of a backlog in groups; the last frame of each requests a receipt."""
        for group, first in enumerate(range(0, backlog.messages, GROUP)):
            last = min(first + GROUP, backlog.messages) - 1
            sends = [self.send(backlog, number) for number in range(first, last)]
            yield b"".join(sends) + self.send(backlog, last, receipt=group)


def is_late_persistent(backlog: Backlog, number: int) -> bool:
    return bool((number - backlog.messages) % 2)


class DeliveryCheck:
    """Check that each message of a backlog comes exactly once, and in the order of the contract, over all consumers.

    There is one consumer at a time and no sender, so that messages arrive in the order of their keys.
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
            # Messages are sent in the order of their numbers, which stand for sequences.
            key = ranks[number % _KINDS] + number
            if key < last_key:
                raise ValueError(
                    f"out of order: message {number} of priority {_priority(key)} came behind message"
                    f" {last_key % _NUMBERS} of priority {_priority(last_key)}"
                )
            last_key = key
        self._last_key = last_key

    def close(self) -> None:
        """Raises: ValueError if a message has not come."""
        missing = self._seen.count(0)
        if missing:
            raise ValueError(f"{missing} messages have not come, the first of them is {self._seen.index(0)}")


def _priority(key: int) -> int:
    return LATE_PRIORITY - key // _NUMBERS


class Inbox:
    """Reader of the MESSAGE frames of one connection; it reuses one buffer, and compares each body."""

    def __init__(self, sock: socket.socket, mixture: Mixture) -> None:
        self.receipts = 0
        self._sock = sock
        self._bodies = mixture.bodies
        self._buffer = bytearray(2 * CHUNK)
        self._view = memoryview(self._buffer)
        self._end = 0

    def read(self) -> tuple[int, list[tuple[bytes, int]]]:
        """Read once. Return the number of bytes, and ack value and number of each message that is now complete.

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
    """Worker: send the whole backlog, with a receipt for every group of 200 and at most four groups unconfirmed."""
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
    """Worker: receive and acknowledge the backlog one by one, and send a late message now and then."""
    dice = random.Random(backlog.seed + 1)
    mixture = Mixture(backlog.seed)
    check = DeliveryCheck(backlog, mixture)
    most_between = min(_BETWEEN_PROBES, backlog.messages // (4 * probes))
    waits: list[tuple[bool, float]] = []
    received: list[int] = []
    with connect(port) as producer, connect(port) as consumer:
        inbox = Inbox(consumer, mixture)

        def receive(receipt: str | None = None) -> list[int]:
            """Read once and acknowledge. Return the late messages, and record the others."""
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
            # Sends at any moment between two messages, and not always just after an acknowledgement.
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
        # After the receipt of the last acknowledgement, a kill -9 brings no message back.
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
    """Return the number of the first message that a new consumer gets; the message stays in the queue."""
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
    """Worker: receive all messages that are not in `received`, at prefetch 1000, and acknowledge each by itself."""
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
