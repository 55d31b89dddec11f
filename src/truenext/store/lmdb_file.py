"""Reader of LMDB's file without LMDB, which verifies each page.

LMDB does not verify its pages. With a damaged page it returns wrong data, or a signal ends the process. LMDB also does
not report which pages are in use and which are free. This reader finds out both, reads all that is readable, and
changes nothing. It reads with `pread`, so that a page that the disk cannot read affects no other page.

The file of LMDB 0.9 is little-endian, in pages of one size (mostly 4096 bytes):

    page        number u64, pad u16, flags u16, lower u16, upper u16; then a u16 for each node: its offset.
                The nodes fill the page from `upper` to its end.
    node        two u16, flags u16, size of the key u16, key. In a leaf the first four bytes are the size of the value,
                which follows. In a branch the first six bytes are the number of a page.
    overflow    number u64, pad u16, flags u16, pages u32; then a value that does not fit into a leaf
    meta        pages 0 and 1, written alternately: `LmdbMeta`
    tree        48 bytes: `LmdbTree`
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

_HEAD = struct.Struct("<QHHHH")
_PAGES = struct.Struct("<I")
_PAGES_AT = 12
_NODE = struct.Struct("<HHHH")
_META = struct.Struct("<IIQQ48s48sQQ")
_TREE = struct.Struct("<IHHQQQQQ")
_NUMBER = struct.Struct("<Q")

TREE_BYTES = _TREE.size

_BRANCH, _LEAF, _OVERFLOW, _META_FLAG = 1, 2, 4, 8
_IN_OVERFLOW, _IS_TREE = 1, 2
"""Flags of a node: its value is on overflow pages; its value is a tree."""

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_NO_PAGE = 2**64 - 1
_PAGE_SIZES = [1 << bits for bits in range(9, 17)]
_FIRST_PAGE = 2
"""Number of the first page after the meta pages."""

_FREE, _USED = 1, 2

_INTEGER_KEYS = 8
_NO_SUBDIR = 0x4000
"""Flag of a tree that only the list of free pages may have."""


class LmdbTree(NamedTuple):
    """Root page and size of one database, as LMDB stores them."""

    pad: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int

    @classmethod
    def of(cls, value: bytes) -> Self:
        """Decode a tree from the 48 bytes in which LMDB stores it. Raises: struct.error if the size is wrong"""
        return cls(*_TREE.unpack(value))


class LmdbMeta(NamedTuple):
    """Meta page of LMDB. It describes one committed state of the whole file."""

    page_size: int
    free: LmdbTree
    main: LmdbTree
    last_page: int
    transaction: int


class LmdbEntry(NamedTuple):
    """Key and value of a database, and the number of the page that has them."""

    key: bytes
    value: bytes
    page: int


class _Node(NamedTuple):
    key: bytes
    flags: int
    child: int
    """Number of the child page. Used in branches."""
    at: int
    """Offset of the value in the page. Used in leaves."""
    size: int


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
    magic, version, _, _, free, main, last_page, transaction = _META.unpack_from(content, at + _HEAD.size)
    meta = LmdbMeta(LmdbTree.of(free).pad, LmdbTree.of(free), LmdbTree.of(main), last_page, transaction)
    if (flags, magic, version) != (_META_FLAG, _MAGIC, _VERSION) or meta.page_size not in _PAGE_SIZES:
        return None
    return meta


class RawLmdbReader:
    """Reader of one committed state of the file. It takes one byte of memory for each page."""

    def __init__(self, path: Path, meta: LmdbMeta, on_damage: Callable[[str], None]) -> None:
        """Open the file. `on_damage` gets each problem that is found. Raises: OSError if the file cannot be opened"""
        self.on_damage = on_damage
        self.meta = meta
        self.pages_seen = 0
        """Number of pages that are known to be free or in use."""
        self.is_free_list_complete = False
        """True if the list of free pages was read without damage."""
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        pages_available = os.fstat(self._file).st_size // meta.page_size
        self.pages = min(meta.last_page + 1, pages_available)
        if meta.last_page >= pages_available:
            on_damage(f"it has {pages_available} pages instead of {meta.last_page + 1}")
        self._page_use = bytearray(self.pages)

    def close(self) -> None:
        os.close(self._file)

    # ---- Free pages ----

    def read_free_pages(self) -> None:
        """Read the list of free pages. Call this first. The content of a free page has no meaning."""
        walk = _TreeWalk(self, self.meta.free, "list of free pages")
        for entry in walk.entries():
            if not self._mark_free(entry.value):
                walk.report(f"page {entry.page}: its list of free pages is damaged")
        self.is_free_list_complete = not walk.problems

    def _mark_free(self, value: bytes) -> bool:
        count = _NUMBER.unpack_from(value)[0] if len(value) >= _NUMBER.size else -1
        if not 0 <= count < len(value) // _NUMBER.size:
            return False
        is_whole = True
        last = self.meta.last_page + 1
        for number in struct.unpack_from(f"<{count}Q", value, _NUMBER.size):
            if not _FIRST_PAGE <= number < last or (number < self.pages and self._page_use[number]):
                is_whole = False
            elif number < self.pages:
                self._page_use[number] = _FREE
                self.pages_seen += 1
            last = min(number, last)
        return is_whole

    # ---- Databases ----

    def walk(self, tree: LmdbTree, name: str) -> Iterator[LmdbEntry]:
        """Yield all entries of a database that can be reached, in key order. From a damaged page, all that looks like
        an entry is yielded: the caller must verify the checksums."""
        return _TreeWalk(self, tree, name).entries()

    def unreached(self) -> Iterator[LmdbEntry]:
        """Yield entries of all databases that are on unreached pages: not free, and reached by no walk, because a page
        that led there is damaged. Call this method after the walk through all databases, if the free pages are known.
        More calls are allowed."""
        number = _FIRST_PAGE
        while number < self.pages:
            page = None if self._page_use[number] else self.read(number, 1)
            number += 1
            if page is None:
                continue
            own, _, flags, *_ = _HEAD.unpack_from(page)
            if own != number - 1:
                continue
            if flags == _OVERFLOW:
                # The further pages of the value may look like pages of their own.
                number += max(0, _PAGES.unpack_from(page, _PAGES_AT)[0] - 1)
            elif flags == _LEAF:
                walk = _TreeWalk(self, _EMPTY_TREE, "")
                for node in read_nodes(page, is_leaf=True)[0]:
                    yield LmdbEntry(node.key, walk.value(page, node), own)

    @property
    def unreached_pages(self) -> int:
        """Number of pages that are not free, and that no walk has reached."""
        return self._page_use.count(0, _FIRST_PAGE)

    # ---- Pages ----

    def mark_pages_used(self, first_page: int, page_count: int) -> str:
        """Mark pages as used. Return a problem found, such as "is in use twice"; empty if there is none."""
        if first_page < _FIRST_PAGE or first_page + page_count > self.pages:
            return "is not in the file"
        use = self._page_use[first_page : first_page + page_count]
        self._page_use[first_page : first_page + page_count] = bytes([_USED]) * page_count
        self.pages_seen += use.count(0)
        if _USED in use:
            return "is in use twice"
        return "is in use and free" if _FREE in use else ""

    def is_free(self, number: int) -> bool:
        return number < self.pages and self._page_use[number] == _FREE

    def read(self, number: int, count: int) -> bytes | None:
        """Return the bytes of `count` pages from page `number` on; None if the disk cannot read them."""
        size = count * self.meta.page_size
        try:
            content = os.pread(self._file, size, number * self.meta.page_size)
        except OSError:
            return None
        return content if len(content) == size else None


class _TreeWalk:
    """Walk through the pages of one database. It yields the entries, and reports damage."""

    def __init__(self, file: RawLmdbReader, tree: LmdbTree, name: str) -> None:
        self._file = file
        self._tree = tree
        self._name = name
        self._overflows = 0
        self.problems = 0

    def report(self, problem: str) -> None:
        self.problems += 1
        if self._name:
            self._file.on_damage(f"{problem} ({self._name})")

    def entries(self) -> Iterator[LmdbEntry]:
        tree = self._tree
        has_integers = tree is self._file.meta.free
        # LMDB records here for good that the file was made without a folder of its own.
        if tree.flags & ~_NO_SUBDIR != (_INTEGER_KEYS if has_integers else 0):
            self.report(f"it has flags {tree.flags:#x}")
        if tree.pad and not has_integers:
            self.report(f"its unused bytes are {tree.pad:#x} instead of 0")
        node_flags = (_IS_TREE,) if tree is self._file.meta.main else (0, _IN_OVERFLOW)
        branches = leaves = entries = 0
        pending: list[tuple[int, int, bytes, bytes, bool]] = []
        if tree.root != _NO_PAGE:
            pending.append((tree.root, 1, b"", b"", True))
        while pending:
            number, level, low, high, is_trusted = pending.pop()
            page = self._page(number, is_trusted=is_trusted)
            if page is None:
                continue
            is_leaf = self._is_leaf(page, number, level)
            nodes, problem = read_nodes(page, is_leaf=is_leaf)
            keys = [node.key[::-1] if has_integers else node.key for node in nodes]
            if not is_leaf:
                # LMDB never reads the key of the first child.
                keys[:1] = [low] if nodes else []
            if not problem and not _are_in_order(low, keys, high):
                problem = "has keys that are not in order"
            if not problem and is_leaf and any(node.flags not in node_flags for node in nodes):
                problem = "has entries of the wrong kind"
            if problem:
                self.report(f"page {number} {problem}")
            if is_leaf:
                leaves += 1
                entries += len(nodes)
                for node in nodes:
                    yield LmdbEntry(node.key, self.value(page, node), number)
            else:
                branches += 1
                highs = [*keys[1:], high]
                pending += [
                    (node.child, level + 1, keys[n], highs[n], not problem) for n, node in reversed([*enumerate(nodes)])
                ]
        found = (branches, leaves, self._overflows, entries)
        if found != (tree.branches, tree.leaves, tree.overflows, tree.entries):
            self.report(
                f"{branches} of {tree.branches} branches, {leaves} of {tree.leaves} leaves, {self._overflows} of "
                f"{tree.overflows} pages of large values and {entries} of {tree.entries} entries can be reached"
            )

    def _page(self, number: int, *, is_trusted: bool) -> bytes | None:
        if not is_trusted and self._file.is_free(number):
            # A damaged page leads here, and the content of a free page is obsolete.
            return None
        problem = self._file.mark_pages_used(number, 1)
        page = None
        if problem in ("", "is in use and free"):
            page = self._file.read(number, 1)
            if page is None:
                problem = "cannot be read from the disk"
            elif _NUMBER.unpack_from(page)[0] != number:
                problem = f"says that it is page {_NUMBER.unpack_from(page)[0]}"
                page = None
        if problem:
            self.report(f"page {number} {problem}")
        return page

    def _is_leaf(self, page: bytes, number: int, level: int) -> bool:
        flags = _HEAD.unpack_from(page)[2]
        is_leaf = level >= self._tree.depth
        if flags != (_LEAF if is_leaf else _BRANCH):
            self.report(f"page {number} has flags {flags:#x} and must be a {'leaf' if is_leaf else 'branch'}")
            return flags == _LEAF or (is_leaf and flags != _BRANCH)
        return is_leaf

    def value(self, page: bytes, node: _Node) -> bytes:
        """Return the bytes where a node says that its value is. If these bytes are no undamaged value, report
        damage."""
        if not node.flags & _IN_OVERFLOW:
            return page[node.at : node.at + node.size]
        size = len(page)
        number = _NUMBER.unpack_from(page, node.at)[0]
        count = (_HEAD.size - 1 + node.size) // size + 1
        problem = self._file.mark_pages_used(number, count)
        content = None
        if problem != "is not in the file":
            content = self._file.read(number, count)
            if content is None:
                problem = problem or "cannot be read from the disk"
            elif not problem:
                own, _, flags, *_ = _HEAD.unpack_from(content)
                if (own, flags, _PAGES.unpack_from(content, _PAGES_AT)[0]) != (number, _OVERFLOW, count):
                    problem = "is not the large value that the entry refers to"
        self._overflows += count
        if problem:
            self.report(f"page {number} {problem}")
        return b"" if content is None else content[_HEAD.size : _HEAD.size + node.size]


def read_nodes(page: bytes, *, is_leaf: bool) -> tuple[list[_Node], str]:
    """Return the nodes of a page, and a text that says what is wrong; the text is empty if nothing is wrong. From a
    damaged leaf, all that looks like a node is returned."""
    _, _, _, lower, upper = _HEAD.unpack_from(page)
    size = len(page)
    if _HEAD.size <= lower <= upper <= size and lower % 2 == 0:
        nodes, used_bytes = _read_nodes_at(page, (lower - _HEAD.size) // 2, upper, is_leaf=is_leaf)
        if nodes and len(nodes) == (lower - _HEAD.size) // 2 and used_bytes == size - upper:
            return nodes, ""
    elif not is_leaf:
        return [], "is damaged"
    else:
        nodes, upper = [], _HEAD.size
    if is_leaf:
        nodes, _ = _read_nodes_at(page, (size - _HEAD.size) // 2, upper, is_leaf=True)
    return nodes, "is damaged"


def _read_nodes_at(page: bytes, count: int, upper: int, *, is_leaf: bool) -> tuple[list[_Node], int]:
    """Return the nodes to which the first `count` offsets of the page point, and the number of bytes that these nodes
    take."""
    size = len(page)
    nodes = []
    used_bytes = 0
    starts = set()
    for start in memoryview(page)[_HEAD.size : _HEAD.size + 2 * count].cast("H"):
        if not upper <= start <= size - _NODE.size or start % 2 or start in starts:
            continue
        low, high, flags, key_size = _NODE.unpack_from(page, start)
        at = start + _NODE.size + key_size
        value_size = low | high << 16 if is_leaf else 0
        end = at + (_NUMBER.size if is_leaf and flags & _IN_OVERFLOW else value_size)
        if end > size:
            continue
        starts.add(start)
        used_bytes += end - start + (end - start) % 2
        key = page[start + _NODE.size : at]
        nodes.append(_Node(key, flags, low | high << 16 | flags << 32, at, value_size))
    return nodes, used_bytes


def _are_in_order(low: bytes, keys: list[bytes], high: bytes) -> bool:
    if any(first >= second for first, second in pairwise(keys)):
        return False
    return not keys or (low <= keys[0] and (not high or keys[-1] < high))


_EMPTY_TREE = LmdbTree(0, 0, 0, 0, 0, 0, 0, _NO_PAGE)
