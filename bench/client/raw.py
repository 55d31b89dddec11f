"""Jobs of the client's benchmark with raw sockets: the frames and the writes of truenext's client, without a client.

Frames are made before the clock starts where possible. A message is read only as far as the answer needs. Separate
runs count how far frames and writes are the same (tap.py).
"""

from __future__ import annotations

import re
import secrets
import socket
import time
from collections import deque

from bench import frames
from bench.client.work import Done, Order, Stopwatch, check_numbers
from bench.load import CHUNK, SILENCE, await_frame, read, send_confirmed
from bench.workers import Gate

ACKS_PER_RECEIPT = 256
CONFIRMED_TOGETHER = 54
"""Number of messages for one receipt of a bulk send: those in 64 KiB."""
IN_FLIGHT = 126
"""Number of missing receipts of a bulk send: 8 MiB."""

_CONNECT = b"CONNECT\naccept-version:1.2\nheart-beat:0,0\nhost:127.0.0.1\ntruenext-client:1\n\n\0"
_STARTED = b"SEND\ndestination:/control/started\nid:%b\n\n\0"
_ACK = b"ACK\nid:%b\n\n\0"
_ACK_AND_START = b"ACK\nid:%b\ntruenext-started:%b\n\n\0"
_CONFIRMED = b"\nreceipt:%d\n\n\0"
_START = b"BEGIN\ntransaction:%d\n\n\0"
_ACK_IN = b"ACK\nid:%b\ntransaction:%d\n\n\0"
_COMMIT = (
    b"COMMIT\ntransaction:%d\ntruenext-producer:%b\ntruenext-number:%d\ntruenext-gapless:true\n"
    b"truenext-count-attempts:nacked\nreceipt:%d\n\n\0"
)
_NUMBERED = b"truenext-producer:%b\ntruenext-number:%d\ntruenext-gapless:true\n"
_LENGTH = b"content-length:%d\n\n" % frames.BODY_SIZE
_UNSUBSCRIBE = b"UNSUBSCRIBE\nid:1\n\n\0"
_DISCONNECT = b"DISCONNECT\nreceipt:bye\n\n\0"
_DISCONNECT_AND_FORGET = b'DISCONNECT\ntruenext-forget:["%b"]\nreceipt:bye\n\n\0'

_ID = re.compile(rb"\nid:(\d+)\n")
_REPLY = re.compile(rb"\ncorrelation-id:([^\n]+)\n")
_REPLY_TO = re.compile(rb"\nreply-to:([^\n]+)\n")


def receive(gate: Gate, order: Order) -> Done:
    """Acknowledge each message when the next one is started, or when no other has come."""
    watch = Stopwatch(gate, order)
    with _connect(order.port) as sock:
        watch.start()
        inbox = _Inbox(sock, order)
        count = 0
        while count < order.messages:
            last = b""
            for value in inbox.values():
                if last:
                    count += 1
                    ack = _ACK_AND_START % (last, value)
                    sock.sendall(ack if count % ACKS_PER_RECEIPT else ack[:-3] + _CONFIRMED % count)
                else:
                    sock.sendall(_STARTED % value)
                last = value
            if last:
                count += 1
                sock.sendall(_ACK % last)
        inbox.disconnect()
    done = watch.stop()
    inbox.check(order.messages)
    return done


def send_many(gate: Gate, order: Order) -> Done:
    bodies = frames.bodies()
    head = f"SEND\ndestination:{order.queue}\npersistent:true\n".encode()
    producer = _name()
    groups = []
    for first in range(0, order.messages, CONFIRMED_TOGETHER):
        past = min(first + CONFIRMED_TOGETHER, order.messages)
        group = [
            b"%b%b%b%b%b\0"
            % (
                head,
                b"receipt:%d\n" % number if number == past - 1 else b"",
                _NUMBERED % (producer, number + 1),
                _LENGTH,
                bodies[number % len(bodies)],
            )
            for number in range(first, past)
        ]
        groups.append(b"".join(group))
    watch = Stopwatch(gate, order)
    with _connect(order.port) as sock:
        watch.start()
        send_confirmed(sock, groups, IN_FLIGHT)
        sock.sendall(_DISCONNECT_AND_FORGET % producer)
        await_frame(sock, b"RECEIPT")
    return watch.stop()


