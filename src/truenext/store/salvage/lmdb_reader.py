"""Reader of LMDB's databases in child processes: on a damaged page LMDB may end the process that reads it.

A child sends what it reads through a pipe:

    entry     size of the key u32, size of the value u32, key, value
    end       END u32, size of the text u32, text: what is wrong; empty if nothing is

A pipe without an end shows that the child died. After an incomplete database another child reads from the last entry
backwards. So the entries on both sides of a damaged page are found.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from mmap import ACCESS_READ, mmap
from pathlib import Path
from signal import SIGKILL, Signals
from typing import NoReturn

import lmdb

from truenext.store.checkpoint_format import DATA_FILE, DATABASES_MAX

VALUE_BYTES_MAX = 64 * 1024 * 1024
"""Largest size of a value that is read. Each value is smaller, but a damaged size may be larger."""

_HEAD = struct.Struct("<II")
_END = 0xFFFFFFFF

_PAGE = struct.Struct("<QHHHH")
_NODE = struct.Struct("<HHHH")
_NUMBER = struct.Struct("<Q")
_BRANCH, _TREE = 1, 3
"""Flags of a page: a branch; a branch or a leaf."""
_IS_LARGE = 1
"""Flag of a node in a leaf: its value has pages of its own."""

_Send = Callable[[bytes, bytes], None]
"""Function that sends an entry to the parent."""


Entries = list[tuple[bytes, bytes]]

LIST = b""
"""Name that stands for the list of databases."""
EMPTY = bytes(8) + b"\xff" * 8
"""End of the value of an empty database in that list: no entries, no page."""


def read_undamaged(folder: Path, names: Sequence[bytes]) -> dict[bytes, Entries] | None:
    """Return the entries of some small databases, all read by one child. The result is None if LMDB finds anything
    wrong, also with any page of the file."""
    found: dict[bytes, Entries] = {name: [] for name in names}
    child = _Child(partial(_send_several, folder, names))
    for key, value in child:
        found[names[key[0]]].append((key[1:], value))
    return None if child.problem else found


def find_page_damage(folder: Path) -> str:
    """Let LMDB visit all pages, each of which must be in use or free. Return what is wrong; empty if nothing is.

    `folder` is that of the file, which no process may write to.
    """
    child = _Child(partial(_visit_pages, folder))
    for _ in child:
        pass
    return child.problem


def read_database(
    folder: Path, name: bytes, on_damage: Callable[[str], None], *, keeps_order: bool = True
) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a database. `on_damage` gets what is wrong.

    They come in key order and each once, unless keys are damaged. What is read backwards is in memory for that; without
    `keeps_order` it comes as it is read.
    """
    label = name.decode() or "list of databases"
    forwards = _Child(partial(_send_entries, folder, name))
    yield from forwards
    if not forwards.problem:
        return
    on_damage(f"{label}: {forwards.problem}")
    backwards = _Child(partial(_send_entries_backwards, folder, name, forwards.count))
    yield from reversed([*backwards]) if keeps_order else backwards
    if backwards.problem not in ("", forwards.problem):
        on_damage(f"{label}, from its end backwards: {backwards.problem}")


# ---- In the parent ----


class _Child:
    """Child process that sends entries. Iterate over it once. `problem` and `count` are known at the end."""

    def __init__(self, send_all: Callable[[_Send], str]) -> None:
        """The child calls `send_all`, which returns what is wrong; empty if nothing is."""
        self._send_all = send_all
        self.problem = ""
        self.count = 0
        """Number of entries that were sent."""

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        receiver, sender = os.pipe()
        child = _fork()
        if not child:
            os.close(receiver)
            _send_and_exit(self._send_all, sender)
        os.close(sender)
        with os.fdopen(receiver, "rb") as pipe:
            try:
                while head := pipe.read(_HEAD.size):
                    key_size, value_size = _HEAD.unpack(head)
                    if key_size == _END:
                        self.problem = pipe.read(value_size).decode()
                        return
                    self.count += 1
                    yield pipe.read(key_size), pipe.read(value_size)
            finally:
                os.kill(child, SIGKILL)
                status = os.waitpid(child, 0)[1]
            self.problem = f"LMDB ended the process that read it ({Signals(os.WTERMSIG(status)).name})"


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns of a fork where there are threads, whose locks the child may need. This child needs none.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


# ---- In the child ----


