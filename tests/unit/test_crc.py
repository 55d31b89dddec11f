"""Tests of finding the initial value of a CRC-32, and the bit that was flipped."""

from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from truenext.store.frame import find_flipped_bit, initial_value

CONTENTS = st.binary(min_size=1, max_size=500)
NUMBERS = st.integers(0, 2**32 - 1)


@given(CONTENTS, NUMBERS)
def test_initial_value_of_a_checksum_is_found(content: bytes, initial: int) -> None:
    assert initial_value(content, crc32(content, initial)) == initial


@given(CONTENTS, NUMBERS, st.data())
def test_a_wrong_bit_is_found(content: bytes, initial: int, data: st.DataObject) -> None:
    byte = data.draw(st.integers(0, len(content) - 1))
    bit = data.draw(st.integers(0, 7))
    damaged = bytearray(content)
    damaged[byte] ^= 1 << bit
    assert find_flipped_bit(crc32(content, initial) ^ crc32(damaged, initial), len(content)) == (byte, bit)


@given(CONTENTS, st.data())
def test_two_wrong_bits_are_not_taken_for_one(content: bytes, data: st.DataObject) -> None:
    damaged = bytearray(content)
    for bit in data.draw(st.sets(st.integers(0, 8 * len(content) - 1), min_size=2, max_size=2)):
        damaged[bit // 8] ^= 1 << bit % 8
    assert find_flipped_bit(crc32(content) ^ crc32(damaged), len(content)) is None
