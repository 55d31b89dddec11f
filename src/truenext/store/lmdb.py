"""How the store keeps its promise on a disk.

The data folder:

    lock             the pid of the broker that uses the folder, which holds a flock on this file
    lmdb/data.mdb    one LMDB environment
    lmdb/lock.mdb    LMDB's own

The databases in it; numbers are big-endian. If you change anything here, increase FORMAT_VERSION:

    messages      message key (record.py)    ->  record              persistent messages
    transients    message key                ->  record              the others; an unclean stop drops them all
    marks         message key                ->  attempts u32, deliveries u32        messages of either kind
    counts        lane key (record.py)       ->  messages u64        of either kind; no entry where there is none
    queues        queue number u32           ->  name
    producers     BLAKE2b-128 of the name    ->  number u64, used u64, name          any name fits a key that way
    meta          "format"                   ->  u32                 FORMAT_VERSION
                  "identity"                 ->  eight hexadecimal digits
                  "sequence limit"           ->  u64
                  "clean stop"               ->  u8                  0 or 1

How many transients a lane holds is written nowhere: after an unclean stop, and only then, what is left of the lanes
that held any is counted.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from heapq import merge
from itertools import islice, takewhile
from pathlib import Path

import lmdb

from truenext.batch import Batch, ProducerState
from truenext.errors import StoreError, StoreInUseError
from truenext.record import LANE_KEY_SIZE, message_key
from truenext.store.store import Page, Recovered, StoredMessage

FORMAT_VERSION = 1

MAP_SIZE = 1 << 40
"""Bytes of address space: the most the store can ever hold. The file is only as large as what was in it."""

_LMDB_MAJOR = 0
"""LMDB 0.9.x. Named, because else an environment variable decides what format a new store gets."""

_FORMAT = struct.pack(">I", FORMAT_VERSION)
_QUEUE = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_MARK = struct.Struct(">II")
_PRODUCER = struct.Struct(">QQ")
_CLEAN, _UNCLEAN = b"\1", b"\0"
_UNMARKED = _MARK.pack(0, 0)


class LmdbStore:
    """A store in a folder of its own. One LMDB write transaction for each batch, synced before `apply` returns."""

    def __init__(self, path: Path, *, map_size: int = MAP_SIZE) -> None:
        """Lock and open the data folder, which is made if it is missing.

        Raises: StoreInUseError if another broker uses it, StoreError if it cannot be used.
        """
        self._path = path
        self._applied = 0
        self._refusal = "recover() comes first"
        with ExitStack() as opened, _explained(f"open the store in {path}"):
            created = [folder for folder in (path, *path.parents) if not folder.exists()]
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            opened.callback(os.close, lock)
            _take(lock, path)

            (path / "lmdb").mkdir(mode=0o700, exist_ok=True)
            env = lmdb.open(
                str(path / "lmdb"),
                map_size=map_size,
                max_dbs=7,
                mode=0o600,
                sync=True,
                metasync=True,
                lib_version=_LMDB_MAJOR,
            )
            opened.callback(env.close)
            with env.begin(write=True) as txn:
                self._meta = env.open_db(b"meta", txn=txn)
                _check_format(txn, self._meta, path)
                self._messages = env.open_db(b"messages", txn=txn)
                self._transients = env.open_db(b"transients", txn=txn)
                self._marks = env.open_db(b"marks", txn=txn)
                self._counts = env.open_db(b"counts", txn=txn)
                self._queues = env.open_db(b"queues", txn=txn)
                self._producers = env.open_db(b"producers", txn=txn)
            # LMDB syncs its file, not the folders that lead to it: without them a power cut loses the file.
            for folder in (path / "lmdb", path, *(folder.parent for folder in created)):
                _sync_folder(folder)
            self._env = env
            self._opened = opened.pop_all()

    def recover(self) -> Recovered:
        with _explained(f"read the store in {self._path}"), self._env.begin(write=True) as txn:
            clean_stop = txn.get(b"clean stop", _CLEAN, db=self._meta) == _CLEAN
            if not clean_stop:
                self._drop_transients(txn)
            recovered = Recovered(
                identity=txn.get(b"identity", b"", db=self._meta).decode(),
                clean_stop=clean_stop,
                sequence_limit=_NUMBER.unpack(txn.get(b"sequence limit", _NUMBER.pack(1), db=self._meta))[0],
                queues={_QUEUE.unpack(key)[0]: name.decode() for key, name in txn.cursor(self._queues)},
                counts={lane: _NUMBER.unpack(count)[0] for lane, count in txn.cursor(self._counts)},
                producers=_producers(value for _, value in txn.cursor(self._producers)),
            )
        self._refusal = ""
        return recovered

    def apply(self, batch: Batch) -> None:
        if self._refusal:
            raise StoreError(f"batch {batch.number} is refused: {self._refusal}")
        # Set before anything can fail. After a failed sync nobody knows what is on the disk, so that a second try
        # could confirm what is not there.
        self._refusal = f"batch {batch.number} could not be written; start the broker again"
        with _explained(f"write to the store in {self._path}"), self._env.begin(write=True) as txn:
            self._write(txn, batch)
        self._applied = batch.number
        self._refusal = ""

    def page(self, lane: bytes, after_sequence: int, limit: int) -> Page:
        # Read before the transaction opens: it may claim less than the page shows, never more.
        as_of = self._applied
        first = message_key(lane, after_sequence + 1)
        with _explained(f"read the store in {self._path}"), self._env.begin() as txn:
            entries = merge(*(_entries(txn.cursor(db), lane, first) for db in (self._messages, self._transients)))
            messages = [
                StoredMessage(key, record, *_MARK.unpack(txn.get(key, _UNMARKED, db=self._marks)))
                for key, record in islice(entries, limit)
            ]
        return Page(messages=messages, as_of=as_of)

    def close(self) -> None:
        """Let go of files and locks. Nothing is written. No page may be under way."""
        self._refusal = "the store is closed"
        self._opened.close()

    def _write(self, txn: lmdb.Transaction[bytes], batch: Batch) -> None:
        # A message that is not where the broker thinks, or is where it must not be, means that one was lost or would
        # be seen twice: better no batch at all.
        for db, keys in ((self._messages, batch.removes), (self._transients, batch.transient_removes)):
            for key in keys:
                if not txn.delete(key, db=db):
                    raise _disagreement(batch, f"removes message {key.hex()}, which is not there")
        queues = [(_QUEUE.pack(number), name.encode()) for number, name in batch.queues.items()]
        for db, puts in (
            (self._messages, batch.puts),
            (self._transients, batch.transient_puts),
            (self._queues, queues),
        ):
            if puts and txn.cursor(db).putmulti(puts, overwrite=False)[1] != len(puts):
                raise _disagreement(batch, "puts a message or queue that is there already")

        # After the marks, as a message can be given back and then removed within one batch.
        if batch.marks:
            txn.cursor(self._marks).putmulti([(key, _MARK.pack(*mark)) for key, mark in batch.marks.items()])
        for key in batch.unmarks:
            txn.delete(key, db=self._marks)

        for lane, count in batch.counts.items():
            self._write_count(txn, lane, count)

        # Before the producers, as one can be forgotten and come back within one batch.
        for name in batch.forgotten_producers:
            txn.delete(_producer_key(name), db=self._producers)
        if batch.producers:
            txn.cursor(self._producers).putmulti(
                [
                    (_producer_key(name), _PRODUCER.pack(state.number, state.used_ms) + name.encode())
                    for name, state in batch.producers.items()
                ]
            )

        if batch.sequence_limit:
            txn.put(b"sequence limit", _NUMBER.pack(batch.sequence_limit), db=self._meta)
        if batch.clean_stop is not None:
            txn.put(b"clean stop", _CLEAN if batch.clean_stop else _UNCLEAN, db=self._meta)

    def _write_count(self, txn: lmdb.Transaction[bytes], lane: bytes, count: int) -> None:
        if count:
            txn.put(lane, _NUMBER.pack(count), db=self._counts)
        else:
            txn.delete(lane, db=self._counts)

    def _drop_transients(self, txn: lmdb.Transaction[bytes]) -> None:
        transients = txn.cursor(self._transients)
        for lane in {key[:LANE_KEY_SIZE] for key in transients.iternext(values=False)}:
            # Counted, not subtracted: nobody wrote down how many of a lane's messages are transient.
            self._write_count(txn, lane, _length(txn.cursor(self._messages), lane))
        marked = [key for key in txn.cursor(self._marks).iternext(values=False) if transients.set_key(key)]
        for key in marked:
            txn.delete(key, db=self._marks)
        txn.drop(self._transients, delete=False)


def _take(lock: int, path: Path) -> None:
    """Hold the lock file until it is closed, by whatever end of the process."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 20, 0).decode(errors="replace").strip() or "unknown"
        raise StoreInUseError(
            f"data folder {path} is in use by the broker of process {holder}: stop it, or use another folder"
        ) from error
    os.truncate(lock, 0)
    os.pwrite(lock, b"%d\n" % os.getpid(), 0)


