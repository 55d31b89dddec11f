"""Checkpoint: an LMDB environment with the state that was copied from the journal.

Before a segment of the journal is freed, its remaining messages and other changes are written here. The file
checkpoint_format.py describes the databases and their values. All values but the records carry a checksum
(checksummed.py).

After an unclean stop all transient messages are dropped in one small transaction, however many there are: it increases
the generation, and clears the counts of transient messages. Entries of earlier generations are ignored, and deleted
gradually.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import chain
from operator import attrgetter
from pathlib import Path

import lmdb

from truenext.model.batch import NO_MARK, Mark
from truenext.model.record import MESSAGE_KEY_SIZE, TIMER_SIZE
from truenext.store.changes import apply_pauses
from truenext.store.checkpoint_format import (
    CLEAN,
    COPY_FORMAT,
    DATA_FILE,
    DATABASES,
    DATABASES_MAX,
    FORMAT,
    FORMAT_VERSION,
    GENERATION,
    LOG_DIGEST,
    META_KEYS,
    NUMBER,
    OLD_COPY_FORMAT,
    PERSISTENT_TABLES,
    POSITION_KEYS,
    QUEUE,
    SALT,
    TRANSIENT_TABLES,
    UNCLEAN,
    CheckpointPosition,
    MessageTableNames,
    decode_paused,
    decode_position,
    decode_recovered,
    encode_paused,
    encode_producer,
    format_error,
    initial_meta,
    new_identity,
    producer_key,
)
from truenext.store.checksummed import ChecksummedDatabase
from truenext.store.folder import sync_folder
from truenext.store.journal import SEGMENT_BYTES
from truenext.store.lmdb_metas import is_uninitialized, read_metas
from truenext.store.message_tables import Marks, MessageTables
from truenext.store.overlay import SegmentIndex
from truenext.store.store import Recovered, UndecodedMessage
from truenext.store.store_errors import copy_error, damage_error, empty_folder_error, no_copy_error

MAP_SIZE = 1 << 40
"""Bytes of address space, which limit the size of the checkpoint. The file only takes the space that its content has
needed."""

TRANSACTION_BYTES_MAX = 4 * 1024 * 1024
"""Largest number of bytes of records in one transaction; a larger message has a transaction of its own. LMDB keeps the
changed pages of a transaction in the process's memory."""

TRANSACTION_KEYS_MAX = 1000
"""Largest number of messages or timers in one transaction of the checkpoint. Each of them may change another page."""

_LMDB_MAJOR = 0
"""Version of LMDB's format, 0.9. Without this an environment variable would decide the format of a new store."""

_META_PAGES = 2


