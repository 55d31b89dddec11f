"""What the journal no longer holds: an LMDB environment, written to when a segment of the journal is to go.

The databases in it; numbers are big-endian. If you change anything here, increase FORMAT_VERSION:

    messages            message key (record.py)             ->  record                      the persistent
    transients          generation u32, message key         ->  record                      the others
    marks               message key                         ->  attempts u32, deliveries u32, due u64   of these
    transient marks     generation u32, message key         ->  attempts u32, deliveries u32, due u64   of transients
    counts              lane key (record.py)                ->  messages u64                no entry where there is none
    transient counts    lane key                            ->  transients u64              of the generation
    queues              queue number u32                    ->  name
    timers              timer (record.py)                   ->  nothing                     but the checksum
    producers           BLAKE2b-128 of the name             ->  number u64, used u64, once u8, name
    meta                "format"                            ->  u32     FORMAT_VERSION
                        "identity"                          ->  eight hexadecimal digits
                        "salt"                              ->  u32     of the journal
                        "segment"                           ->  u64     the journal's last that is all here
                        "frame"                             ->  u64     number of the last frame in it
                        "written"                           ->  u64     number of a frame that was written, see below
                        "segment bytes"                     ->  u64     bytes of a segment's file, at the least
                        "generation"                        ->  u32     of the transients that count
                        "sequence limit"                    ->  u64
                        "redelivered below"                 ->  u64
                        "clean stop"                        ->  u8      0 or 1
                        "paused"                            ->  queue number u32, of each that is paused, in order

Contents (record.py) stand among the messages of their kind. All values but the records carry a checksum, see sealed.py;
what meta names is there from the beginning.

The frame that "written" names, and all before it, was durable when it was named: that stays true, whatever is written
later, so that nobody has to take it back (docs/decisions/0019-damage.md).

An unclean stop drops all transients, however many there are, by one small transaction: the generation is increased,
and the counts of transients are thrown away. What earlier generations left is nobody's, and is deleted by and by.
"""

from __future__ import annotations

import secrets
import struct
from collections import Counter
from hashlib import blake2b
from heapq import merge
from itertools import islice, pairwise
from typing import TYPE_CHECKING

import lmdb
import msgspec

from truenext.batch import NO_MARK, Mark, ProducerState
from truenext.errors import StoreError
from truenext.record import LANE_KEY_SIZE, TIMER_SIZE, message_key
from truenext.store.changes import with_changes
from truenext.store.folder import sync_folder
from truenext.store.journal import SEGMENT_BYTES
from truenext.store.lmdb_file import holds_nothing, metas
from truenext.store.sealed import DamagedValue, seal, unseal
from truenext.store.store import Recovered
from truenext.store.trouble import damage, empty, other_format

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from truenext.store.overlay import Layer

DATA_FILE = "data.mdb"

FORMAT_VERSION = 9

MAP_SIZE = 1 << 40
"""Bytes of address space: the most the store can ever hold. The file is only as large as what was in it."""

DATABASES = (
    b"meta",
    b"messages",
    b"transients",
    b"marks",
    b"transient marks",
    b"counts",
    b"transient counts",
    b"queues",
    b"producers",
    b"timers",
)
META = (
    b"format",
    b"identity",
    b"salt",
    b"segment",
    b"frame",
    b"written",
    b"segment bytes",
    b"generation",
    b"sequence limit",
    b"redelivered below",
    b"clean stop",
    b"paused",
)
"""What meta names."""

DATABASES_MAX = len(DATABASES)

_LMDB_MAJOR = 0
"""LMDB 0.9.x. Named, because else an environment variable decides what format a new store gets."""

FORMAT = struct.Struct(">I")
QUEUE = struct.Struct(">I")
SALT = struct.Struct(">I")
GENERATION = struct.Struct(">I")
NUMBER = struct.Struct(">Q")
MARK = struct.Struct(">IIQ")
_PRODUCER = struct.Struct(">QQ?")
_AROUND = 2
"""Keys that are looked at before one that is not there, and behind it."""
CLEAN, UNCLEAN = b"\1", b"\0"
_META_PAGES = 2


