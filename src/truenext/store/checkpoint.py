"""What the journal no longer holds: an LMDB environment, written to when a segment of the journal is to go.

The databases in it; numbers are big-endian. If you change anything here, increase FORMAT_VERSION:

    messages      message key (record.py)    ->  record              persistent messages
    transients    message key                ->  record              the others; an unclean stop drops them all
    marks         message key                ->  attempts u32, deliveries u32        messages of either kind
    counts        lane key (record.py)       ->  messages u64        of either kind; no entry where there is none
    queues        queue number u32           ->  name
    producers     BLAKE2b-128 of the name    ->  number u64, used u64, name          any name fits a key that way
    meta          "format"                   ->  u32                 FORMAT_VERSION
                  "identity"                 ->  eight hexadecimal digits
                  "salt"                     ->  u32                 of the journal
                  "segment"                  ->  u64                 the journal's last that is all here
                  "frame"                    ->  u64                 number of the last frame in it
                  "sequence limit"           ->  u64
                  "clean stop"               ->  u8                  0 or 1

How many transients a lane holds is written nowhere: after an unclean stop, and only then, what is left of the lanes
that held any is counted.
"""

from __future__ import annotations

import secrets
import struct
from collections import Counter
from hashlib import blake2b
from heapq import merge
from itertools import takewhile
from typing import TYPE_CHECKING

import lmdb
import msgspec

from truenext.batch import ProducerState
from truenext.errors import StoreError
from truenext.record import LANE_KEY_SIZE, message_key
from truenext.store.store import Recovered

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator
    from pathlib import Path

    from truenext.store.overlay import Layer

FORMAT_VERSION = 2

MAP_SIZE = 1 << 40
"""Bytes of address space: the most the store can ever hold. The file is only as large as what was in it."""

_LMDB_MAJOR = 0
"""LMDB 0.9.x. Named, because else an environment variable decides what format a new store gets."""

_FORMAT = struct.pack(">I", FORMAT_VERSION)
_QUEUE = struct.Struct(">I")
_SALT = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_NOTHING = _NUMBER.pack(0)
_MARK = struct.Struct(">II")
_PRODUCER = struct.Struct(">QQ")
_CLEAN, _UNCLEAN = b"\1", b"\0"
_UNMARKED = _MARK.pack(0, 0)


class Position(msgspec.Struct, frozen=True):
    """How far into the journal the checkpoint reaches."""

    segment: int
    frame: int


