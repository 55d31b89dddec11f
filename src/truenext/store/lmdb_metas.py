"""Meta pages of LMDB's file, read without LMDB, which does not check them.

The file of LMDB 0.9 is little-endian, in pages of one size (mostly 4096 bytes). Pages 0 and 1 are meta pages, written
alternately, each with one committed state of the whole file:

    page        number u64, pad u16, flags u16, two u16
    meta        magic u32, version u32, two u64, two trees, last page u64, transaction u64
    tree        48 bytes; the first u32 of the first tree is the size of a page
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

_HEAD = struct.Struct("<QHHHH")
_META = struct.Struct("<IIQQI44s48sQQ")
_META_FLAG = 8
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE_SIZES = [1 << bits for bits in range(9, 17)]


class LmdbMeta(NamedTuple):
    """Meta page of LMDB. It describes one committed state of the whole file."""

    page_size: int
    transaction: int


def read_metas(path: Path) -> tuple[list[LmdbMeta], str]:
    """Return the readable meta pages, the current one first, and a text that says what is wrong. The text is empty if
    nothing is wrong.

    The page with the greater transaction number is current. So a flipped bit in the other page's number could make an
    old state current. To detect this, the numbers are compared: page 0 has even numbers, page 1 odd ones, and the two
    numbers are consecutive. A flipped bit can still make the previous state current. That does no harm: the journal is
    applied to the previous state, or a missing segment is detected.

    Raises: OSError if the file cannot be read
    """
    with path.open("rb") as file:
        content = file.read(2 * _PAGE_SIZES[-1])
    first = _read_meta(content, 0)
    sizes = _PAGE_SIZES if first is None else [first.page_size]
    second = next((meta for meta in (_read_meta(content, size) for size in sizes) if meta is not None), None)
    found = [meta for meta in (first, second) if meta is not None]
    found.sort(key=lambda meta: meta.transaction, reverse=True)
    if not found:
        return [], "neither of its first two pages can be read"
    if first is None or second is None:
        return found, f"its page {0 if first is None else 1} cannot be read"
    even, odd = first.transaction, second.transaction
    # Both are 0 before the first transaction.
    if (even, odd) != (0, 0) and (even % 2, odd % 2, abs(even - odd)) != (0, 1, 1):
        return found, f"its first two pages have transactions {even} and {odd}, which do not follow one another"
    return found, ""


def is_uninitialized(path: Path) -> bool:
    """Return whether the file was never completed by LMDB: empty, all zeros, or a part of LMDB's first pages. A power
    cut may leave such a file.

    Raises: OSError if the file cannot be read
    """
    states, problem = read_metas(path)
    if states:
        return bool(problem) and not any(meta.transaction for meta in states)
    with path.open("rb") as file:
        return not any(block.strip(b"\0") for block in iter(lambda: file.read(1 << 20), b""))


def _read_meta(content: bytes, at: int) -> LmdbMeta | None:
    if at + _HEAD.size + _META.size > len(content):
        return None
    flags = _HEAD.unpack_from(content, at)[2]
    magic, version, _, _, page_size, _, _, _, transaction = _META.unpack_from(content, at + _HEAD.size)
    if (flags, magic, version) != (_META_FLAG, _MAGIC, _VERSION) or page_size not in _PAGE_SIZES:
        return None
    return LmdbMeta(page_size, transaction)
