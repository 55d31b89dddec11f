"""Tests that the backlog benchmark notices lost, duplicated, reordered and damaged messages."""

import socket

import pytest

from bench.backlog_load import Backlog, DeliveryCheck, Inbox, Mixture

BACKLOG = Backlog("/queue/q", persistent=True, messages=30, seed=7)
MIXTURE = Mixture(BACKLOG.seed)
IN_ORDER = sorted(range(BACKLOG.messages), key=lambda number: (-MIXTURE.priorities[number], number))


def judged(numbers: list[int]) -> None:
    account = DeliveryCheck(BACKLOG, MIXTURE)
    account.add(numbers[:10])
    account.add(numbers[10:])
    account.close()


def message(number: int) -> bytes:
    """Return the message as the broker delivers it."""
    head = b"MESSAGE\nack:5@0\nmessage-id:m-5\ntruenext-sequence:5\ntruenext-deliveries:1\ntimestamp:17\n"
    return head + MIXTURE.send(BACKLOG, number).removeprefix(b"SEND\n")


def read_all(stream: bytes, size: int) -> tuple[list[tuple[bytes, int]], Inbox]:
    """Read a stream that comes in pieces of `size` bytes; return its messages and the inbox."""
    here, there = socket.socketpair()
    with here, there:
        inbox = Inbox(here, MIXTURE)
        messages = []
        for first in range(0, len(stream), size):
            there.sendall(stream[first : first + size])
            messages += inbox.read()[1]
    return messages, inbox


def test_messages_received_once_and_in_order_pass() -> None:
    judged(IN_ORDER)


def test_a_lost_message_is_noticed() -> None:
    with pytest.raises(ValueError, match=f"1 messages have not come, the first of them is {IN_ORDER[12]}"):
        judged(IN_ORDER[:12] + IN_ORDER[13:])


@pytest.mark.parametrize("later", [13, 20])
def test_a_message_that_comes_twice_is_noticed(later: int) -> None:
    with pytest.raises(ValueError, match="came twice"):
        judged(IN_ORDER[:later] + IN_ORDER[12:13] + IN_ORDER[later:])


def test_a_message_that_comes_behind_its_equal_or_behind_a_lower_one_is_noticed() -> None:
    for first in range(len(IN_ORDER) - 1):
        swapped = [*IN_ORDER[:first], IN_ORDER[first + 1], IN_ORDER[first], *IN_ORDER[first + 2 :]]
        with pytest.raises(ValueError, match="out of order"):
            judged(swapped)


def test_message_of_another_backlog_is_noticed() -> None:
    with pytest.raises(ValueError, match="not of this backlog"):
        judged([*IN_ORDER, BACKLOG.messages])


@pytest.mark.parametrize("size", [1, 7, 1000, 100_000])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_messages_are_found_however_they_are_cut_and_ended(size: int, end: bytes) -> None:
    frames = [message(3), b"RECEIPT\nreceipt-id:a\n\n\0", message(4), message(29)]
    messages, inbox = read_all(end.join([*frames, b""]), size)
    assert messages == [(b"5@0", 3), (b"5@0", 4), (b"5@0", 29)]
    assert inbox.receipts == 1


def test_a_spoiled_body_is_noticed() -> None:
    whole = message(3)
    with pytest.raises(ValueError, match="message 3 came with another body"):
        read_all(whole[:-2] + bytes([whole[-2] ^ 1]) + b"\0", 100_000)


def test_the_body_of_another_message_is_noticed() -> None:
    with pytest.raises(ValueError, match="message 3 came with another body"):
        read_all(message(4).replace(b"\nid:4\n", b"\nid:3\n"), 100_000)


def test_an_error_of_the_broker_is_noticed() -> None:
    with pytest.raises(ConnectionError, match="nobody expects"):
        read_all(b"ERROR\nmessage:no\n\n\0", 100_000)
