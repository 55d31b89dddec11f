"""Benchmark of extensions of STOMP: reports of started messages, pull requests, and releases.

    started      messages acknowledged one by one, and the next reported as started with each acknowledgement, beside
                 the acknowledgements alone: rates, by alternating runs, median of the ratios
    one more     the round trip of an acknowledgement and "one more" of a subscription that pulls, beside that of an
                 acknowledgement at a window of 1: medians
    give back    the time from a request to release 1000 messages until its receipt, less that of a receipt alone:
                 medians, with the subscription suspended, so that no message comes after it

python -m bench.extensions --runs 5
"""

from __future__ import annotations

import argparse
import itertools
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import frames
from bench.brokers import Truenext
from bench.load import BUFFER_BYTES_PER_MESSAGE, CHUNK, GROUP, NAP, SILENCE, SMALL, await_frame, read, send_confirmed
from bench.options import positive
from bench.workers import Crew, Gate, Timing, end_in_order

HELD = 1000
"""Number of messages that are released."""

_CONNECT = b"CONNECT\naccept-version:1.2\nhost:localhost\nheart-beat:0,0\n%b\n\0"
_STARTED = b"SEND\ndestination:/control/started\nid:%b\n\n\0"
_CREDIT = b"SEND\ndestination:/control/credit\nid:0\nmessages:1\n\n\0"
_RELEASE = b"SEND\ndestination:/control/release\nreceipt:r\n\n" + b'{"subscriptions":["0"],"suspend":true}\0'
_WAKE = b"SEND\ndestination:/control/wake\nid:0\n\n\0"
_NOTHING = b"SEND\ndestination:/control/wake\nid:0\nreceipt:r\n\n\0"
_ACK_VALUE = re.compile(rb"\nack:([^\r\n]+)\r?\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.extensions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=positive, default=200_000, metavar="N", help="in each run of started")
    parser.add_argument("--trips", type=positive, default=5000, metavar="N", help="in each run of one more")
    parser.add_argument("--runs", type=positive, default=5, metavar="N")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the broker's data goes (default: temp folder)")
    options = parser.parse_args(arguments)
    end_in_order()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as folder, Truenext(Path(folder)) as broker:
        ratios = []
        for number in range(options.runs):
            with_started, without = (
                _rate(broker.port, f"/queue/started.{number}.{reports}", options.messages, reports_started=reports)
                for reports in (True, False)
            )
            ratios.append(with_started / without)
            print(f"  started {with_started:,.0f}/s, without {without:,.0f}/s", flush=True)
        print(f"started: {statistics.median(ratios):.2f} of the rate without (at least 0.9)")
        ratios = []
        for number in range(options.runs):
            pulled, acked = (
                _trip(broker.port, f"/queue/trip.{number}.{pulls}", options.trips, pulls=pulls)
                for pulls in (True, False)
            )
            ratios.append(pulled / acked)
            print(f"  one more {pulled * 1e6:,.0f} us, window of 1 {acked * 1e6:,.0f} us", flush=True)
        print(f"one more: {statistics.median(ratios):.2f} of the round trip at a window of 1 (at most 1.2)")
        print(f"give back: {_release(broker.port, '/queue/back', 50) * 1e3:.2f} ms for {HELD} messages (at most 2)")
    return 0


def _connect(port: int, *, is_truenext_client: bool = False) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), SILENCE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(_CONNECT % (b"truenext-client:1\n" if is_truenext_client else b""))
    await_frame(sock, b"CONNECTED")
    return sock


def _rate(port: int, queue: str, messages: int, *, reports_started: bool) -> float:
    """Return messages a second, from the first SEND until the receipt after the last acknowledgement."""
    with Crew() as crew:
        producer = crew.hire(_fill, port, queue, messages)
        consumer = crew.hire(_consume, port, queue, messages, reports_started)
        consumer.await_ready()
        producer.await_ready()
        consumer.start()
        producer.start()
        received, sent = crew.finish(SILENCE + messages / 50)
    seconds: float = received.ended - sent.started
    return messages / seconds