def copy(gate: Gate, order: Order) -> Done:
    """Write each SEND together with the next acknowledgement, or with the COMMIT."""
    head = f"SEND\ndestination:{order.target}\npersistent:true\ntransaction:%d\n".encode()
    tail = _LENGTH + frames.bodies()[0] + b"\0"
    producer = _name() + b"-1"
    watch = Stopwatch(gate, order)
    with _connect(order.port) as sock:
        watch.start()
        inbox = _Inbox(sock, order)
        waiting: deque[bytes] = deque()
        for number in range(1, order.messages // order.batch + 1):
            ahead = _START % number
            send = head % number + tail
            for _ in range(order.batch):
                while not waiting:
                    waiting.extend(inbox.values())
                sock.sendall(ahead + _ACK_IN % (waiting.popleft(), number))
                ahead = send
            sock.sendall(ahead + _COMMIT % (number, producer, number, number))
            # The first receipt was for the SUBSCRIBE.
            while inbox.receipts < 1 + number:
                waiting.extend(inbox.values())
        inbox.disconnect(producer)
    done = watch.stop()
    inbox.check(order.messages)
    return done


def request(gate: Gate, order: Order) -> Done:
    head = f"SEND\ndestination:{order.queue}\nreply-to:/temp-queue/replies\ncorrelation-id:%d\n".encode()
    tail = _LENGTH + frames.bodies()[0] + b"\0"
    trips = []
    watch = Stopwatch(gate, order)
    with _connect(order.port) as sock:
        watch.start()
        ahead = b"SUBSCRIBE\nid:replies\ndestination:/temp-queue/replies\nack:auto\n\n\0"
        for number in range(order.messages):
            started = time.perf_counter()
            sock.sendall(ahead + head % number + tail)
            ahead = b""
            seen = read(sock)
            while not seen.count(0):
                seen += read(sock)
            trips.append(time.perf_counter() - started)
            if b"\ncorrelation-id:%d\n" % number not in seen:
                raise ValueError(f"another reply: {seen[:500]!r}")
        sock.sendall(_DISCONNECT)
        await_frame(sock, b"RECEIPT")
    return watch.stop(trips)


def reply(gate: Gate, order: Order) -> Done:
    """Acknowledge a message once its reply is confirmed and the next one has come or is awaited."""
    tail = _LENGTH + frames.bodies()[0] + b"\0"
    producer = _name()
    watch = Stopwatch(gate, order)
    with _connect(order.port) as sock:
        watch.start()
        inbox = _Inbox(sock, order)
        last = b""
        waiting: list[bytes] = []
        for number in range(1, order.messages + 1):
            if last and not waiting:
                sock.sendall(_ACK % last)
                last = b""
            while not waiting:
                waiting = inbox.values()
            value = waiting.pop()
            sock.sendall(_ACK_AND_START % (last, value) if last else _STARTED % value)
            last = value
            to, name = _REPLY_TO.search(inbox.seen[-1]), _REPLY.search(inbox.seen[-1])
            if to is None or name is None:
                raise ValueError(f"no request: {inbox.seen[-1][:500]!r}")
            head = b"destination:%b\ncorrelation-id:%b\nreceipt:%d\n" % (to[1], name[1], number)
            sock.sendall(b"SEND\n" + head + _NUMBERED % (producer, number) + tail)
            while inbox.receipts < 1 + number:
                waiting += inbox.values()
        sock.sendall(_ACK % last)
        inbox.disconnect(producer)
    return watch.stop()


def _name() -> bytes:
    """Return a name for a producer: the broker knows the numbers of each name."""
    return secrets.token_urlsafe(9).encode()


def _connect(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), SILENCE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(_CONNECT)
    await_frame(sock, b"CONNECTED")
    return sock


class _Inbox:
    """Reader of the messages of a subscription."""

    def __init__(self, sock: socket.socket, order: Order) -> None:
        self._sock = sock
        self._rest = b""
        self.seen: list[bytes] = []
        """Received data, in whole frames."""
        self.receipts = 0
        head = f"SUBSCRIBE\nid:1\ndestination:{order.queue}\nack:client-individual\n"
        if order.prefetch is not None:
            head += f"activemq.prefetchSize:{order.prefetch}\n"
        sock.sendall(f"{head}truenext-express:true\nreceipt:0\n\n\0".encode())

    def values(self) -> list[bytes]:
        """Wait for data, and return the ack ids of the messages in it."""
        read = self._rest + self._sock.recv(CHUNK)
        if len(read) == len(self._rest):
            raise ConnectionError(f"the broker hung up; last words: {read[-500:]!r}")
        complete = read.rfind(b"\0") + 1
        whole, self._rest = read[:complete], read[complete:]
        self.seen.append(whole)
        self.receipts += whole.count(b"\nreceipt-id:")
        return frames.ACK_VALUE.findall(whole)

    def disconnect(self, producer: bytes = b"") -> None:
        self._sock.sendall(_UNSUBSCRIBE)
        self._sock.sendall(_DISCONNECT_AND_FORGET % producer if producer else _DISCONNECT)
        while not (self.seen and b"\nreceipt-id:bye\n" in self.seen[-1]):
            self.values()

    def check(self, messages: int) -> None:
        """Raises: ValueError unless each message has come exactly once"""
        check_numbers([int(found) for whole in self.seen for found in _ID.findall(whole)], messages)