def _check_format(txn: lmdb.Transaction[bytes], meta: lmdb._Database, path: Path) -> None:
    """Make a new store ours, and refuse what this truenext does not understand before anything is changed."""
    found = txn.get(b"format", db=meta)
    if found is None:
        txn.put(b"format", _FORMAT, db=meta)
        txn.put(b"identity", secrets.token_hex(4).encode(), db=meta)
    elif found != _FORMAT:
        raise StoreError(
            f"the store in {path} has format {int.from_bytes(found)}, this truenext reads format {FORMAT_VERSION}: "
            "use the truenext that wrote it"
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


def _producers(values: Iterable[bytes]) -> dict[str, ProducerState]:
    """In order of last use."""
    states = {value[_PRODUCER.size :].decode(): ProducerState(*_PRODUCER.unpack_from(value)) for value in values}
    return dict(sorted(states.items(), key=lambda item: (item[1].used_ms, item[0])))


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _disagreement(batch: Batch, what: str) -> StoreError:
    return StoreError(f"store and broker disagree: batch {batch.number} {what}. This is a bug of truenext")


@contextmanager
def _explained(attempt: str) -> Iterator[None]:
    """What LMDB and the system say, as a StoreError that says what failed and what to do."""
    try:
        yield
    except lmdb.MapFullError as error:
        raise StoreError(f"cannot {attempt}: it is as large as its map allows; open it with a larger map") from error
    except lmdb.DiskError as error:
        raise StoreError(f"cannot {attempt}: the disk is full; make room, then start the broker again") from error
    except (lmdb.Error, OSError) as error:
        raise StoreError(f"cannot {attempt}: {error}; check the disk, then start the broker again") from error
    except (struct.error, UnicodeError) as error:
        raise StoreError(f"cannot {attempt}: a value is damaged or does not fit its field ({error})") from error