class Checkpoint:
    """LMDB environment of one store. Each method that writes uses one transaction, and syncs it before it returns.

    All methods raise StoreError if a value is damaged, lmdb.Error or OSError if LMDB or the disk fails.
    """

    def __init__(
        self,
        folder: Path,
        *,
        may_be_new: bool = True,
        map_size: int = MAP_SIZE,
        segment_bytes: int = SEGMENT_BYTES,
        identity: str = "",
        is_copy: bool = False,
        upgrade: Callable[[lmdb.Environment], None] = lambda env: None,
    ) -> None:
        """Open the checkpoint. Make a new one if it is missing and `may_be_new`. `segment_bytes` is the segment size
        for a new journal, `identity` the id of a new store; empty means a random one. `is_copy` tells whether the
        folder is a copy of a log. `upgrade` converts a checkpoint of an earlier format.

        Raises: ConfigurationError if the folder is a copy, and is not opened as one, or the other way round; StoreError
        if the checkpoint is damaged, or another version of truenext wrote it; lmdb.Error, OSError if it cannot be
        opened
        """
        folder.mkdir(mode=0o700, exist_ok=True)
        self._data = folder.parent
        self._format = COPY_FORMAT if is_copy else FORMAT_VERSION
        self._file = path = folder / DATA_FILE
        if path.exists() and path.stat().st_size:
            self._check_file(path, may_be_new=may_be_new)
        elif may_be_new:
            _make(folder, map_size, segment_bytes, identity or new_identity(), self._format)
        else:
            # A new one would have another salt, so that the journal would look empty and be overwritten.
            problem = f"lmdb/{DATA_FILE} is empty" if path.exists() else f"lmdb/{DATA_FILE} is missing"
            raise damage_error("checkpoint", f"{problem}, but the journal exists", self._data)
        self._env = _open(folder, map_size)
        self._databases: list[lmdb._Database] = []
        try:
            # A commit in progress when a broker was killed may be in the system's memory only.
            self._env.sync(True)
            upgrade(self._env)
            with self._env.begin(write=True) as txn:
                entries = txn.stat()["entries"]
                if not entries:
                    raise damage_error("checkpoint", "it is empty", self._data)
                self._meta = self._open_checksummed_database(txn, b"meta")
                self._check_format(txn)
                if entries != len(DATABASES):
                    raise damage_error(
                        "checkpoint", f"it has {entries} databases instead of {len(DATABASES)}", self._data
                    )
                self._persistent = self._open_message_tables(txn, PERSISTENT_TABLES)
                self._transient = self._open_message_tables(txn, TRANSIENT_TABLES, self._meta.need(txn, b"generation"))
                self._queues = self._open_checksummed_database(txn, b"queues")
                self._producers = self._open_checksummed_database(txn, b"producers")
                self._timers = self._open_checksummed_database(txn, b"timers")
                self.salt: int = SALT.unpack(self._meta.need(txn, b"salt"))[0]
                self.segment_bytes: int = NUMBER.unpack(self._meta.need(txn, b"segment bytes"))[0]
        except BaseException:
            self._env.close()
            raise

    def close(self) -> None:
        self._env.close()

    def _check_file(self, path: Path, *, may_be_new: bool) -> None:
        """Check the meta pages, because LMDB does not check them."""
        if may_be_new and is_uninitialized(path):
            raise empty_folder_error(self._data)
        found, problem = read_metas(path)
        if found and problem:
            raise damage_error("checkpoint", problem, self._data)

    def _open_database(self, txn: lmdb.Transaction[bytes], name: bytes) -> lmdb._Database:
        try:
            db = self._env.open_db(name, txn=txn, create=False)
        except lmdb.NotFoundError as error:
            raise damage_error("checkpoint", f"the database {name.decode()} is missing", self._data) from error
        if any(db.flags().values()):
            raise damage_error("checkpoint", f"the database {name.decode()} has unexpected flags", self._data)
        self._databases.append(db)
        return db

    def _open_checksummed_database(self, txn: lmdb.Transaction[bytes], name: bytes) -> ChecksummedDatabase:
        return ChecksummedDatabase(self._open_database(txn, name), name, self._data)

    def _open_message_tables(
        self, txn: lmdb.Transaction[bytes], kind: MessageTableNames, generation: bytes = b""
    ) -> MessageTables:
        return MessageTables(
            self._open_database(txn, kind.messages),
            self._open_checksummed_database(txn, kind.marks),
            self._open_checksummed_database(txn, kind.counts),
            generation,
            self._data,
        )

    def _check_format(self, txn: lmdb.Transaction[bytes]) -> None:
        """Check the format before anything is changed. Raises: StoreError for another format"""
        meta = self._meta
        # Formats 1 and 2 had no checksums.
        bare = meta.cursor(txn).get(b"format", b"")
        found = int.from_bytes(bare if len(bare) == FORMAT.size else meta.need(txn, b"format"))
        if found == self._format:
            return
        if self._format == COPY_FORMAT and found == OLD_COPY_FORMAT:
            meta.put(txn, b"format", FORMAT.pack(COPY_FORMAT))
            return
        if found in (COPY_FORMAT, OLD_COPY_FORMAT):
            raise copy_error(self._data)
        if found == FORMAT_VERSION:
            raise no_copy_error(self._data)
        raise format_error(self._data, found, self._format)

    # ---- Reading ----

    def read(self) -> tuple[Recovered, CheckpointPosition]:
        """Return the checkpoint's own state, and its position in the journal. The counts of messages are missing:
        `counts` reads them."""
        with self._env.begin() as txn:
            meta = {name: self._meta.need(txn, name) for name in META_KEYS}
            if self._format == COPY_FORMAT:
                meta[LOG_DIGEST] = self._meta.need(txn, LOG_DIGEST)
            recovered = decode_recovered(meta, self._queues.items(txn), self._producers.items(txn))
        return recovered, decode_position(meta)

    def counts(self) -> Counter[bytes]:
        """Return the number of messages by lane key, persistent and transient ones together.

        Raises: StoreError if the counts do not agree with the number of stored messages
        """
        with self._env.begin() as txn:
            return self._persistent.read_counts(txn) + self._transient.read_counts(txn)

    def transient_by_key(self, keys: Iterable[bytes]) -> dict[bytes, bool]:
        """Return those of the keys that have a message in the checkpoint. The value is True for a transient message.

        Raises: StoreError if damage hides whether a message exists
        """
        found: dict[bytes, bool] = {}
        persistent, transient, generation = self._persistent, self._transient, self._transient.generation
        with self._env.begin() as txn:
            messages, transients = txn.cursor(persistent.messages), txn.cursor(transient.messages)
            for key in keys:
                if persistent.has(messages, key):
                    found[key] = False
                elif transient.has(transients, generation + key):
                    found[key] = True
        return found

    def snapshot(self) -> lmdb.Transaction[bytes]:
        """Return a read transaction, which sees only changes committed by now. Use the transaction in a `with`
        statement."""
        return self._env.begin()

    def position(self, snapshot: lmdb.Transaction[bytes]) -> CheckpointPosition:
        """Return the position in the journal."""
        return decode_position({name: self._meta.need(snapshot, name) for name in POSITION_KEYS})

    def identity(self, snapshot: lmdb.Transaction[bytes]) -> str:
        return self._meta.need(snapshot, b"identity").decode()

    def write_copy(self, snapshot: lmdb.Transaction[bytes], file: int) -> None:
        """Write the data file as of the snapshot into an open file, such as a pipe, without unused pages."""
        self._env.copyfd(file, compact=True, txn=snapshot)

    def verify(self, verify_record: Callable[[bytes, bytes], None]) -> None:
        """Read everything. `verify_record` gets key and record of each message and content.

        Raises: StoreError if a value, an order or a count is damaged; what `verify_record` raises
        """
        self.read()
        self.counts()
        with self._env.begin() as txn:
            for tables in (self._persistent, self._transient):
                for key, record in txn.cursor(tables.messages):
                    # Keys of transients begin with their generation.
                    verify_record(key[-MESSAGE_KEY_SIZE:], record)
                for _ in tables.marks.items(txn):
                    pass
            for _ in self._timers.items(txn):
                pass

    def file_size(self) -> int:
        """Return the bytes of the data file, unused pages included."""
        return self._file.stat().st_size

    def page(self, snapshot: lmdb.Transaction[bytes], lane: bytes, after_sequence: int) -> Iterator[UndecodedMessage]:
        """Return a lane's messages after `after_sequence`, in order. If a message shares a content, the content is not
        read."""
        messages = self._persistent.page(snapshot, lane, after_sequence)
        transients = self._transient.page(snapshot, lane, after_sequence)
        first = next(transients, None)
        if first is None:
            return messages
        return merge(messages, chain((first,), transients), key=attrgetter("key"))

    def find(self, snapshot: lmdb.Transaction[bytes], keys: Iterable[bytes]) -> Iterator[UndecodedMessage]:
        """Yield the messages with these keys that are in the checkpoint, in the order of `keys`. If a message shares a
        content, the content is not read."""
        for key in keys:
            found = self._persistent.find(snapshot, key) or self._transient.find(snapshot, key)
            if found is not None:
                yield found
            else:
                self._persistent.check_order_around(snapshot, key)
                self._transient.check_order_around(snapshot, key)

    def content(self, snapshot: lmdb.Transaction[bytes], key: bytes) -> bytes:
        """Return the record of a content; empty if the checkpoint lacks this content."""
        record = self._persistent.record(snapshot, key)
        return (self._transient.record(snapshot, key) or b"") if record is None else record

    def mark(self, key: bytes) -> Mark:
        """Return the mark of a message, persistent or transient; NO_MARK if the checkpoint has none."""
        with self._env.begin() as txn:
            return self._persistent.mark(txn, key) or self._transient.mark(txn, key) or NO_MARK

    def timers(self, snapshot: lmdb.Transaction[bytes], after: bytes) -> Iterator[bytes]:
        """Yield all timers that are greater than `after`, in order."""
        last = after
        for timer, _ in self._timers.iter_from(snapshot, after):
            if timer == after:
                continue
            if timer < last or len(timer) != TIMER_SIZE:
                raise damage_error(
                    "checkpoint", f"timer {timer.hex()} is out of order: it follows {last.hex()}", self._data
                )
            last = timer
            yield timer

    def size(self) -> int:
        """Return the bytes of all pages in use. The file may be larger, because it never shrinks."""
        with self._env.begin() as txn:
            # The list of databases is in a database without a name.
            stats = [txn.stat(), *(txn.stat(db) for db in self._databases)]
            pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
            return (_META_PAGES + pages) * stats[0]["psize"]

    # ---- Writing ----

    def delete_messages(self, keys: Iterable[tuple[bytes, bool]]) -> None:
        """Delete messages and their marks. Each key comes with True for a transient message.

        Raises: StoreError if the checkpoint lacks one of these messages; then no message is deleted. Damage hides the
        missing message, and a later start could find it again.
        """
        keys_by_kind: tuple[list[bytes], list[bytes]] = ([], [])
        for key, is_transient in keys:
            keys_by_kind[is_transient].append(key)
        with self._env.begin(write=True) as txn:
            self._persistent.delete(txn, keys_by_kind[False])
            self._transient.delete(txn, keys_by_kind[True])

    def put_messages(self, messages: list[tuple[bytes, bytes]], *, are_transient: bool) -> None:
        """Write messages. Raises: StoreError if the checkpoint already has one of these messages; then no message is
        written"""
        tables = self._transient if are_transient else self._persistent
        with self._env.begin(write=True) as txn:
            tables.put(txn, messages)

    def set_timers(self, timers: Iterable[tuple[bytes, bool]]) -> None:
        """Set the timers that come with True, and clear those that come with False. A timer may be set or cleared
        already."""
        with self._env.begin(write=True) as txn:
            for timer, is_set in timers:
                if is_set:
                    self._timers.put(txn, timer, b"")
                else:
                    self._timers.delete(txn, timer)

    def put_marks(self, marks: Marks) -> None:
        """Write the marks of messages that the checkpoint has. Until `finish_checkpoint` the journal's marks override
        these."""
        with self._env.begin(write=True) as txn:
            self._put_marks(txn, marks)

    def _put_marks(self, txn: lmdb.Transaction[bytes], marks: Marks) -> None:
        # A message may have been removed by a later segment, or dropped: a mark must not outlive it.
        self._transient.put_marks(txn, self._persistent.put_marks(txn, marks))

    def finish_checkpoint(self, indexes: Iterable[SegmentIndex], marks: Marks, position: CheckpointPosition) -> None:
        """End the checkpoint of segments whose messages are written: write the other changes from `indexes`, the
        `marks` that are not written yet, and the new `position`."""
        with self._env.begin(write=True) as txn:
            self._put_marks(txn, marks)
            for index in indexes:
                self._finish_index(txn, index)
            self._meta.put(txn, b"segment", NUMBER.pack(position.segment))
            self._meta.put(txn, b"frame", NUMBER.pack(position.frame))
            self._put_if_greater(txn, b"durable frame", position.durable_frame)
            if position.digest:
                self._meta.put(txn, LOG_DIGEST, position.digest)

    def save_journal_end(self, durable_frame: int, sequence_limit: int) -> None:
        """Record that the frames up to this number are durable. Also record `sequence_limit`, the limit that one of
        these frames has set, unless it is 0."""
        with self._env.begin(write=True) as txn:
            self._put_if_greater(txn, b"durable frame", durable_frame)
            self._put_if_greater(txn, b"sequence limit", sequence_limit)

    def _put_if_greater(self, txn: lmdb.Transaction[bytes], name: bytes, number: int) -> None:
        # `save_journal_end` may have stored a higher number than that of a later checkpoint.
        if number > NUMBER.unpack(self._meta.need(txn, name))[0]:
            self._meta.put(txn, name, NUMBER.pack(number))

    def become_copy(self, digest: bytes) -> None:
        """Make the folder a copy of a log. `digest` is that of the row of the checkpoint's last frame."""
        with self._env.begin(write=True) as txn:
            self._meta.put(txn, b"format", FORMAT.pack(COPY_FORMAT))
            self._meta.put(txn, LOG_DIGEST, digest)

    def renew(self) -> str:
        """Give the folder a new identity, and return that."""
        with self._env.begin(write=True) as txn:
            return self._renew(txn)

    def detach(self) -> str:
        """Make the folder, which is a copy of a log, an ordinary one with a new identity, and return that."""
        with self._env.begin(write=True) as txn:
            self._meta.put(txn, b"format", FORMAT.pack(FORMAT_VERSION))
            self._meta.delete(txn, LOG_DIGEST)
            return self._renew(txn)

    def _renew(self, txn: lmdb.Transaction[bytes]) -> str:
        identity = new_identity()
        self._meta.put(txn, b"identity", identity.encode())
        return identity

    def drop_transients(self) -> None:
        """Drop all transient messages at once. `delete_old_transients` deletes their entries later."""
        transient = self._transient
        generation = GENERATION.pack(GENERATION.unpack(transient.generation)[0] + 1)
        with self._env.begin(write=True) as txn:
            self._meta.put(txn, b"generation", generation)
            transient.counts.clear(txn)
        transient.generation = generation

    def delete_old_transients(self, keys_max: int) -> bool:
        """Delete up to `keys_max` entries of earlier generations. Return whether there may be more."""
        with self._env.begin() as txn:
            if not self._transient.has_old_generations(txn):
                return False
        with self._env.begin(write=True) as txn:
            self._transient.delete_old_generations(txn, keys_max)
        return True

    def _finish_index(self, txn: lmdb.Transaction[bytes], index: SegmentIndex) -> None:
        for number, name in index.queues.items():
            if name:
                self._queues.put(txn, QUEUE.pack(number), name.encode())
            else:
                self._queues.delete(txn, QUEUE.pack(number))
        if index.paused:
            paused = apply_pauses(decode_paused(self._meta.need(txn, b"paused")), index.paused)
            self._meta.put(txn, b"paused", encode_paused(paused))
        # Before the producers, because a producer can be forgotten and come back.
        for name in index.forgotten_producers:
            self._producers.delete(txn, producer_key(name))
        for name, state in index.producers.items():
            self._producers.put(txn, producer_key(name), encode_producer(name, state))
        self._put_if_greater(txn, b"sequence limit", index.sequence_limit)
        if index.redelivered_below:
            self._meta.put(txn, b"redelivered below", NUMBER.pack(index.redelivered_below))
        if index.clean_stop is not None:
            self._meta.put(txn, b"clean stop", CLEAN if index.clean_stop else UNCLEAN)


def _make(folder: Path, map_size: int, segment_bytes: int, identity: str, format_number: int) -> None:
    """Make a new checkpoint. The file gets its name once the checkpoint is complete, because LMDB rejects a file that a
    crash has cut.

    Raises: lmdb.Error, OSError if LMDB or the disk fails
    """
    new = folder / "new"
    new.unlink(missing_ok=True)
    # Without a lock, which would be one more file.
    with _open(new, map_size, subdir=False, lock=False) as env, env.begin(write=True) as txn:
        databases = {name: env.open_db(name, txn=txn) for name in DATABASES}
        meta = ChecksummedDatabase(databases[b"meta"], b"meta", folder.parent)
        values = initial_meta(identity.encode(), secrets.token_bytes(SALT.size), segment_bytes)
        values[b"format"] = FORMAT.pack(format_number)
        if format_number == COPY_FORMAT:
            values[LOG_DIGEST] = b""
        for name, value in values.items():
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
