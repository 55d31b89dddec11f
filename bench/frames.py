"""Frames of the load generator, and checks of the answers.

All functions run before the clock starts or after it has stopped, except ``ACK_VALUE`` and ``acks``.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterator

BODY_SIZE = 1024
BODY_KINDS = 16

# After the ack header at least a whole body follows; skipping it in one step makes this fast.
ACK_VALUE = re.compile(rb"\nack:([^\r\n]+)\r?\n.{%d}" % BODY_SIZE, re.DOTALL)

_ID = re.compile(rb"\nid:(\d+)\r?\n")
_RECEIPT_ID = re.compile(rb"RECEIPT\r?\n(?:[^\r\n]+\r?\n)*?receipt-id:([^\r\n]+)")
_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")


USER, PASSWORD = "bench", "bench"
"""Login for a broker with users; others do not check it."""


def connect(client_id: str | None = None) -> bytes:
    head = f"accept-version:1.2\nhost:localhost\nheart-beat:0,0\nlogin:{USER}\npasscode:{PASSWORD}"
    if client_id is not None:
        head += f"\nclient-id:{client_id}"
    return f"CONNECT\n{head}\n\n\0".encode()


def subscribe(queue: str, individual: bool, receipt: str, prefetch: int | None = 1000) -> bytes:
    mode = "client-individual" if individual else "auto"
    head = f"id:0\ndestination:{queue}\nack:{mode}\nreceipt:{receipt}"
    if prefetch is not None:
        head += f"\nactivemq.prefetchSize:{prefetch}"
    return f"SUBSCRIBE\n{head}\n\n\0".encode()


def unsubscribe(receipt: str) -> bytes:
    return f"UNSUBSCRIBE\nid:0\nreceipt:{receipt}\n\n\0".encode()


def acks(values: list[bytes]) -> bytes:
    """Return one ACK frame for each value. Values stay escaped as they came, since they return on the same wire."""
    return b"ACK\nid:" + b"\n\n\0ACK\nid:".join(values) + b"\n\n\0" if values else b""


def ack_with_receipt(value: bytes, receipt: str) -> bytes:
    return b"ACK\nid:" + value + b"\nreceipt:" + receipt.encode() + b"\n\n\0"


def bodies() -> list[bytes]:
    """Return a few bodies, the same in every process, so that the consumer can check those of the producer."""
    dice = random.Random(1)
    letters = string.ascii_letters + string.digits + " "
    return ["".join(dice.choices(letters, k=BODY_SIZE)).encode() for _ in range(BODY_KINDS)]


def send_groups(queue: str, persistent: bool, count: int, group: int, receipts: bool, seed: int) -> list[bytes]:
    """Return ``count`` SEND frames in blobs of ``group``; with ``receipts`` the last frame of each requests one."""
    dice = random.Random(seed)
    priorities = dice.choices([str(level).encode() for level in range(10)], k=count)
    head = b"SEND\ndestination:" + queue.encode() + (b"\npersistent:true" if persistent else b"") + b"\npriority:"
    tails = [b"\n\n" + body + b"\0" for body in bodies()]
    blobs: list[bytes] = []
    for first in range(0, count, group):
        past = min(first + group, count)
        frames = [
            b"%b%b\nid:%d\ncontent-length:%d%b%b"
            % (
                head,
                priorities[number],
                number,
                BODY_SIZE,
                b"\nreceipt:%d" % len(blobs) if receipts and number == past - 1 else b"",
                tails[number % BODY_KINDS],
            )
            for number in range(first, past)
        ]
        blobs.append(b"".join(frames))
    return blobs


def message_groups(queue: str, count: int, group: int, individual: bool) -> list[bytes]:
    """Return ``count`` MESSAGE frames as of a broker, in blobs of ``group``; for the rate of the generator alone."""
    tails = [b"\n\n" + body + b"\0\n" for body in bodies()]
    head = b"MESSAGE\ndestination:%b\nsubscription:0\npriority:4\n" % queue.encode()
    name = rb"message-id:ID\chost-40000-1700000000000-2\c1\c-1\c1\c%d"
    ack = rb"\nack:ID\chost-40000-1700000000000-2\c%d".replace(rb"\n", b"\n")

    def frame(number: int) -> bytes:
        marks = name % number + (ack % number if individual else b"")
        return head + marks + b"\nid:%d\ncontent-length:%d" % (number, BODY_SIZE) + tails[number % BODY_KINDS]

    return [b"".join(map(frame, range(first, min(first + group, count)))) for first in range(0, count, group)]


def check_messages(received: bytearray, end: int, count: int) -> None:
    """Raise unless ``received[:end]`` holds each of ``count`` messages exactly once, with the body that was sent."""
    known = bodies()
    seen: set[int] = set()
    for frame in _frames(received, end):
        head, body = _split(frame)
        if not head.startswith(b"MESSAGE"):
            raise ValueError(f"a frame that is no MESSAGE: {frame[:300]!r}")
        found = _ID.search(head + b"\n")
        number = int(found[1]) if found else -1
        if body != known[number % BODY_KINDS]:
            raise ValueError(f"message {number} came with another body or without its id: {frame[:300]!r}")
        if number in seen:
            raise ValueError(f"message {number} came twice")
        seen.add(number)
    if seen != set(range(count)):
        raise ValueError(f"{count} messages sent, but {len(seen)} different ones received")


def check_receipts(received: bytes, count: int) -> None:
    """Raise unless ``received`` confirms each of the ``count`` groups exactly once and holds nothing else."""
    frames = list(_frames(received, len(received)))
    named = [found[1] for found in map(_RECEIPT_ID.search, frames) if found]
    if len(frames) != count or sorted(named) != sorted(b"%d" % number for number in range(count)):
        raise ValueError(f"{count} receipts asked for, received {len(named)} and other frames: {frames[-1][:300]!r}")


def _frames(received: bytes | bytearray, end: int) -> Iterator[bytes]:
    first = 0
    while (last := received.find(0, first, end)) >= 0:
        yield bytes(received[first:last]).lstrip(b"\r\n")
        first = last + 1
    rest = bytes(received[first:end]).strip(b"\r\n")
    if rest:
        yield rest


def _split(frame: bytes) -> tuple[bytes, bytes]:
    end = _END_OF_HEAD.search(frame)
    return (frame[: end.start()], frame[end.end() :]) if end else (frame, b"")
