"""Memory of a broker while consumers of a topic do not read, beside that with STOMP's consumers."""

from __future__ import annotations

import re
import time
from pathlib import Path
from struct import Struct

from bench import topics as stomp
from bench.brokers import Truenext
from bench.load import CHUNK, GROUP, receive_all
from bench.memory import MEMORY_TARGET, MemoryWatch
from bench.openwire.client import Connection, messages
from bench.workers import Counter, Crew, Gate, Timing, counter
from truenext.wire.openwire.fields import encode_frame
from truenext.wire.openwire.structures import MessageAck, MessageId, TopicName

SENT = 20_000
_CONSUMERS = 10
_PREFETCH = 32_766
"""Default of the Java client for topics."""
_OPENWIRE_PORT = re.compile(r"listening on openwire://127\.0\.0\.1:(\d+)")
_TOPIC = TopicName(stomp.TOPIC.removeprefix("/topic/"))
_NUMBERS = Struct(">qq")
_SIZE = Struct(">i")
_DISPATCH = 21


class _Broker(Truenext):
    options = ("--listen", "openwire://127.0.0.1:0")

    @property
    def openwire_port(self) -> int:
        found = _OPENWIRE_PORT.search(self.log())
        return int(found[1]) if found else 0


def measure(folder: Path, sent: int | None) -> None:
    """Send transient messages as fast as the broker takes them, to consumers that read when all was sent."""
    count = sent or SENT
    peaks = {name: _peak(folder, name, count) for name in ("STOMP", "OpenWire")}
    listed = ", ".join(f"{name} {peak / 1024:,.0f} MiB" for name, peak in peaks.items())
    print(
        f"topics: {count:,} messages to {_CONSUMERS} consumers that read late, memory at most: {listed} "
        f"(at most {MEMORY_TARGET // 1024} MiB)",
        flush=True,
    )


def _peak(folder: Path, name: str, count: int) -> int:
    received, sent_all = counter(), counter()
    with _Broker(folder) as broker, MemoryWatch(broker) as memory, Crew() as crew:
        if name == "STOMP":
            readers = crew.hire(stomp._read, broker.port, _CONSUMERS, count, received, sent_all)
            producer = crew.hire(stomp._produce, broker.port, _CONSUMERS, count, received, sent_all)
        else:
            readers = crew.hire(_read, broker.openwire_port, count, received, sent_all)
            producer = crew.hire(_produce, broker.openwire_port, count, received, sent_all)
        readers.await_ready()
        producer.await_ready()
        readers.start()
        producer.start()
        crew.finish(stomp.SILENCE + _CONSUMERS * count / 1000)
    return memory.peak


def _produce(gate: Gate, port: int, count: int, received: Counter, sent_all: Counter) -> Timing:
    """Worker: send all messages."""
    connection = Connection(port, 0)
    connection.produce(_TOPIC)
    sends = list(messages(connection.id, _TOPIC, count))
    groups = [b"".join(sends[first : first + GROUP]) for first in range(0, count, GROUP)]
    gate.ready()
    started = time.monotonic()
    for group in groups:
        connection.sock.sendall(group)
    # It is answered when all messages before were taken.
    connection.consume(TopicName("nobody"), 1, 1)
    ended = time.monotonic()
    sent_all.value = 1
    while received.value < _CONSUMERS * count:
        time.sleep(0.005)
    return Timing(started, ended)


def _read(gate: Gate, port: int, count: int, received: Counter, start: Counter) -> Timing:
    """Worker: receive all messages, once `start` is not 0."""
    inboxes = [_Inbox(port, number, count) for number in range(1, _CONSUMERS + 1)]
    gate.ready()
    while not start.value:
        time.sleep(0.005)
    return receive_all(inboxes, _CONSUMERS * count, received)


class _Inbox:
    """Connection with one consumer, which acknowledges what it reads."""

    def __init__(self, port: int, number: int, count: int) -> None:
        self._connection = Connection(port, number)
        self.sock = self._connection.sock
        self._consumer = self._connection.consume(_TOPIC, 1, _PREFETCH)
        self._rest = b""
        self._missing = set(range(1, count + 1))

    def read(self) -> int:
        """Read once, and return the number of messages.

        Raises: ValueError if a message comes twice
        """
        got = self.sock.recv(CHUNK)
        if not got:
            raise ConnectionError("the broker hung up")
        data = self._rest + got
        at = read = last = 0
        while at + _SIZE.size <= len(data):
            end = at + _SIZE.size + _SIZE.unpack_from(data, at)[0]
            if end > len(data):
                break
            if data[at + _SIZE.size] == _DISPATCH:
                number, last = self._numbers(data[at:end])
                if number not in self._missing:
                    raise ValueError(f"message {number} came twice")
                self._missing.discard(number)
                read += 1
            at = end
        self._rest = data[at:]
        if read:
            acked = MessageId(broker_sequence_id=last)
            self.sock.sendall(encode_frame(MessageAck(9, False, _TOPIC, None, self._consumer, 2, None, acked, read)))
        return read

    @staticmethod
    def _numbers(frame: bytes) -> tuple[int, int]:
        """Return the producer's and the broker's number of a message."""
        # Connection, session and number of the producer end its id, which is there twice.
        producer = b"-0:1" + bytes(7) + b"\1" + bytes(7) + b"\1"
        number, sequence = _NUMBERS.unpack_from(frame, frame.index(producer, frame.index(producer) + 1) + len(producer))
        return number, sequence