class Checkpoint:
    """One LMDB write transaction for each call that writes, synced before it returns. Raises: lmdb.Error, OSError"""

    def __init__(self, folder: Path, *, map_size: int = MAP_SIZE) -> None:
        """Raises: StoreError if another truenext wrote it, lmdb.Error, OSError"""
        folder.mkdir(mode=0o700, exist_ok=True)
        self._env = lmdb.open(
            str(folder),
            map_size=map_size,
            max_dbs=7,
            mode=0o600,
            sync=True,
            metasync=True,
            lib_version=_LMDB_MAJOR,
        )
        try:
            with self._env.begin(write=True) as txn:
                self._meta = self._env.open_db(b"meta", txn=txn)
                _check_format(txn, self._meta, folder)
                self._messages = self._env.open_db(b"messages", txn=txn)
                self._transients = self._env.open_db(b"transients", txn=txn)
                self._marks = self._env.open_db(b"marks", txn=txn)
                self._counts = self._env.open_db(b"counts", txn=txn)
                self._queues = self._env.open_db(b"queues", txn=txn)
                self._producers = self._env.open_db(b"producers", txn=txn)
                self.salt: int = _SALT.unpack(txn.get(b"salt", b"", db=self._meta))[0]
        except BaseException:
            self._env.close()
            raise

    def close(self) -> None:
        self._env.close()

    # ---- Reading ----

    def read(self) -> tuple[Recovered, Position]:
        """What it says by itself, but for the counts, which change with what recovery drops."""
        with self._env.begin() as txn:
            recovered = Recovered(
                identity=txn.get(b"identity", b"", db=self._meta).decode(),
                clean_stop=txn.get(b"clean stop", _CLEAN, db=self._meta) == _CLEAN,
                sequence_limit=_NUMBER.unpack(txn.get(b"sequence limit", _NUMBER.pack(1), db=self._meta))[0],
                queues={_QUEUE.unpack(key)[0]: name.decode() for key, name in txn.cursor(self._queues)},
                producers=dict(_producer(value) for _, value in txn.cursor(self._producers)),
            )
            segment, frame = (_NUMBER.unpack(txn.get(name, _NOTHING, db=self._meta))[0] for name in _POSITION)
        return recovered, Position(segment, frame)

    def counts(self) -> dict[bytes, int]:
        """Lane key to messages of either kind that are here."""
        with self._env.begin() as txn:
            return {lane: _NUMBER.unpack(count)[0] for lane, count in txn.cursor(self._counts)}

    def kinds(self, keys: Iterable[bytes]) -> dict[bytes, bool]:
        """Those of `keys` that are here, and whether they are transient."""
        found: dict[bytes, bool] = {}
        with self._env.begin() as txn:
            messages, transients = txn.cursor(self._messages), txn.cursor(self._transients)
            for key in keys:
                if messages.set_key(key):
                    found[key] = False
                elif transients.set_key(key):
                    found[key] = True
        return found

    def page(self, lane: bytes, after_sequence: int) -> Generator[tuple[bytes, bytes, int, int]]:
        """Key, record, attempts and deliveries of a lane's messages, in order. Close it, or read it to its end."""
        first = message_key(lane, after_sequence + 1)
        with self._env.begin() as txn:
            for key, record in merge(
                *(_entries(txn.cursor(db), lane, first) for db in (self._messages, self._transients))
            ):
                attempts, deliveries = _MARK.unpack(txn.get(key, _UNMARKED, db=self._marks))
                yield key, record, attempts, deliveries

    # ---- Writing ----

    def delete(self, keys: Iterable[tuple[bytes, bool]]) -> None:
        """Messages that are gone, with their marks, and whether they are transient; those not here are passed over."""
        change: Counter[bytes] = Counter()
        with self._env.begin(write=True) as txn:
            for key, is_transient in keys:
                if txn.delete(key, db=self._transients if is_transient else self._messages):
                    txn.delete(key, db=self._marks)
                    change[key[:LANE_KEY_SIZE]] -= 1
            self._count(txn, change)

    def put(self, messages: list[tuple[bytes, bytes]], *, are_transient: bool) -> None:
        """Raises: StoreError if one of them is here already, and then none is written."""
        db = self._transients if are_transient else self._messages
        with self._env.begin(write=True) as txn:
            if txn.cursor(db).putmulti(messages, overwrite=False)[1] != len(messages):
                raise StoreError("store and broker disagree: two messages have one key. This is a bug of truenext")
            self._count(txn, Counter(key[:LANE_KEY_SIZE] for key, _ in messages))

    def finish(self, layers: Iterable[Layer], marks: dict[bytes, tuple[int, int]], position: Position) -> None:
        """All that the journal's segments said up to `position` is here with this; `marks` are those of the layers."""
        with self._env.begin(write=True) as txn:
            messages, transients = txn.cursor(self._messages), txn.cursor(self._transients)
            for key, mark in marks.items():
                # The message can be gone by a later segment, or be dropped: a mark must not outlive it.
                if messages.set_key(key) or transients.set_key(key):
                    txn.put(key, _MARK.pack(*mark), db=self._marks)
            for layer in layers:
                self._finish_layer(txn, layer)
            for name, value in zip(_POSITION, (position.segment, position.frame), strict=True):
                txn.put(name, _NUMBER.pack(value), db=self._meta)

    def drop_transients(self) -> None:
        with self._env.begin(write=True) as txn:
            transients = txn.cursor(self._transients)
            for lane in {key[:LANE_KEY_SIZE] for key in transients.iternext(values=False)}:
                # Counted, not subtracted: nobody wrote down how many of a lane's messages are transient.
                self._write_count(txn, lane, _length(txn.cursor(self._messages), lane))
            marked = [key for key in txn.cursor(self._marks).iternext(values=False) if transients.set_key(key)]
            for key in marked:
                txn.delete(key, db=self._marks)
            txn.drop(self._transients, delete=False)

    def _finish_layer(self, txn: lmdb.Transaction[bytes], layer: Layer) -> None:
        for number, name in layer.queues.items():
            txn.put(_QUEUE.pack(number), name.encode(), db=self._queues)
        # Before the producers, as one can be forgotten and come back.
        for name in layer.forgotten_producers:
            txn.delete(_producer_key(name), db=self._producers)
        for name, state in layer.producers.items():
            value = _PRODUCER.pack(state.number, state.used_ms) + name.encode()
            txn.put(_producer_key(name), value, db=self._producers)
        if layer.sequence_limit:
            txn.put(b"sequence limit", _NUMBER.pack(layer.sequence_limit), db=self._meta)
        if layer.clean_stop is not None:
            txn.put(b"clean stop", _CLEAN if layer.clean_stop else _UNCLEAN, db=self._meta)

    def _count(self, txn: lmdb.Transaction[bytes], change: Counter[bytes]) -> None:
        for lane, difference in change.items():
            before = _NUMBER.unpack(txn.get(lane, _NOTHING, db=self._counts))[0]
            self._write_count(txn, lane, before + difference)

    def _write_count(self, txn: lmdb.Transaction[bytes], lane: bytes, count: int) -> None:
        if count:
            txn.put(lane, _NUMBER.pack(count), db=self._counts)
        else:
            txn.delete(lane, db=self._counts)


_POSITION = (b"segment", b"frame")


def _check_format(txn: lmdb.Transaction[bytes], meta: lmdb._Database, folder: Path) -> None:
    """Make a new store ours, and refuse what this truenext does not understand before anything is changed."""
    found = txn.get(b"format", db=meta)
    if found is None:
        txn.put(b"format", _FORMAT, db=meta)
        txn.put(b"identity", secrets.token_hex(4).encode(), db=meta)
        txn.put(b"salt", secrets.token_bytes(_SALT.size), db=meta)
    elif found != _FORMAT:
        raise StoreError(
            f"the store in {folder.parent} has format {int.from_bytes(found)}, this truenext reads format "
            f"{FORMAT_VERSION}: use the truenext that wrote it"
        )


def _entries(cursor: lmdb.Cursor[bytes], lane: bytes, first: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Key and record of the messages of `lane` from key `first` on."""
    if cursor.set_range(first):
        for key, record in cursor.iternext():
            if not key.startswith(lane):
                return
            yield key, record


def _length(cursor: lmdb.Cursor[bytes], lane: bytes) -> int:
    if not cursor.set_range(lane):
        return 0
    return sum(1 for _ in takewhile(lambda key: key.startswith(lane), cursor.iternext(values=False)))


def _producer_key(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=16).digest()


def _producer(value: bytes) -> tuple[str, ProducerState]:
    return value[_PRODUCER.size :].decode(), ProducerState(*_PRODUCER.unpack_from(value))
