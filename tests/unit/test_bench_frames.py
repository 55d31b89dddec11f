"""Tests that the load generator reads frames of brokers with and without line feeds after them."""

import socket
from collections.abc import Iterator

import pytest

from bench import frames
from bench.load import await_frame

ENDS = [b"\0", b"\0\n", b"\0\n\n"]
COUNT = 3


def messages(end: bytes) -> bytes:
    bodies = frames.bodies()
    head = b"MESSAGE\nid:%d\ncontent-length:%d\n\n%b"
    return b"".join(head % (number, len(bodies[number]), bodies[number]) + end for number in range(COUNT))


@pytest.fixture
def line() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(10)
        yield here, there


@pytest.mark.parametrize("end", ENDS)
def test_messages_are_checked_however_their_frames_end(end: bytes) -> None:
    received = bytearray(messages(end))
    frames.check_messages(received, len(received), COUNT)
    with pytest.raises(ValueError, match="different ones received"):
        frames.check_messages(received, len(received), COUNT + 1)


@pytest.mark.parametrize("end", ENDS)
def test_receipts_are_checked_however_their_frames_end(end: bytes) -> None:
    received = b"".join(b"RECEIPT\nreceipt-id:%d\n\n" % number + end for number in range(COUNT))
    frames.check_receipts(received, COUNT)
    with pytest.raises(ValueError, match="receipts asked for"):
        frames.check_receipts(received, COUNT + 1)


@pytest.mark.parametrize("end", ENDS)
def test_a_frame_is_awaited_however_it_ends_and_its_line_feed_may_come_late(
    line: tuple[socket.socket, socket.socket], end: bytes
) -> None:
    here, there = line
    there.sendall(b"CONNECTED\n\n" + end)
    await_frame(here, b"CONNECTED")
    there.sendall(b"RECEIPT\nreceipt-id:1\n\n\0")
    await_frame(here, b"RECEIPT")
    there.sendall(end[1:] + b"RECEIPT\nreceipt-id:2\n\n" + end)
    await_frame(here, b"RECEIPT")