def _fill(gate: Gate, port: int, queue: str, messages: int) -> Timing:
    groups = frames.send_groups(queue, False, messages, GROUP, True, 1)
    with _connect(port) as sock:
        gate.ready()
        started = time.monotonic()
        send_confirmed(sock, groups, 20)
        return Timing(started, time.monotonic())


def _consume(gate: Gate, port: int, queue: str, messages: int, reports_started: bool) -> Timing:
    """Receive messages as they come and answer in their order, in the same way with and without reports."""
    answer: Callable[[list[bytes]], bytes] = _started_and_acknowledged if reports_started else frames.acks
    with _connect(port, is_truenext_client=reports_started) as sock:
        sock.sendall(frames.subscribe(queue, True, "subscribed"))
        await_frame(sock, b"RECEIPT")
        buffer = bytearray(messages * BUFFER_BYTES_PER_MESSAGE + 2 * CHUNK)
        view = memoryview(buffer)
        gate.ready()
        started = time.monotonic()
        end = done = count = 0
        while count < messages:
            got = sock.recv_into(view[end : end + CHUNK])
            end += got
            complete = buffer.rfind(0, done, end) + 1
            if complete:
                values = frames.ACK_VALUE.findall(buffer, done, complete)
                done = complete
                count += len(values)
                sock.sendall(answer(values))
            if got < SMALL:
                time.sleep(NAP)
        sock.sendall(_NOTHING)
        await_frame(sock, b"RECEIPT")
        return Timing(started, time.monotonic())


def _started_and_acknowledged(values: list[bytes]) -> bytes:
    """Report each message as started when the one before is acknowledged, like a client with one handler."""
    pairs = itertools.pairwise(values)
    acks = [b"ACK\nid:%b\ntruenext-started:%b\n\n\0" % pair for pair in pairs]
    return _STARTED % values[0] + b"".join(acks) + b"ACK\nid:%b\n\n\0" % values[-1]


def _trip(port: int, queue: str, trips: int, *, pulls: bool) -> float:
    """Return the median of the seconds from a request for the next message until it is there."""
    with _connect(port) as producer, _connect(port) as sock:
        send_confirmed(producer, frames.send_groups(queue, False, trips + 1, GROUP, True, 1), 20)
        subscribe = frames.subscribe(queue, True, "subscribed", None if pulls else 1)
        sock.sendall(subscribe.replace(b"\n\n", b"\ntruenext-pull:true\n\n") + _CREDIT if pulls else subscribe)
        seen = b""
        while seen.count(0) < 2:
            seen += read(sock)
        found = _ACK_VALUE.search(seen)
        times = []
        for _ in range(trips):
            assert found is not None, "a message has come"
            request = frames.acks([found[1]]) + (_CREDIT if pulls else b"")
            started = time.perf_counter()
            sock.sendall(request)
            seen = read(sock)
            while not seen.count(0):
                seen += read(sock)
            times.append(time.perf_counter() - started)
            found = _ACK_VALUE.search(seen)
    return statistics.median(times)


def _release(port: int, queue: str, times: int) -> float:
    with _connect(port) as producer, _connect(port, is_truenext_client=True) as sock:
        send_confirmed(producer, frames.send_groups(queue, False, HELD, GROUP, True, 1), 20)
        sock.sendall(frames.subscribe(queue, True, "subscribed", HELD))
        _read_frames(sock, HELD + 1)
        measured = []
        for _ in range(times):
            nothing = _until_receipt(sock, _NOTHING)
            measured.append(_until_receipt(sock, _RELEASE) - nothing)
            sock.sendall(_WAKE)
            _read_frames(sock, HELD)
    return statistics.median(measured)


def _until_receipt(sock: socket.socket, data: bytes) -> float:
    started = time.perf_counter()
    sock.sendall(data)
    _read_frames(sock, 1)
    return time.perf_counter() - started


def _read_frames(sock: socket.socket, count: int) -> None:
    """Read a number of frames, whose bodies have no NUL."""
    while count > 0:
        count -= read(sock).count(0)


if __name__ == "__main__":
    raise SystemExit(main())