class Position(msgspec.Struct, frozen=True):
    """How far into the journal the checkpoint reaches."""

    segment: int
    frame: int
    written: int = 0
    """Number of a frame that the journal was given, later ones than `frame` included."""


class _Sealed:
    """A database of small values, each with its checksum. Reading raises StoreError for a damaged value."""

    def __init__(self, db: lmdb._Database, name: bytes, data: Path) -> None:
        self._db = db
        self._name = name
        self._data = data

    def get(self, txn: lmdb.Transaction[bytes], key: bytes) -> bytes | None:
        sealed = txn.get(key, db=self._db)
        return None if sealed is None else self._unseal(key, sealed)

    def need(self, txn: lmdb.Transaction[bytes], key: bytes) -> bytes:
        value = self.get(txn, key)
        if value is None:
            raise damage("checkpoint", f"{key.decode()} is missing in {self._name.decode()}", self._data)
        return value

    def items(self, txn: lmdb.Transaction[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """All of it, in order; a value that is missing is noticed at the end."""
        count = 0
        last = b""
        for key, sealed in txn.cursor(self._db):
            if key <= last:
                raise damage("checkpoint", f"{key.hex()} in {self._name.decode()} is out of order", self._data)
            last = key
            yield key, self._unseal(key, sealed)
            count += 1
        expected = txn.stat(self._db)["entries"]
        if count != expected:
            raise damage("checkpoint", f"of {expected} values in {self._name.decode()} there are {count}", self._data)

    def put(self, txn: lmdb.Transaction[bytes], key: bytes, value: bytes) -> None:
        txn.put(key, seal(self._name, key, value), db=self._db)

    def delete(self, txn: lmdb.Transaction[bytes], key: bytes) -> None:
        txn.delete(key, db=self._db)

    def clear(self, txn: lmdb.Transaction[bytes]) -> None:
        txn.drop(self._db, delete=False)

    def behind(self, txn: lmdb.Transaction[bytes], key: bytes) -> Iterator[tuple[bytes, bytes]]:
        """From `key` on, to the end of the database."""
        cursor = txn.cursor(self._db)
        if cursor.set_range(key):
            for found, sealed in cursor:
                yield found, self._unseal(found, sealed)

    def cursor(self, txn: lmdb.Transaction[bytes]) -> lmdb.Cursor[bytes]:
        return txn.cursor(self._db)

    def pages(self, txn: lmdb.Transaction[bytes]) -> int:
        return _pages(txn, self._db)

    def _unseal(self, key: bytes, sealed: bytes) -> bytes:
        try:
            return unseal(self._name, key, sealed)
        except DamagedValue as error:
            raise damage("checkpoint", str(error), self._data) from error


class Checkpoint:
    """One LMDB write transaction for each call that writes, synced before it returns.

    Raises: StoreError if a value is damaged, lmdb.Error, OSError
    """

    def __init__(
        self,
        folder: Path,
        *,
        may_be_new: bool = True,
        map_size: int = MAP_SIZE,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """It is made if there is none, unless it may not be new; `segment_bytes` is what the journal of a new one gets.

        Raises: StoreError if another truenext wrote it, or it is damaged, lmdb.Error, OSError
        """
        folder.mkdir(mode=0o700, exist_ok=True)
        self._data = folder.parent
        path = folder / DATA_FILE
        if path.exists() and path.stat().st_size:
            self._look_at_file(path, may_be_new=may_be_new)
        elif may_be_new:
            _make(folder, map_size, segment_bytes)
        else:
            # A new one would have another salt, so that the journal would look empty and be overwritten.
            what = f"lmdb/{DATA_FILE} is empty" if path.exists() else f"lmdb/{DATA_FILE} is missing"
            raise damage("checkpoint", f"{what}, and the journal is not", self._data)
        self._env = _open(folder, map_size)
        try:
            # A commit that was under way when a broker was killed may be in the system's memory only.
            self._env.sync(True)
            with self._env.begin(write=True) as txn:
                entries = txn.stat()["entries"]
                if not entries:
                    raise damage("checkpoint", "it is empty", self._data)
                self._meta = self._sealed(txn, b"meta")
                self._check_format(txn)
                if entries != len(DATABASES):
                    raise damage("checkpoint", f"it has {entries} databases", self._data)
                self._messages = self._database(txn, b"messages")
                self._transients = self._database(txn, b"transients")
                self._marks = self._sealed(txn, b"marks")
                self._transient_marks = self._sealed(txn, b"transient marks")
                self._counts = self._sealed(txn, b"counts")
                self._transient_counts = self._sealed(txn, b"transient counts")
                self._queues = self._sealed(txn, b"queues")
                self._producers = self._sealed(txn, b"producers")
                self._timers = self._sealed(txn, b"timers")
                self.salt: int = SALT.unpack(self._meta.need(txn, b"salt"))[0]
                self.segment_bytes: int = NUMBER.unpack(self._meta.need(txn, b"segment bytes"))[0]
                self._generation = self._meta.need(txn, b"generation")
        except BaseException:
            self._env.close()
            raise

    def close(self) -> None:
        self._env.close()

    def _look_at_file(self, path: Path, *, may_be_new: bool) -> None:
        """What LMDB would believe."""
        if may_be_new and holds_nothing(path):
            raise empty(self._data)
        found, what = metas(path)
        if found and what:
            raise damage("checkpoint", what, self._data)

    def _database(self, txn: lmdb.Transaction[bytes], name: bytes) -> lmdb._Database:
        try:
            db = self._env.open_db(name, txn=txn, create=False)
        except lmdb.NotFoundError as error:
            raise damage("checkpoint", f"the database {name.decode()} is missing", self._data) from error
        if any(db.flags().values()):
            raise damage("checkpoint", f"the database {name.decode()} has flags that nobody gave it", self._data)
        return db

    def _sealed(self, txn: lmdb.Transaction[bytes], name: bytes) -> _Sealed:
        return _Sealed(self._database(txn, name), name, self._data)

    def _check_format(self, txn: lmdb.Transaction[bytes]) -> None:
        """Refuse what this truenext does not understand before anything is changed."""
        meta = self._meta
        # Formats 1 and 2 had no checksums.
        bare = meta.cursor(txn).get(b"format", b"")
        found = int.from_bytes(bare if len(bare) == FORMAT.size else meta.need(txn, b"format"))
        if found != FORMAT_VERSION:
            raise other_format(self._data, found, FORMAT_VERSION)

    # ---- Reading ----

    def read(self) -> tuple[Recovered, Position]:
        """What it says by itself, but for the counts, which change with what recovery drops."""
        with self._env.begin() as txn:
            meta = self._meta
            recovered = Recovered(
                identity=meta.need(txn, b"identity").decode(),
                clean_stop=meta.need(txn, b"clean stop") == CLEAN,
                sequence_limit=NUMBER.unpack(meta.need(txn, b"sequence limit"))[0],
                redelivered_below=NUMBER.unpack(meta.need(txn, b"redelivered below"))[0],
                paused=paused_of(meta.need(txn, b"paused")),
                queues={QUEUE.unpack(key)[0]: name.decode() for key, name in self._queues.items(txn)},
                producers=dict(producer_of(value) for _, value in self._producers.items(txn)),
            )
            position = Position(*(NUMBER.unpack(meta.need(txn, name))[0] for name in POSITION))
        return recovered, position

    def counts(self) -> Counter[bytes]:
        """Lane key to messages of either kind that are here.

        Raises: StoreError if they are not as many
        """
        with self._env.begin() as txn:
            counts = self._counts_of_kind(txn, self._counts)
            transients = self._counts_of_kind(txn, self._transient_counts)
            # What nobody counts nobody would ever read.
            for of_kind, db in ((counts, self._messages), (transients, self._transients)):
                counted, there = of_kind.total(), txn.stat(db)["entries"]
                # Transients of earlier generations are not counted any more.
                if counted > there or (counted < there and of_kind is counts):
                    raise damage("checkpoint", f"{counted} messages are counted and {there} are there", self._data)
        counts.update(transients)
        return counts

    def _counts_of_kind(self, txn: lmdb.Transaction[bytes], counts: _Sealed) -> Counter[bytes]:
        return Counter({lane: NUMBER.unpack(count)[0] for lane, count in counts.items(txn)})

    def kinds(self, keys: Iterable[bytes]) -> dict[bytes, bool]:
        """Those of `keys` that are here, and whether they are transient.

        Raises: StoreError if damage hides whether one is here
        """
        found: dict[bytes, bool] = {}
        generation = self._generation
        with self._env.begin() as txn:
            messages, transients = txn.cursor(self._messages), txn.cursor(self._transients)
            for key in keys:
                if self._has(messages, key):
                    found[key] = False
                elif self._has(transients, generation + key):
                    found[key] = True
        return found

    def _has(self, cursor: lmdb.Cursor[bytes], key: bytes) -> bool:
        """What is not here would have a place in the order of what is. If it has none, damage may hide it, and what was
        acknowledged would come back: raises StoreError.
        """
        is_behind = cursor.set_range(key)
        if is_behind and cursor.key() == key:
            return True
        is_ordered = not is_behind or cursor.key() > key
        if is_ordered and (cursor.prev() if is_behind else cursor.last()):
            is_ordered = cursor.key() < key
        if not is_ordered:
            raise damage("checkpoint", f"{key.hex()} has no place where it should stand", self._data)
        return False

    def snapshot(self) -> lmdb.Transaction[bytes]:
        """For `page`: it sees what was committed before, and nothing that comes later. To be ended by `with`."""
        return self._env.begin()

    def page(
        self, snapshot: lmdb.Transaction[bytes], lane: bytes, after_sequence: int
    ) -> Iterator[tuple[bytes, bytes, Mark]]:
        """Key, record and mark of a lane's messages, in order."""
        messages = self._of_kind(snapshot, lane, after_sequence, is_transient=False)
        transients = self._of_kind(snapshot, lane, after_sequence, is_transient=True)
        first = next(transients, None)
        if first is None:
            return messages
        return merge(messages, _chained(first, transients))

    def _of_kind(
        self, txn: lmdb.Transaction[bytes], lane: bytes, after_sequence: int, *, is_transient: bool
    ) -> Iterator[tuple[bytes, bytes, Mark]]:
        prefix = self._generation if is_transient else b""
        cursor = txn.cursor(self._transients if is_transient else self._messages)
        last = prefix + message_key(lane, after_sequence)
        first = prefix + message_key(lane, after_sequence + 1)
        if not cursor.set_range(first):
            return
        marks = (self._transient_marks if is_transient else self._marks).behind(txn, first)
        mark = next(marks, None)
        lane, size = prefix + lane, len(prefix)
        for key, record in cursor.iternext():
            # Before it is taken for the end of the lane: there may be more of that behind it.
            if key <= last or len(key) != len(last):
                raise damage("checkpoint", f"message {key.hex()} stands behind {last.hex()}", self._data)
            # Each goes with its message: what damage did to one of the two is seen at the other.
            if mark is not None and mark[0] < key:
                raise damage("checkpoint", f"message {mark[0].hex()} has a mark, and is missing", self._data)
            if not key.startswith(lane):
                return
            last = key
            own = NO_MARK
            if mark is not None and mark[0] == key:
                own = Mark(*MARK.unpack(mark[1]))
                mark = next(marks, None)
            yield key[size:] if size else key, record, own
        if mark is not None:
            raise damage("checkpoint", f"message {mark[0].hex()} has a mark, and is missing", self._data)

    def some(self, snapshot: lmdb.Transaction[bytes], keys: Iterable[bytes]) -> Iterator[tuple[bytes, bytes, Mark]]:
        """Key, record and mark of those of these messages that are here, in the order of `keys`."""
        for key in keys:
            transient = self._generation + key
            record = snapshot.get(key, db=self._messages)
            mark = self._marks.get(snapshot, key)
            if record is None and mark is None:
                record = snapshot.get(transient, db=self._transients)
                mark = self._transient_marks.get(snapshot, transient)
            if record is not None:
                yield key, record, NO_MARK if mark is None else Mark(*MARK.unpack(mark))
            elif mark is not None:
                raise damage("checkpoint", f"message {key.hex()} has a mark, and is missing", self._data)
            else:
                self._look_around(snapshot, key)

    def _look_around(self, txn: lmdb.Transaction[bytes], key: bytes) -> None:
        """Notice a message that is here, and is not found because a key is damaged: where a search ended that went
        wrong, keys are out of order.

        Raises: StoreError
        """
        for database, wanted in ((self._messages, key), (self._transients, self._generation + key)):
            cursor = txn.cursor(database)
            if not (cursor.set_range(wanted) or cursor.last()):
                continue
            for _ in range(_AROUND):
                if not cursor.prev():
                    break
            # If there is nothing before it either, this begins with the first.
            around = islice(cursor.iternext(values=False), 2 * _AROUND)
            for before, after in pairwise(around):
                if before >= after:
                    raise damage("checkpoint", f"message {after.hex()} stands behind {before.hex()}", self._data)

    def content(self, snapshot: lmdb.Transaction[bytes], key: bytes) -> bytes:
        """The record of a content; empty if it is not here."""
        record = snapshot.get(key, db=self._messages)
        return snapshot.get(self._generation + key, b"", db=self._transients) if record is None else record

    def mark(self, key: bytes) -> Mark:
        """That of a message of either kind; NO_MARK if it has none here."""
        with self._env.begin() as txn:
            mark = self._marks.get(txn, key) or self._transient_marks.get(txn, self._generation + key)
        return NO_MARK if mark is None else Mark(*MARK.unpack(mark))

    def timers(self, snapshot: lmdb.Transaction[bytes], after: bytes) -> Iterator[bytes]:
        """Those behind `after`, in order."""
        last = after
        for timer, _ in self._timers.behind(snapshot, after):
            if timer == after:
                continue
            if timer < last or len(timer) != TIMER_SIZE:
                raise damage("checkpoint", f"timer {timer.hex()} stands behind {last.hex()}", self._data)
            last = timer
            yield timer

    def size(self) -> int:
        """Bytes of pages in use. The file is larger: it never shrinks."""
        with self._env.begin() as txn:
            sealed = (
                self._meta,
                self._marks,
                self._transient_marks,
                self._counts,
                self._transient_counts,
                self._queues,
                self._producers,
                self._timers,
            )
            pages = sum(one.pages(txn) for one in sealed)
            pages += sum(_pages(txn, db) for db in (self._messages, self._transients, None))
            return (_META_PAGES + pages) * txn.stat()["psize"]

    # ---- Writing ----

    def delete(self, keys: Iterable[tuple[bytes, bool]]) -> None:
        """Messages that are gone, with their marks, and whether they are transient.

        Raises: StoreError if one is not here, and then none is deleted: damage hides it, and it would come back
        """
        changes: tuple[Counter[bytes], Counter[bytes]] = (Counter(), Counter())
        with self._env.begin(write=True) as txn:
            for key, is_transient in keys:
                stored = self._generation + key if is_transient else key
                if not txn.delete(stored, db=self._transients if is_transient else self._messages):
                    raise damage("checkpoint", f"message {key.hex()} is gone, and cannot be deleted", self._data)
                (self._transient_marks if is_transient else self._marks).delete(txn, stored)
                changes[is_transient][key[:LANE_KEY_SIZE]] -= 1
            self._count(txn, self._counts, changes[False])
            self._count(txn, self._transient_counts, changes[True])

    def put(self, messages: list[tuple[bytes, bytes]], *, are_transient: bool) -> None:
        """Raises: StoreError if one of them is here already, and then none is written."""
        db = self._transients if are_transient else self._messages
        stored = [(self._generation + key, record) for key, record in messages] if are_transient else messages
        with self._env.begin(write=True) as txn:
            if txn.cursor(db).putmulti(stored, overwrite=False)[1] != len(messages):
                raise StoreError("store and broker disagree: two messages have one key. This is a bug of truenext")
            counts = self._transient_counts if are_transient else self._counts
            self._count(txn, counts, Counter(key[:LANE_KEY_SIZE] for key, _ in messages))

    def set_timers(self, timers: Iterable[tuple[bytes, bool]]) -> None:
        """Set those with True and clear the others, wherever they are or are not."""
        with self._env.begin(write=True) as txn:
            for timer, is_set in timers:
                if is_set:
                    self._timers.put(txn, timer, b"")
                else:
                    self._timers.delete(txn, timer)

    def finish(self, layers: Iterable[Layer], marks: dict[bytes, Mark], position: Position) -> None:
        """All that the journal's segments said up to `position` is here with this; `marks` are those of the layers."""
        with self._env.begin(write=True) as txn:
            messages, transients = txn.cursor(self._messages), txn.cursor(self._transients)
            for key, mark in marks.items():
                # The message can be gone by a later segment, or be dropped: a mark must not outlive it.
                if messages.set_key(key):
                    self._marks.put(txn, key, MARK.pack(*mark))
                elif transients.set_key(self._generation + key):
                    self._transient_marks.put(txn, self._generation + key, MARK.pack(*mark))
            for layer in layers:
                self._finish_layer(txn, layer)
            self._meta.put(txn, b"segment", NUMBER.pack(position.segment))
            self._meta.put(txn, b"frame", NUMBER.pack(position.frame))
            self._raise(txn, b"written", position.written)

    def write_down(self, written: int, sequence_limit: int) -> None:
        """The journal was given the frame of this number, and all before it; one of them has the limit, if not 0."""
        with self._env.begin(write=True) as txn:
            self._raise(txn, b"written", written)
            self._raise(txn, b"sequence limit", sequence_limit)

    def _raise(self, txn: lmdb.Transaction[bytes], name: bytes, number: int) -> None:
        # What is written down at once is ahead of a move.
        if number > NUMBER.unpack(self._meta.need(txn, name))[0]:
            self._meta.put(txn, name, NUMBER.pack(number))

    def drop_transients(self) -> None:
        """However many there are: what is left of them is for `clean`."""
        generation = GENERATION.pack(GENERATION.unpack(self._generation)[0] + 1)
        with self._env.begin(write=True) as txn:
            self._meta.put(txn, b"generation", generation)
            self._transient_counts.clear(txn)
        self._generation = generation

    def clean(self, keys_max: int) -> bool:
        """Delete up to `keys_max` of what earlier generations left; whether there may be more of it."""
        with self._env.begin() as txn:
            if not any(self._is_left(cursor) for cursor in self._left(txn)):
                return False
        with self._env.begin(write=True) as txn:
            for cursor in self._left(txn):
                while keys_max and self._is_left(cursor):
                    cursor.delete()
                    keys_max -= 1
        return True

    def _left(self, txn: lmdb.Transaction[bytes]) -> tuple[lmdb.Cursor[bytes], lmdb.Cursor[bytes]]:
        return self._transient_marks.cursor(txn), txn.cursor(self._transients)

    def _is_left(self, cursor: lmdb.Cursor[bytes]) -> bool:
        """The first in the database is of an earlier generation; the cursor is there."""
        return cursor.first() and cursor.key()[: GENERATION.size] < self._generation

    def _finish_layer(self, txn: lmdb.Transaction[bytes], layer: Layer) -> None:
        for number, name in layer.queues.items():
            if name:
                self._queues.put(txn, QUEUE.pack(number), name.encode())
            else:
                self._queues.delete(txn, QUEUE.pack(number))
        if layer.paused:
            paused = with_changes(paused_of(self._meta.need(txn, b"paused")), layer.paused)
            self._meta.put(txn, b"paused", b"".join(map(QUEUE.pack, sorted(paused))))
        # Before the producers, as one can be forgotten and come back.
        for name in layer.forgotten_producers:
            self._producers.delete(txn, _producer_key(name))
        for name, state in layer.producers.items():
            value = _PRODUCER.pack(state.number, state.used_ms, state.is_once) + name.encode()
            self._producers.put(txn, _producer_key(name), value)
        self._raise(txn, b"sequence limit", layer.sequence_limit)
        if layer.redelivered_below:
            self._meta.put(txn, b"redelivered below", NUMBER.pack(layer.redelivered_below))
        if layer.clean_stop is not None:
            self._meta.put(txn, b"clean stop", CLEAN if layer.clean_stop else UNCLEAN)

    def _count(self, txn: lmdb.Transaction[bytes], counts: _Sealed, change: Counter[bytes]) -> None:
        for lane, difference in change.items():
            before = counts.get(txn, lane) if self._has(counts.cursor(txn), lane) else None
            count = difference + (0 if before is None else NUMBER.unpack(before)[0])
            if count:
                counts.put(txn, lane, NUMBER.pack(count))
            else:
                counts.delete(txn, lane)


POSITION = (b"segment", b"frame", b"written")
"""Where meta has the fields of one."""


def _make(folder: Path, map_size: int, segment_bytes: int) -> None:
    """A new store, under its name only once it is all there: LMDB refuses a file that a crash has cut short.

    Raises: lmdb.Error, OSError
    """
    new = folder / "new"
    new.unlink(missing_ok=True)
    # Without a lock, which would be one more file.
    with _open(new, map_size, subdir=False, lock=False) as env, env.begin(write=True) as txn:
        databases = {name: env.open_db(name, txn=txn) for name in DATABASES}
        meta = _Sealed(databases[b"meta"], b"meta", folder.parent)
        for name, value in (
            (b"format", FORMAT.pack(FORMAT_VERSION)),
            (b"identity", secrets.token_hex(4).encode()),
            (b"salt", secrets.token_bytes(SALT.size)),
            (b"segment", NUMBER.pack(0)),
            (b"frame", NUMBER.pack(0)),
            (b"written", NUMBER.pack(0)),
            (b"segment bytes", NUMBER.pack(segment_bytes)),
            (b"generation", GENERATION.pack(0)),
            (b"sequence limit", NUMBER.pack(1)),
            (b"redelivered below", NUMBER.pack(0)),
            (b"clean stop", CLEAN),
            (b"paused", b""),
        ):
            meta.put(txn, name, value)
    new.rename(folder / DATA_FILE)
    sync_folder(folder)


def _open(path: Path, map_size: int, *, subdir: bool = True, lock: bool = True) -> lmdb.Environment:
    return lmdb.open(
        str(path),
        map_size=map_size,
        subdir=subdir,
        lock=lock,
        max_dbs=DATABASES_MAX,
        mode=0o600,
        sync=True,
        metasync=True,
        lib_version=_LMDB_MAJOR,
    )


def _chained(
    first: tuple[bytes, bytes, Mark], rest: Iterator[tuple[bytes, bytes, Mark]]
) -> Iterator[tuple[bytes, bytes, Mark]]:
    yield first
    yield from rest


def _pages(txn: lmdb.Transaction[bytes], db: lmdb._Database | None) -> int:
    stat = txn.stat(db) if db is not None else txn.stat()
    return stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]


def _producer_key(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=16).digest()


def paused_of(value: bytes) -> set[int]:
    return {number for (number,) in QUEUE.iter_unpack(value)}


def producer_of(value: bytes) -> tuple[str, ProducerState]:
    return value[_PRODUCER.size :].decode(), ProducerState(*_PRODUCER.unpack_from(value))
