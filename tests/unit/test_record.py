"""Tests that records are decoded to the messages they were made of, and that damaged ones are refused."""

from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from truenext.model.message import SentMessage
from truenext.model.order import PRIORITY_MAX, rank
from truenext.model.record import (
    LANE_KEY_SIZE,
    RECORD_VERSION,
    DamagedRecord,
    decode_record,
    encode_record,
    lane_key,
    message_key,
    sequence_of,
    split_lane_key,
)

QUEUES = st.integers(0, 2**32 - 1)
PRIORITIES = st.integers(0, PRIORITY_MAX)
NUMBERS = st.integers(0, 2**64 - 1)
MESSAGES = st.builds(
    SentMessage,
    priority=PRIORITIES,
    persistent=st.booleans(),
    expires_ms=NUMBERS,
    # Any bytes, but no group: that is read, and so needs whole lines.
    header=st.binary(max_size=60).filter(lambda header: b"JMSXGroup" not in header),
    body=st.binary(max_size=60),
    arrived_ms=NUMBERS,
    redrive_queue=st.just("") | st.text(st.characters(exclude_categories=["Cs"]), max_size=10),
)
EXAMPLE = SentMessage(
    priority=4,
    persistent=True,
    expires_ms=1_800_000_000_000,
    header=b"content-length:5\n",
    body=b"hello",
    arrived_ms=1_700_000_000_000,
)


def key_of(message: SentMessage, queue: int = 7, sequence: int = 1234) -> bytes:
    return message_key(lane_key(queue, rank(message.priority)), sequence)


@given(MESSAGES, QUEUES, NUMBERS)
def test_encoded_message_is_decoded_unchanged(message: SentMessage, queue: int, sequence: int) -> None:
    key = key_of(message, queue, sequence)
    assert decode_record(key, encode_record(key, message)) == message


@given(QUEUES, PRIORITIES, NUMBERS)
def test_a_key_tells_queue_rank_and_sequence(queue: int, priority: int, sequence: int) -> None:
    key = message_key(lane_key(queue, rank(priority)), sequence)
    assert split_lane_key(key[:LANE_KEY_SIZE]) == (queue, rank(priority))
    assert sequence_of(key) == sequence


ENTRY_KEYS = st.tuples(QUEUES, PRIORITIES, NUMBERS)


@given(ENTRY_KEYS, ENTRY_KEYS, st.booleans(), st.booleans())
def test_keys_sort_by_queue_and_then_in_the_order_of_messages(
    first: tuple[int, int, int], second: tuple[int, int, int], same_queue: bool, same_priority: bool
) -> None:
    queue = first[0] if same_queue else second[0]
    second = (queue, first[1] if same_priority else second[1], second[2])
    keys = [message_key(lane_key(queue, rank(priority)), sequence) for queue, priority, sequence in (first, second)]
    entry_keys = [(queue, rank(priority), sequence) for queue, priority, sequence in (first, second)]
    assert (keys[0] < keys[1], keys[0] == keys[1]) == (entry_keys[0] < entry_keys[1], entry_keys[0] == entry_keys[1])


def test_flipped_bit_of_key_or_record_is_detected() -> None:
    key = key_of(EXAMPLE)
    whole = key + encode_record(key, EXAMPLE)
    assert decode_record(whole[: len(key)], whole[len(key) :]) == EXAMPLE
    for bit in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedRecord):
            decode_record(bytes(damaged[: len(key)]), bytes(damaged[len(key) :]))


@settings(max_examples=50)
@given(MESSAGES, st.data())
def test_a_flipped_bit_of_any_message_is_detected(message: SentMessage, data: st.DataObject) -> None:
    key = key_of(message)
    whole = bytearray(key + encode_record(key, message))
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    whole[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DamagedRecord):
        decode_record(bytes(whole[: len(key)]), bytes(whole[len(key) :]))


def test_a_record_cut_short_anywhere_is_detected() -> None:
    key = key_of(EXAMPLE)
    record = encode_record(key, EXAMPLE)
    for length in range(len(record)):
        with pytest.raises(DamagedRecord):
            decode_record(key, record[:length])


def test_a_record_of_a_later_version_is_refused() -> None:
    key = key_of(EXAMPLE)
    rest = bytes([RECORD_VERSION + 3]) + encode_record(key, EXAMPLE)[5:]
    with pytest.raises(DamagedRecord, match="record version 5; this truenext reads versions 2 to 4"):
        decode_record(key, crc32(rest, crc32(key)).to_bytes(4, "little") + rest)


def test_record_without_a_redrive_queue_has_the_earlier_version() -> None:
    key = key_of(EXAMPLE)
    assert encode_record(key, EXAMPLE)[4] == RECORD_VERSION
    letter = replace(EXAMPLE, redrive_queue="subscription,me,n,news")
    record = encode_record(key, letter)
    assert record[4] == RECORD_VERSION + 1 and b"subscription,me,n,news\ncontent-length:5\nhello" in record
    # What an earlier version cannot read it refuses, and shows to nobody.
    assert decode_record(key, record).header == EXAMPLE.header


def test_a_record_under_the_key_of_another_is_detected() -> None:
    record = encode_record(key_of(EXAMPLE, sequence=1), EXAMPLE)
    with pytest.raises(DamagedRecord, match="checksum"):
        decode_record(key_of(EXAMPLE, sequence=2), record)