def _send_and_exit(send_all: Callable[[_Send], str], sender: int) -> NoReturn:
    """Call `send_all`, send the end, and end the process, without any of the parent's handlers."""
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # LMDB and the C library write there before they end the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            problem = send_all(lambda key, value: _write(sender, _HEAD.pack(len(key), len(value)) + key + value))
        except lmdb.Error as error:
            problem = f"LMDB says {str(error)[str(error).find('MDB_') :]}"
        except Exception as error:
            problem = f"it cannot be read ({error!r})"
        text = problem.encode()
        _write(sender, _HEAD.pack(_END, len(text)) + text)
    finally:
        os._exit(0)


def _write(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]


def _open(folder: Path) -> lmdb.Environment:
    return lmdb.open(str(folder), readonly=True, lock=False, max_dbs=DATABASES_MAX, lib_version=0)


def _visit_pages(folder: Path, _: _Send) -> str:
    # Only a compacting copy visits the pages one by one.
    with _open(folder) as env, Path(os.devnull).open("wb") as nowhere:
        env.copyfd(nowhere.fileno(), compact=True)
        return _find_misnumbered_page(env, folder)


def _find_misnumbered_page(env: lmdb.Environment, folder: Path) -> str:
    """Return which page has a wrong number in its head; empty if none has. LMDB does not look at the numbers until it
    writes, and then takes other pages for free ones.

    A page: number u64, pad u16, flags u16, lower u16, upper u16; up to `lower` a u16 for each node, its offset. A node:
    two u16 and flags u16, in a branch the number of a page; size of the key u16, key; in a leaf the value, or the
    number of the first page of a large one.
    """
    with (
        env.begin() as txn,
        (folder / DATA_FILE).open("rb") as file,
        mmap(file.fileno(), 0, access=ACCESS_READ) as content,
    ):
        size = txn.stat()["psize"]
        pending = [_NUMBER.unpack(tree[-8:])[0] for _, tree in txn.cursor() if not tree.endswith(EMPTY)]
        while pending:
            number = pending.pop()
            start = number * size
            own, _, flags, lower, _ = _PAGE.unpack_from(content, start)
            if own != number:
                return f"page {number} says that it is page {own}"
            for (at,) in struct.iter_unpack("<H", content[start + 16 : start + lower] if flags & _TREE else b""):
                low, high, node_flags, key_size = _NODE.unpack_from(content, start + at)
                if flags & _BRANCH:
                    pending.append(low | high << 16 | node_flags << 32)
                elif node_flags & _IS_LARGE:
                    pending += _NUMBER.unpack_from(content, start + at + _NODE.size + key_size)
    return ""


def _send_several(folder: Path, names: Sequence[bytes], send: _Send) -> str:
    """Send the entries of several databases. Each key follows a byte with the place of its database in `names`."""
    for number, name in enumerate(names):
        if problem := _send_entries(folder, name, partial(_send_with_place, send, bytes([number]))):
            return problem
    return _visit_pages(folder, send)


def _send_with_place(send: _Send, place: bytes, key: bytes, value: bytes) -> None:
    send(place + key, value)


def _send_entries(folder: Path, name: bytes, send: _Send) -> str:
    with _open(folder) as env, env.begin(buffers=True) as txn:
        database = env.open_db(name or None, txn=txn, create=False)
        expected = txn.stat(database)["entries"]
        count, last, unordered, hidden = 0, b"", b"", b""
        entries = txn.cursor(database).iternext()
        for found, value in islice(entries, expected):
            key = bytes(found)
            send(key, _value(value))
            unordered = unordered or (key if count and key <= last else b"")
            # A damaged page may lead a search elsewhere.
            hidden = hidden or (key if txn.get(key, db=database) is None else b"")
            count, last = count + 1, key
        if count < expected:
            return f"it should have {expected} entries, and has {count}"
        if next(entries, None) is not None:
            return f"it has more than its {expected} entries"
        if unordered:
            return f"the entry {unordered.hex()} is out of order"
        if hidden:
            return f"a search does not find the entry {hidden.hex()}"
        if any(database.flags().values()):
            return "it has unexpected flags"
    return ""


def _send_entries_backwards(folder: Path, name: bytes, skipped: int, send: _Send) -> str:
    """Send the entries from the last one on, but not as many as the first `skipped`."""
    with _open(folder) as env, env.begin(buffers=True) as txn:
        database = env.open_db(name or None, txn=txn, create=False)
        left = txn.stat(database)["entries"] - skipped
        for key, value in islice(txn.cursor(database).iterprev(), max(0, left)):
            send(bytes(key), _value(value))
    return ""


def _value(value: memoryview) -> bytes:
    """Return the bytes of a value in LMDB's memory; empty if its size cannot be right."""
    return bytes(value) if len(value) <= VALUE_BYTES_MAX else b""
