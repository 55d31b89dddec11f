"""Tests that the faster CRC-32 gives the values that are on disk already, and of the fallback to zlib."""

import importlib
import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truenext.model import checksum


@given(st.binary(max_size=5000), st.integers(0, 2**32 - 1))
def test_crc32_equals_that_of_zlib(data: bytes, start: int) -> None:
    expected = zlib.crc32(data, start)
    assert checksum.crc32(data, start) == checksum.crc32(memoryview(data), start) == expected
    assert checksum.crc32(bytearray(data), start) == expected
    assert checksum.crc32(data) == zlib.crc32(data)


def test_crc32_is_that_of_zlib_itself_without_isal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("isal", "isal.isal_zlib"):
        monkeypatch.setitem(sys.modules, name, None)
    try:
        assert importlib.reload(checksum).crc32 is zlib.crc32
    finally:
        monkeypatch.undo()
        importlib.reload(checksum)
